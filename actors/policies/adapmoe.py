"""AdapMoE (arXiv 2408.10284): adaptive gating by layer sensitivity, and cache sizes by dynamic programming.

Its prefetch is `NextGatePrefetch`; `moepic.configure` applies its cache sizes to the live cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from .moepic.split import LayerStatistics
from .registry import NotPrepared, PolicyContext, register
from .routing import (
    Ids,
    Rerouted,
    RerouteView,
    Rerouting,
    RoutingOptions,
    Weights,
    drop_pairs,
    drop_places,
)


@register("routing", "adaptive")
class AdaptiveGating(Rerouting):
    """Sensitivity-based adaptive gating (AdapMoE, arXiv 2408.10284; its public code where the text leaves a choice).

    The original, for top-2: with routing weights a >= 1 - a, running only the first expert changes the layer's output
    by (1 - a) * (E_1(x) - E_2(x)), and the loss, to second order, by (1 - a)^2 * s_l, with s_l the layer's sensitivity,
    from the diagonal of the Fisher information. The second expert is dropped where (1 - a)^2 * s_l < threshold.

    Here, for any top-k: a token's experts are dropped by rising weight while d^2 * s_l < threshold, d the sum of the
    dropped weights; the last one stays. With renormalised weights the output changes by d * (mean of the kept outputs -
    mean of the dropped ones), which is the same estimate; without, by d times the mean of the dropped ones. Prompts are
    no exception (the original's code skips them).

    State: none. Cost: O(T K log K).

    Args:
        sensitivity: s_l of each layer, in nats per squared dropped weight (`cluster.jobs.prepare.measures`).
        threshold: estimated loss increase of a token per layer, in nats; 0 drops nothing.
        renormalise: whether the model normalises the weights of the experts that it picks.

    Raises:
        ValueError: a negative threshold or sensitivity.
    """

    class Options(RoutingOptions):
        refusal: ClassVar[str] = "routing {kind} takes no {keys}"
        threshold: float = Field(ge=0, description="most nats that a layer may cost a token, by its sensitivity")

        @property
        def needs(self) -> frozenset[str]:
            return frozenset({"sensitivity"})

    name: ClassVar[str] = "adaptive"
    needs_view: ClassVar[bool] = False

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> Rerouting:
        sensitivity = context.sensitivity
        if sensitivity is None or len(sensitivity) != context.layers:
            raise NotPrepared(
                f"needs the sensitivity of {context.layers} layers",
                "measure it with `tiermoe prepare MODEL --sensitivity TEXT`",
            )
        return cls(sensitivity, options.threshold, context.renormalise)

    def __init__(self, sensitivity: Sequence[float], threshold: float, renormalise: bool = True) -> None:
        if threshold < 0 or min(sensitivity, default=0.0) < 0:
            raise ValueError("threshold and sensitivity of adaptive gating are not negative")
        self._renormalise = renormalise
        self._most = [np.sqrt(threshold / s) if s > 0 else (np.inf if threshold else 0.0) for s in sensitivity]

    def reroute(
        self, layer: int, ids: Ids, weights: Weights, probabilities: NDArray[np.floating] | None, view: RerouteView
    ) -> Rerouted:
        most = self._most[layer]
        if len(weights) == 1:
            gone = self._one(weights[0].tolist(), most)
            return drop_places(ids, weights, gone, self._renormalise) if gone else Rerouted(ids, weights)
        if not weights.min(initial=np.inf) < most:
            return Rerouted(ids, weights)
        order = np.argsort(weights, axis=1, kind="stable")  # least first; of equals the one picked first goes first
        sums = np.cumsum(np.take_along_axis(weights, order, axis=1), axis=1, dtype=np.float64)
        goes = sums < most
        goes[:, -1] = False
        dropped = np.zeros_like(goes)
        np.put_along_axis(dropped, order, goes, axis=1)
        return drop_pairs(ids, weights, dropped, self._renormalise)

    @staticmethod
    def _one(weights: list[float], most: float) -> list[int]:
        """The places of a single token that go."""
        order = sorted(range(len(weights)), key=weights.__getitem__)
        gone, total = list[int](), 0.0
        for place in order[:-1]:
            total += weights[place]
            if not total < most:
                break
            gone.append(place)
        return gone


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
