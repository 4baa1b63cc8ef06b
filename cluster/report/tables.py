"""Tables, bytes, seconds and progress for people."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
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

_STEPS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_EVERY_S, _BYTES_EVERY_S = 2.0, 5.0


def facts(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """A table of names and values; values are plain text, never markup."""
    table = Table(title=title, title_justify="left", show_header=False, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def grid(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table with a heading; cells are plain text, never markup."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def size(nbytes: float) -> str:
    """Bytes with a binary unit, such as 1.50 MiB."""
    for step, unit in _STEPS:
        if nbytes >= step:
            return f"{nbytes / step:.2f} {unit}"
    return f"{nbytes:.0f} B"


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


def speed(prediction: Mapping[str, Any]) -> str:
    """Predicted tokens per second with their range; `at most` where the host's time is not known."""
    if prediction["low"] is None:
        return f"at most {prediction['high'] or prediction['tokens_per_s']:.4g} tokens/s"
    low, high = prediction["low"], prediction["high"]
    return f"{prediction['tokens_per_s']:.3g} tokens/s ({low:.3g} to {high:.3g})"


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
