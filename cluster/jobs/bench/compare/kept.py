"""What an interrupted comparison has measured, in a file beside its result."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..metrics import Measures
from .partial import Partial
from .sweep import Group


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
        self._partial = Partial(out, fingerprint)
        self.finished: list[Finished] = []
        self.tokens: dict[int, list[int]] = {}
        found = self._partial.read(_parse)
        if found is not None:
            self.finished, self.tokens = found

    def find(self, group: Group) -> Finished | None:
        """What was measured of a group."""
        return next((found for found in self.finished if found.group == group), None)

    def add(self, finished: Finished) -> None:
        """A group is measured.

        Raises:
            ConfigError: the file cannot be written.
        """
        self.finished.append(finished)
        self._partial.write({"tokens": self.tokens, "groups": [asdict(found) for found in self.finished]})

    def discard(self) -> None:
        """The result is written: nothing is left to go on with."""
        self._partial.discard()


def _parse(record: dict[str, Any]) -> tuple[list[Finished], dict[int, list[int]]]:
    groups = [
        Finished(Group(**entry["group"]), [Cell(**cell) for cell in entry["cells"]]) for entry in record["groups"]
    ]
    return groups, {int(index): list(ids) for index, ids in record["tokens"].items()}
