"""The runtimes that `tiermoe up` has started on this machine: one small private file for each, removed at its end.

The folder is `tiermoe` in the user's runtime directory (XDG_RUNTIME_DIR), or `tiermoe.run.UID` in the temporary one. An
entry counts while the process that wrote it lives (`processes.py`). A reader removes the entries that killed processes
left.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from ..errors import RuntimeFailure
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
        self.folder = folder if folder is not None else _user_folder()

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
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._private():
                raise PermissionError(0, "it is not a folder that only this user may write")
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
        for path in sorted(self.folder.glob("*.json")) if self._private() else ():
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

    def _private(self) -> bool:
        """Whether the folder is there, this user's own, and not writable by others; else its entries are ignored."""
        try:
            about = self.folder.lstat()
        except OSError:
            return False
        return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            path.unlink()
        with contextlib.suppress(OSError):  # others are still listed
            self.folder.rmdir()


def _user_folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "tiermoe"
    return Path(tempfile.gettempdir()) / f"tiermoe.run.{os.getuid()}"


def _read(path: Path) -> Entry | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        entry = Entry(**found | {"owner": ProcessId.parse(found["owner"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    kinds = ((entry.deployment, str), (entry.address, str), (entry.local, bool), (entry.owner, ProcessId))
    return entry if all(isinstance(value, kind) for value, kind in kinds) else None
