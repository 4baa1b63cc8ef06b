"""The simulated executor: the engine's own cache, step and policies on a virtual clock and a recorded routing.

A virtual link copies, and `backend` gives the layers the recorded routing and lets the time of their kernels pass.
Everything that decides or counts is the serving code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ...actors.core import _core
from ...actors.engine.cache.cache import ExpertCache
from ...actors.engine.cache.slots import LowBitPart
from ...actors.engine.layer import Hooks, MoeLayer, Placer
from ...actors.engine.pre_evicting import PreEvicting, last_rows
from ...actors.engine.prefetching import Prefetching
from ...actors.engine.rerouting import LowBits, Rerouter, report_link_speed
from ...actors.engine.split import Configuring, make_configuring
from ...actors.engine.stats import EngineStats, LayerStats, Timeline
from ...actors.policies.activeevict import PreEviction
from ...actors.policies.buddymoe.buddies import ExpertProfile
from ...actors.policies.cost import load_s
from ...actors.policies.eviction import EvictionPolicy
from ...actors.policies.fmoe import ExpertMapPolicy
from ...actors.policies.hobbit import LowBitOptions, MixedPrecision
from ...actors.policies.moepic.split import SplitLayout
from ...actors.policies.prefetch import PrefetchPolicy
from ...actors.policies.prefetch_trials import PrefetchTrials
from ...actors.policies.registry import PolicyContext, kinds, make, policy_class
from ...actors.policies.routing import Rerouting
from ...actors.policies.slot_classes import make_eviction
from ...actors.policy_settings import PolicySettings
from ...actors.settings import budget_bytes, mixed_slots
from ...actors.slot_budget import SlotSizes, divide
from ...actors.store.artifacts import PolicyArtifacts
from ...errors import ConfigError, TraceError
from ...kernels.pack import PackedShape
from .backend import (
    Compute,
    NoDevice,
    NoPool,
    Parts,
    RecordedBackend,
    RecordedForward,
    RecordedRun,
    ShardBackend,
    TimedKernel,
    TimedReplicas,
    recorded_logits,
    see,
    spans_of,
)
from .machine import Machine
from .peers import (
    MatcherLag,
    SimulatedNdp,
    SimulatedShard,
    SimulatedShards,
    make_simulated_placer,
    merged,
    owners_of,
    rows_of,
)
from .trace import TraceHeader

_BATCH = 64  # forwards that the configurator counts together


def virtual_link(clock: _core.Clock, machine: Machine) -> _core.VirtualLink:
    """The link of one of a machine's GPUs."""
    link = machine.link
    return _core.VirtualLink(clock, lambda nbytes: 0.0 if link is None else load_s(nbytes, link), machine.wait_s)


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


def first_split(header: TraceHeader, policy: PolicySettings, budget: float | int) -> SplitLayout:
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


