"""Measures what this machine takes to run a step: the inputs of a prediction (`topology/machine_costs.py`).

Two random models, a small and a large one, with everything resident: their dense parts and their experts' kernels give
two points each of `calls + bytes / bandwidth`. On demand, their copies give two points of the same. Then the small one
under each preset, at all, a quarter and three quarters of the experts: whatever a layer takes beyond its dense part,
its kernels and its waits is the preset's, by layers, layers that miss, and loads. Half a minute on an idle machine,
half a gigabyte.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from rich.progress import Progress

from ..config import AUTO, RunConfig, load_policy
from ..host import versions
from ..topology.machine_costs import MachineCosts, PolicyCosts, machine_name
from .bench.random_model import MoeShape, save_random_model
from .bench.serving import ensure_artifacts, serve
from .devices import devices
from .local_worker import run_config, start_worker

PRESETS = ("all-resident", "on-demand", "next-gate", "mixtral-offloading", "moe-infinity", "hobbit", AUTO)
SMALL = MoeShape(layers=4, experts=64, top_k=4, hidden=256, intermediate=128, vocabulary=4096)
LARGE = MoeShape(layers=2, experts=8, top_k=4, hidden=1024, intermediate=512, vocabulary=4096)
PROMPTS, TOKENS = tuple(tuple(range(first, first + 32)) for first in (3, 103, 203, 303)), 32
BUDGETS = ("0.25", "0.75")  # of presets that load
_LINK = {"gbps": 16.0, "latency_us": 10.0}
_NO_LINK = {"gbps": None, "latency_us": 0.0}
_ROUNDS = 3  # requests of each case
_LEAST_GBPS, _MOST_GBPS = 0.1, 1e5


@dataclass(frozen=True)
class Probe:
    """One run's decode steps: medians in seconds (of passes, see `_typical`), and counts.

    step_s: of the batching loop outside the model. dense_s: of the model outside its MoE layers. pass_s: of an MoE
    layer without waits for copies. kernel_s: of a layer's kernels. waited_s: of a layer's waits. missing: experts that
    each pass missed. loads: copies a layer, and copy_s: of each, on the link. dense_bytes: on the device.
    """

    step_s: float
    dense_s: float
    pass_s: float
    kernel_s: float
    waited_s: float
    missing: tuple[int, ...]
    loads: float
    copy_s: float
    dense_bytes: int

    @property
    def missed(self) -> float:
        """Share of the passes that missed an expert."""
        return fmean(count > 0 for count in self.missing)


def measure_machine(progress: Progress | None, presets: Sequence[str] = PRESETS) -> MachineCosts:
    """Measure this machine now, and the host time of so many presets."""
    total = 5 + (1 + len(BUDGETS)) * len(presets)
    task = None if progress is None else progress.add_task("measuring steps", total=total)

    with tempfile.TemporaryDirectory(prefix="tiermoe-probe-") as folder:
        models = {name: _model(shape, Path(folder) / name) for name, shape in (("small", SMALL), ("large", LARGE))}

        def probed(model: str, preset: str, budget: str, link: Mapping[str, Any] = _NO_LINK) -> Probe:
            settings = {"policy": preset, "budget": budget, "threads": 1, "link": link}
            config = run_config(str(models[model].model_dir), None, store=models[model].store, **settings)
            found = probe(config, _ROUNDS)
            if progress is not None and task is not None:
                progress.advance(task)
            return found

        small, large = (probed(name, "all-resident", "1.0") for name in models)
        copied = [probed(name, "on-demand", budget) for name, budget in (("small", "0.25"), ("large", "0.5"))]
        waiting = probed("small", "on-demand", "0.25", _LINK)
        dense = _line(*((shape.layers, p.dense_bytes, p.dense_s) for shape, p in ((SMALL, small), (LARGE, large))))
        expert = _line(*(
            (shape.top_k, shape.top_k * slot_bytes(shape), p.kernel_s) for shape, p in ((SMALL, small), (LARGE, large))
        ))  # fmt: skip
        copy = _line(*((1, slot_bytes(shape), p.copy_s) for shape, p in zip((SMALL, LARGE), copied, strict=True)))
        ensure_artifacts(models["small"], [load_policy(name) for name in presets])
        policies = {}
        for name in presets:
            budgets = () if load_policy(name).preload == "all" else BUDGETS
            parts = [probed("small", name, budget, _LINK) for budget in budgets]
            policies[name] = _policy_costs(small, probed("small", name, "1.0"), parts)
    device = devices()[0]
    return MachineCosts(
        machine=machine_name(), tiermoe=versions()["tiermoe"], threads=1,
        executor="emulated" if device.link is None else "real",
        copy_us=copy[0], copy_gbps=copy[1], wait_us=_lateness(waiting, small.kernel_s / SMALL.top_k) * 1e6,
        dense_layer_us=dense[0], dense_gbps=dense[1], expert_us=expert[0], expert_gbps=expert[1], policies=policies,
    )  # fmt: skip


def slot_bytes(shape: MoeShape) -> int:
    """Of an expert in float32."""
    return 12 * shape.hidden * shape.intermediate


def _policy_costs(resident: Probe, full: Probe, parts: Sequence[Probe]) -> PolicyCosts:
    """What a preset adds to `resident`'s dense part and kernels; full, parts: with all and with some experts."""

    def layer_s(found: Probe) -> float:
        return max(0.0, found.pass_s - resident.kernel_s + (found.dense_s - resident.dense_s) / SMALL.layers)

    layer = layer_s(full)
    miss, load = _two([(layer_s(p) - layer, p.missed, p.loads) for p in parts])
    return PolicyCosts(
        step_us=fmean(p.step_s for p in (full, *parts)) * 1e6, layer_us=layer * 1e6, miss_us=miss * 1e6,
        load_us=load * 1e6,
    )  # fmt: skip


