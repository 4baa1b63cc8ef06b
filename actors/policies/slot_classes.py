"""Orders of eviction of caches with several classes of slots (`core::Layout`): split experts, and low-bit replicas."""

from __future__ import annotations

from collections.abc import Sequence

from ..core import _core
from .eviction import EvictionPolicy, Lru, NativeOrder, core_order
from .registry import PolicyContext, PolicyOptions, make, policy_class


def make_eviction(
    options: PolicyOptions, context: PolicyContext, *, split: bool = False, low_bit: bool = False
) -> EvictionPolicy:
    """The policy of a cache in its first state.

    Args:
        split: experts are split; the tops of each layer get a policy of their own, for a model of one layer.
        low_bit: replicas have their own slots.

    Raises:
        ValueError: split, and the policy cannot order the experts of one layer.
    """
    layers, experts = context.layers, context.experts
    if split:
        if not policy_class("eviction", options.kind).per_layer:
            raise ValueError(f"eviction {options.kind} has no order for the experts of one layer, which split needs")
        one = PolicyContext(1, experts, context.top_k, one_layer=True, seed=context.seed)
        return SlotClasses([make("eviction", options, one) for _ in range(layers)], layers, experts, split=True)
    policy: EvictionPolicy = make("eviction", options, context)
    return SlotClasses([policy], layers, experts, split=False) if low_bit else policy


class SlotClasses(NativeOrder):
    """Slots of several classes with separate orders. Keys below L * E leave by the preset's policy, the others by last
    use: bottoms of split experts, which serve the next layers and not the next token (MoEpic section 3.2), or low-bit
    replicas.

    Args:
        first: orders the keys below L * E; with a split one policy for each layer, whose keys begin at 0.
        layers, experts: L and E.
    """

    def __init__(self, first: Sequence[EvictionPolicy], layers: int, experts: int, *, split: bool) -> None:
        self._first, self._keys, self._second = first, layers * experts // len(first), Lru(layers, experts)
        members = [core_order(policy, self._keys) for policy in first]
        super().__init__(_core.ByClass(layers, experts, split, [*members, self._second.handle]))

    def ranked(self, keys: Sequence[int]) -> list[int]:
        """Each layer's order; the first of every layer come before the second ones."""
        self.handle.tell()
        position = {
            index * self._keys + key: i
            for index, policy in enumerate(self._first)
            for i, key in enumerate(policy.ranked([k % self._keys for k in keys if k // self._keys == index]))
        }
        return sorted(keys, key=position.__getitem__)