class SimulatedEngine:
    """The expert engine of one simulated device.

    Args:
        budget: share (float) or bytes (int) of expert memory.
        prefetch: None: no prefetch. min_useful: of its governor; 0: prefetch is never turned off.
        check: check the cache's invariants after each layer.
        pre_evict: the release target; None: no pre-eviction. A trace has a layer's predicted probabilities for its top
            K only; the other experts share the rest equally, so that equation 16 has a mean in place of p_(k+1) and no
            gap after it.
        rerouting: changes the recorded routing of each layer on its own; must not need probabilities.
        writeback: see `ExpertCache`.
        split: of the slots, with an `eviction` for split caches; None: a slot is a whole expert.
        adaptive: policy by which the split adapts; None: fixed.
        placement: preset that decides where experts run; None: all on one GPU. popularity: [L, E], for a static one.
        evictions: of the other GPUs of the machine.
        low_bit: load unimportant misses as replicas, with `SlotClasses` as `eviction`; their kernels take as long as
            full experts. None: all loads are full.
        trials: pause prefetch where they say so; None: never.

    Attributes:
        recorded: runs all layers of a forward in one call; None: they run one by one, as the engine's.

    Raises:
        BudgetError: the budget holds no expert, or not one of each kind. ValueError: the split exceeds the budget.
    """

    def __init__(
        self,
        header: TraceHeader,
        machine: Machine,
        budget: float | int,
        eviction: EvictionPolicy,
        prefetch: PrefetchPolicy | None = None,
        min_useful: float = 0.0,
        check: bool = False,
        pre_evict: PreEviction | None = None,
        rerouting: Rerouting | None = None,
        writeback: bool = False,
        split: SplitLayout | None = None,
        adaptive: PolicySettings | None = None,
        low_bit: LowBitOptions | None = None,
        trials: PrefetchTrials | None = None,
        placement: PolicySettings | None = None,
        evictions: Sequence[EvictionPolicy] = (),
        popularity: NDArray[np.int64] | None = None,
    ) -> None:
        keys, slot_bytes = header.layers * header.experts, header.slot_bytes
        bought = budget_bytes(budget, slot_bytes, keys)
        owners = owners_of(header, machine.gpus) if evictions else [0] * keys
        slots, replicas = min(bought // slot_bytes, owners.count(0)), None
        if low_bit is not None:
            packed = replica_bytes(header, low_bit.bits)
            slots, low = mixed_slots(bought, slot_bytes, packed, low_bit.share, keys)
            nowhere = cast(Any, NoPool(low * packed))
            replicas = LowBitPart(nowhere, [nowhere] * header.layers, low, packed)
        self.header, self.machine, self.clock = header, machine, _core.Clock()
        self.stats = EngineStats(
            layers=[LayerStats() for _ in range(header.layers)], expert_budget_bytes=bought, slots=slots, experts=keys,
            executor="simulated",
        )  # fmt: skip
        neurons = 1 if split is None else split.neurons
        memory = cast(Any, NoPool(slots * slot_bytes, neurons, slots * neurons))
        loader = virtual_link(self.clock, machine)
        self.cache = ExpertCache(
            memory, [memory] * header.layers, cast(Any, NoDevice()), header.experts, slots, slot_bytes, eviction,
            self.stats, Timeline(False), loader, self.clock, min_useful, split, writeback, replicas,
        )  # fmt: skip
        compute = Compute(self.clock, loader, machine.kernel_share)
        low_bits = None if replicas is None else TimedReplicas(compute, machine)
        kernel = TimedKernel(compute, machine, neurons)
        self._backend = RecordedBackend(self.clock, machine, loader, compute, slot_bytes, low_bits)
        backend = cast(Any, self._backend)
        self._shards = [
            self._shard(owners.count(i), policy, min_useful, check) for i, policy in enumerate(evictions, start=1)
        ]
        self._placer = self._make_placer(placement, slots, popularity)
        if placement is not None and placement.placement.planned and machine.ndp is not None:
            prefetch = None  # it is of forwards that no planner decides
        self._prefetching, self._pre_evicting, self._configuring = self._make_ahead(prefetch, pre_evict, adaptive)
        if self._prefetching is not None and trials is not None:
            self._prefetching.adapt(trials, self.clock)
        hooks = self._hooks(rerouting, low_bit)
        self._context: dict[str, int] = {}  # tokens so far, by sequence
        self.layers = [
            MoeLayer(i, header.experts, self.cache, backend, self._placer, cast(Any, kernel), None, hooks, check)
            for i in range(header.layers)
        ]
        self._placer.preload()
        self.recorded = None if check else self._make_run(hooks, rerouting is not None or low_bit is not None, neurons)

    def _make_run(self, hooks: Hooks, reroutes: bool, neurons: int) -> RecordedRun | None:
        """What runs all layers of a forward; None: they run one by one, as the engine's (`MoeLayer`)."""
        if reroutes or not self._placer.local:
            return None
        return RecordedRun(self.cache, self.clock, self.machine, neurons, hooks, self._placer)

    def _shard(
        self, owned: int, eviction: EvictionPolicy, min_useful: float, check: bool
    ) -> SimulatedShard:
        """Another GPU, with as many bytes as the lead. owned: experts that belong to it."""
        header, machine, clock = self.header, self.machine, _core.Clock()
        keys, slots = header.layers * header.experts, min(self.stats.expert_budget_bytes // header.slot_bytes, owned)
        memory = cast(Any, NoPool(slots * header.slot_bytes, 1, slots))
        loader = virtual_link(clock, machine)
        stats = EngineStats(
            layers=[LayerStats() for _ in range(header.layers)], slots=slots, experts=keys, executor="simulated"
        )
        cache = ExpertCache(
            memory, [memory] * header.layers, cast(Any, NoDevice()), header.experts, slots, header.slot_bytes,
            eviction, stats, Timeline(False), loader, clock, min_useful,
        )  # fmt: skip
        compute, placer = Compute(clock, loader, machine.kernel_share), Placer(cache)
        backend = ShardBackend(clock, machine, loader, compute, header.slot_bytes)
        kernel = cast(Any, TimedKernel(compute, machine, 1))
        steps = [
            MoeLayer(i, header.experts, cache, cast(Any, backend), placer, kernel, check=check)
            for i in range(header.layers)
        ]
        return SimulatedShard(clock, cache, placer, steps)

    def _make_placer(
        self, placement: PolicySettings | None, slots: int, popularity: NDArray[np.int64] | None
    ) -> Placer:
        header, machine, backend = self.header, self.machine, self._backend
        if self._shards:
            backend.shards = SimulatedShards(header, machine, self.clock, backend.host, self._shards)
        if placement is None or not (self._shards or placement.uses_ndp):
            return Placer(self.cache)
        if machine.ndp is not None and placement.uses_ndp:
            backend.ndp = SimulatedNdp(machine.ndp, header, machine.ndp_workers, neurons_of(header), self.clock)
        each = [slots, *(shard.cache.stats.slots for shard in self._shards)]
        return make_simulated_placer(
            placement, header, machine, self.cache, each, backend.shards, backend.ndp, popularity, recorded_logits
        )

    def preload(self) -> None:
        """Load every expert on its GPU."""
        keys = range(self.stats.experts)
        shards = self._backend.shards
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
        return self._backend.ndp

    @property
    def context(self) -> int:
        """Tokens whose keys and values the last forward read in each layer."""
        return self._backend.context

    @property
    def messages(self) -> int:
        """That the lead has sent to its peers and taken from them."""
        return self._backend.host.messages

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

    def _make_ahead(
        self, prefetch: PrefetchPolicy | None, pre_evict: PreEviction | None, adaptive: PolicySettings | None
    ) -> tuple[Prefetching | None, PreEvicting | None, Configuring | None]:
        """Prefetch, pre-eviction and the configurator; None for each that the policy lacks."""
        header, prefetching, pre_evicting, configuring = self.header, None, None, None
        if prefetch is not None:
            if self.machine.matcher_s and getattr(prefetch, "of_matcher", False):
                prefetch = MatcherLag(prefetch, self.clock, self.machine.matcher_s, header.experts)
            prefetching = Prefetching(
                prefetch, self.cache, header.layers, header.experts, see, cast(Any, self._backend.shards)
            )
        if pre_evict is not None:
            pre_evicting = PreEvicting(pre_evict, self.cache, header.layers, header.experts, recorded_logits)
        if adaptive is not None:
            configuring = make_configuring(
                adaptive, self.cache, header.experts, header.top_k, header.slot_bytes, prefetching, self.clock, False,
                _BATCH,
            )  # fmt: skip
        return prefetching, pre_evicting, configuring

    def _hooks(self, rerouting: Rerouting | None, low_bit: LowBitOptions | None) -> Hooks:
        rules: list[Any] = []
        self._rerouting = rerouting
        if rerouting is not None:
            recorded = cast(Any, [SimpleNamespace(router=rerouting)] * self.header.layers)  # a trace has probabilities
            rules.append(Rerouter(rerouting, self.cache, recorded, self.header.top_k))
        if low_bit is not None:
            mixed = MixedPrecision(low_bit.t1, low_bit.t2, renormalise=True)
            rules.append(LowBits(mixed, self.cache, self.header.experts))
        ahead = [hook for hook in (self._prefetching, self._pre_evicting) if hook is not None]
        watch, own = [] if self._configuring is None else [self._configuring], self._placer.hooks
        return Hooks(rules, [*watch, *own.watch], [*ahead, *own.ahead])

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
            self._context[name] = self._context.get(name, 0) + len(part.tokens)
        forward = RecordedForward(parts)
        self._backend.begin_forward(forward.tokens, sum(self._context[name] for name, _ in parts))
        if self.recorded is not None and not any(layer.observers for layer in self.layers):
            self.recorded.forward(forward, self._backend.dense_s)
            return
        for layer in self.layers:
            layer.forward(forward)

    def end_sequence(self, name: str) -> None:
        """A sequence is over."""
        self._context.pop(name, None)
        self._placer.end_sequence(name)
        if self._prefetching is not None:
            self._prefetching.end_sequence(name)

    def reset_stats(self) -> None:
        """Zero the counters; residency and the clock stay."""
        for cache in self.caches:
            cache.reset_stats()


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


def engine_of(
    settings: PolicySettings,
    header: TraceHeader,
    machine: Machine,
    budget: float | int,
    eviction: EvictionPolicy,
    prefetch: PrefetchPolicy | None,
    split: SplitLayout | None = None,
    adapts: bool = True,
    popularity: NDArray[np.int64] | None = None,
    profile: ExpertProfile | None = None,
) -> SimulatedEngine:
    """An engine with the preset's governor, trials of prefetch, pre-eviction, changes of routing and write-back.

    Args:
        eviction, prefetch, split: made from the preset; policies may be trained.
        popularity: [L, E], for a static placement. profile: for buddies.
        adapts: False: the given split stays, also for an adaptive preset.

    Raises:
        BudgetError, ValueError: as `SimulatedEngine`. ConfigError: the preset needs what there is not.
    """
    context, others = context_of(header), [eviction_of(settings, header) for _ in range(machine.gpus - 1)]
    if others and (split is not None or settings.low_bit is not None or settings.reroutes or settings.evict_writeback):
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
    return SimulatedEngine(
        header, machine, budget, eviction, prefetch, settings.prefetch.min_useful, split=split,
        pre_evict=make("pre_evict", settings.pre_evict, context), rerouting=rerouting,
        low_bit=settings.low_bit, writeback=settings.evict_writeback,
        adaptive=settings if adapts and settings.split.kind == "adaptive" else None,
        trials=PrefetchTrials() if settings.adapts_prefetch else None,
        placement=settings, evictions=others, popularity=popularity,
    )  # fmt: skip


def replays_routing(settings: PolicySettings) -> bool:
    """Whether the preset changes the routing, and a trace has the data for its rule."""
    rules = policy_class("routing", settings.routing.kind), policy_class("on_miss", settings.on_miss.kind)
    return settings.low_bit is not None or any(getattr(rule, "traced", False) for rule in rules)
