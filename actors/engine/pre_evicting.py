"""Pre-eviction carried out: slots are free before the next layer's router has run, and its demand loads land there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..policies.activeevict import ImportanceEviction, PreEviction, predicted_distribution
from .cache.cache import ExpertCache

Score = Callable[[int, Any], NDArray[np.floating] | None]


class PreEvicting:
    """ActiveEvict's pre-eviction on one cache (`policies.pre_evict`).

    Once a layer's own loads are queued, the next layer's router is run on this layer's input; the eviction policy is
    told, and then asked for residents until the release target is free. Nothing is copied. What the present layer uses
    is pinned and stays. Never more slots are freed than the next layer has experts without one.

    The paper says nothing of the first layer, which no layer comes before. Its prediction is its own distribution in
    the forward before, of the last row of each sequence.

    Args:
        decide: the release target.
        layers, experts: L and E.
        score: (layer, view) -> logits [T, E] of that layer's router on the viewed layer's input, or None where it
            cannot be asked; then nothing is freed.
    """

    def __init__(self, decide: PreEviction, cache: ExpertCache, layers: int, experts: int, score: Score) -> None:
        self._decide, self._cache, self._layers, self._experts, self._score = decide, cache, layers, experts, score
        self._importance = cache.eviction if isinstance(cache.eviction, ImportanceEviction) else None
        self._last_rows: list[int] | None = None
        self._first: NDArray[np.floating] | None = None  # logits of the first layer, one row for each sequence

    def begin_forward(self, last_rows: Sequence[int]) -> None:
        """The next forward carries sequences whose last rows are these."""
        self._last_rows = list(last_rows)

    def scored_at(self, index: int) -> list[int]:
        """The layers of which `layer` will ask for the scores."""
        following = [index + 1] if index + 1 < self._layers else []
        return [0, *following] if index == 0 else following

    def layer(self, index: int, view: Any) -> None:
        """A layer's routing is known and its loads are queued: free slots."""
        if self._importance is not None:
            self._importance.saw(index, view.picked)
        if index == 0:
            self._remember(self._score(0, view))
        if index + 1 < self._layers:
            self._release(index + 1, self._score(index + 1, view))
        else:
            self._release(0, self._first)

    def _remember(self, logits: NDArray[np.floating] | None) -> None:
        rows, self._last_rows = self._last_rows, None
        if logits is None or not rows or rows[-1] != len(logits) - 1:  # a forward that was not announced
            self._first = logits
        else:
            self._first = logits[rows]

    def _release(self, layer: int, logits: NDArray[np.floating] | None) -> None:
        if logits is None:
            return
        cache, first = self._cache, layer * self._experts
        predicted = predicted_distribution(logits)
        if self._importance is not None:
            self._importance.expect(layer, predicted)
        held = cache.residency.occupied(first, first + self._experts)
        target = self._decide.target(logits, predicted, held)
        slots = min(target.slots, self._experts - int(held.sum()))
        if slots > cache.residency.free_slots:
            cache.vacate(slots, layer)


def last_rows(spans: Sequence[Any]) -> list[int]:
    """The last row of each sequence that a forward carries."""
    return [span.stop - 1 for span in spans]
