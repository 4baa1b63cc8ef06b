"""Trains the model that ships with tiermoe: prepare the corpus, train, export, measure, write the card.

`make train-default-model`, or `python models/tiny-moe/train/train.py --help`. See docs/default-model.md.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tiermoe.errors import RuntimeFailure, TierMoeError

MODEL_DIR = Path(__file__).resolve().parents[1]


def command(
    out: Annotated[Path, typer.Option(help="Folder of the model to write.")] = MODEL_DIR,
    work_dir: Annotated[
        Path, typer.Option(help="Folder for the tokenised corpus, checkpoints and train.jsonl.")
    ] = Path("build/train-default-model"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    workers: Annotated[int, typer.Option(min=1, help="CPU processes, one thread each.")] = 2,
    minutes: Annotated[float, typer.Option(min=0, help="Active minutes of training; 0: no such limit.")] = 0.0,
    tokens: Annotated[int, typer.Option(min=0, help="Tokens to train on; 0: no such limit.")] = 13_400_000,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the order of the corpus.")] = 0,
    resume: Annotated[bool, typer.Option(help="Go on from the checkpoint in the work folder.")] = True,
    check_bars: Annotated[bool, typer.Option(help="Exit with 1 where the model misses a bar.")] = True,
) -> None:
    """Train the model that ships with tiermoe (about two hours and a half of one CPU core)."""
    if not minutes and not tokens:
        raise typer.BadParameter("one of --minutes and --tokens has to be above 0")
    if device not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter(f"device is auto, cpu or cuda, not {device!r}")
    # torch and transformers take seconds to import: not for `--help`
    import torch
    from rich.console import Console

    from data import prepare
    from export import RunFacts, bars, calibration_section, describe_hardware, export, measure, model_card
    from loop import LoopConfig, train
    from model import default_config, new_model
    from optimizer import Budget

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    workers = 1 if device == "cuda" else workers

    corpus = prepare(work_dir)
    config = default_config()
    parameters = dict(new_model(config, seed).to(device).named_parameters())
    loop = LoopConfig(work_dir, Budget(tokens or None, minutes or None), seed=seed, workers=workers)
    shared = train(config, parameters, loop, resume)
    export(config, shared.parameters, work_dir, out)
    figures = measure(out)
    steps, seen, active_s = shared.counters.tolist()
    facts = RunFacts(int(seen), int(steps), active_s / 60, describe_hardware(device, workers), corpus)
    card = model_card(figures, facts, calibration_section(out))
    (out / "README.md").write_text(card, encoding="utf-8")

    console = Console()
    for kind, value in figures.bits_per_byte.items():
        console.print(f"held-out {kind}: {value:.3f} bits per byte")
    console.print(f"{facts.tokens / 1e6:.1f} M tokens, model in {out}")
    missed = [sentence for sentence, met in bars(figures).items() if not met]
    for sentence in missed:
        console.print(f"[red]missed:[/red] {sentence}")
    if missed and check_bars:
        raise typer.Exit(1)


if __name__ == "__main__":
    try:
        typer.run(command)
    except TierMoeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, RuntimeFailure) else 2)
