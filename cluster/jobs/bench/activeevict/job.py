"""ActiveEvict against its baselines: Table 3 and Figures 7 to 9 on recorded traces and simulated links."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from .....actors.policies.prefetch.registry import PrefetchOptions, make_prefetch
from .....actors.policy_settings import PolicySettings
from .....errors import ConfigError
from ....config import load_policy
from ....simulate.machine import Machine, load_machine
from ....simulate.of_policy import engine_of, eviction_of
from ....simulate.replay import result, serve
from ..harness import Bar, Report
from ..page_parts import rounded
from ..prompt_split import split_prompts
from ..recorded import Recorded, read_split, record_split
from ..serving import run_config
from .measures import transfers

OWN_KEYS = ("policy", "budget", "link")
OWN, LOSSY = "activeevict-lossless", "activeevict"
PREFETCHING = ("moe-offloading", "moe-apex")  # of the paper's baselines
PRESETS = ("on-demand", *PREFETCHING, OWN, LOSSY)
ABLATION = (OWN, "activeevict-prediction-only", "activeevict-hotness-only", "activeevict-lru")
LESS = 0.7  # of a baseline's blocking I/O: the paper has 31% to 46% less
_DISTANCES = 2  # layers ahead that the traces hold
_LATENCY_US = 10.0
_SHOWN = (
    "section", "context", "budget", "ratio", "policy", "writes_back", "blocking_ms", "total_ms", "loaded_mb",
    "redundant",
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """Sizes.

    contexts: tokens of the prompts, by name. learn, measure: prompts of each context that are served first, uncounted,
    and counted. max_tokens: generated after each. ratios: loading over computing of the links; figures are of the
    first. alphas: of Figure 9, at the first budget of `budgets`.
    """

    contexts: tuple[tuple[str, int], ...] = (("short", 32), ("long", 256))
    learn: int = 4
    measure: int = 8
    max_tokens: int = 48
    budgets: tuple[float, ...] = (0.25, 0.5)
    capacities: tuple[float, ...] = (0.125, 0.25, 0.375, 0.5, 0.75)
    ratios: tuple[float, ...] = (1.0, 2.5)
    alphas: tuple[float, ...] = (0.0, 0.125, 0.25, 0.5, 0.75, 0.875, 1.0)

    def __post_init__(self) -> None:
        lists = (self.contexts, self.budgets, self.capacities, self.ratios, self.alphas)
        if not all(lists) or min(self.learn, self.measure, self.max_tokens, *(n for _, n in self.contexts)) < 1:
            raise ConfigError("a size of the benchmark is zero", "give at least 1, and at least one of each")
        if not all(0 < b <= 1 for b in (*self.budgets, *self.capacities)) or min(self.ratios) <= 0:
            raise ConfigError("budgets are shares above 0 up to 1, ratios are above 0", "give others")


@dataclass(frozen=True)
class Cell:
    """One replay. name: of its row. ratio: of the link."""

    section: str
    name: str
    preset: PolicySettings
    budget: float
    ratio: float


def bench_activeevict(
    model: str | None, work: Workload, progress: Progress | None, file: str | None = None
) -> Report:
    """All figures of the page. Replays are deterministic, so each is run once.

    Args:
        file: configuration of everything but `OWN_KEYS`.

    Raises:
        CheckpointError: the model ships too little held-out text. ConfigError, RuntimeFailure: as `record`.
    """
    base, load_average = run_config(model, file), os.getloadavg()[0]
    cells = list(_cells(work))
    task = None if progress is None else progress.add_task("replaying", total=len(cells) * len(work.contexts))
    rows: list[dict[str, Any]] = []
    machine: Machine | None = None
    for context, tokens in work.contexts:
        split = split_prompts(base.model_dir, tokens).take(work.learn, work.measure)
        with tempfile.TemporaryDirectory(prefix="tiermoe-activeevict-") as scratch:
            trace = record_split(base, split, work.max_tokens, _DISTANCES, Path(scratch) / "trace", progress)
            recorded = read_split(trace, work.learn)
        if machine is None:  # both contexts on one machine
            machine = load_machine(recorded.header, None, None, None)
        for cell in cells:
            rows.append({"context": context} | _replayed(cell, recorded, machine))
            if progress is not None and task is not None:
                progress.advance(task)
    assert machine is not None  # there is a context
    settings = {
        "model": base.model_dir.name, "contexts": dict(work.contexts), "learn": work.learn, "measure": work.measure,
        "max_tokens": work.max_tokens, "ratios": list(work.ratios), "latency_us": _LATENCY_US,
        "machine": machine.model_dump(), "load_average": load_average,
    }  # fmt: skip
    return Report("activeevict", "simulated", rounded(rows), bars_of(rows), settings, _SHOWN)


def bars_of(rows: list[dict[str, Any]]) -> list[Bar]:
    """Of each context the least blocking I/O of the lossless preset over that of the best prefetching baseline of the
    same budget and link: as the presets are, and where nobody writes back."""
    bars = []
    for context in dict.fromkeys(row["context"] for row in rows):
        table = [row for row in rows if row["context"] == context and row["section"] == "table"]
        for swaps, of in ((True, "as the baselines are, which write back"), (False, "where nobody writes back")):
            ratios = []
            for own in (row for row in table if row["policy"] == OWN and not row["writes_back"]):
                same = [
                    row["blocking_ms"]
                    for row in table
                    if row["preset"] in PREFETCHING and row["writes_back"] == swaps
                    and (row["budget"], row["ratio"]) == (own["budget"], own["ratio"])
                ]  # fmt: skip
                if same and min(same) > 0:
                    ratios.append(own["blocking_ms"] / min(same))
            bars.append(Bar(f"{context}: blocking I/O, {of}", min(ratios, default=float("nan")), "<=", LESS))
        exact = [min(row["precision"], row["recall"]) for row in table if row["preset"] in (OWN, LOSSY)]
        bars.append(Bar(f"{context}: fetch precision and recall", min(exact, default=float("nan")), ">=", 1.0))
    return bars


def _cells(work: Workload) -> Iterator[Cell]:
    presets = {name: load_policy(name) for name in dict.fromkeys((*PRESETS, *ABLATION))}
    for ratio in work.ratios:
        for budget in work.budgets:
            for name in PRESETS:
                yield Cell("table", name, presets[name], budget, ratio)
                twin = presets[name].model_copy(update={"evict_writeback": not presets[name].evict_writeback})
                yield Cell("table", name, twin, budget, ratio)
    for budget in work.capacities:
        for name in (*ABLATION, LOSSY):
            yield Cell("capacity", name, presets[name], budget, work.ratios[0])
    for alpha in work.alphas:
        options = presets[OWN].pre_evict.model_copy(update={"alpha": alpha})
        yield Cell("alpha", f"{alpha:g}", presets[OWN].model_copy(update={"pre_evict": options}), work.budgets[0],
                   work.ratios[0])  # fmt: skip
    yield Cell("alpha", "lru", presets["activeevict-lru"], work.budgets[0], work.ratios[0])


def _replayed(cell: Cell, recorded: Recorded, machine: Machine) -> dict[str, Any]:
    preset, header = cell.preset, recorded.header
    gbps = link_gbps(machine, header.layers, header.top_k, header.slot_bytes, cell.ratio)
    on = machine.model_copy(update={"link_gbps": gbps, "link_latency_us": _LATENCY_US})
    options = PrefetchOptions(
        header.layers, header.experts, header.top_k, preset.prefetch.distance, preset.prefetch.synchronous,
        precisions=preset.guess_precisions,
    )
    engine = engine_of(
        preset, header, on, cell.budget, eviction_of(preset, header), make_prefetch(preset.prefetch.kind, options)
    )
    serve(engine, recorded.learn)
    engine.reset_stats()
    served = serve(engine, recorded.measure)
    found = transfers(result(engine, served), served.generated)
    return {
        "section": cell.section, "policy": cell.name, "preset": preset.name, "lossless": preset.lossless,
        "writes_back": preset.evict_writeback, "budget": cell.budget, "ratio": cell.ratio, "link_gbps": gbps,
        "tpot_ms": 1e3 * served.tpot_s, "ttft_ms": 1e3 * served.ttft_s, **asdict(found),
    }  # fmt: skip


def link_gbps(machine: Machine, layers: int, top_k: int, slot_bytes: int, ratio: float) -> float:
    """The link on which loading a layer's K experts takes `ratio` times as long as a layer of one token computes.

    Raises:
        ConfigError: the latency of the copies alone takes longer.
    """
    layer_s = machine.forward_s / layers + machine.dense(1) + machine.experts(top_k, top_k)
    copy_s = ratio * layer_s / top_k - _LATENCY_US * 1e-6
    if copy_s <= 0:
        raise ConfigError(f"no link loads {ratio:g} times as long as computing takes", "give a greater ratio")
    return float(f"{slot_bytes / copy_s / 1e9:.3g}")
