"""Parts `qwen`, `mixtral`, `deepseek`: decode of random-weight models in real shapes, ours against the references.

    locality of the default model -> trace for this shape -> replayed in every case alike
    each case: prefill, warm tokens, then [ours, all-resident transformers] x 5 in turn
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from .....actors.engine.engine import ExpertEngine
from .....errors import TierMoeError
from ....config import load_policy
from ....host import usable_cores
from .engines import NearData, engine_of, free_memory
from .host_experts import HostExperts
from .locality import Locality, draw, fit, lru_hit_rates
from .machine import Peaks, peaks, spread_of
from .memory import moe_layers
from .offload import offload_problem, offloaded
from .options import Context
from .random_models import RandomModel, own_experts
from .record import Record
from .recording import record_locality
from .replay import Replay
from .session import Session
from .shapes import REAL, TOY, RealShape
from .staged import Staged, stage

PRESETS = (
    "on-demand", "next-gate", "moepic", "mixtral-offloading", "context-ndp-3bit", "activeevict", "fmoe", "hobbit",
)  # fmt: skip
BUDGETS = (0.5, 0.1, 0.25, 1.0)  # the order of importance
ALL = "all-resident"  # ours with everything loaded before the first token; at budget 1.0 only
IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")
GOALS = {0.5: 0.8, 0.1: 0.65}
OURS = "tiermoe"
PROMPT, WARM, TOKENS, SLOW_TOKENS, REPEATS = 16, 24, 8, 3, 5
_SLOW_S = 0.06  # a token that takes longer is measured in shorter pieces
_FIRST_S = 5.0  # what a case takes, as long as none has shown it
_OFFLOAD_TOKENS = 2
_OFFLOAD_S = 12.0  # kept for it at the end


@dataclass(frozen=True)
class Bench(Staged):
    """And what they are measured against."""

    peaks: Peaks
    near_data: NearData
    reference: str  # the fastest of transformers' experts implementations

    def session(self, name: str, engine: ExpertEngine | None = None) -> Session:
        """A new sequence, with its prompt run."""
        made = Session(self.built.model, self.replay, self.context, name, engine)
        made.prefill([(7 * i + 1) % 200 for i in range(PROMPT)])
        return made

    @property
    def read_bytes(self) -> int:
        """Weights that a decode step reads: dense ones, and K experts of each layer."""
        expert = self.shape.expert.nbytes(self.context.dtype.itemsize)
        return self.built.read_bytes + len(self.host.layers) * self.shape.top_k * expert


def run(context: Context, record: Record, name: str) -> None:
    """All cases of one shape, as far as time allows."""
    shape = (TOY if context.toy else REAL)[name]
    torch.set_num_threads(1)
    begin_s = time.monotonic()
    layers = moe_layers(shape, context)
    locality, trace = _trace(context, record, shape, layers)
    found = peaks(context)
    record.row("peaks", h2d_gbps=found.h2d, d2h_gbps=found.d2h, hbm_gbps=found.hbm)
    host = HostExperts()
    try:
        staged = stage(context, record, shape, host, layers, locality, trace)
        built, replay = staged.built, staged.replay
        replay.attach(built.modules)
        record.row(
            "shape", shape=shape.name, moe_layers=layers, all_moe_layers=shape.layers - shape.dense_layers,
            experts=shape.experts, top_k=shape.top_k, expert_bytes=shape.expert.nbytes(context.dtype.itemsize),
            expert_memory_bytes=host.nbytes, dense_bytes=built.dense_bytes, host_memory=sorted(set(host.how)),
            dtype=str(context.dtype).removeprefix("torch."), setup_s=time.monotonic() - begin_s,
        )  # fmt: skip
        with own_experts(built, context.device):
            fastest = _references(context, record, built, replay, shape)
            threads = 1 if context.toy else max(1, usable_cores() - 3)
            with closing(NearData(shape.expert, layers, threads)) as near_data:
                bench = Bench(**vars(staged), peaks=found, near_data=near_data, reference=fastest)
                _cases(bench)
        free_memory(context.device)
        _offload(bench)
        replay.close()
    finally:
        host.close()


def parts() -> dict[str, Callable[[Context, Record], None]]:
    """By name of the part."""
    return {name: partial(run, name=name) for name in REAL}


def _trace(context: Context, record: Record, shape: RealShape, layers: int) -> tuple[Locality, Any]:
    """The trace that is replayed, and what it is made after."""
    few = {"documents": 2, "tokens": 48} if context.toy else {}
    locality, recorded_layers = record_locality(context.device, **few)
    sticky = fit(locality, recorded_layers)
    tokens = PROMPT + WARM + (REPEATS + 1) * TOKENS
    trace = draw(locality, sticky.share, sticky.decay, tokens, layers, shape.experts, shape.top_k, seed=7)
    record.row(
        "trace", shape=shape.name, **asdict(locality), fitted=asdict(sticky), tokens=tokens,
        hit_rates_here=lru_hit_rates(trace.ids, shape.experts),
    )  # fmt: skip
    return locality, trace


def _references(context: Context, record: Record, built: RandomModel, replay: Replay, shape: RealShape) -> str:
    """Time each of transformers' experts implementations with all experts resident; the fastest one's name."""
    found: dict[str, float] = {}
    for name in IMPLEMENTATIONS:
        try:
            built.use(name)
            session = Session(built.model, replay, context, name)
            session.prefill([1] * PROMPT)
            session.decode(3)
            values = [session.decode(TOKENS // 2) * 1e3 for _ in range(3)]
        except Exception as error:  # an implementation that this machine cannot run is no reference
            record.note(f"transformers' {name} does not run {shape.name} here: {type(error).__name__}: {error}"[:300])
            continue
        found[name] = float(np.median(values))
        record.row("reference", shape=shape.name, case=f"transformers {name}", tpot_ms=spread_of(values))
    if not found:
        raise RuntimeError("none of transformers' experts implementations runs")
    return min(found, key=lambda name: found[name])


def _cases(bench: Bench) -> None:
    """Presets by budget, the most telling first; what time does not allow is said."""
    context, record = bench.context, bench.record
    best: dict[float, tuple[float, str]] = {}
    skipped: list[str] = []
    budgets: Sequence[float] = (0.5, 1.0) if context.toy else BUDGETS
    took_s: list[float] = []
    reserve_s = 4.0 if context.toy or offload_problem() is not None else _OFFLOAD_S
    for budget in budgets:
        for preset in ((ALL, *PRESETS) if budget == 1.0 else PRESETS):
            # the first case measures and compiles kernels, which no other does
            if context.left_s < (took_s[-1] if len(took_s) > 1 else _FIRST_S) + reserve_s:
                skipped.append(f"{preset} at {budget:g}")
                continue
            begin_s = time.monotonic()
            try:
                speed = _case(bench, preset, budget)
            except (TierMoeError, torch.OutOfMemoryError) as error:
                record.note(f"{bench.shape.name}, {preset} at {budget:g}: {str(error)[:400]}")
                continue
            except Exception as error:  # the other cases are measured all the same; this one fails the run
                if "CUDA error" in str(error):  # the context is gone, and with it every later case
                    raise
                what = "".join(traceback.format_exception(error)[-3:])[-700:]
                record.note(f"{bench.shape.name}, {preset} at {budget:g} failed: {what}")
                record.check(f"{bench.shape.name}, {preset} at {budget:g}: ran", 0, ">=", 1, always=True)
                continue
            finally:
                free_memory(context.device)
                took_s.append(time.monotonic() - begin_s)
            if load_policy(preset).lossless and speed > best.get(budget, (0.0, ""))[0]:
                best[budget] = speed, preset
    if skipped:
        record.note(f"{bench.shape.name}: no time was left for {', '.join(skipped)}")
    for budget, (speed, preset) in best.items():
        if budget in GOALS:
            name = f"{bench.shape.name}, {budget:.0%} resident: speed of {preset} over all-resident transformers"
            record.goal(name, speed, ">=", GOALS[budget])


def _case(bench: Bench, preset: str, budget: float) -> float:
    """Measure one preset at one budget beside the reference; its speed over the reference's."""
    context, shape = bench.context, bench.shape
    with engine_of(
        preset, budget, shape, bench.built, bench.host, bench.replay.probes(), context, bench.near_data
    ) as engine:
        bench.built.use(OURS)
        ours = bench.session(f"{preset}-{budget}", engine)
        warm_s = ours.decode(WARM)
        tokens = TOKENS if warm_s < _SLOW_S else SLOW_TOKENS
        bench.built.use(bench.reference)
        theirs = bench.session("reference")
        theirs.decode(2)
        engine.reset_stats()
        times: list[tuple[float, float]] = []
        for _ in range(REPEATS):
            bench.built.use(OURS)
            mine_s = ours.decode(tokens)
            bench.built.use(bench.reference)
            theirs.position = ours.position - tokens  # the same tokens of the trace
            times.append((mine_s, theirs.decode(tokens)))
        engine.cache.settle_times()
        row = _counted(bench, engine, REPEATS * tokens)
        if load_policy(preset).uses_ndp:
            row |= _ndp_times(engine, REPEATS * tokens)
        ours.end()
        row["kernels"] = engine.kernels.plan.as_dict()["chosen"]
    speed = float(np.median([theirs_s / mine_s for mine_s, theirs_s in times]))
    bench.record.row(
        "decode", shape=shape.name, preset=preset, lossless=load_policy(preset).lossless, budget=budget, speed=speed,
        tpot_ms=spread_of([mine_s * 1e3 for mine_s, _ in times]), tokens=tokens,
        reference_ms=spread_of([theirs_s * 1e3 for _, theirs_s in times]), reference=bench.reference, **row,
    )  # fmt: skip
    if preset == "on-demand":
        asked = row["experts_asked_per_layer"]
        bench.record.check(
            f"{shape.name} at {budget:g}: experts that a layer asked for per token over K", asked / shape.top_k, "<=",
            1.0, always=True,
        )  # fmt: skip
    return speed


