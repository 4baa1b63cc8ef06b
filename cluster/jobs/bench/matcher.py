"""`tiermoe bench matcher`: search, update and memory of expert maps, and what the matcher costs the lead."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from rich.progress import Progress

from ....actors.engine.peers.matcher import MatcherLink
from ....actors.policies.fmoe.maps import WIDTH, ExpertMapStore
from ....actors.settings import MatcherSettings
from ....actors.store.artifacts import MapShape, save_maps
from ....errors import RuntimeFailure
from ...config import default_model_dir
from ...host import thread_limits
from ...worker_process import Role, WorkerProcess
from .matcher_peer import DISTANCE, random_maps, softmax
from .metrics import Bar, Case, Measures, Report, interleaved, rows_of

LARGEST = 50_000
CAPACITIES = (1000, 10_000, LARGEST)
LATE_S = 1.0  # how long the lead waits for one command
LAYER_S = 1e-3  # what a layer takes the lead that publishes
ITERATIONS = 6  # of each repetition of publishing
_START_S = 30.0
_END_S = 10.0


def bench_matcher(repeats: int, progress: Progress | None) -> Report:
    """Stores of 1K, 10K and 50K maps for four models, on one thread; and a lead that publishes to a matcher.

    A layer's search is the update of the running products with one layer and the choice of the best entry; a forecast
    is that and the selection of experts. An update stores an iteration whose search has its scores, O(C + LJ); one
    without a search computes them, O(C(LJ + D)). Random maps: what is measured does not depend on their values.

    The lead publishes one sequence, then multiplies matrices for a millisecond, the time of a layer, and looks for its
    command in between (the lag): so others may have its interpreter and its caches are not those of an empty loop.

    Bars: a layer's search <= 100 us at 1K and <= 5 ms at 50K maps; 50K maps of 32 x 8 <= 200 MB; a publish <= 20 us.
    """
    shapes = model_shapes()
    settings = {
        "repeats": repeats, "iterations": ITERATIONS, "layer_s": LAYER_S,
        "distance": DISTANCE, "embedding_width": WIDTH,
    }  # fmt: skip
    report = Report("matcher", "real", settings=settings, shown=("case", "measure", "median", "minimum", "maximum"))
    with contextlib.ExitStack() as stack:
        ask = stack.enter_context(_peer())
        cases = [
            Case(f"{name} {capacity}", _store_case(ask, shape, top_k, capacity))
            for name, (shape, top_k) in shapes.items()
            for capacity in CAPACITIES
        ]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiermoe-bench-")))
        for name, (shape, top_k) in shapes.items():
            for transport in ("shm", "grpc"):
                chosen = MatcherSettings(distance=DISTANCE, transport=transport, learn=False)
                link = stack.enter_context(_matcher(chosen, shape, top_k, folder))
                cases.append(Case(f"publish {name} {transport}", _Lead(link, shape)))
        results = interleaved(cases, repeats, 1, progress)
    report.rows = rows_of(results)
    for name in shapes:
        for capacity, limit_us in ((1000, 100.0), (LARGEST, 5000.0)):
            value = results[f"{name} {capacity}"]["layer_search_us"].median
            report.bars.append(Bar(f"us of a layer's search, {name}, {capacity} maps", value, "<=", limit_us))
        value = results[f"publish {name} shm"]["publish_p50_us"].median
        report.bars.append(Bar(f"us of a publish, {name}", value, "<=", 20.0))
    largest = results[f"mixtral-8x7b {LARGEST}"]
    value = max(largest["store_mb"].median, largest["resident_mb"].median)
    report.bars.append(Bar(f"MB of {LARGEST} maps, mixtral-8x7b", value, "<=", 200.0))
    return report


def model_shapes() -> dict[str, tuple[MapShape, int]]:
    """Shape and top-k of three models of the literature and of the project's own."""
    config = json.loads((default_model_dir() / "config.json").read_text(encoding="utf-8"))
    own = config["num_hidden_layers"], config["num_experts"] if "num_experts" in config else config["num_local_experts"]
    numbers = {
        "mixtral-8x7b": (32, 8, 4096, 2),
        "qwen1.5-moe": (24, 60, 2048, 4),
        "deepseek-v2-lite": (26, 64, 2048, 6),
        "default": (*own, config["hidden_size"], config["num_experts_per_tok"]),
    }
    return {name: (MapShape(name, n[0], n[1], n[2]), n[3]) for name, n in numbers.items()}


