"""The simulated executor: the engine's own cache, layers and policies on a virtual clock and a recorded routing.

    a forward's parts -> RecordedForward -> core::VirtualRun: each layer's pass, with the parts of an engine's layer

A virtual link copies, kernels let time pass, and peers answer at a time of their own clocks. Everything that decides or
counts is the serving code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ...actors.budget import Budget
from ...actors.core._core import Routing
from ...actors.engine.cache.cache import ExpertCache
from ...actors.engine.cache.slots import LowBitPart
from ...actors.engine.hooks import Hooks
from ...actors.engine.layer import MoeLayer, Shared
from ...actors.engine.placer import Placer
from ...actors.engine.pre_evicting import PreEvicting, last_rows
from ...actors.engine.rerouting import LowBits, Rerouter, report_link_speed
from ...actors.engine.split import Configuring, make_configuring
from ...actors.engine.stats import EngineStats
from ...actors.policies.activeevict import PreEviction
from ...actors.policies.auto import Without
from ...actors.policies.buddymoe.buddies import ExpertProfile
from ...actors.policies.eviction import EvictionPolicy
from ...actors.policies.fmoe import ExpertMapPolicy
from ...actors.policies.hobbit import MixedPrecision
from ...actors.policies.moepic.split import SplitLayout
from ...actors.policies.prefetch import PrefetchOptions, PrefetchPolicy
from ...actors.policies.prefetch_trials import PrefetchTrials
from ...actors.policies.registry import PolicyContext, kinds, make, policy_class
from ...actors.policies.routing import Rerouting
from ...actors.policies.slot_classes import make_eviction
from ...actors.policy_settings import PolicySettings
from ...actors.slot_budget import SlotSizes, divide, mixed_slots
from ...actors.store.artifacts import PolicyArtifacts
from ...errors import ConfigError, TraceError
from ...kernels.pack import PackedShape
from .gpu import PoolSize, SimulatedGpu, VirtualExecutor
from .machine import Machine
from .peers import (
    MatcherLag,
    Peers,
    SimulatedNdp,
    SimulatedShard,
    SimulatedShards,
    make_simulated_placer,
    merged,
    owners_of,
    rows_of,
)
from .recorded import Parts, RecordedForward, RecordedPrefetching, recorded_logits, spans_of
from .trace import TraceHeader

PLAIN = PolicySettings(name="plain", lossless=True, prefetch=PrefetchOptions(min_useful=0.0))
_BATCH = 64  # forwards that the configurator counts together


def neurons_of(header: TraceHeader) -> int:
    """I of a trace's experts: a slot holds three numbers for each neuron and hidden dimension.

    Raises:
        TraceError: the slot bytes fit no such expert.
    """
    of_one = 3 * header.hidden * (4 if header.expert_dtype == "float32" else 2)
    neurons, rest = divmod(header.slot_bytes, of_one)
    if rest or not neurons:
        raise TraceError(
            f"experts of {header.slot_bytes} bytes are not of gated neurons without biases", "replay it without a split"
        )
    return neurons


def first_split(header: TraceHeader, policy: PolicySettings, budget: Budget) -> SplitLayout:
    """The split that a preset begins with.

    Raises:
        BudgetError: the budget is too small for it. TraceError: the experts cannot be split.
    """
    header.refuse_pairs(2, "take a policy without a split")  # the configurator's counts, and a layer's new ones
    split = divide(policy, budget, sizes_of(header, policy)).split
    assert split is not None  # the caller's condition
    return split


def sizes_of(header: TraceHeader, policy: PolicySettings, gpus: int = 1) -> SlotSizes:
    """What a budget is divided by at a trace's shape, of each of so many GPUs.

    Raises:
        TraceError: the policy splits experts that cannot be split.
    """
    neurons = 1 if policy.split.kind == "off" else neurons_of(header)
    low = None if policy.low_bit is None else replica_bytes(header, policy.low_bit.bits)
    return SlotSizes(header.layers, header.experts, header.slot_bytes, neurons, header.top_k, low, gpus)


@dataclass(frozen=True)
class Policies:
    """What an engine decides by.

    Attributes:
        eviction: for a split cache where there is a split. others: evictions of the machine's other GPUs.
        prefetch: None: no prefetch. trials: which pause it where it does not pay; None: nothing does.
        pre_evict: the release target; None: no pre-eviction. A trace has a layer's predicted probabilities for its top
            K only; the other experts share the rest equally, so that equation 16 has a mean in place of p_(k+1) and no
            gap after it.
        rerouting: changes the recorded routing of each layer on its own.
        split: of the slots, at first; None: a slot is a whole expert.
        popularity: [L, E], for a static placement.
        settings: the preset: its governor, write-back, low-bit replicas (whose kernels take as long as full experts),
            adaptive split and placement. `PLAIN`: none of these, and prefetch is never turned off.
        believed: the machine whose costs a planner starts from; None: that which it is. without: what it leaves out.
    """

    eviction: EvictionPolicy
    prefetch: PrefetchPolicy | None = None
    others: Sequence[EvictionPolicy] = ()
    trials: PrefetchTrials | None = None
    pre_evict: PreEviction | None = None
    rerouting: Rerouting | None = None
    split: SplitLayout | None = None
    popularity: NDArray[np.int64] | None = None
    settings: PolicySettings = PLAIN
    believed: Machine | None = None
    without: Without = Without.NOTHING


class SimulatedEngine:
    """The expert engine of one simulated machine.

    Args:
        budget: of expert memory, of each GPU.
        check: check the cache's invariants after each layer.

    Attributes:
        run: the layers of the lead's GPU.

    Raises:
        BudgetError: the budget holds no expert, or not one of each kind. ValueError: the split exceeds the budget.
        ConfigError: the placement needs a device that the machine lacks.
    """

    def __init__(
        self, header: TraceHeader, machine: Machine, budget: Budget, policies: Policies, check: bool = False
    ) -> None:
        settings, keys, slot_bytes = policies.settings, header.layers * header.experts, header.slot_bytes
        bought = budget.bytes_of(slot_bytes, keys)
        owners = owners_of(header, machine.gpus) if policies.others else [0] * keys
        slots, replicas, low_bit = min(bought // slot_bytes, owners.count(0)), None, settings.low_bit
        if low_bit is not None:
            packed = replica_bytes(header, low_bit.bits)
            slots, low = mixed_slots(bought, slot_bytes, packed, low_bit.share, keys)
            replicas = LowBitPart(cast(Any, PoolSize(low * packed)), [cast(Any, None)] * header.layers, low, packed)
        min_useful = settings.prefetch.min_useful
        self.header, self.machine = header, machine
        lead = self._lead = SimulatedGpu(
            header, machine, slots, policies.eviction, min_useful, policies.split, settings.evict_writeback, replicas
        )
        self.clock, self.cache, self.stats, self.run = lead.clock, lead.cache, lead.stats, lead.run
        self.stats.expert_budget_bytes = bought
        mine = [[key for key in range(keys) if owners[key] == i] for i in range(len(policies.others) + 1)]
        if policies.others:
            self.cache.core.owns(mine[0])
        streams = settings.prefetch.kind if settings.shards_stream else None
        self._shards = [
            SimulatedShard(
                header, machine, min(bought // slot_bytes, len(mine[i])), eviction, min_useful, mine[i], streams
            )
            for i, eviction in enumerate(policies.others, start=1)
        ]
        self._peers = Peers(header, machine, lead)
        self._placer = self._make_placer(policies)
        self._prefetching, self._pre_evicting, self._configuring = self._make_ahead(policies)
        self._rerouting, self._check = policies.rerouting, check
        self._tokens: dict[str, int] = {}  # so far, by sequence
        self._shared = Shared(
            self.cache, cast(Any, self._peers), self._placer, self._make_hooks(policies), header.layers - 1,
            passes=self.run.passes,
        )  # fmt: skip
        make, nothing = partial(VirtualExecutor, run=self.run), cast(Any, None)
        self._layers = [
            MoeLayer(i, header.experts, self._shared, nothing, make=make) for i in range(header.layers)
        ]
        self._placer.preload()

    def _make_placer(self, policies: Policies) -> Placer:
        """None of its layers is asked about where all runs on the lead's GPU."""
        settings, header, machine, peers = policies.settings, self.header, self.machine, self._peers
        if self._shards:
            peers.shards = SimulatedShards(header, machine, self.clock, self._shards)
        if not (self._shards or settings.uses_ndp):
            return Placer(self.cache)
        if machine.ndp is not None and settings.uses_ndp:
            peers.ndp = SimulatedNdp(
                machine.ndp, header, machine.ndp_workers, neurons_of(header), self.clock, self._lead.link,
                machine.ndp_share,
            )  # fmt: skip
        return make_simulated_placer(
            settings, header, machine, self.caches, peers, policies.popularity, recorded_logits, policies.believed,
            policies.without,
        )  # fmt: skip

    def _make_ahead(
        self, policies: Policies
    ) -> tuple[RecordedPrefetching | None, PreEvicting | None, Configuring | None]:
        """Prefetch, pre-eviction and the configurator; None for each that the policy lacks."""
        header, settings, prefetch = self.header, policies.settings, policies.prefetch
        layers, experts = header.layers, header.experts
        prefetching, pre_evicting = None, None
        if settings.placement.planned and self.machine.ndp is not None:
            prefetch = None  # it is of forwards that no planner decides
        if prefetch is not None:
            if self.machine.matcher_s and getattr(prefetch, "of_matcher", False):
                prefetch = MatcherLag(prefetch, self.clock, self.machine.matcher_s, experts)
            streams = not self._shards or settings.shards_stream
            prefetching = RecordedPrefetching(prefetch, self.cache, header, self._peers.shards, streams)
            if policies.trials is not None:
                prefetching.adapt(policies.trials, self.clock)
        if policies.pre_evict is not None:
            pre_evicting = PreEvicting(policies.pre_evict, self.cache, layers, experts, recorded_logits)
        configuring = make_configuring(
            settings, self.cache, experts, header.top_k, header.slot_bytes, prefetching, self.clock, False, _BATCH
        )
        return prefetching, pre_evicting, configuring

    def _make_hooks(self, policies: Policies) -> Hooks:
        rules: list[Any] = []
        if policies.rerouting is not None:
            recorded = cast(Any, [SimpleNamespace(router=policies.rerouting)] * self.header.layers)  # has probabilities
            rules.append(Rerouter(policies.rerouting, self.cache, recorded, self.header.top_k))
        if (low_bit := policies.settings.low_bit) is not None:
            mixed = MixedPrecision(low_bit.t1, low_bit.t2, renormalise=True)
            rules.append(LowBits(mixed, self.cache, self.header.experts))
        ahead = [hook for hook in (self._prefetching, self._pre_evicting) if hook is not None]
        passed = None if self._configuring is None else self._configuring.passed
        return Hooks(rules, [_Checks(self.cache)] if self._check else [], ahead, passed)

    def preload(self) -> None:
        """Load every expert on its GPU."""
        keys, shards = range(self.stats.experts), self._peers.shards
        self.cache.core.preload([key for key in keys if shards is None or shards.owner_of(key) == 0])
        if shards is not None:
            shards.preload(keys)()

    @property
    def caches(self) -> list[ExpertCache]:
        """Of each GPU, the lead's first."""
        return [self.cache, *(shard.cache for shard in self._shards)]

    @property
    def ndp(self) -> SimulatedNdp | None:
        """The near-data devices; None: none is used."""
        return self._peers.ndp

    @property
    def slots(self) -> int:
        """Of all GPUs."""
        return sum(cache.stats.slots for cache in self.caches)

    def live_stats(self) -> EngineStats:
        """The counters so far, over all GPUs."""
        found = self.cache.live_stats()
        if not self._shards:
            return found
        for shard in self._shards:
            shard.cache.settle_times()
        rows = zip(found.layers, *(shard.cache.live_stats().layers for shard in self._shards), strict=True)
        layers = [merged(lead, others) for lead, *others in rows]
        each = [found, *(shard.cache.stats for shard in self._shards)]
        return replace(
            found, slots=self.slots, layers=layers, decode_hits=sum(stats.decode_hits for stats in each),
            decode_misses=sum(stats.decode_misses for stats in each), decode_shard_experts=0,
            decode_blocked_io_s=sum(stats.decode_blocked_io_s for stats in each),
        )  # fmt: skip

    # -- a forward -----------------------------------------------------------------------------------------

    def forward(self, parts: Parts) -> None:
        """One forward pass over these iterations; advances the clock."""
        spans = spans_of(parts)
        self.clock.advance(self.machine.forward_s)  # the batching loop is over when a forward is announced
        self.cache.core.decode_only = all(part.decode for _, part in parts)
        if self._configuring is not None:
            self._configuring.begin_forward()
        if self._prefetching is not None:
            self._prefetching.begin(spans)
        if self._pre_evicting is not None:
            self._pre_evicting.begin_forward(last_rows(spans))
        if self._rerouting is not None:
            report_link_speed(self._rerouting, self.cache)
        self._placer.begin_forward(cast(Any, rows_of(spans)))
        for shard in self._shards:
            shard.cache.core.decode_only = self.cache.core.decode_only
        for name, part in parts:
            self._tokens[name] = self._tokens.get(name, 0) + len(part.tokens)
        forward = RecordedForward(parts)
        context = sum(self._tokens[name] for name, _ in parts)  # whose keys and values each layer reads
        self.layers(forward, self.machine.dense(forward.tokens, context))

    def layers(self, forward: RecordedForward, dense_s: float) -> None:
        """All layers (`core::VirtualRun`). dense_s: of the dense part of each."""
        given, prefetching = dict[str, Any](), self._prefetching
        if prefetching is not None and prefetching.reads_scores:
            given["next_ids"], given["next_scores"] = forward.next_scores()
            given["last_rows"] = forward.last_rows() if prefetching.policy.wraps else ()
        if self._rerouting is not None:
            given["weights"] = forward.weights
        self._shared.begin((forward,))
        try:
            self.run.forward(forward.ids, dense_s, **given)
        finally:
            self._shared.inputs = ()
        self._shared.end_forward()

    def end_sequence(self, name: str) -> None:
        """A sequence is over."""
        self._tokens.pop(name, None)
        self._placer.end_sequence(name)
        if self._prefetching is not None:
            self._prefetching.end_sequence(name)

    def reset_stats(self) -> None:
        """Zero the counters; residency and the clock stay."""
        for cache in self.caches:
            cache.reset_stats()


