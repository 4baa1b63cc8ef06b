"""Prometheus metrics of the server and the runtime's counters, all with the prefix `tiermoe_`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...actors.engine.stats import needed
from ...actors.requests import TokenEvent
from ...errors import RuntimeFailure
from ..attach import Sample
from .backend import SAMPLES
from .records import ChoiceTimes, RequestRecord

Ask = Callable[[str], Awaitable[Any]]

_FIRST_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0)
_BETWEEN_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.0, 5.0)
_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_TOTAL_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)

# name -> (help, counter of the engine)
_EXPERTS = {
    "expert_hits": ("Experts that a forward needed and found resident.", "hits"),
    "expert_misses": ("Experts that a forward needed and did not find resident.", "misses"),
    "expert_late_prefetches": ("Part of the misses: the prefetch was under way.", "late_prefetches"),
    "expert_near_data": ("Experts that a forward needed and NDP workers computed.", "ndp_experts"),
    "expert_other_gpu": ("Experts that a forward needed and a GPU computed that does not answer.", "shard_experts"),
    "expert_bytes_wasted": ("Bytes that a prefetch loaded and no layer used.", "bytes_wasted"),
    "blocked_io_seconds": ("Seconds that the compute waited for copies.", "blocked_io_s"),
    "ndp_tokens": ("(token, expert) pairs that NDP workers computed.", "ndp_tokens"),
    "substitutions": ("Experts that another one stood in for.", "substitutions"),
}
_LOAD = {  # as `_EXPERTS`, of the present load
    "num_requests_running": ("Requests in forwards.", "running"),
    "num_requests_waiting": ("Requests before their first forward.", "waiting"),
    "kv_cache_usage_ratio": ("Share of the KV cache in use.", "kv_usage"),
    "expert_slots_used": ("Slots of the lead's expert cache in use.", "slots_used"),
    "expert_pins": ("Experts' pins by the forward that runs, on the lead.", "pins"),
}
_HOST = {  # as `_EXPERTS`, of host memory that holds a part of the store
    "host_memory_hits": ("Experts that were needed and found in host memory.", "hits"),
    "host_memory_misses": ("Experts that were needed and read from the disk.", "misses"),
    "disk_bytes_wasted": ("Bytes that were read ahead from the disk and not needed.", "bytes_wasted"),
    "disk_wait_seconds": ("Seconds that the compute, or a device's link, waited for the disk.", "waited_s"),
}
_DRAFTS = {  # as `_EXPERTS`, of drafts
    "draft_steps": ("Steps that verified drafted tokens.", "steps"),
    "draft_tokens": ("Drafted tokens that were verified.", "drafted"),
    "draft_accepted_tokens": ("Drafted tokens that were accepted.", "accepted"),
    "draft_extra_experts": ("Experts that steps with drafts needed beyond steps without.", "extra_experts"),
}
# As `_EXPERTS`, of each process: {node, worker, kind}. What Ray's dashboard has of it (memory, CPU, state) is not here.
_OF_WORKERS = {
    "expert_bytes_wasted": ("Bytes that a prefetch loaded to this GPU and no layer used.", "bytes_wasted"),
    "link_busy_seconds": ("Seconds that this GPU's link copied.", "total_io_s"),
    "blocked_io_seconds": ("Seconds that this GPU's compute waited for copies.", "blocked_io_s"),
    "host_memory_hits": ("Experts that this process needed and found in host memory.", "host_hits"),
    "host_memory_misses": ("Experts that this process needed and read from the disk.", "host_misses"),
    "disk_bytes_wasted": ("Bytes that this process read ahead from the disk and did not need.", "host_bytes_wasted"),
    "disk_wait_seconds": ("Seconds that this process, or its GPU's link, waited for the disk.", "host_waited_s"),
    "steps": ("Forwards of the lead.", "steps"),
    "step_seconds": ("Seconds of the lead's forwards; waits for copies and peers are among them.", "step_s"),
    "rows": ("Hidden states of a layer that came to this shard or NDP worker.", "rows"),
    "expert_tokens": ("(token, expert) pairs that this shard or NDP worker computed.", "pairs"),
    "busy_seconds": ("Seconds that this shard or NDP worker computed.", "busy_s"),
    "answering_seconds": ("Seconds from a message to its answer.", "answering_s"),
    "messages_received": ("Messages that came over the channels that others opened.", "messages_received"),
    "bytes_received": ("Bytes of those messages.", "bytes_received"),
    "bytes_sent": ("Bytes of the answers.", "bytes_sent"),
    "store_experts": ("Experts that this store gave to other nodes.", "experts_sent"),
    "store_bytes": ("Bytes of those experts.", "expert_bytes_sent"),
    "search_seconds": ("Seconds that the matcher searched.", "search_s"),
    "update_seconds": ("Seconds that the matcher stored maps.", "update_s"),
}
# the same of each peer that a process calls: {node, worker, kind, peer}
_OF_PEERS = {
    "rows_sent": ("Hidden states of a layer that went to the peer.", "rows_sent"),
    "rows_received": ("Sums for such rows that came back.", "rows_received"),
    "messages_sent": ("Messages to the peer.", "messages_sent"),
    "bytes_sent": ("Bytes of those messages.", "bytes_sent"),
    "bytes_received": ("Bytes that came back; of a store those of the experts.", "bytes_received"),
    "wait_seconds": ("Seconds that this process waited for the peer's answers.", "waited_s"),
}
_PLACES = {  # of `needed_shares`, by the label `place`
    "hit": "slot", "waited": "waited", "loaded": "loaded", "near_data": "near_data", "other_gpu": "other_gpu",
}  # fmt: skip
_CAUSES = ("demand", "prefetch", "migration")
_READ_CAUSES = ("demand", "prefetch")
_EVERY_S = 1.0  # for which the runtime's answer is good, however often the server is scraped
_LINK = "total_io_s"

disable_created_metrics()  # a second series for each metric, which has no use here


class Metrics:
    """Counters and histograms of one server process, and the runtime's counters at the last query.

    Choices are counted one by one, as the runtime sees them: a request with n = 2 and three prompts is six.

    Args:
        ask: what a control method of the lead returns.
        sharded: whether other GPUs count as well.

    Attributes:
        runtime: the runtime's counters.
    """

    def __init__(self, ask: Ask, *, sharded: bool) -> None:
        self._ask, self._sharded = ask, sharded
        self._read_s: float | None = None
        self._lock = asyncio.Lock()
        self._registry = CollectorRegistry()
        self.runtime = RuntimeCounters()
        self._registry.register(self.runtime)

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"tiermoe_{name}", about, buckets=buckets, registry=self._registry)

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(f"tiermoe_{name}", about, labels, registry=self._registry)

        self.first = histogram("time_to_first_token_seconds", "From arrival to the first token.", _FIRST_S)
        self.between = histogram("inter_token_latency_seconds", "Between tokens of a request.", _BETWEEN_S)
        self.total = histogram("e2e_request_latency_seconds", "From arrival to the end of a request.", _TOTAL_S)
        self.queue = histogram("request_queue_time_seconds", "From arrival to its first forward.", _FIRST_S)
        self.prefill = histogram("request_prefill_time_seconds", "From first forward to first token.", _FIRST_S)
        self.decode = histogram("request_decode_time_seconds", "From first token to last token.", _TOTAL_S)
        about = "A request's mean seconds between tokens."
        self.pace = histogram("request_time_per_output_token_seconds", about, _BETWEEN_S)
        self.prompts = histogram("request_prompt_tokens", "Prompt tokens of a request.", _COUNTS)
        self.answers = histogram("request_generation_tokens", "Tokens generated for a request.", _COUNTS)
        self.prompt = counter("prompt_tokens", "Prompt tokens processed.")
        self.queried = counter("prefix_cache_queries", "Prompt tokens of requests that began.")
        self.cached = counter("prefix_cache_hits", "Prompt tokens that the KV cache had of earlier requests.")
        self.generated = counter("generation_tokens", "Tokens generated.")
        about = "Requests that ended: stop, length, abort (the client left) or error."
        self.ended = counter("request_success", about, "finished_reason")
        about = "Parameters of requests that were accepted without effect."
        self._ignored = counter("ignored_parameters", about, "name")
        about = "HTTP requests that were refused or failed, also at the end of a stream."
        self._refused = counter("requests_refused", about, "reason")
        self._dropped = counter("request_log_dropped", "Lines of the request log that were not written.")
        self._key_files = counter("key_file_refused", "Times that the key file had changed and was refused.")

    def count_ignored(self, names: Iterable[str]) -> None:
        """A request had these parameters, and they had no effect."""
        for name in names:
            self._ignored.labels(name=name).inc()

    def choice(self, prompt_tokens: int) -> ChoiceTimer:
        """The timer of a choice that is submitted now."""
        return ChoiceTimer(self, time.perf_counter(), prompt_tokens)

    def request(self, record: RequestRecord) -> None:
        """A request has ended: a sink of records."""
        if record.reason is not None:
            self._refused.labels(reason=record.reason).inc()

    def line_dropped(self) -> None:
        """A line of the request log found no room, or could not be written."""
        self._dropped.inc()

    def key_file_refused(self) -> None:
        """The key file has changed and is refused."""
        self._key_files.inc()

    def page(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)

    async def refresh(self, waiting_here: int) -> None:
        """Bring the runtime's counters up to date.

        Raises:
            RuntimeFailure: the runtime does not answer; the counters stay as they were.
        """
        self.runtime.waiting_here = waiting_here
        async with self._lock:
            if self._read_s is not None and time.monotonic() - self._read_s < _EVERY_S:
                return
            stats, load = (await self._ask("stats")).as_dict(), await self._ask("load")
            links = {"shard/0": stats.get(_LINK, 0.0)}
            if self._sharded:  # the lead's are among them
                parts = await self._ask("shard_stats")
                links = {}
                for part in (part for part in parts if _LINK in part):  # those of replica groups have the same names
                    links[str(part["shard"])] = links.get(str(part["shard"]), 0.0) + part[_LINK]
                for key in {key for _, key in _EXPERTS.values()} | {f"bytes_loaded_{cause}" for cause in _CAUSES}:
                    if any(key in part for part in parts):
                        stats[key] = sum(part.get(key, 0) for part in parts)
                if any("hits" in part for part in parts):  # of the GPU that owns it, each is a hit or a miss
                    stats["shard_experts"] = 0
            self.runtime.stats, self.runtime.load, self.runtime.links = stats, load, links
            with contextlib.suppress(RuntimeFailure):  # Ray's head node is away, and the leads serve on
                self.runtime.samples = await self._ask(SAMPLES)
            self._read_s = time.monotonic()


class ChoiceTimer(ChoiceTimes):
    """The times of one choice, which it counts."""

    def __init__(self, metrics: Metrics, submitted_s: float, prompt_tokens: int) -> None:
        super().__init__(prompt_tokens, submitted_s)
        self._metrics = metrics

    def event_arrived(self, event: TokenEvent) -> None:
        """An event has come."""
        now_s, before_s = time.perf_counter(), self.last_s
        self.event(event, now_s)
        if tokens := len(event.token_ids):
            self._metrics.generated.inc(tokens)
            if before_s is None:
                self._metrics.first.observe(now_s - self.submitted_s)
                self._metrics.prompt.inc(self.prompt_tokens)
                self._metrics.queried.inc(self.prompt_tokens)
                self._metrics.cached.inc(event.cached_tokens)
            else:  # they arrived together: each gets its share
                for _ in range(tokens):
                    self._metrics.between.observe((now_s - before_s) / tokens)

    def ended(self) -> None:
        """The choice is over, for `finish`."""
        self.ended_s = time.perf_counter()
        self._metrics.total.observe(self.ended_s - self.submitted_s)
        self._metrics.queue.observe(self.waited_s)
        self._metrics.prompts.observe(self.prompt_tokens)
        self._metrics.answers.observe(self.tokens)
        if self.ttft_s is not None and self.first_s is not None and self.last_s is not None:
            self._metrics.prefill.observe(max(0.0, self.ttft_s - self.waited_s))
            self._metrics.decode.observe(self.last_s - self.first_s)
        if self.tpot_s is not None:
            self._metrics.pace.observe(self.tpot_s)
        self._metrics.ended.labels(finished_reason=self.finish or "abort").inc()


class RuntimeCounters(Collector):
    """What the runtime counts."""

    def __init__(self) -> None:
        self.stats: dict[str, Any] | None = None
        self.load: dict[str, float] | None = None
        self.links: dict[str, float] = {}  # seconds that each GPU's link was busy
        self.samples: list[Sample] = []
        self.waiting_here = 0
        self.damaged = 0

    def collect(self) -> Iterable[Metric]:
        about = "Leads that stopped serving because a file that they serve from changed or cannot be read."
        yield GaugeMetricFamily("tiermoe_store_damaged", about, self.damaged)
        if self.load is not None:
            load = self.load | {"waiting": self.load["waiting"] + self.waiting_here}
            for name, (about, key) in _LOAD.items():
                yield GaugeMetricFamily(f"tiermoe_{name}", about, load[key])
        if self.samples:
            yield from _of_workers(self.samples)
        if (stats := self.stats) is None:
            return
        for name, (about, key) in _EXPERTS.items():
            yield CounterMetricFamily(f"tiermoe_{name}", about, stats.get(key, 0))
        about = "Slots of the lead's expert cache, in use or free."
        yield GaugeMetricFamily("tiermoe_expert_slots", about, stats.get("slots", 0))
        loaded = {cause: stats.get(f"bytes_loaded_{cause}", 0) for cause in _CAUSES}
        yield _counters("expert_bytes_loaded", "Expert bytes brought to the device.", "cause", loaded)
        yield _counters("link_busy_seconds", "Seconds that a GPU's link copied.", "gpu", self.links)
        if (trials := stats.get("prefetch_trials")) is not None:
            paused = float(not trials["pays"])
            yield GaugeMetricFamily("tiermoe_prefetch_paused", "1 while prefetch does not pay and is off.", paused)
            about = "Comparisons of decoding with and without prefetch."
            yield CounterMetricFamily("tiermoe_prefetch_trials", about, trials["trials"])
        if (shared := stats.get("shared")) is not None:
            about = "Tokens for which the KV cache has memory now; experts may have the rest."
            yield GaugeMetricFamily("tiermoe_kv_cache_tokens", about, shared["kv_tokens"])
            moves = {to: shared[f"to_{to}"] for to in ("kv", "experts")}
            yield _counters("memory_moves", "Times that slots and KV cache gave each other memory.", "to", moves)
        if (host := stats.get("host_memory")) is not None:
            for name, (about, key) in _HOST.items():
                yield CounterMetricFamily(f"tiermoe_{name}", about, host[key])
            read = {cause: host[f"bytes_{cause}"] for cause in _READ_CAUSES}
            yield _counters("disk_bytes_read", "Expert bytes read from the disk.", "cause", read)
        if (planner := stats.get("planner")) is not None:
            yield from _of_planner(planner)
        if (drafts := stats.get("drafts")) is not None:
            for name, (about, key) in _DRAFTS.items():
                yield CounterMetricFamily(f"tiermoe_{name}", about, drafts[key])
            about = "Seconds that drafts saved, as predicted without them; what they cost is negative."
            yield GaugeMetricFamily("tiermoe_draft_saved_seconds", about, drafts["saved_s"])


def _of_workers(samples: Sequence[Sample]) -> Iterable[Metric]:
    """Of each process by node, worker and kind; who has no answer has no counters at present."""
    labels = ["node", "worker", "kind"]
    up = GaugeMetricFamily("tiermoe_worker_up", "1 while the process answers.", labels=labels)
    restarts = CounterMetricFamily(
        "tiermoe_worker_restarts", "Times that Ray started the process again; its counters begin at 0.", labels=labels
    )
    own = {key: _family(f"worker_{name}", about, labels) for name, (about, key) in _OF_WORKERS.items()}
    at_peers = {key: _family(f"peer_{name}", about, [*labels, "peer"]) for name, (about, key) in _OF_PEERS.items()}
    experts = _family("worker_experts", "Experts that forwards needed, by where they were.", [*labels, "place"])
    loaded = _family("worker_expert_bytes_loaded", "Expert bytes brought to this GPU.", [*labels, "cause"])
    read = _family("worker_disk_bytes_read", "Expert bytes that this process read from the disk.", [*labels, "cause"])
    for sample in samples:
        where = [sample.host or "", sample.worker, sample.kind]
        up.add_metric(where, float(sample.problem is None))
        restarts.add_metric(where, sample.restarts)
        counters = sample.counters
        for key in own.keys() & counters.keys():
            own[key].add_metric(where, counters[key])
        for peer, traffic in sample.peers.items():
            for key in at_peers.keys() & traffic.keys():
                at_peers[key].add_metric([*where, peer], traffic[key])
        if "hits" in counters:
            for way, count in needed(counters).items():
                experts.add_metric([*where, _PLACES[way]], count)
            for cause in _CAUSES:
                loaded.add_metric([*where, cause], counters[f"bytes_loaded_{cause}"])
        if "host_hits" in counters:
            for cause in _READ_CAUSES:
                read.add_metric([*where, cause], counters[f"host_bytes_{cause}"])
    yield from (up, restarts, experts, loaded, read, *own.values(), *at_peers.values())


def _family(name: str, about: str, labels: Sequence[str]) -> CounterMetricFamily:
    return CounterMetricFamily(f"tiermoe_{name}", about, labels=labels)


def _of_planner(planner: Mapping[str, Any]) -> Iterable[Metric]:
    about = "Predicted against measured time of a layer, mean difference."
    yield GaugeMetricFamily("tiermoe_planner_error_ratio", about, planner["error"])
    if planner["follows"] is None:
        return
    about = "Experts of a token: as seen, and by the rules of shadows."
    taken = GaugeMetricFamily("tiermoe_planner_token_seconds", about, labels=["rule"])
    for rule, taken_s in planner["token_s"].items():
        taken.add_metric([rule], taken_s)
    yield taken
    about = "1 while another rule than the planner's own is followed."
    yield GaugeMetricFamily("tiermoe_planner_follows_other", about, float(planner["follows"] != "auto"))


def _counters(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    """One counter by a label."""
    found = CounterMetricFamily(f"tiermoe_{name}", about, labels=[label])
    for value, count in values.items():
        found.add_metric([value], count)
    return found
