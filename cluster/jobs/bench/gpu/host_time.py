"""Part `host`: what one MoE layer costs the host in decode, what that consists of, and which kernels were chosen.

A few layers of a real shape do: the time of a layer does not depend on how many there are. Routing is replayed inside
the experts' operator here, so that the dense part around it can be compiled.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from statistics import median

import torch

from .....actors.engine.engine import ExpertEngine
from .....actors.engine.model.compile import CompiledDense
from .....actors.engine.model.kernels import KernelPlan
from .....actors.engine.model.profile import PARTS, device_calls, host_passes
from .....actors.settings import CompileMode
from .....errors import TierMoeError
from .engines import NearData, engine_of, free_memory
from .host_experts import HostExperts
from .locality import draw, fit
from .options import Context
from .record import Record
from .recording import record_locality
from .session import Session
from .shapes import REAL, TOY, RealShape
from .staged import Staged, stage

LAYERS = {"qwen": 6, "mixtral": 2}
CASES: tuple[tuple[str, float, CompileMode], ...] = (
    ("all-resident", 1.0, "off"), ("next-gate", 0.5, "off"), ("on-demand", 0.5, "off"), ("moepic", 0.5, "off"),
    ("all-resident", 1.0, "graphs"), ("next-gate", 0.5, "graphs"),
)  # fmt: skip
PROMPT, WARM, TOKENS, PROFILED = 8, 16, 40, 4
_CASE_S, _COMPILED_S = 3.0, 12.0  # a case that has less time left is not begun
LIMIT_US = 150.0
AIMED_AT = ("moepic",)  # its cut and its predictions cost more: a goal there, a check elsewhere


def run(context: Context, record: Record) -> None:
    """Mixtral's kernels, then Qwen's shape in full: compiling, which may take long, comes last."""
    torch.set_num_threads(1)
    for name, cases in (("mixtral", CASES[:1]), ("qwen", CASES)):
        shape = (TOY if context.toy else REAL)[name]
        if context.left_s < 2 * _CASE_S:
            record.note(f"{shape.name}: no time was left")
            continue
        _shape(context, record, shape, min(LAYERS[name], shape.layers - shape.dense_layers), cases)
        free_memory(context.device)


def _shape(
    context: Context, record: Record, shape: RealShape, layers: int, cases: tuple[tuple[str, float, CompileMode], ...]
) -> None:
    locality, recorded = record_locality(context.device, documents=2, tokens=48)
    sticky = fit(locality, recorded)
    tokens = PROMPT + WARM + TOKENS + 2 * PROFILED
    trace = draw(locality, sticky.share, sticky.decay, tokens, layers, shape.experts, shape.top_k, seed=11)
    host = HostExperts()
    try:
        bench = stage(context, record, shape, host, layers, locality, trace)
        for number, (preset, budget, mode) in enumerate(cases):
            if mode == "graphs" and context.device.type != "cuda":
                record.note("CUDA graphs need a GPU: the compiled cases are left out")
                continue
            if context.left_s < (_CASE_S if mode == "off" else _COMPILED_S):
                record.note(f"{shape.name}, {preset} at {budget:g}, compile {mode}: no time was left")
                continue
            try:
                _case(bench, preset, budget, mode, table=number == 0)
            except (TierMoeError, torch.OutOfMemoryError) as error:
                record.note(f"{shape.name}, {preset} at {budget:g}, compile {mode}: {str(error)[:400]}")
            except Exception as error:
                if mode == "off":
                    raise
                record.note(f"{shape.name}, {preset}, compile {mode} failed: {type(error).__name__}: {error}"[:500])
            free_memory(context.device)
    finally:
        host.close()


def _case(bench: Staged, preset: str, budget: float, mode: CompileMode, table: bool) -> None:
    context, record, built, replay = bench.context, bench.record, bench.built, bench.replay
    nobody = NearData(bench.shape.expert, len(bench.host.layers), threads=1)  # no case here computes near data
    with engine_of(preset, budget, bench.shape, built, bench.host, replay.probes(), context, nobody) as engine:
        if table:
            record_kernels(record, bench.shape.name, engine.kernels.plan)
            for note in engine.kernels.plan.notes:
                record.note(f"{bench.shape.name}: {note}")
        built.use("tiermoe")
        with (
            closing(replay.inside(built.modules, engine.layers)),
            closing(CompiledDense(built.model, built.modules, mode)) as dense,
        ):
            session = Session(built.model, replay, context, preset, engine)
            session.prefill([1] * PROMPT)
            session.decode(WARM)
            taken_s = session.decode(TOKENS // 2)
            with host_passes(engine) as passes:
                session.decode(TOKENS // 2)
            calls = _calls(engine, session, context)
            session.end()
            for note in dense.notes:
                record.note(note)
    name = f"{bench.shape.name}, {preset} at {budget:.0%}" + ("" if mode == "off" else f", compiled: {mode}")
    decode = [one for one in passes if one.tokens == 1]
    host_us = median(one.outside_s for one in decode) * 1e6
    parts = {part: median(one.parts[part] for one in decode) * 1e6 for part in PARTS}
    record.row(
        "host", case=name, host_us=host_us, parts_us={part: us for part, us in parts.items() if us}, calls=calls,
        tpot_ms=taken_s * 1e3, layers=len(bench.host.layers),
    )  # fmt: skip
    judge = record.goal if preset in AIMED_AT else record.check
    judge(f"host microseconds of an MoE layer outside kernels, {name}", host_us, "<=", LIMIT_US)


def record_kernels(record: Record, shape: str, plan: KernelPlan) -> None:
    """What was measured of each kernel at start, and which of them runs."""
    for time in plan.times:
        chosen = plan.chosen[time.row_class] == time.kernel
        record.row("kernel", shape=shape, chosen=chosen, **asdict(time))


def _calls(engine: ExpertEngine, session: Session, context: Context) -> dict[str, dict[str, float]] | None:
    """What a layer gives the device: kernels, graphs, copies, waits; inside the experts and in the dense part."""
    if context.device.type != "cuda":
        return None
    try:
        found = device_calls(engine, lambda: session.decode(PROFILED), tokens=1, skip=1)
    except (ValueError, RuntimeError):  # a profiler that sees nothing is no failure of what it looks at
        return None
    return {"experts": asdict(found.experts), "dense": asdict(found.dense)}
