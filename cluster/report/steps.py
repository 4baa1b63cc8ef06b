"""The steps of a start, for people: what goes on now, how long each step took, and about how long is left."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.text import Text


def left_s(before: Mapping[str, float], step: str, elapsed_s: float) -> float | None:
    """Seconds until the end of a start, by those of an earlier one.

    Args:
        before: seconds of each step then, in their order.
        step: that goes on now, since `elapsed_s`.

    Returns:
        None: there was no such step, or this one takes more than twice as long, so that nothing is known.
    """
    steps = list(before)
    if step not in before or elapsed_s > 2 * before[step] + 1:
        return None
    return max(0.0, before[step] - elapsed_s) + sum(before[later] for later in steps[steps.index(step) + 1 :])


class Steps:
    """Shows the step that goes on: beside a spinner on a terminal, as a line of its own elsewhere.

    It may be entered several times, for a start that goes on after something else was shown.

    Args:
        console: where to; None: nowhere.
        before: seconds of each step of the last start like this one, by which it says what is left; empty: not known.

    Attributes:
        seconds: of each step so far, in their order.
    """

    def __init__(self, console: Console | None, before: Mapping[str, float] | None = None) -> None:
        self._console, self._before = console, dict(before or {})
        self._status = console.status(self) if console is not None and console.is_terminal else None
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
        if self._status is None and self._console is not None:
            self._console.print(self._line(), highlight=False, soft_wrap=True)
            self._console.file.flush()

    def __rich__(self) -> Text:
        """What the spinner shows, asked for at each of its turns."""
        return Text(self._line())

    def progress(self) -> tuple[str, float | None] | None:
        """The step that goes on, and seconds until the end of the start, where they are known; None: no step. Any
        thread may ask."""
        step = self._now
        if step is None:
            return None
        elapsed_s = time.monotonic() - self._since_s
        return step, left_s(self._before, step, elapsed_s + self.seconds.get(step, 0.0))

    def _line(self) -> str:
        if (found := self.progress()) is None:
            return ""
        step, seconds = found
        return f"{step} ..." + ("" if seconds is None else f" (ready in about {max(1, round(seconds))} s)")

    def _end(self) -> None:
        if self._now is not None:
            self.seconds[self._now] = self.seconds.get(self._now, 0.0) + time.monotonic() - self._since_s
            self._now = None
