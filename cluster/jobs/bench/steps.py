"""Parts of a benchmark that are measured once: an interrupted run does not measure them again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .compare.partial import Partial


class Steps:
    """Results by name, as plain values, kept beside the result until they are discarded.

    Args:
        out, fingerprint: as for `Partial`.

    Raises:
        ConfigError: as `Partial.read`.
    """

    def __init__(self, out: Path | None, fingerprint: dict[str, Any]) -> None:
        self._partial = Partial(out, fingerprint)
        self._found: dict[str, Any] = self._partial.read(lambda record: dict(record["steps"])) or {}

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """The result of this name; measured, and kept, where it is not there yet."""
        if name not in self._found:
            self._found[name] = measure()
            self._partial.write({"steps": self._found})
        return self._found[name]

    def discard(self) -> None:
        """The result is written: nothing is left to go on with."""
        self._partial.discard()
