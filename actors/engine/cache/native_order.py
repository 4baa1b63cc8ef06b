"""The orders of eviction of caches: native ones where there are such (`policies.native_order`), by kind."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core import _core
from ...policies.eviction import EvictionPolicy, decay_growth
from ...policies.native_order import Kind, NativeOrder, whole_order
from ...policies.registry import PolicyContext, PolicyOptions
from ...policies.slot_classes import make_eviction
from ...policies.worth import WorthOrder


class SplitOrder(NativeOrder):
    """`split_eviction` of `Lcp`, or of `Lru`.

    Args:
        layers, experts: L and E. rho, omega: of `Lcp`; None: `Lru`.
    """

    handle: _core.TopsAndBottoms

    def __init__(self, layers: int, experts: int, rho: float | None = None, omega: float = 1.0) -> None:
        self._layers, self._experts = layers, experts
        rate = 0.0 if rho is None else log(1 / rho) / omega
        super().__init__(_core.TopsAndBottoms(layers, experts, rate, rho is None))

    def ranked(self, keys: Sequence[int]) -> list[int]:
        """Each layer's order; the first of every layer come before the second ones."""
        values = [self.handle.value(key) for key in keys]
        places, taken = dict[int, int](), [0] * self._layers
        for at in sorted(range(len(keys)), key=lambda at: -values[at]):
            layer = keys[at] // self._experts
            places[keys[at]], taken[layer] = taken[layer], taken[layer] + 1
        return sorted(keys, key=places.__getitem__)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """Over all slot classes, the layers' tops first."""
        found: list[int] = []
        for slot_class in range(self._layers + 1):
            found += self.of_class(slot_class).victims(count - len(found), evictable)
        return found

    def of_class(self, slot_class: int) -> EvictionPolicy:
        return NativeOrder(self.handle, slot_class=slot_class)


class NativeWorth(NativeOrder, WorthOrder):
    """`WorthOrder` in native code (`kernels/cpu/worth.hpp`), which notes what passes use for the planner to hear."""

    handle: _core.WholeOrder

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__(whole_order("worth", layers, experts))
        self._layers, self._experts, self._layer = layers, experts, 0
        self._worths: NDArray[np.float64] | None = None  # both are read in place
        self._uses: NDArray[np.int64] | None = None

    @property
    def layer(self) -> int:
        return self._layer

    @layer.setter
    def layer(self, layer: int) -> None:
        self.routed((layer * self._experts,), (1,), 1)

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        if keys:
            self._layer = keys[0] // self._experts
        super().routed(keys, counts, tokens)

    @property
    def refused(self) -> Collection[int]:
        return self.handle.refused

    def bind(self, slots: int, worths: NDArray[np.float64]) -> None:
        """Raises ValueError: worths are not of [L, E]; TypeError: not float64, or not contiguous."""
        self.handle.bind(slots // self._layers, worths)
        self._worths = worths

    def prompt(self, uses: NDArray[np.int64] | None) -> None:
        """Raises ValueError: uses are not of [L, E]; TypeError: not int64, or not contiguous."""
        self.handle.prompt(uses)
        self._uses = uses

    def refuse(self, key: int) -> None:
        self.handle.refuse(key)

    def admit(self, key: int) -> None:
        self.handle.admit(key)

    def settled(self) -> frozenset[int]:
        return frozenset(self.handle.settled())

    def note(self) -> None:
        """Note what passes use from now on."""
        self.handle.note()

    def noted(self) -> list[tuple[int, NDArray[np.int32]]]:
        """The experts of each layer that were used since `note`, layers in rising order; noting ends."""
        return [(layer, np.frombuffer(experts, np.int32)) for layer, experts in self.handle.noted()]


def fast_eviction(
    options: PolicyOptions, context: PolicyContext, *, split: bool, low_bit: bool, native: bool = True
) -> EvictionPolicy:
    """`make_eviction`, with native code where there is some for the same decisions. Raises ValueError: as that.

    native: there may be a native order.
    """
    made = _SPLIT if split else {} if low_bit else _WHOLE
    if native and options.kind in made:
        return made[options.kind](options, context)
    return make_eviction(options, context, split=split, low_bit=low_bit)


def core_order(policy: EvictionPolicy) -> _core.Order:
    """A policy's order as the core's."""
    return policy.handle if isinstance(policy, NativeOrder) else _core.PythonOrder(policy)


def _whole(kind: Kind, options: PolicyOptions, context: PolicyContext, **given: Any) -> NativeOrder:
    return NativeOrder(whole_order(kind, context.layers, context.experts, **given))


def _lfu(options: Any, context: PolicyContext) -> NativeOrder:
    return _whole("lfu", options, context, growth=decay_growth(options.half_life))


def _sweep(options: Any, context: PolicyContext) -> NativeOrder:
    return _whole("lru-sweep", options, context, least=options.share * context.experts)


Make = Callable[[Any, PolicyContext], EvictionPolicy]
# by the kind of a preset's eviction; the orders of ActiveEvict and fMoE are native wherever they are made
_WHOLE: Mapping[str, Make] = {
    "lru": partial(_whole, "lru"), "lru-sweep": _sweep, "lfu": _lfu, "lfu-decay": _lfu,
    "worth": lambda _, context: NativeWorth(context.layers, context.experts),
}  # fmt: skip
_SPLIT: Mapping[str, Make] = {
    "lcp": lambda options, context: SplitOrder(context.layers, context.experts, options.rho, options.omega),
    "lru": lambda _, context: SplitOrder(context.layers, context.experts),
}
