"""Parts `qwen`, `qwen3`, `mixtral`, `deepseek`: decode of random-weight models in real shapes, against the references.

    synthetic trace at this shape -> replayed in every case alike
    each case: prefill, warm tokens, then [ours, all-resident transformers] x 5 in turn

Part `host`: the host time of one MoE layer in decode, by component, and the chosen kernels. A few layers of a real
shape suffice. Routing is replayed inside the experts' operator there.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from tiermoe.actors.budget import Budget, most_recordings
from tiermoe.actors.engine.engine import ExpertEngine, PeerLinks
from tiermoe.actors.engine.host_times import PARTS, device_calls, host_passes
from tiermoe.actors.engine.make_cache import ModelExperts
from tiermoe.actors.engine.make_device import make_device
from tiermoe.actors.engine.model.attention import steady_sdpa
from tiermoe.actors.engine.model.kernels import KernelPlan
from tiermoe.actors.engine.peers.matcher import MatcherLink
from tiermoe.actors.policies.routing import SequenceRows
from tiermoe.actors.settings import EngineSettings, KvSettings, LinkSettings
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
from .run_parts import NO_TIME, Context, Record
from .transfers import Peaks, record_peaks, spread_of

LRU_SHARES = (0.1, 0.25, 0.5, 0.75)  # of a layer's experts in an LRU cache, whose hit rate the trace's row has
IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")
GOALS = {0.5: 0.8, 0.1: 0.65}
OURS = "tiermoe"
PROMPT, SLOW_TOKENS = 16, 3
_SLOW_S = 0.06  # a slower token is measured in shorter pieces
_FIRST_S = 5.0  # estimate of a case before any has run
_OFFLOAD_TOKENS = 2
_OFFLOAD_S = 12.0  # reserved for it at the end

HOST_PROMPT, HOST_WARM, HOST_TOKENS, HOST_PROFILED = 8, 16, 40, 4
_CASE_S = 3.0  # a case of `host` with less time left does not start
LIMIT_US = 150.0  # of the host for an MoE layer, launches included
LAUNCHES = 5  # the routing to the host, the table of tiles, gate_up, down, combine
AIMED_AT = ("moepic",)  # its split and its predictions cost more: a goal, not a check


@dataclass(frozen=True)
class Cell:
    """One preset at one budget, with `batch` sequences."""

    preset: str
    budget: float
    batch: int = 1

    def __str__(self) -> str:
        return f"{self.preset} at {self.budget:g}" + (f", batch {self.batch}" if self.batch > 1 else "")


def cells_by_worth(toy: bool, every_preset: bool = True) -> list[Cell]:
    """The cells of a shape, by cells.yaml.

    Args:
        every_preset: of a toy run, which tries each preset on one shape.
    """
    groups = _table()["real" if not toy else "toy" if every_preset else "toy of another shape"]
    return list(dict.fromkeys(
        Cell(preset, budget, group.get("batch", 1))
        for group in groups for budget, preset in product(group["budgets"], group["presets"])
    ))  # fmt: skip


@dataclass(frozen=True)
class Pieces:
    """Tokens of a case before it is measured, of each of its pieces, and how many pieces there are."""

    warm: int = 24
    tokens: int = 8
    repeats: int = 5

    @staticmethod
    def of(context: Context) -> Pieces:
        return Pieces(4, 2, 2) if context.toy else Pieces()


def _table() -> dict[str, Any]:
    return read_yaml(Path(__file__).with_name("cells.yaml"))


class Session:
    """Sequences on one model through transformers' own forward and cache: greedy; the host reads each token.

    Without `engine`, the model runs its experts itself. batch: sequences, which the host sees as one forward's rows.
    """

    def __init__(
        self, model: Any, replay: Replay, context: Context, name: str, engine: Any = None, batch: int = 1
    ) -> None:
        self._model, self._replay, self._context = model, replay, context
        self._names, self._engine = [f"{name} {i}" for i in range(batch)], engine
        self._cache: Any = None
        self._next = [0] * batch
        self.position = 0

    def prefill(self, prompt: list[int]) -> None:
        prompts = [[token + i for token in prompt] for i in range(len(self._names))]
        self._next = self._forward(torch.tensor(prompts, device=self._context.device), decode=False)

    def decode(self, tokens: int) -> float:
        """Run this many tokens; return seconds per token."""
        self._context.synchronize()
        begin_s = time.perf_counter()
        for _ in range(tokens):
            tokens_now = [[token] for token in self._next]
            self._next = self._forward(torch.tensor(tokens_now, device=self._context.device), decode=True)
        self._context.synchronize()
        return (time.perf_counter() - begin_s) / tokens

    def end(self) -> None:
        self._cache = None
        if self._engine is not None:
            for name in self._names:
                self._engine.end_sequence(name)

    @torch.no_grad()
    def _forward(self, ids: torch.Tensor, decode: bool) -> list[int]:
        batch, rows = ids.shape
        self._replay.begin(self.position, rows, batch)
        if self._engine is not None:
            spans = [SequenceRows(name, i * rows, (i + 1) * rows, decode) for i, name in enumerate(self._names)]
            self._engine.begin_forward(spans)
        out = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True)
        self._cache = out.past_key_values
        self.position += rows
        return list(map(int, out.logits[:, -1].argmax(dim=-1).tolist()))


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
            host.add(shape.expert, context.dtype, context.device, seed=layer)
        built = build_random_model(shape, layers, context.dtype, context.device)
        replay = Replay(trace, built.router_weights(), context.device, context.dtype)
        return Bench(context, record, shape, built, host, replay, trace)

    def session(self, name: str, engine: ExpertEngine | None = None, batch: int = 1) -> Session:
        made = Session(self.built.model, self.replay, self.context, name, engine, batch)
        made.prefill([(7 * i + 1) % 200 for i in range(PROMPT)])
        return made

    @contextmanager
    def engine(self, preset: str, budget: float, near_data: NearData) -> Iterator[ExpertEngine]:
        """An engine without a store, with the replay's routers, and a matcher and the NDP worker if the preset uses
        them.

        `near_data` outlives it unless something fails.

        Raises:
            TierMoeError: the preset does not work with that budget or model.
        """
        policy, shape, device = load_policy(preset), self.shape, self.context.device
        layers, expert = len(self.host.layers), shape.expert
        settings = EngineSettings(
            policy=policy, budget=Budget(share=budget), device=device.type, link=LinkSettings(gbps=None),
            ndp=near_data.settings,
        )
        routers = zip(self.built.blocks, self.replay.probes(), strict=True)
        blocks = [replace(block, router=probe) for block, probe in routers]
        embedding = self.built.model.get_input_embeddings()
        before = set(embedding._forward_hooks)

        def remove_hooks() -> None:  # those of the engine, which would keep its memory
            for number in set(embedding._forward_hooks) - before:
                del embedding._forward_hooks[number]

        with ExitStack() as stack:
            links, matcher, replicas = [], None, None
            if policy.uses_ndp:
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
                ModelExperts(expert, self.host.layers, self.context.dtype, shape.top_k, replicas=replicas),
                blocks,
                made,
                PeerLinks(links, matcher=matcher),
                artifacts,
                random_tables(layers, shape.experts) if policy.uses_ndp and tables else None,
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
    shape = (TOY if context.toy else REAL)[record.part]
    torch.set_num_threads(1)
    steady_sdpa()  # the references, too: they run before the first engine
    begin_s = time.monotonic()
    layers = moe_layers(shape, context)
    pieces = Pieces.of(context)
    tokens = PROMPT + pieces.warm + (pieces.repeats + 1) * pieces.tokens
    trace = draw(tokens, layers, shape.experts, shape.top_k, seed=7)
    sizes = {f"{share:g}": max(shape.top_k, round(share * shape.experts)) for share in LRU_SHARES}
    lru = hit_rates(trace.ids.transpose(1, 0, 2), tuple(sizes.values()), policies(("lru",)))
    record.row(
        "trace", shape=shape.name, family=FAMILY, tokens=tokens, recalls=FAMILIES[FAMILY].recalls,
        hit_rates={share: row.overall for share, row in zip(sizes, lru, strict=True)},
    )  # fmt: skip
    peaks = record_peaks(context, record)
    with closing(HostExperts()) as host:
        bench = Bench.of(context, record, shape, host, layers, trace)
        built = bench.built
        bench.replay.attach(built.modules)
        record.row(
            "shape", shape=shape.name, moe_layers=layers, all_moe_layers=shape.moe_layers,
            experts=shape.experts, top_k=shape.top_k, expert_bytes=shape.expert.nbytes(context.dtype.itemsize),
            expert_memory_bytes=host.nbytes, dense_bytes=built.dense_bytes, host_memory=sorted(set(host.how)),
            dtype=str(context.dtype).removeprefix("torch."), setup_s=time.monotonic() - begin_s,
        )  # fmt: skip
        with built.own_experts(context.device):
            fastest = _references(bench)
            threads = 1 if context.toy else max(1, usable_cores() - 3)
            with closing(NearData(shape.expert, layers, threads)) as near_data:
                _served(bench, near_data, peaks)
                _cases(bench, near_data, fastest, peaks)
        free_memory(bench.context)
        _offload(bench, fastest)
        bench.replay.close()


def _references(bench: Bench) -> str:
    """Time each of transformers' experts implementations with all experts resident; the fastest one's name."""
    shape, record = bench.shape, bench.record
    found: dict[str, float] = {}
    for name in IMPLEMENTATIONS:
        with record.trying(f"{shape.name}, transformers {name}"):  # what this machine cannot run is no reference
            bench.built.use(name)
            session = Session(bench.built.model, bench.replay, bench.context, name)
            session.prefill([1] * PROMPT)
            session.decode(3)
            values = [session.decode(Pieces.of(bench.context).tokens // 2) * 1e3 for _ in range(3)]
            found[name] = median(values)
            record.row("reference", shape=shape.name, case=f"transformers {name}", tpot_ms=spread_of(values))
    if not found:
        raise RuntimeError("none of transformers' experts implementations runs")
    return min(found, key=lambda name: found[name])


SERVED = (
    ("all-resident", 1.0), ("auto", 0.5), ("next-gate", 0.5), ("on-demand", 0.5), ("auto", 0.25), ("next-gate", 0.25),
)  # fmt: skip
_SERVED_KV = KvSettings(page_size=16, tokens=512, max_batch_tokens=256, max_num_seqs=4, prefix_cache=False)


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


def _served(bench: Bench, near_data: NearData, peaks: Peaks) -> None:
    """The product's own decode steps on this model: as CUDA graphs, cut at the experts, on a GPU."""
    context, record, shape = bench.context, bench.record, bench.shape
    if hasattr(bench.built.model.config, "kv_lora_rank"):  # latent attention
        record.note(f"{shape.name}: its attention has no paged cache, so its steps are no graphs")
        return
    bench.replay.close()  # inside the experts' operator, since no graph may hold what changes from step to step
    for preset, budget in SERVED[:2] if context.toy else SERVED:
        case = f"{shape.name}, served, {preset} at {budget:g}"
        if record.has_time(context, _FIRST_S, case):
            with record.trying(case, must_run=True), bench.engine(preset, budget, near_data) as engine:
                _served_case(bench, engine, preset, budget, peaks)
            free_memory(context)
    bench.replay.attach(bench.built.modules)


