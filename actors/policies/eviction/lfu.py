"""Least frequently used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .base import EvictionPolicy
from .order import ValueOrder

_RESCALE_AT = 2.0**512


class Lfu(EvictionPolicy):
    """Least frequently used (MoE-Infinity's cache; the base of fMoE's).

    State: freq, the number of forwards that ran each expert; it outlives eviction. Until its first use an admitted
    expert counts as used once at least, so that a prefetched one is not the first to go. Equal ones: the one that was
    admitted or used longest ago.

    Decay: with a half-life h, a use counts 2^(-a/h) after a further calls of `used` (each is one layer run). It is kept
    by making later uses count more, which orders the experts alike, so nothing has to be aged.

    O(log n) per key admitted or used, O(1) per removal, `victims` O(k log k) where k keys are looked at.

    Args:
        half_life: h; None: uses count for good.
    """

    def __init__(self, half_life: float | None = None) -> None:
        if half_life is not None and half_life <= 0:
            raise ValueError(f"the half-life is {half_life}, not above 0")
        self._growth = 1.0 if half_life is None else 2.0 ** (1.0 / half_life)
        self._unit = 1.0  # what a use counts now
        self._freq: dict[int, float] = {}
        self._credit: dict[int, float] = {}  # of what freq holds, what admission lent until the first use
        self._order = ValueOrder()
        self._clock = 0

    def admitted(self, key: int) -> None:
        credit = max(0.0, self._unit - self._freq.get(key, 0.0))
        self._credit[key] = credit
        self._freq[key] = self._freq.get(key, 0.0) + credit
        self._place(key, self._tick())

    def used(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._freq[key] += self._unit - self._credit.pop(key, 0.0)
            self._place(key, self._tick())
        self._unit *= self._growth
        if self._unit > _RESCALE_AT:
            self._rescale()

    def removed(self, key: int) -> None:
        self._order.remove(key)
        self._freq[key] -= self._credit.pop(key, 0.0)

    def ranked(self, keys: Sequence[int]) -> list[int]:
        return sorted(keys, key=lambda key: -self._weight(key) * self._freq.get(key, 0.0))

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        return self._order.first(count, evictable)

    def _weight(self, key: int) -> float:
        """What the frequency is multiplied with."""
        return 1.0

    def _place(self, key: int, stamp: int) -> None:
        self._order.set(key, self._weight(key) * self._freq[key], stamp)

    def _place_again(self) -> None:
        """Frequencies or weights of all have changed."""
        for key in self._order:
            self._place(key, self._order.stamp(key))

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _rescale(self) -> None:
        for counts in (self._freq, self._credit):
            for key in counts:
                counts[key] /= self._unit
        self._unit = 1.0
        self._place_again()
