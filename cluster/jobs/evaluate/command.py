"""`tiermoe eval`: a table, or with `--json` one flat object on stdout."""

from __future__ import annotations

import json
import time
from contextlib import closing
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from ...config import check_model_dir, engine_settings
from ...host import cpu, now, versions
from ...report.tables import Grid, grid, results, show
from ..bench.serving import run_config, start_worker
from ..options import AsJson, Budget, Model, Policy, Threads
from .quality import MEASURES, EvaluationOptions, Quality

_DEFAULT = EvaluationOptions()
_FROM_STATS = ("ndp_tokens", "hit_rate", "bytes_loaded", "expert_budget_bytes")


def eval_command(
    policy: Policy,
    model: Model = None,
    budget: Budget = None,
    documents: Annotated[int | None, typer.Option(help="Held-out documents to use at most. (all)")] = None,
    windows: Annotated[int, typer.Option(help="Windows of each document at most.")] = _DEFAULT.windows,
    items: Annotated[int, typer.Option(help="Choices of each document at most.")] = _DEFAULT.items,
    prefix: Annotated[int, typer.Option(help="Tokens of a window that are prefill.")] = _DEFAULT.prefix,
    continuation: Annotated[int, typer.Option(help="Tokens after them, scored.")] = _DEFAULT.continuation,
    rows: Annotated[
        int | None, typer.Option(help="Scored tokens of one forward at most; 1: as one request is served. (all)")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = _DEFAULT.seed,
    resamples: Annotated[int, typer.Option(help="Of the bootstrap.")] = _DEFAULT.resamples,
    threads: Threads = 1,
    as_json: AsJson = False,
) -> None:
    """Perplexity, agreement with lossless and multiple choice on held-out text, with 95% intervals."""
    options = EvaluationOptions(documents, windows, items, prefix, continuation, seed, resamples, rows)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        record, quality = evaluate(model, policy, budget, threads, options, progress)
    show(results(as_json), quality_table(quality))
    if as_json:
        print(json.dumps(record))


def evaluate(
    model: str | None,
    policy: str,
    budget: str | None,
    threads: int,
    options: EvaluationOptions,
    progress: Progress | None,
) -> tuple[dict[str, Any], Quality]:
    """Measure one policy: the flat record and the quality in it.

    Raises:
        TierMoeError: an option, the model or its held-out text is refused before anything starts; or a worker failed.
    """
    config = run_config(model, policy=policy, budget=budget, threads=threads)
    engine_settings(config)
    check_model_dir(config.model_dir)
    from .scoring import Evaluation  # torch takes seconds: imported after the options are checked

    begin_s = time.perf_counter()
    evaluation = Evaluation(config.model_dir, options, config)
    evaluation.reference(progress)
    with closing(start_worker(config)) as worker:
        worker.reset_stats()
        quality = evaluation.measure(worker, progress)
        stats = worker.stats().as_dict()
    record = {
        "name": "eval",
        "hardware": cpu(),
        "versions": versions(),
        "date": now(),
        "model": str(config.model_dir),
        "budget": config.budget,
        **quality.as_dict(),
        **{key: stats[key] for key in _FROM_STATS},
        **{key: getattr(options, key) for key in ("prefix", "continuation", "seed", "resamples", "rows")},
        "windows_per_document": options.windows,
        "items_per_document": options.items,
        "threads": threads,
        "wall_s": time.perf_counter() - begin_s,
    }
    return record, quality


def quality_table(quality: Quality) -> Grid:
    figures = quality.as_dict()
    title = f"{quality.policy} ({quality.executor}): {figures['tokens']} tokens, {figures['items']} choices, "
    rows = [
        (measure, *(f"{figures[key]:.5g}" for key in (measure, f"{measure}_low", f"{measure}_high")))
        for measure in MEASURES
    ]
    return grid(f"{title}{figures['documents']} documents", ("measure", "value", "95% low", "95% high"), rows)
