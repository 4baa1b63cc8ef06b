"""Eviction by worth: whoever plans misses says what each resident is worth, and this order carries it out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .eviction import EvictionPolicy
from .registry import PolicyContext, register


class WorthOrder(EvictionPolicy):
    """Residents of least worth leave first; each layer has an equal share of the slots.

    Order: experts that were not admitted (`refuse`); if the layer at work holds its share or more, its residents by
    worth; then of the layers above their share, the fullest first, what exceeds it; then all others, layer by layer.
    Worth is what the placer gives (`bind`), ties by key; in layers that the prompts of this forward have used, their
    uses (`prompt`), ties by last use. Without `bind` a layer's residents leave by last use.

    Attributes:
        layer: the layer at work, whose routing is known, or for which a copy is to be made.
    """

    per_layer = False
    layer: int

    @property
    @abstractmethod
    def refused(self) -> Collection[int]:
        """Residents that leave before all others, in this order."""

    @abstractmethod
    def bind(self, slots: int, worths: NDArray[np.float64]) -> None:
        """The slots of all layers together, and what each expert is worth [L, E], which may change from now on."""

    @abstractmethod
    def prompt(self, uses: NDArray[np.int64] | None) -> None:
        """Uses of each expert by the prompts that run now [L, E], which may change from now on; None: none runs."""

    @abstractmethod
    def refuse(self, key: int) -> None:
        """This resident is of less worth than all others."""

    @abstractmethod
    def admit(self, key: int) -> None:
        """Undo `refuse`."""

    @abstractmethod
    def settled(self) -> frozenset[int]:
        """The residents of the other layers, of each those of greatest worth that are within its share."""


@register("eviction", "worth")
class WorthEviction(WorthOrder):
    """`WorthOrder` in Python: the reference of the native order, and the order of caches without native loads.

    State: the residents of each layer by last use, and those refused. O(1) per key, `victims` O(L log L + residents of
    the layers that it looks at, and their ranking).
    """

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> WorthEviction:
        return cls(context.layers, context.experts)

    def __init__(self, layers: int, experts: int) -> None:
        self._experts = experts
        self._held: list[dict[int, None]] = [{} for _ in range(layers)]
        self._share = 0
        self._worths: NDArray[np.float64] | None = None
        self._uses: NDArray[np.int64] | None = None
        self._refused: dict[int, None] = {}
        self.layer = 0

    @property
    def refused(self) -> Collection[int]:
        return self._refused.keys()

    def bind(self, slots: int, worths: NDArray[np.float64]) -> None:
        self._share, self._worths = slots // len(self._held), worths

    def prompt(self, uses: NDArray[np.int64] | None) -> None:
        self._uses = uses

    def admitted(self, key: int) -> None:
        self._held[key // self._experts][key] = None

    def used(self, keys: Iterable[int]) -> None:
        for key in keys:
            held = self._held[key // self._experts]
            del held[key]
            held[key] = None

    def removed(self, key: int) -> None:
        del self._held[key // self._experts][key]
        self._refused.pop(key, None)

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        if keys:
            self.layer = keys[0] // self._experts

    def refuse(self, key: int) -> None:
        if key in self._held[key // self._experts]:
            self._refused[key] = None

    def admit(self, key: int) -> None:
        self._refused.pop(key, None)

    def settled(self) -> frozenset[int]:
        found = list[int]()
        for layer, held in enumerate(self._held):
            if layer != self.layer:
                found += held if len(held) <= self._share else self._rank(layer, held)[len(held) - self._share :]
        return frozenset(found)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        if count <= 0:
            return []
        out = [key for key in self._refused if evictable(key)][:count]
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
        held, refused = self._held[layer], self._refused
        there = [key for key in held if key not in refused and key not in taken and evictable(key)]
        return self._rank(layer, there)[:count]

    def _rank(self, layer: int, keys: Iterable[int]) -> list[int]:
        """Residents of a layer, given by last use: those of least worth first."""
        base = layer * self._experts
        if self._uses is not None and self._uses[layer].any():
            uses = self._uses[layer]
            return sorted(keys, key=lambda key: uses[key - base])
        if self._worths is None:
            return list(keys)
        worths = self._worths[layer]
        return sorted(keys, key=lambda key: (worths[key - base], key))
