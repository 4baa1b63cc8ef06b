"""`docs/results/fmoe.md`: the report of `tiermoe bench fmoe` as a page, its raw data and its plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..figures import Row, cells, paired
from ..page_parts import paragraphs, serving_cells, table, write_record
from ..plots import plot_runs
from .findings import (
    ablation,
    against_baselines,
    best_policies,
    by_distance_and_capacity,
    hit_rate_order,
    of_balance,
    of_correlation,
    of_matcher,
    of_recall,
    of_resting,
    waited_hits,
)
from .job import FmoeReport
from .plots import colour, plot_maps


def write_page(report: FmoeReport, folder: Path) -> None:
    """Write fmoe.md, fmoe.json and the plots.

    Raises:
        ConfigError: the folder cannot be written, or matplotlib is missing.
    """
    record = report.as_dict()
    write_record(folder, "fmoe", record, page(record))
    plot_runs(folder / "fmoe-tpot.png", record["rows"], "7:3", "tpot_s", "TPOT (s)", colour)
    plot_runs(folder / "fmoe-hits.png", record["rows"], "7:3", "hit_rate", "expert hit rate", colour)
    plot_maps(folder / "fmoe-maps.png", record["expert_maps"])


def page(record: dict[str, Any]) -> str:
    """The page as Markdown, from `FmoeReport.as_dict()`."""
    settings, maps, hardware = record["settings"], record["expert_maps"], record["hardware"]
    tokens = settings["prompts_of_a_repetition"] * settings["max_tokens"]
    learn, each = settings["split"][0], settings["prompts_of_a_repetition"]
    rows = record["rows"]
    lines = [
        "# fMoE: expert maps against their baselines",
        "",
        f"Written by `{_command(settings)}` on {hardware['model']} ({hardware['cores']} cores), at a "
        f"load average of {settings['load_average']:.1f} when it began. Runs are *{record['executor']}* (the CPU "
        f"stands in for the GPU, the link is throttled, {settings['latency_us']:g} us "
        f"before each copy), expert maps on a recorded trace are *{maps['executor']}*. All data: "
        "[fmoe.json](fmoe.json).",
        "",
        f"Model {settings['model']}, {settings['threads']} thread, one request at a time. Held-out prompts of "
        f"{settings['prompt_tokens_each']} tokens, {settings['max_tokens']} generated after each; {learn} prompts fill "
        f"maps, matrices and caches first (7:3, no document on both sides), {settings['repeats'] * each} others are "
        f"measured, in {settings['repeats']} repetitions of {each}, each met once. Policies take "
        "turns in each repetition. Predictors of promoe are trained on a trace of the learnt documents. All policies "
        "are lossless and gave the same tokens. Tables: medians over the repetitions, TPOT with its range.",
        "",
        "## 7:3 split",
        "",
        *_sweep(rows, "7:3", tokens, maps["layers"]),
        of_balance(maps["balance"], maps["experts"], maps["top_k"]),
        "",
        "![TPOT](fmoe-tpot.png)",
        "",
        "![Hit rate](fmoe-hits.png)",
        "",
        "## Online: nothing is learnt before",
        "",
        *_sweep(rows, "online", tokens, maps["layers"]),
        "## Ablation",
        "",
        *_ablation(rows),
        "",
        *(f"- {sentence}" for sentence in ablation(rows, tokens)),
        "",
        *_on_a_trace(settings, maps),
    ]
    return "\n".join(lines)


def _sweep(rows: list[dict[str, Any]], setting: str, tokens: int, layers: int) -> list[str]:
    """What all policies did in one setting: the table, and the sentences that its figures give."""
    return [
        *_runs(rows, setting),
        "",
        best_policies(rows, setting),
        "",
        *(f"- {sentence}" for sentence in against_baselines(rows, setting, tokens)),
        "",
        hit_rate_order(rows, setting),
        "",
        *paragraphs(waited_hits(rows, setting, tokens), of_matcher(rows, setting, layers), of_resting(rows, setting)),
    ]


def _on_a_trace(settings: dict[str, Any], maps: dict[str, Any]) -> list[str]:
    """Recall, hit rate by distance and capacity, and correlations: simulated."""
    traced = settings["trace_prompts"]
    return [
        "## On a recorded trace",
        "",
        f"{traced[0]} prompts to learn from and {traced[1]} to measure, {settings['trace_tokens']} tokens generated "
        "after each; the search takes no time, and sources go on learning from what is measured. Recall of "
        "the true top-k by source and distance, decode rows only (prediction alone, no cache):",
        "",
        *_recall(maps["recall"]),
        "",
        of_recall(maps["recall"]),
        "",
        f"Hit rate of fmoe by prefetch distance (with {_most(maps['hit_rates'])} maps) and by capacity of the store "
        f"(at distance 3), budget {maps['hit_rates'][0]['budget']}, {maps['hit_rates'][0]['link_gbps']:g} GB/s. A "
        "map's distance counts from the layer that runs when the answer comes, so distance d is d + 1 above.",
        "",
        *table(
            ("varied", "distance", "capacity", "maps held", "hit rate", "TPOT (ms)", "wasted (MB)"),
            ((f["varied"], f["distance"], f["capacity"], f["maps"], f"{f['hit_rate']:.1%}", f"{f['tpot_ms']:.2f}",
              f"{f['bytes_wasted'] / 1e6:.0f}") for f in maps["hit_rates"]),
        ),
        "",
        *(f"- {sentence}" for sentence in by_distance_and_capacity(maps["hit_rates"])),
        "",
        "![Expert maps](fmoe-maps.png)",
        "",
        "## Similarity against hit rate",
        "",
        *table(
            ("search", "store", "layers seen", "Pearson's r", "mean similarity", "mean hit rate", "matches"),
            ((c["search"], "learns" if c["learns"] else "stays", "-" if c["search"] == "semantic" else
              "all" if c["layer"] is None else c["layer"] + 1,
              "-" if c["r"] is None else f"{c['r']:.3f}", f"{c['mean_score']:.3f}", f"{c['mean_hit']:.1%}", c["pairs"])
             for c in maps["correlations"]),
        ),
        "",
        *(f"- {sentence}" for sentence in of_correlation(maps["correlations"])),
        "",
    ]  # fmt: skip


def _command(settings: dict[str, Any]) -> str:
    return (
        f"tiermoe bench fmoe --prompts {sum(settings['split'])} --prompt-tokens {settings['prompt_tokens_each']} "
        f"--max-tokens {settings['max_tokens']} --trace-tokens {settings['trace_tokens']} --repeats "
        f"{settings['repeats']} --out docs/results"
    )


def _runs(rows: Sequence[Row], setting: str) -> list[str]:
    head = ("budget", "GB/s", "policy", "hit rate", "TTFT (ms)", "TPOT (ms)", "over fmoe", "blocked I/O (s)",
            "loaded (MB)", "wasted (MB)")  # fmt: skip
    body = []
    for (budget, gbps), of in cells(rows, setting).items():
        for name, row in of.items():
            over = f"{paired(row, of['fmoe'], 'tpot_s'):.2f}" if "fmoe" in of else "-"
            body.append(serving_cells(budget, gbps, name, row, over))
    return table(head, body)


def _ablation(rows: Sequence[Row]) -> list[str]:
    names = ("fmoe-t", "fmoe-ts", "fmoe")
    body = []
    for (budget, gbps), of in cells(rows, "7:3").items():
        found = [f"{of[name]['hit_rate']:.1%}, {of[name]['tpot_ms']:.2f} ms" for name in names if name in of]
        if len(found) == len(names):
            body.append((budget, f"{gbps:g}", *found))
    return table(("budget", "GB/s", "T", "T+S", "T+S+delta"), body)


def _recall(found: Sequence[Row]) -> list[str]:
    distances = sorted({row["distance"] for row in found})
    by = {(row["source"], row["distance"]): f"{row['recall']:.3f}" for row in found}
    sources = dict.fromkeys(row["source"] for row in found)
    return table(("source", *distances), ((s, *(by.get((s, d), "-") for d in distances)) for s in sources))


def _most(figures: Sequence[Row]) -> int:
    return max(int(row["capacity"]) for row in figures)
