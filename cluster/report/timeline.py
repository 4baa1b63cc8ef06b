"""A timeline that chrome://tracing and ui.perfetto.dev open."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import ConfigError


def check_writable(path: Path, what: str = "trace path") -> None:
    """Refuse a path that cannot become a file, before the run.

    Args:
        what: what the message calls it.

    Raises:
        ConfigError: it is a directory, or it or its folder cannot be written.
    """
    folder = path.parent
    if path.is_dir():
        raise ConfigError(f"{what} '{path}' is a directory", "give a file name, such as out/trace.json")
    if not folder.is_dir():
        raise ConfigError(f"{what} '{path}': there is no directory '{folder}'", f"make it: mkdir -p {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{what} '{path}' is not writable", "give a path that you may write")


def write_timeline(path: Path, events: Sequence[dict[str, Any]]) -> None:
    """Write Chrome trace events (`ph`, `ts` in microseconds, ...) in the object form of the format.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"}), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"trace path '{path}': {error.strerror}", "give a path that you may write") from error
