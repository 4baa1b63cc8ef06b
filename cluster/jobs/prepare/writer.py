"""Atomic, resumable and hashed writing of the files of `tiermoe prepare`, one process at a time.

    lock the store -> finish files in a work folder beside it, each recorded in a journal -> move them in, manifest last

The store changes when its manifest is replaced. An interrupted run leaves its work folder, which the next run with the
same inputs resumes.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console

from ....actors.store.files import hash_files
from ....actors.store.format import (
    FORMAT_VERSION,
    JOURNAL_NAME,
    ChecksummedManifest,
    FileRecord,
    SourceFile,
    build_header,
)
from ....errors import StoreError
from ...report.tables import size

SPARE_BYTES = 256 << 20  # left free on the disk
_TEMPORARY = ".part"


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn each OSError of the block into a StoreError about `path`: the disk is full, or may not be written."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        elsewhere = "choose another OUT (`tiermoe run`: --store or --cache-dir)"
        remedy = "free some space and run the same command again: it resumes" if full else elsewhere
        raise StoreError(f"{path} cannot be written ({error.strerror})", remedy) from error


def require_space(folder: Path, needed: int, what: str, where: Path, remedy: str, resumed: bool = True) -> None:
    """Check that the disk has space for `needed` bytes and `SPARE_BYTES`.

    Args:
        what: needs them, such as "the store". where: the folder that the message names.
        resumed: tensor files of an earlier run in `folder` count as done.

    Raises:
        StoreError: the disk has too little space.
    """
    with disk_errors(folder):
        done = sum(path.stat().st_size for path in folder.glob("*.safetensors")) if resumed and folder.exists() else 0
        free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
    if free + done < needed + SPARE_BYTES:
        left = size(max(0, needed - done))
        raise StoreError(f"{what} needs {left} and {size(SPARE_BYTES)} to spare, {where} has {size(free)} free", remedy)


def write_tensors(
    path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], data: Iterable[bytes | memoryview]
) -> FileRecord:
    """Write one safetensors file, atomically and durably, from a stream of its data.

    Args:
        tensors: type code and shape by name, in the order of the data.
        data: the bytes of all tensors, in order, in pieces of any length.

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
    """Write a small file, atomically and durably. Raises StoreError: as `disk_errors`."""
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


def discard(folder: Path) -> None:
    """Remove a folder if it is there."""
    if folder.exists():
        shutil.rmtree(folder)


def beside(out: Path, suffix: str) -> Path:
    """The neighbour of `out` with this suffix. Links are resolved: a store has one lock and one work folder."""
    folder = out.resolve()
    return folder.with_name(folder.name + suffix)


@contextmanager
def locked(out: Path, console: Console, suffix: str = ".lock") -> Iterator[bool]:
    """Lock a store; yields whether another process had the lock first. The kernel frees the lock of a dead process.

    Args:
        suffix: of the lock file. Another one is another lock, whose holder may take this one.

    Raises:
        StoreError: the lock file cannot be made.
    """
    path = beside(out, suffix)
    with disk_errors(path):
        descriptor, waited = _acquire(path, f"waiting for another process that prepares {out}", console)
    try:
        yield waited
    finally:
        path.unlink(missing_ok=True)  # before the release: a waiting process sees that the name is gone
        os.close(descriptor)


def _acquire(path: Path, waiting: str, console: Console) -> tuple[int, bool]:
    """The locked file, and whether another process held it."""
    waited = False
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not waited:
                    console.print(waiting)
                waited = True
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return descriptor, waited
        except FileNotFoundError:
            pass  # removed by its holder between `exists` and `stat`
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # removed by its holder: lock the file of that name now


