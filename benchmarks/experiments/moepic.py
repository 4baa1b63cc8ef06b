"""MoEpic: Tables 1 and 3, Figures 7 and 8, and the links on which its TPOT would be 0.7 of its best baseline's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise, product
from typing import Annotated, Any

import numpy as np
import typer

from tiermoe.actors.policies.eviction import EvictionPolicy
from tiermoe.actors.policies.moepic import Lcp
from tiermoe.cluster.jobs.bench import options
from tiermoe.cluster.jobs.bench.experiment import (
    Experiment,
    Grid,
    RatioBar,
    Served,
    TraceSizes,
    Variant,
    Workload,
    variants,
)
from tiermoe.cluster.jobs.bench.metrics import Row, median_of
from tiermoe.cluster.jobs.bench.page import AT, COPIES, TPOT, Figure, Panel, fixed, over, pivot, table, yes_no
from tiermoe.cluster.jobs.bench.run import Study
from tiermoe.cluster.jobs.evaluate.quality import EvaluationOptions
from tiermoe.cluster.simulate.hit_rates import POLICIES, Ids, hit_rates, policies
from tiermoe.cluster.simulate.statistics import routing_of

from ..papers import CLAIMS, Comparison, judged
from ..replayed import Replayed

_SECTIONS = (
    Served("budgets",
           variants("on-demand", "cache-only", "prefetch-only", "pre-gated", "mixtral-offloading", "adapmoe-lossless",
                    "moe-infinity", "moe-infinity-sync", "moepic"), score="lossy"),
    Served("ablation", variants("moepic", "moepic-no-sp", "moepic-no-lcp", "moepic-no-cca"), budgets=("0.25", "0.5"),
           links="first", score="lossy"),
    Served("sensitivity",
           variants("moepic", Variant("theta 0.1", "moepic-no-cca", {"split": {"theta": 0.1}}),
                    Variant("theta 0.25", "moepic-no-cca", {"split": {"theta": 0.25}}),
                    Variant("theta 0.4", "moepic-no-cca", {"split": {"theta": 0.4}}),
                    Variant("theta 0.5", "moepic-no-cca", {"split": {"theta": 0.5}}),
                    Variant("theta 0.75", "moepic-no-cca", {"split": {"theta": 0.75}}),
                    Variant("theta 1", "moepic-no-cca", {"split": {"theta": 1.0}}),
                    Variant("zeta 0.005", "moepic", {"split": {"zeta": 0.005}}),
                    Variant("zeta 0.01", "moepic", {"split": {"zeta": 0.01}}),
                    Variant("zeta 0.02", "moepic", {"split": {"zeta": 0.02}}),
                    Variant("zeta 0.05", "moepic", {"split": {"zeta": 0.05}})), budgets=("0.25",), links="first",
           score="lossy"),
    Replayed("links", variants("mixtral-offloading", "adapmoe-lossless", "moe-infinity", "moe-infinity-sync", "moepic"),
             budgets=("0.25", "0.5"), ratios=(0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)),
)  # fmt: skip
COMPARISONS = (
    Comparison("TPOT of moepic over", "Figure 7d", "budgets", "tpot_s",
               {"prefetch-only": 0.343, "pre-gated": 0.343, "mixtral-offloading": 0.525, "adapmoe-lossless": 0.59,
                "moe-infinity-sync": 0.625}, of="moepic",
               why={"prefetch-only": "slower where little fits, faster at budget 0.75", "pre-gated": "the same",
                    "mixtral-offloading": "it waits for its prefetches",
                    "adapmoe-lossless": "not its waits but its host, see below"}),
    Comparison("TTFT of moepic over", "Figure 7a", "budgets", "ttft_s",
               {"pre-gated": 0.554, "mixtral-offloading": 0.808, "adapmoe-lossless": 0.803, "moe-infinity-sync": 0.827},
               of="moepic"),
    Comparison("TPOT over moepic's of", "Table 3", "ablation", "tpot_s",
               {"moepic-no-sp": 1.32, "moepic-no-lcp": 1.19, "moepic-no-cca": 1.46}, over="moepic", by="of",
               why={"moepic-no-lcp": "most of it is random eviction's Python: it hardly waits"}),
    Comparison("TPOT of moepic over", "not in the paper", "budgets", "tpot_s",
               {"cache-only": "lower", "on-demand": "lower"}, of="moepic", headline=False),
)  # fmt: skip
_BARS = (
    RatioBar(section="budgets", of="moepic",
             over=("pre-gated", "mixtral-offloading", "adapmoe-lossless", "moe-infinity", "moe-infinity-sync"),
             budgets=("0.25", "0.5"), regime=True, limit=0.7),
)  # fmt: skip
_TABLES = {
    "links": table([("GB/s", "{gbps:g}"), ("loading (ms)", lambda row: f"{row['load_s'] * 1e3:.2f}"),
                    ("computing (ms)", lambda row: f"{row['compute_s'] * 1e3:.2f}"),
                    ("loading over computing", "{ratio:.2f}"), ("in the regime", yes_no("in_regime"))],
                   source="settings.links"),
    "table1": pivot([("policy", "{policy}")], "{size} experts", "{hit_rate:.2%}", source="hits.rates"),
    "budgets": table([*AT, ("hit rate", "{hit_rate:.1%}"), ("TTFT (ms)", "{ttft_ms:.1f}"), ("TPOT (ms)", TPOT),
                      ("moepic over it", over("moepic", inverse=True)), *COPIES], section="budgets"),
    "quality": table([("policy", "{policy}"), ("budget", "{budget}"), ("GB/s", "{link_gbps:g}"),
                      ("perplexity over lossless", "{perplexity_ratio:.4f}"),
                      ("top-1 agreement", "{top1_agreement:.2%}"), ("mean KL (nats)", "{kl_nats:.5f}"),
                      ("answers with the same tokens", "{same_tokens:.0%}")], lossless=False, section="budgets"),
    "simulated-links": pivot([("budget", "{budget}"), ("GB/s", "{link_gbps:g}"),
                              ("loading over computing", "{ratio:.2f}")], "{policy}", "{tpot_ms:.2f}", section="links"),
    "ablation": table([*AT, ("TTFT (ms)", "{ttft_ms:.1f}"), ("over moepic", over("moepic", "ttft_s")),
                       ("TPOT (ms)", "{tpot_ms:.2f}"), ("over moepic", over("moepic")), ("hit rate", "{hit_rate:.1%}")],
                      section="ablation"),
    "sensitivity": table([*AT, ("hit rate", "{hit_rate:.1%}"), ("TTFT (ms)", "{ttft_ms:.1f}"), ("TPOT (ms)", TPOT),
                          ("moepic over it", over("moepic", inverse=True)), *COPIES], section="sensitivity"),
    "lcp": pivot([("rho", "{rho:g}")], "omega {omega}", "{hit_rate:.2%}", source="hits.lcp"),
    "memory": pivot([("policy", "{policy}")], "{target_ms:g} ms",
                    lambda row: f"{'<= ' if row['at_most'] else ''}{row['bytes'] / 1e6:.1f}", source="footprints"),
}  # fmt: skip
_FIGURES = {
    "moepic-budgets.png": Figure((Panel(where={"section": "budgets"}, each=("link_gbps",), x="expert_budget_bytes",
                                        x_scale=1e-6, y="ttft_s", y_scale=1e3, series="policy", from_zero=True,
                                        x_label="budget (MB of experts)", y_label="TTFT (ms)",
                                        title="{link_gbps:g} GB/s"),
                                  Panel(where={"section": "budgets"}, each=("link_gbps",), x="expert_budget_bytes",
                                        x_scale=1e-6, y="tpot_s", y_scale=1e3, series="policy", from_zero=True,
                                        x_label="budget (MB of experts)", y_label="TPOT (ms)",
                                        title="{link_gbps:g} GB/s")), size=(5.0, 3.2), highlight=("moepic",)),
    "moepic-memory.png": Figure((Panel(source="hits.rates", x="size", y="hit_rate", series="policy",
                                       executor="simulated", x_label="cached experts of a layer", y_label="hit rate",
                                       title="hit rate by eviction"),
                                 Panel(source="footprints", x="target_ms", y="bytes", y_scale=1e-6, series="policy",
                                       executor="emulated", x_label="target TPOT (ms)", y_label="expert memory (MB)",
                                       title="memory for a time per token")), size=(4.5, 3.4),
                                highlight=("moepic", "lcp"), beside=True),
    "moepic-sensitivity.png": Figure((Panel(where={"section": "sensitivity"}, kind="bar", each=("budget", "link_gbps"),
                                            x="policy", y="tpot_s", y_scale=1e3, x_label=" ", y_label="TPOT (ms)",
                                            title="budget {budget}, {link_gbps:g} GB/s"),), size=(5.0, 3.4),
                                     highlight=("moepic",)),
}  # fmt: skip


# Hit rate in percent, Qwen1.5-MoE on MMLU: 10 to 50 of 60 experts.
_PAPER_TABLE1 = (
    ("RND", 16.41, 33.02, 49.69, 67.41, 83.15), ("LFU", 24.36, 43.74, 60.68, 75.84, 89.34),
    ("LRU", 19.11, 38.88, 56.38, 73.16, 88.97), ("LCP", 25.56, 45.36, 62.21, 77.12, 90.08),
)  # fmt: skip
# TTFT and TPOT without a part over those with it.
_PAPER_TABLE3 = (("moepic-no-sp", "1.05", "1.32"), ("moepic-no-lcp", "1.09", "1.19"), ("moepic-no-cca", "1.21", "1.46"))
_PAPER = {
    "paper-table1": fixed(("policy", *(f"{size} of 60" for size in (10, 20, 30, 40, 50))), _PAPER_TABLE1),
    "paper-table3": fixed(("policy", "TTFT over MoEpic's in the paper", "TPOT over MoEpic's in the paper"),
                          _PAPER_TABLE3),
}  # fmt: skip


def _after(study: Study) -> dict[str, Any]:
    return judged(COMPARISONS, study) | {"hits": _table1(study), "footprints": footprints(study.rows)}


def experiment(
    repeats: options.Repeats = 5, budgets: options.Budgets = "0.125,0.25,0.5,0.75",
    ratios: Annotated[
        str,
        typer.Option(help="Of each emulated link: loading over computing. The first is that of ablation etc."),
    ] = "2.5,1",
    links: Annotated[
        str, typer.Option(help="Emulated links in 1e9 bytes per second, in place of --ratios.")
    ] = "",
    prompts: options.Prompts = 2, warm: options.Warm = 6, prompt_tokens: options.PromptTokens = 32,
    max_tokens: options.DecodeTokens = 20,
    tau: Annotated[int, options.count("Tokens between two cache configurations.")] = 240,
    trace_tokens: options.TraceTokens = 64,
    quality_documents: Annotated[int, options.count("Held-out documents to score lossy policies on.")] = 2,
) -> Experiment:  # fmt: skip
    """MoEpic against its baselines: TTFT and TPOT by budget and link, ablation, sensitivity, hit rates, memory."""
    return Experiment(
        name="moepic", title="MoEpic: split experts against its baselines", sections=_SECTIONS,
        workload=Workload(
            prompt_tokens=prompt_tokens, max_tokens=max_tokens, warm=warm, prompts=prompts, repeats=repeats, tau=tau,
            trace=TraceSizes(learn=16, measure=16, tokens=trace_tokens),
            quality=EvaluationOptions(documents=quality_documents),
        ),
        grid=Grid(
            options.budgets(budgets), options.links(links) if links else (), options.numbers(ratios, "ratios"),
            calibrate="resident",
        ),
        # loading over computing where the paper measures (figure 2d: 34.55% to 49.45% of it can be hidden)
        regime=(2.0, 3.0), after=_after, bars=_BARS,
        shown=("section", "policy", "budget", "link_gbps", "hit_rate", "ttft_ms", "tpot_ms", "blocked_io_s",
               "mb_loaded", "mb_wasted"),
        tables=CLAIMS | _TABLES | _PAPER, figures=_FIGURES,
    )  # fmt: skip


# -- Figure 8: memory for a TPOT ---------------------------------------------------------------------------------------

Point = tuple[float, float]  # bytes of the budget, TPOT in milliseconds
_TARGETS = 5  # TPOTs


def footprints(every: Sequence[Row]) -> list[dict[str, Any]]:
    """The least expert memory that reaches each of five TPOTs, by policy, at the first link."""
    rows = [row for row in every if row["section"] == "budgets"]
    rows = [row for row in rows if row["link_gbps"] == rows[0]["link_gbps"]]
    points: dict[str, list[Point]] = {}
    for row in rows:
        points.setdefault(row["policy"], []).append((median_of(row, "expert_budget_bytes"), float(row["tpot_ms"])))
    points = {policy: sorted(found) for policy, found in points.items()}
    # targets: evenly from the lowest TPOT of all to the middle policy's at the smallest budget, rounded up
    low = min(tpot for found in points.values() for _, tpot in found)
    smallest = sorted(found[0][1] for found in points.values())
    high = max(smallest[len(smallest) // 2], low)
    steps = [low + (high - low) * (i + 1) / _TARGETS for i in range(_TARGETS)]
    targets = sorted({float(f"{step + 0.05:.1f}") for step in steps})
    return [
        {"policy": policy, "target_ms": target} | least_budget(measured, target)
        for policy, measured in points.items() for target in targets
    ]  # fmt: skip


def least_budget(points: Sequence[Point], target_ms: float) -> dict[str, Any]:
    """The least budget that reaches a TPOT, linear between measured budgets.

    TPOT never rises with the budget: more memory can always do what less memory did.

    Returns:
        bytes, None where no measured budget reaches it; at_most, whether a budget below the measured ones may do.
    """
    reached: list[Point] = []
    best = float("inf")
    for nbytes, tpot in points:
        best = min(best, tpot)
        reached.append((nbytes, best))
    if reached[0][1] <= target_ms:
        return {"bytes": reached[0][0], "at_most": True}
    for (small, above), (large, below) in pairwise(reached):
        if below <= target_ms:
            return {"bytes": small + (large - small) * (above - target_ms) / (above - below), "at_most": False}
    return {"bytes": None, "at_most": False}


# -- Table 1: hit rates by cache size ----------------------------------------------------------------------------------

_SHARES = (0.1667, 0.3333, 0.5, 0.6667, 0.8333)  # of a layer's experts that its cache holds, as in Table 1
_RHOS, _OMEGAS = (0.1, 0.25, 0.5, 0.75), (32, 128, 512)


def _table1(study: Study) -> dict[str, Any]:
    """Hit rates by policy and size of each layer's cache, and those of LCP by rho and omega at the middle size.

    The requests to learn from are played first, uncounted.
    """

    def measure() -> dict[str, Any]:
        recorded = study.recorded(study.contexts[0])
        header = recorded.header
        sizes = sorted({max(1, round(share * header.experts)) for share in _SHARES})
        half, pairs = sizes[len(sizes) // 2], list(product(_RHOS, _OMEGAS))
        stepped = study.stepped("hit rates on the trace", len(POLICIES) * len(sizes) + len(pairs))
        ids = routing_of(header, [*recorded.learn, *recorded.measure]).ids.astype(np.int64)
        counted = np.arange(ids.shape[1]) >= routing_of(header, recorded.learn).ids.shape[1]
        table = hit_rates(ids, sizes, policies(), counted, stepped)
        named = {f"{rho:g} {omega}": partial(_lcp, rho, omega) for rho, omega in pairs}
        grid = {row.policy: row.overall for row in hit_rates(ids, [half], named, counted, stepped)}
        return {
            "experts": header.experts, "tokens": int(counted.sum()), "lcp_size": half,
            "rates": [{"policy": row.policy, "size": row.size, "hit_rate": row.overall} for row in table],
            "lcp": [{"rho": rho, "omega": omega, "hit_rate": grid[f"{rho:g} {omega}"]} for rho, omega in pairs],
        }  # fmt: skip

    found: dict[str, Any] = study.journal.step("moepic-table1", measure)
    return found


def _lcp(rho: float, omega: int, ids: Ids) -> EvictionPolicy:
    return Lcp(1, int(ids.max(initial=0)) + 1, rho, omega)
