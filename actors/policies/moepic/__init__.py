"""MoEpic: split experts, cached by least cache priority and prefetched by descending predicted score.

Here: the cache policy and the speculative prefetcher. `split` has the division of expert memory, `configure` the cache
configurator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf, log
from typing import Any, ClassVar

from pydantic import Field

from ..eviction import Entry, EvictionPolicy, ValueOrder
from ..prefetch import LayeredPrefetch, LayerSeen, NextLayerOptions, Wanted, WantedKeys
from ..registry import PolicyContext, PolicyOptions, register
from .split import OMEGA, RHO


@register("eviction", "lcp")
class Lcp(EvictionPolicy):
    """Evicts the expert with the lowest priority P = mu * rho^(nu / omega) (MoEpic section 3.3, equation 4).

    State: of every expert, resident or not, mu, the tokens that picked it so far, and the token of its layer that
    picked it last; nu is the number of tokens since. All tokens of a forward count as one moment, and a forward begins
    with a layer that does not follow the previous one.

    Rule: every P falls by the same factor per token, so experts are ordered by log mu + last * log(1 / rho) / omega,
    which only a pick changes, upwards. A prefetched expert counts as picked once at its admission, so that it is not
    the first victim. Ties: first admitted, first evicted.

    O(log n) per expert picked or admitted, `victims` O(k log k) for k entries passed.

    Args:
        rho: balance between count and interval, 0 to 1. omega: tokens in which P falls by rho.
        one_layer: all experts are of one layer, and each call of `routed` is a forward.
    """

    class Options(PolicyOptions):
        rho: float = Field(default=RHO, gt=0, lt=1, description="balance between count and interval")
        omega: float = Field(default=OMEGA, gt=0, description="tokens in which a priority falls by rho")

    counted_as = "lcp"
    learns_use = False  # `routed` has told, also of what runs elsewhere

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> Lcp:
        return cls(options.rho, options.omega, context.one_layer)

    def __init__(self, rho: float = RHO, omega: float = OMEGA, one_layer: bool = False) -> None:
        if not 0 < rho < 1 or omega <= 0:
            raise ValueError(f"rho is {rho}, not between 0 and 1, or omega {omega}, not above 0")
        self._rate = log(1 / rho) / omega
        self._one_layer = one_layer
        self._count: dict[int, int] = {}  # mu
        self._value: dict[int, float] = {}
        self._order, self._stamp = ValueOrder(), 0
        self._before, self._tokens = 0, 0  # tokens before the present forward, and with it
        self._highest = inf  # key of the last layer routed: whatever comes first begins a forward

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        if not keys:
            return
        if self._one_layer:
            self._tokens += tokens
        else:
            if min(keys) <= self._highest:
                self._before = self._tokens
            self._highest = max(keys)
            self._tokens = max(self._tokens, self._before + tokens)
        age, picked, values, entry_of = self._tokens * self._rate, self._count, self._value, self._order.present.get
        raised = list[Entry]()
        for key, count in zip(keys, counts, strict=True):
            mu = picked[key] = picked.get(key, 0) + count
            value = values[key] = log(mu) + age
            if (entry := entry_of(key)) is not None:
                raised.append((value, entry[1], key))
        if raised:
            self._order.set(raised)

    def admitted(self, key: int) -> None:
        now = self._tokens * self._rate  # the value of one pick
        self._stamp += 1
        self._order.set(((max(now, self._value.get(key, -inf)), self._stamp, key),))

    def used(self, keys: Iterable[int]) -> None:
        return None

    def removed(self, key: int) -> None:
        self._order.remove(key)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        return self._order.first(count, evictable)

    def ranked(self, keys: Sequence[int]) -> list[int]:
        return sorted(keys, key=lambda key: -self._value.get(key, -inf))


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
