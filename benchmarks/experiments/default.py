"""The default policy against the two that it picks from, and what no policy can beat: README's first figure."""

from __future__ import annotations

from tiermoe.cluster.jobs.bench import options
from tiermoe.cluster.jobs.bench.experiment import Experiment, Grid, RatioBar, Served, Workload, variants
from tiermoe.cluster.jobs.bench.page import COPIES, TPOT, Figure, Panel, over, table

_SECTIONS = (
    Served("budgets", variants("on-demand", "next-gate", "auto", "default")),
    Served("resident", variants("all-resident"), budgets=("1.0",)),
)  # fmt: skip
_BARS = (RatioBar(section="budgets", of="default", over=("on-demand", "next-gate", "auto"), limit=1.05),)
_TABLES = {
    "budgets": table([("GB/s", "{link_gbps:g}"), ("budget", "{budget}"), ("policy", "{policy}"),
                      ("hit rate", "{hit_rate:.1%}"), ("TTFT (ms)", "{ttft_ms:.1f}"), ("TPOT (ms)", TPOT),
                      ("times faster than on-demand", over("on-demand", inverse=True)),
                      ("default over it", over("default", inverse=True)), *COPIES]),
}  # fmt: skip
_FIGURES = {
    "default.png": Figure((Panel(each=("link_gbps",), x="expert_budget_bytes", x_scale=1e-6, y="tpot_s", y_scale=1e3,
                                 series="policy", level=("all-resident",), from_zero=True,
                                 x_label="device memory for experts (MB of 101)", y_label="time per output token (ms)",
                                 title="link of {link_gbps:g} GB/s"),), size=(4.4, 3.4), highlight=("default",)),
}  # fmt: skip


def experiment(
    repeats: options.Repeats = 5, budgets: options.Budgets = "0.125,0.25,0.5", links: options.Links = "2,8,32",
    prompts: options.Prompts = 2,
    warm: options.Warm = 2, prompt_tokens: options.PromptTokens = 32, max_tokens: options.DecodeTokens = 24,
) -> Experiment:  # fmt: skip
    """Time per output token of the default policy, next-gate, auto, on-demand and all-resident, by budget and link."""
    return Experiment(
        name="default", title="The default policy against next-gate, auto, on-demand and all-resident",
        sections=_SECTIONS,
        workload=Workload(
            prompt_tokens=prompt_tokens, max_tokens=max_tokens, warm=warm, prompts=prompts, repeats=repeats
        ),
        grid=Grid(options.budgets(budgets), options.links(links), latency_us=10.0), bars=_BARS,
        shown=("policy", "budget", "link_gbps", "hit_rate", "ttft_ms", "tpot_ms", "blocked_io_s",
               "mb_loaded", "mb_wasted"),
        tables=_TABLES, figures=_FIGURES,
    )  # fmt: skip
