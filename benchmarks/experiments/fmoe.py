"""fMoE (section 6): expert maps against their baselines, offline (7:3 split) and online, and its ablation."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from tiermoe.cluster.jobs.bench import options
from tiermoe.cluster.jobs.bench.experiment import Experiment, Grid, Served, TraceSizes, Workload, variants
from tiermoe.cluster.jobs.bench.page import AT, COPIES, TPOT, Figure, Panel, over, pivot, table

from ..papers import CLAIMS, Comparison, judged

_SECTIONS = (
    Served("7:3",
           variants("on-demand", "next-gate", "deepspeed-inference", "mixtral-offloading", "promoe", "moe-infinity",
                    "fmoe-t", "fmoe-ts", "fmoe")),
    Served("online",
           variants("on-demand", "next-gate", "deepspeed-inference", "mixtral-offloading", "promoe", "moe-infinity",
                    "fmoe"), warm=False),
)  # fmt: skip
COMPARISONS = (
    Comparison("TPOT of fmoe over", "6.2: by 70%, 61%, 55%, 48%", "7:3", "tpot_s",
               {"on-demand": 0.3, "deepspeed-inference": 0.3, "mixtral-offloading": 0.39, "promoe": 0.45,
                "moe-infinity": 0.52}, of="fmoe",
               why={"on-demand": "the paper's DeepSpeed is on-demand loading with a cache (6.1); fmoe loads 0.99 "
                                 "(0.85 to 1.09) of its bytes",
                    "deepspeed-inference": "whole layers: six times the bytes",
                    "mixtral-offloading": "faster at 2 GB/s, slower at 16", "moe-infinity": "ours is asynchronous"}),
    Comparison("TTFT of fmoe over", "6.2: by 44%, 35%, 33%, 30%", "7:3", "ttft_s",
               {"on-demand": 0.56, "deepspeed-inference": 0.56, "mixtral-offloading": 0.65, "promoe": 0.67,
                "moe-infinity": 0.7}, of="fmoe"),
    Comparison("hit rate of fmoe over", "6.2: by 147%, 11%, 34%, 63%", "7:3", "hit_rate",
               {"on-demand": 2.47, "mixtral-offloading": 1.11, "promoe": 1.34, "moe-infinity": 1.63},
               of="fmoe",
               why={"on-demand": "no time comes of it", "mixtral-offloading": "it waits for what it asked for"}),
    Comparison("both searches and delta, hit rate over both without delta,", "6.5", "7:3", "hit_rate",
               {"fmoe-ts": "higher"}, of="fmoe", why="one point"),
    Comparison("both searches without delta, hit rate over trajectory search alone,", "6.5", "7:3", "hit_rate",
               {"fmoe-t": "higher"}, of="fmoe-ts"),
    Comparison("TPOT of fmoe over", "not in the paper", "7:3", "tpot_s", {"next-gate": "lower"}, of="fmoe",
               headline=False),
)  # fmt: skip
_TABLES = {
    "offline": table([*AT, ("hit rate", "{hit_rate:.1%}"), ("TTFT (ms)", "{ttft_ms:.1f}"), ("TPOT (ms)", TPOT),
                      ("over fmoe", over("fmoe")), *COPIES], section="7:3"),
    "online": pivot([("policy", "{policy}")], "{budget}, {link_gbps:g} GB/s", "{hit_rate:.1%}, {tpot_ms:.2f} ms",
                    section="online"),
    "ablation": pivot([("budget", "{budget}"), ("GB/s", "{link_gbps:g}")], "{policy}",
                      "{hit_rate:.1%}, {tpot_ms:.2f} ms", section="7:3", policy=("fmoe-t", "fmoe-ts", "fmoe")),
}  # fmt: skip
_FIGURES = {
    "fmoe-tpot.png": Figure((Panel(where={"section": "7:3"}, kind="bar", each=("budget", "link_gbps"), x="policy",
                                   y="tpot_s", y_scale=1e3, x_label=" ", y_label="TPOT (ms)",
                                   title="budget {budget}, {link_gbps:g} GB/s"),), size=(3.4, 3.2),
                            highlight=("fmoe",)),
    "fmoe-hits.png": Figure((Panel(where={"section": "7:3"}, kind="bar", each=("budget", "link_gbps"), x="policy",
                                   y="hit_rate", x_label=" ", y_label="expert hit rate",
                                   title="budget {budget}, {link_gbps:g} GB/s"),), size=(3.4, 3.2),
                            highlight=("fmoe",)),
}  # fmt: skip


def experiment(
    repeats: options.Repeats = 5,
    prompts: Annotated[int, options.count("Held-out prompts, 70% of them to learn from.")] = 34,
    prompt_tokens: options.PromptTokens = 32, max_tokens: options.MaxTokens = 8, trace_tokens: options.TraceTokens = 96,
) -> Experiment:  # fmt: skip
    """fMoE against its baselines: hit rate, TTFT, TPOT, bytes."""
    return Experiment(
        name="fmoe", title="fMoE: expert maps against their baselines",
        own_keys=("policy", "quality", "budget", "link", "store", "matcher"), sections=_SECTIONS,
        workload=Workload(
            prompt_tokens=prompt_tokens, max_tokens=max_tokens, total_prompts=prompts, repeats=repeats,
            trace=TraceSizes(tokens=trace_tokens, distances=6),
        ),
        grid=Grid(("0.125", "0.25", "0.5"), (2.0, 16.0)), after=partial(judged, COMPARISONS),
        shown=("section", "policy", "budget", "link_gbps", "hit_rate", "ttft_ms", "tpot_ms", "blocked_io_s",
               "mb_loaded", "mb_wasted"),
        tables=CLAIMS | _TABLES, figures=_FIGURES,
    )  # fmt: skip
