"""The simulated executor: the engine's own cache, step and policies on a virtual clock and a recorded routing.

A backend of `engine.layer.MoeLayer`: the trace gives routing and scores, `VirtualLoader` copies, and kernels advance
the clock by the machine's costs. Everything that decides or counts is the serving code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ...actors.engine.cache.cache import ExpertCache
from ...actors.engine.cache.slots import LowBitPart
from ...actors.engine.cache.virtual_link import VirtualClock, VirtualLoader
from ...actors.engine.dispatch import ExpertRunner, Spans
from ...actors.engine.host_view import Routing
from ...actors.engine.layer import Hooks, MoeLayer, Placer
from ...actors.engine.pre_evicting import PreEvicting, last_rows
from ...actors.engine.prefetching import Prefetching
from ...actors.engine.rerouting import LowBits, Rerouter
from ...actors.engine.split import Configuring, make_configuring
from ...actors.engine.stats import EngineStats, LayerStats, Timeline
from ...actors.policies.activeevict import PreEviction
from ...actors.policies.eviction import EvictionPolicy, make_eviction
from ...actors.policies.fmoe import ExpertMapPolicy
from ...actors.policies.hobbit import LowBitOptions, MixedPrecision
from ...actors.policies.moepic.split import SplitLayout, buffer_for
from ...actors.policies.plan import LayerPlan
from ...actors.policies.prefetch import LayerSeen, PrefetchGovernor, PrefetchPolicy, Span, Wanted, ranked
from ...actors.policies.prefetch_trials import PrefetchTrials
from ...actors.policies.registry import PolicyContext, kinds, make, policy_class
from ...actors.policies.residency import Residency
from ...actors.policies.routing import Rerouting
from ...actors.policy_settings import PolicySettings
from ...actors.settings import budget_bytes, mixed_slots
from ...errors import BudgetError, ConfigError, TraceError
from ...kernels.pack import PackedShape
from .machine import Machine
from .peers import (
    SimulatedNdp,
    SimulatedShard,
    SimulatedShards,
    SimulatedTask,
    join,
    make_simulated_placer,
    merged,
    owners_of,
    rows_of,
    send,
)
from .trace import Iteration, TraceHeader

_BATCH = 64  # forwards that the configurator counts together
Parts = Sequence[tuple[str, Iteration]]  # a forward's iterations with the names of their sequences


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


def first_cut(header: TraceHeader, policy: PolicySettings, budget: float | int) -> SplitLayout:
    """The split that a preset begins with.

    Raises:
        BudgetError: the budget is too small for it. TraceError: the experts cannot be split.
    """
    split, neurons, keys = policy.split, neurons_of(header), header.layers * header.experts
    slots = min(budget_bytes(budget, header.slot_bytes, keys) // header.slot_bytes, keys)
    buffer = buffer_for(split.theta, header.top_k) if split.buffer is None else split.buffer
    try:
        return SplitLayout.uniform(header.layers, header.experts, neurons, slots * neurons, split.theta, buffer)
    except ValueError as error:
        raise BudgetError(f"the budget of {slots} experts cannot be split: {error}", "give more") from error


@dataclass(frozen=True)
class _NoPool:
    """Slots without memory and experts without weights: a copy moves nothing."""

    bytes: int
    neurons: int = 1
    total_neurons: int = 1

    def slot(self, index: int, layer: int = 0) -> tuple[()]:
        return ()

    def neuron_range(self, first: int, count: int) -> tuple[()]:
        return ()

    def expert(self, index: int) -> tuple[()]:
        return ()


class _NoDevice:
    """A device without streams: a copy is visible once the clock has reached its end."""

    executor = "simulated"

    def enter(self) -> None:
        return None

    def mark_use(self) -> None:
        return None


class Compute:
    """The compute of one simulated GPU: lets time pass while kernels run, slower while a copy shares their memory."""

    def __init__(self, clock: VirtualClock, loader: VirtualLoader, share: float) -> None:
        self._clock, self._loader, self._share = clock, loader, share

    def run(self, seconds: float) -> None:
        """Kernels that take so long without a copy beside them."""
        clock, share = self._clock, self._share
        if share < 1:
            while seconds > 0 and (end_s := self._loader.busy_until()) is not None:
                beside_s = min(seconds / share, end_s - clock.now_s)
                clock.now_s = end_s if beside_s < seconds / share else clock.now_s + beside_s
                seconds -= beside_s * share
        if seconds > 0:
            clock.now_s += seconds


class TimedKernel:
    """Lets the time of a kernel call pass (`ExpertKernel.run`); a segment takes its share of an expert."""

    def __init__(self, compute: Compute, machine: Machine, neurons: int) -> None:
        self._compute, self._machine, self._neurons = compute, machine, neurons

    def run(
        self, hidden: Any, pairs: Any, groups: Sequence[tuple[int, int, int, int, bool]], top_k: int, y: Any
    ) -> None:
        whole = [group for group in groups if group[3] == self._neurons]
        seconds = self._machine.experts(len(whole), sum(group[1] - group[0] for group in whole))
        for start, stop, _, neurons, _ in groups:
            if neurons != self._neurons:
                seconds += self._machine.experts(1, stop - start) * (neurons / self._neurons)
        self._compute.run(seconds)


class _TimedReplicas:
    """The same for low-bit replicas (`PackedKernel.run`)."""

    def __init__(self, compute: Compute, machine: Machine) -> None:
        self._compute, self._machine = compute, machine

    def run(self, hidden: Any, pairs: Any, groups: Sequence[tuple[int, int, int]], top_k: int, y: Any) -> None:
        self._compute.run(self._machine.experts(len(groups), sum(stop - start for start, stop, _ in groups)))


class RecordedLayer:
    """One layer of a recorded forward (`engine.layer.View`)."""

    def __init__(self, index: int, parts: Parts) -> None:
        self.index, self.parts = index, parts
        self.picked = self.ids = _joined([part.ids[:, index] for _, part in parts]).astype(np.int64)
        self.tokens = len(self.ids)
        self._weights: NDArray[np.float32] | None = None
        self._runs: NDArray[np.bool_] | None = None  # [T, K] pairs that run; None: all

    @property
    def weights(self) -> NDArray[np.float32]:
        """Of `ids` [T, K]."""
        if self._weights is None:
            self._weights = _joined([part.weights[:, self.index] for _, part in self.parts]).astype(np.float32)
        return self._weights

    def reroute(self, ids: NDArray[Any], weights: NDArray[np.floating], dropped: bool) -> None:
        """From now on the layer runs these; pairs whose weight became 0 do not run."""
        runs = (weights != 0) | (self.weights == 0)
        self._runs = runs if self._runs is None else runs & self._runs
        self.ids, self._weights = ids, weights.astype(np.float32)

    def routing(self) -> Routing:
        """The pairs that run, by expert; nothing computes them."""
        ids, runs, nowhere = self.ids, self._runs, cast(Any, None)
        if len(ids) == 1:
            experts = (ids[0] if runs is None else ids[0][runs[0]]).tolist()
            counts = [1] * len(experts)
            return Routing(1, ids.shape[1], experts, counts, list(range(len(experts) + 1)), nowhere, nowhere)
        found = np.bincount(ids.ravel() if runs is None else ids[runs])
        used = found.nonzero()[0]
        starts = [0, *found[used].cumsum().tolist()]
        return Routing(len(ids), ids.shape[1], used.tolist(), found[used].tolist(), starts, nowhere, nowhere)


class _RecordedBackend:
    """Runs plans of recorded layers on the virtual clock (`engine.layer.Backend`)."""

    def __init__(
        self, clock: VirtualClock, machine: Machine, runner: ExpertRunner, loader: VirtualLoader, compute: Compute
    ) -> None:
        self._clock, self._machine, self._runner = clock, machine, runner
        self._loader, self._submitted, self._compute = loader, 0, compute
        self.shards: SimulatedShards | None = None
        self.ndp: SimulatedNdp | None = None
        self.context = 0  # tokens whose keys and values the present forward reads in each layer

    def native(self, step: MoeLayer) -> None:
        return None

    def look(self, layer: int, weighed: bool, parts: Any) -> Any:
        view = RecordedLayer(layer, parts)
        self._compute.run(self._machine.dense(view.tokens, self.context))
        return view

    def send(self, step: MoeLayer, plan: LayerPlan, routing: Routing, view: Any) -> list[SimulatedTask]:
        return send(plan, step.index * step.experts, step.index, routing, self.shards, self.ndp)

    def run(
        self, step: MoeLayer, plan: LayerPlan, spans: Spans, routing: Routing, view: Any,
        tasks: Sequence[Any],
    ) -> None:  # fmt: skip
        nothing, machine, submitted = cast(Any, None), self._machine, self._loader.submitted
        host_s = (submitted - self._submitted) * machine.load_s  # of prefetches, too
        if plan.resident < len(plan.run):
            host_s += machine.miss_s
        self._submitted = submitted
        if host_s:
            self._clock.advance(host_s)
        self._runner.run(step.index, plan, spans, nothing, nothing, routing.top_k, step.kernel, nothing)
        if tasks:
            join(tasks, self._clock, step.stats)


class _ShardBackend(_RecordedBackend):
    """A shard's part of a layer: a `Routing` of pairs, without a dense part."""

    def look(self, layer: int, weighed: bool, parts: Routing) -> ShardView:
        return ShardView(parts)


