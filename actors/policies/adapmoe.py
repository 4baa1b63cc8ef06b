"""AdapMoE (arXiv 2408.10284): cache sizes by dynamic programming.

Its prefetch is `NextGatePrefetch`; `moepic.configure` applies its cache sizes to the live cache. Its adaptive gating is
not here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .moepic.split import LayerStatistics


def load_costs(statistics: Sequence[LayerStatistics], prefetched: int) -> NDArray[np.float64]:
    """Expected demand loads per token of each layer with a cache of C = 0..E whole experts [L, E + 1].

    K (1 - H(C)) (1 - beta) (AdapMoE section 4.3), beta the share of the needed experts among the `prefetched` first
    predicted ones, taken as independent of the cache.
    """
    rows = []
    for layer in statistics:
        found = layer.accuracy[:prefetched].sum() / layer.per_step if layer.needed else 0.0
        rows.append(layer.per_step * (1.0 - layer.hit_rate) * max(0.0, 1.0 - found))
    return np.array(rows)


def cache_sizes(costs: NDArray[np.float64], slots: int) -> tuple[int, ...]:
    """Slots of each layer, at least one, with the least sum of costs: exact dynamic programming, O(L * slots * E).

    Ties: the division that gives the first layers less.

    Args:
        costs: of each layer by its number of slots, 0 to E [L, E + 1]. slots: in all; a surplus stays unused.

    Raises:
        ValueError: fewer slots than layers.
    """
    layers, most = costs.shape[0], costs.shape[1] - 1
    if slots < layers:
        raise ValueError(f"{slots} slots for {layers} layers")
    total = min(slots, layers * most)
    best = np.full((layers + 1, total + 1), np.inf)  # best[l, t]: of the first l layers with t slots in all
    best[0, 0] = 0.0
    for layer in range(layers):
        for size in range(1, min(most, total) + 1):
            reached = best[layer, : total + 1 - size] + costs[layer, size]
            np.minimum(best[layer + 1, size:], reached, out=best[layer + 1, size:])
    left = int(best[layers].argmin())  # more slots never cost more, if the costs never rise
    sizes: list[int] = []
    for layer in reversed(range(layers)):
        options = range(min(most, left), 0, -1)
        size = min(options, key=lambda s: best[layer, left - s] + costs[layer, s])
        sizes.append(size)
        left -= size
    return tuple(reversed(sizes))
