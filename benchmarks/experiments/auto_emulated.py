"""`auto` against the fixed rules that it chooses between, emulated: by budget and link."""

from __future__ import annotations

from typing import Annotated

import typer

from tiermoe.cluster.jobs.bench import options
from tiermoe.cluster.jobs.bench.experiment import Experiment, Grid, RatioBar, Served, Workload, chosen_policies
from tiermoe.cluster.jobs.bench.page import AT, TPOT, over, table
from tiermoe.cluster.jobs.bench.random_model import LAYERS, Form

_BARS = (
    RatioBar(section="auto", of="auto", over=("on-demand", "next-gate", "monde", "context-ndp-full"), limit=1.05),
)  # fmt: skip
_TABLES = {
    "cells": table([*AT, ("hit rate", "{hit_rate:.1%}"), ("TTFT (ms)", "{ttft_ms:.1f}"), ("TPOT (ms)", TPOT),
                    ("over auto", over("auto")), ("loaded (MB)", "{mb_loaded:.0f}")]),
}  # fmt: skip


def experiment(
    budgets: options.Budgets = "0.125,0.25,0.5", links: options.Links = "2,8,32",
    policies: options.Policies = "on-demand,next-gate,monde,context-ndp-full,auto", repeats: options.Repeats = 5,
    prompts: options.Prompts = 1,
    warm: options.Warm = 3, prompt_tokens: options.PromptTokens = 32, max_tokens: options.MaxTokens = 32,
    seed: Annotated[
        int | None, options.count("Sample tokens at temperature 1 with this seed; default: greedy.", least=0)
    ] = None,
    form: Annotated[
        Form | None, typer.Option(help="Form of the experts of a random --model; default: q4_0.")
    ] = None,
    layers: Annotated[int | None, options.count(f"Layers of a random --model; default: {LAYERS}.")] = None,
) -> Experiment:  # fmt: skip
    """auto against on-demand, next-gate, monde and context-ndp-full: token time by budget and link, in turns."""
    return Experiment(
        name="auto-emulated", title="auto against fixed rules, emulated",
        sections=(Served("auto", chosen_policies(policies)),),
        workload=Workload(
            prompt_tokens=prompt_tokens, max_tokens=max_tokens, repeats=repeats, prompts=prompts, warm=warm, seed=seed
        ),
        grid=Grid(options.budgets(budgets), options.links(links)), form=form, layers=layers, bars=_BARS,
        shown=("policy", "budget", "link_gbps", "hit_rate", "ttft_ms", "tpot_ms", "mb_loaded"), tables=_TABLES,
    )  # fmt: skip