Ask = Callable[[dict[str, int]], Measures]


@contextlib.contextmanager
def _peer() -> Iterator[Ask]:
    """The process with the stores: its numerical library has one thread, which cannot be set in this one any more."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.matcher_peer"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | thread_limits(1),
    )
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None

    def ask(case: dict[str, int]) -> Measures:
        stdin.write(json.dumps(case) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise RuntimeFailure("the process with the stores ended", "its own words are above")
        measures: Measures = json.loads(line)
        return measures

    try:
        yield ask
    finally:
        process.kill()  # it holds nothing that wants saving
        process.communicate(timeout=_END_S)


def _store_case(ask: Ask, shape: MapShape, top_k: int, capacity: int) -> Callable[[], Measures]:
    case = {
        "layers": shape.layers, "experts": shape.experts, "hidden": shape.hidden, "top_k": top_k, "capacity": capacity,
    }  # fmt: skip
    return lambda: ask(case)


@contextlib.contextmanager
def _matcher(settings: MatcherSettings, shape: MapShape, top_k: int, folder: Path) -> Iterator[MatcherLink]:
    """A connection to a matcher of its own, with as many maps as it holds."""
    warm = folder / f"{shape.model}.safetensors"
    if not warm.exists():
        width = min(shape.hidden, settings.width)
        store = ExpertMapStore(shape.layers, shape.experts, width, settings.distance, settings.capacity)
        save_maps(warm, random_maps(np.random.default_rng(0), store), shape)
    with (
        WorkerProcess(Role.matcher(settings, shape, top_k, warm=warm)) as process,
        contextlib.closing(MatcherLink(process.link, settings, shape)) as link,
    ):
        link.start()
        if not link.wait_until_found(_START_S):
            raise RuntimeFailure(f"the matcher was not reached: {link.problem}", "report this as a bug")
        yield link


class _Lead:
    """A forward that computes, publishes and looks for commands."""

    def __init__(self, link: MatcherLink, shape: MapShape) -> None:
        self._link, self._shape = link, shape
        self._random = np.random.default_rng(1)
        self._sequences = np.zeros(1, np.int64)
        self._number = 0
        self._matrix = self._random.standard_normal((256, 512), np.float32)
        self._row, self._out = self._matrix[:1, :256].copy(), np.empty((1, 512), np.float32)

    def __call__(self) -> Measures:
        link, shape = self._link, self._shape
        publishes: list[float] = []
        lags: list[float] = []
        for _ in range(ITERATIONS):
            self._number += 1
            embedding = self._random.standard_normal((1, shape.hidden), np.float32)
            maps = softmax(self._random, shape.layers, 1, shape.experts)
            for layer in range(-1, shape.layers):
                begin_s = time.perf_counter()
                if layer < 0:
                    link.begin(self._number, self._sequences, embedding)
                else:
                    link.observe(self._number, layer, self._sequences, maps[layer])
                publishes.append(time.perf_counter() - begin_s)
                came = False
                while time.perf_counter() < begin_s + (LATE_S if link.waiting else LAYER_S):
                    np.matmul(self._row, self._matrix, out=self._out)
                    if not came and link.take(self._number, layer):
                        lags.append(time.perf_counter() - begin_s)
                        came = True
        p50, p99 = np.percentile(publishes, (50, 99)) * 1e6
        lag50, lag99 = np.percentile(lags, (50, 99)) * 1e6
        return {
            "publish_p50_us": float(p50), "publish_p99_us": float(p99),
            "lag_p50_us": float(lag50), "lag_p99_us": float(lag99),
        }  # fmt: skip
