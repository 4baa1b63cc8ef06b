"""Counters of the expert engine, which CLI, benchmarks and metrics read; and a timeline for Chrome."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from ..policies.drafts import DraftStats
from ..policies.prefetch_trials import TrialResult

if TYPE_CHECKING:
    from ...proto.messages import ExpertResult

PeerKind = Literal["ndp", "shard"]
_NEEDED = ("hits", "misses", "ndp_experts", "shard_experts")
_COUNTED = (
    "migrations", "ndp_losses", "ndp_refusals", "shard_losses", "shard_refusals", "substitutions", "dropped",
    "decode_hits", "decode_misses", "decode_ndp_experts", "decode_shard_experts", "decode_blocked_io_s",
)  # fmt: skip
_HOST_COUNTED = ("hits", "misses", "bytes_demand", "bytes_prefetch", "bytes_wasted", "waited_s")  # of `HostMemoryStats`


@dataclass(slots=True)
class LayerStats:
    """Counters of one MoE layer since the last reset.

    A hit is a needed expert that was resident when the routing became known; a later arrival is a miss, even if the
    compute did not wait. Counted per forward and expert; experts that NDP workers and other shards computed are neither
    and have counters of their own (`needed_shares` has them all). A split expert is a hit if all of it was resident, an
    expert in low precision if its replica was. Bytes are slot bytes on every executor.
    """

    hits: int = 0
    misses: int = 0
    prefetched_hits: int = 0  # hits whose bytes a prefetch brought, first use only
    top_hits: int = 0  # misses of split experts whose top was resident: only the bottom was loaded
    low_bit_hits: int = 0  # hits that ran on a resident low-bit replica
    low_bit_misses: int = 0  # misses that loaded a low-bit replica
    low_bit_pairs: int = 0  # (token, expert) pairs that ran on a low-bit replica
    late_prefetches: int = 0  # misses whose prefetch had not arrived
    bytes_loaded_demand: int = 0
    bytes_loaded_prefetch: int = 0
    bytes_loaded_migration: int = 0  # loaded once after a sequence's prefill, by its placement
    bytes_loaded_low_bit: int = 0  # part of all loaded bytes: low-bit replicas
    bytes_demanded_decode: int = 0  # demanded by forwards without rows of a prompt
    failed_prefetches: int = 0  # prefetch copies that raised; demand loads those experts again
    bytes_wasted: int = 0  # loaded by prefetch, evicted without one use
    vacated: int = 0  # experts that pre-eviction evicted before this layer
    bytes_premature: int = 0  # demanded again after a pre-eviction since their layer last ran
    bytes_written_back: int = 0  # copied back to the host before their slots were reused
    blocked_io_s: float = 0.0  # seconds the compute waited for a copy
    writebacks: int = 0  # experts copied back
    writeback_link_s: float = 0.0  # part of `link_s`: copies back
    writeback_blocked_s: float = 0.0  # part of `blocked_io_s`: the awaited copy's slot was being copied back
    total_io_s: float = 0.0  # seconds the link was busy
    link_s: float = 0.0  # the same by the link's own clock: on the CPU without waits for a core
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
    io_path_s: float = 0.0  # waits for copies, of the GPU that waited longest in each forward
    link_path_s: float = 0.0  # `link_s` of the GPU with the most in each forward

    def count_answer(
        self, kind: PeerKind, waited_s: float, experts: int, pairs: int, answer: ExpertResult | None
    ) -> None:
        """The compute waited for a peer. answer: None: the peer did not answer."""
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


_OF_LAYER = attrgetter(*(field.name for field in fields(LayerStats)))


@dataclass
class WorkerStats:
    """One NDP worker's work since the last reset; the sum over workers is in the layers' counters."""

    calls: int = 0
    experts: int = 0  # per forward
    pairs: int = 0  # (token, expert)


@dataclass
class SourceStats:
    """Experts (segments of split experts) that one prefetch source queued since the last reset, by outcome."""

    queued: int = 0
    hits: int = 0  # used, and resident when the routing became known
    late: int = 0  # used, and still loading then
    wasted: int = 0  # evicted without one use
    cancelled: int = 0  # dropped before their copy began, or the copy failed


@dataclass(frozen=True)
class LayerResidency:
    """The residency of one MoE layer, by expert."""

    states: tuple[int, ...]  # 0 absent, 1 loading, 2 resident (`policies.residency.State`)
    uses: tuple[int, ...]  # forwards that needed the expert since the last reset, wherever it ran


@dataclass
class ConfiguratorStats:
    """Counters of the cache configurator since the last reset."""

    configurations: int = 0  # searches for a better split
    reconfigurations: int = 0  # better splits applied
    expected_before_s: float = 0.0  # a token's expected wait for loads before the last reconfiguration
    expected_after_s: float = 0.0
    attention_s: float = 0.0  # T_att, T_moe, T_head and T_load, as measured last
    moe_s: float = 0.0
    head_s: float = 0.0
    load_s: float = 0.0
    record_s: float = 0.0  # recording time on the forward's thread
    configure_s: float = 0.0  # time of the configurator's thread
    problem: str | None = None  # why the last search failed


@dataclass(frozen=True)
class PlannerStats:
    """What the planner of `auto` has learned since the start.

    Attributes:
        error: mean difference of predicted and measured time of a layer, as a share of the time.
        copy_s, near_s, near_busy_s: seconds of a copy of one expert, and of one expert near data while the link is idle
            and while it copies. message_s: of a message to an NDP worker and back.
        planned, local: forwards whose layers it decided, and those that native code ran, which loads every miss.
        planned_s, local_s: mean seconds of a decode forward of each kind, of as many rows as the last one; None: none.
        follows: the rule by which decodes are planned, `policies.auto.FOLLOWED`. token_s: mean seconds of a token's
            planned layers, of late: as seen, and as the other rules would have taken. None: it knows no others.
    """

    error: float
    copy_s: float
    near_s: float
    near_busy_s: float
    message_s: float
    planned: int = 0
    local: int = 0
    planned_s: float | None = None
    local_s: float | None = None
    follows: str | None = None
    token_s: dict[str, float] | None = None


@dataclass(frozen=True)
class SharedMemoryStats:
    """How expert slots and KV cache share one memory now, and how often it moved since the start.

    Attributes:
        kv_tokens, kv_tokens_most: of the KV cache, now and at most. slots_least, slots_most: bounds of the slots.
        to_kv, to_experts: times that slots gave memory to the KV cache, and that it gave some back.
    """

    kv_tokens: int
    kv_tokens_most: int
    slots_least: int
    slots_most: int
    to_kv: int = 0
    to_experts: int = 0


@dataclass(frozen=True)
class HostMemoryStats:
    """Host memory that holds a part of the store, and the disk that it is read from.

    Counted since the last reset; where a device's slots are loaded from it, since the start.

    Attributes:
        slots: experts that it holds. budget_bytes: of them.
        hits, misses: experts that were there when the forward, or a device's slot, needed them, and that were not.
        bytes_demand, bytes_prefetch: of experts that were read. bytes_wasted: prefetched, and never needed.
        waited_s: seconds for which the forward, or a device's link, waited for the disk.
        gbps: 1e9 bytes per second, measured at the start.
        read_bytes: of files, since the start, with what lies beside experts on their pages. longest_s: of one piece.
    """

    slots: int
    budget_bytes: int
    hits: int
    misses: int
    bytes_demand: int
    bytes_prefetch: int
    bytes_wasted: int
    waited_s: float
    gbps: float
    read_bytes: int
    longest_s: float


@dataclass
class EngineStats:
    """Counters of one engine, per MoE layer and in total."""

    layers: list[LayerStats] = field(default_factory=list)
    expert_budget_bytes: int = 0
    expert_bytes_peak: int = 0  # the most that the pool had
    slots: int = 0  # now
    low_bit_slots: int = 0  # further slots, for low-bit replicas
    experts: int = 0
    executor: str = "real"
    bytes_preloaded: int = 0  # loaded before the first request, in no layer's counters
    loads_in_flight: int = 0
    prefetch_resting: bool = False  # the governor turned prefetch off: too little was used
    prefetch_sources: dict[str, SourceStats] = field(default_factory=dict)  # by name, such as "next-gate"
    prefetch_trials: TrialResult | None = None  # since the start; None: prefetch is not adaptive
    matcher: dict[str, Any] | None = None  # `MatcherLink.report`; None: no matcher
    configurator: ConfiguratorStats | None = None  # None: the split is fixed
    shared: SharedMemoryStats | None = None  # None: the KV cache has memory of its own
    host_memory: HostMemoryStats | None = None  # None: the store is mapped, as a whole
    planner: PlannerStats | None = None  # None: another placement than auto
    drafts: DraftStats | None = None  # None: no request is drafted
    migrations: int = 0  # sequences whose prefill decided a placement
    ndp_workers: dict[str, WorkerStats] = field(default_factory=dict)  # by name, such as "ndp/0"
    ndp_losses: int = 0  # connections lost
    ndp_refusals: int = 0  # refused calls, computed here
    ndp_last_failure: str | None = None  # reason of the last loss or refusal
    shard_losses: int = 0
    shard_refusals: int = 0
    shard_last_failure: str | None = None
    substitutions: int = 0  # (token, expert) pairs that ran on a substitute
    dropped: int = 0  # pairs that did not run
    decode_hits: int = 0  # part of all hits and misses: of forwards without rows of a prompt
    decode_misses: int = 0
    decode_ndp_experts: int = 0  # part of all experts that NDP workers and other shards computed, alike
    decode_shard_experts: int = 0
    decode_blocked_io_s: float = 0.0  # of the same forwards
    policy_s: dict[str, float] = field(default_factory=dict)  # in hooks of policies from outside, by kind

    def total(self) -> LayerStats:
        """The sum over layers."""
        return LayerStats(*map(sum, zip(*map(_OF_LAYER, self.layers), strict=True)))

    def counters(self) -> dict[str, float]:
        """Totals that only rise between resets, as in `actors.sample.ProcessSample.counters`."""
        found = asdict(self.total()) | {name: getattr(self, name) for name in _COUNTED}
        if (host := self.host_memory) is not None:
            found |= {f"host_{name}": getattr(host, name) for name in _HOST_COUNTED}
        return found

    def reset(self) -> None:
        """Zero what counts requests; sizes, losses and trials stay."""
        self.layers[:] = [LayerStats() for _ in self.layers]
        self.migrations = self.substitutions = self.dropped = 0
        self.decode_hits = self.decode_misses = self.decode_ndp_experts = self.decode_shard_experts = 0
        self.decode_blocked_io_s = 0.0
        self.ndp_workers, self.prefetch_sources = {}, {}
        if self.configurator is not None:
            self.configurator = ConfiguratorStats()
        if self.drafts is not None:
            self.drafts.reset()

    def source(self, name: str) -> SourceStats:
        """The counters of one prefetch source."""
        if name not in self.prefetch_sources:
            self.prefetch_sources = self.prefetch_sources | {name: SourceStats()}  # a new dict: others read the old
        return self.prefetch_sources[name]

    def count_worker(self, name: str, experts: int, pairs: int) -> None:
        """An NDP worker answered."""
        if name not in self.ndp_workers:
            self.ndp_workers = self.ndp_workers | {name: WorkerStats()}  # a new dict: others read the old
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
        """A peer refused one call."""
        if kind == "shard":
            self.shard_refusals, self.shard_last_failure = self.shard_refusals + 1, why
        else:
            self.ndp_refusals, self.ndp_last_failure = self.ndp_refusals + 1, why

    def count_answer(
        self, layer: int, kind: PeerKind, waited_s: float, experts: int, pairs: int, answer: ExpertResult | None,
        decode: bool,
    ) -> None:  # fmt: skip
        """As `LayerStats.count_answer`. decode: the forward has no rows of a prompt."""
        self.layers[layer].count_answer(kind, waited_s, experts, pairs, answer)
        if answer is None or not decode:
            return
        if kind == "shard":
            self.decode_shard_experts += experts
        else:
            self.decode_ndp_experts += experts

    @property
    def hit_rate(self) -> float | None:
        """`needed_shares` of hits; None: nothing was needed yet."""
        return hit_rate(asdict(self.total()))

    @property
    def decode_hit_rate(self) -> float | None:
        """Of forwards without rows of a prompt; None: they needed nothing."""
        return hit_rate(self._decode)

    @property
    def prefill_hit_rate(self) -> float | None:
        """Of forwards with rows of a prompt; None: they needed nothing."""
        total = asdict(self.total())
        return hit_rate({name: total[name] - count for name, count in self._decode.items()})

    @property
    def _decode(self) -> dict[str, int]:
        return {
            "hits": self.decode_hits, "misses": self.decode_misses, "ndp_experts": self.decode_ndp_experts,
            "shard_experts": self.decode_shard_experts,
        }  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Flat totals for JSON, with the per-layer counters beside them."""
        total = self.total()
        flat = asdict(total) | {"bytes_loaded": total.bytes_loaded}
        flat |= {"hit_rate": hit_rate(flat), "needed_shares": needed_shares(flat)}
        own = {k: v for k, v in asdict(self).items() if k != "layers"}
        return flat | own | {"layers": [asdict(x) for x in self.layers]}


