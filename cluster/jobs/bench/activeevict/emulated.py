"""Table 3 of ActiveEvict by the engine itself: presets in turn on the same prompts, on a throttled link."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from .....actors.settings import LinkSettings
from ....config import RunConfig, engine_settings, load_policy
from ....simulate.executor import Machine, load_machine
from ..compare.kept import Kept
from ..compare.report import compare
from ..compare.running import Start
from ..compare.sweep import Sweep
from ..moepic.variants import write_variant
from ..prompt_split import Split
from ..recorded import Recorded, read_split, record_split
from ..serving import prepared_store, start_worker
from .measures import by_measure, measured
from .simulated import DISTANCES, replay, token_s
from .work import LATENCY_US, PREFETCHING, PRESETS, Workload

Row = dict[str, Any]
_CHANGED = " without write-back"


@dataclass(frozen=True)
class Throttled:
    """The link of this part, as the replays have it.

    gbps: gigabytes (1e9) per second. ratio: loading over computing. machine: of the replays that it was chosen for.
    """

    gbps: float
    ratio: float
    machine: Machine


def emulate(
    base: RunConfig, splits: Mapping[str, Split], work: Workload, link: Throttled, scratch: Path, folder: Path | None,
    progress: Progress | None, start: Start = start_worker,
) -> tuple[list[Row], dict[str, Any], list[Kept]]:  # fmt: skip
    """Run every preset, and without writing back those that do, at each budget and context.

    Args:
        splits: prompts by context, `prompts_each` to count in each repetition. scratch: for presets that are changed,
            and traces. folder: where unfinished contexts are kept, to go on with; None: nowhere. start: see `compare`.

    Returns:
        Rows like those of simulated cells, under "replayed" with what a replay of the same prompts gives; settings of
        this part; and what was kept.

    Raises:
        ConfigError, RuntimeFailure: as `compare`; so also where a lossless preset gives other tokens than on-demand.
    """
    settings: dict[str, Any] = {
        "repeats": work.repeats, "prompts_each": work.prompts_each, "learn": work.learn, "max_tokens": work.max_tokens,
        "link_gbps": link.gbps, "ratio": link.ratio, "load_average": os.getloadavg()[0],
    }  # fmt: skip
    variants = _without_writing_back(scratch)
    _make_replicas(base, progress)
    rows, kept = list[Row](), list[Kept]()
    for context, split in splits.items():
        sweep = _sweep(base, split, work, link, variants)
        out = None if folder is None else kept_file(folder, context)
        report, found = compare(sweep, out, progress, start, score=_unscored)
        kept.append(found)
        trace = record_split(base, split, work.max_tokens, DISTANCES, scratch / context, progress)
        recorded = read_split(trace, work.learn)
        rows += [{"context": context} | _row(row, sweep, link, recorded, work) for row in report.rows]
        settings |= {"executor": report.executor, "slot_bytes": recorded.header.slot_bytes}
        if "step_ms" not in settings:  # of the first context, as the machine of the replays is
            settings |= _steps(recorded, link)
    return rows, settings, kept


def kept_file(folder: Path, context: str) -> Path:
    """The result of one context, beside which an unfinished one is kept."""
    return folder / f"activeevict-emulated-{context}.json"


def _without_writing_back(folder: Path) -> dict[str, str]:
    """Files of the presets that write back, changed so that they do not, by name."""
    names = {preset + _CHANGED: preset for preset in PREFETCHING}
    return {name: write_variant(folder, name, preset, {"evict_writeback": False}) for name, preset in names.items()}


def _sweep(base: RunConfig, split: Split, work: Workload, link: Throttled, variants: Mapping[str, str]) -> Sweep:
    return Sweep(
        base.model_copy(update={"link": LinkSettings(gbps=link.gbps, latency_us=LATENCY_US)}),
        (*PRESETS, *variants), tuple(map(str, work.budgets)), (link.gbps,), split.measure, split.learn,
        work.repeats, work.max_tokens, fresh=True, files=variants,
    )  # fmt: skip


def _row(row: Mapping[str, Any], sweep: Sweep, link: Throttled, recorded: Recorded, work: Workload) -> Row:
    preset, budget = sweep.preset(row["policy"]), float(row["budget"])
    name = row["policy"].removesuffix(_CHANGED)
    again = replay(preset, budget, link.gbps, recorded, link.machine, work.prompts_each)
    return {
        "section": "emulated", "policy": name, "preset": name, "lossless": row["lossless"],
        "writes_back": preset.evict_writeback, "budget": budget, "ratio": link.ratio, "link_gbps": link.gbps,
        **measured(row, work.prompts_each * work.max_tokens), "replayed": by_measure(again),
    }  # fmt: skip


def _steps(recorded: Recorded, link: Throttled) -> dict[str, float]:
    """What a forward of one token computes, now and on the machine of the replays."""
    header = recorded.header
    now = load_machine(header, None, None, None)
    took = [1e3 * token_s(machine, header.layers, header.top_k) for machine in (now, link.machine)]
    return dict(zip(("step_ms", "replayed_step_ms"), took, strict=True))


def _make_replicas(base: RunConfig, progress: Progress | None) -> None:
    """What presets of mixed precision load, before anything is measured; what the store has is not made again."""
    needy = [name for name in PRESETS if load_policy(name).replica_widths]
    task = progress.add_task("low-bit replicas", total=len(needy)) if progress is not None else None
    for name in needy:
        config = base.model_copy(update={"policy": name})
        prepared_store(config, engine_settings(config))
        if progress is not None and task is not None:
            progress.advance(task)


def _unscored(worker: Any, progress: Progress | None) -> dict[str, Any]:
    """The page says nothing of quality: `tiermoe eval` does."""
    return {}
