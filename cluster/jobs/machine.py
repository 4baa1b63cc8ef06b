"""Measures what this machine takes to run a step: the inputs of a prediction (`topology/machine.py`).

Two random models, a small and a large one, with everything resident: their dense parts and their experts' kernels give
two points each of `calls + bytes / bandwidth`. Then the small one under each preset, with all experts resident and with
a quarter: the host's time of a layer, and what a load adds. Half a minute on an idle machine, half a gigabyte.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.progress import Progress

from ..config import RunConfig, load_policy
from ..host import versions
from ..topology.machine import MachineCosts, PolicyCosts, machine_name
from .bench.random_model import MoeShape, save_random_model
from .bench.serving import ensure_artifacts, run_config, serve, start_worker

if TYPE_CHECKING:  # torch
    from ...actors.engine.model.profile import HostStep

PRESETS = ("all-resident", "on-demand", "next-gate", "mixtral-offloading", "moe-infinity", "hobbit")
SMALL = MoeShape(layers=4, experts=64, top_k=4, hidden=256, intermediate=128, vocabulary=4096)
LARGE = MoeShape(layers=2, experts=8, top_k=4, hidden=1024, intermediate=512, vocabulary=4096)
PROMPT, TOKENS = tuple(range(3, 35)), 32
_BUDGET, _LINK = "0.25", {"gbps": 16.0, "latency_us": 10.0}
_NO_LINK = {"gbps": None, "latency_us": 0.0}
_LEAST_GBPS, _MOST_GBPS = 0.1, 1e5


@dataclass(frozen=True)
class Probe:
    """Means over the decode steps of one run: seconds, and loads of a layer.

    step_s: of the batching loop outside the model. dense_s: of the model outside its MoE layers. layer_s: of the host
    in an MoE layer outside kernels and waits. kernel_s: of a layer's kernels. dense_bytes: on the device.
    """

    step_s: float
    dense_s: float
    layer_s: float
    kernel_s: float
    loads: float
    dense_bytes: int


def measure_machine(
    progress: Progress | None, presets: Sequence[str] = PRESETS, threads: int = 1, rounds: int = 3
) -> MachineCosts:
    """Measure this machine now.

    Args:
        presets: whose host time is measured.
        rounds: requests of each case; cases take turns within a preset.
    """
    from .doctor import devices

    task = None if progress is None else progress.add_task("measuring steps", total=2 + 2 * len(presets))

    def advance() -> None:
        if progress is not None and task is not None:
            progress.advance(task)

    with tempfile.TemporaryDirectory(prefix="tiermoe-probe-") as folder:
        models = {name: _model(shape, Path(folder) / name) for name, shape in (("small", SMALL), ("large", LARGE))}
        whole: dict[str, Probe] = {}
        for name, base in models.items():
            whole[name] = probe(_with(base, "all-resident", "1.0", threads), rounds)
            advance()
        ensure_artifacts(models["small"], [load_policy(name) for name in presets])
        policies: dict[str, PolicyCosts] = {}
        for name in presets:
            full = probe(_with(models["small"], name, "1.0", threads), rounds)
            advance()
            part = full if load_policy(name).preload == "all" else probe(
                _with(models["small"], name, _BUDGET, threads), rounds
            )  # fmt: skip
            advance()
            extra_s = max(0.0, part.layer_s - full.layer_s)
            policies[name] = PolicyCosts(
                step_us=fmean((full.step_s, part.step_s)) * 1e6,
                layer_us=full.layer_s * 1e6,
                load_us=extra_s / part.loads * 1e6 if part.loads else 0.0,
            )
    dense_us, dense_gbps = _line(
        (SMALL.layers, whole["small"].dense_bytes, whole["small"].dense_s),
        (LARGE.layers, whole["large"].dense_bytes, whole["large"].dense_s),
    )
    expert_us, expert_gbps = _line(
        *((shape.top_k, shape.top_k * 12 * shape.hidden * shape.intermediate, whole[name].kernel_s)
          for name, shape in (("small", SMALL), ("large", LARGE)))
    )  # fmt: skip
    device = devices()[0]
    return MachineCosts(
        machine=machine_name(), tiermoe=versions()["tiermoe"], threads=threads, copy_gbps=device.link_gbps,
        executor="emulated" if "emulated" in device.link else "real",
        dense_layer_us=dense_us, dense_gbps=dense_gbps, expert_us=expert_us, expert_gbps=expert_gbps,
        policies=policies,
    )  # fmt: skip


def _model(shape: MoeShape, folder: Path) -> RunConfig:
    model = save_random_model(shape, folder / "model")
    return run_config(str(model), None, store=str(folder / "store"))


def _with(base: RunConfig, preset: str, budget: str, threads: int) -> RunConfig:
    settings = {
        "policy": preset, "budget": budget, "threads": threads,
        "link": _NO_LINK if budget == "1.0" else _LINK, "store": base.store,
    }  # fmt: skip
    return run_config(str(base.model_dir), None, **settings)


def probe(config: RunConfig, rounds: int, prompt: tuple[int, ...] = PROMPT, tokens: int = TOKENS) -> Probe:
    """Serve a prompt `rounds` times with the step's parts timed, after once without."""
    from ...actors.engine.model.profile import host_steps

    with closing(start_worker(config)) as worker:
        serve(worker.submit, [prompt], tokens)
        before = _loads(worker)
        with host_steps(worker.engine, worker.model, worker.batcher) as steps:
            for _ in range(rounds):
                serve(worker.submit, [prompt], tokens)
        decode = [step for step in steps if step.rows == 1]
        loads = (_loads(worker) - before) / max(1, len(steps) * len(worker.engine.layers))
        return _probe(decode, loads, worker.plan()["dense_bytes"])


def _loads(worker: Any) -> float:
    total = worker.stats().total()
    return float(total.bytes_loaded / worker.engine.slot_bytes)


def _probe(steps: Sequence[HostStep], loads: float, dense_bytes: int) -> Probe:
    layers = [layer for step in steps for layer in step.layers]
    return Probe(
        step_s=fmean(sum(value for part, value in step.parts.items() if part != "dense") for step in steps),
        dense_s=fmean(step.parts["dense"] for step in steps),
        layer_s=fmean(layer.outside_s for layer in layers),
        kernel_s=fmean(layer.kernel_s for layer in layers),
        loads=loads,
        dense_bytes=dense_bytes,
    )


def _line(first: tuple[float, float, float], second: tuple[float, float, float]) -> tuple[float, float]:
    """Microseconds u and 1e9 bytes a second g with seconds = count u + bytes / g at two points (count, bytes, seconds).

    Where noise makes one of them negative, it is nothing, and the other follows from the second point alone.
    """
    (n, b, s), (m, c, t) = first, second
    determinant = n * c - m * b
    each_s, per_byte_s = (s * c - t * b) / determinant, (n * t - m * s) / determinant
    if each_s < 0:
        each_s, per_byte_s = 0.0, t / c
    if per_byte_s <= 0:
        each_s, per_byte_s = t / m, 0.0
    gbps = 1e-9 / per_byte_s if per_byte_s else _MOST_GBPS
    return each_s * 1e6, min(_MOST_GBPS, max(_LEAST_GBPS, gbps))
