"""Do the device and the NDP worker really work at the same time? Layer times against the longer of their two parts.

The worker is paced to a modelled device whose time is near the device's own (the case in which overlap matters
most), and decode steps of a random model with real-sized experts are taken apart, layer by layer:

    layer = from sending to the NDP worker until the layer's experts are combined
    GPU part = layer - time that the compute waited for the worker
    NDP part = the worker's own time for its answer, pacing included
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.progress import Progress

from ...config import RunConfig, engine_settings, load_hardware
from ...local import LocalWorker
from ..prepare import prepare
from .metrics import Spread, ratio
from .random_model import MoeShape, save_random_model
from .serving import serve

SHAPE = MoeShape(layers=2, experts=16, top_k=8, hidden=1024, intermediate=2048)
MEMORY_GBPS = 2.0  # of the modelled device: slow enough for one CPU thread to keep its pace
_PROMPT = tuple(range(3, 35))
_TOKENS = 12


@dataclass(frozen=True)
class LayerTime:
    """One layer of one decode step, seconds."""

    layer_s: float
    gpu_s: float
    ndp_s: float


@dataclass(frozen=True)
class Overlap:
    """Medians over layers and steps, and what each layer took relative to its parts.

    over_longer: layer / max(GPU part, NDP part); over_sum: layer / their sum.
    """

    layers: int
    layer_s: float
    gpu_s: float
    ndp_s: float
    over_longer: Spread
    over_sum: Spread


def bench_overlap(repeats: int, progress: Progress | None = None) -> Overlap:
    """Measure; each repeat is one request of `_TOKENS` decode steps."""
    task = progress.add_task("overlap", total=repeats + 1) if progress is not None else None
    with tempfile.TemporaryDirectory(prefix="tiermoe-overlap-") as folder:
        checkpoint = save_random_model(SHAPE, Path(folder) / "model")
        store = prepare(checkpoint, Path(folder) / "store", progress=False)
        config = RunConfig(policy="context-ndp-full", budget=0.5, device="cpu", threads=1)
        profile = replace(load_hardware(config.ndp.hardware), name="overlap", memory_gbps=MEMORY_GBPS)
        settings = engine_settings(config, trace=True)
        paced = settings.ndp.model_copy(update={"pace": True, "hardware": asdict(profile)})
        worker = LocalWorker(settings.model_copy(update={"ndp": paced}), store)
        times: list[LayerTime] = []
        try:
            worker.start()
            for round_number in range(repeats + 1):
                worker.reset_stats()
                serve(worker.submit, [_PROMPT], _TOKENS)
                if round_number:  # the first one warms up
                    times += layer_times(worker.trace_events())
                if progress is not None and task is not None:
                    progress.advance(task)
        finally:
            worker.close()
    return Overlap(
        layers=len(times),
        layer_s=statistics.median(t.layer_s for t in times),
        gpu_s=statistics.median(t.gpu_s for t in times),
        ndp_s=statistics.median(t.ndp_s for t in times),
        over_longer=Spread.of([ratio(t.layer_s, max(t.gpu_s, t.ndp_s)) for t in times]),
        over_sum=Spread.of([ratio(t.layer_s, t.gpu_s + t.ndp_s) for t in times]),
    )


def layer_times(events: list[dict[str, Any]]) -> list[LayerTime]:
    """The layers of a timeline that the NDP worker took part in.

    Args:
        events: `GpuWorker.trace_events`: spans "L<n> NDP" (from sending, the worker's own time), "L<n> NDP wait" and
            "L<n> experts", in this order for each layer.
    """
    times, ndp, wait = [], None, None
    for event in events:
        name = event["name"]
        if name.endswith(" NDP wait"):
            wait = event
        elif name.endswith(" NDP"):
            ndp = event
        elif name.endswith(" experts"):
            if ndp is not None and wait is not None:
                layer_us = event["ts"] + event["dur"] - ndp["ts"]
                times.append(LayerTime(layer_us * 1e-6, (layer_us - wait["dur"]) * 1e-6, ndp["dur"] * 1e-6))
            ndp = wait = None
    return times
