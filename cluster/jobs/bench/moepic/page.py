"""`docs/results/moepic.md`: the report of `tiermoe bench moepic` as a page, its raw data and its plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..figures import Row, cells, paired
from ..page_parts import paragraphs, serving_cells, table, write_record
from ..plots import plot_runs
from .calibration import REGIME, Calibration
from .findings import (
    OWN,
    ablation_rows,
    against_baselines,
    of_ablation,
    of_bars,
    of_configurator,
    of_footprints,
    of_quality,
    of_sensitivity,
    of_table1,
)
from .plots import colour, plot_budgets, plot_hits
from .report import MoepicReport
from .why import explained, where_it_holds

_PAPER_TABLE1 = (  # at 10, 20, .. 50 of 60 experts
    ("RND", 16.41, 33.02, 49.69, 67.41, 83.15), ("LFU", 24.36, 43.74, 60.68, 75.84, 89.34),
    ("LRU", 19.11, 38.88, 56.38, 73.16, 88.97), ("LCP", 25.56, 45.36, 62.21, 77.12, 90.08),
)  # fmt: skip


def write_page(report: MoepicReport, folder: Path) -> None:
    """Write moepic.md, moepic.json and the plots.

    Raises:
        ConfigError: the folder cannot be written, or matplotlib is missing.
    """
    record = report.as_dict()
    write_record(folder, "moepic", record, page(record))
    plot_budgets(folder / "moepic-budgets.png", record["rows"])
    plot_hits(folder / "moepic-memory.png", record["hits"], record["footprints"])
    plot_runs(folder / "moepic-sensitivity.png", record["rows"], "sensitivity", "tpot_s", "TPOT (s)", colour)


def page(record: dict[str, Any]) -> str:
    """The page as Markdown, from `MoepicReport.as_dict()`."""
    settings, hardware = record["settings"], record["hardware"]
    calibration, rows = Calibration(**record["calibration"]), record["rows"]
    each = settings["prompts_of_a_repetition"]
    lines = [
        "# MoEpic: split experts against its baselines",
        "",
        f"Written by `{_command(settings)}` on {hardware['model']} ({hardware['cores']} cores), at a load average of "
        f"{settings['load_average']:.1f} when it began. Runs are *{record['executor']}* (the CPU stands in for the "
        f"GPU, the link is throttled, {settings['latency_us']:g} us before each copy); hit rates by cache size are "
        "*simulated*, on a recorded trace. All data: [moepic.json](moepic.json).",
        "",
        f"Model {settings['model']}, {settings['threads']} thread, one request at a time. Held-out prompts of "
        f"{settings['prompt_tokens_each']} tokens, {settings['max_tokens']} generated after each. "
        f"{settings['warm_prompts']} prompts ({settings['warm_tokens']} tokens with what follows them) are served "
        f"first and not counted; the configurator runs every {settings['tau']} tokens, so at least once before "
        f"counting begins. Then {settings['repeats']} repetitions of {each} prompts, each met once; policies take "
        "turns in each repetition. Tables: medians over the repetitions, TPOT with its range; ratios are paired within "
        "repetitions.",
        "",
        *_links(calibration, settings),
        "## Hit rate by cache size (Table 1)",
        "",
        *_table1(record["hits"], settings),
        "## TTFT and TPOT against the budget",
        "",
        "Budget: share of all experts that fits on the device, the buffer included. cache-only is theta = 1 without "
        "prefetch, prefetch-only theta = 0.",
        "",
        *_runs(rows, "budgets"),
        "",
        "![TTFT and TPOT against the budget](moepic-budgets.png)",
        "",
        *(f"- {sentence}" for sentence in (*against_baselines(rows), *of_quality(rows))),
        "",
        *_quality(rows),
        *paragraphs(of_configurator(rows)),
        "### The bar",
        "",
        *_bars(record),
        "## Ablation (Table 3)",
        "",
        *_ablation(rows),
        "",
        *(f"- {sentence}" for sentence in of_ablation(ablation_rows(rows))),
        "",
        "## Sensitivity",
        "",
        *_sensitivity(rows, record["hits"]),
        "## Memory for a TPOT (Figure 8)",
        "",
        *_footprints(record, settings),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _links(calibration: Calibration, settings: dict[str, Any]) -> list[str]:
    body = []
    for gbps in settings["links_gbps"]:
        ratio = calibration.ratio(gbps)
        regime = "yes" if calibration.in_regime(gbps) else "no"
        load_ms = 1e3 * calibration.load_s(gbps)
        body.append((f"{gbps:g}", f"{load_ms:.2f}", f"{1e3 * calibration.compute_s:.2f}", f"{ratio:.2f}", regime))
    return [
        f"With everything resident a token takes {1e3 * calibration.tpot_s:.2f} ms: {1e3 * calibration.compute_s:.2f} "
        f"ms for each of {calibration.layers} layers, of which {1e3 * calibration.moe_s:.2f} ms are its experts. A "
        f"token needs {calibration.top_k} of {calibration.experts} experts in each layer, of "
        f"{calibration.expert_bytes / 1e6:.3f} MB each. Loading is the time of those {calibration.top_k} on the link; "
        f"the paper's regime is where it is {REGIME[0]:g} to {REGIME[1]:g} times computing.",
        "",
        *table(("GB/s", "loading (ms)", "computing (ms)", "loading over computing", "in the regime"), body),
        "",
    ]


def _table1(hits: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    sizes = hits["sizes"]
    return [
        f"One cache of so many experts for each layer, tokens one by one, loads on demand: {hits['tokens']} tokens of "
        f"{settings['trace_prompts'][1]} prompts with {settings['trace_tokens']} generated after each count, those of "
        f"{settings['trace_prompts'][0]} other prompts come before them. Belady's rule knows the future: no policy "
        "that loads on demand has more hits.",
        "",
        *table(
            ("policy", *(f"{size} of {hits['experts']}" for size in sizes)),
            ((policy, *(f"{rate:.2%}" for rate in rates)) for policy, rates in hits["rates"].items()),
        ),
        "",
        *paragraphs(of_table1(hits["rates"])),
        "The paper's, Qwen1.5-MoE on MMLU (%):",
        "",
        *table(("policy", *(f"{size} of 60" for size in range(10, 60, 10))), _PAPER_TABLE1),
        "",
    ]


def _runs(rows: Sequence[Row], setting: str) -> list[str]:
    head = ("budget", "GB/s", "policy", "hit rate", "TTFT (ms)", "TPOT (ms)", "moepic over it", "blocked I/O (s)",
            "loaded (MB)", "wasted (MB)")  # fmt: skip
    body = []
    for (budget, gbps), of in cells(rows, setting).items():
        for name, row in of.items():
            over = f"{paired(of[OWN], row, 'tpot_s'):.2f}" if OWN in of else "-"
            body.append(serving_cells(budget, gbps, name, row, over))
    return table(head, body)


def _quality(rows: Sequence[Row]) -> list[str]:
    lossy = [row for row in rows if row.get("perplexity_ratio") is not None]
    if not lossy:
        return []
    body = (
        (row["policy"], row["budget"], f"{row['link_gbps']:g}", f"{row['perplexity_ratio']:.4f}",
         f"{row['top1_agreement']:.2%}", "-" if row.get("kl_nats") is None else f"{row['kl_nats']:.5f}",
         "-" if row.get("same_tokens") is None else f"{row['same_tokens']:.0%}")
        for row in lossy
    )  # fmt: skip
    head = ("policy", "budget", "GB/s", "perplexity over lossless", "top-1 agreement", "mean KL (nats)",
            "answers with the same tokens")  # fmt: skip
    return [*table(head, body), ""]


def _bars(record: dict[str, Any]) -> list[str]:
    bars, floor_ms = record["bars"], 1e3 * record["calibration"]["tpot_s"]
    lines = [of_bars(bars), ""]
    if bars:
        body = (
            (bar["name"], f"{bar['op']} {bar['limit']:g}", "-" if bar["value"] is None else f"{bar['value']:.3f}",
             "ok" if bar["ok"] else "missed")
            for bar in bars
        )  # fmt: skip
        lines += [*table(("bar", "limit", "value", ""), body), ""]
    for found in record["timelines"]:
        lines += [explained(found, floor_ms), ""]
    if record["simulated"]:
        lines += _simulated(record["simulated"])
    return lines


def _simulated(found: dict[str, Any]) -> list[str]:
    budgets = list(dict.fromkeys(row["budget"] for row in found["rows"]))
    lines = paragraphs(*(where_it_holds(found["rows"], budget) for budget in budgets))
    policies = list(dict.fromkeys(row["policy"] for row in found["rows"]))
    body = []
    for key in dict.fromkeys((row["budget"], row["link_gbps"], row["ratio"]) for row in found["rows"]):
        tpot = {row["policy"]: row["tpot_ms"] for row in found["rows"] if (row["budget"], row["link_gbps"]) == key[:2]}
        shown = (f"{tpot[policy]:.2f}" if policy in tpot else "-" for policy in policies)
        body.append((key[0], f"{key[1]:g}", f"{key[2]:.2f}", *shown))
    lines += [
        "Simulated TPOT (ms) by link, with the costs of computing that the trace was recorded with. moepic's cut is "
        "what the configurator makes of the learnt requests, and it guesses nothing for the first layer, of which a "
        "trace holds no prediction." + _left_out(found["left_out"]),
        "",
        *table(("budget", "GB/s", "loading over computing", *policies), body),
        "",
    ]
    return lines


def _left_out(policies: Sequence[str]) -> str:
    if not policies:
        return ""
    return f" Not among them, because a trace has not what they go by: {', '.join(policies)}."


def _ablation(rows: Sequence[Row]) -> list[str]:
    found = ablation_rows(rows)
    return table(
        ("budget", "GB/s", "policy", "TTFT (ms)", "over moepic", "TPOT (ms)", "over moepic", "hit rate"),
        ((row["budget"], f"{row['link_gbps']:g}", row["policy"], f"{row['ttft_ms']:.1f}", f"{row['ttft_over']:.2f}",
          f"{row['tpot_ms']:.2f}", f"{row['tpot_over']:.2f}", f"{row['hit_rate']:.1%}") for row in found),
    )  # fmt: skip


def _sensitivity(rows: Sequence[Row], hits: dict[str, Any]) -> list[str]:
    low, high = min(hits["lcp"], key=_rate), max(hits["lcp"], key=_rate)
    return [
        "Fixed splits (theta) are moepic's preset without the configurator; zeta is its granularity.",
        "",
        *_runs(rows, "sensitivity"),
        "",
        "![TPOT by theta and zeta](moepic-sensitivity.png)",
        "",
        *(f"- {sentence}" for sentence in of_sensitivity(rows)),
        "",
        f"Hit rate of LCP by rho and omega on the trace, with {hits['lcp_size']} of {hits['experts']} experts of each "
        f"layer cached: between {low['hit_rate']:.2%} (rho {low['rho']:g}, omega {low['omega']}) and "
        f"{high['hit_rate']:.2%} (rho {high['rho']:g}, omega {high['omega']}).",
        "",
        *_grid(hits["lcp"]),
        "",
    ]


def _grid(found: Sequence[dict[str, Any]]) -> list[str]:
    omegas = list(dict.fromkeys(f["omega"] for f in found))
    rate = {(f["rho"], f["omega"]): f"{f['hit_rate']:.2%}" for f in found}
    body = ((f"{rho:g}", *(rate[rho, o] for o in omegas)) for rho in dict.fromkeys(f["rho"] for f in found))
    return table(("rho", *(f"omega {omega}" for omega in omegas)), body)


def _footprints(record: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    found = record["footprints"]
    targets = list(dict.fromkeys(row["target_ms"] for row in found))
    by = {(row["policy"], row["target_ms"]): row for row in found}
    policies = list(dict.fromkeys(row["policy"] for row in found))
    return [
        f"Least expert memory (MB) that reaches a TPOT at {settings['links_gbps'][0]:g} GB/s, interpolated linearly "
        "between the budgets above, where more memory is taken never to be slower; `<=`: the smallest budget already "
        "does, -: the greatest does not.",
        "",
        *table(
            ("policy", *(f"{target:g} ms" for target in targets)),
            ((policy, *(_megabytes(by[policy, target]) for target in targets)) for policy in policies),
        ),
        "",
        *paragraphs(of_footprints(found)),
        "![Hit rates and memory](moepic-memory.png)",
        "",
    ]


def _megabytes(found: dict[str, Any]) -> str:
    if found["bytes"] is None:
        return "-"
    return f"{'<= ' if found['at_most'] else ''}{found['bytes'] / 1e6:.1f}"


def _rate(found: dict[str, Any]) -> float:
    return float(found["hit_rate"])


def _command(settings: dict[str, Any]) -> str:
    given, numbers = ("links", settings["links_gbps"]) if settings["links_given"] else ("ratios", settings["asked"])
    links = f"--{given} " + ",".join(f"{number:g}" for number in numbers)
    budgets = ",".join(settings["budgets"])
    return (
        f"tiermoe bench moepic --budgets {budgets} {links} --prompts {settings['prompts_of_a_repetition']} --warm "
        f"{settings['warm_prompts']} --prompt-tokens {settings['prompt_tokens_each']} --max-tokens "
        f"{settings['max_tokens']} --tau {settings['tau']} --trace-tokens {settings['trace_tokens']} --repeats "
        f"{settings['repeats']} --out docs/results"
    )
