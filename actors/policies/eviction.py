"""Who leaves the cache first. The cache owns slots, pins and bytes; a policy owns the order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable


class EvictionPolicy(ABC):
    """Order of leaving over the experts that occupy a slot."""

    @abstractmethod
    def admitted(self, key: int) -> None:
        """An expert was given a slot (its bytes may still be on their way)."""

    @abstractmethod
    def used(self, keys: Iterable[int]) -> None:
        """A forward ran these experts, in this order."""

    @abstractmethod
    def removed(self, key: int) -> None:
        """An expert lost its slot."""

    @abstractmethod
    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """At most `count` admitted keys for which `evictable` holds, first to go first; changes nothing."""


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

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        out: list[int] = []
        if count <= 0:
            return out
        for key in self._order:
            if evictable(key):
                out.append(key)
                if len(out) == count:
                    break
        return out


EVICTION: dict[str, Callable[[], EvictionPolicy]] = {"lru": Lru}
