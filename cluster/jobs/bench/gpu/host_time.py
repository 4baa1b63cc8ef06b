"""Part `host`: what one MoE layer costs the host in decode, what that consists of, and which kernels were chosen.

A few layers of a real shape do: the time of a layer does not depend on how many there are.
"""

from __future__ import annotations

from dataclasses import asdict

import torch

from .....errors import TierMoeError
from .engines import engine_of, free_memory
from .host_experts import HostExperts
from .host_parts import host_parts, launches
from .locality import draw, fit
from .options import Context
from .random_models import RandomModel, build_random_model
from .record import Record
from .recording import record_locality
from .replay import Replay
from .session import Session
from .shapes import REAL, TOY, RealShape

LAYERS = {"qwen": 6, "mixtral": 2}
CASES = (("all-resident", 1.0), ("next-gate", 0.5), ("on-demand", 0.5), ("moepic", 0.5))
WARM, TOKENS, PROFILED = 16, 40, 4
LIMIT_US = 150.0


def run(context: Context, record: Record) -> None:
    """Qwen's shape in full, of Mixtral's the kernels alone."""
    torch.set_num_threads(1)
    for name, layers in LAYERS.items():
        shape = (TOY if context.toy else REAL)[name]
        if context.left_s < 6.0:
            record.note(f"{shape.name}: no time was left")
            continue
        _shape(context, record, shape, min(layers, shape.layers), CASES if name == "qwen" else CASES[:1])
        free_memory(context.device)


def _shape(
    context: Context, record: Record, shape: RealShape, layers: int, cases: tuple[tuple[str, float], ...]
) -> None:
    locality, recorded = record_locality(context.device, documents=2, tokens=48)
    sticky = fit(locality, recorded)
    tokens = 8 + WARM + TOKENS + PROFILED
    trace = draw(locality, sticky.share, sticky.decay, tokens, layers, shape.experts, shape.top_k, seed=11)
    host = HostExperts()
    try:
        for layer in range(layers):
            host.add(shape.expert, context.dtype, context.device, seed=layer)
        built = build_random_model(shape, layers, context.dtype, context.device)
        replay = Replay(trace, locality.recalls, built.router_weights(), context.device, context.dtype)
        replay.attach(built.modules)
        for number, (preset, budget) in enumerate(cases):
            try:
                _case(context, record, shape, built, host, replay, preset, budget, table=number == 0)
            except TierMoeError as error:
                record.note(f"{shape.name}, {preset} at {budget:g}: {error}")
            free_memory(context.device)
        replay.close()
    finally:
        host.close()


def _case(
    context: Context, record: Record, shape: RealShape, built: RandomModel, host: HostExperts, replay: Replay,
    preset: str, budget: float, table: bool,
) -> None:  # fmt: skip
    layers = len(host.layers)
    with engine_of(preset, budget, shape, built, host, replay.probes(), context, 1) as engine:
        if table:
            for time in engine.kernels.plan.times:
                record.row("kernel", shape=shape.name, **asdict(time))
            for note in engine.kernels.plan.notes:
                record.note(f"{shape.name}: {note}")
        built.use("tiermoe")
        session = Session(built.model, replay, context, preset, engine)
        session.prefill([1] * 8)
        session.decode(WARM)
        with host_parts(engine) as found:
            taken_s = session.decode(TOKENS)
        counted = launches(lambda: session.decode(PROFILED), context.device)
        session.end()
    name = f"{shape.name}, {preset} at {budget:.0%}"
    host_us = found.outside_us()
    record.row(
        "host", case=name, host_us=host_us, parts_us=found.medians_us(), tpot_ms=taken_s * 1e3,
        launches=None if counted is None else counted / PROFILED / layers,
    )  # fmt: skip
    record.check(f"host microseconds of an MoE layer outside kernels, {name}", host_us, "<=", LIMIT_US)
