"""The orders of eviction that native passes keep themselves (`kernels/cpu/order.hpp`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import log
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ....kernels.importance import NativeImportance, expect_map, lowest_products
from ...core import _core
from ...policies.activeevict import ImportanceEviction
from ...policies.eviction import EvictionPolicy, Lfu, LfuDecay, Lru, SweepLru
from ...policies.fmoe import ExpertMapDecay, ExpertMapEviction
from ...policies.moepic import Lcp
from ...policies.registry import PolicyContext, PolicyOptions, policy_class
from ...policies.slot_classes import make_eviction
from ...policies.worth import WorthEviction, WorthOrder

_LRU, _SWEEP, _LFU, _MAP, _IMPORTANCE, _WORTH = range(6)  # `Order::Kind`


class NativeOrder(EvictionPolicy):
    """An order of eviction in native code: a policy's decisions.

    Attributes:
        handle: the order, which a cache's core takes.

    Args:
        held: has the arrays that the order reads, where the order does not hold them. slot_class: whose victims.
    """

    def __init__(
        self, handle: _core.NativeOrder, held: object = None, slot_class: int = 0
    ) -> None:
        self.handle, self._held, self._class = handle, held, slot_class

    def admitted(self, key: int) -> None:
        self.handle.admitted(key)

    def used(self, keys: Iterable[int]) -> None:
        self.handle.used(list(keys))

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        self.handle.routed(list(keys), list(counts), tokens)

    def removed(self, key: int) -> None:
        self.handle.removed(key)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        mask = getattr(evictable, "__self__", None)  # of `Residency.evictable`, which looks keys up in one
        if not isinstance(mask, bytes | bytearray):
            mask = bytes(map(bool, map(evictable, range(self.handle.segments))))
        return self.handle.victims(self._class, count, np.frombuffer(mask, np.uint8))


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
        super().__init__(_core.WholeOrder(_WORTH, layers, experts))
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

    native: split experts may have a native order.
    """
    if split and native:
        if isinstance(options, Lcp.Options):
            return SplitOrder(context.layers, context.experts, options.rho, options.omega)
        if policy_class("eviction", options.kind) is Lru:
            return SplitOrder(context.layers, context.experts)
    given = replace(context, importance=NativeImportance, lowest=lowest_products, expect_map=expect_map)
    return make_eviction(options, given, split=split, low_bit=low_bit)


def core_order(
    policy: EvictionPolicy, layers: int, experts: int, parts: bool
) -> tuple[EvictionPolicy, _core.Order]:
    """The order of a policy in its first state, and as the core's. parts: the cache has several slot classes."""
    if not isinstance(policy, SplitOrder):
        native = None if parts else native_order(policy, layers, experts)
        if native is None:
            return policy, _core.PythonOrder(policy)
        policy = native
    return policy, policy.handle


def native_order(policy: EvictionPolicy, layers: int, experts: int) -> NativeOrder | None:
    """The order of a policy in its first state; None: native code has no such order."""
    whole = partial(_core.WholeOrder, layers=layers, experts=experts)
    if type(policy) is Lru:
        return NativeOrder(whole(_LRU))
    if type(policy) is SweepLru:
        return NativeOrder(whole(_SWEEP, least=policy.least))
    if type(policy) in (Lfu, LfuDecay):
        assert isinstance(policy, Lfu)
        return NativeOrder(whole(_LFU, growth=policy.growth))
    if type(policy) in (ExpertMapEviction, ExpertMapDecay):
        assert isinstance(policy, ExpertMapEviction)
        return NativeOrder(whole(_MAP, growth=policy.growth, probabilities=policy.probabilities, told=policy.told))
    if type(policy) is WorthEviction:
        return NativeWorth(layers, experts)
    if type(policy) is ImportanceEviction and isinstance(policy.state, NativeImportance):
        return NativeOrder(whole(_IMPORTANCE, importance=cast(Any, policy.state.handle)), held=policy.state)
    return None
