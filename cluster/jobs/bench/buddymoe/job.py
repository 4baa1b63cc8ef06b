"""BuddyMoE against random replacement and dropping: quality and speed of the same runs, at every cache rate."""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import Progress

from .....errors import ConfigError
from ....config import RunConfig, engine_settings
from ..compare.kept import Kept
from ..compare.report import compare
from ..compare.sweep import Sweep, digest, surroundings
from ..moepic.calibration import CALIBRATED, Calibration, calibrate
from ..moepic.store import ensure_predictors
from ..prompt_split import Split, split_prompts
from ..serving import prepared_store, run_config
from ..steps import Steps
from .findings import SETTING, bars_of, comparisons
from .methods import methods, presets_of, write_methods
from .redundancy import redundancy
from .report import BuddyReport
from .scoring import Scoring
from .work import Workload

OWN_KEYS = ("policy", "budget", "link")
_SHOWN = (
    "policy", "budget", "link_gbps", "tpot_ms", "perplexity_ratio", "top1_agreement", "kl_nats", "mb_loaded",
    "hit_rate",
)  # fmt: skip
_NAMES = ("runs", "parts")


def bench_buddymoe(
    model: str | None, repeats: int, work: Workload, folder: Path | None, progress: Progress | None,
    file: str | None = None,
) -> tuple[BuddyReport, list[Kept | Steps]]:  # fmt: skip
    """All figures of the page.

    Each cell is one worker that serves prompts for the speed, and one that scores held-out text, on a link of the same
    rate whose clock layers move.

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
    split = split_prompts(base.model_dir, work.prompt_tokens).take(work.warm, repeats * work.prompts)
    out = dict(zip(_NAMES, kept_files(folder), strict=True)) if folder is not None else {}
    parts = Steps(out.get("parts"), _fingerprint(base, split, repeats, work))
    calibration = Calibration(**parts.get(
        "calibration",
        lambda: asdict(calibrate(base, split.measure[:CALIBRATED], work.max_tokens, CALIBRATED, progress)),
    ))  # fmt: skip
    gbps = calibration.link(work.ratio) if work.link is None else work.link
    found = [m for m in methods(calibration.top_k) if not work.methods or m.name in work.methods]
    if len(found) < len(work.methods):
        raise ConfigError(
            f"no such methods among {', '.join(work.methods)}", f"name some of {_names(calibration.top_k)}"
        )
    ensure_predictors(base, presets_of(found), progress)
    with tempfile.TemporaryDirectory(prefix="tiermoe-buddymoe-") as scratch:
        sweep = Sweep(
            base, tuple(method.name for method in found), work.rates, (gbps,), split.measure, split.learn, repeats,
            work.max_tokens, fresh=True, files=write_methods(found, Path(scratch)),
        )  # fmt: skip
        store = prepared_store(base, engine_settings(base))
        scoring = Scoring(base.model_dir, store, work.quality, calibration.compute_s * 1e6)
        ran, kept = compare(sweep, out.get("runs"), progress, score=scoring, score_lossless=True)
    rows = [{"setting": SETTING} | row for row in ran.rows]
    compared = comparisons(rows, work.quality)
    settings = ran.settings | {
        "ratio": calibration.ratio(gbps), "asked": work.ratio, "link_given": work.link is not None,
        "prompt_tokens_each": work.prompt_tokens, "quality": asdict(work.quality), "load_average": load_average,
    }  # fmt: skip
    report = BuddyReport(
        "buddymoe", ran.executor, rows, bars_of(compared), settings, _SHOWN, asdict(calibration),
        [comparison.as_dict() for comparison in compared], redundancy(store),
    )  # fmt: skip
    return report, [parts, kept]


def kept_files(folder: Path) -> tuple[Path, ...]:
    """Results beside which unfinished ones are kept."""
    return tuple(folder / f"buddymoe-{name}.json" for name in _NAMES)


def _names(top_k: int) -> str:
    return ", ".join(f"'{method.name}'" for method in methods(top_k))


def _fingerprint(base: RunConfig, split: Split, repeats: int, work: Workload) -> dict[str, Any]:
    if len(split.measure) < repeats:
        raise ConfigError(f"{len(split.measure)} measured prompts do not go into {repeats} parts", "raise --prompts")
    return {
        **surroundings(base), "repeats": repeats, "work": asdict(work), "prompts": digest([split.learn, split.measure]),
    }  # fmt: skip
