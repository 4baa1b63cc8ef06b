"""`bench core`: microseconds of the core in a layer, by preset and as the model grows; layer steps of the simulator.

No kernel and no copy takes time: what is measured decides and accounts (`core::VirtualRun`, with a policy's Python).
The simulator's layer steps a second are of its whole time on one thread, reading the trace apart.
The second table is of random routing, so that each layer has as many misses whatever the model's size; a victim and a
layer's bookkeeping should then cost the same.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np
from rich.progress import Progress

from tiermoe.actors.budget import Budget
from tiermoe.actors.core import _core
from tiermoe.actors.policies.eviction import core_order
from tiermoe.actors.policies.registry import PolicyContext, options
from tiermoe.actors.policies.slot_classes import make_eviction
from tiermoe.cluster.config import default_model_dir, load_policy
from tiermoe.cluster.jobs.bench.metrics import Bar, Report, advancing
from tiermoe.cluster.jobs.replay import engine_for
from tiermoe.cluster.simulate.hit_rates import serve
from tiermoe.cluster.simulate.machine import load_machine
from tiermoe.cluster.simulate.recorded import RecordedForward
from tiermoe.cluster.simulate.trace import Trace

from .cases import Core

MOST_US = {"all-resident": 2.0, "on-demand": 4.0, "next-gate": 8.0, "moepic": 15.0}
GROWTH = 1.3
STEPS = {"on-demand": 100_000, "next-gate": 100_000, "moepic": 50_000, "fmoe": 20_000}  # of the simulator a second
SHAPES = ((16, 32), (24, 64), (48, 128), (61, 256))  # layers and experts
TOP, SHARE, FORWARDS = 8, 0.25, 40


def core(case: Core, progress: Progress | None) -> Report:
    """Bars: microseconds of a layer, and the simulator's steps, by preset; at the largest shape at most 1.3 times the
    microseconds of the smallest.
    """
    report = Report("core", "simulated", settings=case.settings(top_k=TOP, share=SHARE))
    total = case.repeats * (len(case.preset) + len(case.order) * len(SHAPES))
    step = advancing(progress, "deciding", total)
    for name in case.preset:
        found = []
        for _ in range(case.repeats):
            found.append(_replayed(name))
            step()
        layers_us, rates = zip(*found, strict=True)
        row = {
            "policy": name, "layer_us": median(layers_us), "least": min(layers_us), "most": max(layers_us),
            "steps_per_s": median(rates),
        }  # fmt: skip
        report.rows.append(row)
        if name in MOST_US:
            report.bars.append(Bar(f"microseconds of a layer, {name}", row["layer_us"], "<=", MOST_US[name]))
        if name in STEPS:
            report.bars.append(Bar(f"layer steps a second, {name}", row["steps_per_s"], ">=", STEPS[name]))
    for kind in case.order:
        curve = list[float]()
        for layers, experts in SHAPES:
            runs = []
            for _ in range(case.repeats):
                runs.append(_random(kind, layers, experts))
                step()
            layer_us, misses = median(us for us, _ in runs), runs[0][1]
            curve.append(layer_us)
            report.rows.append(
                {"order": kind, "layers": layers, "experts": experts, "layer_us": layer_us, "misses": misses}
            )
        report.bars.append(Bar(f"growth of a layer's microseconds, {kind}", curve[-1] / curve[0], "<=", GROWTH))
    return report


def _replayed(preset: str) -> tuple[float, float]:
    """Microseconds of a layer, and the simulator's layer steps a second, on the project's recorded routing."""
    trace, settings = Trace(default_model_dir() / "routing"), load_policy(preset)
    header, requests = trace.header, list(trace.requests())
    budget = Budget(share=1.0 if settings.preload == "all" else SHARE)
    engine = engine_for(settings, header, load_machine(header, None, 16.0, 10.0), budget)
    layers, spent_s = engine.layers, [0.0]

    def timed(forward: RecordedForward, dense_s: float) -> None:
        begin_s = time.thread_time()
        layers(forward, dense_s)
        spent_s[0] += time.thread_time() - begin_s

    engine.layers = timed  # type: ignore[method-assign]
    begin_s = time.thread_time()
    steps = serve(engine, requests).forwards * header.layers
    return spent_s[0] / steps * 1e6, steps / (time.thread_time() - begin_s)


def _random(kind: str, layers: int, experts: int) -> tuple[float, float]:
    """Microseconds and misses of a layer under an order of eviction, once the slots are full."""
    keys, slots = layers * experts, int(layers * experts * SHARE)
    policy = make_eviction(options("eviction", kind), PolicyContext(layers, experts, TOP))
    order = core_order(policy, layers * experts)
    clock = _core.Clock()
    link = _core.VirtualLink(clock, lambda nbytes: 0.0, 0.0)
    layout = _core.Layout(layers, experts, 1, [], [slots], [], [1] * keys, False, slots)
    decides = _core.Core(layout, link, order, _core.Governor(0.0), False)
    run = _core.VirtualRun(decides, link, clock, 1e-6, 0.0, 1.0, 0.0, 0.0, 1)
    rng = np.random.default_rng(0)

    forwards = [
        np.argsort(rng.random((layers, experts)), axis=1)[:, None, :TOP].astype(np.int64, "C")
        for _ in range(FORWARDS + 2 * slots // (layers * TOP))
    ]
    spent_s, missed = 0.0, 0
    for number, ids in enumerate(forwards):
        before, begin_s = decides.summed.misses, time.thread_time()
        run.forward(ids, 0.0)
        if number >= len(forwards) - FORWARDS:
            spent_s += time.thread_time() - begin_s
            missed += decides.summed.misses - before
    return spent_s / (FORWARDS * layers) * 1e6, missed / (FORWARDS * layers)
