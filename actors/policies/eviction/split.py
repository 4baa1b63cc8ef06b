"""Who leaves first where experts are cut in two: each layer's tops by the preset's policy, bottoms by last use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from .base import EvictionPolicy
from .lru import Lru


class SplitEviction(EvictionPolicy):
    """One policy for each slot class, so that none is searched for a victim of another class.

    Tops of layer l (segments l * E to (l + 1) * E - 1, which are their experts' keys): a policy of the layer's own;
    what a policy counts as time is the layer's, too. Bottoms (segments from L * E on): least recently used (MoEpic
    section 3.2 buffers what is needed next, not what is needed often).

    Args:
        make: a new policy of the preset. layers, experts: L, E.
    """

    def __init__(self, make: Callable[[], EvictionPolicy], layers: int, experts: int) -> None:
        self._experts, self._keys = experts, layers * experts
        self._classes = [*(make() for _ in range(layers)), Lru()]

    def of_class(self, slot_class: int) -> EvictionPolicy:
        return self._classes[slot_class]

    def admitted(self, key: int) -> None:
        self._at(key).admitted(key)

    def used(self, keys: Iterable[int]) -> None:
        by_class: dict[int, list[int]] = {}
        for key in keys:
            by_class.setdefault(self._class_of(key), []).append(key)
        for slot_class, members in by_class.items():
            self._classes[slot_class].used(members)

    def removed(self, key: int) -> None:
        self._at(key).removed(key)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """Of any class, class by class; who needs a slot of one class asks `of_class`."""
        out: list[int] = []
        for policy in self._classes:
            out += policy.victims(count - len(out), evictable)
        return out

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        if keys:
            self._at(keys[0]).routed(keys, counts, tokens)

    def ranked(self, keys: Sequence[int]) -> list[int]:
        """Each layer's own order; of two layers the experts of equal rank follow each other."""
        by_class: dict[int, list[int]] = {}
        for key in keys:
            by_class.setdefault(self._class_of(key), []).append(key)
        places = [
            (rank, slot_class, key)
            for slot_class, members in sorted(by_class.items())
            for rank, key in enumerate(self._classes[slot_class].ranked(members))
        ]
        return [key for _, _, key in sorted(places)]

    def _class_of(self, segment: int) -> int:
        return min(segment, self._keys) // self._experts

    def _at(self, segment: int) -> EvictionPolicy:
        return self._classes[self._class_of(segment)]
