"""What all benchmarks share: interleaved cases, medians with spread, bars, the JSON report, rows."""

from __future__ import annotations

import math
import operator
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, combinations
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from ...host import cpu, now, versions
from ...report.files import writing
from ...report.results import refusals
from ...report.tables import Grid, grid, show

Measures = dict[str, float]
CLEAR = 0.05  # of the larger: a difference that decides an order
_T95 = {  # Student's, by degrees of freedom; between two the lower
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 15: 2.131,
    20: 2.086, 30: 2.042, 60: 2.0, 120: 1.98,
}  # fmt: skip
_ORDERED = "decode_blocked_io_s", "tpot_ms"
_BLOCK = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le, "<": operator.lt, ">=": operator.ge, ">": operator.gt,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One thing to measure: `run` does it once and returns its measures by name (with the unit in the name)."""

    name: str
    run: Callable[[], Measures]


@dataclass(frozen=True)
class Spread:
    """One measure over the repetitions."""

    median: float
    minimum: float
    maximum: float
    values: tuple[float, ...]

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values), tuple(values))


@dataclass(frozen=True)
class Bar:
    """A limit on a value. NaN always fails."""

    name: str
    value: float
    op: str
    limit: float

    @property
    def ok(self) -> bool:
        return not math.isnan(self.value) and _COMPARE[self.op](self.value, self.limit)


@dataclass
class Report:
    """The result of a benchmark; `as_dict` is what `--json` prints.

    shown: keys of the rows that the table shows; empty: all but "values". figures: other results by key of the JSON
    object. printed: lines of Markdown that are printed in place of the rows. refused: rows without figures, of what was
    refused or failed (`refused_row`). not_measured: peers that are not here, each with the reason; no bar is on them.
    """

    name: str
    executor: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    shown: tuple[str, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)
    printed: list[str] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    not_measured: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(bar.ok for bar in self.bars)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, None for NaN, with the hardware and versions of this process."""
        return {
            "name": self.name, "hardware": cpu(), "executor": self.executor, "versions": versions(),
            "date": now(),
            "settings": self.settings, "rows": _without_nan([*self.rows, *self.refused]),
            "bars": _without_nan([asdict(bar) | {"ok": bar.ok} for bar in self.bars]), **_without_nan(self.figures),
        } | ({"not_measured": self.not_measured} if self.not_measured else {})  # fmt: skip


def interleaved(
    cases: Sequence[Case], repeats: int, warmup: int, progress: Progress | None = None, label: str = "measuring"
) -> dict[str, dict[str, Spread]]:
    """Run all cases in turn, A B C A B C ..., so that drift of the machine affects all of them.

    Args:
        cases: what to run; every run of a case returns the same measures.
        repeats: counted rounds, after `warmup` rounds that are not counted.
        label: of the progress.

    Returns:
        By case, by measure: median and spread over the counted rounds.
    """
    collected: dict[str, dict[str, list[float]]] = {case.name: {} for case in cases}
    advance = advancing(progress, label, (warmup + repeats) * len(cases))
    for round_number in range(warmup + repeats):
        for case in cases:
            measures = case.run()
            if round_number >= warmup:
                for name, value in measures.items():
                    collected[case.name].setdefault(name, []).append(value)
            advance()
    return {case: {name: Spread.of(v) for name, v in by_name.items()} for case, by_name in collected.items()}


def advancing(progress: Progress | None, what: str, total: int) -> Callable[[], None]:
    """Show a progress bar; call the result after each of so many steps."""
    if progress is None:
        return lambda: None
    task = progress.add_task(what, total=total)
    return lambda: progress.advance(task)


def interval95(values: Sequence[float]) -> tuple[float, float] | None:
    """Of the mean of repetitions, by Student's t; None: there is one only."""
    count = len(values)
    if count < 2:
        return None
    half = _T95[max(df for df in _T95 if df < count)] * statistics.stdev(values) / count**0.5
    middle = statistics.fmean(values)
    return middle - half, middle + half


def rows_of(results: Mapping[str, Mapping[str, Spread]], **common: Any) -> list[dict[str, Any]]:
    """One row for each case and measure; all rows have the `common` values."""
    return [
        {"case": case, **common, "measure": name, **asdict(spread)}
        for case, measures in results.items()
        for name, spread in measures.items()
    ]


def ratio(value: float, base: float) -> float:
    """value / base; NaN where the base is zero, so that an empty measurement fails its bar."""
    return value / base if base else math.nan


def median_ratio(of: Spread, base: Spread) -> float:
    """Median of the rounds' ratios; NaN where one of them has a base of zero."""
    ratios = [ratio(value, other) for value, other in zip(of.values, base.values, strict=True)]
    return math.nan if any(map(math.isnan, ratios)) else statistics.median(ratios)


def markdown(head: Sequence[Any], body: Iterable[Sequence[Any]]) -> list[str]:
    """Lines of a Markdown table."""
    shown = ["| " + " | ".join(map(str, line)) + " |" for line in (head, *body)]
    return [shown[0], "|" + "---|" * len(head), *shown[1:]]


def fill_tables(page: str, lines_of: Callable[[str], Sequence[str]]) -> str:
    """Fill each block from `<!-- table: NAME -->` to `<!-- end -->` of a page with the lines of its name."""
    return _BLOCK.sub(lambda m: f"{m[1]}\n" + "\n".join(lines_of(m["name"])) + f"\n\n{m[3]}", page)