def _counted(bench: Bench, engine: ExpertEngine, tokens: int) -> dict[str, Any]:
    """Counters per token, and the floor that they imply: bytes over the link, weights over the device's memory."""
    stats = engine.stats()
    total = stats.total()
    loaded = total.bytes_loaded / tokens
    link_ms, read_ms = loaded / bench.peaks.h2d / 1e6, bench.read_bytes / bench.peaks.hbm / 1e6
    return {
        "hit_rate": stats.hit_rate, "mb_per_token": loaded / 1e6, "blocked_ms": total.blocked_io_s / tokens * 1e3,
        "link_ms": total.link_s / tokens * 1e3, "wasted_mb_per_token": total.bytes_wasted / tokens / 1e6,
        "floor_link_ms": link_ms, "floor_read_ms": read_ms, "floor_ms": link_ms + read_ms,
        "experts_asked_per_layer": (total.hits + total.misses) / tokens / len(stats.layers),
    }  # fmt: skip


def _ndp_times(engine: ExpertEngine, tokens: int) -> dict[str, Any]:
    """Of the calls to the NDP worker: what the compute waited, what its kernels took, the rest of the round trip."""
    total, layers = engine.stats().total(), len(engine.stats().layers)
    calls = max(1, total.ndp_calls)
    transports = {name: peer.transport for name, peer in engine.peers.items()}
    return {
        "ndp": {
            "calls_per_token": total.ndp_calls / tokens, "experts_per_layer": total.ndp_experts / tokens / layers,
            "wait_us_per_call": total.ndp_wait_s / calls * 1e6,
            "kernel_us_per_call": total.ndp_measured_s / calls * 1e6,
            "recomputed": total.ndp_recomputed, "transports": transports,
        }
    }  # fmt: skip


def _offload(bench: Bench) -> None:
    """accelerate's offload of the experts, for a few tokens: the common way to run what does not fit."""
    context, record = bench.context, bench.record
    problem = offload_problem()
    if problem is None and context.left_s < _OFFLOAD_S / 2:
        problem = "no time was left"
    if problem is not None:
        record.note(f"{bench.shape.name}: accelerate's CPU offload was not measured: {problem}")
        return
    bench.built.use(bench.reference)
    try:
        with offloaded(bench.built, bench.host, context.device):
            session = bench.session("offload")
            session.decode(1)
            values = [session.decode(_OFFLOAD_TOKENS) * 1e3 for _ in range(2)]
    except Exception as error:  # what this machine cannot run is no reference
        record.note(f"{bench.shape.name}: accelerate's CPU offload failed: {type(error).__name__}: {error}"[:400])
        return
    record.row("offload", shape=bench.shape.name, case="accelerate CPU offload", tpot_ms=spread_of(values))
