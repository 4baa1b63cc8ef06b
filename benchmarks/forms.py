"""`bench forms`: one model in several published forms, at the same bytes of budget and over the same link."""

from __future__ import annotations

import itertools
import tempfile
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.progress import Progress

from tiermoe.cluster.config import RunConfig, parse_budget
from tiermoe.cluster.jobs.bench.metrics import Bar, Case, Measures, Report, Spread, interleaved, ratio
from tiermoe.cluster.jobs.bench.random_model import Form, MoeShape
from tiermoe.cluster.jobs.bench.serving import run_config, serve, start_worker

from .cases import Forms
from .random_model import save_published

LATENCY_US = 10.0
PROMPT_TOKENS, MAX_TOKENS = 4, 48
_BARS = {  # measure -> its words, and the most of its ratio over the bytes' ratio
    "moved_per_token": ("bytes moved for a token", 1.0), "blocked_ms_per_token": ("blocked I/O", 1.0),
    "tpot_s": ("time of a token", 1.25),
}  # fmt: skip
_SHOWN = (
    "budget", "form", "expert_bytes", "bytes_ratio", "experts_held", "hit_rate", "moved_per_token", "moved_ratio",
    "tokens_per_s", "tpot_ratio", "blocked_ms_per_token",
)  # fmt: skip


def forms(options: Forms, progress: Progress | None) -> Report:
    """Bytes moved and time of a decoded token in each form, against bfloat16 with the same budget in bytes.

    The model has Qwen3-MoE's architecture and random weights, which are quantized in each form. Tokens are sampled at
    temperature 1, with one seed for all forms: a greedy random model repeats itself. A quantized model has other
    tokens, so each round takes another prompt and rounds are compared by medians.

    `bytes_ratio`: an expert's bytes over those in bfloat16. `moved_ratio`, `tpot_ratio`: bytes moved over the link for
    a token, and time of a token, over bfloat16's, medians of the rounds' ratios.

    Bars, for each form and budget: `moved_ratio`, and the ratio of blocked I/O, <= `bytes_ratio`; `tpot_ratio` <= 1.25
    `bytes_ratio`.

    Raises:
        ConfigError: the package that writes a form is not installed. RuntimeFailure: a request failed.
    """
    shape = MoeShape(options.layers, options.experts, 8, options.hidden, options.intermediate, vocabulary=4096)
    chosen = tuple(dict.fromkeys((Form.BF16, *options.form)))
    settings = options.settings(
        latency_us=LATENCY_US, prompt_tokens=PROMPT_TOKENS, max_tokens=MAX_TOKENS, threads=1, top_k=shape.top_k
    )
    report = Report("forms", "", settings=settings, shown=_SHOWN)
    draw = np.random.default_rng(0)
    prompts = draw.integers(0, shape.vocabulary, (options.repeats + 1, options.prompts, PROMPT_TOKENS))
    with tempfile.TemporaryDirectory(prefix="tiermoe-forms-") as scratch:
        task = None if progress is None else progress.add_task("writing the model", total=len(chosen))
        made = {}
        for form in chosen:
            made[form] = save_published(form, shape, Path(scratch) / form)
            if progress is not None and task is not None:
                progress.advance(task)
        whole = shape.layers * shape.experts * 3 * shape.hidden * shape.intermediate * 2  # bytes in bfloat16
        for budget in options.budget:
            share = parse_budget(budget)
            nbytes = round(share * whole) if isinstance(share, float) else share
            configs = {form: _config(options, made[form], Path(scratch), nbytes) for form in chosen}
            _measure(options, budget, configs, prompts.tolist(), report, progress)
    return report


def _config(options: Forms, model: Path, scratch: Path, budget: int) -> RunConfig:
    link = {"gbps": options.link_gbps, "latency_us": LATENCY_US}
    store = str(scratch / f"{model.name}-store")
    return run_config(
        str(model), None, policy=options.policy, budget=f"{budget}B", link=link, store=store, dtype="bfloat16"
    )


def _measure(
    options: Forms, budget: str, configs: dict[Form, RunConfig], prompts: list[list[list[int]]], report: Report,
    progress: Progress | None,
) -> None:  # fmt: skip
    """The rows and bars of one budget."""

    def case(form: Form, worker: Any) -> Case:
        turns = itertools.count()

        def run() -> Measures:
            group = prompts[next(turns)]
            worker.reset_stats()
            taken = [serve(worker.submit, [tuple(prompt)], MAX_TOKENS, seed=7)[0]["tpot_s"] for prompt in group]
            stats = worker.stats()
            total, tokens = stats.total(), len(group) * (PROMPT_TOKENS + MAX_TOKENS - 1)
            return {
                "tpot_s": sum(taken) / len(taken), "moved_per_token": total.bytes_loaded / tokens,
                "blocked_ms_per_token": 1e3 * total.blocked_io_s / tokens, "hit_rate": stats.hit_rate,
            }  # fmt: skip

        return Case(form, run)

    with ExitStack() as stack:
        workers = {form: stack.enter_context(closing(start_worker(config))) for form, config in configs.items()}
        report.executor = workers[Form.BF16].stats().executor
        cases = [case(form, worker) for form, worker in workers.items()]
        found = interleaved(cases, options.repeats, 1, progress, f"decoding, budget {budget}")
        sizes = {form: worker.engine.slot_bytes for form, worker in workers.items()}
        held = {form: worker.stats().slots for form, worker in workers.items()}
    base = found[Form.BF16]
    for form in configs:
        measures, bytes_ratio = found[form], sizes[form] / sizes[Form.BF16]
        ratios = {name: _paired(measures[name], base[name]) for name in _BARS}
        report.rows.append({
            "budget": budget, "form": str(form), "expert_bytes": sizes[form], "bytes_ratio": bytes_ratio,
            "experts_held": held[form],
            **{name: measures[name].median for name in ("hit_rate", "moved_per_token", "blocked_ms_per_token")},
            "moved_ratio": ratios["moved_per_token"], "tokens_per_s": 1 / measures["tpot_s"].median,
            "tpot_ratio": ratios["tpot_s"], "spread": {name: asdict(spread) for name, spread in measures.items()},
        })  # fmt: skip
        if form is not Form.BF16:
            for name, (words, limit) in _BARS.items():
                what = f"{words} over an expert's bytes, {form} over bf16, budget {budget}"
                report.bars.append(Bar(what, ratios[name] / bytes_ratio, "<=", limit))


def _paired(spread: Spread, base: Spread) -> float:
    """Median of the rounds' ratios."""
    return median(ratio(value, other) for value, other in zip(spread.values, base.values, strict=True))