def fill_page(page: Path, lines_of: Callable[[str], Sequence[str]], blank: str = "") -> None:
    """Fill the blocks of a page, whose words stay; where there is no page, those of `blank`.

    Raises:
        ConfigError: it cannot be read or written.
    """
    with writing(page, "give another folder"):
        before = page.read_text(encoding="utf-8") if page.exists() else blank
        page.write_text(fill_tables(before, lines_of), encoding="utf-8")


def rounded(value: Any) -> Any:
    """Plain values with floats of six digits, which keeps result files small."""
    if isinstance(value, Mapping):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


Row = Mapping[str, Any]  # of an experiment; `spread` has the measures of prompts that were served


def cells_of(rows: Sequence[Row], section: str) -> dict[tuple[str, str, float | None], dict[str, Row]]:
    """The rows of a section by context, budget and link, then by policy."""
    found: dict[tuple[str, str, float | None], dict[str, Row]] = {}
    for row in rows:
        if row.get("section") == section:
            key = (row.get("context", ""), row["budget"], row["link_gbps"])
            found.setdefault(key, {})[row["policy"]] = row
    return found


def values_of(row: Row, measure: str) -> Sequence[float]:
    """A measure's values over the repetitions; one value for a row that was not repeated."""
    found = row.get("spread", {}).get(measure)
    if found is not None:
        return tuple(found["values"])
    return tuple(row.get("values", {}).get(measure, (row.get(measure, 0.0),)))


def median_of(row: Row, measure: str) -> float:
    """Median over the repetitions; 0 for a counter that the row lacks."""
    return statistics.median(values_of(row, measure))


def paired(row: Row, other: Row, measure: str) -> float:
    """Median of row / other over the repetitions, each with itself; NaN where other is always zero."""
    pairs = zip(values_of(row, measure), values_of(other, measure), strict=True)
    ratios = [a / b for a, b in pairs if b]
    return statistics.median(ratios) if ratios else math.nan


def orders(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Whether who waits less for copies decodes faster, by section that was served.

    Of the pairs of variants of a cell whose medians of decoding's blocked I/O and of TPOT both differ by more than
    `CLEAR`: `pairs`, how many, and `same` and `share`, how many have the same order in both.
    """
    found: list[dict[str, Any]] = []
    for section in dict.fromkeys(row["section"] for row in rows if row.keys() >= set(_ORDERED)):
        cells = cells_of(rows, section).values()
        pairs = [pair for of in cells for pair in combinations(of.values(), 2) if all(_differ(*pair))]
        same = sum(len({a[name] < b[name] for name in _ORDERED}) == 1 for a, b in pairs)
        found.append({"section": section, "pairs": len(pairs), "same": same, "share": ratio(same, len(pairs))})
    return found


def _differ(a: Row, b: Row) -> list[bool]:
    return [abs(a[name] - b[name]) > CLEAR * max(a[name], b[name]) for name in _ORDERED]


def _without_nan(value: Any) -> Any:
    """The same with None for NaN, which JSON lacks."""
    if isinstance(value, Mapping):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def table_of(report: Report) -> tuple[list[str], list[list[str]]]:
    """Head and cells of the report's rows; what a row does not have is empty."""
    shown = list(report.shown) or [key for key in dict.fromkeys(chain(*report.rows)) if key != "values"]
    return shown, [[text_of(row.get(key)) for key in shown] for row in report.rows]


def text_of(value: Any) -> str:
    """A table's cell: a spread as median (range), nested values on one line, numbers of five digits; None is empty."""
    if isinstance(value, Mapping):
        if value.keys() == {"median", "minimum", "maximum"}:
            median, *ends = (text_of(value[name]) for name in ("median", "minimum", "maximum"))
            return f"{median} ({' to '.join(ends)})"
        return ", ".join(f"{key} {text_of(part)}" for key, part in value.items())
    if isinstance(value, list | tuple):
        return "; ".join(map(text_of, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.5g}"
    return "" if value is None else str(value)


def fill_report_page(page: Path, report: Report, blank: str = "") -> None:
    """Fill the blocks `rows`, `refused`, `bars` and `printed` of a page, or of `blank`; raises as `fill_page`.

    Without a page and `blank` none is written.
    """
    if not (blank or page.exists()):
        return
    bars = ((bar.name, f"{bar.value:.3g}", f"{bar.op} {bar.limit:g}", "yes" if bar.ok else "no") for bar in report.bars)
    blocks = {"rows": markdown(*table_of(report)), "bars": markdown(("bar", "value", "limit", "holds"), bars)}
    blocks["printed"], blocks["refused"] = report.printed, [f"- {line}" for line in refusals(report.refused)]
    fill_page(page, blocks.__getitem__, blank)


def print_report(report: Report, console: Console) -> None:
    """Print rows and bars as tables."""
    title = f"{report.name} ({report.executor}, {cpu()['model']})"
    if report.printed:
        show(console, title, "", *_grids(report.printed))
    elif report.rows:
        show(console, grid(title, *table_of(report)))
    show(console, *refusals(report.refused), *(f"not measured: {peer}" for peer in report.not_measured))
    for bar in report.bars:
        show(console, f"{'holds' if bar.ok else 'missed'}  {bar.name}: {bar.value:.3g} {bar.op} {bar.limit:g}")


def _grids(lines: Sequence[str]) -> Iterator[Grid]:
    """Tables in Markdown, as `markdown` writes them, each below its heading, if it has one."""
    for block in "\n".join(lines).split("\n\n"):
        heads = [line.lstrip("# ") for line in block.splitlines() if line.startswith("#")]
        cells = [line[2:-2].split(" | ") for line in block.splitlines() if line.startswith("|")]
        if cells or heads:
            head, _, *body = cells or [[], []]
            yield grid(" ".join(heads), head, body)
