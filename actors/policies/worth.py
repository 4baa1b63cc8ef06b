"""Eviction by worth: whoever plans misses says what each resident is worth, and this order carries it out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from .eviction import EvictionPolicy
from .registry import PolicyContext, register

Rank = Callable[[int, Collection[int]], Sequence[int]]  # (layer, keys of its residents) -> the same, first to go first


@register("eviction", "worth")
class WorthEviction(EvictionPolicy):
    """Residents of least worth leave first; each layer has an equal share of the slots.

    Order: experts that were not admitted (`refuse`); if the layer at work holds its share or more, its residents by
    worth; then of the layers above their share, the fullest first, what exceeds it; then all others, layer by layer.
    Worth is that of the placer (`bind`); without one a layer's residents leave by last use.

    State: the residents of each layer by last use, and those refused. O(1) per key, `victims` O(L log L + residents of
    the layers that it looks at, and their ranking).

    Attributes:
        layer: the layer at work, whose routing is known, or for which a copy is to be made.
        refused: residents that leave before all others.
        noted: the keys of each call of `used`; None: they are not noted.
    """

    per_layer = False

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> WorthEviction:
        return cls(context.layers, context.experts)

    def __init__(self, layers: int, experts: int) -> None:
        self._experts = experts
        self._held: list[dict[int, None]] = [{} for _ in range(layers)]
        self._share = 0
        self._rank: Rank = _by_use
        self.layer = 0
        self.refused: dict[int, None] = {}
        self.noted: list[Sequence[int]] | None = None

    def bind(self, slots: int, rank: Rank) -> None:
        """The slots of all layers together, and the worth of their residents."""
        self._share, self._rank = slots // len(self._held), rank

    def admitted(self, key: int) -> None:
        self._held[key // self._experts][key] = None

    def used(self, keys: Iterable[int]) -> None:
        if self.noted is not None:
            keys = list(keys)
            self.noted.append(keys)
        for key in keys:
            held = self._held[key // self._experts]
            del held[key]
            held[key] = None

    def removed(self, key: int) -> None:
        del self._held[key // self._experts][key]
        self.refused.pop(key, None)

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        if keys:
            self.layer = keys[0] // self._experts

    def refuse(self, key: int) -> None:
        """This resident is of less worth than all others."""
        if key in self._held[key // self._experts]:
            self.refused[key] = None

    def admit(self, key: int) -> None:
        """Undo `refuse`."""
        self.refused.pop(key, None)

    def settled(self) -> frozenset[int]:
        """The residents of the other layers, of each those of greatest worth that are within its share."""
        found = list[int]()
        for layer, held in enumerate(self._held):
            if layer != self.layer:
                found += held if len(held) <= self._share else self._rank(layer, held)[len(held) - self._share :]
        return frozenset(found)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        if count <= 0:
            return []
        out = [key for key in self.refused if evictable(key)][:count]
        held, share, now = self._held, self._share, self.layer
        if len(out) < count and len(held[now]) >= share:
            out += self._least(now, count - len(out), evictable, ())
        if len(out) < count:
            fullest = sorted(range(len(held)), key=lambda layer: -len(held[layer]))
            for layer in fullest:
                if layer != now and len(held[layer]) > share and len(out) < count:
                    out += self._least(layer, min(count - len(out), len(held[layer]) - share), evictable, out)
            for layer in fullest:
                if len(out) == count:
                    break
                out += self._least(layer, count - len(out), evictable, out)
        return out

    def _least(
        self, layer: int, count: int, evictable: Callable[[int], bool], taken: Collection[int]
    ) -> list[int]:
        """The first `count` of a layer's residents to go, without those refused and `taken`."""
        there = [key for key in self._held[layer] if key not in self.refused and key not in taken and evictable(key)]
        return list(self._rank(layer, there)[:count])


def _by_use(layer: int, keys: Collection[int]) -> Sequence[int]:
    return list(keys)
