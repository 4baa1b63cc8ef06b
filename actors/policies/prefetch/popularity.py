"""Prefetch what was used most so far: the yardstick that every predictor must beat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from .base import LayerSeen, PrefetchPolicy, Span, Wanted


class PopularityPrefetch(PrefetchPolicy):
    """The most popular experts of each layer, over all requests so far.

    State: counts [L, E] of (token, expert) pairs. Rule: when layer l's router has run, ask for the `top` most counted
    experts of layers l+1..l+distance, nearer layers first; before a forward, for those of its first `distance` layers.
    Cost: O(distance * E log E) per layer.

    Args:
        layers, experts: L and E. top: experts per layer.
    """

    name: ClassVar[str] = "popularity"

    def __init__(self, layers: int, experts: int, top: int, distance: int = 1, synchronous: bool = False) -> None:
        self.counts = np.zeros((layers, experts), np.int64)
        self._experts, self._top = experts, top
        self.distance, self.synchronous = distance, synchronous

    def begin_forward(self, spans: Sequence[Span]) -> list[Wanted]:
        return self._popular(0)

    def observed(self, seen: LayerSeen) -> list[Wanted]:
        self.counts[seen.layer] += np.bincount(seen.ids.ravel(), minlength=self._experts)
        return self._popular(seen.layer + 1)

    def _popular(self, first: int) -> list[Wanted]:
        wanted = []
        for ahead, counts in enumerate(self.counts[first : first + self.distance]):
            for place, e in enumerate(np.argsort(-counts, kind="stable")[: self._top]):
                if counts[e]:
                    # a nearer layer's experts all go before a farther one's
                    wanted.append(Wanted((first + ahead) * self._experts + int(e), -float(ahead * self._top + place)))
        return wanted
