"""`docs/results/activeevict.md`: the report of `tiermoe bench activeevict` as a page, its raw data and its plots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .....errors import ConfigError
from ....report.files import write_json
from ..metrics import Report
from ..page_parts import paragraphs, table
from ..plots import new_figure
from .emulated_page import section
from .work import LOSSY, OWN, PREFETCHING

Row = dict[str, Any]
_LIMITS = (
    "Replays keep the recorded routing: with dynamic top-k later layers see what the full model did, so its quality is "
    "not on this page (`tiermoe eval --policy activeevict`). A trace holds a router's prediction for its top K only; "
    "the rest is spread evenly, so the boundary redundancy is at its greatest. moe-apex loads replicas of 4 bits where "
    "a guess or a miss matters little to its token, into a quarter of the memory; they are timed as experts in full. "
    "All layers share one pool of slots, where the paper gives each layer its own. What is "
    "written back is copied when its slot is used again, also after pre-eviction, which the paper copies ahead of the "
    "gate: rows of activeevict that write back are worse than the paper's would be."
)
_COLUMNS = (
    "Blocking I/O: the compute waited for copies. Total I/O: the link was busy. Loaded: brought to the device; back: "
    "copied back to the host before a slot was used again. Redundant: of what was loaded, what left unused or had been "
    "sent away early by pre-eviction and was needed when its layer ran next. P, R: precision and recall of fetches "
    "(Table 2). All for each generated token, prompts included."
)


def write_page(report: Report, folder: Path) -> None:
    """Write activeevict.md, activeevict.json and the plot.

    Raises:
        ConfigError: the folder cannot be written, or matplotlib is missing.
    """
    record = report.as_dict()
    write_json(folder / "activeevict.json", record)  # a run of the emulated part alone reads it: whole, or as it was
    try:
        (folder / "activeevict.md").write_text(page(record), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"'{folder}' cannot be written: {error}", "give another folder") from error
    plot(folder / "activeevict.png", record["rows"])


def page(record: dict[str, Any]) -> str:
    """The page as Markdown, from `Report.as_dict()`."""
    settings, rows = record["settings"], record["rows"]
    contexts = ", ".join(f"{name} {tokens}" for name, tokens in settings["contexts"].items())
    lines = [
        "# ActiveEvict: pre-eviction against prefetching",
        "",
        *paragraphs(
            f"Written by `tiermoe bench activeevict` on {record['hardware']['model']}, at a load average of "
            f"{settings['load_average']:.1f} when it began. *Simulated*: the engine's cache "
            f"and policies on a virtual clock, on the routing of {settings['model']} recorded with held-out prompts; "
            f"what computing takes was measured while recording.{_emulated(settings)} All data: "
            "[activeevict.json](activeevict.json).",
            f"Prompt tokens: {contexts}; {settings['max_tokens']} generated after each; {settings['learn']} prompts "
            f"served first and not counted, then {settings['measure']}. A link's ratio: loading the experts of a token "
            "and layer over computing it.",
            _LIMITS,
        ),
        "## Does it hold?", "",
        *table(("bar", "best cell", "limit", ""), (
            (bar["name"], _number(bar["value"]), f"{bar['op']} {bar['limit']:g}", "ok" if bar["ok"] else "missed")
            for bar in record["bars"]
        )),
        "", *paragraphs(*explained(rows)),
        "## Table 3, with fetch accuracy", "", _COLUMNS, "",
    ]  # fmt: skip
    tables = [row for row in rows if row["section"] == "table"]
    for context in _of(rows, "context"):
        for ratio in _of(tables, "ratio"):
            lines += [f"### {context} context, ratio {ratio:g}", ""]
            lines += _table3([r for r in tables if _is(r, context=context, ratio=ratio)])
            lines += [""]
    lines += section(record)
    lines += ["## Capacity, dynamic top-k and alpha (Figures 7 to 9)", "", "![Figures 7 to 9](activeevict.png)", ""]
    for context in _of(rows, "context"):
        lines += [f"### {context} context: blocking I/O (ms a token) by budget", "", *_capacities(rows, context), ""]
        lines += ["By alpha, the weight of recent use:", "", *_alphas(rows, context), ""]
    return "\n".join(lines)


def _emulated(settings: dict[str, Any]) -> str:
    if "emulated" not in settings:
        return ""
    earlier = ", and was run later than the rest" if "simulated_before" in settings else ""
    return f" One section is *emulated*: the engine itself, on a throttled link{earlier}; bars on it say so."


def explained(rows: Sequence[Row]) -> Iterator[str]:
    """What the method gains, and what not writing back gains, from the counters of the first link."""
    for context in _of(rows, "context"):
        for budget in _of([r for r in rows if r["section"] == "table"], "budget"):
            same = [
                r for r in rows
                if _is(r, section="table", context=context, budget=budget) and r["ratio"] == rows[0]["ratio"]
            ]  # fmt: skip
            found = {(r["preset"], r["writes_back"]): r for r in same}
            own, swapped = found.get((OWN, False)), found.get((OWN, True))
            others = {back: [r for (name, b), r in found.items() if name in PREFETCHING and b == back]
                      for back in (True, False)}  # fmt: skip
            if own is None or swapped is None or not others[True] or not others[False]:
                continue
            with_back = min(others[True], key=lambda r: r["blocking_ms"])
            without = min(others[False], key=lambda r: r["blocking_ms"])
            yield (
                f"**{context}, budget {budget:g}.** {OWN} blocks {own['blocking_ms']:.3g} ms a token; the best "
                f"prefetching baseline {with_back['blocking_ms']:.3g} as it is ({with_back['policy']}) and "
                f"{without['blocking_ms']:.3g} where it writes nothing back ({without['policy']}). If {OWN} wrote back "
                f"too it would block {swapped['blocking_ms']:.3g}. It loads {own['loaded_mb']:.3g} MB a token, that "
                f"baseline {without['loaded_mb']:.3g}: guesses cost {without['loaded_mb'] / own['loaded_mb'] - 1:+.0%} "
                f"bytes and hide {1 - without['blocking_ms'] / without['total_ms']:.0%} of the link's time behind "
                f"computing, demand loads after the gate {1 - own['blocking_ms'] / own['total_ms']:.0%}."
            )


def _table3(rows: Sequence[Row]) -> list[str]:
    head = ("budget", "policy", "writes back", "blocking ms", "total ms", "loaded MB", "back MB", "redundant", "P", "R",
            "hit rate", "TPOT ms")  # fmt: skip
    body = []
    for r in rows:
        name = r["policy"] if r["lossless"] else f"{r['policy']} (lossy)"
        body.append((
            f"{r['budget']:g}", name, "yes" if r["writes_back"] else "no", _number(r["blocking_ms"]),
            _number(r["total_ms"]), _number(r["loaded_mb"]), _number(r["written_back_mb"]), f"{r['redundant']:.1%}",
            f"{r['precision']:.1%}", f"{r['recall']:.1%}", f"{r['hit_rate']:.3f}", _number(r["tpot_ms"]),
        ))  # fmt: skip
    return table(head, body)


def _capacities(rows: Sequence[Row], context: str) -> list[str]:
    mine = [r for r in rows if _is(r, section="capacity", context=context)]
    budgets = _of(mine, "budget")
    body = []
    for policy in _of(mine, "policy"):
        by = {r["budget"]: r for r in mine if r["policy"] == policy}
        body.append((policy, *(_number(by[b]["blocking_ms"]) for b in budgets)))
    lossy = {r["budget"]: r for r in mine if r["policy"] == LOSSY}
    body.append((f"pairs dropped by {LOSSY}, each token", *(_number(lossy[b]["dropped"]) for b in budgets)))
    return table(("policy", *(f"{b:g}" for b in budgets)), body)


def _alphas(rows: Sequence[Row], context: str) -> list[str]:
    mine = [r for r in rows if _is(r, section="alpha", context=context)]
    return table([r["policy"] for r in mine], [[_number(r["blocking_ms"]) for r in mine]])


def plot(path: Path, rows: Sequence[Row]) -> None:
    """A row for each context: blocking I/O by budget and order of leaving, fixed and dynamic top-k, by alpha.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    contexts = _of(rows, "context")
    figure, save = new_figure(path, (11.0, 2.9 * len(contexts)))
    panels = figure.subplots(len(contexts), 3, squeeze=False)
    for context, (capacity, width, alpha) in zip(contexts, panels, strict=True):
        mine = [r for r in rows if _is(r, section="capacity", context=context)]
        for policy in _of(mine, "policy"):
            points = [(r["budget"], r["blocking_ms"]) for r in mine if r["policy"] == policy]
            for axes, wanted in ((capacity, policy != LOSSY), (width, policy in (OWN, LOSSY))):
                if wanted:
                    axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=policy)
        by_alpha = [r for r in rows if _is(r, section="alpha", context=context)]
        numbers = [(float(r["policy"]), r["blocking_ms"]) for r in by_alpha if r["policy"] != "lru"]
        alpha.plot(*zip(*numbers, strict=True), marker="o", markersize=3, label=OWN)
        for r in by_alpha:
            if r["policy"] == "lru":
                alpha.axhline(r["blocking_ms"], linestyle="--", color="grey", label="lru")
        for axes, name, below in ((capacity, "order of leaving", "budget"), (width, "top-k", "budget"),
                                  (alpha, "weight of recent use", "alpha")):  # fmt: skip
            axes.set_title(f"{context}: {name}", fontsize=9)
            axes.set_xlabel(below, fontsize=8)
            axes.set_ylabel("blocking I/O (ms a token)", fontsize=8)
            axes.set_ylim(bottom=0)
            axes.tick_params(labelsize=7)
            axes.legend(fontsize=6)
    save()


def _is(row: Row, **wanted: Any) -> bool:
    return all(row[key] == value for key, value in wanted.items())


def _of(rows: Sequence[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"
