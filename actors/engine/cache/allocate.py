"""The expert cache of one device, from its settings; for a lead and for a shard."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch

from ....errors import BudgetError, ConfigError, size
from ...core import _core
from ...policies.cost import Link, load_s
from ...policies.registry import PolicyContext
from ...policies.slot_classes import make_eviction
from ...settings import EngineSettings
from ...slot_budget import SlotSizes, divide
from ...store.format import ExpertShape, Published
from ..stats import EngineStats, LayerStats, Timeline
from .cache import ExpertCache
from .device import Device
from .form_slots import FormPool
from .links import Carrier, Linking
from .loader import Loader
from .low_bits import ReplicaWeights, make_part
from .make_link import make_link
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
        BudgetError: the budget does not hold one slot of each kind, or all experts where the policy needs them
            resident; or the device's memory does not hold the budget. ConfigError: experts with biases are split.
    """
    policy, layers, keys = settings.policy, len(weights), len(weights) * shape.num_experts
    slot_bytes = slot_nbytes(shape, dtype, published)
    if policy.split.kind != "off" and shape.has_bias:
        raise ConfigError("experts with biases cannot be split", "use a policy without split")
    sizes = SlotSizes(
        layers, shape.num_experts, slot_bytes, shape.intermediate, top_k,
        None if replicas is None else replicas.shape.nbytes(), settings.shards.count, settings.shards.ownership,
    )  # fmt: skip
    bought = divide(policy, settings.budget, sizes, owned)
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
    eviction = make_eviction(
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
