"""Counters of the expert engine, one typed record that CLI, benchmarks and metrics read; and a timeline for Chrome."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from ...proto.messages import ExpertResult

PeerKind = Literal["ndp", "shard"]


@dataclass
class LayerStats:
    """What one MoE layer did since the counters were reset.

    A hit is an expert that a forward needed and found resident when the routing became known; one that arrived
    later is a miss, even if the compute did not have to wait for it. Counted per forward and expert, not per token;
    what an NDP worker or another shard computes is neither.
    Under a cut an expert is a hit where all of it was resident, and one that is to run in low precision where its
    replica was. Bytes are slot bytes (the slot's dtype) on every
    executor, whatever the link carried.
    """

    hits: int = 0
    misses: int = 0
    prefetched_hits: int = 0  # hits whose bytes a prefetch brought, first use only
    top_hits: int = 0  # misses whose top was resident, under a cut: only the bottom was loaded
    low_bit_hits: int = 0  # of the hits those that ran on a resident low-bit replica
    low_bit_misses: int = 0  # of the misses those that ran on one that was loaded
    low_bit_pairs: int = 0  # (token, expert) pairs that ran on one
    late_prefetches: int = 0  # misses whose prefetch was still on its way
    bytes_loaded_demand: int = 0
    bytes_loaded_prefetch: int = 0
    bytes_loaded_migration: int = 0  # brought in once after a sequence's prefill, by its placement
    bytes_loaded_low_bit: int = 0  # of all these bytes those of low-bit replicas, which are fewer for an expert
    bytes_demanded_decode: int = 0  # asked for by forwards that held no row of any prompt
    failed_prefetches: int = 0  # prefetch copies that raised; demand loads those experts again
    bytes_wasted: int = 0  # loaded by prefetch, evicted without one use
    vacated: int = 0  # experts that pre-eviction sent away before this layer
    bytes_premature: int = 0  # demanded again though pre-eviction had sent them away since their layer last ran
    bytes_written_back: int = 0  # copied back to the host before their slots were used again
    blocked_io_s: float = 0.0  # seconds the compute waited for a copy
    total_io_s: float = 0.0  # seconds the link was busy
    link_s: float = 0.0  # the same by the link's own clock: on the stand-in without waits for a core
    forwards: int = 0
    waves: int = 0  # passes over a layer's experts; equals forwards when the working set fits
    ndp_calls: int = 0
    ndp_experts: int = 0  # experts computed by NDP workers, per forward
    ndp_tokens: int = 0  # (token, expert) pairs that they computed
    ndp_wait_s: float = 0.0  # seconds the compute waited for their answers
    ndp_measured_s: float = 0.0  # seconds their kernels took, summed over workers
    ndp_modelled_s: float = 0.0  # seconds the modelled devices would have taken, summed alike
    ndp_recomputed: int = 0  # pairs recomputed here because a worker was lost or late
    shard_calls: int = 0
    shard_experts: int = 0  # experts computed by other shards, per forward
    shard_tokens: int = 0  # (token, expert) pairs that they computed
    shard_wait_s: float = 0.0  # seconds the lead waited for their answers, after its own part
    shard_recomputed: int = 0  # pairs recomputed by the lead because a shard was lost or late
    io_path_s: float = 0.0  # seconds of copies on the forward's way: of each forward the GPU that waited longest
    link_path_s: float = 0.0  # `link_s` on that way: of each forward the GPU with most of it for this layer

    def count_answer(
        self, kind: PeerKind, waited_s: float, experts: int, pairs: int, answer: ExpertResult | None
    ) -> None:
        """The compute waited for a peer, which answered or (None) did not."""
        if kind == "shard":
            self.shard_wait_s += waited_s
        else:
            self.ndp_wait_s += waited_s
        if answer is None:
            return
        if kind == "shard":
            self.shard_calls += 1
            self.shard_experts += experts
            self.shard_tokens += pairs
        else:
            self.ndp_calls += 1
            self.ndp_experts += experts
            self.ndp_tokens += pairs
            self.ndp_measured_s += answer.measured_s
            self.ndp_modelled_s += answer.modelled_s

    def count_recomputed(self, kind: PeerKind, pairs: int) -> None:
        """A peer's pairs were computed here instead."""
        if kind == "shard":
            self.shard_recomputed += pairs
        else:
            self.ndp_recomputed += pairs

    @property
    def bytes_loaded(self) -> int:
        return self.bytes_loaded_demand + self.bytes_loaded_prefetch + self.bytes_loaded_migration


@dataclass
class WorkerStats:
    """What one NDP worker computed since the counters were reset; the sum over workers is in the layers' counters."""

    calls: int = 0
    experts: int = 0  # per forward
    pairs: int = 0  # (token, expert)


@dataclass
class SourceStats:
    """What became of the experts that one prefetch source asked for, since the counters were reset.

    What is neither used nor gone yet is in `queued` only. Under a cut the segments of experts are counted.
    """

    queued: int = 0
    hits: int = 0  # used, and there when the routing became known
    late: int = 0  # used, and still on their way then
    wasted: int = 0  # evicted without one use
    cancelled: int = 0  # dropped before their copy began, or the copy failed


@dataclass(frozen=True)
class LayerResidency:
    """Where the experts of one MoE layer stand, by expert.

    states: 0 absent, 1 loading, 2 resident (`policies.residency.State`). uses: forwards that ran it on this device
    since the counters were reset.
    """

    states: tuple[int, ...]
    uses: tuple[int, ...]


@dataclass
class ConfiguratorStats:
    """What the cache configurator did since the counters were reset. Expected seconds are of a token, by its model."""

    configurations: int = 0  # times that it looked for a better cut
    reconfigurations: int = 0  # times that a better one was applied
    expected_before_s: float = 0.0  # what loading was expected to add, before the last of these
    expected_after_s: float = 0.0
    attention_s: float = 0.0  # T_att, T_moe, T_head and T_load, as measured last
    moe_s: float = 0.0
    head_s: float = 0.0
    load_s: float = 0.0
    record_s: float = 0.0  # seconds of forwards that went into recording
    configure_s: float = 0.0  # seconds of its own thread
    problem: str | None = None  # why it could not look for one, the last time


@dataclass
class EngineStats:
    """Counters of one engine, per MoE layer and in total."""

    layers: list[LayerStats] = field(default_factory=list)
    expert_budget_bytes: int = 0
    expert_bytes_peak: int = 0  # the pool's one allocation, made before the first load: it never grows
    slots: int = 0
    low_bit_slots: int = 0  # further slots, for low-bit replicas
    experts: int = 0
    executor: str = "real"
    bytes_preloaded: int = 0  # loaded before the first request, in no layer's counters
    loads_in_flight: int = 0
    prefetch_resting: bool = False  # prefetch turned itself off because too little of it was used
    prefetch_sources: dict[str, SourceStats] = field(default_factory=dict)  # by name, such as "next-gate"
    matcher: dict[str, Any] | None = None  # `MatcherLink.report`; None where no matcher takes part
    configurator: ConfiguratorStats | None = None  # None where the cut is fixed
    migrations: int = 0  # sequences whose prefill decided a placement
    ndp_workers: dict[str, WorkerStats] = field(default_factory=dict)  # by name, such as "ndp/0"
    ndp_losses: int = 0  # times that an NDP worker was lost
    ndp_refusals: int = 0  # calls that one refused; computed here
    ndp_last_failure: str | None = None  # why one was lost or refused, the last time
    shard_losses: int = 0  # times that another shard was lost
    shard_refusals: int = 0  # calls that one refused or failed; computed here
    shard_last_failure: str | None = None
    substitutions: int = 0  # (token, expert) pairs that ran on another expert than the model picked
    dropped: int = 0  # pairs that did not run

    def total(self) -> LayerStats:
        """The sum over layers."""
        out = LayerStats()
        for layer in self.layers:
            for name, value in asdict(layer).items():
                setattr(out, name, getattr(out, name) + value)
        return out

    def source(self, name: str) -> SourceStats:
        """The counters of one prefetch source."""
        if name not in self.prefetch_sources:
            self.prefetch_sources = self.prefetch_sources | {name: SourceStats()}  # a new one: others may read the old
        return self.prefetch_sources[name]

    def count_worker(self, name: str, experts: int, pairs: int) -> None:
        """An NDP worker answered."""
        if name not in self.ndp_workers:
            self.ndp_workers = self.ndp_workers | {name: WorkerStats()}  # a new one: others may be reading the old
        found = self.ndp_workers[name]
        found.calls += 1
        found.experts += experts
        found.pairs += pairs

    def count_loss(self, kind: PeerKind, why: str) -> None:
        """A peer was lost."""
        if kind == "shard":
            self.shard_losses, self.shard_last_failure = self.shard_losses + 1, why
        else:
            self.ndp_losses, self.ndp_last_failure = self.ndp_losses + 1, why

    def count_refusal(self, kind: PeerKind, why: str) -> None:
        """A peer is there and did not compute one call."""
        if kind == "shard":
            self.shard_refusals, self.shard_last_failure = self.shard_refusals + 1, why
        else:
            self.ndp_refusals, self.ndp_last_failure = self.ndp_refusals + 1, why

    @property
    def hit_rate(self) -> float:
        """Hits over hits and misses; 1.0 where nothing was asked for."""
        total = self.total()
        asked = total.hits + total.misses
        return total.hits / asked if asked else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Flat totals for JSON, with the per-layer counters beside them."""
        total = self.total()
        flat = asdict(total) | {"bytes_loaded": total.bytes_loaded, "hit_rate": self.hit_rate}
        own = {k: v for k, v in asdict(self).items() if k != "layers"}
        return flat | own | {"layers": [asdict(x) for x in self.layers]}


TRACKS = {"compute": 1, "wait": 2, "copy": 3, "prefetch": 4, "ndp": 5}


class Timeline:
    """Spans in `time.perf_counter` seconds; recording is a tuple append.

    Callers ask `enabled` before they build a span's name, so that off it costs one test.
    At most `limit` spans are kept; later ones are counted in `dropped`.
    """

    def __init__(self, enabled: bool, limit: int = 1_000_000) -> None:
        self.enabled = enabled
        self.dropped = 0
        self._limit = limit
        self._spans: list[tuple[str, str, float, float]] = []

    def span(self, track: str, name: str, start_s: float, end_s: float) -> None:
        if not self.enabled:
            return
        if len(self._spans) >= self._limit:
            self.dropped += 1
            return
        self._spans.append((track, name, start_s, end_s))

    def clear(self) -> None:
        self._spans.clear()
        self.dropped = 0

    def events(self) -> list[dict[str, Any]]:
        """Chrome trace events: microseconds from the first span, one thread row per track."""
        spans = list(self._spans)
        origin_s = min((s[2] for s in spans), default=0.0)
        rows: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": track}}
            for track, tid in TRACKS.items()
        ]
        if self.dropped:
            rows.append({"ph": "M", "name": "dropped_spans", "pid": 1, "tid": 0, "args": {"count": self.dropped}})
        rows += [
            {
                "ph": "X",
                "pid": 1,
                "tid": TRACKS[track],
                "name": name,
                "ts": (start_s - origin_s) * 1e6,
                "dur": (end_s - start_s) * 1e6,
            }
            for track, name, start_s, end_s in spans
        ]
        return rows
