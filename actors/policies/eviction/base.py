"""What the cache asks of an eviction policy. The cache owns slots, pins and bytes; a policy owns the order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import islice


class EvictionPolicy(ABC):
    """Order of leaving over the experts that occupy a slot."""

    @abstractmethod
    def admitted(self, key: int) -> None:
        """An expert was given a slot (its bytes may still be on their way)."""

    @abstractmethod
    def used(self, keys: Iterable[int]) -> None:
        """A forward ran these experts, in this order."""

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        """A layer's routing is known, before anything is planned; once a layer and forward, layers in rising order.

        Args:
            keys: experts of the layer that are needed, held or not.
            counts: tokens that picked each of them. tokens: of the forward.
        """
        return None

    def ranked(self, keys: Sequence[int]) -> list[int]:
        """These experts, held or not, most worth keeping first; changes nothing."""
        return list(keys)

    @abstractmethod
    def removed(self, key: int) -> None:
        """An expert lost its slot."""

    @abstractmethod
    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """At most `count` admitted keys for which `evictable` holds, first to go first; changes nothing."""

    def of_class(self, slot_class: int) -> EvictionPolicy:
        """The order of leaving within one class of slots (`Residency`); who has one order for all is asked itself."""
        return self


def first_evictable(order: Iterable[int], count: int, evictable: Callable[[int], bool]) -> list[int]:
    """At most `count` keys of an order for which `evictable` holds; it looks no further than it must."""
    return list(islice(filter(evictable, order), max(0, count)))
