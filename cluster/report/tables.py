"""Tables, bytes, seconds and progress for people.

Results go to standard output, progress and notices to standard error. A name or a path is never broken: what a terminal
has no room for beside each other is printed below each other, and a pipe or a file has room for any line.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from ...errors import size as size
from .output import stdout

_EVERY_S, _BYTES_EVERY_S = 2.0, 5.0
_ANY_WIDTH = 1 << 30
_RULE = Box("\n".join(["    "] * 2 + [" -- "] + ["    "] * 5), ascii=True)  # a line below the heading
_LEAST_VALUE = 20  # columns of a value, however long the names beside it are


def results(as_json: bool = False) -> Console:
    """Where results go: standard output; with `--json`, which has one object there, standard error."""
    return Console(stderr=True) if as_json else Console(file=stdout())


def show(console: Console, *results: RenderableType) -> None:
    """Print results; a line that is too long is left to the terminal, which breaks it without inserting anything."""
    for result in results:
        console.print(result, soft_wrap=True, markup=False, highlight=False)


@dataclass(frozen=True)
class Facts:
    """Names and values, a line for each; a long value is broken between words."""

    title: str
    rows: Sequence[tuple[str, str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from _titled(self.title)
        name_width = max((cell_len(name) for name, _ in self.rows), default=0)
        for name, value in self.rows:  # each with a width of its own: a long path widens no other value
            table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
            table.add_column(style="bold", min_width=name_width)
            table.add_column(min_width=_LEAST_VALUE)
            table.add_row(Text(name), Text(value))
            yield from _lines(table, console, options)
        yield Text("")


@dataclass(frozen=True)
class Grid:
    """Rows below a heading, whose titles are broken between words where a terminal is narrow; on one that is too narrow
    for that, each row as names and values."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from _titled(self.title)
        table = Table(box=_RULE, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
        full = [(*row, *[""] * (len(self.columns) - len(row))) for row in self.rows]
        for place, column in enumerate(self.columns):
            table.add_column(Text(column), min_width=max((cell_len(row[place]) for row in full), default=0))
        for row in full:
            table.add_row(*map(Text, row))
        if console.is_terminal and _widths(table, console, options).minimum > options.max_width:
            for row in full:
                yield Facts("", tuple(zip(self.columns, row, strict=True)))
            return
        yield from _lines(table, console, options)
        yield Text("")


def facts(title: str, rows: Iterable[tuple[str, str]]) -> Facts:
    """A table of names and values; values are plain text, never markup."""
    return Facts(title, tuple(rows))


def grid(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Grid:
    """A table with a heading; cells are plain text, never markup."""
    return Grid(title, tuple(columns), tuple(tuple(row) for row in rows))


def _titled(title: str) -> Iterator[Text]:
    if title:
        yield Text(title, style="italic", no_wrap=True, overflow="ignore")


def _widths(table: Table, console: Console, options: ConsoleOptions) -> Measurement:
    """Without a broken word, and without a broken line."""
    return Measurement.get(console, options.update_width(_ANY_WIDTH), table)


def _lines(table: Table, console: Console, options: ConsoleOptions) -> Iterator[Text]:
    """A table without spaces at the ends of lines: on a terminal as wide as that or as its longest word, else whole."""
    least, whole = _widths(table, console, options)
    width = max(least, options.max_width) if console.is_terminal else whole
    for segments in console.render_lines(table, options.update_width(width), pad=False):
        parts = ((segment.text, segment.style or "") for segment in segments)
        line = Text.assemble(*parts, no_wrap=True, overflow="ignore")
        line.rstrip()
        yield line


def share(value: float | None) -> str:
    """A share in percent; `-`: nothing to count it from."""
    return "-" if value is None else f"{value:.1%}"


def seconds(value: float | None) -> str:
    """Seconds in the unit that reads best; `none` where there is no measurement."""
    if value is None:
        return "none"
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def count(number: int, noun: str) -> str:
    """Such as `1 GPU` or `2 GPUs`."""
    return f"{number} {noun}{'s' if number != 1 else ''}"


def progress_on(console: Console) -> Progress:
    """A progress display that goes away at the end on a terminal, and is lines of text elsewhere (a log, a pipe)."""
    return Progress(console=console, transient=True) if console.is_terminal else LineProgress(console)


def byte_progress(console: Console) -> Progress:
    """A progress display of bytes, with bytes a second and the time left; lines of text where there is no terminal."""
    if not console.is_terminal:
        return LineProgress(console, _BYTES_EVERY_S, in_bytes=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console)


class LineProgress(Progress):
    """Writes `measuring: 3/12`, at most every two seconds, and the last step of each task.

    Args:
        console: where to.
        every_s: seconds between lines.
        in_bytes: `loading: 3.00 MiB of 12.00 MiB, 1.50 MiB/s, 6 s left`.
    """

    def __init__(self, console: Console, every_s: float = _EVERY_S, in_bytes: bool = False) -> None:
        super().__init__(console=console, auto_refresh=False, disable=True)  # no live display of its own
        self._every_s, self._in_bytes = every_s, in_bytes
        self._last_s = 0.0

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._say(task_id)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._say(task_id)

    def _say(self, task_id: TaskID) -> None:
        task = self._tasks[task_id]
        if task.total is None:
            return
        now_s = time.monotonic()
        if task.completed >= task.total or now_s - self._last_s >= self._every_s:
            self._last_s = now_s
            text = _bytes_of(task) if self._in_bytes else f"{task.completed:g}/{task.total:g}"
            self.console.print(f"{task.description}: {text}", highlight=False, soft_wrap=True)
            self.console.file.flush()


def _bytes_of(task: Task) -> str:
    speed, left_s = task.speed, task.time_remaining
    rate = f", {size(speed)}/s" if speed else ""
    left = f", {left_s:.0f} s left" if left_s and not task.finished else ""
    return f"{size(task.completed)} of {size(task.total or 0)}{rate}{left}"
