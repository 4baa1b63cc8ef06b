"""Standard output, which has results and nothing else.

While a command runs, what anything else prints (a user's policy, a library, native code, a child process) goes to
standard error; results go through `stdout`. A result that cannot be written is an `OutputError`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO, cast

from ...errors import OutputClosed, OutputError, reason

_NUMBER, _ERRORS = 1, 2  # file descriptors of a process


class _Guarded:
    """A text stream whose failed writes are an `OutputError`, also when they are tried again."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._failed: OutputError | None = None

    def write(self, text: str) -> int:
        with self._told():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._told():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        if self._failed is not None:
            raise self._failed
        try:
            yield
        except BrokenPipeError as error:
            self._failed = OutputClosed("standard output was closed by its reader", "read it to the end")
            raise self._failed from error
        except (OSError, ValueError) as error:
            what = f"standard output cannot be written: {reason(error)}"
            self._failed = OutputError(what, "free the disk, or write elsewhere")
            raise self._failed from error
        finally:
            if self._failed is not None:  # else Python fails again at exit, with what is in its buffer
                with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:
                    os.dup2(nothing.fileno(), self._stream.fileno())


_results: TextIO | None = None  # where results go while standard output is set aside


def stdout() -> TextIO:
    """Where results go; raises `OutputError` where they cannot be written."""
    return cast(TextIO, _Guarded(sys.stdout)) if _results is None else _results


def print_json(record: Mapping[str, Any]) -> None:
    """Print one JSON object as the result."""
    print(json.dumps(record), file=stdout(), flush=True)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Inside the block, `sys.stdout` raises `OutputError`; all is written at the end of the block."""
    before = sys.stdout
    sys.stdout = cast(TextIO, _Guarded(before))
    try:
        try:
            yield
        except SystemExit:
            sys.stdout.flush()
            raise
        sys.stdout.flush()
    finally:
        sys.stdout = before


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """Inside the block, standard output is for `stdout` alone: all else that is written there goes to standard error.

    The file descriptor, too, where it is that of the process: native code and children write to it.
    """
    global _results
    before, outer = sys.stdout, _results
    with contextlib.ExitStack() as stack:
        _results = stack.enter_context(_own_descriptor(before))
        sys.stdout = sys.stderr
        try:
            yield
            _results.flush()
        finally:
            sys.stdout, _results = before, outer


@contextlib.contextmanager
def _own_descriptor(stream: TextIO) -> Iterator[TextIO]:
    """A stream to where `stream` leads now; if that is descriptor 1, this leads to standard error meanwhile."""
    try:
        is_the_process_own = stream.fileno() == _NUMBER
    except (OSError, ValueError, AttributeError):  # a test's
        is_the_process_own = False
    if not is_the_process_own:
        yield cast(TextIO, _Guarded(stream))
        return
    stream.flush()
    kept = os.dup(_NUMBER)
    # a character that the terminal's encoding lacks is written as its escape
    errors = "backslashreplace" if stream.errors == "strict" else stream.errors
    own = os.fdopen(kept, "w", encoding=stream.encoding, errors=errors, closefd=False)
    with contextlib.suppress(OSError):  # standard error is closed
        os.dup2(_ERRORS, _NUMBER)
    try:
        yield cast(TextIO, _Guarded(own))
    finally:
        with contextlib.suppress(OSError, ValueError):
            own.close()
        os.dup2(kept, _NUMBER)
        os.close(kept)
