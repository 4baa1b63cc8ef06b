"""What all benchmarks share: interleaved repetitions, warm-up, medians with spread, bars, one JSON form."""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ...host import cpu, versions

Measures = dict[str, float]
_LOG_WIDTH = 160

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
