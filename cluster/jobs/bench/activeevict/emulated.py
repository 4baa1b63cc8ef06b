"""Table 3 of ActiveEvict by the engine itself: presets in turn on the same prompts, on a throttled link."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.progress import Progress

from .....actors.settings import LinkSettings
from ....config import RunConfig, engine_settings, load_policy
from ..compare.kept import Kept
from ..compare.report import compare
from ..compare.running import Start
from ..compare.sweep import Sweep
from ..moepic.variants import write_variant
from ..prompt_split import Split
from ..serving import prepared_store, start_worker
from .measures import of_repetition, transfers
from .work import LATENCY_US, PREFETCHING, PRESETS, Workload

Row = dict[str, Any]


def emulate(
    base: RunConfig, splits: Mapping[str, Split], work: Workload, gbps: float, ratio: float, scratch: Path,
    folder: Path | None, progress: Progress | None, start: Start = start_worker,
) -> tuple[list[Row], dict[str, Any], list[Kept]]:  # fmt: skip
    """Run every preset, and without writing back those that do, at each budget and context.

    Args:
        splits: prompts by context. gbps: of the link, gigabytes (1e9) per second. ratio: loading over computing on it.
        scratch: for presets that are changed. folder: where unfinished contexts are kept, to go on with; None: nowhere.
        start: see `compare`.

    Returns:
        Rows like those of simulated cells, settings of this part, and what was kept.

    Raises:
        ConfigError, RuntimeFailure: as `compare`; so also where a lossless preset gives other tokens than on-demand.
    """
    load_average = os.getloadavg()[0]
    files = {f"{name} without write-back": name for name in PREFETCHING}
    variants = {
        name: write_variant(scratch, name, preset, {"evict_writeback": False}) for name, preset in files.items()
    }
    sweeps = {context: _sweep(base, split, work, gbps, variants) for context, split in splits.items()}
    rows, kept = list[Row](), list[Kept]()
    _make_replicas(base, progress)
    for context, sweep in sweeps.items():
        out = None if folder is None else kept_file(folder, context)
        report, found = compare(sweep, out, progress, start, score=_unscored)
        kept.append(found)
        tokens = len(sweep.round(0)) * work.max_tokens
        for row in report.rows:
            preset = sweep.preset(row["policy"])
            rows.append({
                "context": context, "section": "emulated", "policy": files.get(row["policy"], row["policy"]),
                "preset": files.get(row["policy"], row["policy"]), "lossless": row["lossless"],
                "writes_back": preset.evict_writeback, "budget": float(row["budget"]), "ratio": ratio,
                "link_gbps": gbps, **_measured(row, tokens),
            })  # fmt: skip
    settings = {
        "repeats": work.repeats, "prompts_each": work.prompts_each, "learn": work.learn, "link_gbps": gbps,
        "max_tokens": work.max_tokens, "load_average": load_average, "executor": report.executor,
    }  # fmt: skip
    return rows, settings, kept


def kept_file(folder: Path, context: str) -> Path:
    """The result of one context, beside which an unfinished one is kept."""
    return folder / f"activeevict-emulated-{context}.json"


def _sweep(base: RunConfig, split: Split, work: Workload, gbps: float, variants: Mapping[str, str]) -> Sweep:
    split = split.take(work.learn, work.repeats * work.prompts_each)
    on = base.model_copy(update={"link": LinkSettings(gbps=gbps, latency_us=LATENCY_US)})
    return Sweep(
        on, (*PRESETS, *variants), tuple(str(budget) for budget in work.budgets), (gbps,), split.measure, split.learn,
        work.repeats, work.max_tokens, fresh=True, files=variants,
    )  # fmt: skip


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


def _measured(row: Mapping[str, Any], tokens: int) -> Row:
    """Medians of one row of a sweep, whose repetitions generated so many tokens each; all of them under "values"."""
    spread = row["spread"]
    each = [_repetition(of_repetition(spread, number), tokens) for number in range(len(spread["tpot_s"]["values"]))]
    if row["lossless"]:  # or the comparison would have failed
        each = [found | {"same_tokens": 1.0} for found in each]
    values = {name: [found[name] for found in each] for name in each[0]}
    return {name: median(found) for name, found in values.items()} | {"values": values}


def _repetition(counters: Mapping[str, Any], tokens: int) -> dict[str, float]:
    """late_ms: the link's copies ended later than at its stated rate, for each token."""
    return {
        "tpot_ms": 1e3 * counters["tpot_s"], "ttft_ms": 1e3 * counters["ttft_s"],
        **asdict(transfers(counters, tokens)),
        "late_ms": 1e3 * (counters["total_io_s"] - counters["link_s"]) / tokens,
        "same_tokens": counters["same_tokens"],
    }  # fmt: skip
