"""The simulated engine of a preset: everything that the preset decides, on a recorded trace."""

from __future__ import annotations

from ...actors.policies.activeevict import BudgetAwareTopK, PreEviction
from ...actors.policies.eviction import EvictionPolicy
from ...actors.policies.moepic.split import CacheCut
from ...actors.policies.prefetch import PrefetchGovernor, PrefetchPolicy
from ...actors.policies.registry import LAYER_EVICTION, make_eviction
from ...actors.policy_settings import PolicySettings
from ...errors import ConfigError
from .executor import SimulatedEngine
from .machine import Machine
from .trace_format import TraceHeader


def eviction_of(settings: PolicySettings, header: TraceHeader) -> EvictionPolicy:
    """The preset's, in its first state: for a cut where the preset splits experts.

    Raises:
        ConfigError: its eviction has no order for the experts of one layer, which a cut needs.
    """
    options = settings.pre_evict
    if settings.split.kind != "off" and settings.eviction not in LAYER_EVICTION:
        raise ConfigError(
            f"eviction {settings.eviction} has no order for the experts of one layer, which split needs",
            f"give one of {', '.join(LAYER_EVICTION)}",
        )
    return make_eviction(
        settings.eviction, header.layers, header.experts, settings.split.kind != "off",
        settings.on_miss == "low-bit", alpha=options.alpha,
        gamma=options.gamma, window=options.window,
    )  # fmt: skip


def engine_of(
    settings: PolicySettings,
    header: TraceHeader,
    machine: Machine,
    budget: float | int,
    eviction: EvictionPolicy,
    prefetch: PrefetchPolicy | None,
    cut: CacheCut | None = None,
    adapts: bool = True,
) -> SimulatedEngine:
    """An engine with the preset's governor, pre-eviction, budget-aware routing and write-back.

    Args:
        eviction, prefetch, cut: made from the preset; a policy may be shared with who taught it.
        adapts: whether a preset that configures its cut does so; else the cut given stays.

    Raises:
        BudgetError, ValueError: as `SimulatedEngine`.
    """
    options = settings.pre_evict
    return SimulatedEngine(
        header, machine, budget, eviction, prefetch, PrefetchGovernor(settings.prefetch.min_useful), cut=cut,
        pre_evict=None if options.kind == "off" else PreEviction(header.top_k, options.tau, options.r_max),
        rerouting=(
            BudgetAwareTopK(narrowest=settings.routing.narrowest) if settings.routing.kind == "budget-aware" else None
        ),
        low_bit=settings.low_bit if settings.on_miss == "low-bit" else None,
        writeback=settings.evict_writeback, adaptive=settings if adapts and settings.split.kind == "adaptive" else None,
    )  # fmt: skip


def replays_routing(settings: PolicySettings) -> bool:
    """Whether the preset changes the routing by a rule that a trace has enough for."""
    return settings.routing.kind == "budget-aware" or settings.on_miss == "low-bit"