def _served_case(bench: Bench, engine: ExpertEngine, preset: str, budget: float, peaks: Peaks) -> None:
    from tiermoe.actors.engine.serving.batching import ContinuousBatcher
    from tiermoe.actors.engine.serving.recorded import Recorded

    model, gpu = bench.built.model, bench.context.device.type == "cuda"
    tokens, of = bench.trace.ids.shape[0] - PROMPT - 1, Pieces.of(bench.context)
    told = _Told(engine, bench.replay, of.warm)
    bench.built.use(OURS)
    with (
        bench.replay.inside(bench.built.modules, engine.layers),
        closing(ContinuousBatcher(model, _SERVED_KV, told, "triton" if gpu else "auto")) as batcher,
    ):
        most = most_recordings(_SERVED_KV.max_num_seqs, _SERVED_KV.tokens)
        recorded = Recorded(model, most) if gpu else None
        if recorded is not None:
            batcher.record(recorded)
        prompt = tuple((7 * i + 1) % 200 for i in range(PROMPT))
        for _ in range(2):  # the first records
            between_s = list[float]()
            serve(batcher.submit, [prompt], tokens, between_s=between_s)
        loaded = engine.stats().total().bytes_loaded - told.loaded
    pieces = [
        fmean(between_s[at : at + of.tokens]) * 1e3
        for at in range(of.warm, len(between_s) - of.tokens + 1, of.tokens)
    ]
    per_token = loaded / (tokens - of.warm)
    bench.record.row(
        "served", shape=bench.shape.name, preset=preset, budget=budget, tpot_ms=spread_of(pieces),
        graphs=recorded is not None and recorded.problem is None, mb_per_token=per_token / 1e6,
        floor_link_ms=per_token / peaks.h2d / 1e6, floor_read_ms=_read_bytes(bench, 1, 0.0) / peaks.hbm / 1e6,
    )  # fmt: skip
    if recorded is not None:
        name = f"{bench.shape.name}, {preset} at {budget:g}: steps that were graphs"
        bench.record.check(name, recorded.replays, ">=", tokens)


