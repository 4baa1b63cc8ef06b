"""Writes a routing trace chunk by chunk; the folder is a valid trace at any moment."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...actors.store.artifacts import encode_tensors
from ...errors import ConfigError, TraceError
from ..report.files import writing
from .trace import DECODE, HEADER_NAME, PREFILL, ChunkRecord, Costs, TraceHeader, read_header

CHUNK_BYTES = 16 << 20
NGRAM = 8
MOST_REPEATED = 0.15  # of the 8-grams; held-out text has 0.05 to 0.09, greedy continuations of small models 0.8
Embed = Callable[[NDArray[np.int32]], NDArray[np.floating]]  # tokens [n] -> input embeddings [n, H]


@dataclass(frozen=True, eq=False)
class Rows:
    """T rows of one forward pass; shapes as in the docstring of `trace`, any floating or integer dtype."""

    tokens: NDArray[np.integer]
    probabilities: NDArray[np.floating]
    ids: NDArray[np.integer]
    weights: NDArray[np.floating]
    next_ids: NDArray[np.integer]
    next_probabilities: NDArray[np.floating]

    def part(self, start: int, stop: int) -> Rows:
        """Some of the rows."""
        return Rows(**{field.name: getattr(self, field.name)[start:stop] for field in fields(self)})


class Repeats:
    """Counts the 8-grams that occur earlier in their request. A model in a loop makes everything look recently used."""

    def __init__(self) -> None:
        self.ngrams = self.repeated = 0
        self.begin()

    def begin(self) -> None:
        """The next request begins."""
        self._seen: set[tuple[int, ...]] = set()
        self._last: tuple[int, ...] = ()

    def add(self, tokens: Sequence[int]) -> None:
        """The next tokens of the request."""
        for token in tokens:
            self._last = (*self._last[-NGRAM + 1 :], token)
            if len(self._last) == NGRAM:
                self.ngrams += 1
                self.repeated += self._last in self._seen
                self._seen.add(self._last)

    @property
    def share(self) -> float | None:
        """None: no request has eight tokens."""
        return self.repeated / self.ngrams if self.ngrams else None


class TraceWriter:
    """Writes forward passes to a new trace, with one chunk in memory.

    Args:
        out: new or empty folder.
        header: without chunks.
        chunk_bytes: a chunk is written once it has as many; a single forward may exceed it.

    Raises:
        ConfigError: `out` is not empty or cannot be made.
    """

    def __init__(self, out: Path, header: TraceHeader, embed: Embed, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._out, self._embed, self._chunk_bytes = out, embed, chunk_bytes
        self.header = header.model_copy(update={"chunks": (), "complete": False})
        self._embedded: set[int] = set()
        self._request = -1
        self._iteration = 0
        self._repeats = Repeats()
        self._clear()
        fresh_folder(out)
        self._write_header()

    def begin(self, prompt: Sequence[int]) -> None:
        """The next request begins."""
        self._request += 1
        self._iteration = 0
        self._repeats.begin()
        self._requests.append((self._request, len(prompt)))
        tokens = np.asarray(prompt, np.int32)
        self._prompts.append(np.asarray(self._embed(tokens), np.float32).mean(axis=0))

    def add(self, rows: Rows, decode: bool) -> None:
        """A forward pass of the request that began last."""
        self._iterations.append((self._request, self._iteration, len(rows.tokens), DECODE if decode else PREFILL))
        self._iteration += 1
        self._repeats.add(rows.tokens.tolist())
        for name, (dtype, _) in self.header.row_arrays().items():
            self._rows[name].append(getattr(rows, name).astype(dtype))
        for token in np.unique(rows.tokens).tolist():
            if token not in self._embedded:
                self._embedded.add(token)
                self._tokens.append(token)
        self._row_count += len(rows.tokens)
        if self._row_count * self.header.row_bytes >= self._chunk_bytes:
            self._flush()

    def close(self, complete: bool, costs: Costs | None = None, repeats: bool = True) -> TraceHeader:
        """Write the last chunk and the header.

        Args:
            complete: everything requested was recorded. repeats: the tokens are known, so repeats among them count.
        """
        if self._iterations:
            self._flush()
        self.header = self.header.model_copy(
            update={
                "complete": complete, "costs": costs, "repeated_8grams": self._repeats.share if repeats else None,
            }
        )  # fmt: skip
        self._write_header()
        return self.header

    def _flush(self) -> None:
        hidden, begun = self.header.hidden, [r for r in self._requests if r[0] <= self._iterations[-1][0]]
        tokens = np.asarray(self._tokens, np.int32)
        embeddings = self._embed(tokens) if len(tokens) else np.empty((0, hidden))
        arrays: dict[str, NDArray[Any]] = {name: np.concatenate(parts) for name, parts in self._rows.items()}
        arrays |= {
            "iterations": np.asarray(self._iterations, np.int64),
            "requests": np.asarray(begun, np.int64).reshape(-1, 2),
            "prompt_embeddings": np.asarray(self._prompts[: len(begun)], np.float32).reshape(-1, hidden),
            "embedding_tokens": tokens,
            "embeddings": np.asarray(embeddings, np.float16).reshape(-1, hidden),
        }
        data = encode_tensors(arrays)
        file = f"chunk-{len(self.header.chunks):05d}.safetensors"
        replace_file(self._out / file, data)
        record = ChunkRecord(
            file=file, bytes=len(data), sha256=hashlib.sha256(data).hexdigest(), rows=self._row_count,
            forwards=len(self._iterations), requests=len(begun), first_request=0,
        )  # fmt: skip
        self.header = self.header.model_copy(update={"chunks": (*self.header.chunks, record)})
        self._write_header()
        self._clear()

    def _clear(self) -> None:
        self._rows: dict[str, list[NDArray[Any]]] = {name: [] for name in self.header.row_arrays()}
        self._iterations: list[tuple[int, int, int, int]] = []
        self._requests: list[tuple[int, int]] = []
        self._prompts: list[NDArray[np.float32]] = []
        self._tokens: list[int] = []
        self._row_count = 0

    def _write_header(self) -> None:
        replace_file(self._out / HEADER_NAME, self.header.model_dump_json(indent=1).encode() + b"\n")


def merge_traces(traces: Sequence[Path], out: Path) -> TraceHeader:
    """Concatenate traces of one model; chunk files are copied, requests numbered anew.

    Raises:
        TraceError: a folder is not a trace, or the models differ. ConfigError: `out` cannot be made.
    """
    headers = [read_header(path) for path in traces]
    for path, header in zip(traces[1:], headers[1:], strict=True):
        if not headers[0].same_model(header):
            raise TraceError(f"'{path}' is not of the model and settings of '{traces[0]}'", "merge traces of one model")
    fresh_folder(out)
    chunks: list[ChunkRecord] = []
    first = 0
    for path, header in zip(traces, headers, strict=True):
        for chunk in header.chunks:
            moved = chunk.model_copy(
                update={"file": f"chunk-{len(chunks):05d}.safetensors", "first_request": chunk.first_request + first}
            )
            _copy(path / chunk.file, out / moved.file)
            chunks.append(moved)
        first += header.requests
    shares = [(header.repeated_8grams, header.rows) for header in headers]
    known = [(share, rows) for share, rows in shares if share is not None]
    rows = sum(rows for _, rows in known)
    merged = headers[0].model_copy(
        update={
            "chunks": tuple(chunks), "complete": all(header.complete for header in headers),
            "origin": "; ".join(dict.fromkeys(header.origin for header in headers)),
            "repeated_8grams": sum(share * count for share, count in known) / rows
            if rows and len(known) == len(shares) else None,
        }
    )  # fmt: skip
    replace_file(out / HEADER_NAME, merged.model_dump_json(indent=1).encode() + b"\n")
    return merged


def fresh_folder(out: Path) -> None:
    """Make a folder, or accept an empty one. Raises ConfigError: it is not empty or cannot be made."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise ConfigError(f"'{out}' is not empty", "name a new folder, or remove that one")
    except OSError as error:
        raise ConfigError(f"'{out}' cannot be made: {error.strerror}", "name a folder that you may write") from error


def replace_file(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path, "free space, or name another folder"):
        try:
            draft.write_bytes(data)
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise


def _copy(source: Path, target: Path) -> None:
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise TraceError(f"'{source}' cannot be copied: {error.strerror}", "free space, or record it again") from error
