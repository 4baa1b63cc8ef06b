"""Keeps Ray's notices out of the program's output.

A thread of Ray's client prints notices of dead workers to `sys.stdout`, whatever its log options say. They would break
`--json`, and they repeat at length what our own error says in a line; Ray's log files have them anyway.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO, cast

_RAY_THREADS = "ray_"


class _WithoutRay:
    """A text stream that drops what Ray's threads write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if threading.current_thread().name.startswith(_RAY_THREADS):
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def without_ray_notices() -> Iterator[None]:
    """Inside the block, Ray's threads cannot write to standard output."""
    before = sys.stdout
    quiet = cast(TextIO, _WithoutRay(before))
    sys.stdout = quiet
    try:
        yield
    finally:
        if sys.stdout is quiet:  # somebody else's redirection stays
            sys.stdout = before