@dataclass(frozen=True)
class ShardView:
    part: Routing

    def routing(self) -> Routing:
        return self.part


class MatcherLag(PrefetchPolicy):
    """Forecasts of the matcher that come a time after their layer was published.

    A command is taken when a later layer's routing is known, as on the lead (`peers.matcher`); its keys of that layer
    and of earlier ones are late, and dropped. Probabilities for eviction come without the delay.
    """

    needs_ids, needs_probabilities, needs_embeddings = False, True, True

    def __init__(self, policy: PrefetchPolicy, clock: VirtualClock, lag_s: float, experts: int) -> None:
        self._policy, self._clock, self._lag_s, self._experts = policy, clock, lag_s, experts
        self.name, self.distance = policy.name, policy.distance  # type: ignore[misc]
        self._asked = deque[tuple[float, Sequence[Wanted]]]()

    def begin_forward(self, spans: Sequence[Span]) -> Sequence[Wanted]:
        self._asked.clear()  # commands of the forward before are late
        self._asked.append((self._clock.now_s + self._lag_s, self._policy.begin_forward(spans)))
        return []

    def observed(self, seen: LayerSeen) -> Sequence[Wanted]:
        first, come = (seen.layer + 1) * self._experts, list[Wanted]()
        while self._asked and self._asked[0][0] <= self._clock.now_s:
            come += [want for want in self._asked.popleft()[1] if want.key >= first]
        self._asked.append((self._clock.now_s + self._lag_s, self._policy.observed(seen)))
        return ranked(come)

    def end(self, sequence: str) -> None:
        self._policy.end(sequence)


