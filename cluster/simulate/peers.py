"""Peers of a simulated lead: other GPUs with their own caches and links, and near-data devices, on their own clocks.

    lead: send at t -> peer: begins at max(its clock, t + hop), runs -> lead: joins at max(its clock, end + hop)

A shard is a GPU as the lead is (`gpu.SimulatedGpu`). A near-data device runs its batches one after another in the time
of `policies.cost.expert_cost` and a message. The matcher's forecasts come a lag after they were asked for. The lead's
placers are the engine's (`engine.peers.placement`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import fsum
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from ...actors.core._core import Clock, Spared, VirtualLink
from ...actors.engine.cache.cache import ExpertCache
from ...actors.engine.layer import MoeLayer, Pass
from ...actors.engine.placer import Placer
from ...actors.engine.stats import LayerStats, PeerKind
from ...actors.policies.auto import Costs, Without
from ...actors.policies.context_ndp import HotSet, HotSlots
from ...actors.policies.cost import FULL_BITS, BatchCosts, NdpDevice, Work, expert_cost, load_s
from ...actors.policies.eviction import EvictionPolicy
from ...actors.policies.prefetch import LayerSeen, PrefetchPolicy, Span, Wanted, WantedKeys, ranked
from ...actors.policies.residency import State
from ...actors.policies.routing import SequenceRows
from ...actors.policies.sharding import shard_of, spread_by_bytes
from ...actors.policy_settings import PolicySettings
from ...actors.store.replicas import ReplicaTables
from ...errors import ConfigError
from ...proto.messages import ExpertResult
from .gpu import SimulatedGpu
from .machine import Machine, without_ndp
from .recorded import RecordedForward, RecordedLayer
from .trace import TraceHeader

_ROW_ITEM = 4  # bytes of a number of a row between processes: float32
_GROUP = 64  # inputs that share a replica's scale


@dataclass
class SimulatedTask:
    """One peer's experts of a layer (`engine.peers.remote.RemoteCall`). done_s: when its answer is at the lead."""

    recomputed: ClassVar[bool] = False  # none is lost

    kind: PeerKind
    name: str
    keys: list[int]
    pairs: int
    done_s: float
    answer: ExpertResult
    blocked_s: float = 0.0
    link_s: float = 0.0
    busy_s: float = 0.0  # for which the lead's link had copied when it began


class SimulatedShard(SimulatedGpu):
    """Another GPU of a lead, with its share of the experts.

    Args:
        mine: its keys. streams: by which policy it streams where a pass sweeps; None: it does not.
        Others as `SimulatedGpu`.
    """

    _layer = -1  # that ran last

    def __init__(
        self, header: TraceHeader, machine: Machine, slots: int, eviction: EvictionPolicy, min_useful: float,
        mine: Sequence[int], streams: str | None,
    ) -> None:  # fmt: skip
        super().__init__(header, machine, slots, eviction, min_useful)
        self._spared = Spared()  # hot experts, which leave last
        self.cache.core.owns(list(mine))
        for layer in self.run.layers:
            layer.placement(self._spared)
            if streams is not None:
                layer.stream_next(self.cache.number_of(streams))

    def begin(self, at_s: float) -> None:
        """A message has arrived."""
        self.clock.now_s = max(self.clock.now_s, at_s)

    def run_part(self, layer: int, tokens: int, experts: Sequence[int], counts: Sequence[int]) -> ExpertResult:
        """A layer's experts with so many rows each, of `tokens` rows; the clock advances. The result has no sums."""
        core, begin_s, before = self.cache.core, self.clock.now_s, self.cache.core.counts(layer)
        passed = range(self._layer + 1, layer) if layer > self._layer else range(layer)
        for index in passed:
            core.drop_stale(index, [])
        self._layer = layer
        self.run.run(layer, tokens, experts, counts)
        self.cache.settle_times()
        total_s, after = self.clock.now_s - begin_s, core.counts(layer)
        nothing: Any = None
        measured_s = total_s - (after.blocked_io_s - before.blocked_io_s)
        return ExpertResult(nothing, measured_s, after.link_s - before.link_s, total_s)

    def prefetch(self, keys: Sequence[int]) -> None:
        if self.cache.governor.allows():
            self.cache.poll()
            self.cache.prefetch(keys)

    def place(self, keys: Sequence[int], *, keep_others: bool, preload: bool = False) -> None:
        """Make these the hot experts."""
        self._spared.keys = list(keys)
        self.cache.poll()
        if preload:
            self.cache.core.preload(list(keys))
        else:
            self.cache.core.migrate(list(keys), keep_others)


