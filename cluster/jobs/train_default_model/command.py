"""The command-line form of the job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train_default_model_command(
    out: Annotated[Path, typer.Option(help="Folder of the model to write.")] = Path("models/tiny-moe"),
    work_dir: Annotated[
        Path, typer.Option(help="Folder for the tokenised corpus, checkpoints and train.jsonl.")
    ] = Path("build/train-default-model"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    workers: Annotated[int, typer.Option(min=1, help="CPU processes, one thread each.")] = 2,
    minutes: Annotated[float, typer.Option(min=0, help="Active minutes of training; 0: no such limit.")] = 80.0,
    tokens: Annotated[int, typer.Option(min=0, help="Tokens to train on; 0: no such limit.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the order of the corpus.")] = 0,
    resume: Annotated[bool, typer.Option(help="Go on from the checkpoint in the work folder.")] = True,
    check_bars: Annotated[bool, typer.Option(help="Exit with 1 where the model misses a bar.")] = True,
) -> None:
    """Train the model that ships with tiermoe (about 80 minutes on two CPU cores)."""
    if not minutes and not tokens:
        raise typer.BadParameter("one of --minutes and --tokens has to be above 0")
    if device not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter(f"device is auto, cpu or cuda, not {device!r}")
    from rich.console import Console

    from .job import train_default_model

    report = train_default_model(
        out,
        work_dir,
        device=device,
        workers=workers,
        minutes=minutes or None,
        tokens=tokens or None,
        seed=seed,
        resume=resume,
    )
    console = Console()
    for kind, value in report.figures.bits_per_byte.items():
        console.print(f"held-out {kind}: {value:.3f} bits per byte")
    console.print(f"least used expert: {report.figures.least_share:.4f} of its layer's routed tokens")
    console.print(f"{report.tokens / 1e6:.1f} M tokens, model in {report.model_dir}")
    for sentence in report.missed:
        console.print(f"[red]missed:[/red] {sentence}")
    if report.missed and check_bars:
        raise typer.Exit(1)
