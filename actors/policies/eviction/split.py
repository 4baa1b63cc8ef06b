"""Who leaves first where experts are cut in two: each layer's tops by the preset's policy, bottoms by last use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .base import EvictionPolicy
from .lru import Lru
from .per_layer import PerLayer


class SplitEviction(EvictionPolicy):
    """One policy for each slot class, so that none is searched for a victim of another class.

    Tops of layer l (segments l * E to (l + 1) * E - 1, which are their experts' keys): a policy of the layer's own.
    Bottoms (segments from L * E on): least recently used; they are held for the next layers, not for the next token
    (MoEpic section 3.2).

    Args:
        make: a policy for the tops of one layer. layers, experts: L, E.
    """

    def __init__(self, make: Callable[[], EvictionPolicy], layers: int, experts: int) -> None:
        self._layers, self._keys = layers, layers * experts
        self._tops, self._bottoms = PerLayer(make, layers, experts), Lru()

    def of_class(self, slot_class: int) -> EvictionPolicy:
        return self._bottoms if slot_class == self._layers else self._tops.of(slot_class)

    def admitted(self, key: int) -> None:
        self._at(key).admitted(key)

    def used(self, keys: Iterable[int]) -> None:
        segments = list(keys)
        self._tops.used([segment for segment in segments if segment < self._keys])
        self._bottoms.used([segment for segment in segments if segment >= self._keys])

    def removed(self, key: int) -> None:
        self._at(key).removed(key)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """Of any class, tops first; who needs a slot of one class asks `of_class`."""
        tops = self._tops.victims(count, evictable)
        return tops + self._bottoms.victims(count - len(tops), evictable)

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        self._tops.routed(keys, counts, tokens)

    def ranked(self, keys: Sequence[int]) -> list[int]:
        """Experts, as the policies of the tops rank them: the first of all layers before the second ones."""
        return self._tops.ranked(keys)

    def _at(self, segment: int) -> EvictionPolicy:
        return self._tops if segment < self._keys else self._bottoms
