"""Progress for whoever looks: a bar on a terminal, a line now and then in a log (a Ray job's, a pipe's)."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID

_EVERY_S = 2.0


def progress_on(console: Console) -> Progress:
    """A progress display that goes away at the end on a terminal, and is lines of text elsewhere."""
    return Progress(console=console, transient=True) if console.is_terminal else LineProgress(console)


class LineProgress(Progress):
    """Writes `measuring: 3/12`, at most every two seconds, and the last step of each task.

    Args:
        console: where to.
        every_s: seconds between lines.
    """

    def __init__(self, console: Console, every_s: float = _EVERY_S) -> None:
        super().__init__(console=console, auto_refresh=False, disable=True)  # no live display of its own
        self._every_s = every_s
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
            self.console.print(f"{task.description}: {task.completed:g}/{task.total:g}", highlight=False)
            self.console.file.flush()
