"""ActiveEvict against its baselines: recorded traces on simulated links, and the engine itself on a throttled one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import Progress

from .....errors import ConfigError
from ....config import RunConfig
from ....host import has_gpu
from ....simulate.executor import Machine
from ..compare.kept import Kept
from ..compare.sweep import digest, surroundings
from ..metrics import Report
from ..page_parts import rounded
from ..prompt_split import Split, split_prompts
from ..serving import run_config
from ..steps import Steps
from .bars import bars_of
from .earlier import simulated_before
from .emulated import Throttled, emulate, kept_file
from .simulated import simulate
from .work import LATENCY_US, Workload

OWN_KEYS = ("policy", "budget", "link")
_SHOWN = (
    "section", "context", "budget", "ratio", "policy", "writes_back", "blocking_ms", "total_ms", "loaded_mb",
    "redundant",
)  # fmt: skip


def bench_activeevict(
    model: str | None, work: Workload, folder: Path | None, earlier: Path | None, progress: Progress | None,
    file: str | None = None,
) -> tuple[Report, list[Kept | Steps]]:  # fmt: skip
    """All figures of the page.

    Args:
        folder: where unfinished parts are kept, to go on with; None: nowhere.
        earlier: the JSON of a run before, of which the simulated rows are taken where only the emulated part is run.
        file: configuration of everything but `OWN_KEYS`.

    Returns:
        The report, and what was kept, to be discarded once it is written.

    Raises:
        CheckpointError: the model ships too little held-out text. ConfigError, RuntimeFailure: as `record`, `compare`
            and `simulated_before`.
    """
    base = run_config(model, file)
    passages = {context: split_prompts(base.model_dir, tokens) for context, tokens in work.contexts}
    emulated = _emulated_prompts(base, passages, work) if "emulated" in work.parts else {}
    kept: list[Kept | Steps] = []
    if "simulated" in work.parts:
        steps = Steps(None if folder is None else _steps_file(folder), _fingerprint(base, passages, work))
        kept.append(steps)
        rows, settings = _simulated(base, passages, work, steps, progress)
    else:
        rows, settings = simulated_before(earlier, base, work)
    executors = ["simulated"]
    if emulated:
        with tempfile.TemporaryDirectory(prefix="tiermoe-activeevict-") as scratch:
            ran, settings["emulated"], found = emulate(
                base, emulated, work, _link(rows, settings), Path(scratch), folder, progress
            )
        rows, kept = [*rows, *ran], [*kept, *found]
        executors.append(settings["emulated"]["executor"])
    report = Report("activeevict", ", ".join(executors), rounded(rows), bars_of(rows), rounded(settings), _SHOWN)
    return report, kept


def kept_files(folder: Path, work: Workload) -> list[Path]:
    """Results beside which unfinished ones are kept."""
    return [_steps_file(folder), *(kept_file(folder, context) for context, _ in work.contexts)]


def _emulated_prompts(base: RunConfig, passages: Mapping[str, Split], work: Workload) -> dict[str, Split]:
    """Refuses, before anything is measured, what could not be emulated afterwards."""
    if base.device == "cuda" or (base.device == "auto" and has_gpu()):
        remedy = "pass --parts simulated, or --config FILE with device: cpu"
        raise ConfigError("links are emulated on the CPU stand-in only", remedy)
    return {context: split.take(work.learn, work.repeats * work.prompts_each) for context, split in passages.items()}


def _link(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> Throttled:
    """The first of the simulated ones."""
    row = next(row for row in rows if row["section"] == "table" and row["ratio"] == settings["ratios"][0])
    return Throttled(row["link_gbps"], row["ratio"], Machine(**settings["machine"]))


def _simulated(
    base: RunConfig, passages: Mapping[str, Split], work: Workload, steps: Steps, progress: Progress | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    load_average = os.getloadavg()[0]
    splits = {context: split.take(work.learn, work.measure) for context, split in passages.items()}
    found = steps.get("simulated", lambda: simulate(base, splits, work, progress) | {"load_average": load_average})
    return found["rows"], {
        "model": base.model_dir.name, "contexts": dict(work.contexts), "learn": work.learn, "measure": work.measure,
        "max_tokens": work.max_tokens, "ratios": list(work.ratios), "latency_us": LATENCY_US,
        "machine": found["machine"], "load_average": found["load_average"],
    }  # fmt: skip


def _steps_file(folder: Path) -> Path:
    return folder / "activeevict-simulated.json"


def _fingerprint(base: RunConfig, passages: Mapping[str, Split], work: Workload) -> dict[str, Any]:
    """Whatever changes a replay: what is emulated after it does not."""
    sizes = {key: value for key, value in asdict(work).items() if key not in ("parts", "repeats", "prompts_each")}
    prompts = [[split.learn, split.measure] for split in passages.values()]
    return {**surroundings(base), "work": sizes, "prompts": digest(prompts)}
