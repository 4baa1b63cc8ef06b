"""ActiveEvict: Table 3 with the fetch accuracy of Table 2, Figures 7 to 9; replays and real runs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from statistics import median
from typing import Annotated, Any

import typer

from tiermoe.cluster.jobs.bench import options
from tiermoe.cluster.jobs.bench.experiment import Experiment, Grid, Served, TraceSizes, Variant, Workload, variants
from tiermoe.cluster.jobs.bench.metrics import Bar, Row, Spread, values_of
from tiermoe.cluster.jobs.bench.page import Figure, Panel, lossy_marked, pivot, ranged, table, yes_no
from tiermoe.cluster.jobs.bench.run import Study
from tiermoe.cluster.jobs.bench.serving import Calibration, Recorded, Split, record_served, shape_of
from tiermoe.cluster.simulate.machine import Machine, load_machine

from ..papers import CLAIMS, Comparison, judged, transfers
from ..replayed import Replayed, replay

MOE_APEX = Variant("moe-apex", "hobbit", {"evict_writeback": True, "prefetch": {"distance": 2, "min_useful": 0.0}})
_SECTIONS = (
    Replayed("table", variants("on-demand", "moe-offloading", MOE_APEX, "activeevict-lossless", "activeevict"),
             twins=True),
    Replayed("capacity",
             variants("activeevict-lossless", "activeevict-prediction-only", "activeevict-hotness-only",
                      "activeevict-lru", "activeevict"), budgets=("0.125", "0.25", "0.375", "0.5", "0.75"),
             links="first"),
    Replayed("alpha",
             variants(*(Variant(f"{alpha:g}", "activeevict-lossless", {"eviction": {"alpha": alpha}})
                        for alpha in (0, 0.125, 0.25, 0.5, 0.75, 0.875, 1)), Variant("lru", "activeevict-lru")),
             budgets=("0.25",), links="first"),
    Served("emulated",
           variants("on-demand", "moe-offloading", MOE_APEX, "activeevict-lossless", "activeevict",
                    Variant("moe-offloading without write-back", "moe-offloading", {"evict_writeback": False}),
                    Variant("moe-apex without write-back", "hobbit", {"prefetch": {"distance": 2, "min_useful": 0.0}})),
           links="first"),
)  # fmt: skip
COMPARISONS = (
    Comparison("emulated, blocking I/O of activeevict over", "Table 3", "emulated", "blocked_io_s",
               {"on-demand": 0.548, "moe-offloading": 0.614, "moe-apex": 0.686}, of="activeevict",
               why={"on-demand": "a quarter fewer bytes", "moe-offloading": "it writes back, as the paper's does",
                    "moe-apex": "it loads 4-bit replicas and hides them"}),
    Comparison("emulated, blocking I/O where nothing writes back, over", "Table 3", "emulated", "blocked_io_s",
               {"moe-offloading without write-back": 0.614, "moe-apex without write-back": 0.686}, of="activeevict",
               headline=False,
               why={"moe-offloading without write-back": "a replay disagrees: its prefetches block 2.1 to 2.7 times "
                                                         "as long on the engine"}),
    Comparison("simulated, blocking I/O where nothing writes back, over", "Table 3", "table", "blocking_ms",
               {"on-demand": 0.548, "moe-offloading": 0.614, "moe-apex": 0.686}, of="activeevict",
               where={"writes_back": False}, headline=False),
    Comparison("simulated, blocking I/O of the full score over", "Figure 7; section 4.4", "capacity", "blocking_ms",
               {"activeevict-prediction-only": 0.88, "activeevict-hotness-only": 0.775, "activeevict-lru": 0.775},
               of="activeevict-lossless"),
    Comparison("simulated, blocking I/O of dynamic over fixed top-k,", "Figure 8; section 4.4", "capacity",
               "blocking_ms", {"activeevict-lossless": 0.9}, of="activeevict"),
)  # fmt: skip
_TABLES = {
    "table3": table([("budget", "{budget}"), ("policy", lossy_marked("policy")), ("writes back", yes_no("writes_back")),
                     ("blocking ms", "{blocking_ms:.3g}"), ("total ms", "{total_ms:.3g}"),
                     ("loaded MB", "{loaded_mb:.3g}"), ("back MB", "{written_back_mb:.3g}"),
                     ("redundant", "{redundant:.1%}"), ("P", "{precision:.1%}"), ("R", "{recall:.1%}"),
                     ("hit rate", "{hit_rate:.3f}"), ("TPOT ms", "{tpot_ms:.3g}")], each=("context", "ratio"),
                    heading="### {context} context, ratio {ratio:g}", section="table"),
    "emulated": table([("budget", "{budget}"), ("policy", lossy_marked("preset")),
                       ("writes back", yes_no("writes_back")), ("blocking ms", ranged("blocking_ms", ".3g")),
                       ("total ms", "{total_ms:.3g}"), ("loaded MB", "{loaded_mb:.3g}"),
                       ("back MB", "{written_back_mb:.3g}"), ("redundant", "{redundant:.1%}"), ("P", "{precision:.1%}"),
                       ("R", "{recall:.1%}"), ("hit rate", "{hit_rate:.3f}"), ("TPOT ms", ranged("tpot_s", ".3g", 1e3)),
                       ("tokens", "{same_tokens:.0%}"), ("blocked over replay", "{blocked_over_replay:.2f}")],
                      each=("context",), heading="### {context} context, emulated", section="emulated"),
    "capacity": pivot([("policy", "{policy}")], "{budget}", "{blocking_ms:.3g}", each=("context",),
                      heading="### {context} context: blocking I/O (ms a token) by budget", section="capacity"),
    "dropped": pivot([("context", "{context}")], "{budget}", "{dropped:.3g}", section="capacity", policy="activeevict"),
    "alpha": pivot([("context", "{context}")], "{policy}", "{blocking_ms:.3g}", section="alpha"),
}  # fmt: skip
_FIGURES = {
    "activeevict.png": Figure((Panel(where={"section": "capacity",
                                            "policy": ("activeevict-lossless", "activeevict-prediction-only",
                                                       "activeevict-hotness-only", "activeevict-lru")},
                                     each=("context",), x="budget", y="blocking_ms", series="policy", from_zero=True,
                                     x_label="budget", y_label="blocking I/O (ms a token)",
                                     title="{context}: order of eviction"),
                               Panel(where={"section": "capacity", "policy": ("activeevict-lossless", "activeevict")},
                                     each=("context",), x="budget", y="blocking_ms", series="policy", from_zero=True,
                                     x_label="budget", y_label="blocking I/O (ms a token)", title="{context}: top-k"),
                               Panel(where={"section": "alpha"}, each=("context",), x="policy", y="blocking_ms",
                                     from_zero=True, x_label="alpha", y_label="blocking I/O (ms a token)",
                                     title="{context}: weight of recent use")), size=(3.7, 2.9),
                              highlight=("activeevict-lossless",), beside=True),
}  # fmt: skip


_OWN = "activeevict-lossless"


def transfers_of_row(row: Row, tokens: int) -> dict[str, list[float]]:
    """`Transfers` of each repetition of an engine's row, whose repetitions generated so many tokens each.

    late_ms: delay of the copies against the link's stated rate, for each token.
    """
    each: list[dict[str, float]] = []
    for number in range(len(row["spread"]["tpot_s"]["values"])):
        counters: defaultdict[str, Any] = defaultdict(float)  # an absent counter was zero
        sources: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        for name, found in row["spread"].items():
            group, _, rest = name.partition(".")
            if group == "prefetch_sources":
                source, _, counter = rest.rpartition(".")
                sources[source][counter] = found["values"][number]
            else:
                counters[name] = found["values"][number]
        counters["prefetch_sources"] = sources
        late_s = counters["total_io_s"] - counters["link_s"]
        each.append(asdict(transfers(counters, tokens)) | {"late_ms": 1e3 * late_s / tokens})
    return {name: [found[name] for found in each] for name in each[0]}


def median_ratio(values: Sequence[float], over: Sequence[float]) -> float | None:
    """Median of the ratios by repetition; None where it is infinite.

    A zero in `over` counts as infinite: without its repetition the worst ratio would be hidden.
    """
    ratios = [a / b if b else math.inf for a, b in zip(values, over, strict=True) if a or b]
    middle = median(ratios) if ratios else math.inf
    return None if math.isinf(middle) else middle


def _add_transfers(study: Study) -> None:
    """Add `Transfers` to the served rows, and under `replayed` those of a replay of the same prompts."""
    work, latency_us = study.experiment.workload, study.base.link.latency_us
    cells = {(c.context, c.budget, c.gbps): c for c, _ in study.ran if c.section == "emulated"}
    recordings: dict[str, Recorded] = {}
    rows = [row for row in study.rows if row["section"] == "emulated"]
    stepped = study.stepped("replaying the same prompts", len(rows))
    for row in rows:
        cell = cells[row["context"], row["budget"], row["link_gbps"]]
        if cell.context not in recordings:
            prompts, out = Split(cell.warm, cell.prompts), study.scratch / f"served-{cell.context}"
            recordings[cell.context] = record_served(study.base, prompts, work.max_tokens, 2, out, study.progress)
        recorded, machine = recordings[cell.context], Machine(**study.settings["machine"])
        throttled = machine.model_copy(update={"link_gbps": cell.gbps, "link_latency_us": latency_us})
        policy = next(policy for policy in cell.policies if policy.name == row["policy"])
        again = replay(policy.settings, cell.budget, throttled, recorded, work.prompts)
        for name, values in transfers_of_row(row, work.prompts * work.max_tokens).items():
            row[name] = median(values)
            row["spread"][name] = asdict(Spread.of(values))
        row["same_tokens"] = 1.0 if row["lossless"] else row["same_tokens"]
        row["replayed"] = {name: [found[name] for found in again] for name in again[0]}
        row["blocked_over_replay"] = median_ratio(values_of(row, "blocking_ms"), row["replayed"]["blocking_ms"])
        if "emulated" not in study.settings:  # the first context's, as the machine of the replays
            header, now = recorded.header, load_machine(recorded.header, None, None, None)
            steps = [1e3 * Calibration.of_machine(shape_of(header), m, latency_us).tpot_s for m in (now, machine)]
            study.settings["emulated"] = {
                "slot_bytes": header.slot_bytes, "step_ms": steps[0], "replayed_step_ms": steps[1],
            }  # fmt: skip
        stepped()


def bars_of(rows: Sequence[Row]) -> Iterator[Bar]:
    """Bars on the blocking I/O of `activeevict-lossless` over the best prefetching baseline, and on the fetches.

    The ratio is the least over budgets and links of a context, once with write-back in the baselines (as published)
    and once without. Ratios of engine rows are medians over paired repetitions. The paper has 31% to 46% less.
    """
    for section, label in (("table", ""), ("emulated", ", emulated")):
        for context in dict.fromkeys(row["context"] for row in rows if row["section"] == section):
            mine = [row for row in rows if (row["section"], row["context"]) == (section, context)]
            for swaps, of in ((True, "as the baselines are, which write back"), (False, "where nobody writes back")):
                ratios = []
                for row in (row for row in mine if row["preset"] == _OWN and not row["writes_back"]):
                    over = [
                        median_ratio(values_of(row, "blocking_ms"), values_of(other, "blocking_ms"))
                        for other in mine
                        if other["preset"] in ("moe-offloading", "moe-apex") and other["writes_back"] == swaps
                        and (other["budget"], other["link_gbps"]) == (row["budget"], row["link_gbps"])
                    ]  # fmt: skip
                    if over and None not in over:
                        ratios.append(max(ratio for ratio in over if ratio is not None))
                least = min(ratios, default=math.nan)
                yield Bar(f"{context}{label}: blocking I/O, {of}", least, "<=", 0.7)
            fetches = [
                (row, name)
                for row in mine
                if row["preset"] in (_OWN, "activeevict")
                for name in ("precision", "recall")
            ]
            least = min((min(values_of(row, name)) for row, name in fetches), default=math.nan)
            yield Bar(f"{context}{label}: fetch precision and recall", least, ">=", 1.0)


def _after(study: Study) -> dict[str, Any]:
    found = judged(COMPARISONS, study)
    _add_transfers(study)
    study.bars += bars_of(study.rows)
    return found


def experiment(
    budgets: Annotated[
        str, typer.Option(help="Shares of the experts that fit, separated by commas.")
    ] = "0.25,0.5",
    ratios: Annotated[
        str,
        typer.Option(help="Of each simulated link: loading over computing. The first is the emulated one too."),
    ] = "1,2.5",
    short_tokens: Annotated[int, options.count("Of each prompt of short context.")] = 32,
    long_tokens: Annotated[int, options.count("Of each prompt of long context.")] = 256,
    prompts: Annotated[int, options.count("Held-out prompts that are counted in replays, of each context.")] = 8,
    warm: options.Warm = 4, max_tokens: options.MaxTokens = 48, repeats: options.Repeats = 5,
    prompts_each: Annotated[int, options.count("Held-out prompts of an emulated repetition, each met once.")] = 1,
    parts: Annotated[
        str,
        typer.Option(help="Sections to run: table, capacity, alpha (together: simulated), emulated; default: all."),
    ] = "",
) -> Experiment:  # fmt: skip
    """ActiveEvict against its baselines: blocking and total I/O, transfers, ablation; recorded traces, real runs."""
    return Experiment(
        name="activeevict", title="ActiveEvict: pre-eviction against prefetching", sections=_SECTIONS,
        parts=options.parts(parts),
        workload=Workload(
            contexts={"short": short_tokens, "long": long_tokens}, warm=warm, prompts=prompts_each,
            max_tokens=max_tokens, repeats=repeats,
            trace=TraceSizes(learn=warm, measure=prompts, tokens=max_tokens, distances=2),
        ),
        grid=Grid(
            options.budgets(budgets), ratios=options.numbers(ratios, "ratios"), latency_us=10.0, calibrate="trace"
        ),
        after=_after,
        shown=("section", "context", "budget", "ratio", "policy", "writes_back", "blocking_ms", "total_ms",
               "loaded_mb", "redundant"),
        tables=CLAIMS | _TABLES, figures=_FIGURES,
    )  # fmt: skip
