"""The lead GPU worker: a model whose experts live in a bounded pool, behind a batching loop.

A plain class; `cluster.deploy` makes it an actor. A layer is in `engine/layer.py`, the order of its pass in
`core/layer.hpp`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError, ConfigError, NotServing, RuntimeFailure, StoreError, UnsupportedModelError
from ..proto.peers import MATCHER, PeerLink, StoreLink
from .budget import most_recordings
from .combinations import check_combination
from .engine.serving.streams import Outbox, Stream
from .learned import LearnedUses
from .policies.drafts import DraftPricing
from .requests import GenerationRequest, SamplingParams, TokenEvent
from .sample import ProcessSample, take_sample
from .settings import Attention, EngineSettings, KvSettings
from .store.artifacts import map_shape
from .store.dense import dense_folder
from .store.files import StoreView, renewed
from .store.pages import FileWatch
from .store.replicas import describe_replicas, read_tables
from .tokenizer import has_tokenizer, read_tokenizer

_REPORT_S = 5.0
_CLIENT_GONE_S = 30.0  # without a call
_LIBRARIES = (
    "torch",
    ".engine.engine",
    ".engine.model.model",
    ".engine.serving.batching",
    "transformers.models",
    "transformers.integrations.moe",
)


class _Loaded(NamedTuple):
    """What a start has read from the store, for the engine and the batcher.

    pinned: what of the store's memory is pinned (`PinReport`); None: nothing is. tables, low_bit: of replicas.
    vocabulary: the text of tokenizer.json, for grammars. notes: for the plan.
    """

    pinned: Any
    tables: Any
    low_bit: Any
    artifacts: Any
    vocabulary: Any
    notes: list[str]


class GpuWorker:
    """Owns the dense layers, the KV cache, continuous batching and the expert cache of one device.

    Args:
        view: the expert store of this node. Without mapped `layers`, the other files are fetched too.
        ndp: the NDP workers at the start; needed if the policy uses them.
        shards: the shards 1..G-1 of the expert cache, as many as the settings say.
        stores: of other nodes, for the layers that `view` lacks.
        matcher: the matcher of expert maps; needed if the policy uses them.

    Construction is cheap; `start` loads.
    """

    def __init__(
        self,
        settings: EngineSettings,
        view: StoreView,
        ndp: Sequence[PeerLink] = (),
        shards: Sequence[PeerLink] = (),
        stores: Sequence[StoreLink] = (),
        matcher: PeerLink | None = None,
    ) -> None:
        self._settings, self._view, self._ndp, self._shards = settings, view, tuple(ndp), tuple(shards)
        self._stores, self._matcher = tuple(stores), matcher
        self._device: Any = None
        self._sources: Any = None
        self._model: Any = None
        self._engine: Any = None
        self._dense: Any = None
        self._batcher: Any = None
        self._head: Any = None  # of the model, for drafts
        self._learned: LearnedUses | None = None
        self._plan: dict[str, Any] | None = None
        self._stage, self._stage_begin_s = "created", time.monotonic()
        self._stages_s: dict[str, float] = {}  # seconds of those that are over
        self._importing = threading.Lock()
        self._outboxes: dict[str, Outbox] = {}  # by client
        self._life = secrets.token_hex(8)
        self._refusal: StoreError | None = None  # of a start, until one gets past its files
        self._watch: FileWatch | None = None

    def warm(self) -> None:
        """Import what `start` takes, in seconds that its peers take to start."""
        with self._importing:
            self._begin("loading libraries")
            for name in _LIBRARIES:
                import_module(name, __package__)

    def start(self) -> dict[str, Any]:
        """Load everything and begin to serve; returns the effective plan (`engine.describe`).

        Raises:
            StoreError: a file does not verify, or an expert is on no node; `start` may be called again.
            TierMoeError: the budget, the policy or the store does not fit. After an error the worker is closed.
        """
        try:
            if self._view.layers:  # Ray starts it again with the first view, whose files may have changed since
                self._view = renewed(self._view)
            self.warm()
            return self._start()
        except StoreError as error:
            self._refusal = error
            self.close()
            raise
        except BaseException:
            self.close()
            raise

    def _start(self) -> dict[str, Any]:
        import torch

        from .engine.cache.device import CpuDevice, settle_budget
        from .engine.describe import describe
        from .engine.make_device import make_device
        from .engine.model.attention import attention_of_steps
        from .engine.model.model import compute_dtype

        self._begin("loading weights")
        self._watch = FileWatch()
        settings = self._settings
        check_combination(settings, self._view.manifest.expert_form)
        torch.set_num_threads(settings.threads)
        mapped = settings.budget.mapped
        device = CpuDevice(settings.link, "real") if mapped else make_device(settings.device, settings.link)
        self._device = device
        dtype = compute_dtype(settings.dtype, device.torch_device)
        attention, recorded = attention_of_steps(
            settings.attention, settings.compile, settings.kv.batching, device.torch_device
        )
        settings = settle_budget(settings, device)
        loaded = self._load(settings, dtype, attention)
        self._begin("probing")
        self._make_engine(settings, dtype, loaded)
        self._make_batcher(settings, attention, recorded, loaded.vocabulary)
        self._begin_serving(settings)
        plan = describe(settings, self._view, self._engine, self._batcher, self._model, loaded.pinned, self._head)
        plan["stores"] = self._sources.describe()
        self._begin("serving")
        plan["start_s"] = dict(self._stages_s)
        self._batcher.streams.out_of_memory = _end_process
        self._plan, self._refusal = plan, None  # from now on it serves
        return plan

    def _load(self, settings: EngineSettings, dtype: Any, attention: Attention) -> _Loaded:
        """Open the experts of all nodes, and load the model's other weights and what the policy needs.

        attention: of the model's steps.
        """
        from .engine.cache.low_bits import open_replica_weights
        from .engine.cache.sources import open_sources
        from .engine.make_cache import host_experts
        from .engine.model.architecture import left_out
        from .engine.model.model import build_model
        from .engine.model.mtp import build_head
        from .store.artifacts import read_policy_artifacts

        view, manifest, policy = self._view, self._view.manifest, settings.policy
        device, on = self._device, self._device.torch_device
        self._sources = open_sources(view, self._stores, settings.store)
        pinned = host_experts(self._sources, manifest, settings, device, dtype)
        tables, low_bit = None, None
        with dense_folder(view, self._stores, settings.store) as folder:
            here = folder == Path(view.path)  # else a temporary copy
            self._model = build_model(folder, manifest, dtype, on, attention, view.dense if here else None)
            if policy.replica_widths or policy.needs_popularity:
                fetched = bool(self._stores) and not view.layers
                replicas = describe_replicas(folder, verify="stamp", tables_only=fetched)
                if policy.low_bit is not None:
                    low_bit, pinned = open_replica_weights(policy, replicas, fetched=fetched).pinned_by(
                        device, settings.copies, pinned
                    )
                else:
                    tables = None if replicas is None else read_tables(replicas)
            artifacts = read_policy_artifacts(policy, folder, manifest)
            vocabulary, no_grammars = _vocabulary_of(folder)
            if settings.drafts.kind in ("auto", "mtp"):
                self._head = build_head(folder, self._model, on)
            return _Loaded(pinned, tables, low_bit, artifacts, vocabulary, no_grammars + left_out(folder))

    def _make_engine(self, settings: EngineSettings, dtype: Any, loaded: _Loaded) -> None:
        """Give the model's MoE layers their engine, and compile its dense parts."""
        from .engine.dense.compile import CompiledDense
        from .engine.engine import ExpertEngine, PeerLinks
        from .engine.make_cache import ModelExperts
        from .engine.model.model import experts_per_token, find_blocks

        manifest = self._view.manifest
        blocks = find_blocks(self._model, manifest)
        model = ModelExperts(
            manifest.experts, self._sources.weights, dtype, experts_per_token(self._model.config), manifest.published,
            loaded.low_bit, settings.budget.mapped,
        )  # fmt: skip
        links = PeerLinks(self._ndp, self._shards, self._matcher_link())
        self._engine = ExpertEngine(settings, model, blocks, self._device, links, loaded.artifacts, loaded.tables)
        self._engine.notes += loaded.notes
        if self._engine.prefetching is not None:
            self._engine.prefetching.watch_embeddings(self._model)
        experts = [block.experts for block in blocks]
        self._dense = CompiledDense(self._model, experts, settings.compile, threads=settings.threads)

    def _make_batcher(self, settings: EngineSettings, attention: Attention, recorded: bool, vocabulary: Any) -> None:
        """Batch requests. attention: of the model's steps. recorded: decode steps become CUDA graphs."""
        self._batcher = make_batcher(
            self._model, settings.kv, self._engine, attention, vocabulary, self._shared_memory(), settings.attention
        )
        if recorded:
            self._engine.notes += _record(self._model, self._batcher, settings.kv)
        self._engine.notes += self._draft() + self._dense.settle()

    def _begin_serving(self, settings: EngineSettings) -> None:
        """Forget what the start's own requests left, and begin with what earlier runs learned."""
        if settings.policy.preload == "none" and settings.policy.placement.kind != "static":
            with self._engine.alone:
                self._engine.begin_serving()
        self._engine.follow_maps()
        self.reset_stats()
        if settings.keep_hot_set:
            folder = Path(self._view.path) if self._view.layers else None
            self._learned = LearnedUses(self._engine, self._view.manifest, folder)
            self._learned.begin()
            self._engine.notes += self._learned.notes

    def _draft(self) -> list[str]:
        """Verify drafts from now on, where the settings ask for it; notes for the plan.

        Raises:
            ConfigError: drafts of the model's own head are asked for, and there are none.
        """
        from .engine.serving.head import HeadDrafts

        settings, engine, drafts = self._settings, self._engine, self._settings.drafts
        stepped = settings.link.layer_us is not None
        if drafts.kind == "off" or (drafts.kind == "auto" and (stepped or not settings.policy.lossless)):
            self._head = None
            return []
        because = None if self._head is not None else "its store has no head that transformers runs"
        if self._batcher.replays:
            because = "decode steps are CUDA graphs, which keep no hidden states"
        if because is not None:
            self._head = None
            if drafts.kind == "mtp":
                raise ConfigError(f"the model drafts nothing itself: {because}", "use drafts.kind: ngram, or auto")
        head = None if self._head is None else HeadDrafts(self._head, self._model)
        pricing = DraftPricing(drafts.tokens)
        with engine.alone:  # a model's own cache is tried
            because = self._batcher.draft(pricing, engine, head)
        engine.stats().drafts = pricing.stats if because is None else None
        return [] if because is None else [f"no tokens are drafted: {because}"]

    def _shared_memory(self) -> Any:
        """The memory that expert slots and KV cache share; None: each has its own."""
        if self._engine.cache.memory is None:
            return None
        from .engine.serving.shared_memory import SharedMemory

        return SharedMemory(self._engine.cache, self._engine.resize, self._engine.alone)

    def _begin(self, stage: str) -> None:
        """The next part of the start."""
        now_s, last = time.monotonic(), self._stage
        if last != "created":
            self._stages_s[last] = self._stages_s.get(last, 0.0) + now_s - self._stage_begin_s
        self._stage, self._stage_begin_s = stage, now_s

    def _matcher_link(self) -> Any:
        from .engine.peers.matcher import MatcherLink

        maps = self._settings.policy.maps
        if self._matcher is None or maps is None:
            return None
        return MatcherLink(self._matcher, self._settings.matcher, maps, map_shape(self._view.manifest))

    def plan(self) -> dict[str, Any]:
        """The result of `start`. Raises NotServing: not started."""
        return self._started(self._plan)

    @property
    def _serving(self) -> Any:
        """The batcher, once it has generated tokens. Raises NotServing: not started."""
        self._started(self._plan)
        return self._batcher

    @staticmethod
    def _started(part: Any) -> Any:
        if part is None:
            raise NotServing("the worker is not started", "call start first")
        return part

    def health(self) -> dict[str, Any]:
        """The worker's `state`, and "connected" or "lost" for each peer by name ("ndp/0", "shard/1").

        Before it serves, `state` is the current part of its start, for `since_s` seconds now. Seconds of all parts
        are in the plan, as `start_s`. With a `problem` and its `remedy`, a file keeps it from serving: its last start
        was refused for it, or no other node's store gives a layer.

        Raises:
            LoopDied: generation ended for good; who keeps the lead starts its process again. PolicyError: of a policy.
        """
        if self._plan is None:
            since_s = round(time.monotonic() - self._stage_begin_s, 1)
            return {"state": self._stage, "since_s": since_s} | _problem(self._refusal)
        if self._batcher.failure is not None:
            raise self._batcher.failure
        peers = {name: "connected" if peer.available else "lost" for name, peer in self._engine.peers.items()}
        peers |= self._sources.peers()
        if self._engine.matcher is not None:
            peers[MATCHER] = "connected" if self._engine.matcher.connected else "lost"
        refusal = _problem(self._sources.refusal())
        state = {"state": "not serving" if refusal else "serving"}
        return state | refusal | {"running": len(self._batcher.streams)} | peers

    def load(self) -> dict[str, float]:
        """Requests `running` and `waiting` for their first forward, and their `kv_usage` in [0, 1].

        Of the expert cache `slots_used` and `pins`. Requests of a client that has gone are cancelled here, since who
        serves asks this every second.
        """
        self._leave_silent_clients()
        if self._batcher is None:
            return {"running": 0, "waiting": 0, "kv_usage": 0.0, "slots_used": 0, "pins": 0}
        streams, residency = self._batcher.streams, self._engine.cache.residency
        waiting = streams.waiting
        return {
            "running": len(streams) - waiting, "waiting": waiting, "kv_usage": self._batcher.kv_usage,
            "slots_used": max(0, residency.slots - residency.free_slots), "pins": residency.pins,
        }  # fmt: skip

    def submit(self, request: GenerationRequest) -> Stream:
        """Queue a request now; the stream iterates over its tokens.

        Raises:
            RequestError: malformed request. NotServing: not started, or the loop died. PolicyError: of a policy.
        """
        return self._serving.submit(request)

    def generate(self, request: GenerationRequest) -> Iterator[TokenEvent]:
        """Like `submit`, but queues the request at the first step and cancels it when the iteration ends early.

        For `tiermoe run` and `LLM`. The HTTP server calls `begin`, and `take` for the events of all of its requests.
        """
        stream = self.submit(request)
        try:
            yield from stream
        finally:
            self._batcher.cancel(stream)  # by stream: a later request may have the same id

    def begin(self, client: str, request: GenerationRequest) -> str:
        """Queue a request whose events `take` returns.

        Args:
            client: who takes them; its name is its own.

        Returns:
            A name of this process's life: one that was started again has another, and none of the requests.

        Raises:
            RequestError: malformed request. NotServing: not started, or the loop died. PolicyError: of a policy.
        """
        outbox = self._outboxes.setdefault(client, Outbox())
        outbox.begin(request.request_id)
        try:
            self._serving.submit(request, outbox)
        except BaseException:
            outbox.open.discard(request.request_id)
            raise
        return self._life

    def take(self, client: str, wait_s: float) -> tuple[str, list[TokenEvent]]:
        """This life's name, and the events of all requests of a client since its last call; waits up to `wait_s`."""
        return self._life, self._outboxes.setdefault(client, Outbox()).take(wait_s)

    def _leave_silent_clients(self) -> None:
        for outbox in list(self._outboxes.values()):
            if outbox.open and outbox.silent_s > _CLIENT_GONE_S:
                for request_id in list(outbox.open):
                    self.cancel(request_id)
                outbox.take(0.0)

    def cancel(self, request_id: str) -> bool:
        """End a request now; False if it had ended."""
        if self._batcher is None:
            return False
        stream = self._batcher.streams.find(request_id)
        return stream is not None and self._batcher.cancel(stream)

    def add_ndp(self, link: PeerLink) -> None:
        """Add an NDP worker, which takes its share of the experts at the next forward after its connection.

        Returns at once; from any thread, also while requests run. A known name changes nothing.

        Raises:
            NotServing: not started. ConfigError: the policy uses no NDP worker.
        """
        pool = self._started(self._engine).ndp
        if pool is None:
            name = self._settings.policy.name
            raise ConfigError(f"policy {name} uses no NDP worker", "choose one that does, such as context-ndp-full")
        pool.add(link)

    def stats(self) -> Any:
        """Counters since the last reset (`EngineStats`)."""
        return self._sources.count_in(self._engine.stats())

    def shard_stats(self) -> list[dict[str, Any]]:
        """Counters of every GPU, the lead's first: totals over layers, slots and bytes.

        The lead counts since the last reset, another shard since its start. A lost or late shard has only its `state`.
        """
        from .engine.peers.shards import account

        others = self._engine.shards.reports() if self._engine.shards is not None else []
        own = {"shard": "shard/0", "state": "serving"} | account(self.stats())
        # a health report has no null: before anything ran, it has no rate
        return [{"hit_rate": None} | part if "hits" in part else part for part in (own, *others)]

    def sample(self) -> ProcessSample:
        """Counters of its GPU and its steps, and what went between it and each peer.

        The host's part of `step_s` is what `blocked_io_s`, `ndp_wait_s` and `shard_wait_s` leave of it.
        """
        engine = self._engine
        if self._plan is None or engine is None:
            return take_sample()
        streams = self._batcher.streams
        own = {"steps": streams.steps, "step_s": streams.step_s}
        peers = {name: peer.traffic() for name, peer in engine.peers.items()} | self._sources.reads()
        if engine.matcher is not None:
            peers[MATCHER] = engine.matcher.traffic()
        return take_sample(self.stats().counters() | own, peers)

    def matcher_stats(self) -> dict[str, Any] | None:
        """Counters of the matcher since its start, and of the connection; None: the policy uses no matcher."""
        matcher = None if self._engine is None else self._engine.matcher
        return None if matcher is None else matcher.account(_REPORT_S) | matcher.report()

    def residency(self) -> Any:
        """A `LayerResidency` for each layer; also while requests run. Raises NotServing: not started."""
        return self._started(self._engine).residency()

    def reset_stats(self) -> None:
        """Zero the counters, but those of the peers' channels; residency stays."""
        self._engine.reset_stats()
        self._batcher.streams.reset_steps()

    @property
    def engine(self) -> Any:
        """The expert engine (`ExpertEngine`), for benchmarks and tests in this process."""
        return self._engine

    @property
    def model(self) -> Any:
        """The transformers model, to be run directly while no request is in flight (`engine.serving.scoring`)."""
        return self._model

    @property
    def batcher(self) -> Any:
        """The `Batcher`, for benchmarks in this process."""
        return self._batcher

    @property
    def settings(self) -> EngineSettings:
        """The worker's settings."""
        return self._settings

    def trace_events(self) -> list[dict[str, Any]]:
        """The timeline as Chrome trace events; empty unless `settings.trace`."""
        return self._engine.timeline.events()

    def retire(self) -> None:
        """Keep what was learned: the runtime ends in order, and this process is killed next."""
        if self._learned is not None:
            self._learned.close()

    def close(self) -> None:
        """Stop serving and free the pool. Safe to call twice."""
        self.retire()
        if self._watch is not None:
            self._watch.close()
        if self._batcher is not None:
            self._batcher.streams.close()  # before the sources: then the running forward fails
        for part in (self._sources, self._batcher, self._engine, self._dense, self._device):
            if part is not None:
                part.close()


