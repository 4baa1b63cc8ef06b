"""Table 3 and Figures 7 to 9 of ActiveEvict on recorded traces and simulated links."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from .....actors.policy_settings import PolicySettings
from .....errors import ConfigError
from ....config import RunConfig, load_policy
from ....simulate.executor import Machine, context_of, engine_of, eviction_of, load_machine
from ....simulate.hit_rates import result, serve
from ..prompt_split import Split
from ..recorded import Recorded, read_split, record_split
from .measures import transfers
from .work import ABLATION, LATENCY_US, LOSSY, OWN, PRESETS, Workload

DISTANCES = 2  # layers ahead that the traces hold


@dataclass(frozen=True)
class Cell:
    """One replay. name: of its row. ratio: of the link."""

    section: str
    name: str
    preset: PolicySettings
    budget: float
    ratio: float


def simulate(
    base: RunConfig, splits: Mapping[str, Split], work: Workload, progress: Progress | None
) -> dict[str, Any]:
    """Rows of all cells, and the machine, as plain values. Replays are deterministic, so each is run once.

    Args:
        splits: prompts by context.

    Raises:
        ConfigError, RuntimeFailure: as `record`.
    """
    cells = list(_cells(work))
    task = None if progress is None else progress.add_task("replaying", total=len(cells) * len(splits))
    rows: list[dict[str, Any]] = []
    machine: Machine | None = None
    for context, split in splits.items():
        with tempfile.TemporaryDirectory(prefix="tiermoe-activeevict-") as scratch:
            trace = record_split(base, split, work.max_tokens, DISTANCES, Path(scratch) / "trace", progress)
            recorded = read_split(trace, work.learn)
        if machine is None:  # both contexts on one machine
            machine = load_machine(recorded.header, None, None, None)
        for cell in cells:
            rows.append({"context": context} | _replayed(cell, recorded, machine))
            if progress is not None and task is not None:
                progress.advance(task)
    assert machine is not None  # there is a context
    return {"rows": rows, "machine": machine.model_dump()}


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
        options = presets[OWN].eviction.model_copy(update={"alpha": alpha})
        yield Cell("alpha", f"{alpha:g}", presets[OWN].model_copy(update={"eviction": options}), work.budgets[0],
                   work.ratios[0])  # fmt: skip
    yield Cell("alpha", "lru", presets["activeevict-lru"], work.budgets[0], work.ratios[0])


def _replayed(cell: Cell, recorded: Recorded, machine: Machine) -> dict[str, Any]:
    preset, header = cell.preset, recorded.header
    gbps = link_gbps(machine, header.layers, header.top_k, header.slot_bytes, cell.ratio)
    (figures,) = replay(preset, cell.budget, gbps, recorded, machine, len(recorded.measure))
    return {
        "section": cell.section, "policy": cell.name, "preset": preset.name, "lossless": preset.lossless,
        "writes_back": preset.evict_writeback, "budget": cell.budget, "ratio": cell.ratio, "link_gbps": gbps, **figures,
    }  # fmt: skip


def replay(
    preset: PolicySettings, budget: float, gbps: float, recorded: Recorded, machine: Machine, each: int
) -> list[dict[str, float]]:
    """Figures of a preset on a link of so many gigabytes (1e9) per second, of every `each` counted prompts apart."""
    header = recorded.header
    engine = engine_of(
        preset, header, machine.model_copy(update={"link_gbps": gbps, "link_latency_us": LATENCY_US}), budget,
        eviction_of(preset, header), preset.make_prefetch(context_of(header)),
    )  # fmt: skip
    serve(engine, recorded.learn)
    found = []
    for start in range(0, len(recorded.measure), each):
        engine.reset_stats()
        served = serve(engine, recorded.measure[start : start + each])
        counted = transfers(result(engine, served), served.generated)
        found.append({"tpot_ms": 1e3 * served.tpot_s, "ttft_ms": 1e3 * served.ttft_s, **asdict(counted)})
    return found


def token_s(machine: Machine, layers: int, top_k: int) -> float:
    """Seconds of a forward of one token without waits."""
    return machine.forward_s + layers * (machine.dense(1) + machine.experts(top_k, top_k))


def link_gbps(machine: Machine, layers: int, top_k: int, slot_bytes: int, ratio: float) -> float:
    """The link on which loading a layer's K experts takes `ratio` times as long as a layer of one token computes.

    Raises:
        ConfigError: the latency of the copies alone takes longer.
    """
    copy_s = ratio * token_s(machine, layers, top_k) / layers / top_k - LATENCY_US * 1e-6
    if copy_s <= 0:
        raise ConfigError(f"no link loads {ratio:g} times as long as computing takes", "give a greater ratio")
    return float(f"{slot_bytes / copy_s / 1e9:.3g}")
