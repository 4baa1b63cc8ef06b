"""Read a routing trace, chunk by chunk, refusing what is not one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load

from ...errors import TraceError
from .trace_format import DECODE, HEADER_NAME, ChunkRecord, TraceHeader

_AGAIN = "record it again, or use another trace"
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Iteration:
    """One forward pass of one request: T rows. Shapes as in `trace_format`, with t = T."""

    decode: bool
    tokens: NDArray[np.int32]
    probabilities: NDArray[np.float16]
    ids: NDArray[np.unsignedinteger[Any]]
    weights: NDArray[np.float16]
    next_ids: NDArray[np.unsignedinteger[Any]]
    next_probabilities: NDArray[np.float16]
    embedding: NDArray[np.float32]  # [H], mean of the rows' input embeddings

    def lookahead(self, layer: int, distance: int) -> NDArray[np.float64] | None:
        """Scores [T, E] of layer `layer + distance`'s router on this layer's input, as far as they were recorded.

        These are probabilities. Only the recorded top K are finite, in their order (fp16 makes ties of what was none);
        None beyond the recorded distances. Layers are counted on past the last one, into the next forward; None for
        those where the trace was recorded without them.
        """
        _, layers, distances, top = self.next_ids.shape
        if not 1 <= distance <= distances:
            return None
        if layer + distance >= layers and not self.next_probabilities[0, layer, distance - 1].any():
            return None
        ids = self.next_ids[:, layer, distance - 1].astype(np.int64)
        held = self.next_probabilities[:, layer, distance - 1] - 1e-10 * np.arange(top)  # below fp16's least step
        scores = np.full((len(ids), self.probabilities.shape[2]), -np.inf)
        np.put_along_axis(scores, ids, held, axis=1)
        return scores


@dataclass(frozen=True, eq=False)
class Request:
    """A request and its forward passes in order. embedding: of its prompt [H]."""

    number: int
    prompt_tokens: int
    embedding: NDArray[np.float32]
    iterations: tuple[Iteration, ...]


class Trace:
    """A trace on disk, read with one chunk and one request in memory.

    Raises:
        TraceError: the folder is no trace, or a chunk is missing or has not its size.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = read_header(path)
        for chunk in self.header.chunks:
            file = path / chunk.file
            if not file.is_file() or file.stat().st_size != chunk.bytes:
                raise TraceError(f"'{file}' is missing or has not the {chunk.bytes} bytes that it should", _AGAIN)

    def requests(self) -> Iterator[Request]:
        """The requests in recorded order.

        Raises:
            TraceError: bytes do not match, or are not what a trace holds.
        """
        table = _Embeddings(self.header.hidden)
        begun: _Begun | None = None
        for record in self.header.chunks:
            arrays = read_chunk(self.path, self.header, record)
            table.extend(arrays["embedding_tokens"], arrays["embeddings"])
            starts = dict(zip(arrays["requests"][:, 0].tolist(), range(len(arrays["requests"])), strict=True))
            row = 0
            for number, index, rows, phase in arrays["iterations"].tolist():
                part = {name: arrays[name][row : row + rows] for name in self.header.row_arrays()}
                row += rows
                if index == 0:
                    if number not in starts or (begun is not None and record.first_request + number <= begun.number):
                        raise self._wrong(record, f"request {number} begins where it cannot")
                    if begun is not None:
                        yield begun.request()
                    place = starts[number]
                    begun = _Begun(
                        record.first_request + number, int(arrays["requests"][place, 1]),
                        arrays["prompt_embeddings"][place], [],
                    )  # fmt: skip
                elif begun is None or begun.number != record.first_request + number or len(begun.parts) != index:
                    raise self._wrong(record, f"iteration {index} of request {number} follows on nothing")
                embedding = table.mean(part["tokens"])
                if embedding is None:
                    raise self._wrong(record, "a token's embedding is missing")
                begun.parts.append(Iteration(decode=phase == DECODE, embedding=embedding, **part))
        if begun is not None:
            yield begun.request()

    def _wrong(self, record: ChunkRecord, what: str) -> TraceError:
        return TraceError(f"'{self.path / record.file}': {what}", _AGAIN)


@dataclass(eq=False)
class _Begun:
    number: int
    prompt_tokens: int
    embedding: NDArray[np.float32]
    parts: list[Iteration]

    def request(self) -> Request:
        return Request(self.number, self.prompt_tokens, self.embedding, tuple(self.parts))