def _cases(bench: Bench, near_data: NearData, reference: str, peaks: Peaks) -> None:
    """Run the cells that no earlier call has measured, the most important first; note those without time."""
    context, record = bench.context, bench.record
    best: dict[float, tuple[float, str]] = {}
    skipped: list[str] = []
    measured = {(row["preset"], row["budget"], row["batch"]) for row in record.rows if row["kind"] == "decode"}
    took_s: list[float] = []
    reserve_s = 4.0 if context.toy or find_spec("accelerate") is None else _OFFLOAD_S
    for cell in cells_by_worth(context.toy, every_preset=bench.shape.name == TOY["qwen"].name):
        case = f"{bench.shape.name}, {cell}"
        if (cell.preset, cell.budget, cell.batch) in measured:
            continue
        # the first case measures and compiles kernels, which no other does
        if context.left_s < (took_s[-1] if len(took_s) > 1 else _FIRST_S) + reserve_s:
            skipped.append(str(cell))
            continue
        begin_s, speed = time.monotonic(), 0.0
        with record.trying(case, must_run=True):
            speed = _case(bench, cell, near_data, reference, peaks)
        free_memory(bench.context)
        took_s.append(time.monotonic() - begin_s)
        if cell.batch == 1 and load_policy(cell.preset).lossless and speed > best.get(cell.budget, (0.0, ""))[0]:
            best[cell.budget] = speed, cell.preset
    if skipped:
        record.note(f"{bench.shape.name}: {NO_TIME} for {', '.join(skipped)}")
    for budget, (speed, preset) in best.items():
        if budget in GOALS:
            name = f"{bench.shape.name}, {budget:.0%} resident: speed of {preset} over all-resident transformers"
            record.goal(name, speed, ">=", GOALS[budget])


