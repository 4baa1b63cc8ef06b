"""Prefetch in descending predicted score, the first layer included (MoEpic)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from .base import LayerSeen, PrefetchPolicy, Wanted
from .next_gate import picks


def by_score(scores: NDArray[np.floating], top: int) -> list[tuple[int, float]]:
    """The union of each row's `top` experts with their highest scores [T, E], highest first, ties by number.

    Experts without a positive score are left out.
    """
    named = picks(scores, min(top, scores.shape[1])).any(axis=0)  # [E]
    best = scores.max(axis=0, initial=0.0)
    order = np.argsort(-best, kind="stable")
    return [(int(e), float(best[e])) for e in order if named[e] and best[e] > 0]


class SpeculativePrefetch(PrefetchPolicy):
    """MoEpic's speculative prefetcher (section 3.2).

    State: none. Rule: when layer i's router has run, layer i+1's router is run on layer i's post-attention activation
    h^i, s_pred = softmax(R^{i+1}(h^i)) (equation 3), and experts are asked for in descending s_pred (`by_score`).
    The first layer is asked for at the last one, by the last one's activation of each sequence's last row: what the
    paper takes from AdapMoE. Prefetch of a layer ends when its routing is known: what is queued by then and not needed
    is cancelled (`ExpertCache.drop_stale`), what is needed is promoted. Of an expert whose top segment is cached only
    the bottom is loaded (`ExpertCache.prefetch`).

    Of a batch each row names its `top` experts; their union is ordered by the highest score that any row gives them.
    Cost: T * H * E multiply-adds, E log E and T E comparisons per layer.

    Args:
        layers, experts: L and E.
        top: experts per row; more than the router's top-k keep the link busy until the routing is known.
    """

    name: ClassVar[str] = "speculative"
    stateless: ClassVar[bool] = True
    needs_ids = False
    needs_lookahead: ClassVar[bool] = True
    lookahead_softmax: ClassVar[bool] = True
    wraps: ClassVar[bool] = True

    def __init__(self, layers: int, experts: int, top: int, synchronous: bool = False) -> None:
        self._layers, self._experts, self._top = layers, experts, top
        self.synchronous = synchronous

    def observed(self, seen: LayerSeen) -> list[Wanted]:
        self.predicted = seen.lookahead(1)
        if self.predicted is None:
            return []
        base = (seen.layer + 1) % self._layers * self._experts
        return [Wanted(base + e, score) for e, score in by_score(self.predicted, self._top)]
