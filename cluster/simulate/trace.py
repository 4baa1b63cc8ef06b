"""The format of a routing trace: a folder with `trace.json` and chunks in safetensors.

A chunk holds whole forward passes in recorded order, one request after another (t rows, n forward passes, r requests
that begin in the chunk, u tokens without an embedding in earlier chunks):

    tokens                 int32   [t]            the input token of each row
    probabilities          float16 [t, L, E]      softmax of the router's logits
    ids                    uint8   [t, L, K]      the experts picked, in the model's order (uint16 above 256 experts)
    weights                float16 [t, L, K]      their routing weights
    next_ids               uint8   [t, L, D, K]   the experts that the router of layer l + d picks on layer l's input,
                                                  d = 1..D, greatest logit first; where l + d >= L layer l + d - L, for
                                                  the next forward (zeros in older traces)
    next_probabilities     float16 [t, L, D, K]   their softmax probabilities
    iterations             int64   [n, 4]         request, iteration in it, rows, 1 for decode and 0 for prefill
    requests               int64   [r, 2]         request, tokens of its prompt
    prompt_embeddings      float32 [r, H]         mean of the input embeddings of the prompt's tokens
    embedding_tokens       int32   [u]            with `embeddings` gives the mean input embedding of any iteration
    embeddings             float16 [u, H]

Layers are MoE layers, counted from 0. A row takes 4 + L * (2E + K * (s + 2) * (1 + D)) bytes, s = 1 or 2 for an
expert's number: 996 for the default model, 1476 for Mixtral-8x7B with D = 4; besides, 2H + 4 for each distinct token.
`trace.json` is rewritten after each chunk: the folder is a valid trace at any moment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.numpy import load

from ...errors import TraceError, size

HEADER_NAME = "trace.json"
MAX_DISTANCE = 8
_MOST_PAIRS = 8 << 30  # bytes of counts of all pairs of experts of a layer
_MOST_EXPERTS = 1 << 22  # in all layers: no model has a hundredth of it, and a replay holds lists of all
PREFILL, DECODE = 0, 1
Count = Annotated[int, Field(ge=1, strict=True)]
Whole = Annotated[int, Field(ge=0, strict=True)]
Seconds = Annotated[float, Field(ge=0)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Costs(_Frozen):
    """Measured compute times of the recording, in seconds: medians, for simulated machines."""

    forward_s: Seconds  # of a forward outside its layers: embedding, head, sampling, scheduling
    dense_s: Seconds  # of a layer's attention, norms and router at one row
    dense_row_s: Seconds  # for each further row
    expert_s: Seconds  # of one expert at one row, with its share of the MoE layer's other costs
    expert_row_s: Seconds  # for each further row


class ChunkRecord(_Frozen):
    """One chunk. requests: that begin in it. first_request: added to its request numbers, since the chunks of merged
    traces each number from 0."""

    file: Annotated[str, Field(pattern=r"^chunk-[0-9]{5}\.safetensors$")]
    bytes: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    rows: Count
    forwards: Count
    requests: Whole
    first_request: Whole


class TraceHeader(_Frozen):
    """The model and the chunks of a trace.

    Attributes:
        fingerprint: of the checkpoint's files; traces of different models are not merged.
        layers, experts, top_k, hidden: L, E, K and H. distances: D.
        slot_bytes: of one expert in `expert_dtype`, its compute dtype.
        complete: False while recording and after an interrupt.
        origin: where the tokens come from, such as "text, teacher-forced" or "sampled at 0.8".
        probabilities: False: not recorded; the picked experts share them equally.
        repeated_8grams: share of the 8-grams that occur earlier in their request; None: not known.
    """

    format_version: Literal[1] = 1
    model: str
    fingerprint: str
    layers: Count
    experts: Annotated[int, Field(ge=1, le=65536, strict=True)]
    top_k: Count
    hidden: Count
    distances: Annotated[int, Field(ge=0, le=MAX_DISTANCE, strict=True)]
    slot_bytes: Count
    expert_dtype: str
    costs: Costs | None = None
    complete: bool = False
    origin: str = ""
    probabilities: bool = True
    repeated_8grams: Annotated[float, Field(ge=0, le=1)] | None = None
    chunks: tuple[ChunkRecord, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> TraceHeader:
        if self.top_k > self.experts:
            raise ValueError(f"top-{self.top_k} of {self.experts} experts")
        if self.layers * self.experts > _MOST_EXPERTS:
            raise ValueError(f"{self.layers} layers of {self.experts} experts are more than any model has")
        if len({chunk.file for chunk in self.chunks}) != len(self.chunks):
            raise ValueError("two chunks have one name")
        return self

    @property
    def id_dtype(self) -> type[np.unsignedinteger[Any]]:
        return np.uint8 if self.experts <= 256 else np.uint16

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        picked = self.top_k * (np.dtype(self.id_dtype).itemsize + 2)
        return 4 + self.layers * (2 * self.experts + picked * (1 + self.distances))

    @property
    def rows(self) -> int:
        return sum(chunk.rows for chunk in self.chunks)

    @property
    def forwards(self) -> int:
        return sum(chunk.forwards for chunk in self.chunks)

    @property
    def requests(self) -> int:
        return sum(chunk.requests for chunk in self.chunks)

    def row_arrays(self) -> dict[str, tuple[type[np.generic], tuple[int, ...]]]:
        """dtype and shape, without the row axis, of each array with a row per token."""
        layers, top, d = self.layers, self.top_k, self.distances
        return {
            "tokens": (np.int32, ()),
            "probabilities": (np.float16, (layers, self.experts)),
            "ids": (self.id_dtype, (layers, top)),
            "weights": (np.float16, (layers, top)),
            "next_ids": (self.id_dtype, (layers, d, top)),
            "next_probabilities": (np.float16, (layers, d, top)),
        }

    def refuse_pairs(self, arrays: int, remedy: str) -> None:
        """Raises TraceError: so many arrays [L, E, E] of eight bytes take more than `_MOST_PAIRS`."""
        nbytes = arrays * 8 * self.layers * self.experts**2
        if nbytes > _MOST_PAIRS:
            raise TraceError(f"pairs of {self.experts} experts in {self.layers} layers take {size(nbytes)}", remedy)

    def same_model(self, other: TraceHeader) -> bool:
        """Whether two traces can be merged."""
        names = {"layers", "experts", "top_k", "hidden", "distances", "slot_bytes", "fingerprint", "expert_dtype"}
        return self.model_dump(include=names) == other.model_dump(include=names)


_AGAIN = "record it again, or use another trace"
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, eq=False)
class Iteration:
    """One forward pass of one request: T rows. Shapes as in the module docstring, with t = T."""

    decode: bool
    tokens: NDArray[np.int32]
    probabilities: NDArray[np.float16]
    ids: NDArray[np.unsignedinteger[Any]]
    weights: NDArray[np.float16]
    next_ids: NDArray[np.unsignedinteger[Any]]
    next_probabilities: NDArray[np.float16]
    embedding: NDArray[np.float32]  # [H], mean of the rows' input embeddings

    def lookahead(self, layer: int, distance: int) -> NDArray[np.float64] | None:
        """Probabilities [T, E] of layer `layer + distance`'s router on this layer's input; None: not recorded.

        Only the recorded top K are finite, without ties, in their order. Past the last layer the layers of the next
        forward follow.
        """
        _, layers, distances, _ = self.next_ids.shape
        if not 1 <= distance <= distances:
            return None
        if layer + distance >= layers and not self.next_probabilities[0, layer, distance - 1].any():
            return None
        chosen = np.s_[:, layer : layer + 1, distance - 1]
        return scattered(self.next_ids[chosen], self.next_probabilities[chosen], self.probabilities.shape[2])[0]


def scattered(
    ids: NDArray[np.unsignedinteger[Any]], probabilities: NDArray[np.float16], experts: int
) -> NDArray[np.float64]:
    """Recorded probabilities [T, n, K] of `ids` as scores of all experts [n, T, E]; see `Iteration.lookahead`."""
    tokens, layers, top = ids.shape
    scores = np.full((layers, tokens, experts), -np.inf)
    places = np.arange(layers)[:, None, None], np.arange(tokens)[:, None], ids.transpose(1, 0, 2)
    scores[places] = (probabilities - 1e-10 * np.arange(top)).transpose(1, 0, 2)  # below fp16's least step
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
        TraceError: the folder is not a trace, or a chunk is missing or has another size.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header = read_header(path)
        for chunk in self.header.chunks:
            file = path / chunk.file
            if not file.is_file() or file.stat().st_size != chunk.bytes:
                raise TraceError(f"'{file}' is missing or does not have {chunk.bytes} bytes", _AGAIN)
            said = chunk.rows * self.header.row_bytes + chunk.requests * 4 * self.header.hidden + 32 * chunk.forwards
            if said > chunk.bytes:
                raise TraceError(
                    f"'{file}' has {chunk.bytes} bytes, by '{path / HEADER_NAME}' its rows and requests have {said}",
                    _AGAIN,
                )

    def requests(self) -> Iterator[Request]:
        """The requests in recorded order.

        Raises:
            TraceError: a chunk's bytes do not match, or its contents are not routing.
        """
        table = _Embeddings(self.header.hidden)
        partial: _PartialRequest | None = None
        for record in self.header.chunks:
            arrays = read_chunk(self.path, self.header, record)
            table.extend(arrays["embedding_tokens"], arrays["embeddings"])
            starts = dict(zip(arrays["requests"][:, 0].tolist(), range(len(arrays["requests"])), strict=True))
            row = 0
            for number, index, rows, phase in arrays["iterations"].tolist():
                part = {name: arrays[name][row : row + rows] for name in self.header.row_arrays()}
                row += rows
                request = record.first_request + number
                if index == 0:
                    if number not in starts or (partial is not None and request <= partial.number):
                        raise self._wrong(record, f"request {number} begins where it cannot")
                    if partial is not None:
                        yield partial.request()
                    place = starts[number]
                    partial = _PartialRequest(
                        request, int(arrays["requests"][place, 1]),
                        arrays["prompt_embeddings"][place], [],
                    )  # fmt: skip
                elif partial is None or partial.number != request or len(partial.parts) != index:
                    raise self._wrong(record, f"iteration {index} of request {number} follows no iteration before it")
                embedding = table.mean(part["tokens"])
                if embedding is None:
                    raise self._wrong(record, "a token's embedding is missing")
                partial.parts.append(Iteration(decode=phase == DECODE, embedding=embedding, **part))
        if partial is not None:
            yield partial.request()

    def _wrong(self, record: ChunkRecord, what: str) -> TraceError:
        return TraceError(f"'{self.path / record.file}': {what}", _AGAIN)


@dataclass(eq=False)
class _PartialRequest:
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
    """The header of a trace. Raises TraceError: it is missing or malformed."""
    file = path / HEADER_NAME
    try:
        return TraceHeader.model_validate_json(file.read_bytes())
    except OSError as error:
        what = f"'{path}' is not a routing trace: {error.strerror}"
        raise TraceError(what, "record one with `tiermoe record`") from error
    except ValidationError as error:
        finding = error.errors(include_url=False)[0]
        where = ".".join(map(str, finding["loc"])) or "the file"
        raise TraceError(f"'{file}' is malformed: {where}: {finding['msg']}", _AGAIN) from error


def read_chunk(path: Path, header: TraceHeader, record: ChunkRecord) -> Arrays:
    """The arrays of one chunk, checked: bytes, dtypes, shapes, ranges.

    Raises:
        TraceError: they differ from the header, or are not routing.
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
        raise TraceError(f"'{file}' is not a safetensors file: {error}", _AGAIN) from error
    problem = check_chunk(header, record, arrays)
    if problem is not None:
        raise TraceError(f"'{file}': {problem}", _AGAIN)
    return arrays


def check_chunk(header: TraceHeader, record: ChunkRecord, arrays: Arrays) -> str | None:
    """The problem of a chunk; None: it is valid."""
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
