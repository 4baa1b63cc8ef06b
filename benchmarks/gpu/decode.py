"""Parts `qwen`, `qwen3`, `published`: decode steps of random-weight models in real shapes, as the product runs them.

    synthetic trace at this shape -> replayed in every case alike
    each case: prefill, warm tokens, then pieces of tokens; then a run with events around the steps' graphs

Part `host`: the host time of one MoE layer in decode, by component, and the chosen kernels. A few layers of a real
shape suffice. Routing is replayed inside the experts' operator.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from tiermoe.actors.budget import Budget, most_recordings
from tiermoe.actors.engine.engine import ExpertEngine, PeerLinks
from tiermoe.actors.engine.host_times import PARTS, device_calls, host_passes
from tiermoe.actors.engine.make_cache import ModelExperts
from tiermoe.actors.engine.make_device import make_device
from tiermoe.actors.engine.model.kernels import KernelPlan
from tiermoe.actors.engine.peers.matcher import MatcherLink
from tiermoe.actors.engine.serving.batching import ContinuousBatcher
from tiermoe.actors.engine.serving.recorded import Recorded
from tiermoe.actors.policies.routing import SequenceRows
from tiermoe.actors.settings import Attention, EngineSettings, KvSettings, LinkSettings
from tiermoe.actors.store.artifacts import MapShape, PolicyArtifacts
from tiermoe.cluster.config import load_policy
from tiermoe.cluster.jobs.bench.serving import serve
from tiermoe.cluster.simulate.hit_rates import hit_rates, policies
from tiermoe.cluster.simulate.synthetic import FAMILIES
from tiermoe.cluster.worker_process import Role, WorkerProcess
from tiermoe.cluster.yaml_file import read_yaml
from tiermoe.limits import usable_cores

from .models import REAL, TOY, HostExperts, RandomModel, RealShape, build_random_model, moe_layers
from .near_data import NearData, random_tables
from .routing import FAMILY, Replay, RoutingTrace, draw, profile_of
from .run_parts import Context, Record
from .timeline import LayerTimes, Timeline
from .transfers import Peaks, record_peaks, spread_of

LRU_SHARES = (0.1, 0.25, 0.5, 0.75)  # of a layer's experts in an LRU cache, whose hit rate the trace's row has
OURS = "tiermoe"
PROMPT = 16
_SERVED_S = 6.0  # a case with less time left does not start
AUTO_OVER_BEST = 1.05  # `auto` over the fastest preset of its budget
LAYER_OVER_FLOOR = 1.3  # a layer of published experts over the bytes that it reads, the host's time apart

HOST_PROMPT, HOST_WARM, HOST_TOKENS, HOST_PROFILED = 8, 16, 40, 4
_SERVED_KV = KvSettings(page_size=16, tokens=512, max_batch_tokens=256, max_num_seqs=4, prefix_cache=False)
_CASE_S = 3.0  # a case of `host` with less time left does not start
LIMIT_US = 150.0  # of the host for an MoE layer, launches included
LAUNCHES = 5  # the routing to the host, the table of tiles, gate_up, down, combine
AIMED_AT = ("moepic",)  # its split and its predictions cost more: a goal, not a check


@dataclass(frozen=True)
class Pieces:
    """Tokens of a case before it is measured, of each of its pieces, and how many pieces there are."""

    warm: int = 24
    tokens: int = 8
    repeats: int = 5

    @staticmethod
    def of(context: Context) -> Pieces:
        return Pieces(4, 2, 2) if context.toy else Pieces()


def table() -> dict[str, Any]:
    """What the parts measure: cells.yaml."""
    return read_yaml(Path(__file__).with_name("cells.yaml"))


class Session:
    """One sequence on one model through transformers' own forward and cache: greedy; the host reads each token.

    Without `engine`, the model runs its experts itself.
    """

    def __init__(self, model: Any, replay: Replay, context: Context, name: str, engine: Any = None) -> None:
        self._model, self._replay, self._context, self._name, self._engine = model, replay, context, name, engine
        self._cache: Any = None
        self._next = self.position = 0

    def prefill(self, prompt: list[int]) -> None:
        self._next = self._forward(prompt, decode=False)

    def decode(self, tokens: int) -> float:
        """Run this many tokens; return seconds per token."""
        self._context.synchronize()
        begin_s = time.perf_counter()
        for _ in range(tokens):
            self._next = self._forward([self._next], decode=True)
        self._context.synchronize()
        return (time.perf_counter() - begin_s) / tokens

    def end(self) -> None:
        self._cache = None
        if self._engine is not None:
            self._engine.end_sequence(self._name)

    @torch.no_grad()
    def _forward(self, ids: list[int], decode: bool) -> int:
        self._replay.begin(self.position, len(ids))
        if self._engine is not None:
            self._engine.begin_forward([SequenceRows(self._name, 0, len(ids), decode)])
        given = torch.tensor([ids], device=self._context.device)
        out = self._model(input_ids=given, past_key_values=self._cache, use_cache=True)
        self._cache = out.past_key_values
        self.position += len(ids)
        return int(out.logits[0, -1].argmax())


@dataclass(frozen=True)
class Bench:
    """The common state of the cases of one shape: experts in host memory, a model around them, the replayed routing."""

    context: Context
    record: Record
    shape: RealShape
    built: RandomModel
    host: HostExperts
    replay: Replay
    trace: RoutingTrace

    @staticmethod
    def of(
        context: Context, record: Record, shape: RealShape, host: HostExperts, layers: int, trace: RoutingTrace
    ) -> Bench:
        """Fill `host`, which the caller closes, with `layers` MoE layers, and build a model around them."""
        for layer in range(layers):
            host.add(shape, context.dtype, context.device, seed=layer)
        built = build_random_model(shape, layers, context.dtype, context.device)
        replay = Replay(trace, built.router_weights(), context.device, context.dtype)
        return Bench(context, record, shape, built, host, replay, trace)

    def session(self, name: str) -> Session:
        made = Session(self.built.model, self.replay, self.context, name)
        made.prefill(prompt_of())
        return made

    @contextmanager
    def engine(
        self, preset: str, budget: float, near_data: NearData, asked: bool = False, replayed: bool = True
    ) -> Iterator[ExpertEngine]:
        """An engine without a store, and a matcher and the NDP worker if the preset needs them.

        `near_data` outlives it unless something fails.

        Args:
            asked: the NDP worker also runs where the preset can do without.
            replayed: prefetch goes by the replay's routers; else by the model's own.

        Raises:
            TierMoeError: the preset does not work with that budget or model.
        """
        policy, shape, device = load_policy(preset), self.shape, self.context.device
        layers, expert = len(self.host.layers), shape.expert
        settings = EngineSettings(
            policy=policy,
            budget=Budget(share=budget),
            device=device.type,
            link=LinkSettings(gbps=None),
            ndp=near_data.settings,
        )
        routers = zip(self.built.blocks, self.replay.probes(), strict=True)
        blocks = [replace(block, router=probe) if replayed else block for block, probe in routers]
        embedding = self.built.model.get_input_embeddings()
        before = set(embedding._forward_hooks)

        def remove_hooks() -> None:  # those of the engine, which would keep its memory
            for number in set(embedding._forward_hooks) - before:
                del embedding._forward_hooks[number]

        with ExitStack() as stack:
            links, matcher, replicas = [], None, None
            if near := policy.uses_ndp and (asked or not policy.placement.optional_workers):
                links = [near_data.link()]
                stack.push(lambda kind, *_: near_data.close() if kind is not None else None)
            if (maps := policy.maps) is not None:
                of = MapShape(shape.name, layers, shape.experts, shape.hidden)
                role = Role.matcher(settings.matcher, maps, of, shape.top_k)
                matcher = MatcherLink(stack.enter_context(WorkerProcess(role)).link, settings.matcher, maps, of)
            if policy.low_bit is not None:
                replicas = self.host.replicas(expert, policy.low_bit.bits, settings.ndp.group_size, device)
            artifacts = PolicyArtifacts(profile=profile_of(self.trace) if "profile" in policy.needs else None)
            made = stack.enter_context(closing(make_device(device.type, settings.link)))
            tables = policy.replica_widths or policy.needs_popularity
            engine = ExpertEngine(
                settings,
                ModelExperts(
                    expert, self.host.layers, self.context.dtype, shape.top_k, shape.published(layers), replicas
                ),
                blocks,
                made,
                PeerLinks(links, matcher=matcher),
                artifacts,
                random_tables(layers, shape.experts) if near and tables else None,
            )
            stack.callback(remove_hooks)
            stack.enter_context(closing(engine))
            if engine.prefetching is not None:
                engine.prefetching.watch_embeddings(self.built.model)
            engine.follow_maps()
            yield engine


def free_memory(context: Context) -> None:
    gc.collect()
    if context.device.type == "cuda":
        torch.cuda.empty_cache()


def run(context: Context, record: Record) -> None:
    """The model that the part is named after."""
    _decode(context, record, record.part)


def published(context: Context, record: Record) -> None:
    """Layers of models whose experts run as they are published."""
    for name in table()["published"]:
        _decode(context, record, name)


def prompt_of() -> list[int]:
    return [(7 * i + 1) % 200 for i in range(PROMPT)]


def trace_of(context: Context, shape: RealShape, layers: int) -> RoutingTrace:
    pieces = Pieces.of(context)
    tokens = PROMPT + pieces.warm + (pieces.repeats + 1) * pieces.tokens
    return draw(tokens, layers, shape.experts, shape.top_k, seed=7)


def _decode(context: Context, record: Record, name: str) -> None:
    """The cells of a model, the most important first."""
    shape = (TOY if context.toy else REAL)[name]
    torch.set_num_threads(1)
    begin_s = time.monotonic()
    layers = moe_layers(shape, context)
    trace = trace_of(context, shape, layers)
    sizes = {f"{share:g}": max(shape.top_k, round(share * shape.experts)) for share in LRU_SHARES}
    lru = hit_rates(trace.ids.transpose(1, 0, 2), tuple(sizes.values()), policies(("lru",)))
    record.row(
        "trace", shape=shape.name, family=FAMILY, tokens=len(trace.ids), recalls=FAMILIES[FAMILY].recalls,
        hit_rates={share: row.overall for share, row in zip(sizes, lru, strict=True)},
    )  # fmt: skip
    peaks = record_peaks(context, record)
    threads = 1 if context.toy else max(1, usable_cores() - 3)
    with closing(HostExperts()) as host, closing(NearData(shape.expert, layers, threads)) as near_data:
        bench = Bench.of(context, record, shape, host, layers, trace)
        built = bench.built
        record.row(
            "shape", shape=shape.name, moe_layers=layers, all_moe_layers=shape.moe_layers, experts=shape.experts,
            top_k=shape.top_k, form=shape.label, expert_bytes=shape.slot_bytes(context.dtype),
            expert_memory_bytes=host.nbytes, dense_bytes=built.dense_bytes, host_memory=sorted(set(host.how)),
            dtype=str(context.dtype).removeprefix("torch."), setup_s=time.monotonic() - begin_s,
        )  # fmt: skip
        if hasattr(built.model.config, "kv_lora_rank"):  # latent attention
            record.note(f"{shape.name}: its attention has no paged cache, so its steps are no graphs")
            return
        few = context.toy and name != "qwen"
        for cell in cells_of(name)[: 2 if few else None]:
            case = f"{shape.name}, {cell}"
            known = record.measured("served", shape=shape.name, preset=str(cell), budget=cell.budget)
            if not known and record.has_time(context, _SERVED_S, case):
                with record.trying(case, must_run=True):
                    _served(bench, cell, near_data, peaks)
                free_memory(context)
        judge_auto(record, shape.name)


@dataclass(frozen=True)
class Cell:
    """One preset at one budget. ndp: with an NDP worker that the preset can do without."""

    preset: str
    budget: float
    ndp: bool = False

    def __str__(self) -> str:
        return f"{self.preset}, ndp" if self.ndp else self.preset


def cells_of(model: str) -> list[Cell]:
    """The cells of a model, the most important first."""
    return [Cell(preset, float(budget), "ndp" in more) for preset, budget, *more in table()["served"][model]]


def judge_auto(record: Record, shape: str) -> None:
    """The default beside the fastest preset of its budget."""
    ms = {
        (row["preset"], row["budget"]): row["tpot_ms"]["median"]
        for row in record.rows_of("served") if row["shape"] == shape
    }  # fmt: skip
    for (preset, budget), taken in ms.items():
        others = [other for (name, at), other in ms.items() if at == budget and name != preset]
        if preset == "auto" and others:
            name = f"{shape}: auto at {budget:g} over the fastest preset there"
            record.check(name, taken / min(others), "<=", AUTO_OVER_BEST)


class _Told:
    """A `SequenceWatcher`: of a step that one sequence runs, the replay gets the tokens and the engine the rows.

    Attributes:
        loaded: bytes that the engine had loaded before the step that follows a sequence's `warm`th token.
    """

    def __init__(self, engine: ExpertEngine, replay: Replay, warm: int) -> None:
        self._engine, self._replay, self._next, self._warm = engine, replay, dict[str, int](), warm
        self.loaded = 0

    def begin_forward(self, rows: Sequence[SequenceRows]) -> None:
        (row,) = rows
        position, count = self._next.get(row.name, 0), row.stop - row.start
        if position == PROMPT + self._warm - 1:
            self.loaded = self._engine.stats().total().bytes_loaded
        self._next[row.name] = position + count
        self._replay.begin(position, count)
        self._engine.begin_forward(rows)

    def end_sequence(self, name: str) -> None:
        self._engine.end_sequence(name)


def _served(bench: Bench, cell: Cell, near_data: NearData, peaks: Peaks) -> None:
    """The product's own decode steps on this model, on a GPU as CUDA graphs cut at the experts."""
    context, shape, of = bench.context, bench.shape, Pieces.of(bench.context)
    tokens, timeline = len(bench.trace.ids) - PROMPT - 1, Timeline()
    bench.built.use(OURS)
    with ExitStack() as stack:
        engine = stack.enter_context(bench.engine(cell.preset, cell.budget, near_data, cell.ndp))
        told = _Told(engine, bench.replay, of.warm)
        stack.enter_context(closing(bench.replay.inside(bench.built.modules, engine.layers)))
        attention: Attention = "triton" if context.device.type == "cuda" else "auto"
        batcher = stack.enter_context(closing(ContinuousBatcher(bench.built.model, _SERVED_KV, told, attention)))
        recorded = None
        if context.device.type == "cuda":
            most = most_recordings(_SERVED_KV.max_num_seqs, _SERVED_KV.tokens)
            recorded = Recorded(bench.built.model, most, timeline.graph)
            batcher.record(recorded)
        for _ in range(2):  # the first records
            between_s = list[float]()
            serve(batcher.submit, [tuple(prompt_of())], tokens, between_s=between_s)
        loaded = engine.stats().total().bytes_loaded - told.loaded
        timeline.on = True
        with host_passes(engine) as passes:
            serve(batcher.submit, [tuple(prompt_of())], tokens)
        context.synchronize()
    pieces = [
        fmean(between_s[at : at + of.tokens]) * 1e3 for at in range(of.warm, len(between_s) - of.tokens + 1, of.tokens)
    ]
    per_token, tpot_ms = loaded / (tokens - of.warm), spread_of(pieces)
    graphs = recorded is not None and recorded.problem is None
    bench.record.row(
        "served", shape=shape.name, preset=str(cell), budget=cell.budget, tpot_ms=tpot_ms, graphs=graphs,
        kernels=engine.kernels.plan.chosen["decode"], mb_per_token=per_token / 1e6,
        floor_link_ms=per_token / peaks.h2d / 1e6, floor_read_ms=_read_bytes(bench) / peaks.hbm / 1e6,
    )  # fmt: skip
    for note in engine.kernels.plan.notes:
        bench.record.note(f"{shape.name}: {note}")
    if recorded is not None and recorded.problem is not None:
        bench.record.note(f"{shape.name}, {cell}: {recorded.problem}")
    elif recorded is not None:
        bench.record.check(f"{shape.name}, {cell}: steps that were graphs", recorded.replays, ">=", tokens)
    host_us = median(one.host_s for one in passes if one.tokens == 1) * 1e6
    if (times := timeline.by_layer(len(bench.host.layers))) is not None:
        timeline_row(bench, cell, times, host_us, tpot_ms["median"], peaks)


