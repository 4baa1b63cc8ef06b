"""Decode steps as CUDA graphs, cut at the experts: what lies between two layers' experts is one launch.

    record   model code runs once under capture. At a layer's experts the graph ends and is replayed, the experts run as
             ever on what it made, and the next graph begins with their output.
    replay   graph, experts, graph, experts, .. graph: no code of the model runs.

A recording belongs to a number of rows and of splits of the attention's keys, at fixed addresses: inputs lie in
`repeat.Kept`, and attention reads the paged cache in place (`attention: triton`), since sdpa's copies grow with the
context. Results are those of the same kernels launched one by one, to the bit.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..model.model import ExpertLayer, cutting

_log = logging.getLogger(__name__)
ROWS = 16  # a decode step of more rows is not recorded
_SEEN = 2  # steps of a kind that run before one is recorded: kernels are compiled and loaded by then
_MOST = 24  # recordings that are kept: each has the logits of its rows, and a graph for each layer on the device


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
            piece.out.copy_(piece.layer.forward(piece.hidden, piece.ids, piece.weights))
        self.last.replay()
        return self.logits


class Recorded:
    """The recorded decode steps of one model, on the stream of its steps.

    Args:
        model: with experts attached.
        graph: makes a graph. pool: names memory for graphs, which torch does not use again once all of them are gone.

    Attributes:
        problem: why no step is recorded any more; None: steps are.
        replays: steps that were replayed.
    """

    def __init__(
        self, model: Any, graph: Callable[[], Graph] | None = None, pool: Callable[[], Any] | None = None
    ) -> None:
        from ....kernels.triton.attention import SPLIT

        self._model, self._split = model, SPLIT
        self._graph = torch.cuda.CUDAGraph if graph is None else graph
        self._new_pool = torch.cuda.graph_pool_handle if pool is None else pool
        self._pool: Any = None
        self._seen = Counter[Any]()
        self._recordings: dict[Any, _Recording] = {}
        self._place: Any = None  # the KV cache that they write to, and the generation of their inputs' addresses
        self.problem: str | None = None
        self.replays = 0
        hooked = model.get_input_embeddings()._forward_hooks
        if hooked:
            self.problem = "the policy reads each step's embeddings"

    def logits(self, inputs: dict[str, Any], generation: int) -> torch.Tensor | None:
        """The logits [1, rows, V] of a step whose inputs lie at fixed addresses; None: it is not recorded.

        Args:
            generation: of those addresses.

        Raises:
            Unrecorded: recording failed within the model; the experts of some layers have run.
        """
        rows = inputs["input_ids"].shape[1]
        if self.problem is not None or rows > ROWS:
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
        if self._seen[key] <= _SEEN:
            return None
        while len(self._recordings) >= _MOST:
            self._recordings.pop(next(iter(self._recordings)))
        most = {kind: count * self._split for kind, count in splits.items()}
        made = self._record(inputs | {"max_length_k": most})
        if made is None:
            self._recordings.clear()
            raise Unrecorded(str(self.problem))
        self._recordings[key] = made
        return made.logits

    def _record(self, inputs: Mapping[str, Any]) -> _Recording | None:
        """Run a step and record it; None: it cannot be, `problem` says why."""
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
            inside = False
            graphs[-1].capture_end()
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
            begin()
            with cutting(cut):
                logits = self._model(**inputs).logits
            return _Recording(pieces, end(), logits)
        except BaseException as error:
            if not inside:
                raise  # the experts', or of a replay
            with contextlib.suppress(RuntimeError):  # where the capture has failed
                graphs[-1].capture_end()
            if not isinstance(error, RuntimeError):  # torch's, of a call that a capture does not allow
                raise
            self.problem = str(error).partition("\n")[0]
            _log.warning("decode steps are not recorded as CUDA graphs: %s", self.problem)
            return None


class Unrecorded(Exception):
    """A step could not be recorded, and is to run again: it wrote nothing that it will not write again."""


def _power_of_two(count: int) -> int:
    """The least that is not below."""
    return 1 << (max(1, count) - 1).bit_length()
