"""The machine that a replay runs on: what computing and copying take.

Split experts in the simulated executor: the cut that a preset begins with, and how it adapts on a virtual clock.

The simulated executor: the engine's own cache, planner and policies, on a virtual clock and a recorded routing.

What is not the engine's: copies (`VirtualLoader`), kernels (time passes by the machine's costs), and the model (a
trace). Everything that decides or counts is the code that serves.

The simulated engine of a preset: everything that the preset decides, on a recorded trace.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from ...actors.engine.cache.cache import ExpertCache
from ...actors.engine.cache.slots import LowBitPart
from ...actors.engine.cache.virtual_link import VirtualClock, VirtualLoader
from ...actors.engine.dispatch import ExpertRunner
from ...actors.engine.pre_evicting import PreEvicting, last_rows
from ...actors.engine.rerouting import reroute_view
from ...actors.engine.split import Configurator, Recorder, Step
from ...actors.engine.stats import EngineStats, LayerStats, Timeline
from ...actors.policies.activeevict import BudgetAwareTopK, PreEviction
from ...actors.policies.cost import Link
from ...actors.policies.eviction import EvictionPolicy
from ...actors.policies.hobbit import MixedPrecision
from ...actors.policies.moepic.configure import Configured
from ...actors.policies.moepic.split import CacheCut, Order, buffer_for
from ...actors.policies.plan import LoadOnMiss
from ...actors.policies.prefetch import LayerSeen, PrefetchGovernor, PrefetchPolicy, Span, Wanted, runs
from ...actors.policies.registry import LAYER_EVICTION, make_eviction
from ...actors.policies.residency import Residency, State
from ...actors.policies.routing import Rerouting
from ...actors.policy_settings import LowBitSettings, PolicySettings
from ...actors.settings import budget_bytes, mixed_slots
from ...errors import BudgetError, ConfigError, TraceError
from ...kernels.pack import PackedShape
from ..yaml_file import explain, read_yaml
from .trace import Costs, Iteration, TraceHeader


class Machine(Costs):
    """A simulated machine: costs of computing, and the link. Fields in the order of a forward pass.

    name: what reports call it. link_gbps: gigabytes (1e9) per second; none: copies take no time. link_latency_us: of
    each copy. Experts run one after the other, so that the times of a layer add up.
    """

    name: Annotated[str, Field(min_length=1)]
    link_gbps: Annotated[float, Field(gt=0)] | None = None
    link_latency_us: Annotated[float, Field(ge=0)] = 0.0

    @property
    def link(self) -> Link | None:
        return None if self.link_gbps is None else Link(self.link_gbps, self.link_latency_us)

    def dense(self, rows: int) -> float:
        """Seconds of a layer's attention, norms and router."""
        return self.dense_s + (rows - 1) * self.dense_row_s

    def experts(self, experts: int, pairs: int) -> float:
        """Seconds of so many experts on so many rows in all."""
        return experts * self.expert_s + (pairs - experts) * self.expert_row_s


def load_machine(
    header: TraceHeader, file: Path | None, link_gbps: float | None, link_latency_us: float | None
) -> Machine:
    """The machine of a YAML file, or the one that the trace was recorded on; with another link if one is given.

    Raises:
        ConfigError: the file is refused, or there is none and the trace was recorded without costs.
    """
    given = {"link_gbps": link_gbps, "link_latency_us": link_latency_us}
    link = {key: value for key, value in given.items() if value is not None}
    if file is not None:
        try:
            values = read_yaml(file)
            return Machine(**(values | link))
        except ValidationError as error:
            raise explain(error, Machine, str(file)) from error
    if header.costs is None:
        raise ConfigError("the trace says nothing of what computing took", "give a machine with --machine FILE")
    try:
        return Machine(name="recorded", **header.costs.model_dump(), **link)
    except ValidationError as error:
        raise explain(error, Machine, "the trace", link) from error


_BATCH = 64  # forwards that are counted together


@dataclass(frozen=True, slots=True)
class Routed:
    """A layer's routing: see `engine.routing.Routing`."""

    tokens: int
    experts: list[int]
    starts: list[int]