def timeline_row(bench: Bench, cell: Cell, times: LayerTimes, host_us: float, tpot_ms: float, peaks: Peaks) -> None:
    """Where a step's time on the device goes, and what a token would take with all of the model's layers."""
    shape, layers = bench.shape, len(bench.host.layers)
    layer_us = fmean(times.dense_us) + fmean(times.experts_us)
    whole_ms = tpot_ms + (shape.moe_layers - layers) * layer_us * 1e-3
    expert_us = shape.top_k * shape.slot_bytes(bench.context.dtype) / peaks.hbm * 1e-3
    bench.record.row(
        "timeline", shape=shape.name, preset=str(cell), budget=cell.budget, host_us=host_us,
        dense_us=median(times.dense_us), experts_us=median(times.experts_us), head_us=times.head_us,
        floor_experts_us=expert_us, whole_ms=whole_ms, dense_us_by_layer=[round(us) for us in times.dense_us],
    )  # fmt: skip
    if shape.form is not None and cell.preset == "all-resident":
        over = LAYER_OVER_FLOOR * expert_us + host_us
        name = f"{shape.name}: experts of a layer, over {LAYER_OVER_FLOOR:g} times their bytes and the host's time"
        bench.record.check(name, median(times.experts_us) / over, "<=", 1.0)
    if cell.preset == "all-resident" and shape.most_ms is not None:
        name = f"{shape.name}, all resident, ms a token of all {shape.moe_layers} layers"
        bench.record.check(name, whole_ms, "<=", shape.most_ms)


