"""What the budget of one device buys: slots for experts, for parts of split ones and for replicas; and the least budget
that a policy can work with. Without torch.

Every refusal of a budget says the same number: the least that passes all checks, of the slot of one expert, of a split,
of replicas, of experts that are kept, on the device with the most. So what is said is taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..errors import BudgetError, ConfigError, size
from .budget import Budget
from .policies.context_ndp import HotSlots
from .policies.moepic.split import SplitLayout, SplitOptions, buffer_for
from .policies.sharding import Ownership, owned_experts, owners
from .policy_settings import PolicySettings


@dataclass(frozen=True)
class SlotSizes:
    """What a budget is divided by.

    Attributes:
        layers, experts: MoE layers, and experts in each.
        slot_bytes: of one expert. replica_bytes: of one low-bit replica; None: the policy loads none.
        neurons, top_k: of an expert; experts of a token.
        shards: devices with a budget each, and the rule by which they share the experts.
    """

    layers: int
    experts: int
    slot_bytes: int
    neurons: int
    top_k: int
    replica_bytes: int | None = None
    shards: int = 1
    ownership: Ownership = "layer-expert"

    @property
    def keys(self) -> int:
        return self.layers * self.experts

    @cached_property
    def owner(self) -> NDArray[np.int64]:
        """The device of each expert [L, E]."""
        found = owners(self.layers, self.experts, self.shards, self.ownership)
        return np.array(found).reshape(self.layers, self.experts)

    @cached_property
    def owned(self) -> tuple[int, ...]:
        """Experts in all layers that belong to each device."""
        return owned_experts(self.layers, self.experts, self.shards, self.ownership)


@dataclass(frozen=True)
class Bought:
    """What a device's budget of bytes buys; `slots` are of whole experts."""

    budget: int
    slots: int
    split: SplitLayout | None
    replica_slots: int


def divide(policy: PolicySettings, budget: Budget, sizes: SlotSizes, owned: int | None = None) -> Bought:
    """Divide the budget of one device.

    Args:
        owned: experts that belong to it; None: to the device with the most.

    Raises:
        BudgetError: it is too small; the remedy has the least that is not. ConfigError: the device's memory is not
            known.
    """
    if budget.auto is not None:
        budget = Budget(nbytes=budget.auto.nbytes)  # raises what `auto` lacks
    try:
        nbytes = budget.bytes_of(sizes.slot_bytes, sizes.keys)
        return _divided(policy, nbytes, sizes, max(sizes.owned) if owned is None else owned)
    except BudgetError as error:
        raise BudgetError(error.what, _remedy(policy, sizes)) from error


def mixed_slots(nbytes: int, slot_bytes: int, replica_bytes: int, share: float, experts: int) -> tuple[int, int]:
    """Slots for full experts and slots for low-bit replicas, together within the budget.

    Args:
        nbytes: the budget in bytes. slot_bytes, replica_bytes: of one slot of each.
        share: of the budget, for replicas. experts: routed experts in all layers, the most slots of either kind.

    Raises:
        BudgetError: it does not hold one of each.
    """
    replicas = min(int(nbytes * share) // replica_bytes, experts)
    full = min((nbytes - replicas * replica_bytes) // slot_bytes, experts)
    if not replicas or not full:
        raise BudgetError(
            f"the budget of {size(nbytes)} does not hold an expert in full ({size(slot_bytes)}) and, in {share:.0%} of "
            f"it, a replica ({size(replica_bytes)})",
            f"give at least {max(math.ceil(replica_bytes / share), math.ceil(slot_bytes / (1 - share)))}B",
        )
    return full, replicas


def least_bytes(policy: PolicySettings, sizes: SlotSizes) -> int | None:
    """The least budget of each device that `divide` takes; None: none is enough."""

    def fits(nbytes: int) -> bool:
        try:
            _divided(policy, nbytes, sizes, max(sizes.owned))
        except BudgetError:
            return False
        return True

    low, high = sizes.slot_bytes - 1, sizes.slot_bytes  # low does not fit
    most = 4 * sizes.keys * (sizes.slot_bytes + (sizes.replica_bytes or 0))  # more buys nothing
    while not fits(high):
        if high > most:
            return None
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def least_share(least: int, slot_bytes: int, experts: int) -> float | None:
    """The least share of all experts, in millionths, that is so many bytes; None: all are fewer bytes."""
    millionths = math.ceil(1e6 * least / (slot_bytes * experts))
    while millionths <= 1e6:
        if int(millionths / 1e6 * experts * slot_bytes) >= least:
            return millionths / 1e6
        millionths += 1
    return 1.0 if least <= slot_bytes * experts else None


def _first_split(split: SplitOptions, sizes: SlotSizes, slots: int) -> SplitLayout:
    """The initial split: every layer alike. `slots`: whole experts that the memory holds.

    Raises:
        BudgetError: a top of each layer and a bottom do not fit.
    """
    buffer = split.buffer if split.buffer is not None else buffer_for(split.theta, sizes.top_k)
    try:
        return SplitLayout.uniform(
            sizes.layers, sizes.experts, sizes.neurons, slots * sizes.neurons, split.theta, buffer
        )
    except ValueError as error:
        raise BudgetError(
            f"the budget of {slots} experts does not hold a part of one of each of {sizes.layers} layers: {error}",
            "give a larger budget, or use a policy without split",
        ) from error


def _divided(policy: PolicySettings, nbytes: int, sizes: SlotSizes, owned: int) -> Bought:
    """`divide` of so many bytes, with remedies that name no number."""
    Budget(nbytes=nbytes).bytes_of(sizes.slot_bytes, sizes.keys)  # refused if it holds no expert
    split, slots, replica_slots = None, min(nbytes // sizes.slot_bytes, owned), 0
    if sizes.replica_bytes is not None and policy.low_bit is not None:
        slots, replica_slots = mixed_slots(nbytes, sizes.slot_bytes, sizes.replica_bytes, policy.low_bit.share, owned)
    if policy.preload == "all" and slots < owned:
        where = "" if sizes.shards == 1 else f" on the fullest of {sizes.shards} GPUs"
        needed = owned * sizes.slot_bytes
        raise BudgetError(
            f"policy '{policy.name}' keeps all experts resident, {owned} of {size(sizes.slot_bytes)}, {size(needed)}"
            f"{where}; the budget is {size(needed - nbytes)} short of it",
            "choose a policy that loads on demand",
        )
    if policy.placement.hot_per_layer is not None:
        try:
            each = [min(nbytes // sizes.slot_bytes, own) for own in sizes.owned]
            HotSlots.fit(sizes.owner, each, policy.placement.hot_per_layer)
        except ValueError as error:
            raise BudgetError(f"policy '{policy.name}': {error}", "lower placement.hot_per_layer") from error
    if policy.split.kind != "off":
        split = _first_split(policy.split, sizes, slots)
        if policy.split.kind == "fixed":  # nothing will ever use more
            slots = math.ceil(split.total_neurons / sizes.neurons)
    return Bought(nbytes, slots, split, replica_slots)


def _remedy(policy: PolicySettings, sizes: SlotSizes) -> str:
    least = least_bytes(policy, sizes)
    if least is None:
        raise ConfigError(f"policy '{policy.name}' finds no budget large enough", "choose another policy")
    share = least_share(least, sizes.slot_bytes, sizes.keys)
    shared = f", or a share of {share:.6f}" if share is not None else ""
    other = ", or choose a policy that loads on demand" if policy.preload == "all" else ""
    return f"give at least {least}B{shared}{other}"
