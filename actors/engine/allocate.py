"""The expert cache of one device, from its settings: what a lead and a shard allocate alike."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ...errors import ConfigError
from ..budget import budget_bytes
from ..policies.eviction import EVICTION, EvictionPolicy, ImportanceEviction
from ..policies.prefetch.governor import PrefetchGovernor
from ..policies.residency import Residency
from ..settings import EngineSettings, PolicySettings
from ..store_format import ExpertShape
from .cache import ExpertCache
from .device import Device
from .pool import ExpertSource, SlotPool
from .stats import EngineStats, LayerStats
from .timeline import Timeline


def make_cache(
    settings: EngineSettings,
    shape: ExpertShape,
    weights: Sequence[ExpertSource],
    device: Device,
    dtype: torch.dtype,
    owned: int,
) -> ExpertCache:
    """A cache within the budget of one device, with counters of its own.

    Args:
        owned: experts in all layers that belong to this device; it gets no more slots than that.

    Raises:
        BudgetError: not one slot fits. ConfigError: the policy keeps all experts resident, and they do not fit.
    """
    layers, policy = len(weights), settings.policy
    keys = layers * shape.num_experts
    slot_bytes = shape.nbytes(dtype.itemsize)
    budget = budget_bytes(settings.budget, slot_bytes, keys)
    slots = min(budget // slot_bytes, owned)
    if policy.preload == "all" and slots < owned:
        raise ConfigError(
            f"policy {policy.name} keeps all {owned} experts resident, the budget holds {slots}",
            f"use --budget {math.ceil(1e4 * owned / keys) / 1e4} or another policy",
        )
    stats = EngineStats(
        layers=[LayerStats() for _ in range(layers)],
        expert_budget_bytes=budget,
        slots=slots,
        experts=keys,
        executor=device.executor,
    )
    return ExpertCache(
        SlotPool.allocate(shape, slots, dtype, device.torch_device),
        weights,
        device,
        Residency(keys, slots, slot_bytes),
        make_eviction(policy, layers, shape.num_experts),
        PrefetchGovernor(policy.prefetch.min_useful),
        stats,
        Timeline(settings.trace),
        writeback=policy.evict_writeback,
    )


def make_eviction(policy: PolicySettings, layers: int, experts: int) -> EvictionPolicy:
    """What `policy.eviction` names, for a model of so many MoE layers and experts in each."""
    if policy.eviction == "importance":
        options = policy.pre_evict
        return ImportanceEviction(layers, experts, options.alpha, options.gamma, options.window)
    return EVICTION[policy.eviction]()
