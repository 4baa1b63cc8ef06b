"""`bench auto`: the planner of `auto` against the rules of the field, simulated cell by cell (`auto_cells`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
from rich.progress import Progress

from tiermoe.cluster.jobs.bench.cells import Journal
from tiermoe.cluster.jobs.bench.metrics import Bar, Report, advancing, interval95, markdown
from tiermoe.cluster.jobs.bench.nodes import over_processes
from tiermoe.cluster.report.files import check_writable
from tiermoe.cluster.simulate.synthetic import FAMILIES, SCRIPTS

from .auto_cells import (
    BATCHES,
    BUDGETS,
    DECODE,
    HOSTS_GBPS,
    LINKS_GBPS,
    PROMPT,
    PUBLISHED,
    RECORDED,
    SHAPES,
    VARIANTS,
    Cell,
    chosen,
    grid,
    group,
    recorded_cells,
)
from .cases import Auto as Options

# over all families, scripted ones included: the mean over seeds of auto's time of a token / that of the best rule of
# the cell, the worst cell's, and over on-demand
ALL_MEAN, ALL_WORST, ALL_ON_DEMAND = 0.97, 1.15, 1.10
# the same over families that no script makes and the recorded routing
MEAN = {1: 0.95, 4: 0.95, 8: 0.97}
WORST, WORST_SEED, ON_DEMAND = 1.03, 1.05, 0.95
LISTED = 12  # of the worst cells


def auto(options: Options, progress: Progress | None) -> Report:
    """Replay the chosen cells with every rule, at `seeds` seeds from 1 on; seed 0 chose the planner's constants.

    The report's rows are means over the seeds, one a cell. Bars: see the constants of this module.

    Raises:
        ConfigError: the journal is of other settings or cannot be read.
    """
    decode = 32 if options.quick else DECODE
    layers, seeds = (4, range(1, 3)) if options.quick else (options.layers, range(1, options.seeds + 1))
    cells = chosen(options.share)
    if options.quick:
        cells = [cell for cell in cells if cell.shape == "qwen3-30b-a3b" and cell.batch == 1]
    held: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        held.setdefault((cell.shape, cell.family), []).append(cell)
    rng = np.random.default_rng(34)
    tried = [cells[i] for i in sorted(rng.permutation(len(cells))[: 2 if options.quick else options.variant_cells])]
    settings = options.settings(cells=len(cells), of=len(grid()), decode=decode, prompt=PROMPT)
    settings = {k: v for k, v in settings.items() if k not in ("jobs", "journal")}
    if options.journal is not None:
        check_writable(options.journal, "--journal")
    journal = Journal(options.journal, settings)
    work = dict[str, tuple[Any, ...]]()
    for seed in seeds:
        for (shape, family), own in held.items():
            extra = [cell for cell in own if cell in tried] if seed == seeds[0] else []
            work[f"{shape} {family} {seed}"] = own, seed, layers, decode, extra
    real = recorded_cells(options.share)
    work[RECORDED] = real, 0, layers, decode, []
    left = [name for name in work if name not in journal.steps]
    advance = advancing(progress, "simulating", len(left))
    for number, lines in over_processes(_group, [work[name] for name in left], options.jobs):
        journal.step(left[number], partial(list, lines))
        advance()
    return report_of([*cells, *real], [line for lines in journal.steps.values() for line in lines], settings)


def _group(given: tuple[Any, ...]) -> list[dict[str, Any]]:
    return group(*given)


# -- figures -----------------------------------------------------------------------------------------------------------


def report_of(cells: Sequence[Cell], lines: Sequence[dict[str, Any]], settings: dict[str, Any]) -> Report:
    """Rows, bars and tables from all lines."""
    by_cell: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if "token_s" in line:
            by_cell.setdefault(line["cell"], []).append(line)
    rows = [_row(cell, by_cell[cell.name]) for cell in cells if cell.name in by_cell]
    tried = [line for line in lines if "variants" in line]
    report = Report("auto", "simulated", rows=rows, settings=settings)
    report.figures = {"variants": tried}
    for batch in BATCHES:
        every = [row for row in rows if row["batch"] == batch]
        some = [row for row in every if row["family"] not in SCRIPTS]
        if not some:
            continue
        say = f"batch {batch}: auto / "
        report.bars += [
            Bar(f"{say}best rule of the cell, geometric mean", _mean(every, "ratio"), "<=", ALL_MEAN),
            Bar(f"{say}best rule of the cell, worst cell", max(row["ratio"] for row in every), "<=", ALL_WORST),
            Bar(f"{say}on-demand, worst cell", max(row["on_demand"] for row in every), "<=", ALL_ON_DEMAND),
        ]  # fmt: skip
        say = f"batch {batch}, families without a script: auto / "
        report.bars += [
            Bar(f"{say}best rule of the cell, geometric mean", _mean(some, "ratio"), "<=", MEAN[batch]),
            Bar(f"{say}best rule of the cell, worst cell", max(row["ratio"] for row in some), "<=", WORST),
            Bar(f"{say}best rule of the cell, worst seed", max(max(row["seeds"]) for row in some), "<=", WORST_SEED),
            Bar(f"{say}on-demand, worst cell", max(row["on_demand"] for row in some), "<=", ON_DEMAND),
        ]  # fmt: skip
    report.printed = [*_by_batch(rows), *_by_rule(rows), *_worst(rows), *_variants(tried)][1:]
    return report


def _row(cell: Cell, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over the seeds. ratio: auto over the best rule, on_demand: over on-demand; request: over the least request
    of the rules; prompt_of_best, request_of_best: the best rule's prompt over auto's, auto's request over that rule's.
    """

    def mean(measure: str) -> dict[str, float]:
        return {rule: fmean(line[measure][rule] for line in lines) for rule in lines[0][measure]}

    def over_best(line: dict[str, Any]) -> float:
        times = line["token_s"]
        return float(times["auto"] / min(times[rule] for rule in PUBLISHED))

    token, request, prompt = mean("token_s"), mean("request_s"), mean("prompt_s")
    best = min(PUBLISHED, key=token.__getitem__)
    row: dict[str, Any] = {
        "shape": cell.shape, "family": cell.family, "budget": cell.budget, "link_gbps": cell.link_gbps,
        "host_gbps": cell.host_gbps, "batch": cell.batch, "auto_ms": round(1e3 * token["auto"], 3), "best": best,
        "ratio": token["auto"] / token[best], "seeds": [over_best(line) for line in lines],
        "on_demand": token["auto"] / token["on-demand"],
        "request": request["auto"] / min(request[rule] for rule in PUBLISHED),
        "prompt_of_best": prompt[best] / prompt["auto"], "request_of_best": request["auto"] / request[best],
        "over_best": {rule: round(token[rule] / token[best], 4) for rule in token},
        **{name: round(fmean(line["auto"][name] for line in lines), 4) for name in lines[0]["auto"]},
    }  # fmt: skip
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} | {
        "seeds": [round(x, 4) for x in row["seeds"]]
    }


