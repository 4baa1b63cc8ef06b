"""Who leaves first where low-bit replicas have slots of their own: experts in full by the preset's policy, replicas by
last use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .base import EvictionPolicy
from .lru import Lru


class TwoWidths(EvictionPolicy):
    """One policy for each slot class, so that none is searched for a victim of another class.

    Slots of class 0 hold experts in full, those of class 1 replicas, whose keys are their experts' and `keys` more.

    Args:
        full: orders the experts in full. keys: experts of all layers.
    """

    def __init__(self, full: EvictionPolicy, keys: int) -> None:
        self._full, self._low, self._keys = full, Lru(), keys

    def of_class(self, slot_class: int) -> EvictionPolicy:
        return self._low if slot_class else self._full

    def admitted(self, key: int) -> None:
        self._at(key).admitted(key)

    def used(self, keys: Iterable[int]) -> None:
        keys = list(keys)
        self._full.used([key for key in keys if key < self._keys])
        self._low.used([key for key in keys if key >= self._keys])

    def removed(self, key: int) -> None:
        self._at(key).removed(key)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """Of any class, experts in full first; who needs a slot of one class asks `of_class`."""
        found = self._full.victims(count, evictable)
        return found + self._low.victims(count - len(found), evictable)

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        self._full.routed(keys, counts, tokens)

    def ranked(self, keys: Sequence[int]) -> list[int]:
        return self._full.ranked(keys)

    def _at(self, key: int) -> EvictionPolicy:
        return self._full if key < self._keys else self._low
