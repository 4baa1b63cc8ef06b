"""Orders of eviction of caches with several classes of slots (`core::Layout`): split experts, and low-bit replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from .eviction import EvictionPolicy, Lru
from .registry import PolicyContext, PolicyOptions, make, policy_class


def make_eviction(
    options: PolicyOptions, context: PolicyContext, *, split: bool = False, low_bit: bool = False
) -> EvictionPolicy:
    """The policy of a cache in its first state.

    Args:
        split: experts are split; the tops of each layer get a policy of their own.
        low_bit: replicas have their own slots.

    Raises:
        ValueError: split, and the policy cannot order the experts of one layer.
    """
    if split:
        if not policy_class("eviction", options.kind).per_layer:
            raise ValueError(f"eviction {options.kind} has no order for the experts of one layer, which split needs")
        one = PolicyContext(context.layers, context.experts, context.top_k, one_layer=True, seed=context.seed)
        return split_eviction(lambda: make("eviction", options, one), context.layers, context.experts)
    policy: EvictionPolicy = make("eviction", options, context)
    return TwoPools(policy, context.layers * context.experts, 1) if low_bit else policy


class PerLayer(EvictionPolicy):
    """One independent policy for each layer: slots belong to layers. Keys are layer * experts + expert.

    Args:
        make: a policy for the experts of one layer.
    """

    def __init__(self, make: Callable[[], EvictionPolicy], layers: int, experts: int) -> None:
        self._experts = experts
        self._policies = [make() for _ in range(layers)]
        self.learns_use = any(policy.learns_use for policy in self._policies)

    def of_class(self, slot_class: int) -> EvictionPolicy:
        """The policy of one layer; keys are those of the whole model."""
        return self._policies[slot_class]

    def admitted(self, key: int) -> None:
        self._policies[key // self._experts].admitted(key)

    def used(self, keys: Iterable[int]) -> None:
        for layer, group in groupby(keys, self._experts.__rfloordiv__):
            self._policies[layer].used(list(group))

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        if keys:
            self._policies[keys[0] // self._experts].routed(keys, counts, tokens)

    def removed(self, key: int) -> None:
        self._policies[key // self._experts].removed(key)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """Layer after layer: there is no order between layers."""
        out: list[int] = []
        for policy in self._policies:
            out += policy.victims(count - len(out), evictable)
        return out

    def ranked(self, keys: Sequence[int]) -> list[int]:
        """Each layer's order; the first of every layer come before the second ones."""
        position = {
            key: i
            for layer, policy in enumerate(self._policies)
            for i, key in enumerate(policy.ranked([k for k in keys if k // self._experts == layer]))
        }
        return sorted(keys, key=position.__getitem__)


class TwoPools(EvictionPolicy):
    """Two pools of slots with separate orders. Keys below `keys` leave by the preset's policy, the others by last use:
    bottoms of split experts, which serve the next layers and not the next token (MoEpic section 3.2), or low-bit
    replicas.

    Args:
        first: orders the keys below `keys`. second_class: slot class of the others.
    """

    def __init__(self, first: EvictionPolicy, keys: int, second_class: int) -> None:
        self._first, self._second = first, Lru()
        self._keys, self._second_class = keys, second_class
        self._last_used = self._second.order  # which most changes go to without another call
        self.routed, self.ranked = first.routed, first.ranked  # type: ignore[method-assign]

    def of_class(self, slot_class: int) -> EvictionPolicy:
        return self._second if slot_class == self._second_class else self._first.of_class(slot_class)

    def admitted(self, key: int) -> None:
        if key < self._keys:
            self._first.admitted(key)
        else:
            self._last_used[key] = None

    def used(self, keys: Iterable[int]) -> None:
        move, least = self._last_used.move_to_end, self._keys
        for key in keys:
            if key >= least:
                move(key)
        if self._first.learns_use:
            self._first.used([key for key in keys if key < least])

    def removed(self, key: int) -> None:
        if key < self._keys:
            self._first.removed(key)
        else:
            del self._last_used[key]

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """Over both pools, the first pool first; `of_class` gives the order of one slot class."""
        found = self._first.victims(count, evictable)
        return found + self._second.victims(count - len(found), evictable)


def split_eviction(make: Callable[[], EvictionPolicy], layers: int, experts: int) -> TwoPools:
    """For split experts: one policy for the tops of each layer (slot class l), last use for bottoms (class L)."""
    return TwoPools(PerLayer(make, layers, experts), layers * experts, layers)
