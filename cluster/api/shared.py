"""What the server's replicas on one machine share: the counts that limits are of, and the counters of `/metrics`.

Each replica writes files of its own, and reads those of the others: nothing is locked, so that one which dies or hangs
holds up no other. Counters are those of prometheus_client's multiprocess mode: what a dead replica counted stays.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import values
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from ...proto.private import open_own, own_folder
from ..processes import ProcessId

_SUFFIX = ".admitted"


@dataclass(frozen=True)
class Admitted:
    """What a replica has admitted.

    Attributes:
        inside: choices that are with the runtime.
        keys: by key: choices that wait or run, and prompt tokens of those that wait.
    """

    inside: int = 0
    keys: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def choices(self) -> int:
        return sum(choices for choices, _ in self.keys.values())

    def of(self, key: str) -> tuple[int, int]:
        """Choices and waiting prompt tokens of a key."""
        return self.keys.get(key, (0, 0))


class Ledger:
    """The counts of the replicas that live.

    Args:
        folder: which they have in common; made where it is missing.
    """

    def __init__(self, folder: Path) -> None:
        own_folder(folder)
        self._folder = folder
        self._name = f"{ProcessId.of()}{_SUFFIX}"
        self.write(Admitted())

    def write(self, own: Admitted) -> None:
        """Say what this replica has admitted; a reader sees all of it or what was before."""
        draft = self._folder / f"{self._name}.new"
        with os.fdopen(open_own(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
            json.dump([own.inside, own.keys], file)
        draft.rename(self._folder / self._name)

    def others(self) -> list[Admitted]:
        """What the other replicas have admitted that live; of one that does not, the file is removed."""
        found = []
        for name in os.listdir(self._folder):
            if not name.endswith(_SUFFIX) or name == self._name:
                continue
            with suppress(FileNotFoundError):  # another has removed it
                if _lives(name.removesuffix(_SUFFIX)):
                    with os.fdopen(open_own(self._folder / name, os.O_RDONLY)) as file:
                        inside, keys = json.load(file)
                    found.append(Admitted(inside, {key: (choices, tokens) for key, (choices, tokens) in keys.items()}))
                else:
                    (self._folder / name).unlink()
        return found


def _lives(name: str) -> bool:
    replica = ProcessId.parse(name)
    return replica is not None and replica.lives()


def share_counters(folder: Path) -> None:
    """Keep the counters that this process makes from now on in files in a folder, for `AllReplicas`."""
    own_folder(folder)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    values.ValueClass = values.MultiProcessValue()


class AllReplicas(Collector):
    """The metrics of a registry, with the counters of all replicas in place of its own.

    Args:
        own: of this process: names, help, and what is not counted by processes.
        folder: as given to `share_counters`.
    """

    def __init__(self, own: Collector, folder: Path) -> None:
        self._own, self._all = own, MultiProcessCollector(None, str(folder))

    def collect(self) -> Iterable[Metric]:
        counted = {family.name: family for family in self._all.collect()}
        for family in self._own.collect():
            found = counted.get(family.name, family)
            found.documentation = family.documentation
            yield found
