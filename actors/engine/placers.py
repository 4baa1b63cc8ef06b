"""Builds the placer that a policy asks for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from ...errors import ConfigError
from ...kernels.expert_ffn import ExpertKernel
from ..policies.context_ndp import HotSet, Places, monde_split, prefix_split, static_hot, uniform
from ..policies.cost import FULL_BITS, NdpProfile, SplitCosts, Work, split_costs
from ..policies.plan import LoadOnMiss
from ..policy_settings import PolicySettings, PrecisionSettings
from ..settings import EngineSettings
from ..store.format import ExpertShape
from ..store.replicas import ReplicaTables
from .cache import ExpertCache
from .context_placer import Bits, ContextPlacer
from .measure import expert_seconds, link_seconds
from .model import MoeBlock
from .ndp_pool import NdpPool
from .placer import MondePlacer, Placer, StaticPlacer
from .shards import Shards, owners


def refuse_unsuitable(policy: PolicySettings, shape: ExpertShape, blocks: Sequence[MoeBlock]) -> str:
    """The activation that the NDP workers are to compute, if they can compute this model's experts.

    Raises:
        ConfigError: they cannot: experts without gate, with biases, a gating of their own or a norm after them.
    """
    activations = {block.activation for block in blocks}
    activation = next(iter(activations)) if len(activations) == 1 else None
    plain = shape.gates == 2 and not shape.has_bias and all(block.post is None for block in blocks)
    if activation is None or not plain:
        raise ConfigError(
            f"policy {policy.name} runs experts on NDP workers, which compute plain gated experts without biases",
            "choose a policy that needs no NDP worker, such as next-gate",
        )
    return activation


def make_placer(
    settings: EngineSettings,
    cache: ExpertCache,
    planner: LoadOnMiss,
    shape: ExpertShape,
    shards: Shards | None,
    pool: NdpPool,
    kernel: ExpertKernel,
    tables: ReplicaTables | None,
) -> Placer:
    """The placer of `settings.policy`, which uses NDP workers.

    Args:
        shards: the other GPUs; None where there are none.
        pool: the NDP workers.
        kernel: runs experts here; timed where the policy weighs one side against the other.
        tables: of the store's replicas; None where it has none.

    Raises:
        ConfigError: the policy needs tables or replicas that the store lacks, or more slots than there are.
    """
    policy, experts = settings.policy, shape.num_experts
    placement = policy.placement
    bits, widest = _bits(policy.precision, policy.name, tables)
    if placement.kind == "monde":
        return MondePlacer(cache, planner, experts, pool, _monde_choice(settings, cache, shape, kernel), widest)
    places = _places(settings, cache, experts)
    if placement.kind == "context":
        stats = cache.stats

        def migrated() -> None:
            stats.migrations += 1

        hot_set = HotSet(places, placement.alpha)
        return ContextPlacer(cache, planner, experts, shards, pool, widest, hot_set, bits, migrated)
    counts = _tables(tables, policy.name, "the popularity of experts").counts
    hot = static_hot(counts, places)
    keys = [layer * experts + e for layer in range(places.layers) for e in sorted(hot[layer])]
    cold = []
    for layer in range(places.layers):
        order = np.argsort(-counts[layer], kind="stable").tolist()
        cold.append(bits(layer, [e for e in order if e not in hot[layer]]))
    return StaticPlacer(cache, planner, experts, shards, pool, widest, keys, cold)


def _places(settings: EngineSettings, cache: ExpertCache, experts: int) -> Places:
    """What each GPU keeps of every layer.

    Raises:
        ConfigError: the policy keeps more than there are slots.
    """
    layers = len(cache.stats.layers)
    owner = np.asarray(owners(layers, experts, settings.shards)).reshape(layers, experts)
    bought = cache.stats.expert_budget_bytes // cache.residency.slot_bytes  # of each GPU, which needs no more than own
    slots = [min(bought, int((owner == gpu).sum())) for gpu in range(settings.shards.count)]
    try:
        return Places.fit(owner, slots, settings.policy.placement.hot_per_layer)
    except ValueError as error:
        raise ConfigError(
            f"policy {settings.policy.name}: {error}", "raise --budget, or lower placement.hot_per_layer"
        ) from error


def _bits(precision: PrecisionSettings, name: str, tables: ReplicaTables | None) -> tuple[Bits, int]:
    """What chooses the widths of a layer's cold experts, and the width of one that was meant to be hot."""
    if precision.kind == "full":
        return lambda layer, order: dict.fromkeys(order, 0), 0
    have = _tables(tables, name, "quantized replicas").widths
    lacking = [b for b in precision.widths if b not in have]
    if lacking:
        raise ConfigError(
            f"policy {name} needs replicas of {', '.join(map(str, precision.widths))} bits, the store has {have}",
            f"run `tiermoe prepare MODEL OUT --bits {','.join(map(str, precision.widths))}`",
        )
    if precision.kind == "uniform":
        width = precision.widths[0]
        return lambda layer, order: dict(zip(order, uniform(len(order), width), strict=True)), width
    assert tables is not None  # `_tables` refused
    assert precision.bits is not None  # the settings refused
    losses = tables.losses[:, :, [have.index(b) for b in (1, 2, 3, 4)]]  # [L, E, 4]
    average = precision.bits

    def split(layer: int, order: Sequence[int]) -> dict[int, int]:
        return dict(zip(order, prefix_split(losses[layer, list(order)], (1, 2, 3, 4), average), strict=True))

    return split, 4


def _tables(tables: ReplicaTables | None, name: str, what: str) -> ReplicaTables:
    if tables is None:
        raise ConfigError(
            f"policy {name} needs {what}, which the store lacks",
            "run `tiermoe prepare MODEL OUT --bits 1,2,3,4 --calibration FILE`",
        )
    return tables


def _monde_choice(
    settings: EngineSettings, cache: ExpertCache, shape: ExpertShape, kernel: ExpertKernel
) -> Callable[[Sequence[int], Sequence[bool], int], list[bool]]:
    """MoNDE's rule with this device's measured seconds and the modelled ones of the NDP devices.

    Several NDP workers share a layer's experts, so each expert counts with its share of their time.
    """
    profile = NdpProfile.from_dict(settings.ndp.hardware)
    first_s, further_s = expert_seconds(kernel, cache.pool)
    emulated = cache.device.executor == "emulated"
    load = link_seconds(settings.link, cache.residency.slot_bytes, emulated, profile.link_gbps)
    row_bytes = 4 * shape.hidden  # float32 over the channel

    @functools.cache
    def priced(rows: int) -> SplitCosts:
        """One expert with so many rows."""
        work = Work(shape.hidden, shape.intermediate, rows, FULL_BITS)
        return split_costs(profile, [work], [first_s + (rows - 1) * further_s], load, row_bytes)

    def choose(rows: Sequence[int], resident: Sequence[bool], workers: int) -> list[bool]:
        each = [priced(n) for n in rows]
        gpu_s = tuple([cost.gpu_s[0] for cost in each])
        ndp_s = tuple([cost.ndp_s[0] / workers for cost in each])
        return monde_split(rows, resident, SplitCosts(gpu_s, ndp_s, load, once_s))

    once_s = priced(1).ndp_once_s
    return choose