def needed_shares(counters: Mapping[str, float]) -> dict[str, float] | None:
    """What became of the needed experts: shares of all of them, which sum to 1; None: nothing was needed yet.

    Every hit rate of this project is `hit` of these, over the same whole.

    hit: ran from a slot that held it when the routing became known, without waiting for a copy. waited: its prefetch
    was under way. loaded: on demand. near_data: an NDP worker computed it. other_gpu: another shard did; counters that
    are the sum over all GPUs have it among that GPU's own.

    Args:
        counters: of `LayerStats` by name; those that are missing are 0.
    """
    ways = needed(counters)
    return {way: count / total for way, count in ways.items()} if (total := sum(ways.values())) else None


def needed(counters: Mapping[str, float]) -> dict[str, float]:
    """The counts whose shares `needed_shares` gives; each only rises."""
    hits, misses, near, other = (counters.get(name) or 0 for name in _NEEDED)
    waited = min(misses, counters.get("late_prefetches") or 0)
    return {"hit": hits, "waited": waited, "loaded": misses - waited, "near_data": near, "other_gpu": other}


def hit_rate(counters: Mapping[str, float]) -> float | None:
    """`needed_shares` of hits; None: nothing was needed yet."""
    shares = needed_shares(counters)
    return None if shares is None else shares["hit"]


