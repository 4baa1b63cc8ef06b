"""Tables, bytes, seconds and progress for people.

Results go to standard output, progress and notices to standard error. A name or a path is never broken: what a terminal
has no room for beside each other is printed below each other, and a pipe or a file has room for any line.
"""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
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
from rich.text import Text

from ...errors import size as size
from .output import stdout

_EVERY_S, _BYTES_EVERY_S = 2.0, 5.0
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
        room = max(_LEAST_VALUE, options.max_width - name_width - 2) if console.is_terminal else sys.maxsize
        for name, value in self.rows:
            lines = [part for line in value.splitlines() for part in _broken(line, room)] or [""]
            for number, line in enumerate(lines):
                label = Text((name if number == 0 else "").ljust(name_width), style="bold")
                yield _line(Text.assemble(label, "  ", line))
        yield _line("")


@dataclass(frozen=True)
class Grid:
    """Rows below a heading, whose titles are broken between words where a terminal is narrow; on one that is too narrow
    for that, each row as names and values."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        heads = [[column] for column in self.columns]
        room = options.max_width if console.is_terminal else sys.maxsize
        if self._width(heads) > room:
            heads = [_broken(column, self._of_cells(place)) for place, column in enumerate(self.columns)]
        yield from _titled(self.title)
        if self._width(heads) > room:
            for row in self._full():
                yield Facts("", tuple(zip(self.columns, row, strict=True)))
            return
        widths = self._widths(heads)
        for line in zip_longest(*heads, fillvalue=""):
            yield _line(Text(self._joined(line, widths), style="bold"))
        yield _line(self._joined(["-" * width for width in widths], widths))
        for row in self._full():
            yield _line(self._joined(row, widths))
        yield _line("")

    def _of_cells(self, place: int) -> int:
        """Width of a column's cells; of the longest word of its title, where that is more."""
        longest = max(map(cell_len, self.columns[place].split()), default=0)
        return max(1, longest, *(cell_len(row[place]) for row in self._full()))

    def _widths(self, heads: Sequence[Sequence[str]]) -> list[int]:
        """Of each column, with its title in these lines."""
        columns = zip(*self._full(), strict=True) if self.rows else ([] for _ in heads)
        return [max(map(cell_len, (*head, *cells))) for head, cells in zip(heads, columns, strict=True)]

    def _width(self, heads: Sequence[Sequence[str]]) -> int:
        widths = self._widths(heads)
        return sum(widths) + 2 * (len(widths) - 1)

    def _full(self) -> list[Sequence[str]]:
        """The rows, each with a cell for every column."""
        return [(*row, *[""] * (len(self.columns) - len(row))) for row in self.rows]

    @staticmethod
    def _joined(cells: Sequence[str], widths: Sequence[int]) -> str:
        padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(cells, widths, strict=True))
        return "  ".join(padded).rstrip()


def facts(title: str, rows: Iterable[tuple[str, str]]) -> Facts:
    """A table of names and values; values are plain text, never markup."""
    return Facts(title, tuple(rows))


def grid(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Grid:
    """A table with a heading; cells are plain text, never markup."""
    return Grid(title, tuple(columns), tuple(tuple(row) for row in rows))


def _titled(title: str) -> Iterator[Text]:
    if title:
        yield _line(Text(title, style="italic"))


def _line(text: str | Text) -> Text:
    """One line that nothing breaks or cuts, whatever the console's width."""
    line = Text(text) if isinstance(text, str) else text
    line.no_wrap, line.overflow = True, "ignore"
    return line


def _broken(line: str, room: int) -> list[str]:
    """A line broken between words, in the room that there is; a word that is longer stays whole."""
    return textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False) or [""]


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
