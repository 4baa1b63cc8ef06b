"""Decode steps as CUDA graphs, cut at the experts: what lies between two layers' experts is one launch.

    record   model code runs once under capture. At a layer's experts the graph ends and is replayed, the experts run as
             ever on what it made, and the next graph begins with their output.
    replay   graph, experts, graph, experts, .. graph: no code of the model runs.

A recording belongs to a number of rows and of splits of the attention's keys, at fixed addresses: inputs lie in
`repeat.Kept`, and attention reads the paged cache in place (`attention: triton`), since sdpa's copies grow with the
context. Results are those of the same kernels launched one by one, to the bit.

A recording needs device memory, which others may have taken for a while. An out-of-memory drops the older half of the
recordings, and nothing is recorded for `_REST` steps, twice as many after each further one; what is still recorded is
replayed. Any other error is of the model, and the last one: its steps run one by one from then on.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ...budget import GRAPH_ROWS
from ..model.model import ExpertLayer, cutting

_log = logging.getLogger(__name__)
_SEEN = 2  # steps of a kind that run before one is recorded: kernels are compiled and loaded by then
_REST = 64  # steps without a recording after an out-of-memory
_LONGEST_REST = 4096


class Graph(Protocol):
    """`torch.cuda.CUDAGraph`, or a test's."""

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None: ...
    def capture_end(self) -> None: ...
    def replay(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Piece:
    """A graph, the experts behind it, what they read, and the tensor from which the next graph reads their output."""

    graph: Graph
    layer: ExpertLayer
    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Recording:
    pieces: list[_Piece]
    last: Graph
    logits: torch.Tensor

    def replay(self) -> torch.Tensor:
        for piece in self.pieces:
            piece.graph.replay()
            piece.layer.forward_into(piece.out, piece.hidden, piece.ids, piece.weights)
        self.last.replay()
        return self.logits


class Recorded:
    """The recorded decode steps of one model, on the stream of its steps.

    Args:
        model: with experts attached.
        most: recordings that are kept (`budget.most_recordings`, which `--budget auto` counts).
        graph: makes a graph. pool: names memory for graphs, which torch does not use again once all of them are gone.

    Attributes:
        problem: why no step is recorded any more; None: steps are.
        replays: steps that were replayed.
        refused: recordings that ended by an out-of-memory.
    """

    def __init__(
        self, model: Any, most: int, graph: Callable[[], Graph] | None = None, pool: Callable[[], Any] | None = None
    ) -> None:
        from ....kernels.triton.attention import SPLIT

        self._model, self._most, self._split = model, most, SPLIT
        self._graph = torch.cuda.CUDAGraph if graph is None else graph
        self._new_pool = torch.cuda.graph_pool_handle if pool is None else pool
        self._pool: Any = None
        self._seen = Counter[Any]()
        self._recordings: dict[Any, _Recording] = {}
        self._place: Any = None  # the KV cache that they write to, and the generation of their inputs' addresses
        self.problem: str | None = None
        self.replays = self.refused = 0
        self._rest, self._left = _REST, 0  # steps: of the next pause, and of the present one
        hooked = model.get_input_embeddings()._forward_hooks
        if hooked:
            self.problem = "the policy reads each step's embeddings"

    def logits(self, inputs: dict[str, Any], generation: int) -> torch.Tensor | None:
        """The logits [1, rows, V] of a step whose inputs lie at fixed addresses; None: it is not recorded.

        Args:
            generation: of those addresses.

        Raises:
            Unrecorded: recording failed; the experts of some layers have run.
        """
        rows = inputs["input_ids"].shape[1]
        if self.problem is not None or rows > GRAPH_ROWS:
            return None
        if inputs["attention_mask"] is not None:
            self.problem = "its attention takes a mask that grows with the context"
            return None
        place = inputs["cache"], generation
        if place != self._place:
            self._recordings.clear()
            self._seen.clear()
            self._place = place
        splits = {kind: _power_of_two(-(-most // self._split)) for kind, most in inputs["max_length_k"].items()}
        key = rows, tuple(splits.items())
        found = self._recordings.get(key)
        if found is not None:
            self.replays += 1
            self._recordings[key] = self._recordings.pop(key)  # the last one used
            return found.replay()
        self._seen[key] += 1
        self._left = max(0, self._left - 1)
        if self._seen[key] <= _SEEN or self._left:
            return None
        self._drop_to(self._most - 1)
        most = {kind: count * self._split for kind, count in splits.items()}
        try:
            made = self._record(inputs | {"max_length_k": most})
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            self._pause()
            raise Unrecorded(str(error)) from error
        if made is None:
            self._recordings.clear()
            raise Unrecorded(str(self.problem))
        self._recordings[key], self._rest = made, _REST
        return made.logits

    def _drop_to(self, count: int) -> None:
        """Keep so many recordings, those used last."""
        while len(self._recordings) > count:
            self._recordings.pop(next(iter(self._recordings)))

    def _pause(self) -> None:
        """The device had no memory for a recording."""
        self._drop_to(len(self._recordings) // 2)
        _log.warning(
            "no device memory to record a decode step: %d recordings stay, the next try is in %d steps",
            len(self._recordings), self._rest,
        )  # fmt: skip
        self.refused += 1
        self._left, self._rest = self._rest, min(2 * self._rest, _LONGEST_REST)

    def _record(self, inputs: Mapping[str, Any]) -> _Recording | None:
        """Run a step and record it; None: it cannot be, `problem` says why.

        Raises:
            RuntimeError: there is no memory for it, or the experts failed. No capture is open.
        """
        pieces, graphs = list[_Piece](), list[Graph]()
        inside = False
        if not self._recordings:
            self._pool = self._new_pool()

        def begin() -> None:
            nonlocal inside
            graphs.append(self._graph())
            inside = True
            # other threads copy and allocate as ever
            graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

        def end() -> Graph:
            nonlocal inside
            graphs[-1].capture_end()  # fails where the capture has, or without memory for the graph
            inside = False
            graphs[-1].replay()
            return graphs[-1]

        def cut(
            layer: ExpertLayer, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
        ) -> torch.Tensor:
            graph = end()
            out = layer.forward(hidden, ids, weights).clone()
            pieces.append(_Piece(graph, layer, hidden, ids, weights, out))
            begin()
            return out

        try:
            with _no_collection():
                begin()
                with cutting(cut):
                    logits = self._model(**inputs).logits
                return _Recording(pieces, end(), logits)
        except BaseException as error:
            if inside:
                with contextlib.suppress(RuntimeError):  # where the capture has failed
                    graphs[-1].capture_end()
                _leave(self._pool)
            if not inside or not isinstance(error, RuntimeError) or _is_out_of_memory(error):
                raise  # the experts', or of a replay; not torch's; or memory that there may be again
            self.problem = str(error).partition("\n")[0]
            _log.warning("decode steps are not recorded as CUDA graphs: %s", self.problem)
            return None


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected: a graph or event that it destroys would make the capture fail."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch's allocator, the driver or cuBLAS lacks memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in str(error) for words in ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    )


def _leave(pool: Any) -> None:
    """Stop allocating from the graphs' memory: some versions of torch go on with it when a capture fails."""
    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # this one has stopped
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)


class Unrecorded(Exception):
    """A step could not be recorded, and is to run again: it wrote nothing that it will not write again."""


def _power_of_two(count: int) -> int:
    """The least that is not below."""
    return 1 << (max(1, count) - 1).bit_length()
