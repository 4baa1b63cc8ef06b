"""The expert cache of one device with its link, from the settings; for a lead and for a shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import cast

import torch

from ...errors import BudgetError, ConfigError, size
from ..budget import Budget
from ..core import _core
from ..policies.cost import Link, load_s
from ..policies.registry import PolicyContext
from ..policies.slot_classes import make_eviction
from ..policy_settings import PolicySettings
from ..settings import CopySettings, EngineSettings, LinkSettings
from ..slot_budget import SlotSizes, divide
from ..store.format import ExpertShape, Manifest, Published
from .cache.cache import ExpertCache
from .cache.device import CpuDevice, Device, PinReport
from .cache.form_slots import FormPool, FormWeights
from .cache.host_tier import HostTier
from .cache.links import CacheLink, Carrier, loader_link
from .cache.loader import Loader
from .cache.low_bits import ReplicaWeights, make_part
from .cache.places import disk_link, linkable, mapped_link, thread_link
from .cache.slot_map import SlotMap
from .cache.slots import ExpertSource, LayerWeights, MappedPool, SlotMemory, SlotPool
from .cache.sources import Sources
from .cuda.device import CudaDevice
from .cuda.stream_link import stream_link
from .stats import EngineStats, LayerStats, Timeline

_TIER = PolicySettings.model_validate({"name": "host-tier", "lossless": True, "eviction": "lfu"})


@dataclass(frozen=True)
class ModelExperts:
    """The experts of a model, as a device caches and runs them.

    shape: of one. sources: of each MoE layer's experts. dtype: of the compute. top_k: experts per token.
    published: their forms, which slots hold as they are; None: slots hold neurons in `dtype`.
    replicas: in low bits, with slots of their own within the budget; None: no policy loads them.
    mapped: experts run in host memory as they are stored: where the store maps them, without slots, or where that is
        more than there is memory for (`EngineSettings.host_bytes`) in slots; all sources are of this node.
    """

    shape: ExpertShape
    sources: Sequence[ExpertSource]
    dtype: torch.dtype
    top_k: int = 1
    published: Published | None = None
    replicas: ReplicaWeights | None = None
    mapped: bool = False

    @cached_property
    def slot_bytes(self) -> int:
        """Of a slot for a whole expert; of mapped ones, of an expert as stored."""
        return self.shape.nbytes(self.slot_dtype.itemsize) if self.published is None else self.published.slot_bytes

    @cached_property
    def slot_dtype(self) -> torch.dtype:
        """Of neurons in slots, or mapped."""
        return cast(LayerWeights, self.sources[0]).tensors[0].dtype if self.mapped else self.dtype


def make_cache(
    settings: EngineSettings, model: ModelExperts, device: Device, keys: Sequence[int],
    clock: _core.Clock | None = None, shared_bytes: int = 0,
) -> ExpertCache:  # fmt: skip
    """A cache within the budget of one device, with counters of its own.

    Args:
        keys: of the experts in all layers that belong to this device; it gets at most that many slots.
        clock: of a stepped link; None: wall-clock.
        shared_bytes: of memory beside the budget that slots may have at times (`ExpertCache.resize`).

    Raises:
        BudgetError: the budget does not hold one slot of each kind, or all experts where the policy needs them
            resident; or the device's memory does not hold the budget. ConfigError: experts with biases are split.
    """
    policy, shape, replicas, slot_bytes = settings.policy, model.shape, model.replicas, model.slot_bytes
    layers = len(model.sources)
    if policy.split.kind != "off" and shape.has_bias:
        raise ConfigError("experts with biases cannot be split", "use a policy without split")
    sizes = SlotSizes(
        layers, shape.num_experts, slot_bytes, shape.intermediate, model.top_k,
        None if replicas is None else replicas.shape.nbytes(), settings.shards.count, settings.shards.ownership,
    )  # fmt: skip
    slots = not model.mapped or settings.host_bytes is not None
    budget = Budget(nbytes=settings.host_bytes) if model.mapped and slots else settings.budget
    bought = divide(policy, budget, sizes, len(keys))
    stats = EngineStats(
        layers=[LayerStats() for _ in range(layers)],
        expert_budget_bytes=bought.budget if slots else 0,
        slots=bought.slots,
        experts=layers * shape.num_experts,
        executor=device.executor,
    )
    most = min(len(keys), bought.slots + shared_bytes // slot_bytes)
    memory = SlotMemory(device, bought.slots, most) if most > bought.slots else None
    try:
        part = None if replicas is None else make_part(replicas, bought.replica_slots, device.torch_device)
        pool: SlotPool | FormPool | MappedPool
        stored = _on_this_node(model.sources) if model.mapped else []
        if not slots:
            pool = MappedPool(stored, shape, model.dtype, model.published)
        elif model.published is None:
            computes = model.dtype if model.mapped else None
            pool = SlotPool.allocate(shape, bought.slots, model.slot_dtype, device.torch_device, memory, computes)
        else:
            pool = FormPool.allocate(model.published, bought.slots, model.dtype, device.torch_device, memory)
    except torch.OutOfMemoryError as error:
        raise BudgetError(
            f"the GPU has no room for an expert cache of {size(bought.budget)} beside what is on it: "
            f"{'. '.join(str(error).split('. ')[:3])}",
            "give a smaller budget, or end what else uses the GPU",
        ) from error
    where = SlotMap(pool, model.sources, shape.num_experts, bought.slots, slot_bytes, bought.split, part, memory)
    eviction = make_eviction(
        policy.eviction, PolicyContext(layers, shape.num_experts, model.top_k), split=bought.split is not None,
        low_bit=bought.replica_slots > 0,
    )  # fmt: skip
    if clock is None or settings.link.gbps is None:
        link = make_link(device, where, settings.copies, keys)
    else:  # a stepped link, on its own clock
        seconds = partial(load_s, link=Link(settings.link.gbps, settings.link.latency_us))
        link = CacheLink(_core.CarryingLink(clock, seconds, 0.0, Carrier(where)), clock)
    cache = ExpertCache(
        where, link, eviction, stats, Timeline(settings.trace), policy.prefetch.min_useful, policy.evict_writeback
    )
    if settings.shards.count > 1:
        cache.core.owns(list(keys))
    return cache


def host_experts(
    sources: Sources, manifest: Manifest, settings: EngineSettings, device: Device, dtype: torch.dtype,
    own: Sequence[int] | None = None,
) -> PinReport | None:  # fmt: skip
    """Make the sources of one process ready: host memory of their own that reads the disk, where the settings have
    such; else the mapped layers as the device pins them, and what it says.

    own: keys of the experts that are copied from here; None: all.

    Raises:
        BudgetError, ConfigError: as `make_tier`. StoreError: a file cannot be opened, or read.
    """
    experts = manifest.experts
    if settings.host_bytes is None or settings.budget.mapped:
        return sources.pin(device, settings.copies, own, experts.num_experts)
    stored = ModelExperts(experts, sources.weights, dtype, published=manifest.published)
    sources.read_into(make_tier(settings, stored, own))
    return None


def make_tier(settings: EngineSettings, model: ModelExperts, own: Sequence[int] | None = None) -> HostTier:
    """The host memory that slots of a device are loaded from: `host_bytes` of the settings, for experts as stored.

    Who is used most stays: what is used again soon is in the device's slots, so that recency says little here.

    Raises:
        BudgetError: it does not hold an expert. ConfigError: some experts are on other nodes.
    """
    stored = replace(model, replicas=None, mapped=True)
    for_tier = settings.model_copy(update={"policy": _TIER, "budget": Budget(mapped=True), "trace": False})
    keys = range(len(model.sources) * model.shape.num_experts) if own is None else own
    return HostTier(make_cache(for_tier, stored, CpuDevice(LinkSettings(), "real"), keys))


def _on_this_node(sources: Sequence[ExpertSource]) -> list[LayerWeights | FormWeights]:
    """The sources as mapped experts. Raises ConfigError: some are on other nodes."""
    found = [source for source in sources if isinstance(source, LayerWeights | FormWeights)]
    if len(found) < len(sources):
        raise ConfigError(
            f"{len(sources) - len(found)} layers of experts are on other nodes, and none is mapped here",
            "give a --budget, so that they are loaded",
        )
    return found


def make_link(
    device: Device, where: SlotMap, settings: CopySettings | None = None, keys: Sequence[int] | None = None
) -> CacheLink:
    """A GPU's streams, the stand-in's link thread, the disk's readers, or a Python thread for other sources.

    settings: of copies to a GPU; None: the defaults. keys: of the experts that are copied; None: all.
    """
    pool, weights = where.pool, where.weights
    if isinstance(pool, MappedPool):
        return mapped_link(where)
    if isinstance(device, CpuDevice) and device.executor == "real":
        return disk_link(where)
    if isinstance(device, CpuDevice) and linkable(pool, weights):
        rate = 0.0 if device.link.gbps is None else device.link.gbps * 1e9
        return thread_link(where, rate, device.link.latency_us * 1e-6)
    if not isinstance(device, CudaDevice):
        return loader_link(Loader(device), where)
    casts = isinstance(pool, SlotPool) and any(
        s.dtype != d.dtype
        for layer in weights
        if isinstance(layer, LayerWeights | FormWeights)
        for s, d in zip(layer.tensors, pool.tensors, strict=True)
    )
    settings = CopySettings() if settings is None else settings
    return stream_link(device, where, pinned_layers(device, where, keys), settings.ahead_mib << 20, casts)


def pinned_layers(device: CudaDevice, where: SlotMap, keys: Sequence[int] | None = None) -> list[bool]:
    """Which layers have these experts (None: all), and their replicas, in pinned memory. They were pinned before."""
    of_layer: list[list[int]] = [[] for _ in where.weights]
    for key in range(where.keys) if keys is None else keys:
        of_layer[key // where.experts].append(key % where.experts)

    def pinned(layer: ExpertSource, experts: Sequence[int]) -> bool:
        # bytes are copied as they lie, so an expert with gaps is the loader's
        if not isinstance(layer, LayerWeights | FormWeights) or not all(t[0].is_contiguous() for t in layer.tensors):
            return False
        return all(device.is_pinned(layer.expert(expert)) for expert in experts)

    found = list(map(pinned, where.weights, of_layer))
    if where.low_bit is not None:
        found = [all(both) for both in zip(found, map(pinned, where.low_bit.weights, of_layer), strict=True)]
    return found
