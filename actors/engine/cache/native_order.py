"""The orders of eviction that native passes keep themselves (`kernels/cpu/order.hpp`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from ....kernels import _cpu
from ....kernels.importance import NativeImportance, expect_map, lowest_products
from ...policies.activeevict import ImportanceEviction
from ...policies.eviction import EvictionPolicy, Lfu, LfuDecay, Lru, SweepLru, lowest_evictable
from ...policies.fmoe import ExpertMapDecay, ExpertMapEviction
from ...policies.moepic import Lcp
from ...policies.registry import PolicyContext, PolicyOptions, policy_class
from ...policies.slot_classes import make_eviction
from .native_split import SplitOrder

_LRU, _SWEEP, _LFU, _MAP, _IMPORTANCE = range(5)  # `Order::Kind`


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
        self.handle = _cpu.order(kind, layers, experts, least, growth, probabilities, state)
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
    if type(policy) is ImportanceEviction and isinstance(policy.state, NativeImportance):
        return NativeOrder(_IMPORTANCE, layers, experts, importance=policy.state)
    return None
