"""What an interrupted benchmark has measured, in a file beside its result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from .....errors import ConfigError
from ....report.files import write_json

_FORMAT = 1
T = TypeVar("T")


class Partial:
    """A file that is there while a result is unfinished.

    Args:
        out: the result's file; None: nothing is kept on disk.
        fingerprint: whatever changes a figure, by name, as plain values: a file with another one is refused.
    """

    def __init__(self, out: Path | None, fingerprint: dict[str, Any]) -> None:
        self.path = None if out is None else partial_file(out)
        self._fingerprint = json.loads(json.dumps(fingerprint))  # as it comes back from a file

    def read(self, parse: Callable[[dict[str, Any]], T]) -> T | None:
        """What the file holds; None where there is none.

        Args:
            parse: raises ValueError, KeyError, TypeError or AttributeError where it is not what was written.

        Raises:
            ConfigError: the file cannot be read, or is of a benchmark with other settings.
        """
        if self.path is None or not self.path.exists():
            return None
        path, remedy = self.path, f"delete '{self.path}' to begin again"
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["format"] != _FORMAT:
                raise ValueError(f"format {record['format']}")
            fingerprint = record["fingerprint"]
            found = parse(record)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"'{path}' holds no part of a comparison: {error}", remedy) from error
        if changed := [name for name, value in self._fingerprint.items() if fingerprint.get(name) != value]:
            raise ConfigError(
                f"'{path}' is of a comparison with other {', '.join(changed)}",
                f"run it with those settings to go on with it, or {remedy}",
            )
        return found

    def write(self, content: dict[str, Any]) -> None:
        """Keep this, in place of what was kept before. Raises ConfigError where the file cannot be written."""
        if self.path is not None:
            write_json(self.path, {"format": _FORMAT, "fingerprint": self._fingerprint, **content})

    def discard(self) -> None:
        """The result is written: nothing is left to go on with."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def partial_file(out: Path) -> Path:
    """Where the unfinished part of a result is kept."""
    return out.with_name(f"{out.stem}.partial.json")