def _two(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The x and y >= 0 with the least squared error of seconds = a x + b y at points (seconds, a, b)."""
    if not points:
        return 0.0, 0.0
    values, matrix = np.array([p[0] for p in points]), np.array([p[1:] for p in points])
    both = np.linalg.lstsq(matrix, values, rcond=None)[0]
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    squares = (matrix**2).sum(axis=0)
    alone = np.maximum(0.0, np.divide(matrix.T @ values, squares, out=np.zeros(2), where=squares > 0))
    errors = [float(((values - matrix[:, i] * alone[i]) ** 2).sum()) for i in range(2)]
    return (float(alone[0]), 0.0) if errors[0] < errors[1] else (0.0, float(alone[1]))


def _lateness(on_demand: Probe, kernel_s: float) -> float:
    """Seconds from a copy's end until a waiting layer resumes: the waits beyond those of an ideal host.

    That one runs the residents of a layer while the first copy is under way, and each arrival while the next is.
    """
    waits, ideal_s = 0, 0.0
    for missing in on_demand.missing:
        at_s = (SMALL.top_k - missing) * kernel_s
        for number in range(1, missing + 1):
            arrived_s = number * on_demand.copy_s
            if arrived_s > at_s:
                waits, ideal_s, at_s = waits + 1, ideal_s + arrived_s - at_s, arrived_s
            at_s += kernel_s
    return max(0.0, on_demand.waited_s * len(on_demand.missing) - ideal_s) / waits if waits else 0.0


def _model(shape: MoeShape, folder: Path) -> RunConfig:
    model = save_random_model(shape, folder / "model")
    return run_config(str(model), None, store=str(folder / "store"))


def probe(config: RunConfig, rounds: int, tokens: int = TOKENS) -> Probe:
    """Serve `rounds` prompts with the step's parts timed, after one without.

    NDP workers that a policy can do without are not started: predictions count on loads alone.
    """
    from ...actors.engine.host_times import host_steps

    with closing(start_worker(config, optional_workers=False)) as worker:
        serve(worker.submit, [PROMPTS[-1]], tokens)
        worker.reset_stats()
        watch = _Watch(worker.engine)
        with host_steps(worker.engine, worker.model, worker.batcher, misses=True) as steps, watch:
            for prompt in PROMPTS[:rounds]:
                serve(worker.submit, [prompt], tokens)
        copies, link_s = watch.copies, worker.stats().total().total_io_s
        decode = [step for step in steps if step.rows == 1]
        layers = [layer for step in decode for layer in step.layers]
        missing = tuple(layer.missing for layer in layers)
        return Probe(
            step_s=median(sum(value for part, value in step.parts.items() if part != "dense") for step in decode),
            dense_s=median(step.parts["dense"] for step in decode),
            pass_s=_typical([layer.total_s - layer.parts["wait"] - layer.parts["copies"] for layer in layers], missing),
            kernel_s=_typical([layer.kernel_s for layer in layers], missing),
            waited_s=_typical([layer.parts["copies"] for layer in layers], missing),
            missing=missing,
            loads=watch.decode_copies / (watch.decode_steps * len(worker.engine.layers)),
            copy_s=link_s / copies if copies else 0.0,
            dense_bytes=worker.plan()["dense_bytes"],
        )


class _Watch:
    """Counts, inside the `with` block, copies of decode steps.

    Attributes:
        decode_copies, decode_steps: of the steps that a decode step follows, since copies count when they land, in
            experts of full precision.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.decode_copies, self.decode_steps = 0.0, 0
        self._before: Callable[..., Any] = engine.begin_forward
        self._copies_before: float | None = None  # copies at the begin of the decode step before

    @property
    def copies(self) -> float:
        """Experts that landed since the counters were reset; of part of an expert, its share of the bytes."""
        stats = [layer.stats for layer in self._engine.layers]
        return sum(s.bytes_loaded_demand + s.bytes_loaded_prefetch for s in stats) / self._engine.slot_bytes

    def __enter__(self) -> None:
        self._before = self._engine.begin_forward

        def counted(sequences: Sequence[Any]) -> None:
            self._step(len(sequences) == 1 and sequences[0].decode)
            self._before(sequences)

        self._engine.begin_forward = counted

    def __exit__(self, *exception: object) -> None:
        self._engine.begin_forward = self._before

    def _step(self, one: bool) -> None:
        copies = self.copies if one else 0.0
        if one and self._copies_before is not None:
            self.decode_copies += copies - self._copies_before
            self.decode_steps += 1
        self._copies_before = copies if one else None


def _typical(values: Sequence[float], missing: Sequence[int]) -> float:
    """The mean over all passes, each taken as the median of those that missed as many experts.

    A pass in which another program had the core does not count, and the passes that cost more do.
    """
    of: dict[int, list[float]] = {}
    for value, count in zip(values, missing, strict=True):
        of.setdefault(count, []).append(value)
    return sum(median(some) * len(some) for some in of.values()) / len(values)


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