def neurons_of(header: TraceHeader) -> int:
    """I of a trace's experts: a slot holds three numbers for each neuron and hidden dimension.

    Raises:
        TraceError: the slot's bytes are no such experts'.
    """
    of_one = 3 * header.hidden * (4 if header.expert_dtype == "float32" else 2)
    neurons, rest = divmod(header.slot_bytes, of_one)
    if rest or not neurons:
        raise TraceError(
            f"experts of {header.slot_bytes} bytes are not of gated neurons without biases", "replay it without a split"
        )
    return neurons


def first_cut(header: TraceHeader, policy: PolicySettings, budget: float | int) -> CacheCut:
    """The cut that a preset begins with.

    Raises:
        BudgetError: the budget does not hold it. TraceError: the experts cannot be cut.
    """
    split, neurons, keys = policy.split, neurons_of(header), header.layers * header.experts
    slots = min(budget_bytes(budget, header.slot_bytes, keys) // header.slot_bytes, keys)
    buffer = buffer_for(split.theta, header.top_k) if split.buffer is None else split.buffer
    try:
        return CacheCut.uniform(header.layers, header.experts, neurons, slots * neurons, split.theta, buffer)
    except ValueError as error:
        raise BudgetError(f"the budget of {slots} experts cannot be split: {error}", "give more") from error


class SimulatedConfiguring:
    """`engine.configuring.Configuring` without a thread: deciding takes no time, the next forward has the new cut."""

    def __init__(
        self, header: TraceHeader, policy: PolicySettings, cache: ExpertCache, clock: Callable[[], float]
    ) -> None:
        ahead = policy.prefetch
        guesses = 0 if ahead.kind == "none" else header.top_k if ahead.top is None else ahead.top
        order = cast(Order, policy.eviction)
        self._configurator = Configurator(
            cache, policy.split, order, header.experts, header.top_k, guesses, header.slot_bytes
        )
        self._recorder = Recorder(cache, header.layers, clock)
        self._layers, self._tau = header.layers, policy.split.tau
        self._steps: list[Step] = []
        self._found: Configured | None = None

    def begin_forward(self) -> None:
        """Change to the cut that was found since."""
        found, self._found = self._found, None
        if found is not None:
            self._configurator.apply(found)

    def routed(self, layer: int, routing: Routed) -> None:
        """A layer's routing is known."""
        self._recorder.routed(layer, routing)

    def observed(self, layer: int, scores: NDArray[np.floating] | None) -> None:
        """The prefetch policy has seen a layer, and foreseen the next one by these scores."""
        if scores is not None:
            self._recorder.predicted((layer + 1) % self._layers, scores)

    def ran(self, layer: int) -> None:
        """A layer's experts have run."""
        step = self._recorder.ran(layer)
        if step is None:
            return
        self._steps.append(step)
        if len(self._steps) >= _BATCH or sum(s.tokens for s in self._steps) >= self._tau:
            self._configurator.add(self._steps)
            self._steps = []
            if self._configurator.due:
                self._found = self._configurator.configure()


@dataclass(frozen=True)
class _NoPool:
    """Slots without memory, and experts without weights: a copy between the two moves nothing."""

    bytes: int
    neurons: int = 1
    total_neurons: int = 1

    def slot(self, index: int) -> tuple[()]:
        return ()

    def neuron_range(self, first: int, count: int) -> tuple[()]:
        return ()

    def expert(self, index: int) -> tuple[()]:
        return ()


class _NoDevice:
    """Compute sees a copy as soon as the clock has reached its end."""

    executor = "simulated"

    def enter(self) -> None:
        return None

    def mark_use(self) -> None:
        return None


class _TimedKernel:
    """Lets the time of a kernel call pass; that of a segment is its share of the expert's.

    groups: first pair, end, first neuron, neurons, added or not, as in `ExpertKernel.run`.
    """

    def __init__(self, clock: VirtualClock, machine: Machine, neurons: int) -> None:
        self._clock, self._machine, self._neurons = clock, machine, neurons

    def run(
        self, hidden: Any, pairs: Any, groups: Sequence[tuple[int, int, int, int, bool]], top_k: int, y: Any
    ) -> None:
        whole = [group for group in groups if group[3] == self._neurons]
        seconds = self._machine.experts(len(whole), sum(group[1] - group[0] for group in whole))
        for start, stop, _, neurons, _ in groups:
            if neurons != self._neurons:
                seconds += self._machine.experts(1, stop - start) * (neurons / self._neurons)
        self._clock.advance(seconds)


class _TimedReplicas:
    """The same of replicas: `PackedKernel.run`."""

    def __init__(self, clock: VirtualClock, machine: Machine) -> None:
        self._clock, self._machine = clock, machine

    def run(self, hidden: Any, pairs: Any, groups: Sequence[tuple[int, int, int]], top_k: int, y: Any) -> None:
        self._clock.advance(self._machine.experts(len(groups), sum(stop - start for start, stop, _ in groups)))


class SimulatedEngine:
    """The expert engine of one device without a device.

    Args:
        header: shapes of the model.
        machine: what things take.
        budget: share (float) or bytes (int) of expert memory.
        eviction, prefetch, governor: policies; `prefetch` None: none.
        check: check the cache's invariants after each layer.
        pre_evict: the release target; None: no slot is freed before it is needed. A trace holds a layer's prediction
            for its top K only: the others share what is left, so that the redundancy is at its greatest.
        rerouting: a rule that changes the recorded routing, of one layer at a time: later layers stay as recorded.
            Only one that goes without probabilities.
        writeback: see `ExpertCache`.
        cut: how the slots are divided, and then `eviction` is a `SplitEviction`; None: a slot is a whole expert.
        adaptive: policy by which the cut adapts; None: it does not.
        low_bit: misses that matter little are loaded as replicas, and then `eviction` is a `TwoWidths`. Their kernels
            take as long as those of experts in full. None: all are loaded in full.

    Raises:
        BudgetError: the budget holds no expert, or not one of each kind. ValueError: the cut is not within the budget.
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
        cut: CacheCut | None = None,
        adaptive: PolicySettings | None = None,
        low_bit: LowBitSettings | None = None,
    ) -> None:
        keys, slot_bytes = header.layers * header.experts, header.slot_bytes
        held = budget_bytes(budget, slot_bytes, keys)
        slots, replicas = min(held // slot_bytes, keys), None
        if low_bit is not None:
            packed = replica_bytes(header, low_bit.bits)
            slots, low = mixed_slots(held, slot_bytes, packed, low_bit.share, keys)
            nowhere = _NoPool(low * packed)
            replicas = LowBitPart(nowhere, cast(Any, [nowhere] * header.layers), low, packed)
        self._mixed = None if low_bit is None else MixedPrecision(low_bit.t1, low_bit.t2, renormalise=True)
        self.header, self.machine, self.clock = header, machine, VirtualClock()
        self.stats = EngineStats(
            layers=[LayerStats() for _ in range(header.layers)], expert_budget_bytes=held, slots=slots, experts=keys,
            executor="simulated",
        )  # fmt: skip
        neurons = 1 if cut is None else cut.neurons
        memory = cast(Any, _NoPool(slots * slot_bytes, neurons, slots * neurons))
        self.cache = ExpertCache(
            memory, [memory] * header.layers, cast(Any, _NoDevice()), Residency(keys, slots, slot_bytes), eviction,
            governor if governor is not None else PrefetchGovernor(0.0), self.stats, Timeline(False),
            VirtualLoader(self.clock, machine.link, self._bytes_of), self.clock, cut, writeback,
            replicas,
        )  # fmt: skip
        self._planner, self._prefetch, self._check = LoadOnMiss(), prefetch, check
        self._configuring = (
            None if adaptive is None else SimulatedConfiguring(header, adaptive, self.cache, self.clock)
        )
        self._rerouting = rerouting
        self._pre_evicting = (
            None
            if pre_evict is None
            else PreEvicting(pre_evict, self.cache, header.layers, header.experts, _recorded_logits)
        )
        self._kernel = cast(Any, _TimedKernel(self.clock, machine, neurons))
        packed_kernel = None if replicas is None else cast(Any, _TimedReplicas(self.clock, machine))
        self._runner = ExpertRunner(self.cache, self._planner, packed_kernel)

    def _bytes_of(self, segment: int) -> int:
        return self.cache.bytes_of(segment)

    def forward(self, parts: Sequence[tuple[str, Iteration]]) -> None:
        """One forward pass that carries these iterations of these sequences; the clock moves on."""
        spans = spans_of(parts)
        self.cache.decode_only = all(part.decode for _, part in parts)
        if self._configuring is not None:
            self._configuring.begin_forward()
        if self._prefetch is not None:
            self._fetch(0, self._prefetch.begin_forward(spans), not self.cache.governor.resting)
        if self._pre_evicting is not None:
            self._pre_evicting.begin_forward(last_rows(spans))
        self.clock.advance(self.machine.forward_s)
        for layer in range(self.header.layers):
            self._layer(layer, spans, parts)

    def reset_stats(self) -> None:
        """Zero the counters; residency and the clock stay."""
        self.stats.layers[:] = [LayerStats() for _ in self.stats.layers]
        self.stats.prefetch_sources = {}
        self.stats.substitutions = self.stats.dropped = 0

    def end_sequence(self, name: str) -> None:
        """A sequence is over."""
        if self._prefetch is not None:
            self._prefetch.end(name)

    def _layer(self, layer: int, spans: Sequence[Span], parts: Sequence[tuple[str, Iteration]]) -> None:
        """`MoeLayer.forward`, step by step."""
        cache, base = self.cache, layer * self.header.experts
        self.clock.advance(self.machine.dense(spans[-1].stop))
        picked = ids = _joined([part.ids[:, layer] for _, part in parts])
        stats = self.stats.layers[layer]
        blocked_s, busy_s = stats.blocked_io_s, stats.link_s
        cache.poll()
        low: frozenset[int] = frozenset()
        if self._mixed is not None:
            experts, starts, low = self._in_two_widths(self._mixed, layer, ids, parts)
        else:
            experts, starts = _grouped(ids) if self._rerouting is None else self._rerouted(layer, ids, parts)
        keys = [base + e for e in experts]
        needed = cache.segments(keys, low)
        cache.drop_stale(layer, needed)
        counts = [stop - start for start, stop in itertools.pairwise(starts)]
        cache.eviction.routed(keys, counts, len(ids))
        configuring = self._configuring
        if configuring is not None:
            configuring.routed(layer, Routed(len(ids), experts, starts))
        plan = self._planner.plan(needed, cache.residency, cache.eviction)
        cache.begin(layer, plan)
        if plan.loads:
            cache.issue([load for load in plan.loads if not load.after])
        if self._prefetch is not None:
            seen = layer_seen(layer, spans, picked, parts)
            self._fetch(layer, self._prefetch.observed(seen), cache.governor.allows())
            if configuring is not None:
                configuring.observed(layer, self._prefetch.predicted)
        if self._pre_evicting is not None:
            self._pre_evicting.layer(layer, _Recorded(layer, parts), picked)
        places = {key: (starts[i], starts[i + 1]) for i, key in enumerate(keys)}
        nothing = cast(Any, None)
        self._runner.run(layer, plan, places, nothing, nothing, self.header.top_k, self._kernel, nothing)
        stats.io_path_s += stats.blocked_io_s - blocked_s
        stats.link_path_s += stats.link_s - busy_s
        if configuring is not None:
            configuring.ran(layer)
        if self._check:
            cache.check_integrity()

    def _rerouted(
        self, layer: int, ids: NDArray[Any], parts: Sequence[tuple[str, Iteration]]
    ) -> tuple[list[int], list[int]]:
        """`_grouped`, of the pairs that the rule leaves."""
        assert self._rerouting is not None  # the caller looked
        weights = _joined([part.weights[:, layer] for _, part in parts]).astype(np.float32)
        view = reroute_view(self.cache, layer, self.header.top_k)
        found = self._rerouting.reroute(layer, ids.astype(np.int64), weights, None, view)
        self.stats.substitutions += found.substituted
        self.stats.dropped += found.dropped
        return _grouped(found.ids, (found.weights != 0) | (weights == 0))

    def _in_two_widths(
        self, rule: MixedPrecision, layer: int, ids: NDArray[Any], parts: Sequence[tuple[str, Iteration]]
    ) -> tuple[list[int], list[int], frozenset[int]]:
        """`_grouped`, of the pairs that run, and the keys of the experts that run on replicas."""
        weights = _joined([part.weights[:, layer] for _, part in parts]).astype(np.float32)
        base, residency, all_keys = layer * self.header.experts, self.cache.residency, self.stats.experts
        found = rule.decide(
            ids.astype(np.int64), weights, lambda e: residency.state(base + e) != State.ABSENT,
            lambda e: residency.state(all_keys + base + e) != State.ABSENT,
        )  # fmt: skip
        self.stats.dropped += found.dropped
        kept = (found.weights != 0) | (weights == 0)
        self.stats.layers[layer].low_bit_pairs += int(np.isin(found.ids[kept], list(found.low)).sum())
        return *_grouped(found.ids, kept), frozenset(base + e for e in found.low)

    def _fetch(self, layer: int, wanted: Sequence[Wanted], allowed: bool) -> None:
        """As `engine.prefetching` does it."""
        if not allowed or not wanted or self._prefetch is None:
            return
        held: set[int] = set()
        for source, keys in runs(wanted, self.header.experts):
            self.cache.prefetch(keys, held, source or self._prefetch.name)
            held.update(keys)
        if self._prefetch.synchronous:
            self.cache.finish_prefetch([want.key for want in wanted], layer)


def replica_bytes(header: TraceHeader, bits: int) -> int:
    """Of one replica of the trace's experts, gated ones without biases, in groups of 64 inputs."""
    weight_bytes = 4 if header.expert_dtype == "float32" else 2
    neurons = max(1, header.slot_bytes // (3 * header.hidden * weight_bytes))
    return PackedShape(header.hidden, neurons, bits, 64).nbytes()


def spans_of(parts: Sequence[tuple[str, Iteration]]) -> list[Span]:
    """Whose rows a forward of these iterations carries."""
    spans, row = [], 0
    for name, part in parts:
        spans.append(Span(name, row, row + len(part.tokens), part.decode, part.embedding))
        row += len(part.tokens)
    return spans


def layer_seen(
    layer: int, spans: Sequence[Span], ids: NDArray[Any], parts: Sequence[tuple[str, Iteration]]
) -> LayerSeen:
    """A recorded layer as a prefetch policy sees it."""

    def lookahead(distance: int) -> NDArray[np.floating] | None:
        scores = [part.lookahead(layer, distance) for _, part in parts]
        if any(s is None for s in scores):
            return None
        past = layer + distance >= parts[0][1].ids.shape[1]
        return _joined([s[-1:] if past else s for s in scores if s is not None])

    return LayerSeen(layer, spans, ids, _joined([part.probabilities[:, layer] for _, part in parts]), lookahead)


class _Recorded(NamedTuple):
    """What a trace says of a layer in place of its hidden states."""

    layer: int
    parts: Sequence[tuple[str, Iteration]]


def _recorded_logits(layer: int, hidden: _Recorded) -> NDArray[np.floating] | None:
    """Logits [T, E] of a layer's router on an earlier layer's input, or its own; None where they were not recorded."""
    parts = [part for _, part in hidden.parts]
    if layer == hidden.layer:
        found = _joined([part.probabilities[:, layer] for part in parts]).astype(np.float64)
    else:
        scores = [part.lookahead(hidden.layer, layer - hidden.layer) for part in parts]
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


def _grouped(ids: NDArray[Any], kept: NDArray[np.bool_] | None = None) -> tuple[list[int], list[int]]:
    """The distinct experts of ids [T, K] and where each one's pairs start, in the order of `engine.routing.Routing`.

    kept: [T, K], the pairs that run; None: all.
    """
    if len(ids) == 1:
        experts = (ids[0] if kept is None else ids[0][kept[0]]).tolist()
        return experts, list(range(len(experts) + 1))
    counts = np.bincount(ids.ravel() if kept is None else ids[kept])
    used = counts.nonzero()[0]
    return used.tolist(), [0, *counts[used].cumsum().tolist()]


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