class Peers:
    """What runs beside the lead, and the lead's host, which handles one message after the other (`layer.Backend`).

    Args:
        lead: its cache and clock.

    Attributes:
        shards: the other GPUs, ndp: the near-data devices; None: there are none.
    """

    def __init__(self, header: TraceHeader, machine: Machine, lead: SimulatedGpu) -> None:
        self._experts, self._message_s, self._lead = header.experts, machine.message_s, lead
        self.shards: SimulatedShards | None = None
        self.ndp: SimulatedNdp | None = None

    def look(self, step: MoeLayer, weighed: bool, forward: RecordedForward) -> RecordedLayer:
        return RecordedLayer(step.index, forward)

    def send(self, of: Pass) -> list[SimulatedTask]:
        """What peers run of a layer's experts."""
        layer, routing, tasks = of.step.index, of.routing, list[SimulatedTask]()
        base, rows = layer * self._experts, dict(zip(routing.experts, routing.counts, strict=True))
        for name, keys, bits in of.remote:
            needed = [key - base for key in keys]
            some = [rows[expert] for expert in needed]
            self._lead.clock.advance(self._message_s)
            if self.ndp is not None and name.startswith("ndp/"):
                tasks.append(self.ndp.run(name, keys, bits, some, routing.tokens))
            else:
                assert self.shards is not None  # plans name no others
                tasks.append(self.shards.run(name, layer, keys, routing.tokens, needed, some))
        return tasks

    def join(self, of: Pass, task: SimulatedTask) -> bool:
        """Wait for an answer, and take it."""
        cache, clock = self._lead.cache, self._lead.clock
        if self.ndp is not None and task.kind == "ndp":
            waited_s = self.ndp.wait(task)
        else:
            waited_s = max(0.0, task.done_s - clock.now_s)
            clock.now_s += waited_s
        clock.advance(self._message_s)
        cache.stats.count_answer(
            of.step.index, task.kind, waited_s, len(task.keys), task.pairs, task.answer, cache.core.decode_only
        )
        return True

    def add(self, of: Pass, out: Any) -> None:
        """There are no sums."""


class SimulatedShards:
    """The other GPUs of a lead (`engine.peers.shards.Shards`); experts belong to GPUs round-robin.

    Args:
        clock: the lead's. shards: GPUs 1..G-1.
    """

    def __init__(self, header: TraceHeader, machine: Machine, clock: Clock, shards: Sequence[SimulatedShard]) -> None:
        self.peers = {f"shard/{i}": shard for i, shard in enumerate(shards, start=1)}
        self._machine, self._clock, self._row_bytes = machine, clock, _ROW_ITEM * header.hidden
        self._owners = owners_of(header, machine.gpus)
        by_index = [None, *self.peers.items()]
        self._owner = [by_index[i] for i in self._owners]

    def owner_of(self, key: int) -> int:
        return self._owners[key]

    def peer_of(self, key: int) -> tuple[str, SimulatedShard] | None:
        return self._owner[key]

    def holds(self, keys: Sequence[int]) -> list[bool]:
        return [
            owner is not None and owner[1].cache.residency.state(key) != State.ABSENT
            for key, owner in [(key, self._owner[key]) for key in keys]
        ]

    def run(
        self, name: str, layer: int, keys: list[int], tokens: int, experts: Sequence[int], counts: Sequence[int]
    ) -> SimulatedTask:
        """Send a shard its part of a layer."""
        pairs = sum(counts)
        shard, hop_s = self.peers[name], self._machine.hop(min(tokens, pairs) * self._row_bytes)
        shard.begin(self._clock.now_s + hop_s)
        answer = shard.run_part(layer, tokens, experts, counts)
        blocked_s = answer.paced_s - answer.measured_s
        return SimulatedTask(
            "shard", name, keys, pairs, shard.clock.now_s + hop_s, answer, blocked_s, answer.modelled_s
        )

    def _handle(self) -> None:
        """The lead's host sends a message."""
        self._clock.advance(self._machine.message_s)

    def prefetch(self, layer: int, keys: Sequence[int]) -> None:
        """Post prefetches to the owners, most wanted first."""
        for shard, wanted in self._by_shard(keys):
            if wanted:
                self._handle()
                shard.begin(self._clock.now_s + self._machine.hop(0))
                shard.prefetch(wanted)

    def place(self, keys: Sequence[int], *, keep_others: bool) -> Callable[[], bool]:
        for shard, hot in self._by_shard(keys):
            self._handle()
            shard.begin(self._clock.now_s + self._machine.hop(0))
            shard.place(hot, keep_others=keep_others)
        return lambda: True

    def preload(self, keys: Sequence[int]) -> Callable[[], None]:
        for shard, hot in self._by_shard(keys):
            shard.place(hot, keep_others=False, preload=True)
        return lambda: None

    def _by_shard(self, keys: Sequence[int]) -> list[tuple[SimulatedShard, list[int]]]:
        return [
            (shard, [key for key in keys if self._owners[key] == i]) for i, shard in enumerate(self.peers.values(), 1)
        ]


