"""The expert cache of one device, from its settings; for a lead and for a shard."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ....errors import BudgetError, ConfigError, size
from ...core import _core
from ...policies.cost import Link, load_s
from ...policies.moepic.split import SplitLayout, SplitOptions, buffer_for
from ...policies.registry import PolicyContext
from ...settings import EngineSettings, budget_bytes, mixed_slots
from ...store.format import ExpertShape, Published
from ..stats import EngineStats, LayerStats, Timeline
from .cache import ExpertCache
from .device import Device
from .form_slots import FormPool
from .links import Carrier, Linking
from .loader import Loader
from .low_bits import ReplicaWeights, make_part
from .make_link import make_link
from .native_order import fast_eviction
from .slots import ExpertSource, SlotMemory, SlotPool


def make_cache(
    settings: EngineSettings, shape: ExpertShape, weights: Sequence[ExpertSource], device: Device, dtype: torch.dtype,
    owned: int, top_k: int = 1, clock: _core.Clock | None = None, replicas: ReplicaWeights | None = None,
    published: Published | None = None, shared_bytes: int = 0,
) -> ExpertCache:  # fmt: skip
    """A cache within the budget of one device, with counters of its own.

    Args:
        owned: experts in all layers that belong to this device; it gets at most that many slots.
        top_k: experts per token, for the buffer of split experts.
        clock: of a stepped link; None: wall-clock.
        replicas: low-bit replicas, with slots of their own within the budget.
        published: forms of the experts, which slots hold as they are; None: slots hold neurons in `dtype`.
        shared_bytes: of memory beside the budget that slots may have at times (`ExpertCache.resize`).

    Raises:
        BudgetError: the budget does not hold one slot of each kind, or the device's memory does not hold the budget.
        ConfigError: the policy needs all experts resident, and they do not fit; or it splits experts with biases.
    """
    policy, layers, keys = settings.policy, len(weights), len(weights) * shape.num_experts
    slot_bytes = slot_nbytes(shape, dtype, published)
    bought = _divide(settings, shape, layers, slot_bytes, owned, top_k, replicas)
    stats = EngineStats(
        layers=[LayerStats() for _ in range(layers)],
        expert_budget_bytes=bought.budget,
        slots=bought.slots,
        experts=keys,
        executor=device.executor,
    )
    most = min(owned, bought.slots + shared_bytes // slot_bytes)
    memory = SlotMemory(device, bought.slots, most) if most > bought.slots else None
    try:
        part = None if replicas is None else make_part(replicas, bought.replica_slots, device.torch_device)
        pool: SlotPool | FormPool
        if published is None:
            pool = SlotPool.allocate(shape, bought.slots, dtype, device.torch_device, memory)
        else:
            pool = FormPool.allocate(published, bought.slots, dtype, device.torch_device, memory)
    except torch.OutOfMemoryError as error:
        raise BudgetError(
            f"the GPU has no room for an expert cache of {size(bought.budget)} beside what is on it: "
            f"{'. '.join(str(error).split('. ')[:3])}",
            "give a smaller budget, or end what else uses the GPU",
        ) from error
    carrier = Carrier()
    copies: Loader | Linking | _core.Link
    if clock is None or settings.link.gbps is None:
        copies = make_link(device, pool, weights, settings.copies, () if replicas is None else replicas.layers)
    else:  # a stepped link, on its own clock
        seconds = partial(load_s, link=Link(settings.link.gbps, settings.link.latency_us))
        copies = _core.CarryingLink(clock, seconds, 0.0, carrier)
    eviction = fast_eviction(
        policy.eviction, PolicyContext(layers, shape.num_experts, top_k), split=bought.split is not None,
        low_bit=bought.replica_slots > 0,
    )  # fmt: skip
    cache = ExpertCache(
        pool, weights, device, shape.num_experts, bought.slots, slot_bytes, eviction, stats, Timeline(settings.trace),
        copies, time.perf_counter if clock is None else clock, policy.prefetch.min_useful, bought.split,
        policy.evict_writeback, part, memory,
    )  # fmt: skip
    carrier.where = cache.where
    return cache


def slot_nbytes(shape: ExpertShape, dtype: torch.dtype, published: Published | None) -> int:
    """Bytes of one slot; arguments as of `make_cache`."""
    return shape.nbytes(dtype.itemsize) if published is None else published.slot_bytes


@dataclass(frozen=True)
class _Bought:
    """What a device's budget of bytes buys."""

    budget: int
    slots: int  # of whole experts
    split: SplitLayout | None
    replica_slots: int


def _divide(
    settings: EngineSettings, shape: ExpertShape, layers: int, slot_bytes: int, owned: int, top_k: int,
    replicas: ReplicaWeights | None,
) -> _Bought:  # fmt: skip
    policy, keys = settings.policy, layers * shape.num_experts
    budget = budget_bytes(settings.budget, slot_bytes, keys)
    slots, replica_slots = min(budget // slot_bytes, owned), 0
    if replicas is not None and policy.low_bit is not None:
        slots, replica_slots = mixed_slots(budget, slot_bytes, replicas.shape.nbytes(), policy.low_bit.share, owned)
    if policy.preload == "all" and slots < owned:
        raise ConfigError(
            f"policy {policy.name} keeps all {owned} experts resident, the budget holds {slots}",
            f"use --budget {math.ceil(1e4 * owned / keys) / 1e4} or another policy",
        )
    split = None
    if policy.split.kind != "off":
        split = first_split(policy.split, shape, layers, slots, top_k)
        if policy.split.kind == "fixed":  # nothing will ever use more
            slots = math.ceil(split.total_neurons / shape.intermediate)
    return _Bought(budget, slots, split, replica_slots)


def first_split(settings: SplitOptions, shape: ExpertShape, layers: int, slots: int, top_k: int) -> SplitLayout:
    """The initial split: every layer alike. `slots`: whole experts that the memory holds.

    Raises:
        BudgetError: a top of each layer and a bottom do not fit. ConfigError: the experts have biases.
    """
    if shape.has_bias:
        raise ConfigError("experts with biases cannot be split", "use a policy without split")
    buffer = settings.buffer if settings.buffer is not None else buffer_for(settings.theta, top_k)
    try:
        return SplitLayout.uniform(
            layers, shape.num_experts, shape.intermediate, slots * shape.intermediate, settings.theta, buffer
        )
    except ValueError as error:
        raise BudgetError(
            f"the budget of {slots} experts does not hold a part of one of each of {layers} layers: {error}",
            "give a larger budget, or use a policy without split",
        ) from error