def count_needed(counters: Mapping[str, float]) -> float:
    """Needed experts, per forward: the whole of `needed_shares`."""
    return sum(counters.get(name) or 0 for name in _NEEDED)


TRACKS = {"compute": 1, "wait": 2, "copy": 3, "prefetch": 4, "token": 5, "forward": 6, "matcher": 7}  # and peers
_ORDER = ("token", "forward", "compute", "wait", "copy", "prefetch", "matcher")  # in which a viewer shows them


class Timeline:
    """Spans in `time.perf_counter` seconds; recording is a tuple append.

    Tracks: `token`, from one forward's begin to the next; `forward`, to the end of its last MoE layer; `compute`;
    `wait`; `copy` and `prefetch`, with bytes and cause; `matcher`; and one for each peer, such as `ndp/0`.
    Callers test `enabled` before they build a span's name. At most `limit` spans are stored; `dropped` counts the rest.
    """

    def __init__(self, enabled: bool, limit: int = 1_000_000) -> None:
        self.enabled = enabled
        self.dropped = 0
        self._limit = limit
        self._spans: list[tuple[str, str, float, float, dict[str, Any] | None]] = []
        self._open: dict[str, tuple[str, float, dict[str, Any]]] = {}  # by track

    def span(self, track: str, name: str, start_s: float, end_s: float, args: dict[str, Any] | None = None) -> None:
        """Record one. args: what a viewer shows beside it."""
        if not self.enabled:
            return
        if len(self._spans) >= self._limit:
            self.dropped += 1
            return
        self._spans.append((track, name, start_s, end_s, args))

    def begin(self, track: str, name: str, args: dict[str, Any]) -> None:
        """A span begins now, and ends the one that is open on its track."""
        self.end(track)
        self._open[track] = (name, time.perf_counter(), args)

    def end(self, track: str) -> None:
        """The open span of a track ends now, if there is one."""
        if (found := self._open.pop(track, None)) is not None:
            name, start_s, args = found
            self.span(track, name, start_s, time.perf_counter(), args)

    def clear(self) -> None:
        self._spans.clear()
        self._open.clear()
        self.dropped = 0

    def events(self) -> list[dict[str, Any]]:
        """Chrome trace events: microseconds from the first span, one thread row per track."""
        spans = list(self._spans)
        origin_s = min((s[2] for s in spans), default=0.0)
        tids = dict(TRACKS)
        for peer in sorted({s[0] for s in spans} - set(tids)):
            tids[peer] = len(tids) + 1
        shown = [*_ORDER, *(track for track in tids if track not in _ORDER)]
        rows: list[dict[str, Any]] = []
        for place, track in enumerate(shown):
            head = {"ph": "M", "pid": 1, "tid": tids[track]}
            rows.append(head | {"name": "thread_name", "args": {"name": track}})
            rows.append(head | {"name": "thread_sort_index", "args": {"sort_index": place}})
        if self.dropped:
            rows.append({"ph": "M", "name": "dropped_spans", "pid": 1, "tid": 0, "args": {"count": self.dropped}})
        for track, name, start_s, end_s, args in spans:
            row = {"ph": "X", "pid": 1, "tid": tids[track], "name": name}
            times = {"ts": (start_s - origin_s) * 1e6, "dur": (end_s - start_s) * 1e6}
            rows.append(row | times | ({"args": args} if args else {}))
        return rows
