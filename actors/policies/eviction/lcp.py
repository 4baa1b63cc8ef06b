"""Least cache priority (MoEpic)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf, log

from .base import EvictionPolicy
from .rising import RisingOrder

RHO, OMEGA = 0.25, 128


class Lcp(EvictionPolicy):
    """Evicts the expert with the lowest priority P = mu * rho^(nu / omega) (MoEpic section 3.3, equation 4).

    State: of every expert, held or not, mu, the tokens that picked it so far, and the token of its layer at which it
    was last picked; nu is how many tokens of its layer have passed since. All tokens of a forward are one moment.

    Rule: every P falls by the same factor from token to token, so the experts are ordered by
    log mu + last * log(1 / rho) / omega, which no token changes unless it picks the expert, and then it rises. An
    expert that was admitted as a guess counts as picked by one token at that moment, or every guess would be the first
    to go. Equal ones: the one that was admitted first.

    All layers of a forward carry the same tokens, so one count of them serves all: a forward begins with a layer that
    does not come after the one before it.

    O(1) per expert picked, O(log n) per admission, `victims` O((victims + protected ones passed) log n) and, amortized,
    O(log n) for each held expert picked since.

    Args:
        rho: balance between count and interval, 0 to 1. omega: tokens in which P falls by it.
        one_layer: all experts are of one layer, of which each call of `routed` is a forward.
    """

    def __init__(self, rho: float = RHO, omega: float = OMEGA, one_layer: bool = False) -> None:
        if not 0 < rho < 1 or omega <= 0:
            raise ValueError(f"rho is {rho}, not between 0 and 1, or omega {omega}, not above 0")
        self._rate = log(1 / rho) / omega
        self._one_layer = one_layer
        self._count: dict[int, int] = {}  # mu
        self._value: dict[int, float] = {}
        self._order = RisingOrder()
        self._before, self._tokens = 0, 0  # tokens before the present forward, and with it
        self._highest = inf  # key of the last layer routed: whatever comes first begins a forward

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        if not keys:
            return
        if self._one_layer or min(keys) <= self._highest:
            self._before = self._tokens
        self._highest = max(keys)
        self._tokens = max(self._tokens, self._before + tokens)
        age = self._tokens * self._rate
        for key, count in zip(keys, counts, strict=True):
            mu = self._count[key] = self._count.get(key, 0) + count
            value = self._value[key] = log(mu) + age
            self._order.raise_to(key, value)

    def admitted(self, key: int) -> None:
        guessed = self._tokens * self._rate  # log 1, now
        self._order.add(key, max(guessed, self._value.get(key, -inf)))

    def used(self, keys: Iterable[int]) -> None:
        return None  # `routed` has told, also of what runs elsewhere

    def removed(self, key: int) -> None:
        self._order.remove(key)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        return self._order.first(count, evictable)

    def ranked(self, keys: Sequence[int]) -> list[int]:
        return sorted(keys, key=lambda key: -self._value.get(key, -inf))

    @property
    def looked_at(self) -> int:
        """Entries that `victims` has looked at since the beginning: what it costs."""
        return self._order.looked_at