class _JournalFile(BaseModel):
    """The journal file. Finished files count only for the same inputs, format and algorithm.

    transformers_version: of the conversion, or the job's own version. source: the inputs, as files or digests.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int
    transformers_version: str
    source: tuple[SourceFile, ...]
    finished: tuple[FileRecord, ...]


class Journal:
    """The finished files of a work folder.

    Opening makes the folder, or resumes an earlier run: its files count if their digests match. The files of other
    inputs, or of another format or algorithm, are removed.

    Args:
        inputs: a checkpoint's files, or digests by name.
        algorithm: changes when the same inputs give other files.

    Raises:
        StoreError: the folder cannot be written.
    """

    def __init__(self, folder: Path, inputs: tuple[SourceFile, ...] | Mapping[str, str], algorithm: str) -> None:
        self.folder, self._path = folder, folder / JOURNAL_NAME
        if isinstance(inputs, Mapping):
            named = inputs.items()
            inputs = tuple(SourceFile(file=name, nbytes=0, mtime_ns=None, sha256=digest) for name, digest in named)
        self._content = _JournalFile(
            format_version=FORMAT_VERSION, transformers_version=algorithm, source=inputs, finished=()
        )
        with disk_errors(folder):
            earlier = _read(folder)
            if earlier is None or earlier.model_copy(update={"finished": ()}) != self._content:
                discard(folder)
                folder.mkdir(parents=True)
                self._write()
            else:
                whole = tuple(record for record in earlier.finished if _matches(folder, record))
                self._content = earlier.model_copy(update={"finished": whole})

    def finished(self, name: str) -> FileRecord | None:
        """The record of a finished file, or None."""
        return next((record for record in self._content.finished if record.file == name), None)

    def once(self, name: str, make: Callable[[], FileRecord]) -> FileRecord:
        """The record of a file; an unfinished one is made and recorded now. Raises as `add` and `make`."""
        record = self.finished(name)
        if record is None:
            record = make()
            self.add(record)
        return record

    def add(self, record: FileRecord) -> None:
        """Record a finished file durably, once. Raises StoreError: the disk is full."""
        if self.finished(record.file) is None:
            plain = FileRecord(file=record.file, nbytes=record.nbytes, sha256=record.sha256)
            self._content = self._content.model_copy(update={"finished": (*self._content.finished, plain)})
            self._write()

    def remove(self) -> None:
        """Remove the journal, before the folder becomes a store."""
        with disk_errors(self._path):
            self._path.unlink()

    def _write(self) -> None:
        write_file(self._path, self._content.model_dump_json(indent=1).encode())


def finished_names(folder: Path) -> frozenset[str] | None:
    """Names of finished files in a folder's journal, bytes unchecked; None without a journal."""
    record = _read(folder)
    return None if record is None else frozenset(file.file for file in record.finished)


def _read(folder: Path) -> _JournalFile | None:
    try:
        return _JournalFile.model_validate_json((folder / JOURNAL_NAME).read_bytes())
    except (OSError, ValidationError, ValueError):
        return None  # no journal, or a damaged one: start over


def _matches(folder: Path, record: FileRecord) -> bool:
    path = folder / record.file
    try:
        return path.stat().st_size == record.nbytes and hash_files([path]) == [record.sha256]
    except OSError:
        return False


def write_artifact(store: Path, name: str, data: bytes, console: Console) -> Path:
    """Write or replace one file of a store under the store's lock; its path. Raises StoreError: as `disk_errors`."""
    with locked(store, console):
        write_file(store / name, data)
    return store / name


def publish(
    store: Path,
    work: Path,
    records: Iterable[FileRecord],
    manifest: ChecksummedManifest,
    named: Iterable[FileRecord],
    own: re.Pattern[str],
) -> None:
    """Move finished files from the work folder into the store, replace the manifest, and remove what it does not name.

    Args:
        named: every file of the manifest. own: pattern of the names of its kind of files.

    Raises:
        StoreError: the disk is full, or may not be written.
    """
    with disk_errors(store):
        for record in records:
            (work / record.file).replace(store / record.file)
        sync_folder(store)
    write_file(store / manifest.file_name, manifest.encode())
    names = {record.file for record in named}
    with disk_errors(store):
        for path in store.iterdir():
            if own.fullmatch(path.name) and path.name not in names:
                path.unlink()
        discard(work)