def _problem(refusal: StoreError | None) -> dict[str, str]:
    """What keeps a worker from serving, for its health."""
    return {} if refusal is None else {"problem": refusal.what, "remedy": refusal.remedy}


def _record(model: Any, batcher: Any, kv: KvSettings) -> list[str]:
    """Replay decode steps as CUDA graphs from now on, and try one request; notes for the plan.

    Raises:
        RuntimeFailure: it failed. TierMoeError: what ended it, if of ours.
    """
    from .engine.serving.recorded import Recorded

    if batcher.attention != "triton":
        because = batcher.unpaged_because or "its attention takes another kernel"
        return [f"decode steps are no CUDA graphs: {because}"]
    recorded = Recorded(model, most_recordings(kv.max_num_seqs, kv.num_blocks * kv.page_size))
    batcher.record(recorded)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    for event in batcher.submit(GenerationRequest("record", (0, 0, 0), sampling, read_prefix_cache=False)):
        if event.failure is not None:
            if event.error_type is not None and not isinstance(event.failure, NotServing):
                raise event.failure
            raise RuntimeFailure(f"a forward that is a CUDA graph failed: {event.error}", "use compile: off")
    if not recorded.replays and recorded.problem is None:
        recorded.problem = "this version of transformers makes each step anew"
    return [] if recorded.problem is None else [f"decode steps are no CUDA graphs: {recorded.problem}"]