class _Embeddings:
    """Input embeddings of the tokens seen so far, by token."""

    def __init__(self, hidden: int) -> None:
        self._place: dict[int, int] = {}
        self._rows = np.empty((0, hidden), np.float16)

    def extend(self, tokens: NDArray[np.int32], rows: NDArray[np.float16]) -> None:
        for i, token in enumerate(tokens.tolist()):
            self._place[token] = len(self._rows) + i
        self._rows = np.concatenate([self._rows, rows])

    def mean(self, tokens: NDArray[np.int32]) -> NDArray[np.float32] | None:
        try:
            places = [self._place[token] for token in tokens.tolist()]
        except KeyError:
            return None
        return self._rows[places].astype(np.float32).mean(axis=0)


def read_header(path: Path) -> TraceHeader:
    """The header of a trace.

    Raises:
        TraceError: there is none, or it is malformed.
    """
    file = path / HEADER_NAME
    try:
        return TraceHeader.model_validate_json(file.read_bytes())
    except OSError as error:
        what = f"'{path}' is no routing trace: {error.strerror}"
        raise TraceError(what, "record one with `tiermoe record`") from error
    except ValidationError as error:
        finding = error.errors(include_url=False)[0]
        where = ".".join(map(str, finding["loc"])) or "the file"
        raise TraceError(f"'{file}' is malformed: {where}: {finding['msg']}", _AGAIN) from error


def read_chunk(path: Path, header: TraceHeader, record: ChunkRecord) -> Arrays:
    """The arrays of one chunk, checked: bytes, dtypes, shapes, ranges.

    Raises:
        TraceError: they are not what the header says, or cannot be routing.
    """
    file = path / record.file
    try:
        data = file.read_bytes()
    except OSError as error:
        raise TraceError(f"'{file}' cannot be read: {error.strerror}", _AGAIN) from error
    if len(data) != record.bytes or hashlib.sha256(data).hexdigest() != record.sha256:
        raise TraceError(f"'{file}' is truncated or corrupt: its bytes do not match", _AGAIN)
    try:
        arrays: Arrays = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise TraceError(f"'{file}' is no safetensors file: {error}", _AGAIN) from error
    problem = check_chunk(header, record, arrays)
    if problem is not None:
        raise TraceError(f"'{file}': {problem}", _AGAIN)
    return arrays


def check_chunk(header: TraceHeader, record: ChunkRecord, arrays: Arrays) -> str | None:
    """What is wrong with a chunk; None if nothing is."""
    embedded = len(arrays["embedding_tokens"]) if "embedding_tokens" in arrays else 0
    expected: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
        name: (dtype, (record.rows, *shape)) for name, (dtype, shape) in header.row_arrays().items()
    }
    expected |= {
        "iterations": (np.int64, (record.forwards, 4)),
        "requests": (np.int64, (record.requests, 2)),
        "prompt_embeddings": (np.float32, (record.requests, header.hidden)),
        "embedding_tokens": (np.int32, (embedded,)),
        "embeddings": (np.float16, (embedded, header.hidden)),
    }
    if set(arrays) != set(expected):
        return f"its arrays are {', '.join(sorted(arrays))}"
    for name, (dtype, shape) in expected.items():
        if arrays[name].dtype != dtype or arrays[name].shape != shape:
            return f"{name} is {arrays[name].dtype} {list(arrays[name].shape)}, not {np.dtype(dtype)} {list(shape)}"
    for name in ("probabilities", "next_probabilities"):
        if not ((arrays[name] >= 0) & (arrays[name] <= 1)).all():
            return f"{name} are not all within [0, 1]"
    for name in ("weights", "prompt_embeddings", "embeddings"):
        if not np.isfinite(arrays[name]).all():
            return f"{name} are not all finite"
    for name in ("ids", "next_ids"):
        if arrays[name].size and arrays[name].max() >= header.experts:
            return f"{name} name experts from {header.experts} on"
    picked = np.sort(arrays["ids"], axis=2)
    if (picked[..., 1:] == picked[..., :-1]).any():
        return "a token picks one expert twice"
    steps = arrays["iterations"]
    if (steps[:, :2] < 0).any() or (steps[:, 2] < 1).any() or not np.isin(steps[:, 3], (0, 1)).all():
        return "iterations have impossible numbers"
    if steps[:, 2].sum() != record.rows:
        return f"iterations have {steps[:, 2].sum()} rows, the chunk has {record.rows}"
    return None
