"""`docs/results/buddymoe.md`: the report of `tiermoe bench buddymoe` as a page, its raw data and its plot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ....config import load_policy
from ..figures import Row, cells, median_of, paired
from ..moepic.calibration import REGIME, Calibration
from ..page_parts import paragraphs, table, write_record
from .findings import BYTES, QUALITY, SETTING
from .methods import DROP, ORIGINAL, OWN, PAPER, RANDOM
from .plots import plot_quality
from .report import BuddyReport
from .why import explained, share

# Tables 2 to 4: cache rate, then original, random, and CFT 0.95 with 16 buddies and rho 3: accuracy, tokens per second
_PAPER = (
    ("0.75", "0.735, 34.23", "0.55, 39.67", "0.695, 36.75"), ("0.5", "-, 28.56", "0.23, 33.14", "0.635, 30.21"),
    ("0.375", "-, 24.78", "0.16, -", "0.645, 27.33"),
)  # fmt: skip


def write_page(report: BuddyReport, folder: Path) -> None:
    """Write buddymoe.md, buddymoe.json and the plot.

    Raises:
        ConfigError: the folder cannot be written, or matplotlib is missing.
    """
    record = report.as_dict()
    write_record(folder, "buddymoe", record, page(record))
    plot_quality(folder / "buddymoe.png", record["rows"])


def page(record: dict[str, Any]) -> str:
    """The page as Markdown, from `BuddyReport.as_dict()`."""
    settings, hardware, rows, found = (record[key] for key in ("settings", "hardware", "rows", "comparisons"))
    calibration, quality = Calibration(**record["calibration"]), settings["quality"]
    scored = rows[0]["quality"]
    gbps = settings["links_gbps"][0]
    regime = "in" if calibration.in_regime(gbps) else "outside"
    lines = [
        "# BuddyMoE: another expert in place of a missing one",
        "",
        *paragraphs(
            f"Written by `{_command(settings)}` on {hardware['model']} ({hardware['cores']} cores), at a load average "
            f"of {settings['load_average']:.1f} when it began. Runs are *{record['executor']}* (the CPU stands in for "
            f"the GPU; the link is throttled to {gbps:g} GB/s and waits {settings['latency_us']:g} us before each "
            f"copy). All data: [buddymoe.json](buddymoe.json).",
            f"Model {settings['model']}, {calibration.layers} layers of {calibration.experts} experts, top-"
            f"{calibration.top_k}. Cache rate: the share of all experts that fits on the device; all layers share the "
            f"slots. Loading the {calibration.top_k} experts of a token takes {settings['ratio']:.2f} times as long as "
            f"computing a layer, {regime} the {REGIME[0]:g} to {REGIME[1]:g} that is meant. Every method prefetches by "
            "the next layer's router; what it does with an expert that is neither here nor on its way is what differs.",
            f"Speed: {settings['warm_prompts']} prompts uncounted, then {settings['repeats']} repetitions of "
            f"{settings['prompts_of_a_repetition']} held-out prompts of {settings['prompt_tokens_each']} tokens with "
            f"{settings['max_tokens']} generated; the methods take turns in each repetition. Medians with range; "
            "ratios are paired within repetitions.",
            "Quality: on a link of the same rate whose clock goes on by "
            f"{calibration.compute_s * 1e3:.2f} ms for each layer, what one takes with everything resident in this "
            "run, and by nothing else: what is on the device in time does not depend on how busy the machine is. "
            f"{scored['documents']} held-out documents, {scored['tokens']} tokens that follow {quality['prefix']}; "
            f"{scored['items']} choices between four continuations. Each token is in a forward of its own, as a served "
            "request's. KL and "
            "top-1 agreement are against the lossless model. MB a token: copies to the device while these tokens were "
            "scored, their prefixes included. Differences are paired; intervals are 95%, by bootstrap over documents. "
            "One whose interval holds 0 is a tie.",
            _methods(calibration),
        ),
        "## Does it hold?", "", *_bars(found), *paragraphs(*explained(rows, found, record["profile"])),
        "## Quality against speed (Tables 2 to 4)", "",
    ]  # fmt: skip
    for (rate, _), of in cells(rows, SETTING).items():
        lines += [f"### Cache rate {rate}", "", *_quality(of), "", *_differences(rate, of, found), ""]
    lines += ["![Quality against speed](buddymoe.png)", "", "## What moved", "", *_counters(rows), ""]
    lines += [
        "The paper's, DeepSeek-V2-Lite (64 experts, top-6): mean accuracy of ARC-Easy and ARC-Challenge, tokens per "
        "second.", "",
        *table(("cache rate", ORIGINAL, "random", PAPER), _PAPER), "",
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def _methods(calibration: Calibration) -> str:
    text = (
        f"*{ORIGINAL}* loads a missing expert, *{RANDOM}* runs any resident one instead, *{DROP}* none, and the "
        "token's other experts take over its weight. *cft*: buddy lists that cover so much, how many buddies at most, "
        f"how many replacements of a token (rho). *{OWN}*, recommended: by output similarity and the router's opinion "
        f"(eta {load_policy(OWN).on_miss.model_dump()['eta']:g}), weighed by the buddy's own routing weight; "
        "chosen on the calibration text, of which nothing is measured here."
    )
    if calibration.top_k <= 4:
        text += (
            f" A token picks {calibration.top_k}, so rho 4 is no limit here and stands for the paper's row without rho "
            "too; *cft 0.99, 2 buddies* is of its table 3."
        )
    return text


def _bars(found: Sequence[Mapping[str, Any]]) -> list[str]:
    wanted = [c for c in found if c["wanted"] is not None]
    if not wanted:
        return ["No two methods of this run are ones that a bar compares.", ""]
    held = sum(c["ok"] for c in wanted)
    tied = sum(c["verdict"] == "tie" and not c["ok"] for c in wanted)
    body = []
    for c in wanted:
        asked = "better" if c["wanted"] == "better" else "equal or fewer"
        said = "ok" if c["ok"] else "missed"
        verdict = c["verdict"]
        if c["measure"] == BYTES:
            verdict = {"better": "fewer", "worse": "more"}.get(verdict, verdict)
        body.append((c["rate"], c["own"], c["other"], _name(c["measure"]), asked, _interval(c), verdict, said))
    return [
        f"The paper's buddy is to beat random replacement in every measure of quality at equal or fewer bytes, and to "
        f"load fewer than {ORIGINAL}; so is the recommended one, which is to beat {DROP} too. Of {len(wanted)} "
        f"comparisons {held} hold, {tied} are ties where better was asked for, and "
        f"{len(wanted) - held - tied} go the other way.",
        "",
        *table(("cache rate", "method", "against", "measure", "asked", "difference", "is", ""), body),
        "",
    ]  # fmt: skip


def _quality(of: Mapping[str, Row]) -> list[str]:
    body = []
    for name, row in of.items():
        q, tpot = row["quality"], row["spread"]["tpot_s"]
        body.append((
            name, f"{1 / tpot['median']:.1f} ({1 / tpot['maximum']:.1f} to {1 / tpot['minimum']:.1f})",
            f"{1 / paired(row, of[ORIGINAL], 'tpot_s'):.2f}" if ORIGINAL in of else "-",
            f"{q['perplexity']:.3f}", f"{q['top1_agreement']:.1%}", f"{q['kl_nats']:.4f}",
            f"{q['choice_accuracy']:.1%}", f"{share(q, 'substitutions'):.1%}", f"{share(q, 'dropped'):.1%}",
            f"{q[BYTES] / 1e6:.2f}",
        ))  # fmt: skip
    head = ("method", "tokens/s", "over original", "perplexity", "top-1 agreement", "KL (nats)", "choices", "replaced",
            "left out", "MB a token")  # fmt: skip
    return table(head, body)


def _differences(rate: str, of: Mapping[str, Row], found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """KL and bytes of each method less those of random replacement, free and held to rho 3, and of drop."""
    by = {(c["own"], c["other"], c["measure"]): c for c in found if c["rate"] == rate}
    shown = ((RANDOM, "kl_nats"), (RANDOM, BYTES), (f"{RANDOM}, rho 3", "kl_nats"), (DROP, "kl_nats"), (DROP, BYTES))
    measures = [(other, measure) for other, measure in shown if other in of]
    body = []
    for name in of:
        told = [by.get((name, *key)) for key in measures]
        if any(told):
            body.append((name, *("" if c is None else f"{_interval(c)}, {c['verdict']}" for c in told)))
    if body:
        yield "Differences, with what they are:"
        yield ""
        yield from table(("method", *(f"{_name(measure)} less that of {other}" for other, measure in measures)), body)


def _counters(rows: Sequence[Row]) -> list[str]:
    body = []
    for row in rows:
        q = row["quality"]
        ran = q["hits"] + q["misses"]
        body.append((
            row["budget"], row["policy"], f"{row['ttft_ms']:.1f}", f"{row['tpot_ms']:.2f}", f"{row['hit_rate']:.1%}",
            f"{median_of(row, 'blocked_io_s'):.3f}", f"{q['bytes_loaded_demand'] / 1e6:.0f}",
            f"{q['bytes_loaded_prefetch'] / 1e6:.0f}", f"{q['bytes_wasted'] / 1e6:.0f}",
            f"{q['hits'] / ran:.1%}" if ran else "-",
        ))  # fmt: skip
    head = ("cache rate", "method", "TTFT (ms)", "TPOT (ms)", "hit rate", "blocked I/O (s)", "scored: on demand (MB)",
            "prefetched (MB)", "of it unused (MB)", "hit rate")  # fmt: skip
    return ["The first four are of the repetitions, the last four of scoring. Hits are of the experts that ran.", "",
            *table(head, body)]  # fmt: skip


def _interval(c: Mapping[str, Any]) -> str:
    if c["measure"] == BYTES:
        value, low, high = (f"{c[key] / 1e6:+.2f}" for key in ("value", "low", "high"))
        return f"{value} MB ({low} to {high})"
    value, low, high = (f"{c[key]:+.4f}" for key in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def _name(measure: str) -> str:
    return "bytes a token" if measure == BYTES else QUALITY[measure][0]


def _command(settings: dict[str, Any]) -> str:
    link = f"--link {settings['links_gbps'][0]:g}" if settings["link_given"] else f"--ratio {settings['asked']:g}"
    quality = settings["quality"]
    documents = "" if quality["documents"] is None else f"--documents {quality['documents']} "
    return (
        f"tiermoe bench buddymoe --rates {','.join(settings['budgets'])} {link} --prompts "
        f"{settings['prompts_of_a_repetition']} --warm {settings['warm_prompts']} --prompt-tokens "
        f"{settings['prompt_tokens_each']} --max-tokens {settings['max_tokens']} --repeats {settings['repeats']} "
        f"{documents}--items {quality['items']} --prefix {quality['prefix']} --continuation {quality['continuation']} "
        "--out docs/results"
    )
