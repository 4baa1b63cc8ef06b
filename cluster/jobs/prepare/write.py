"""Tensor files written front to back, hashed on the way, and visible only when they are whole."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ....actors.store_format import FileRecord
from ....actors.tensor_file import build_header
from ....errors import StoreError

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
