"""The request log: one line a request, as text or as JSON, written by its own thread.

Requests wait for no disk: up to `_QUEUED` lines wait for the thread, more are dropped and counted. A file that is
renamed or removed (logrotate) is made again. Several servers may write to one file, or to one standard error: each line
is one write to the end of it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import os
import queue
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from ...errors import ConfigError
from ...proto.private import open_own
from .records import PROBES, RequestRecord

LogFormat = Literal["text", "json"]
_QUEUED = 10_000
_LONG = 200  # characters of a path or a message: a line is one write to a pipe, which takes 4096 bytes at once


class RequestLog:
    """A sink of records.

    Args:
        form: of the lines.
        file: to be appended to, created with mode 0600; or an open descriptor, which this closes.
        dropped: called for each line that found no room, or could not be written.
    """

    def __init__(self, form: LogFormat, file: Path | int, dropped: Callable[[], None] = lambda: None) -> None:
        self._written = _as_json if form == "json" else _as_text
        self._dropped = dropped
        self._lines: queue.SimpleQueue[Any] = queue.SimpleQueue()
        try:
            handler: logging.Handler = _Descriptor(file) if isinstance(file, int) else _Appender(file, dropped)
        except OSError as error:
            raise _unwritable(file, error) from error
        self._listener: logging.handlers.QueueListener | None = logging.handlers.QueueListener(self._lines, handler)
        self._listener.start()

    def __call__(self, record: RequestRecord) -> None:
        """Queue the line of a request that has ended; a successful probe has none."""
        if record.path in PROBES and record.status < 400:
            return
        if self._lines.qsize() >= _QUEUED:
            self._dropped()
            return
        line = self._written(fields(record))
        self._lines.put(logging.LogRecord("tiermoe.requests", logging.INFO, "", 0, line, None, None))

    def close(self) -> None:
        """Write what is queued. Idempotent."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.stop()
            for handler in listener.handlers:
                handler.close()


class _Appender(logging.handlers.WatchedFileHandler):
    def __init__(self, file: Path, dropped: Callable[[], None]) -> None:
        self._lost = dropped
        super().__init__(str(file), encoding="utf-8")

    def _open(self) -> Any:
        return open(self.baseFilename, "a", encoding="utf-8", opener=open_own)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # it was replaced by what cannot be opened: the next line tries again
            self._lost()

    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk, or a reader that has ended: requests continue without log lines."""
        self._lost()


class _Descriptor(logging.Handler):
    """Writes each line at once to an open descriptor."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # standard error has no reader any more
            os.write(self._descriptor, f"{record.getMessage()}\n".encode())

    def close(self) -> None:
        super().close()
        with contextlib.suppress(OSError):
            os.close(self._descriptor)


def check_file(file: Path) -> None:
    """Refuse a file that cannot be appended to.

    Raises:
        ConfigError: it is a folder, or its folder is missing or not writable.
    """
    try:
        with open(file, "a", opener=open_own) as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise ConfigError(f"request log '{file}' is not a regular file", "name a file")
    except OSError as error:
        raise _unwritable(file, error) from error


def _unwritable(file: Path | int, error: OSError) -> ConfigError:
    what = f"request log '{file}' cannot be written: {error.strerror or error}"
    return ConfigError(what, "name a file of yours in a folder that you may write to")


def fields(record: RequestRecord) -> dict[str, Any]:
    """A record as JSON values, without what it does not have; seconds are rounded to microseconds."""
    prompt, cached = record.prompt_tokens() if record.choices else (None, None)
    found = {
        "time": _utc(record.begun_ns), "id": record.request_id, "key": record.key, "method": record.method,
        "path": record.path[:_LONG], "status": record.status, "prompt_tokens": prompt, "cached_tokens": cached,
        "generated_tokens": sum(one.tokens for one in record.choices) if record.choices else None,
        "queue_s": _rounded(min((one.waited_s for one in record.choices), default=None)),
        "ttft_s": _rounded(record.ttft_s), "tpot_s": _rounded(record.tpot_s),
        "total_s": _rounded(record.ended_s - record.begun_s), "finish": ",".join(record.finish) or None,
        "reason": record.reason, "message": record.message[:_LONG] if record.message else None,
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


def _as_json(found: dict[str, Any]) -> str:
    return json.dumps(found)  # ASCII: half of a surrogate pair in a path is written as an escape


def _as_text(found: dict[str, Any]) -> str:
    head = " ".join(_word(found.pop(name)) for name in ("time", "method", "path", "status"))
    return " ".join([head, *(f"{name}={_word(value)}" for name, value in found.items())])


def _word(value: Any) -> str:
    """In quotes if it has a space, a quote, or a character that could look like another line."""
    text = str(value)
    plain = text.isascii() and text.isprintable() and not set(text) & set(' "\\')
    return text if plain else json.dumps(text)


def _utc(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, 10**9)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest // 10**6:03d}Z"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