@dataclass(eq=False)
class SimulatedNdp:
    """Near-data devices that share the experts (`engine.peers.remote.NdpPool`), each with a clock of its own.

    Attributes:
        share: speed of their kernels while the lead's link copies.
        free_s: when each has ended its last batch.
    """

    device: NdpDevice
    header: TraceHeader
    workers: int
    neurons: int
    clock: Clock
    link: VirtualLink
    share: float = 1.0
    available: bool = True
    free_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free_s = [0.0] * self.workers
        keys = self.header.layers * self.header.experts
        self._owners = spread_by_bytes([1] * keys, self.workers)
        self._names = [f"ndp/{i}" for i in range(self.workers)]
        self._costs = BatchCosts(self.device, self.header.hidden, self.neurons, FULL_BITS, _GROUP)

    @property
    def living(self) -> int:
        return self.workers

    @property
    def owners(self) -> int:
        return self.workers

    def choose(self, keys: Sequence[int]) -> list[str]:
        """The device of each expert."""
        return [self._names[self._owners[key]] for key in keys]

    def run(self, name: str, keys: list[int], bits: Sequence[int], counts: Sequence[int], tokens: int) -> SimulatedTask:
        """A batch with `counts` rows of each expert, of `tokens` rows in all; bits 0: full precision."""
        number, pairs = self._names.index(name), sum(counts)
        kernels_s = fsum(map(self.kernels_s, bits, counts))
        total_s = 2 * load_s(min(tokens, pairs) * self.header.hidden * _ROW_ITEM, self.device.link) + kernels_s
        begin_s = max(self.clock.now_s, self.free_s[number])
        self.free_s[number] = done_s = begin_s + total_s
        nothing: Any = None
        answer = ExpertResult(nothing, kernels_s, total_s, done_s - self.clock.now_s)
        return SimulatedTask("ndp", name, keys, pairs, done_s, answer, busy_s=self.link.busy_s())

    def kernels_s(self, bits: int, rows: int) -> float:
        """Seconds of one expert on a device."""
        return self._costs.expert_s(bits, rows)

    def wait(self, task: SimulatedTask) -> float:
        """Wait for a task, which copies may have slowed since it began; how long."""
        asked_s, kernels_s = self.clock.now_s, task.answer.measured_s
        beside_s = self.link.busy_s() - task.busy_s  # up to now; its kernels may have ended before
        slowed_s = min((1 - self.share) * beside_s, (1 / self.share - 1) * kernels_s)
        self.link.compute(task.done_s + slowed_s - asked_s, self.share)
        waited_s = self.clock.now_s - asked_s
        if self.share < 1:
            late_s = self.clock.now_s - task.done_s if waited_s > 0 else slowed_s
            task.answer = replace(task.answer, measured_s=kernels_s + late_s)
            number = self._names.index(task.name)
            self.free_s[number] = max(self.free_s[number], task.done_s + late_s)
        return waited_s


def owners_of(header: TraceHeader, gpus: int) -> list[int]:
    """The GPU of each key [L * E]."""
    experts = header.experts
    return [shard_of(layer, e, experts, gpus) for layer in range(header.layers) for e in range(experts)]


def rows_of(spans: Sequence[Span]) -> list[SequenceRows]:
    return [SequenceRows(span.sequence, span.start, span.stop, span.decode) for span in spans]