class SimulatedEngine:
    """The expert engine of one simulated device.

    Args:
        budget: share (float) or bytes (int) of expert memory.
        prefetch: None: no prefetch. governor: None: prefetch is never turned off.
        check: check the cache's invariants after each layer.
        pre_evict: the release target; None: no pre-eviction. A trace has a layer's predicted probabilities for its top
            K only; the other experts share the rest equally, which gives the greatest redundancy.
        rerouting: changes the recorded routing of each layer on its own; must not need probabilities.
        writeback: see `ExpertCache`.
        cut: the split of the slots, with an `eviction` for split caches; None: a slot is a whole expert.
        adaptive: policy by which the split adapts; None: fixed.
        placement: preset that decides where experts run; None: all on one GPU. popularity: [L, E], for a static one.
        evictions: of the other GPUs of the machine.
        low_bit: load unimportant misses as replicas, with a `TwoPools` as `eviction`; their kernels take as long as
            full experts. None: all loads are full.
        trials: pause prefetch where they say so; None: never.

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
        governor: PrefetchGovernor | None = None,
        check: bool = False,
        pre_evict: PreEviction | None = None,
        rerouting: Rerouting | None = None,
        writeback: bool = False,
        cut: SplitLayout | None = None,
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
            nowhere = _NoPool(low * packed)
            replicas = LowBitPart(nowhere, cast(Any, [nowhere] * header.layers), low, packed)
        self.header, self.machine, self.clock = header, machine, VirtualClock()
        self.stats = EngineStats(
            layers=[LayerStats() for _ in range(header.layers)], expert_budget_bytes=bought, slots=slots, experts=keys,
            executor="simulated",
        )  # fmt: skip
        neurons = 1 if cut is None else cut.neurons
        memory = cast(Any, _NoPool(slots * slot_bytes, neurons, slots * neurons))
        loader = VirtualLoader(self.clock, machine.link, late_s=machine.wait_s)
        self.cache = ExpertCache(
            memory, [memory] * header.layers, cast(Any, _NoDevice()), Residency(keys, slots, slot_bytes), eviction,
            governor if governor is not None else PrefetchGovernor(0.0), self.stats, Timeline(False),
            loader, self.clock, cut, writeback,
            replicas,
        )  # fmt: skip
        compute = Compute(self.clock, loader, machine.kernel_share)
        runner = ExpertRunner(self.cache, None if replicas is None else cast(Any, _TimedReplicas(compute, machine)))
        kernel = TimedKernel(compute, machine, neurons)
        self._backend = _RecordedBackend(self.clock, machine, runner, loader, compute)
        backend = cast(Any, self._backend)
        self._shards = [
            self._shard(owners.count(i), policy, governor, check) for i, policy in enumerate(evictions, start=1)
        ]
        self._placer = self._make_placer(placement, slots, popularity)
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

    def _shard(
        self, owned: int, eviction: EvictionPolicy, governor: PrefetchGovernor | None, check: bool
    ) -> SimulatedShard:
        """Another GPU, with as many bytes as the lead. owned: experts that belong to it."""
        header, machine, clock = self.header, self.machine, VirtualClock()
        keys, slots = header.layers * header.experts, min(self.stats.expert_budget_bytes // header.slot_bytes, owned)
        memory = cast(Any, _NoPool(slots * header.slot_bytes, 1, slots))
        loader = VirtualLoader(clock, machine.link, late_s=machine.wait_s)
        stats = EngineStats(
            layers=[LayerStats() for _ in range(header.layers)], slots=slots, experts=keys, executor="simulated"
        )
        cache = ExpertCache(
            memory, [memory] * header.layers, cast(Any, _NoDevice()), Residency(keys, slots, header.slot_bytes),
            eviction, PrefetchGovernor(0.0 if governor is None else governor.min_useful), stats, Timeline(False),
            loader, clock, None, False, None,
        )  # fmt: skip
        compute, placer = Compute(clock, loader, machine.kernel_share), Placer(cache)
        backend = _ShardBackend(clock, machine, ExpertRunner(cache), loader, compute)
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
            backend.shards = SimulatedShards(header, machine, self.clock, self._shards)
        if placement is None or not (self._shards or placement.uses_ndp):
            return Placer(self.cache)
        if machine.ndp is not None and placement.uses_ndp:
            backend.ndp = SimulatedNdp(machine.ndp, header, machine.ndp_workers, neurons_of(header), self.clock)
        each = [slots, *(shard.cache.stats.slots for shard in self._shards)]
        return make_simulated_placer(
            placement, header, machine, self.cache, each, backend.shards, backend.ndp, popularity
        )

    def preload(self) -> None:
        """Load every expert on its GPU."""
        keys = range(self.stats.experts)
        shards = self._backend.shards
        self.cache.preload([key for key in keys if shards is None or shards.owner_of(key) == 0])
        if shards is not None:
            shards.preload(keys)()

    @property
    def slots(self) -> int:
        """Of all GPUs."""
        return self.stats.slots + sum(shard.cache.stats.slots for shard in self._shards)

    def live_stats(self) -> EngineStats:
        """The counters so far, over all GPUs."""
        found = self.cache.live_stats()
        if not self._shards:
            return found
        for shard in self._shards:
            shard.cache.settle_times()
        rows = zip(found.layers, *(shard.cache.live_stats().layers for shard in self._shards), strict=True)
        layers = [merged(lead, others, vars(lead)) for lead, *others in rows]
        each = [found, *(shard.cache.stats for shard in self._shards)]
        return replace(
            found, slots=self.slots, layers=layers, decode_hits=sum(stats.decode_hits for stats in each),
            decode_misses=sum(stats.decode_misses for stats in each),
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
                prefetch, self.cache, header.layers, header.experts, _see, cast(Any, self._backend.shards)
            )
        if pre_evict is not None:
            pre_evicting = PreEvicting(pre_evict, self.cache, header.layers, header.experts, _recorded_logits)
        if adaptive is not None:
            configuring = make_configuring(
                adaptive, self.cache, header.experts, header.top_k, header.slot_bytes, prefetching, self.clock, False,
                _BATCH,
            )  # fmt: skip
        return prefetching, pre_evicting, configuring

    def _hooks(self, rerouting: Rerouting | None, low_bit: LowBitOptions | None) -> Hooks:
        rules: list[Any] = []
        if rerouting is not None:
            rules.append(Rerouter(rerouting, self.cache, (), self.header.top_k))
        if low_bit is not None:
            mixed = MixedPrecision(low_bit.t1, low_bit.t2, renormalise=True)
            rules.append(LowBits(mixed, self.cache, self.header.experts))
        ahead = [hook for hook in (self._prefetching, self._pre_evicting) if hook is not None]
        return Hooks(rules, [] if self._configuring is None else [self._configuring], ahead)

    def forward(self, parts: Parts) -> None:
        """One forward pass over these iterations; advances the clock."""
        spans = spans_of(parts)
        self.cache.begin_forward(all(part.decode for _, part in parts))
        if self._configuring is not None:
            self._configuring.begin_forward()
        if self._prefetching is not None:
            self._prefetching.begin(spans)
        if self._pre_evicting is not None:
            self._pre_evicting.begin_forward(last_rows(spans))
        self._placer.begin_forward(cast(Any, rows_of(spans)))
        for shard in self._shards:
            shard.cache.decode_only = self.cache.decode_only
        self.clock.advance(self.machine.forward_s)
        for name, part in parts:
            self._context[name] = self._context.get(name, 0) + len(part.tokens)
        self._backend.context = sum(self._context[name] for name, _ in parts)
        for layer in self.layers:
            layer.forward(parts)

    def end_sequence(self, name: str) -> None:
        """A sequence is over."""
        self._context.pop(name, None)
        self._placer.end_sequence(name)
        if self._prefetching is not None:
            self._prefetching.end_sequence(name)

    def reset_stats(self) -> None:
        """Zero the counters; residency and the clock stay."""
        for stats in (self.stats, *(shard.cache.stats for shard in self._shards)):
            stats.layers[:] = [LayerStats() for _ in stats.layers]
            stats.decode_hits = stats.decode_misses = 0
        self.stats.prefetch_sources = {}
        self.stats.substitutions = self.stats.dropped = 0


def replica_bytes(header: TraceHeader, bits: int) -> int:
    """Bytes of a replica of the trace's experts (gated, without biases), in groups of 64 inputs."""
    weight_bytes = 4 if header.expert_dtype == "float32" else 2
    neurons = max(1, header.slot_bytes // (3 * header.hidden * weight_bytes))
    return PackedShape(header.hidden, neurons, bits, 64).nbytes()


def spans_of(parts: Parts) -> list[Span]:
    """The rows of each sequence in a forward."""
    spans, row = [], 0
    for name, part in parts:
        spans.append(Span(name, row, row + len(part.tokens), part.decode, part.embedding))
        row += len(part.tokens)
    return spans


def layer_seen(layer: int, spans: Sequence[Span], ids: NDArray[Any], parts: Parts) -> LayerSeen:
    """A recorded layer as a prefetch policy sees it."""

    def lookahead(distance: int) -> NDArray[np.floating] | None:
        scores = [part.lookahead(layer, distance) for _, part in parts]
        if any(s is None for s in scores):
            return None
        past = layer + distance >= parts[0][1].ids.shape[1]
        return _joined([s[-1:] if past else s for s in scores if s is not None])

    return LayerSeen(layer, spans, ids, _joined([part.probabilities[:, layer] for _, part in parts]), lookahead)


def _see(layer: int, spans: Sequence[Span], view: RecordedLayer) -> LayerSeen:
    return layer_seen(layer, spans, view.picked, view.parts)


def _recorded_logits(layer: int, view: RecordedLayer) -> NDArray[np.floating] | None:
    """Logits [T, E] of a layer's router on the view's layer's input; None: not recorded."""
    parts = [part for _, part in view.parts]
    if layer == view.index:
        found = _joined([part.probabilities[:, layer] for part in parts]).astype(np.float64)
    else:
        scores = [part.lookahead(view.index, layer - view.index) for part in parts]
        if scores[0] is None:
            return None
        found = _joined([s for s in scores if s is not None])
        known = np.isfinite(found)
        found = np.where(known, np.maximum(found, 0.0), 0.0)
        rest = np.maximum(1.0 - found.sum(axis=1, keepdims=True), 0.0)
        found = np.where(known, found, rest / np.maximum((~known).sum(axis=1, keepdims=True), 1))
    logits: NDArray[np.floating] = np.log(np.maximum(found, 1e-12))
    return logits


def _joined(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def context_of(header: TraceHeader, **given: Any) -> PolicyContext:
    """The context for policies of a trace. given: further fields of `PolicyContext`."""
    fields = {"layers": header.layers, "experts": header.experts, "top_k": header.top_k, "hidden": header.hidden}
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
    cut: SplitLayout | None = None,
    adapts: bool = True,
    popularity: NDArray[np.int64] | None = None,
) -> SimulatedEngine:
    """An engine with the preset's governor, trials of prefetch, pre-eviction, budget-aware routing and write-back.

    Args:
        eviction, prefetch, cut: made from the preset; policies may be trained.
        popularity: [L, E], for a static placement.
        adapts: False: the given split stays, also for an adaptive preset.

    Raises:
        BudgetError, ValueError: as `SimulatedEngine`.
    """
    context, others = context_of(header), [eviction_of(settings, header) for _ in range(machine.gpus - 1)]
    if others and (cut is not None or settings.low_bit is not None or settings.reroutes or settings.evict_writeback):
        raise ConfigError(
            f"policy '{settings.name}' is simulated on one GPU, machine '{machine.name}' has {machine.gpus}",
            "replay it on a machine with one GPU",
        )
    if isinstance(prefetch, ExpertMapPolicy):
        for other in others:
            prefetch.tell(other)
    rule = policy_class("routing", settings.routing.kind)
    return SimulatedEngine(
        header, machine, budget, eviction, prefetch, PrefetchGovernor(settings.prefetch.min_useful), cut=cut,
        pre_evict=make("pre_evict", settings.pre_evict, context),
        rerouting=make("routing", settings.routing, context) if getattr(rule, "traced", False) else None,
        low_bit=settings.low_bit, writeback=settings.evict_writeback,
        adaptive=settings if adapts and settings.split.kind == "adaptive" else None,
        trials=PrefetchTrials() if settings.adapts_prefetch else None,
        placement=settings, evictions=others, popularity=popularity,
    )  # fmt: skip


def replays_routing(settings: PolicySettings) -> bool:
    """Whether the preset changes the routing, and a trace has the data for its rule."""
    return settings.low_bit is not None or getattr(policy_class("routing", settings.routing.kind), "traced", False)
