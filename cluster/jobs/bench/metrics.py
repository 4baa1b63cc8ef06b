"""What all benchmarks share: interleaved cases, medians with spread, bars, one JSON form; rows and named metrics."""

from __future__ import annotations

import inspect
import math
import operator
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ...host import cpu, versions

Measures = dict[str, float]
_LOG_WIDTH = 160
_BLOCK = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    ">": operator.gt,
}


@dataclass(frozen=True)
class Case:
    """One thing to measure: `run` does it once and returns its measures by name (unit in the name)."""

    name: str
    run: Callable[[], Measures]


@dataclass(frozen=True)
class Spread:
    """Of one measure over the repetitions."""

    median: float
    minimum: float
    maximum: float
    values: tuple[float, ...]

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values), tuple(values))


@dataclass(frozen=True)
class Bar:
    """A limit that a value must hold. A value that is not a number holds none."""

    name: str
    value: float
    op: str
    limit: float

    @property
    def ok(self) -> bool:
        return not math.isnan(self.value) and _COMPARE[self.op](self.value, self.limit)


@dataclass
class Report:
    """The result of a benchmark; `as_dict` is what `--json` prints."""

    name: str
    executor: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    shown: tuple[str, ...] = ()  # keys of the rows that the table shows; none: all but "values"
    figures: dict[str, Any] = field(default_factory=dict)  # of metrics that are no rows, by key of the JSON object

    @property
    def ok(self) -> bool:
        return all(bar.ok for bar in self.bars)

    def as_dict(self) -> dict[str, Any]:
        """Plain values; hardware and versions are those of this process. What is not a number is None, as in JSON."""
        return {
            "name": self.name,
            "hardware": cpu(),
            "executor": self.executor,
            "versions": versions(),
            "settings": self.settings,
            "rows": _numbers(self.rows),
            "bars": _numbers([asdict(bar) | {"ok": bar.ok} for bar in self.bars]),
            **_numbers(self.figures),
        }


def interleaved(
    cases: Sequence[Case], repeats: int, warmup: int, progress: Progress | None = None, label: str = "measuring"
) -> dict[str, dict[str, Spread]]:
    """Run all cases in turn, A B C A B C ..., so that a machine that drifts drifts for all of them.

    Args:
        cases: what to run; every run of a case returns the same measures.
        repeats: counted rounds.
        warmup: rounds before them that are not counted.
        label: of the progress.

    Returns:
        By case, by measure: median and spread over the counted rounds.
    """
    collected: dict[str, dict[str, list[float]]] = {case.name: {} for case in cases}
    task = progress.add_task(label, total=(warmup + repeats) * len(cases)) if progress is not None else None
    for round_number in range(warmup + repeats):
        for case in cases:
            measures = case.run()
            if round_number >= warmup:
                for name, value in measures.items():
                    collected[case.name].setdefault(name, []).append(value)
            if progress is not None and task is not None:
                progress.advance(task)
    return {case: {name: Spread.of(v) for name, v in by_name.items()} for case, by_name in collected.items()}


def rows_of(results: Mapping[str, Mapping[str, Spread]], **common: Any) -> list[dict[str, Any]]:
    """One row per case and measure, with what all rows of the group have in common."""
    return [
        {"case": case, **common, "measure": name, **asdict(spread)}
        for case, measures in results.items()
        for name, spread in measures.items()
    ]


def ratio(value: float, base: float) -> float:
    """value / base; not a number where the base is zero, so that no bar holds on an empty measurement."""
    return value / base if base else math.nan


def markdown(head: Sequence[Any], body: Iterable[Sequence[Any]]) -> list[str]:
    """A table in Markdown, line by line."""
    shown = ["| " + " | ".join(map(str, line)) + " |" for line in (head, *body)]
    return [shown[0], "|" + "---|" * len(head), *shown[1:]]


def fill_tables(page: str, lines_of: Callable[[str], Sequence[str]]) -> str:
    """A page with its blocks `<!-- table: NAME -->` to `<!-- end -->` filled with the lines of each name."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}\n" + "\n".join(lines_of(match["name"])) + f"\n\n{match[3]}"

    return _BLOCK.sub(fill, page)


def rounded(value: Any) -> Any:
    """Plain values with floats of six digits: results need no more, and it keeps their files small."""
    if isinstance(value, Mapping):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


Row = Mapping[str, Any]  # of an experiment, with the name of its section and, where prompts were served, a "spread"


def cells_of(rows: Sequence[Row], section: str) -> dict[tuple[str, str, float | None], dict[str, Row]]:
    """The rows of a section by context, budget and link, then by policy."""
    found: dict[tuple[str, str, float | None], dict[str, Row]] = {}
    for row in rows:
        if row.get("section") == section:
            key = (row.get("context", ""), row["budget"], row["link_gbps"])
            found.setdefault(key, {})[row["policy"]] = row
    return found


def values_of(row: Row, measure: str) -> Sequence[float]:
    """Of a measure the repetitions' values; of a row that was not repeated the one value."""
    found = row.get("spread", {}).get(measure)
    if found is not None:
        return tuple(found["values"])
    return tuple(row.get("values", {}).get(measure, (row[measure],) if measure in row else (0.0,)))


def median_of(row: Row, measure: str) -> float:
    """Over the repetitions; a counter that the row lacks was zero."""
    return statistics.median(values_of(row, measure))


def paired(row: Row, other: Row, measure: str) -> float:
    """Median over repetitions of row / other, both in the same repetition; not a number where other is zero."""
    pairs = zip(values_of(row, measure), values_of(other, measure), strict=True)
    ratios = [a / b for a, b in pairs if b]
    return statistics.median(ratios) if ratios else math.nan


@dataclass(frozen=True)
class MetricFunction:
    """What a name in an experiment's `metrics` stands for.

    run: is given the `run.Study` and the options, and returns figures by key of the JSON object; it may add bars and
        settings to the study, and measures to its rows. options: names of those that it takes.
    """

    run: Callable[..., dict[str, Any]]
    options: frozenset[str]


METRICS: dict[str, MetricFunction] = {}


def metric(name: str) -> Callable[[Callable[..., dict[str, Any]]], Callable[..., dict[str, Any]]]:
    """Register a metric function under a name; its keyword-only parameters are its options."""

    def register(function: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        given = inspect.signature(function).parameters.values()
        options = frozenset(p.name for p in given if p.kind is inspect.Parameter.KEYWORD_ONLY)
        METRICS[name] = MetricFunction(function, options)
        return function

    return register


def _numbers(value: Any) -> Any:
    """The same with None for NaN: JSON has none, and strict readers refuse a file with one."""
    if isinstance(value, Mapping):
        return {key: _numbers(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers(part) for part in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def print_report(report: Report, console: Console) -> None:
    """Rows and bars as tables."""
    if report.rows:
        shown = list(report.shown) or [key for key in report.rows[0] if key != "values"]
        table = Table(*shown, title=f"{report.name} ({report.executor}, {cpu()['model']})")
        for row in report.rows:
            table.add_row(*(f"{row[k]:.5g}" if isinstance(row[k], float) else str(row[k]) for k in shown))
        # a log has no width: a table squeezed into 80 columns cannot be read
        wide = console if console.is_terminal else Console(file=console.file, width=_LOG_WIDTH)
        wide.print(table)
    for bar in report.bars:
        verdict = "[green]holds[/]" if bar.ok else "[red]missed[/]"
        console.print(f"{verdict}  {bar.name}: {bar.value:.3g} {bar.op} {bar.limit:g}", soft_wrap=True)