def _mean(rows: Sequence[dict[str, Any]], key: str) -> float:
    return _geometric([row[key] for row in rows])


def _geometric(values: Sequence[float]) -> float:
    return math.exp(fmean(math.log(value) for value in values)) if values else math.nan


def _interval(rows: Sequence[dict[str, Any]]) -> str:
    """Of the geometric mean over cells: the mean over seeds and its 95% interval. Recorded routing has one seed."""
    count = max(len(row["seeds"]) for row in rows)
    seeds = list(zip(*(row["seeds"] for row in rows if len(row["seeds"]) == count), strict=True))
    means = [_geometric(one) for one in seeds]
    if (interval := interval95(means)) is None:
        return f"{means[0]:.3f}"
    return f"{fmean(means):.3f} ± {(interval[1] - interval[0]) / 2:.3f}"


def _table(title: str, head: Sequence[str], body: Sequence[Sequence[object]]) -> list[str]:
    return ["", f"### {title}", "", *markdown(tuple(head), [tuple(map(str, line)) for line in body])]


def _by_batch(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    head = ("", "cells", "mean", "by seed", "worst", "worst seed", "/ on-demand", "worst", "request", "worst")

    def line(name: str, some: Sequence[dict[str, Any]]) -> tuple[object, ...]:
        means = [f"{_mean(some, key):.3f}" for key in ("ratio", "on_demand", "request")]
        worst = [f"{max(row[key] for row in some):.3f}" for key in ("ratio", "on_demand", "request")]
        seed = f"{max(max(row['seeds']) for row in some):.3f}"
        return name, len(some), means[0], _interval(some), worst[0], seed, means[1], worst[1], means[2], worst[2]

    parts: dict[str, Sequence[object]] = {
        "family": [*FAMILIES, RECORDED], "shape": list(SHAPES), "budget": BUDGETS, "link_gbps": LINKS_GBPS,
        "host_gbps": HOSTS_GBPS,
    }  # fmt: skip
    for batch in BATCHES:
        some = [row for row in rows if row["batch"] == batch]
        if not some:
            continue
        body = [line("all", some)]
        for key, values in parts.items():
            for value in values:
                if part := [row for row in some if row[key] == value]:
                    body.append(line(f"{key.removesuffix('_gbps')} {value}", part))
        yield from _table(f"Batch {batch}: auto / the best rule of each cell", head, body)


def _by_rule(rows: Sequence[dict[str, Any]]) -> list[str]:
    body = []
    for rule in PUBLISHED:
        over = [(row["batch"], row["over_best"][rule], row["over_best"]["auto"]) for row in rows]
        means = [[x for batch, x, _ in over if batch == one] for one in BATCHES]
        body.append((
            rule, *(f"{_geometric(some):.2f}" for some in means), f"{max(x for _, x, _ in over):.2f}",
            sum(row["best"] == rule for row in rows), f"{_geometric([mine / x for _, x, mine in over]):.3f}",
        ))  # fmt: skip
    head = ("rule", *(f"batch {batch}" for batch in BATCHES), "worst", "cells where best", "auto / it")
    return _table("Each rule: its time / the best rule of the cell", head, body)


def _worst(rows: Sequence[dict[str, Any]]) -> list[str]:
    last = sorted(rows, key=lambda row: max(row["ratio"] / ALL_WORST, row["on_demand"] / ALL_ON_DEMAND))[-LISTED:]
    head = (
        "shape, family, budget, link, host, batch", "ratio", "worst seed", "best", "its prompt / auto's",
        "auto's request / its", "/ on-demand",
    )  # fmt: skip
    body = [
        (
            " ".join(str(row[key]) for key in ("shape", "family", "budget", "link_gbps", "host_gbps", "batch")),
            f"{row['ratio']:.3f}", f"{max(row['seeds']):.3f}", row["best"], f"{row['prompt_of_best']:.1f}",
            f"{row['request_of_best']:.3f}", f"{row['on_demand']:.3f}",
        )
        for row in reversed(last)
    ]  # fmt: skip
    return _table("The worst cells", head, body)


def _variants(tried: Sequence[dict[str, Any]]) -> list[str]:
    batches = [batch for batch in BATCHES if any(_batch_of(one) == batch for one in tried)]
    if not batches:
        return []
    some = {batch: [one["variants"] for one in tried if _batch_of(one) == batch] for batch in batches}

    def spread(values: Sequence[float]) -> str:
        return f"{_geometric(values):.3f} ({max(values):.3f})"

    return _table(
        "Wrong costs, and parts left out: auto / the best rule of the cell, mean (worst)",
        ("", *(f"batch {batch}, {len(some[batch])} cells" for batch in batches)),
        [(name, *(spread([one[name] for one in some[batch]]) for batch in batches)) for name in VARIANTS],
    )


def _batch_of(line: dict[str, Any]) -> int:
    return int(str(line["cell"]).rsplit(" ", 1)[1])