def _case(bench: Bench, cell: Cell, near_data: NearData, reference: str, peaks: Peaks) -> float:
    """Measure one cell beside the reference; its speed over the reference's."""
    preset, budget, batch = cell.preset, cell.budget, cell.batch
    built, shape, policy, of = bench.built, bench.shape, load_policy(preset), Pieces.of(bench.context)
    with bench.engine(preset, budget, near_data) as engine:
        built.use(OURS)
        ours = bench.session(f"{preset}-{budget}", engine, batch)
        warm_s = ours.decode(of.warm)
        tokens = min(of.tokens, SLOW_TOKENS if warm_s >= _SLOW_S else of.tokens)
        built.use(reference)
        theirs = bench.session("reference", batch=batch)
        theirs.decode(2)
        engine.reset_stats()
        times: list[tuple[float, float]] = []
        for _ in range(of.repeats):
            built.use(OURS)
            mine_s = ours.decode(tokens)
            built.use(reference)
            theirs.position = ours.position - tokens  # the same tokens of the trace
            times.append((mine_s, theirs.decode(tokens)))
        engine.cache.settle_times()
        row = _counted(bench, engine, of.repeats * tokens, batch, peaks)
        if policy.uses_ndp:
            row |= _ndp_times(engine, of.repeats * tokens)
        ours.end()
        row["kernels"] = engine.kernels.plan.as_dict()["chosen"]
    speed = median(theirs_s / mine_s for mine_s, theirs_s in times)
    bench.record.row(
        "decode", shape=shape.name, preset=preset, lossless=policy.lossless, budget=budget, batch=batch,
        speed=speed,
        tpot_ms=spread_of([mine_s * 1e3 for mine_s, _ in times]), tokens=tokens,
        reference_ms=spread_of([theirs_s * 1e3 for _, theirs_s in times]), reference=reference, **row,
    )  # fmt: skip
    if preset == "on-demand" and batch == 1:
        asked = row["experts_asked_per_layer"]
        bench.record.check(
            f"{shape.name} at {budget:g}: experts that a layer asked for per token over K", asked / shape.top_k, "<=",
            1.0, always=True,
        )  # fmt: skip
    return speed


