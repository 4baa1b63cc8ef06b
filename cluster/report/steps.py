"""The steps of a start, for people: what goes on now, and how long each step took."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console


class Steps:
    """Shows the step that goes on: beside a spinner on a terminal, as a line of its own elsewhere.

    Args:
        console: where to; None: nowhere.

    Attributes:
        seconds: of each step so far, in their order.
    """

    def __init__(self, console: Console | None) -> None:
        self._console = console
        self._status = console.status("") if console is not None and console.is_terminal else None
        self._now: str | None = None
        self._since_s = 0.0
        self.seconds: dict[str, float] = {}

    def __enter__(self) -> Steps:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        if self._status is not None:
            self._status.stop()

    def __call__(self, step: str) -> None:
        """Begin a step, such as "starting Ray", which ends the one before; the same step again changes nothing."""
        if step == self._now:
            return
        self._end()
        self._now, self._since_s = step, time.monotonic()
        if self._status is not None:
            self._status.update(f"{step} ...")
        elif self._console is not None:
            self._console.print(f"{step} ...", highlight=False, soft_wrap=True)
            self._console.file.flush()

    def _end(self) -> None:
        if self._now is not None:
            self.seconds[self._now] = self.seconds.get(self._now, 0.0) + time.monotonic() - self._since_s
            self._now = None
