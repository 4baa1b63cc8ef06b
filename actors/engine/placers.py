"""Builds the placer that a policy asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...errors import ConfigError
from ...kernels.expert_ffn import ExpertKernel
from ..policies.cost import FULL_BITS, NdpProfile, Work, split_costs
from ..policies.placement import HotSet, monde_split, static_hot
from ..policies.plan import LoadOnMiss
from ..policies.precision import prefix_split, uniform
from ..replica_store import ReplicaTables
from ..settings import EngineSettings, PolicySettings, PrecisionSettings
from ..store_format import ExpertShape
from .cache import ExpertCache
from .measure import expert_seconds, link_seconds
from .model import MoeBlock
from .placer import Bits, ContextPlacer, MondePlacer, Placer, StaticPlacer


def refuse_unsuitable(policy: PolicySettings, shape: ExpertShape, blocks: Sequence[MoeBlock]) -> str:
    """The activation that the NDP worker is to compute, if it can compute this model's experts.

    Raises:
        ConfigError: it cannot: experts without gate, with biases, a gating of their own or a norm after them.
    """
    activations = {block.activation for block in blocks}
    activation = next(iter(activations)) if len(activations) == 1 else None
    plain = shape.gates == 2 and not shape.has_bias and all(block.post is None for block in blocks)
    if activation is None or not plain:
        raise ConfigError(
            f"policy {policy.name} runs experts on the NDP worker, which computes plain gated experts without biases",
            "choose a policy that needs no NDP worker, such as next-gate",
        )
    return activation


def make_placer(
    settings: EngineSettings,
    cache: ExpertCache,
    planner: LoadOnMiss,
    shape: ExpertShape,
    available: Callable[[], bool],
    kernel: ExpertKernel,
    tables: ReplicaTables | None,
) -> Placer:
    """The placer of `settings.policy`, which uses the NDP worker.

    Args:
        available: whether the NDP worker is there.
        kernel: runs experts here; timed where the policy weighs one side against the other.
        tables: of the store's replicas; None where it has none.

    Raises:
        ConfigError: the policy needs tables or replicas that the store lacks.
    """
    policy = settings.policy
    layers, experts, slots = len(cache.stats.layers), shape.num_experts, cache.residency.slots
    placement = policy.placement
    hot_per_layer = min(experts, slots // layers) if placement.hot_per_layer is None else placement.hot_per_layer
    if hot_per_layer > experts or hot_per_layer * layers > slots:
        raise ConfigError(
            f"policy {policy.name} keeps {hot_per_layer} experts in each of {layers} layers, the budget holds {slots}",
            "raise --budget, or lower placement.hot_per_layer",
        )
    bits, widest = _bits(policy.precision, policy.name, tables)
    if placement.kind == "context":
        hot_set = HotSet(layers, experts, hot_per_layer, placement.alpha)
        stats = cache.stats

        def migrated() -> None:
            stats.migrations += 1

        return ContextPlacer(cache, planner, experts, available, hot_set, bits, widest, migrated)
    if placement.kind == "static":
        counts = _tables(tables, policy.name, "the popularity of experts").counts
        hot = static_hot(counts, hot_per_layer)
        keys = [layer * experts + e for layer in range(layers) for e in sorted(hot[layer])]
        chosen = []
        for layer in range(layers):
            order = np.argsort(-counts[layer], kind="stable").tolist()
            cold = bits(layer, [e for e in order if e not in hot[layer]])
            chosen.append(dict.fromkeys(range(experts), widest) | cold)
        return StaticPlacer(cache, planner, experts, available, keys, chosen)
    return MondePlacer(cache, planner, experts, available, _monde_choice(settings, cache, shape, kernel), widest)


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
) -> Callable[[Sequence[int], Sequence[bool]], list[bool]]:
    """MoNDE's rule with this device's measured seconds and the modelled ones of the NDP device."""
    profile = NdpProfile.from_dict(settings.ndp.hardware)
    first_s, further_s = expert_seconds(kernel, cache.pool)
    emulated = cache.device.executor == "emulated"
    load = link_seconds(settings.link, cache.residency.slot_bytes, emulated, profile.link_gbps)
    row_bytes = 4 * shape.hidden  # float32 over the channel

    def choose(rows: Sequence[int], resident: Sequence[bool]) -> list[bool]:
        works = [Work(shape.hidden, shape.intermediate, n, FULL_BITS) for n in rows]
        gpu_s = [first_s + (n - 1) * further_s for n in rows]
        return monde_split(rows, resident, split_costs(profile, works, gpu_s, load, row_bytes))

    return choose