def _read_bytes(bench: Bench) -> float:
    """Of weights that a decode step of one sequence reads: dense ones, and K experts of each layer."""
    experts = len(bench.host.layers) * bench.shape.top_k * bench.shape.slot_bytes(bench.context.dtype)
    return bench.built.read_bytes + experts


# -- the host's time of a layer ----------------------------------------------------------------------------------------


def host(context: Context, record: Record) -> None:
    """Mixtral's kernels, Qwen3's small experts, then Qwen's shape in full."""
    torch.set_num_threads(1)
    for name, of in table()["host"].items():
        shape = (TOY if context.toy else REAL)[name]
        if record.has_time(context, 2 * _CASE_S, shape.name):
            cases = of["cases"][-1:] if context.toy else of["cases"]
            _host_shape(context, record, shape, min(of["layers"], shape.moe_layers), cases)
            free_memory(context)


def _host_shape(
    context: Context, record: Record, shape: RealShape, layers: int, cases: Sequence[tuple[str, float]]
) -> None:
    trace_tokens = HOST_PROMPT + HOST_WARM + HOST_TOKENS + 2 * HOST_PROFILED
    trace = draw(trace_tokens, layers, shape.experts, shape.top_k, seed=11)
    with closing(HostExperts()) as experts:
        bench = Bench.of(context, record, shape, experts, layers, trace)
        for number, (preset, budget) in enumerate(cases):
            case = f"{shape.name}, {preset} at {budget:g}"
            if record.has_time(context, _CASE_S, case):
                with record.trying(case, must_run=True):
                    _host_case(bench, preset, budget, table=number == 0)
                free_memory(bench.context)


