"""What the server's replicas on one machine share: the counts that limits are of, and the counters of `/metrics`.

Each replica writes files of its own, and reads those of the others: nothing is locked, so that one which dies or hangs
holds up no other. Counters are those of prometheus_client's multiprocess mode: what a dead replica counted stays.

All files get their room when they are made, and are written in place: a disk that is full by then changes nothing.
(A write to a page of a mapped file for which there is no room would end the process: SIGBUS.)
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client import values
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from ...errors import RuntimeFailure
from ...proto.private import open_own, own_folder
from ..processes import ProcessId

_SUFFIX = ".admitted"
_LEDGER_BYTES = 2**16  # some 700 keys of the longest names, each with requests under way
_HEAD_BYTES = 8  # length and CRC-32 of the text behind them
_READS = 100  # of a file that is being written
_COUNTER_BYTES = 2**17  # of one kind of metrics of a process; ours take a fifth of it, and their labels are bounded


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
        folder: that they share; created if missing.

    Raises:
        RuntimeFailure: the disk has no room for this replica's counts.
    """

    def __init__(self, folder: Path) -> None:
        own_folder(folder)
        self._folder = folder
        self._name = f"{ProcessId.of()}{_SUFFIX}"
        self._size = _LEDGER_BYTES
        self._file = os.fdopen(_with_room(folder / self._name, self._size), "r+b", buffering=0)
        self._seen: dict[str, Admitted] = {}  # last value read of each other replica
        self.write(Admitted())

    def write(self, own: Admitted) -> None:
        """Publish what this replica has admitted; a reader sees all of it or the former value.

        Raises:
            OSError: it takes more room than the file has, and the disk has no more.
        """
        text = json.dumps([own.inside, own.keys]).encode()
        if (size := _HEAD_BYTES + len(text)) > self._size:
            _allocate(self._file.fileno(), 2 * size)
            self._size = 2 * size
        head = len(text).to_bytes(4) + zlib.crc32(text).to_bytes(4)
        os.pwrite(self._file.fileno(), head + text, 0)

    def others(self) -> list[Admitted]:
        """What the other replicas have admitted that live; of one that does not, the file is removed."""
        found = []
        for name in os.listdir(self._folder):
            if not name.endswith(_SUFFIX) or name == self._name:
                continue
            with suppress(FileNotFoundError):  # another has removed it
                if _lives(name.removesuffix(_SUFFIX)):
                    self._seen[name] = _read(self._folder / name) or self._seen.get(name, Admitted())
                    found.append(self._seen[name])
                else:
                    self._seen.pop(name, None)
                    (self._folder / name).unlink()
        return found


def _read(file: Path) -> Admitted | None:
    """None: no consistent value; its writer has not written yet, or writes all the time."""
    with os.fdopen(open_own(file, os.O_RDONLY), "rb", buffering=0) as opened:
        for _ in range(_READS):
            head = os.pread(opened.fileno(), _HEAD_BYTES, 0)
            text = os.pread(opened.fileno(), int.from_bytes(head[:4]), _HEAD_BYTES)
            if text and zlib.crc32(text) == int.from_bytes(head[4:]):
                inside, keys = json.loads(text)
                return Admitted(inside, {key: (choices, tokens) for key, (choices, tokens) in keys.items()})
    return None


def _with_room(file: Path, size: int) -> int:
    """Make a file, all of whose bytes have their place on the disk; its descriptor.

    Raises:
        RuntimeFailure: there is no room.
    """
    opened = open_own(file, os.O_RDWR | os.O_CREAT)
    try:
        _allocate(opened, size)
    except OSError as error:
        os.close(opened)
        raise RuntimeFailure(
            f"'{file.parent}' has no room for what the server's processes share: {error.strerror}", "make room there"
        ) from error
    return opened


def _allocate(file: int, size: int) -> None:
    """Raises OSError: there is no room."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    elif os.fstat(file).st_size < size and os.pwrite(file, bytes(size), 0) < size:  # of macOS; it is empty, or ours
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _lives(name: str) -> bool:
    replica = ProcessId.parse(name)
    return replica is not None and replica.lives()


def share_counters(folder: Path) -> None:
    """Keep the counters that this process makes from now on in files in a folder, for `AllReplicas`.

    Raises:
        RuntimeFailure: the disk has no room for them.
    """
    own_folder(folder)
    for kind in ("counter", "histogram"):  # prometheus_client maps an existing file, else it makes one with holes
        os.close(_with_room(folder / f"{kind}_{os.getpid()}.db", _COUNTER_BYTES))
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    values.ValueClass = values.MultiProcessValue()


class AllReplicas(Collector):
    """The metrics of a registry, with the counters of all replicas instead of its own.

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
