"""fMoE against its baselines: real runs of presets, and expert maps on a recorded trace."""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import Progress

from .....errors import ConfigError
from ....config import RunConfig
from ...prepare.measures import add_predictors
from ..compare.kept import Kept
from ..compare.report import compare
from ..compare.sweep import Sweep
from ..metrics import Report
from ..page_parts import rounded
from ..prompt_split import Split, split_prompts
from ..recorded import Recorded, own_store, read_split, record_split
from ..serving import run_config
from .maps import CAPACITIES, DISTANCE, DISTANCES, balance, correlations, hit_rates, recalls

PAPER = ("fmoe", "moe-infinity", "promoe", "mixtral-offloading", "deepspeed-inference")  # by TPOT there, best first
OFFLINE = ("on-demand", "next-gate", *reversed(PAPER[1:]), "fmoe-t", "fmoe-ts", "fmoe", "fmoe-blend")
ONLINE = ("on-demand", "next-gate", *reversed(PAPER[1:]), "fmoe")
OWN_KEYS = ("policy", "budget", "link", "store", "matcher")
_SHOWN = (
    "setting", "policy", "budget", "link_gbps", "hit_rate", "ttft_ms", "tpot_ms", "blocked_io_s", "mb_loaded",
    "mb_wasted",
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """Sizes.

    prompts: in all, 70% to learn from; prompt_tokens, max_tokens: of each. trace_tokens: generated for each passage of
    the trace, which has every held-out passage, or the first `trace_prompts`.
    """

    prompts: int = 34
    prompt_tokens: int = 32
    max_tokens: int = 8
    budgets: tuple[str, ...] = ("0.125", "0.25", "0.5")
    links: tuple[float, ...] = (2.0, 16.0)
    trace_tokens: int = 96
    trace_prompts: int | None = None
    capacities: tuple[int, ...] = CAPACITIES

    def __post_init__(self) -> None:
        for option in ("prompts", "prompt_tokens", "max_tokens", "trace_tokens"):
            if getattr(self, option) < 1:
                raise ConfigError(f"--{option.replace('_', '-')} is {getattr(self, option)}", "give at least 1")


@dataclass
class FmoeReport(Report):
    """A report with what the page shows besides the runs. `expert_maps`: see `maps`, as plain values."""

    expert_maps: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return rounded(super().as_dict() | {"expert_maps": self.expert_maps})


def bench_fmoe(
    model: str | None, repeats: int, work: Workload, folder: Path | None, progress: Progress | None,
    file: str | None = None,
) -> tuple[FmoeReport, list[Kept]]:  # fmt: skip
    """All figures of the page.

    Args:
        folder: where unfinished sweeps are kept, to go on with; None: nowhere.
        file: configuration of everything but `OWN_KEYS`.

    Returns:
        The report, and what was kept, to be discarded once it is written.

    Raises:
        CheckpointError: the model ships too little held-out text.
        ConfigError, RuntimeFailure: as `compare`.
    """
    base, load_average = run_config(model, file), os.getloadavg()[0]
    passages = split_prompts(base.model_dir, work.prompt_tokens)
    split = passages.first(work.prompts)
    if len(split.measure) < repeats:
        raise ConfigError(f"{len(split.measure)} measured prompts do not go into {repeats} parts", "raise --prompts")
    traced = passages if work.trace_prompts is None else passages.first(work.trace_prompts)
    with tempfile.TemporaryDirectory(prefix="tiermoe-fmoe-") as scratch:
        distances = min(6, max(DISTANCES))
        trace = record_split(base, traced, work.trace_tokens, distances, Path(scratch) / "trace", progress)
        store = own_store(base, Path(scratch))
        add_predictors(store, trace, DISTANCE, len(traced.learn))  # the stride policy knows only what is learnt
        config = base.model_copy(update={"store": str(store)})
        kept = [_sweep(config, split, repeats, work, folder, progress, online) for online in (False, True)]
        simulated = _simulated(read_split(trace, len(traced.learn)), work, progress)
    (offline, _), (online, _) = kept
    rows = [{"setting": "7:3"} | row for row in offline.rows] + [{"setting": "online"} | row for row in online.rows]
    settings = offline.settings | {
        "online_policies": list(ONLINE), "trace_prompts": [len(traced.learn), len(traced.measure)],
        "trace_tokens": work.trace_tokens, "split": [len(split.learn), len(split.measure)],
        "prompt_tokens_each": work.prompt_tokens, "load_average": load_average,
    }  # fmt: skip
    report = FmoeReport("fmoe", offline.executor, rows, settings=settings, shown=_SHOWN, expert_maps=simulated)
    return report, [found for _, found in kept]


def _sweep(
    config: RunConfig, split: Split, repeats: int, work: Workload, folder: Path | None, progress: Progress | None,
    online: bool,
) -> tuple[Report, Kept]:  # fmt: skip
    sweep = Sweep(
        config, ONLINE if online else OFFLINE, work.budgets, work.links, split.measure, () if online else split.learn,
        repeats, work.max_tokens, fresh=True,
    )  # fmt: skip
    return compare(sweep, None if folder is None else sweep_files(folder)[online], progress)


def sweep_files(folder: Path) -> tuple[Path, Path]:
    """Results of the 7:3 and the online sweep, beside which unfinished ones are kept."""
    return folder / "fmoe-7-3.json", folder / "fmoe-online.json"


def _simulated(recorded: Recorded, work: Workload, progress: Progress | None) -> dict[str, Any]:
    steps = len(DISTANCES) * 7 + len(work.capacities)
    task = progress.add_task("expert maps on the trace", total=steps) if progress is not None else None

    def stepped() -> None:
        if progress is not None and task is not None:
            progress.advance(task)

    budget, gbps = 0.25, 2.0
    recall = [
        {"source": r.source, "distance": r.distance, "recall": r.overall, "predictions": r.predictions}
        for r in recalls(recorded, DISTANCES, stepped)
    ]
    header = recorded.header
    return {
        "executor": "simulated", "layers": header.layers, "experts": header.experts, "top_k": header.top_k,
        "recall": recall,
        "hit_rates": hit_rates(recorded, DISTANCES, work.capacities, budget, gbps, stepped),
        "correlations": [asdict(found) for learns in (True, False) for found in correlations(recorded, learns=learns)],
        "balance": balance(recorded),
    }  # fmt: skip
