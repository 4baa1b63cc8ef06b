"""`tiermoe eval`: a table, or with `--json` one flat object on stdout."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from ....errors import ConfigError
from ...config import check_model_dir, engine_settings, on_this_machine
from ...host import cpu, now, versions
from ...report.output import print_json
from ...report.tables import Grid, grid, results, show, size
from ..local_worker import run_config, start_worker
from ..options import AsJson, Budget, Model, Policy, Threads, with_options
from ..prepare.needs import check_artifacts
from .quality import EvaluationOptions, Quality

_SHOWN: Mapping[str, tuple[str, Callable[[float], str]]] = {  # a measure's name for people, and its form
    "perplexity": ("perplexity", "{:.4f}".format),
    "perplexity_ratio": ("perplexity over lossless", "{:.5f}".format),
    "bits_per_byte": ("bits per byte of text", "{:.4f}".format),
    "top1_agreement": ("likeliest token as lossless", "{:.2%}".format),
    "kl_nats": ("KL divergence from lossless, nats", "{:.3g}".format),
    "choice_accuracy": ("multiple choice, right", "{:.1%}".format),
    "choice_agreement": ("multiple choice, as lossless", "{:.1%}".format),
    "reference_perplexity": ("lossless: perplexity", "{:.4f}".format),
    "reference_choice_accuracy": ("lossless: multiple choice, right", "{:.1%}".format),
    "loaded_per_token": ("loaded a scored token", size),
}
_FROM_STATS = ("ndp_tokens", "hit_rate", "bytes_loaded", "expert_budget_bytes")


@with_options("kv.dtype")
def eval_command(
    policy: Policy,
    options: dict[str, Any],
    sizes: EvaluationOptions,
    model: Model = None,
    budget: Budget = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Your own text: a UTF-8 file, or .jsonl with a text a line; default: held-out text."),
    ] = None,
    threads: Threads = 1,
    as_json: AsJson = False,
) -> None:
    """Perplexity, agreement with lossless and multiple choice on held-out text or your own, with 95% intervals."""
    if text is not None and sizes.items is not None:
        raise ConfigError("--items is given with --text, which has no multiple choices", "leave one of them out")
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        record, found = evaluate(model, policy, budget, threads, sizes, progress, text, **options)
    show(results(as_json), quality_table(found))
    if as_json:
        print_json(record)


def evaluate(
    model: str | None,
    policy: str,
    budget: str | None,
    threads: int,
    sizes: EvaluationOptions,
    progress: Progress | None,
    text: Path | None = None,
    **options: Any,
) -> tuple[dict[str, Any], Quality]:
    """Measure one policy on the held-out text, or on a user's: the flat record and the quality in it.

    Args:
        sizes: of the evaluation. options: further keys of a run's configuration. Lossless is measured with a KV cache
            in numbers of the computation.

    Raises:
        TierMoeError: an option, the model or its held-out text is refused before anything starts; or a worker failed.
    """
    config = run_config(model, policy=policy, budget=budget, threads=threads, **options)
    settings = engine_settings(on_this_machine(config))
    check_model_dir(config.model_dir)
    check_artifacts(settings.policy, config)
    from .scoring import Evaluation  # torch takes seconds: imported after the options are checked

    begin_s = time.perf_counter()
    evaluation = Evaluation(config.model_dir, sizes, config, text)
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
        "budget": config.chosen_budget,
        "kv_dtype": config.kv.dtype,
        **quality.as_dict(),
        **{key: stats[key] for key in _FROM_STATS},
        **{key: getattr(sizes, key) for key in ("prefix", "continuation", "seed", "resamples", "rows")},
        **({"windows_per_document": sizes.windows or 1, "items_per_document": sizes.items or 1} if text is None else
           {"text": str(text), "texts": evaluation.texts}),
        "threads": threads,
        "wall_s": time.perf_counter() - begin_s,
    }
    return record, quality


def quality_table(quality: Quality) -> Grid:
    figures = quality.as_dict()
    what = f"{figures['items']} choices, {figures['documents']} documents" if figures["items"] else "your text"
    rows = [
        (_SHOWN[measure][0], *(_SHOWN[measure][1](figures[f"{measure}{end}"]) for end in ("", "_low", "_high")))
        for measure in quality.measures
    ]
    title = f"{quality.policy} ({quality.executor}): {figures['tokens']} tokens scored, {what}"
    return grid(title, ("measure", "value", "95% low", "95% high"), rows)
