"""Least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from .base import EvictionPolicy, first_evictable


class Lru(EvictionPolicy):
    """Least recently used.

    State: admitted keys in order of last use (admission counts as a use, so that a prefetched
    expert is not the first to go). `admitted`, `used`, `removed` are O(1) per key, `victims`
    is O(count + protected keys older than the victims).
    """

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def admitted(self, key: int) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def used(self, keys: Iterable[int]) -> None:
        move = self._order.move_to_end
        for key in keys:
            move(key)

    def removed(self, key: int) -> None:
        del self._order[key]

    def ranked(self, keys: Sequence[int]) -> list[int]:
        places = {key: place for place, key in enumerate(self._order)}
        return sorted(keys, key=lambda key: -places.get(key, -1))

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        return first_evictable(self._order, count, evictable)
