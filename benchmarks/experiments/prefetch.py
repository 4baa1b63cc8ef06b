"""What prefetch saves of the waits for copies, where the link is busy nearly all of the time."""

from __future__ import annotations

from statistics import median

from tiermoe.cluster.jobs.bench import options
from tiermoe.cluster.jobs.bench.experiment import Experiment, Grid, RatioBar, Served, Workload, variants
from tiermoe.cluster.jobs.bench.page import table

_SECTIONS = (Served("prefetch", variants("on-demand", "next-gate"), warm=False),)
_BARS = (RatioBar(section="prefetch", of="next-gate", over=("on-demand",), measure="blocked_io_s", limit=0.8),)
_TABLES = {
    "waits": table([("policy", "{policy}"), ("blocked I/O (s)", "{blocked_io_s:.3f}"),
                    ("link busy (s)", lambda row: f"{median(row['values']['total_io_s']):.2f}"),
                    ("hit rate", "{hit_rate:.3f}"), ("loaded (MB)", "{mb_loaded:.0f}"),
                    ("wasted (MB)", "{mb_wasted:.0f}"), ("TPOT (ms)", "{tpot_ms:.2f}")]),
}  # fmt: skip


def experiment(
    repeats: options.Repeats = 5, budget: options.Budgets = "0.25", link_gbps: options.Links = "2"
) -> Experiment:
    """Blocked I/O with and without next-gate prefetch."""
    return Experiment(
        name="prefetch", title="Blocked I/O with and without prefetch", sections=_SECTIONS,
        workload=Workload(prompt_tokens=48, max_tokens=48, prompts=6, repeats=repeats, fresh=False),
        grid=Grid(options.budgets(budget, "budget"), options.links(link_gbps, "link-gbps"), latency_us=10.0),
        bars=_BARS,
        shown=("policy", "budget", "link_gbps", "hit_rate", "ttft_ms", "tpot_ms", "blocked_io_s",
               "mb_loaded", "mb_wasted"),
        tables=_TABLES,
    )  # fmt: skip
