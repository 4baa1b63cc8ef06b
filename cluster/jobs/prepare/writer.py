"""Tensor files written front to back, hashed on the way, and visible only when they are whole.

One preparation of a store at a time, across the processes of a machine.

What an unfinished store already holds, so that an interrupted preparation resumes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from ....actors.store.files import hash_files
from ....actors.store.format import FORMAT_VERSION, FileRecord, SourceFile, build_header
from ....errors import StoreError
from .checkpoint import JOURNAL_NAME

_TEMPORARY = ".part"


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn failures of the file system under `path` into typed errors.

    Raises:
        StoreError: the disk is full, or may not be written.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        elsewhere = "choose another OUT (`tiermoe run`: --store)"
        remedy = "free some space and run the same command again: it resumes" if full else elsewhere
        raise StoreError(f"{path} cannot be written ({error.strerror})", remedy) from error


def write_tensors(
    path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], data: Iterable[bytes | memoryview]
) -> FileRecord:
    """Write one safetensors file from a stream of its data.

    The file appears under its name only after its last byte is on the disk.

    Args:
        tensors: type code and shape by name, in the order of the data.
        data: the bytes of all tensors, in order, in pieces of any length.

    Returns:
        Its name, length and SHA-256.

    Raises:
        StoreError: the disk is full, or the data is shorter or longer than the header says.
    """
    head, specs = build_header(tensors)
    expected = len(head) + sum(spec.nbytes for spec in specs)
    temporary = path.with_name(path.name + _TEMPORARY)
    digest = hashlib.sha256(head)
    written = len(head)
    with disk_errors(path), open(temporary, "wb", buffering=0) as file:
        _write_all(file.fileno(), head)
        for piece in data:
            _write_all(file.fileno(), piece)
            digest.update(piece)
            written += len(piece)
        os.fsync(file.fileno())
    if written != expected:
        raise StoreError(f"{path} would have {written} bytes instead of {expected}", "report this as a bug")
    with disk_errors(path):
        temporary.replace(path)
    return FileRecord(file=path.name, nbytes=written, sha256=digest.hexdigest())


def write_file(path: Path, data: bytes) -> FileRecord:
    """Write a small file, atomically and durably.

    Raises:
        StoreError: the disk is full, or may not be written.
    """
    temporary = path.with_name(path.name + _TEMPORARY)
    with disk_errors(path):
        with open(temporary, "wb", buffering=0) as file:
            _write_all(file.fileno(), data)
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    return FileRecord(file=path.name, nbytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while len(rest):
        rest = rest[os.write(descriptor, rest) :]


@contextmanager
def exclusive(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path`; wait for whoever holds it. The kernel frees it if its holder dies.

    Args:
        on_wait: called once when someone else holds it.

    Raises:
        StoreError: the lock file cannot be made.
    """
    with disk_errors(path):
        descriptor = _acquire(path, on_wait)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: whoever waits sees that the name is gone
        os.close(descriptor)


def _acquire(path: Path, on_wait: Callable[[], None]) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_current(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder removed this file: lock the one that bears the name now


def _is_current(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


class _Record(BaseModel):
    """The journal file. Finished files count only for the very same source, format and converter."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int
    transformers_version: str
    source: tuple[SourceFile, ...]
    finished: tuple[FileRecord, ...]


class Journal:
    """The finished files of a work-in-progress folder.

    Opening it makes the folder, or takes over what an earlier run left there: files whose bytes match
    their recorded digest. What belongs to another source, format or converter is thrown away.

    Args:
        folder: the work-in-progress folder.
        source: the checkpoint's files.
        transformers_version: whose conversion is used.

    Raises:
        StoreError: the folder cannot be written.
    """

    def __init__(self, folder: Path, source: tuple[SourceFile, ...], transformers_version: str) -> None:
        self._path = folder / JOURNAL_NAME
        self._record = _Record(
            format_version=FORMAT_VERSION,
            transformers_version=transformers_version,
            source=source,
            finished=(),
        )
        with disk_errors(folder):
            earlier = _read(folder)
            if earlier is None or earlier.model_copy(update={"finished": ()}) != self._record:
                if folder.exists():
                    shutil.rmtree(folder)
                folder.mkdir(parents=True)
                self._write()
            else:
                kept = tuple(record for record in earlier.finished if _matches(folder, record))
                self._record = earlier.model_copy(update={"finished": kept})

    def finished(self, name: str) -> FileRecord | None:
        """The record of a finished file; None when it has to be made."""
        return next((record for record in self._record.finished if record.file == name), None)

    def add(self, record: FileRecord) -> None:
        """Note that a file is finished, durably.

        Raises:
            StoreError: the disk is full.
        """
        plain = FileRecord(file=record.file, nbytes=record.nbytes, sha256=record.sha256)
        self._record = self._record.model_copy(update={"finished": (*self._record.finished, plain)})
        self._write()

    def remove(self) -> None:
        """Drop the journal: the folder is about to become a store."""
        with disk_errors(self._path):
            self._path.unlink()

    def _write(self) -> None:
        write_file(self._path, self._record.model_dump_json(indent=1).encode())


def noted(folder: Path) -> frozenset[str] | None:
    """Names that the journal of a folder calls finished, their bytes not looked at; None where there is no journal."""
    record = _read(folder)
    return None if record is None else frozenset(file.file for file in record.finished)


def _read(folder: Path) -> _Record | None:
    try:
        return _Record.model_validate_json((folder / JOURNAL_NAME).read_bytes())
    except (OSError, ValidationError, ValueError):
        return None  # no journal, or a damaged one: start over


def _matches(folder: Path, record: FileRecord) -> bool:
    path = folder / record.file
    try:
        return path.stat().st_size == record.nbytes and hash_files([path]) == [record.sha256]
    except OSError:
        return False
