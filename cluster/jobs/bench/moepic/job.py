"""MoEpic against its baselines: real runs of presets, and hit rates on a recorded trace."""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from rich.progress import Progress

from .....errors import ConfigError
from ....config import RunConfig, load_policy
from ..compare.kept import Kept
from ..compare.report import compare
from ..compare.sweep import Sweep, digest, surroundings
from ..prompt_split import Split, split_prompts
from ..recorded import Recorded, read_split, record_split
from ..serving import run_config
from ..steps import Steps
from . import findings, footprint
from .calibration import CALIBRATED, Calibration, calibrate
from .hits import hit_table
from .report import MoepicReport
from .simulated import simulate
from .store import ensure_predictors
from .sweeps import NAMES, sweep_files, sweeps
from .timelines import trace_decode
from .work import Workload

OWN_KEYS = ("policy", "budget", "link")
_SHOWN = (
    "setting", "policy", "budget", "link_gbps", "hit_rate", "ttft_ms", "tpot_ms", "blocked_io_s", "mb_loaded",
    "mb_wasted",
)  # fmt: skip
_DISTANCES = 4  # layers ahead that the trace holds


def bench_moepic(
    model: str | None, repeats: int, work: Workload, folder: Path | None, progress: Progress | None,
    file: str | None = None,
) -> tuple[MoepicReport, list[Kept | Steps]]:  # fmt: skip
    """All figures of the page.

    Args:
        folder: where unfinished parts are kept, to go on with; None: nowhere.
        file: configuration of everything but `OWN_KEYS`.

    Returns:
        The report, and what was kept, to be discarded once it is written.

    Raises:
        CheckpointError: the model ships too little held-out text.
        ConfigError, RuntimeFailure: as `compare`.
    """
    base, load_average = run_config(model, file), os.getloadavg()[0]
    presets = [load_policy(name) for name in dict.fromkeys((*work.policies, *work.ablation))]
    passages = split_prompts(base.model_dir, work.prompt_tokens)
    split, traced = passages.take(work.warm, repeats * work.prompts), passages.take(*work.trace_prompts)
    out = dict(zip((*NAMES, "parts"), sweep_files(folder), strict=True)) if folder is not None else {}
    parts = Steps(out.get("parts"), _fingerprint(base, split, traced, repeats, work))
    calibration = Calibration(**parts.get("calibration", lambda: asdict(_calibrated(base, split, work, progress))))
    links = work.links or tuple(dict.fromkeys(calibration.link(ratio) for ratio in work.ratios))
    ensure_predictors(base, presets, progress)
    with tempfile.TemporaryDirectory(prefix="tiermoe-moepic-") as scratch:
        @cache
        def recorded() -> Recorded:
            trace = record_split(base, traced, work.trace_tokens, _DISTANCES, Path(scratch) / "trace", progress)
            return read_split(trace, len(traced.learn))

        hits = parts.get("hits", lambda: hit_table(recorded(), work, progress))
        found = sweeps(base, split, repeats, work, links, Path(scratch) / "policies")
        ran = {name: compare(sweep, out.get(name), progress) for name, sweep in found.items()}
        rows = [{"setting": name} | row for name, (report, _) in ran.items() for row in report.rows]
        missed = findings.missed(rows, calibration)
        timelines = parts.get("timelines", lambda: _timelines(found["budgets"], missed, work, progress))
        simulated = parts.get(
            "simulated", lambda: simulate(recorded(), found["budgets"], missed, progress) if missed else None
        )
    points = footprint.points_of(rows, "budgets", links[0])
    budgets = ran["budgets"][0]
    report = MoepicReport(
        "moepic", budgets.executor, rows, findings.bars_of(rows, calibration),
        budgets.settings | _settings(work, calibration, links, load_average), _SHOWN, asdict(calibration), hits,
        footprint.footprints(points, footprint.targets_of(points)), timelines, simulated,
    )  # fmt: skip
    return report, [parts, *(kept for _, kept in ran.values())]


def _calibrated(base: RunConfig, split: Split, work: Workload, progress: Progress | None) -> Calibration:
    return calibrate(base, split.measure[:CALIBRATED], work.max_tokens, CALIBRATED, progress)


def _timelines(
    sweep: Sweep, missed: list[tuple[str, float, str]], work: Workload, progress: Progress | None
) -> list[dict[str, Any]]:
    """Of each missed cell the timelines of moepic and the best baseline, on the prompts of the first repetition."""
    task = progress.add_task("timelines", total=2 * len(missed)) if progress is not None and missed else None
    groups = {(group.budget, group.gbps): group for group in sweep.groups}
    prompts = [sweep.prompts[i] for i in sweep.round(0)]
    found = []
    for budget, gbps, best in missed:
        traced = []
        for policy in (findings.OWN, best):
            config = sweep.config(policy, groups[budget, gbps])
            traced.append(asdict(trace_decode(config, sweep.warm_up, prompts, work.max_tokens)))
            if progress is not None and task is not None:
                progress.advance(task)
        found.append({"budget": budget, "link_gbps": gbps, "best": best, "own": traced[0], "other": traced[1]})
    return found


def _settings(work: Workload, calibration: Calibration, links: tuple[float, ...], load: float) -> dict[str, Any]:
    return {
        "ratios": [calibration.ratio(gbps) for gbps in links], "in_regime": [*map(calibration.in_regime, links)],
        "asked": list(work.ratios), "links_given": bool(work.links), "tau": work.tau, "warm_tokens": work.warm_tokens,
        "trace_prompts": list(work.trace_prompts), "trace_tokens": work.trace_tokens,
        "prompt_tokens_each": work.prompt_tokens, "quality_documents": work.quality_documents, "load_average": load,
    }  # fmt: skip


def _fingerprint(base: RunConfig, split: Split, traced: Split, repeats: int, work: Workload) -> dict[str, Any]:
    if len(split.measure) < repeats:
        raise ConfigError(f"{len(split.measure)} measured prompts do not go into {repeats} parts", "raise --prompts")
    return {
        **surroundings(base), "repeats": repeats, "work": asdict(work),
        "prompts": digest([split.learn, split.measure, traced.learn, traced.measure]),
    }  # fmt: skip
