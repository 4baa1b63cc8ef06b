"""The whole job: prepare, train, export, measure, write the card."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from .card import RunFacts, bars, calibration_section, describe_hardware, model_card
from .export import Figures, export, measure
from .launch import train
from .loop import LoopConfig
from .model import default_config, new_model
from .prepare import prepare
from .schedule import Budget


@dataclass(frozen=True)
class TrainingReport:
    """Result of the job; ``missed`` lists the bars that the model did not reach."""

    model_dir: Path
    figures: Figures
    tokens: int
    missed: tuple[str, ...]


def train_default_model(
    out_dir: Path,
    work_dir: Path,
    *,
    device: str = "auto",
    workers: int = 2,
    minutes: float | None = 80.0,
    tokens: int | None = None,
    seed: int = 0,
    resume: bool = True,
) -> TrainingReport:
    """Train the default model and write its folder.

    ``device`` is ``auto``, ``cpu`` or ``cuda``; ``workers`` are the CPU processes; training ends at
    ``minutes`` of active CPU time or at ``tokens``, whichever comes first. With ``resume``, a run
    that was cut off goes on from its last checkpoint in ``work_dir``.

    Raises CorpusTooSmallError, WorkerFailedError.
    """
    place = _resolve_device(device)
    workers = 1 if place == "cuda" else workers
    corpus = prepare(work_dir)
    config = default_config()
    model = new_model(config, seed).to(place)
    loop = LoopConfig(work_dir, Budget(tokens, minutes), seed=seed, workers=workers)
    shared = train(config, dict(model.named_parameters()), loop, resume)
    steps, seen, active_s = shared.counters.tolist()
    facts = RunFacts(int(seen), int(steps), active_s / 60, describe_hardware(place, workers), corpus)
    return finish(out_dir, work_dir, shared.parameters, facts, accelerator=place == "cuda")


def finish(
    out_dir: Path, work_dir: Path, parameters: dict[str, torch.Tensor], facts: RunFacts, accelerator: bool
) -> TrainingReport:
    """Export the parameters, measure the folder, write its card."""
    export(default_config(), parameters, work_dir, out_dir)
    figures = measure(out_dir)
    card = model_card(figures, facts, accelerator, calibration_section(out_dir))
    (out_dir / "README.md").write_text(card, encoding="utf-8")
    missed = tuple(text for text, met in bars(figures, accelerator).items() if not met)
    return TrainingReport(out_dir, figures, facts.tokens, missed)


def _resolve_device(device: str) -> str:
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is auto, cpu or cuda, not {device!r}")
    return device
