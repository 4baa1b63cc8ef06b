"""The steps of a start: the current one, the seconds of each, and the seconds left by the last start (`LastStart`)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.text import Text

from ...proto.private import open_own, own_folder, user_cache
from ..config import RunConfig

_KEPT = 64  # configurations of `LastStart`


def left_s(before: Mapping[str, float], step: str, elapsed_s: float) -> float | None:
    """Seconds until the end of a start, by those of an earlier one.

    Args:
        before: seconds of each step then, in their order.
        step: the current one. elapsed_s: since it began.

    Returns:
        None: there was no such step, or this one takes more than twice as long, so that nothing is known.
    """
    steps = list(before)
    if step not in before or elapsed_s > 2 * before[step] + 1:
        return None
    return max(0.0, before[step] - elapsed_s) + sum(before[later] for later in steps[steps.index(step) + 1 :])


class Steps:
    """Shows the current step: beside a spinner on a terminal, elsewhere as a line.

    It may be entered several times, for a start that continues after other output.

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
        """The current step and the seconds until the start ends, if known; None: no step. Called on any thread."""
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


class LastStart:
    """The last start of a command with a configuration on this machine.

    Args:
        command: whose steps they are.
        config: any other value in it is another start.
        file: None: in the user's cache.

    Attributes:
        seconds: of each step, in their order; empty: it is not known.
    """

    def __init__(self, command: str, config: RunConfig, file: Path | None = None) -> None:
        self._file = file or user_cache() / "starts.json"
        text = f"{platform.node()}\n{command}\n{config.model_dump_json()}"
        self._key = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.seconds: dict[str, float] = {}
        found = self._read().get(self._key)
        if isinstance(found, dict) and all(isinstance(value, (int, float)) and value >= 0 for value in found.values()):
            self.seconds = found

    def remember(self, seconds: Mapping[str, float]) -> None:
        """This start's steps; a cache that cannot be written changes nothing."""
        known = self._read()
        known.pop(self._key, None)
        newest = dict(list(known.items())[1 - _KEPT :])
        newest[self._key] = {step: round(value, 3) for step, value in seconds.items()}
        with contextlib.suppress(OSError):
            own_folder(self._file.parent)
            written = self._file.with_suffix(f".{os.getpid()}")
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            with os.fdopen(open_own(written, flags), "w", encoding="utf-8") as file:
                json.dump(newest, file)
            written.replace(self._file)

    def _read(self) -> dict[str, dict[str, float]]:
        try:
            with os.fdopen(open_own(self._file, os.O_RDONLY), encoding="utf-8") as file:
                found = json.load(file)
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}
