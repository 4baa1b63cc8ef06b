"""Prefetch at random: the floor under every predictor (MoEpic without its speculative prefetcher)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from .base import LayerSeen, PrefetchPolicy, Wanted
from .speculative import by_score


class RandomPrefetch(PrefetchPolicy):
    """Random experts of the next layer (MoEpic, section 5, "w/o SP").

    As `SpeculativePrefetch`, the first layer at the last one included, with uniform random numbers for scores: each
    row names `top` random experts. State: a generator, so the same forwards give the same guesses. Cost: T E.

    Args:
        layers, experts: L and E. top: experts per row. seed: of the numbers.
    """

    name: ClassVar[str] = "random"
    stateless: ClassVar[bool] = True
    wraps: ClassVar[bool] = True

    def __init__(self, layers: int, experts: int, top: int, synchronous: bool = False, seed: int = 0) -> None:
        self._layers, self._experts, self._top = layers, experts, top
        self._rng = np.random.default_rng(seed)
        self.synchronous = synchronous

    def observed(self, seen: LayerSeen) -> list[Wanted]:
        rows = len(seen.spans) if seen.layer == self._layers - 1 else len(seen.ids)
        self.predicted = 1.0 - self._rng.random((rows, self._experts))  # (0, 1]
        base = (seen.layer + 1) % self._layers * self._experts
        return [Wanted(base + e, score) for e, score in by_score(self.predicted, self._top)]