class _Checks:
    """Checks a cache's invariants after each layer (`hooks.Watcher`)."""

    def __init__(self, cache: ExpertCache) -> None:
        self._cache = cache

    def routed(self, layer: int, routing: Routing) -> None:
        """There is nothing to see."""

    def ran(self, layer: int) -> None:
        self._cache.check_integrity()


def replica_bytes(header: TraceHeader, bits: int) -> int:
    """Bytes of a replica of the trace's experts (gated, without biases), in groups of 64 inputs."""
    weight_bytes = 4 if header.expert_dtype == "float32" else 2
    neurons = max(1, header.slot_bytes // (3 * header.hidden * weight_bytes))
    return PackedShape(header.hidden, neurons, bits, 64).nbytes()


def context_of(header: TraceHeader, **given: Any) -> PolicyContext:
    """The context for policies of a trace. given: further fields of `PolicyContext`.

    A trace on disk fills no more expert maps than it has forwards, so no more are allocated.
    """
    maps = {"map_capacity": min(PolicyContext.map_capacity, header.forwards + 1)} if header.chunks else {}
    fields = maps | {"layers": header.layers, "experts": header.experts, "top_k": header.top_k, "hidden": header.hidden}
    return PolicyContext(**fields | given)


def eviction_of(settings: PolicySettings, header: TraceHeader) -> EvictionPolicy:
    """A new eviction policy of the preset; for a split cache if the preset splits experts.

    Raises:
        ConfigError: a split needs an eviction with an order for each layer.
    """
    split, low_bit = settings.split.kind != "off", settings.low_bit is not None
    try:
        return make_eviction(settings.eviction, context_of(header), split=split, low_bit=low_bit)
    except ValueError as error:
        able = [kind for kind in kinds("eviction") if policy_class("eviction", kind).per_layer]
        raise ConfigError(str(error), f"give one of {', '.join(able)}") from error


def policies_of(
    settings: PolicySettings, header: TraceHeader, machine: Machine, budget: Budget, eviction: EvictionPolicy,
    prefetch: PrefetchPolicy | None, popularity: NDArray[np.int64] | None = None, profile: ExpertProfile | None = None,
) -> Policies:  # fmt: skip
    """What a preset decides by on a machine.

    Args:
        eviction, prefetch: made from the preset; they may be trained.
        popularity: [L, E], for a static placement. profile: for buddies.

    Raises:
        ConfigError: the preset needs what there is not. BudgetError, TraceError: as `first_split`.
    """
    others = [eviction_of(settings, header) for _ in range(machine.gpus - 1)]
    one_gpu = settings.split.kind != "off" or settings.low_bit is not None or settings.reroutes
    if others and (one_gpu or settings.evict_writeback):
        raise ConfigError(
            f"policy '{settings.name}' is simulated on one GPU, machine '{machine.name}' has {machine.gpus}",
            "replay it on a machine with one GPU",
        )
    if isinstance(prefetch, ExpertMapPolicy):
        for other in others:
            prefetch.tell(other)
    rerouting = None
    if settings.low_bit is None and replays_routing(settings):
        from ...actors.engine.make_policies import make_rerouting  # torch

        artifacts = PolicyArtifacts(profile=profile)
        rerouting = make_rerouting(settings, header.layers, header.experts, True, artifacts, header.slot_bytes)
    split = None if settings.split.kind == "off" else first_split(header, settings, budget)
    return Policies(
        eviction, prefetch, others, split=split, trials=PrefetchTrials() if settings.adapts_prefetch else None,
        pre_evict=make("pre_evict", settings.pre_evict, context_of(header)), rerouting=rerouting,
        popularity=popularity, settings=settings,
    )  # fmt: skip


def replays_routing(settings: PolicySettings) -> bool:
    """Whether the preset changes the routing, and a trace has the data for its rule."""
    rules = policy_class("routing", settings.routing.kind), policy_class("on_miss", settings.on_miss.kind)
    return settings.low_bit is not None or any(getattr(rule, "traced", False) for rule in rules)
