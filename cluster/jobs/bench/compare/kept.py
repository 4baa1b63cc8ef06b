"""What an interrupted comparison has measured, in a file beside its result."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .....errors import ConfigError
from ....report.json_file import write_json
from ..harness import Measures
from .sweep import Group

_FORMAT = 1


@dataclass
class Cell:
    """One policy at one budget and link.

    values: by measure, one number for each repetition. layers: counters of each layer, summed over the repetitions.
    quality: figures of `tiermoe eval`; None where the policy is lossless.
    """

    policy: str
    lossless: bool
    executor: str
    values: dict[str, list[float]] = field(default_factory=dict)
    layers: list[Measures] = field(default_factory=list)
    quality: dict[str, Any] | None = None


@dataclass
class Finished:
    """A group that was measured."""

    group: Group
    cells: list[Cell]


class Kept:
    """The groups that are finished, and the tokens that lossless policies gave.

    Args:
        out: the result's file; None: nothing is kept on disk.
        fingerprint: `Sweep.fingerprint`.

    Attributes:
        tokens: by the index of a prompt.

    Raises:
        ConfigError: the file beside `out` cannot be read, or is of a sweep with other settings.
    """

    def __init__(self, out: Path | None, fingerprint: dict[str, Any]) -> None:
        self.path = None if out is None else partial_file(out)
        self._fingerprint = json.loads(json.dumps(fingerprint))  # as it comes back from a file
        self.finished: list[Finished] = []
        self.tokens: dict[int, list[int]] = {}
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def find(self, group: Group) -> Finished | None:
        """What was measured of a group."""
        return next((found for found in self.finished if found.group == group), None)

    def add(self, finished: Finished) -> None:
        """A group is measured.

        Raises:
            ConfigError: the file cannot be written.
        """
        self.finished.append(finished)
        if self.path is not None:
            record = {
                "format": _FORMAT, "fingerprint": self._fingerprint, "tokens": self.tokens,
                "groups": [asdict(found) for found in self.finished],
            }  # fmt: skip
            write_json(self.path, record)

    def discard(self) -> None:
        """The result is written: nothing is left to go on with."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _read(self, path: Path) -> None:
        remedy = f"delete '{path}' to begin again"
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["format"] != _FORMAT:
                raise ValueError(f"format {record['format']}")
            found = record["fingerprint"]
            groups = [
                Finished(Group(**entry["group"]), [Cell(**cell) for cell in entry["cells"]])
                for entry in record["groups"]
            ]
            tokens = {int(index): list(ids) for index, ids in record["tokens"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"'{path}' holds no part of a comparison: {error}", remedy) from error
        if changed := [name for name in self._fingerprint if found.get(name) != self._fingerprint[name]]:
            raise ConfigError(
                f"'{path}' is of a comparison with other {', '.join(changed)}",
                f"run it with those settings to go on with it, or {remedy}",
            )
        self.finished, self.tokens = groups, tokens


def partial_file(out: Path) -> Path:
    """Where the unfinished part of a result is kept."""
    return out.with_name(f"{out.stem}.partial.json")
