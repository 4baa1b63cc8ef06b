"""Policies side by side: the experiment of an installed package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..evaluate.quality import EvaluationOptions
from . import options
from .experiment import Experiment, Grid, Served, Workload, chosen_policies
from .page import AT, COPIES, TPOT, ranged, table, yes_no

_TABLES = {
    "cells": table(
        [*AT, ("lossless", yes_no("lossless")), ("hit rate", "{hit_rate:.1%}"),
         ("TTFT (ms)", ranged("ttft_s", ".1f", 1e3)), ("TPOT (ms)", TPOT), *COPIES],
    ),
    "quality": table(
        [("budget", "{budget}"), ("policy", "{policy}"), ("perplexity over lossless", "{perplexity_ratio:.4f}"),
         ("top-1 agreement", "{top1_agreement:.2%}"), ("mean KL (nats)", "{kl_nats:.5f}"),
         ("answers with the same tokens", "{same_tokens:.0%}")],
    ),
}  # fmt: skip


def experiment(
    policies: options.Policies,
    prompts: Annotated[Path, typer.Option(help="Text, one prompt a line, or JSON lines.")],
    budgets: options.Budgets = "0.25",
    links: options.Links = "16",
    repeat: Annotated[int, typer.Option("--repeat", "--repeats", min=1, help="Counted repetitions of each cell.")] = 5,
    max_tokens: options.MaxTokens = 32,
    warm: Annotated[
        Path | None, typer.Option(help="Prompts served first, uncounted; default: one round of --prompts.")
    ] = None,
    batch: Annotated[int, options.count("Prompts in flight together.")] = 1,
    prompt_tokens: Annotated[int | None, options.count("Cut prompts to so many tokens.")] = None,
    fresh: Annotated[bool, typer.Option(help="Each repetition takes its own share of the prompts.")] = False,
    quality_documents: Annotated[int, options.count("Held-out documents to score lossy policies on.")] = 6,
) -> Experiment:
    """Policies side by side on the same prompts, at every budget and link; run again, an interrupted one resumes."""
    return Experiment(
        name="compare",
        title="Policies side by side",
        sections=(Served(name="compare", variants=chosen_policies(policies), score="lossy"),),
        workload=Workload(
            prompt_tokens=prompt_tokens, prompts_file=prompts, warm_file=warm, max_tokens=max_tokens, repeats=repeat,
            batch=batch, fresh=fresh, quality=EvaluationOptions(documents=quality_documents),
        ),
        grid=Grid(budgets=options.budgets(budgets), links=options.links(links)),
        printed="cells",
        tables=_TABLES,
    )  # fmt: skip