def _counted(bench: Bench, engine: ExpertEngine, tokens: int, batch: int, peaks: Peaks) -> dict[str, Any]:
    """Counters per decode step, and the implied floor: bytes over the link, weights over the device's memory."""
    stats = engine.stats()
    total = stats.total()
    loaded = total.bytes_loaded / tokens
    asked = (total.hits + total.misses) / tokens / len(stats.layers)
    link_ms, read_ms = loaded / peaks.h2d / 1e6, _read_bytes(bench, batch, asked) / peaks.hbm / 1e6
    return {
        "hit_rate": stats.hit_rate, "mb_per_token": loaded / 1e6, "blocked_ms": total.blocked_io_s / tokens * 1e3,
        "link_ms": total.link_s / tokens * 1e3, "wasted_mb_per_token": total.bytes_wasted / tokens / 1e6,
        "floor_link_ms": link_ms, "floor_read_ms": read_ms, "floor_ms": link_ms + read_ms,
        "experts_asked_per_layer": asked, "writeback_ms": total.writeback_link_s / tokens * 1e3,
        "writeback_blocked_ms": total.writeback_blocked_s / tokens * 1e3,
    }  # fmt: skip


def _read_bytes(bench: Bench, batch: int, asked: float) -> float:
    """Of weights that a decode step reads: dense ones, and each layer's experts: K for one sequence, else `asked`."""
    expert = bench.shape.expert.nbytes(bench.context.dtype.itemsize)
    experts = bench.shape.top_k if batch == 1 else asked
    return bench.built.read_bytes + len(bench.host.layers) * experts * expert


def _ndp_times(engine: ExpertEngine, tokens: int) -> dict[str, Any]:
    total, layers = engine.stats().total(), len(engine.stats().layers)
    calls = max(1, total.ndp_calls)
    return {
        "ndp": {
            "calls_per_token": total.ndp_calls / tokens, "experts_per_layer": total.ndp_experts / tokens / layers,
            "wait_us_per_call": total.ndp_wait_s / calls * 1e6,
            "kernel_us_per_call": total.ndp_measured_s / calls * 1e6, "recomputed": total.ndp_recomputed,
            "transports": {name: peer.transport for name, peer in engine.peers.items()},
        }
    }  # fmt: skip


def _offload(bench: Bench, reference: str) -> None:
    """Measure accelerate's offload of the experts, the common way to run a model that does not fit."""
    context, record, case = bench.context, bench.record, f"{bench.shape.name}, accelerate's CPU offload"
    if find_spec("accelerate") is None:
        record.note(f"{case} was not measured: accelerate is not installed")
        return
    if not record.has_time(context, _OFFLOAD_S / 2, case):
        return
    bench.built.use(reference)
    with record.trying(case), _offloaded(bench):  # what this machine cannot run is no reference
        session = bench.session("offload")
        session.decode(1)
        values = [session.decode(_OFFLOAD_TOKENS) * 1e3 for _ in range(2)]
        record.row("offload", shape=bench.shape.name, case="accelerate CPU offload", tpot_ms=spread_of(values))


@contextmanager
def _offloaded(bench: Bench) -> Iterator[None]:
    """Experts in host memory under accelerate's own hooks; their parameters are on meta before and after.

    The hooks copy whole layers from views of our pinned experts (random numbers fit any layout): faster than the
    pageable copies of `cpu_offload`, and without further memory.
    """
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module

    device = bench.context.device
    for module, layer in zip(bench.built.modules, bench.host.layers, strict=True):
        gate_up, down = layer.tensors
        weights = {
            "gate_up_proj": gate_up.view(module.gate_up_proj.shape), "down_proj": down.view(module.down_proj.shape),
        }  # fmt: skip
        hook = AlignDevicesHook(execution_device=device, offload=True, io_same_device=False, weights_map=weights)
        add_hook_to_module(module, hook)
    try:
        yield
    finally:
        for module in bench.built.modules:
            remove_hook_from_module(module)


def host(context: Context, record: Record) -> None:
    """Mixtral's kernels, Qwen3's small experts, then Qwen's shape in full."""
    torch.set_num_threads(1)
    for name, of in _table()["host"].items():
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
