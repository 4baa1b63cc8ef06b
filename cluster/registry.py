"""The runtimes that `tiermoe up` has started on this machine: one small private file for each, removed at its end.

The folder is the user's `run_folder`. An entry counts while the process that wrote it lives (`processes.py`). A reader,
and the next start, remove the entries that killed processes left.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from ..errors import RuntimeFailure
from ..proto.private import open_own, own_folder, run_folder
from .processes import ProcessId


@dataclass(frozen=True)
class Entry:
    """One runtime.

    Attributes:
        deployment: its id.
        address: HOST:PORT of its Ray.
        local: whether that Ray was started for it and ends with it.
        owner: the process that started it.
    """

    deployment: str
    address: str
    local: bool
    owner: ProcessId

    @property
    def pid(self) -> int:
        """Of the process that started it."""
        return self.owner.pid

    def process(self) -> psutil.Process | None:
        """The process that started it; None: it has ended, though another may have its pid."""
        return self.owner.process()


class Registry:
    """The folder of entries.

    Args:
        folder: None: the user's.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder is not None else run_folder()

    @contextlib.contextmanager
    def entered(self, deployment: str, address: str, local: bool) -> Iterator[Entry]:
        """Inside the block, this process is listed as the one that started a runtime.

        Raises:
            RuntimeFailure: the folder cannot be written, or is another user's.
        """
        entry = Entry(deployment, address, local, ProcessId.of())
        path = self._path(deployment)
        draft = path.with_suffix(f".{entry.pid}")
        try:
            self._sweep()  # which removes the folder where nothing is left
            own_folder(self.folder)
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump(asdict(entry) | {"owner": str(entry.owner)}, file)
            draft.rename(path)  # a reader sees all of it or nothing
        except OSError as error:
            raise RuntimeFailure(
                f"'{self.folder}' cannot list this runtime: {error.strerror or error}", "make it writable, or remove it"
            ) from error
        try:
            yield entry
        finally:
            self._remove(path)

    def entries(self) -> list[Entry]:
        """The runtimes whose process lives, by id. Entries of dead ones are removed; other files are left alone."""
        found = []
        for path in self._paths():
            entry = _read(path)
            if entry is None or entry.deployment != path.stem:
                continue
            if entry.process() is None:
                self._remove(path)
            else:
                found.append(entry)
        return found

    def withdraw(self, deployment: str) -> None:
        """Take an entry out before its process is asked to end, which so learns that the end is in order."""
        self._remove(self._path(deployment))

    def lists(self, deployment: str) -> bool:
        """Whether the entry is there."""
        return self._path(deployment).is_file()

    def _path(self, deployment: str) -> Path:
        return self.folder / f"{deployment}.json"

    def _paths(self, names: str = "*.json") -> list[Path]:
        """All entries, or files with such names; none if the folder is another user's, or others may write it."""
        try:
            return sorted(own_folder(self.folder).glob(names)) if self.folder.is_dir() else []
        except OSError:
            return []

    def _sweep(self) -> None:
        """Remove what killed processes left: their entries, and what was to become one."""
        self.entries()
        for path in self._paths("*.[0-9]*"):
            pid = path.suffix[1:]
            if pid.isdecimal() and not psutil.pid_exists(int(pid)):
                self._remove(path)

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()
        with contextlib.suppress(OSError):  # others are still listed
            self.folder.rmdir()


def _read(path: Path) -> Entry | None:
    try:
        with os.fdopen(open_own(path, os.O_RDONLY), encoding="utf-8") as file:
            found = json.load(file)
        entry = Entry(**found | {"owner": ProcessId.parse(found["owner"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    kinds = ((entry.deployment, str), (entry.address, str), (entry.local, bool), (entry.owner, ProcessId))
    return entry if all(isinstance(value, kind) for value, kind in kinds) else None
