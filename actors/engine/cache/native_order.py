"""The orders of eviction that native passes keep themselves (`kernels/cpu/order.hpp`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from math import log
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ....kernels import _cpu
from ....kernels.importance import NativeImportance, expect_map, lowest_products
from ...core import _core
from ...policies.activeevict import ImportanceEviction
from ...policies.eviction import EvictionPolicy, Lfu, LfuDecay, Lru, SweepLru, first_evictable, lowest_evictable
from ...policies.fmoe import ExpertMapDecay, ExpertMapEviction
from ...policies.moepic import Lcp
from ...policies.registry import PolicyContext, PolicyOptions, policy_class
from ...policies.slot_classes import make_eviction
from ...policies.worth import WorthEviction, WorthOrder

_LRU, _SWEEP, _LFU, _MAP, _IMPORTANCE, _WORTH = range(6)  # `Order::Kind`


class SplitOrder(EvictionPolicy):
    """`split_eviction` of `Lcp`, or of `Lru`, with the state in native arrays.

    Args:
        layers, experts: L and E. rho, omega: of `Lcp`; None: `Lru`.
    """

    learns_use = True

    def __init__(self, layers: int, experts: int, rho: float | None = None, omega: float = 1.0) -> None:
        self._layers, self._keys = layers, layers * experts
        rate = 0.0 if rho is None else log(1 / rho) / omega
        self.handle = _cpu.split_order(layers, experts, rate, rho is None)

    def admitted(self, key: int) -> None:
        _cpu.split_moved(self.handle, [key], True)

    def used(self, keys: Iterable[int]) -> None:
        _cpu.split_used(self.handle, list(keys))

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        _cpu.split_routed(self.handle, list(keys), list(counts), tokens)

    def removed(self, key: int) -> None:
        _cpu.split_moved(self.handle, [key], False)

    def ranked(self, keys: Sequence[int]) -> list[int]:
        """Each layer's order; the first of every layer come before the second ones."""
        values = [_cpu.split_value(self.handle, key) for key in keys]
        experts, places, taken = self._keys // self._layers, dict[int, int](), [0] * self._layers
        for at in sorted(range(len(keys)), key=lambda at: -values[at]):
            layer = keys[at] // experts
            places[keys[at]], taken[layer] = taken[layer], taken[layer] + 1
        return sorted(keys, key=places.__getitem__)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """Over all slot classes, the layers' tops first."""
        found: list[int] = []
        for slot_class in range(self._layers + 1):
            found += self._leaving(slot_class, count - len(found), evictable)
        return found

    def of_class(self, slot_class: int) -> EvictionPolicy:
        return _OfClass(self, slot_class)

    def _leaving(self, slot_class: int, count: int, evictable: Callable[[int], bool]) -> list[int]:
        return first_evictable(_cpu.split_leaving(self.handle, slot_class), count, evictable) if count > 0 else []


class _OfClass(EvictionPolicy):
    """One slot class of a `SplitOrder`."""

    def __init__(self, order: SplitOrder, slot_class: int) -> None:
        self._order, self._class = order, slot_class

    def admitted(self, key: int) -> None:
        self._order.admitted(key)

    def used(self, keys: Iterable[int]) -> None:
        self._order.used(keys)

    def removed(self, key: int) -> None:
        self._order.removed(key)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        return self._order._leaving(self._class, count, evictable)


class NativeOrder(EvictionPolicy):
    """A policy in native code: the same decisions. For caches of whole experts.

    Args:
        least: experts of a layer that sweeps. growth: what a use counts more than one a pass earlier.
        maps, importance: the policy, whose predictions the order reads.
    """

    def __init__(
        self, kind: int, layers: int, experts: int, least: float = 0.0, growth: float = 1.0,
        maps: ExpertMapEviction | None = None, importance: NativeImportance | None = None,
    ) -> None:  # fmt: skip
        probabilities = 0 if maps is None else maps.probabilities.ctypes.data
        state = None if importance is None else importance.handle
        told = 0 if maps is None else maps.told.ctypes.data
        self.handle = _cpu.order(kind, layers, experts, least, growth, probabilities, told, state)
        self._held = maps, importance

    def admitted(self, key: int) -> None:
        _cpu.order_admitted(self.handle, [key])

    def used(self, keys: Iterable[int]) -> None:
        _cpu.order_used(self.handle, list(keys))

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        _cpu.order_routed(self.handle, list(keys), list(counts))

    def removed(self, key: int) -> None:
        _cpu.order_removed(self.handle, [key])

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        return lowest_evictable(partial(_cpu.order_first, self.handle), count, evictable)