def _host_case(bench: Bench, preset: str, budget: float, table: bool) -> None:
    context, record, built, replay = bench.context, bench.record, bench.built, bench.replay
    unused = NearData(bench.shape.expert, len(bench.host.layers), threads=1)  # no case here computes near data
    with bench.engine(preset, budget, unused) as engine:
        if table:
            record_kernels(record, bench.shape.name, engine.kernels.plan)
            for note in engine.kernels.plan.notes:
                record.note(f"{bench.shape.name}: {note}")
        built.use(OURS)
        with closing(replay.inside(built.modules, engine.layers)):
            session = Session(built.model, replay, context, preset, engine)
            session.prefill([1] * HOST_PROMPT)
            session.decode(HOST_WARM)
            taken_s = session.decode(HOST_TOKENS // 2)
            with host_passes(engine) as passes:
                session.decode(HOST_TOKENS // 2)
            calls = _device_calls(engine, session, context)
            session.end()
    name = f"{bench.shape.name}, {preset} at {budget:.0%}"
    decode = [one for one in passes if one.tokens == 1]
    host_us = median(one.host_s for one in decode) * 1e6
    parts = {part: median(one.parts[part] for one in decode) * 1e6 for part in PARTS}
    record.row(
        "host", case=name, host_us=host_us, outside_us=median(one.outside_s for one in decode) * 1e6,
        parts_us={part: us for part, us in parts.items() if us}, calls=calls, tpot_ms=taken_s * 1e3,
        layers=len(bench.host.layers),
    )  # fmt: skip
    judge = record.goal if preset in AIMED_AT else record.check
    judge(f"host microseconds of an MoE layer, launches included, {name}", host_us, "<=", LIMIT_US)
    if calls is not None and preset == "all-resident":
        record.goal(f"launches of an MoE layer, {name}", calls["experts"]["launches"], "<=", LAUNCHES)


def record_kernels(record: Record, shape: str, plan: KernelPlan) -> None:
    for measured in plan.times:
        chosen = plan.chosen[measured.row_class] == measured.kernel
        record.row("kernel", shape=shape, chosen=chosen, **asdict(measured))


def _device_calls(engine: ExpertEngine, session: Session, context: Context) -> dict[str, dict[str, float]] | None:
    """A layer's calls of the device: kernels, graphs, copies, waits; inside the experts and in the dense part."""
    if context.device.type != "cuda":
        return None
    try:
        found = device_calls(engine, lambda: session.decode(HOST_PROFILED), tokens=1, skip=1)
    except (ValueError, RuntimeError):  # a profiler without results is no failure of the engine
        return None
    return {"experts": asdict(found.experts), "dense": asdict(found.dense)}
