"""A recorded forward as layers and their policies see it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ...actors.core._core import Routing
from ...actors.engine.cache.cache import ExpertCache
from ...actors.engine.host_view import Asked
from ...actors.engine.prefetching import Prefetching
from ...actors.policies.prefetch import LayerSeen, PrefetchPolicy, Span
from .trace import Iteration, TraceHeader, scattered

Parts = Sequence[tuple[str, Iteration]]  # a forward's iterations with the names of their sequences
_AT_ONCE = 1 << 16  # scores that are scattered together


class RecordedForward:
    """The recorded rows of one forward, of all sequences together.

    Attributes:
        ids, weights: [L, T, K]. probabilities: [T, L, E].
    """

    def __init__(self, parts: Parts) -> None:
        names = "ids", "weights", "probabilities", "next_ids", "next_probabilities"
        ids, weights, probabilities, *self._next = [_joined([getattr(p, name) for _, p in parts]) for name in names]
        self.parts, self.probabilities, self.tokens = parts, probabilities, len(ids)
        self.ids = ids.transpose(1, 0, 2).astype(np.int64, "C")
        self.weights = weights.transpose(1, 0, 2).astype(np.float32, "C")
        self._ahead: dict[int, tuple[int, NDArray[np.float64]]] = {}  # by distance: a layer, scores [n, T, E] from it

    def next_scores(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Experts that later routers pick on each layer's input, and their scores [T, L, D, K], as of `scattered`."""
        ids, probabilities = self._next
        scores = probabilities - 1e-10 * np.arange(ids.shape[-1])
        return ids.astype(np.int64, "C"), np.ascontiguousarray(scores, np.float64)

    def last_rows(self) -> list[int]:
        """The last row of each sequence, where the routers of the next forward's first layer were recorded."""
        _, parts = zip(*self.parts, strict=True)
        if not all(part.next_probabilities[0, -1, :1].any() for part in parts):
            return []
        return [stop - 1 for stop in accumulate(len(part.tokens) for part in parts)]

    def lookahead(self, layer: int, distance: int) -> NDArray[np.float64] | None:
        """`Iteration.lookahead` [T, E]; past the last layer of each sequence's last row [S, E]."""
        _, layers, experts = self.probabilities.shape
        if layer + distance >= layers:
            found = [part.lookahead(layer, distance) for _, part in self.parts]
            last = [scores[-1:] for scores in found if scores is not None]
            return _joined(last) if len(last) == len(found) else None
        if distance not in self._ahead or not 0 <= layer - self._ahead[distance][0] < len(self._ahead[distance][1]):
            if not 1 <= distance <= self._next[0].shape[2]:
                return None
            stop = min(layers - distance, layer + max(1, _AT_ONCE // (self.tokens * experts)))
            ids, probabilities = (recorded[:, layer:stop, distance - 1] for recorded in self._next)
            self._ahead[distance] = layer, scattered(ids, probabilities, experts)
        first, scores = self._ahead[distance]
        return scores[layer - first]


class RecordedLayer:
    """One layer of a recorded forward (`engine.hooks.View`)."""

    def __init__(self, index: int, forward: RecordedForward) -> None:
        self.index, self.forward, self.tokens = index, forward, forward.tokens
        self.picked = self.ids = forward.ids[index]
        self._weights: NDArray[np.float32] | None = None

    @property
    def weights(self) -> NDArray[np.float32]:
        """Of `ids` [T, K]."""
        return self.forward.weights[self.index] if self._weights is None else self._weights

    def scores(self, asked: Asked) -> NDArray[np.floating]:
        """The router's probabilities [T, E]; a trace has no others."""
        return self.forward.probabilities[:, self.index]

    def reroute(self, ids: NDArray[Any], weights: NDArray[np.floating], dropped: bool) -> None:
        """From now on the layer runs these; pairs of weight 0 do not run."""
        self.ids, self._weights = ids, np.ascontiguousarray(weights, np.float32)

    def routing(self, layer: int, experts: int) -> Routing:
        """The pairs that run, by expert."""
        return Routing(layer, experts, np.where(self.weights != 0, self.ids, -1), partial=True)


class RecordedRouter(NamedTuple):
    """What routers of so many later layers pick on a layer's input."""

    layers: int


class RecordedPrefetching(Prefetching):
    """Prefetch by recorded scores."""

    def __init__(
        self, policy: PrefetchPolicy, cache: ExpertCache, header: TraceHeader, shards: Any, streams: bool
    ) -> None:
        super().__init__(policy, cache, header.layers, header.experts, see, shards, streams)
        self._distances, self.announced.last_rows = header.distances, True

    @property
    def reads_scores(self) -> bool:
        """Whether native code may read the recorded ones."""
        return self._shards is None and self.policy.native() is not None

    def _asked_ahead(self, index: int) -> Sequence[Asked]:
        layers = 1 if index == self._last else min(self._last - index, self.policy.distance)
        layers = min(layers, self._distances)
        return [Asked(cast(Any, RecordedRouter(layers)), softmax=True)] * layers


def spans_of(parts: Parts) -> list[Span]:
    """The rows of each sequence in a forward."""
    spans, row = [], 0
    for name, part in parts:
        spans.append(Span(name, row, row + len(part.tokens), part.decode, part.embedding))
        row += len(part.tokens)
    return spans


def see(layer: int, spans: Sequence[Span], view: RecordedLayer) -> LayerSeen:
    """A recorded layer as a prefetch policy sees it."""
    forward = view.forward
    lookahead = partial(forward.lookahead, layer)
    return LayerSeen(layer, spans, view.picked, forward.probabilities[:, layer], lookahead)


def recorded_logits(layer: int, view: RecordedLayer) -> NDArray[np.floating] | None:
    """Logits [T, E] of a layer's router on the view's layer's input; None: not recorded."""
    found: NDArray[np.floating] | None
    if layer == view.index:
        found = view.forward.probabilities[:, layer].astype(np.float64)
    else:
        found = view.forward.lookahead(view.index, layer - view.index)
        if found is None:
            return None
        known = np.isfinite(found)
        found = np.where(known, np.maximum(found, 0.0), 0.0)
        rest = np.maximum(1.0 - found.sum(axis=1, keepdims=True), 0.0)
        found = np.where(known, found, rest / np.maximum((~known).sum(axis=1, keepdims=True), 1))
    logits: NDArray[np.floating] = np.log(np.maximum(found, 1e-12))
    return logits


def _joined(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