class NativeWorth(NativeOrder, WorthOrder):
    """`WorthOrder` in native code (`kernels/cpu/worth.hpp`), which notes what passes use for the planner to hear."""

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__(_WORTH, layers, experts)
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
        return _cpu.worth_refused(self.handle)

    def bind(self, slots: int, worths: NDArray[np.float64]) -> None:
        """Raises ValueError: worths are not float64 [L, E], contiguous."""
        _expect(worths, (self._layers, self._experts), np.dtype(np.float64))
        _cpu.worth_bind(self.handle, slots // self._layers, worths.ctypes.data)
        self._worths = worths

    def prompt(self, uses: NDArray[np.int64] | None) -> None:
        """Raises ValueError: uses are not int64 [L, E], contiguous."""
        if uses is not None:
            _expect(uses, (self._layers, self._experts), np.dtype(np.int64))
        _cpu.worth_prompt(self.handle, 0 if uses is None else uses.ctypes.data)
        self._uses = uses

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        # Shares make who goes depend on who may, so the order needs the whole mask. `Residency.evictable` looks one up.
        mask = getattr(evictable, "__self__", None)
        if not isinstance(mask, bytes | bytearray):
            mask = bytearray(map(bool, map(evictable, range(self._layers * self._experts))))
        return _cpu.worth_victims(self.handle, count, mask)

    def refuse(self, key: int) -> None:
        _cpu.worth_refuse(self.handle, key)

    def admit(self, key: int) -> None:
        _cpu.worth_admit(self.handle, key)

    def settled(self) -> frozenset[int]:
        return frozenset(_cpu.worth_settled(self.handle))

    def note(self) -> None:
        """Note what passes use from now on."""
        _cpu.worth_note(self.handle)

    def noted(self) -> list[tuple[int, NDArray[np.int32]]]:
        """The experts of each layer that were used since `note`, layers in rising order; noting ends."""
        return [(layer, np.frombuffer(experts, np.int32)) for layer, experts in _cpu.worth_noted(self.handle)]


def _expect(array: NDArray[np.generic], shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> None:
    if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"{array.dtype} {array.shape} is not {dtype} {shape} in one piece")


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
    if isinstance(policy, SplitOrder):
        return policy, _core.TopsAndBottoms(cast(Any, policy.handle))
    native = None if parts else native_order(policy, layers, experts)
    if native is None:
        return policy, _core.PythonOrder(policy)
    return native, _core.WholeOrder(cast(Any, native.handle))


def native_order(policy: EvictionPolicy, layers: int, experts: int) -> NativeOrder | None:
    """The order of a policy in its first state; None: native code has no such order."""
    if type(policy) is Lru:
        return NativeOrder(_LRU, layers, experts)
    if type(policy) is SweepLru:
        return NativeOrder(_SWEEP, layers, experts, least=policy.least)
    if type(policy) in (Lfu, LfuDecay):
        assert isinstance(policy, Lfu)
        return NativeOrder(_LFU, layers, experts, growth=policy.growth)
    if type(policy) in (ExpertMapEviction, ExpertMapDecay):
        assert isinstance(policy, ExpertMapEviction)
        return NativeOrder(_MAP, layers, experts, growth=policy.growth, maps=policy)
    if type(policy) is WorthEviction:
        return NativeWorth(layers, experts)
    if type(policy) is ImportanceEviction and isinstance(policy.state, NativeImportance):
        return NativeOrder(_IMPORTANCE, layers, experts, importance=policy.state)
    return None
