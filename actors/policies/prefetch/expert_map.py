"""Prefetch guided by the expert maps of similar iterations (fMoE, sections 4.2 to 4.5)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .map_search import MapSearch, Match
from .map_store import ExpertMapStore
from .sketch import Sketch


@dataclass(frozen=True, eq=False)
class Forecast:
    """What the matched maps say about later layers.

    Attributes:
        now: number of layers seen, which is the number (from 0) of the layer that runs next.
        keys: [N] layer * J + expert: first those to prefetch, then the others of the same layers, each part by
            descending priority, then by key.
        priorities: [N], p / (l - l_now).
        wanted: how many of the keys are to be prefetched; the others' priorities only say how probable they are.
        scores: similarity of each sequence's match [S].
        semantic: whether embeddings were compared, not trajectories.
    """

    now: int
    keys: NDArray[np.int32]
    priorities: NDArray[np.float32]
    wanted: int
    scores: NDArray[np.float64]
    semantic: bool


class ExpertMapPrefetch:
    """What to prefetch in one iteration after the other.

    Layers are counted from 0 here; the paper counts from 1. When n layers were seen, layer n (the paper's l = n + 1)
    is about to run:

        n = 0: the semantic match gives the maps of layers 0..d: the paper's 1..d, and its layer d + 1, for which the
            trajectory of l = 1 is empty.
        n > 0: the trajectory match of layers 0..n-1 gives the map of layer n + d.

    So each layer gets a forecast once. Of each sequence's map, `select` takes the experts to prefetch; the union over
    the sequences is prefetched, each expert with the highest probability that a sequence's map gives it. Priority
    p / (l - l_now), l_now the last layer whose router has run: p / (layer + 1 - n).

    Once the last layer was seen, `end` stores the iteration's maps.

    Args:
        store: searched, and extended by each whole iteration.
        hidden: H, width of embeddings.
        top_k: K, experts that the router picks for a token.
        semantic: False: no forecast before the first trajectory (the paper's ablation T).
        dynamic: False: K experts whatever the similarity (T and T+S without delta).
        learn: False: the store stays as it is.
    """

    def __init__(
        self,
        store: ExpertMapStore,
        hidden: int,
        top_k: int,
        semantic: bool = True,
        dynamic: bool = True,
        learn: bool = True,
    ) -> None:
        if not 1 <= top_k <= store.experts:
            raise ValueError(f"top_k is {top_k}, a layer has {store.experts} experts")
        self.store, self._sketch = store, Sketch(hidden, store.width)
        if self._sketch.width != store.width:
            raise ValueError(f"embeddings of {hidden} are kept in {self._sketch.width}, the store's in {store.width}")
        self._top_k, self._semantic, self._dynamic, self._learn = top_k, semantic, dynamic, learn
        self._search: MapSearch | None = None

    @property
    def sequences(self) -> int | None:
        """S of the iteration under way; None: there is none."""
        return None if self._search is None else self._search.sequences

    def begin(self, embeddings: NDArray[np.float32]) -> Forecast | None:
        """A new iteration with these embeddings [S, H]; one under way is forgotten.

        Zero rows are sequences whose embeddings are not known: nothing is forecast for them yet.

        Returns:
            The forecast of layers 0..d; None where there is none.

        Raises:
            ValueError: the shape is wrong.
        """
        self._search = MapSearch(self.store, self._sketch(embeddings))
        match = self._search.semantic() if self._semantic else None
        known = embeddings.any(axis=1)
        if match is not None and not known.all():  # similarity 0 would ask for everything
            match = Match(match.entries[known], match.scores[known]) if known.any() else None
        return self._forecast(0, match, range(min(self.store.distance + 1, self.store.layers)), True)

    def observe(self, layer: int, probabilities: NDArray[np.float32]) -> Forecast | None:
        """The router's probabilities of a layer [S, J], each sequence's averaged over its tokens.

        Returns:
            The forecast of layer `layer + 1 + d`; None where there is none.

        Raises:
            ValueError: no iteration has begun, the shape is wrong, or the layer was seen before.
        """
        if self._search is None:
            raise ValueError("no iteration has begun")
        self._search.observe(layer, probabilities)
        now = layer + 1
        target = now + self.store.distance
        if target >= self.store.layers:
            return None
        return self._forecast(now, self._search.trajectory(), range(target, target + 1), False)

    def end(self) -> int:
        """The iteration is over: store its maps if all layers were seen; how many were stored."""
        search, self._search = self._search, None
        if search is None or not search.complete or not self._learn:
            return 0
        return len(search.commit())

    def _forecast(self, now: int, match: Match | None, targets: range, semantic: bool) -> Forecast | None:
        if match is None:
            return None
        store = self.store
        maps = store.maps_of(match.entries, targets)  # [T, S, J]
        scores = match.scores if len(targets) == 1 else np.tile(match.scores, len(targets))
        picked = select(maps.reshape(len(scores), -1), scores, self._top_k, self._dynamic)
        picked = picked.reshape(maps.shape).any(axis=1).ravel()  # [T * J]
        layers = np.arange(targets.start, targets.stop)[:, None]
        priorities = prefetch_priority(maps.max(axis=1), layers, now).ravel()
        order = np.lexsort((-priorities, ~picked))  # stable: then by key
        keys = order.astype(np.int32) + np.int32(targets.start * store.experts)
        return Forecast(now, keys, priorities[order], int(picked.sum()), match.scores, semantic)


def threshold(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """delta = clip(1 - score, 0, 1) (fMoE section 4.3)."""
    return np.minimum(np.maximum(1.0 - scores, 0.0), 1.0)  # np.clip takes three times as long on few numbers


def select(
    probabilities: NDArray[np.float32], scores: NDArray[np.float64], top_k: int, dynamic: bool = True
) -> NDArray[np.bool_]:
    """Similarity-aware selection (fMoE equations 6 to 8): which experts to prefetch.

    By descending probability (equal ones: the lowest number) experts are taken until their sum exceeds
    delta = clip(1 - score, 0, 1) and at least K are taken, or there are no more.

    Args:
        probabilities: of one layer [S, J].
        scores: of the matches that they come from [S].
        top_k: K.
        dynamic: False: just K.

    Returns:
        Whether each expert is taken [S, J].
    """
    sequences, experts = probabilities.shape
    rows = np.arange(sequences)[:, None]
    order = np.argsort(-probabilities, axis=1, kind="stable")
    counts = np.full(sequences, min(top_k, experts))
    if dynamic:
        sums = probabilities[rows, order].cumsum(axis=1, dtype=np.float64)
        counts = np.maximum(counts, (sums <= threshold(scores)[:, None]).sum(axis=1) + 1)
    taken = np.zeros((sequences, experts), np.bool_)
    taken[rows, order] = np.arange(experts) < counts[:, None]
    return taken


def prefetch_priority(
    probabilities: NDArray[np.float32], layers: NDArray[np.integer], now: int
) -> NDArray[np.float32]:
    """p / (l - l_now) (fMoE section 4.5); layers from 0, `now` layers were seen, so l - l_now = layer + 1 - now."""
    return (probabilities / (layers + 1 - now)).astype(np.float32)


def probability_of(priorities: NDArray[np.float32], layers: NDArray[np.integer], now: int) -> NDArray[np.float32]:
    """The probabilities that `prefetch_priority` made these of, for eviction."""
    return (priorities * (layers + 1 - now)).astype(np.float32)
