"""One eviction policy for each layer, for caches whose slots belong to layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from .base import EvictionPolicy


class PerLayer(EvictionPolicy):
    """Policies of one kind, one for each layer, that know nothing of each other.

    Who needs a slot of a layer asks that layer's (`of`), which looks at no other's experts. Keys are
    layer * experts + expert.

    Args:
        make: a policy for the experts of one layer.
    """

    def __init__(self, make: Callable[[], EvictionPolicy], layers: int, experts: int) -> None:
        self._experts = experts
        self._policies = [make() for _ in range(layers)]

    def of(self, layer: int) -> EvictionPolicy:
        """The policy of one layer; its keys are those of the whole model."""
        return self._policies[layer]

    def admitted(self, key: int) -> None:
        self._policies[key // self._experts].admitted(key)

    def used(self, keys: Iterable[int]) -> None:
        for layer, group in groupby(keys, lambda key: key // self._experts):
            self._policies[layer].used(list(group))

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        if keys:
            self._policies[keys[0] // self._experts].routed(keys, counts, tokens)

    def removed(self, key: int) -> None:
        self._policies[key // self._experts].removed(key)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """Layer after layer: between experts of different layers there is no order."""
        out: list[int] = []
        for policy in self._policies:
            out += policy.victims(count - len(out), evictable)
        return out

    def ranked(self, keys: Sequence[int]) -> list[int]:
        """Each layer's in its order; the first of all layers come before the second ones."""
        places = {
            key: place
            for layer, policy in enumerate(self._policies)
            for place, key in enumerate(policy.ranked([k for k in keys if k // self._experts == layer]))
        }
        return sorted(keys, key=places.__getitem__)
