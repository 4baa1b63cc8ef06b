"""MoEpic: split experts, cached by least cache priority and prefetched by descending predicted score.

Here: the cache policy and the speculative prefetcher. `split` has the division of expert memory, `configure` the cache
configurator.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any, ClassVar

from pydantic import Field

from ...core import _core
from ..eviction import RankingOrder
from ..prefetch import LayeredPrefetch, LayerSeen, NativeScores, NextLayerOptions, Wanted, WantedKeys
from ..registry import PolicyContext, PolicyOptions, register
from .split import OMEGA, RHO


@register("eviction", "lcp")
class Lcp(RankingOrder):
    """Evicts the expert with the lowest priority P = mu * rho^(nu / omega) (MoEpic section 3.3, equation 4).

    State: of every expert, resident or not, mu, the tokens that picked it so far, and the token of its layer that
    picked it last; nu is the number of tokens since. All tokens of a forward count as one moment, and a forward begins
    with a layer that does not follow the previous one.

    Rule: every P falls by the same factor per token, so experts are ordered by log mu + last * log(1 / rho) / omega,
    which only a pick changes, upwards. A prefetched expert counts as picked once at its admission, so that it is not
    the first victim. Ties: first admitted, first evicted.

    O(1) per expert picked or admitted, `victims` O(k log n) for k experts that come to the front.

    Args:
        layers, experts: L and E.
        rho: balance between count and interval, 0 to 1. omega: tokens in which P falls by rho.
    """

    class Options(PolicyOptions):
        rho: float = Field(default=RHO, gt=0, lt=1, description="balance between count and interval")
        omega: float = Field(default=OMEGA, gt=0, description="tokens in which a priority falls by rho")

    counted_as = "lcp"

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> Lcp:
        return cls(context.layers, context.experts, options.rho, options.omega)

    def __init__(self, layers: int, experts: int, rho: float = RHO, omega: float = OMEGA) -> None:
        if not 0 < rho < 1 or omega <= 0:
            raise ValueError(f"rho is {rho}, not between 0 and 1, or omega {omega}, not above 0")
        super().__init__(_core.WholeOrder("lcp", layers, experts, rate=log(1 / rho) / omega))


@register("prefetch", "speculative")
class SpeculativePrefetch(LayeredPrefetch):
    """MoEpic's speculative prefetcher (section 3.2).

    State: none. Rule: after layer i's router, layer i+1's router runs on layer i's post-attention activation h^i,
    s_pred = softmax(R^{i+1}(h^i)) (equation 3), and experts are prefetched by descending s_pred (`by_score`). The last
    layer prefetches for the first one, from each sequence's last row, as AdapMoE. Prefetch of a layer ends when its
    routing is known: queued loads are promoted if needed, else cancelled (`Core.drop_stale`). Of an expert with
    a cached top only the bottom is loaded. Of a batch each row names its `top` experts; the union is ordered by the
    highest score of any row. Cost per layer: T * H * E multiply-adds, O(E log E + T E) comparisons.

    Args:
        layers, experts: L and E.
        top: experts per row; more than the router's top-k keep the link busy until the routing is known.
    """

    Options = NextLayerOptions
    name: ClassVar[str] = "speculative"
    stateless: ClassVar[bool] = True
    needs_ids = False
    needs_lookahead: ClassVar[bool] = True
    lookahead_softmax: ClassVar[bool] = True
    wraps: ClassVar[bool] = True

    def observed(self, seen: LayerSeen) -> Sequence[Wanted]:
        self.predicted = seen.lookahead(1)
        if self.predicted is None:
            return []
        keys, scores = seen.rank.by_score(self.predicted, self.top, (seen.layer + 1) % self._layers * self._experts)
        return WantedKeys([keys], scores)

    def native(self) -> NativeScores:
        return NativeScores(self.top, votes=False)