def _end_process(error: BaseException) -> None:
    """End this process, as the kernel does when memory runs out: Ray makes it again, its requests resume.

    A forward that ran out of memory leaves a loop that generates nothing, and the user who started the runtime would
    end it.
    """
    with contextlib.suppress(OSError):  # the log is on a full disk
        traceback.print_exception(error)
    os._exit(1)


def _vocabulary_of(folder: Path) -> tuple[str | None, list[str]]:
    """The tokenizer for grammars, and notes; None: there is none, or it is not readable, and requests say so."""
    try:
        return (read_tokenizer(folder).json if has_tokenizer(folder) else None), []
    except CheckpointError as error:
        return None, [f"grammars are refused: {error}"]


def make_batcher(
    model: Any, kv: KvSettings, watcher: Any = None, attention: Attention = "auto", tokenizer: str | None = None,
    memory: Any = None, otherwise: Attention | None = None,
) -> Any:  # fmt: skip
    """Continuous batching, on the paged cache if the model allows it, else on its own.

    Args:
        watcher: a `SequenceWatcher`, which gets the rows of each forward pass.
        tokenizer: the text of tokenizer.json, for grammars.
        memory: `SharedMemory` of expert slots and the paged cache; None: the cache has its own.
        otherwise: the attention that is tried where the model does not allow `attention`; None: none.

    Raises:
        UnsupportedModelError: `kv.batching` is continuous and the model does not allow a paged cache; or no token came.
    """
    from .engine.serving.batching import ContinuousBatcher
    from .engine.serving.rows import RowBatcher

    if kv.batching == "serial":
        return RowBatcher(model, kv, "asked for", watcher, tokenizer)
    tried = [attention, *([otherwise] if otherwise not in (None, attention) else [])]
    if kv.coded is not None and model.device.type == "cuda":  # which our kernel does not read
        tried = [name for name in tried if name != "triton"] or ["sdpa"]
    for name in tried:
        try:
            return ContinuousBatcher(model, kv, watcher, name, tokenizer, memory)
        except UnsupportedModelError as error:
            if name == tried[-1] and kv.batching == "continuous":
                raise
            if memory is not None:
                memory.close()
            why = error.what
        gc.collect()  # the cache of the one that failed, before there is another
    if kv.coded is not None:
        raise UnsupportedModelError(f"kv.dtype {kv.dtype} is of the paged KV cache: {why}", "leave kv.dtype out")
    return RowBatcher(model, kv, why, watcher, tokenizer)