def make_simulated_placer(
    settings: PolicySettings, header: TraceHeader, machine: Machine, caches: Sequence[ExpertCache], peers: Peers,
    counts: NDArray[np.int64] | None, score: Any, believed: Machine | None = None, without: Without = Without.NOTHING,
) -> Placer:  # fmt: skip
    """The engine's placer of a preset, with simulated peers.

    A trace holds no errors of quantized experts, so every expert's error is 4^-b at b bits: an average width is held,
    and which expert gets which width is not the paper's.

    Args:
        caches: of each GPU. counts: popularity [L, E], for placement static; None or zeros: it counts as it runs.
        score: of routers, as of `engine.peers.auto`.
        believed, without: as of `executor.Policies`.

    Raises:
        ConfigError: the preset needs a device that the machine lacks, or more slots than there are.
    """
    from ...actors.engine.peers import placement as engine  # torch
    from ...actors.engine.peers.auto import make_auto

    cache, experts, kind, ndp = caches[0], header.experts, settings.placement.kind, peers.ndp
    shards = cast(Any, peers.shards)
    if kind == "cache":
        return engine.GpuPlacer(cache, experts, shards)
    if ndp is None and not settings.placement.optional_workers:
        raise without_ndp(settings.name, machine.name)
    if settings.placement.planned:
        costs = start_costs(header, machine if believed is None else believed, 0 if ndp is None else ndp.neurons)
        return make_auto(
            settings.placement, cache, experts, header.top_k, shards, cast(Any, ndp), lambda: costs, score, without
        )
    assert ndp is not None
    pool = cast(Any, ndp)
    widths = settings.precision.widths or (1, 2, 3, 4)
    shape = (header.layers, experts)
    losses = np.broadcast_to(0.25 ** np.array(widths), (*shape, len(widths))).astype(np.float32)
    popular = np.ones(shape, np.int64) if counts is None else counts
    tables = ReplicaTables(widths, losses, losses, np.zeros(losses.shape, bool), popular, popular.astype(np.float64))
    bits, widest = engine.replica_bits(settings.precision, settings.name, tables, None)
    if kind == "monde":
        if shards is not None:
            raise ConfigError("policy monde runs on one GPU", "replay it on a machine with one")
        load = 0.0 if machine.link is None else load_s(header.slot_bytes, machine.link)
        row_bytes = _ROW_ITEM * header.hidden
        choose = engine.monde_choice(
            ndp.device, header.hidden, ndp.neurons, lambda rows: machine.experts(1, rows), load, row_bytes, FULL_BITS
        )
        return engine.MondePlacer(cache, experts, pool, choose, widest, settings.placement.hot_per_layer is None)
    owner = np.asarray(owners_of(header, machine.gpus)).reshape(shape)
    try:
        hot_slots = HotSlots.fit(owner, [each.stats.slots for each in caches], settings.placement.hot_per_layer)
    except ValueError as error:
        raise ConfigError(f"policy {settings.name}: {error}", "raise --budget") from error
    if kind == "context":
        hot_set = HotSet(hot_slots, settings.placement.alpha)
        return engine.ContextPlacer(cache, experts, shards, pool, widest, hot_set, bits, settings.placement)
    known = counts if counts is not None and counts.any() else None
    return engine.StaticPlacer(cache, experts, shards, pool, widest, hot_slots, bits, known)


def start_costs(header: TraceHeader, machine: Machine, neurons: int) -> Costs:
    """A machine's costs for a planner; without near-data devices (neurons 0) every miss is loaded."""
    gpu_s, copy_s = machine.experts(1, 1), 0.0 if machine.link is None else load_s(header.slot_bytes, machine.link)
    near_s, message_s, rows = gpu_s, 0.0, 1
    if (ndp := machine.ndp) is not None and neurons:
        near_s = expert_cost(ndp, Work(header.hidden, neurons, 1)).total_s
        message_s, rows = 2 * load_s(_ROW_ITEM * header.hidden, ndp.link), ndp.array_rows
    copy_s, gpu_s, row_s, near_s, message_s, dense_s = (
        max(one, 1e-9) for one in (copy_s, gpu_s, machine.expert_row_s, near_s, message_s, machine.dense(1))
    )
    return Costs(copy_s, gpu_s, row_s, near_s, near_s / machine.ndp_share, float(rows), message_s, dense_s)


def merged(lead: LayerStats, others: Sequence[LayerStats]) -> LayerStats:
    """A layer's counters over all GPUs; passes, paths and answers are the lead's.

    `shard_experts` is 0: an expert is a hit or a miss of the GPU that owns it.
    """
    own = ("forwards", "waves", "io_path_s", "link_path_s")
    values = {
        name: found + (0 if name in own else sum(getattr(other, name) for other in others))
        for name, found in asdict(lead).items()
    }
    return LayerStats(**values | {"shard_experts": 0})


class MatcherLag(PrefetchPolicy):
    """Forecasts of the matcher that come a time after their layer was published.

    A command is taken when a later layer's routing is known, as on the lead (`peers.matcher`); its keys of that layer
    and of earlier ones are late, and dropped. Probabilities for eviction come without the delay.
    """

    needs_ids, needs_probabilities, needs_embeddings = False, True, True

    def __init__(self, policy: PrefetchPolicy, clock: Clock, lag_s: float, experts: int) -> None:
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
        best = ranked(come)
        return WantedKeys([[want.key for want in best]], [want.priority for want in best])

    def end(self, sequence: str) -> None:
        self._policy.end(sequence)
