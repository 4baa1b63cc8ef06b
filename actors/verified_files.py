"""Files that a manifest in their folder vouches for: checked once, then mapped read-only by any process.

The expert store and its replicas are such sets. What was verified is remembered as a stamp of each file (size,
modification time, inode): it is written into the folder, so that the next opening need not read every byte again,
and it goes with every description, so that no process maps a file that changed in the meantime.

NumPy and mapped files only.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import StoreError
from .store_format import FileRecord
from .tensor_file import DATA_ALIGNMENT, read_header

# bfloat16 has no NumPy type: its bits travel as uint16, and the reader views them again.
NUMPY_TYPES: Mapping[str, Any] = {
    "U8": np.uint8,
    "BF16": np.uint16,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "I64": np.int64,
}
_HASH_THREADS = 4


@dataclass(frozen=True)
class FileStamp:
    """Enough to notice that a file was written or replaced since it was verified."""

    nbytes: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileStamp:
        """The stamp of a file's status."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


@dataclass(frozen=True)
class ArrayView:
    """Where an array lies in its file.

    Attributes:
        offset: bytes from the start of the file.
        dtype: safetensors type code, such as "BF16".
    """

    offset: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class VerifiedFiles:
    """The files of one manifest.

    Attributes:
        folder: where they lie.
        what: how errors call the set, such as "store".
        manifest_name: the manifest's file.
        stamp_name: the file that remembers the last full verification.
        remedy: of every error.
    """

    folder: Path
    what: str
    manifest_name: str
    stamp_name: str
    remedy: str

    def error(self, what: str) -> StoreError:
        """What is wrong, with the set's remedy."""
        return StoreError(what, self.remedy)

    def stamp(self, record: FileRecord) -> FileStamp:
        """The file's stamp now; its length is checked, its bytes are not.

        Raises:
            StoreError: it is missing, not a regular file, or of another length.
        """
        path = self.folder / record.file
        try:
            status = path.stat()
        except OSError as error:
            raise self.error(f"{path} is missing from the {self.what} ({error.strerror})") from error
        if not stat.S_ISREG(status.st_mode):
            raise self.error(f"{path} is not a regular file")
        if status.st_size != record.nbytes:
            raise self.error(f"{path} has {status.st_size} bytes, not {record.nbytes}")
        return FileStamp.of(status)

    def arrays(self, name: str, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, ArrayView]:
        """Where the arrays of a tensor file lie.

        Args:
            tensors: type code and shape of each tensor that it has to hold.

        Raises:
            StoreError: its header is malformed, promises other tensors, or leaves the data misaligned.
        """
        path = self.folder / name
        _, specs = read_header(path, self.error)
        if {spec.name: (spec.dtype, spec.shape) for spec in specs} != tensors:
            raise self.error(f"{path} does not hold the tensors that {self.manifest_name} promises")
        if specs[0].offset % DATA_ALIGNMENT:
            raise self.error(f"{path}: data does not start at a multiple of {DATA_ALIGNMENT} bytes")
        return {spec.name: ArrayView(spec.offset, spec.shape, spec.dtype) for spec in specs}

    def check_hashes(self, records: Sequence[FileRecord]) -> None:
        """Read files whole and compare them with their digests.

        Raises:
            StoreError: a file cannot be read, or its bytes are others.
        """
        try:
            digests = hash_files([self.folder / record.file for record in records])
        except OSError as error:
            raise self.error(f"{self.folder} cannot be read ({error})") from error
        for record, digest in zip(records, digests, strict=True):
            if digest != record.sha256:
                path = self.folder / record.file
                raise self.error(f"{path} does not match its SHA-256: its bytes were altered")

    def read_stamps(self) -> dict[str, FileStamp]:
        """Stamps of the last full verification; none when there was none for this very manifest."""
        try:
            record = json.loads((self.folder / self.stamp_name).read_bytes())
            if record["manifest_sha256"] != self._manifest_sha256():
                return {}
            return {name: FileStamp(**stamp) for name, stamp in record["files"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {}  # an absent or damaged record only means that everything is verified again

    def write_stamps(self, stamps: Mapping[str, FileStamp]) -> None:
        """Remember a full verification."""
        temporary = self.folder / f".{self.stamp_name}.{os.getpid()}"
        with suppress(OSError):  # a store on read-only storage works, it is only verified each time
            record = {
                "manifest_sha256": self._manifest_sha256(),
                "files": {name: asdict(stamp) for name, stamp in stamps.items()},
            }
            temporary.write_text(json.dumps(record))
            temporary.replace(self.folder / self.stamp_name)

    def _manifest_sha256(self) -> str:
        return hash_files([self.folder / self.manifest_name])[0]


def hash_files(paths: Iterable[Path]) -> list[str]:
    """SHA-256 of each file, in hexadecimal; a few at a time (hashing lets go of the interpreter lock).

    Raises:
        OSError: a file cannot be read.
    """

    def digest(path: Path) -> str:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(max_workers=_HASH_THREADS) as pool:
        return list(pool.map(digest, paths))


def map_arrays(
    path: str, stamp: FileStamp, arrays: Mapping[str, ArrayView], remedy: str
) -> dict[str, NDArray[Any]]:
    """Map a verified file read-only into this process; the mapping lives as long as any of its arrays.

    Args:
        stamp: of the file when it was verified.
        remedy: where it cannot be mapped.

    Raises:
        StoreError: the file is gone or changed since it was verified.
    """
    try:
        with open(path, "rb") as file:
            if FileStamp.of(os.fstat(file.fileno())) != stamp:
                raise _changed(path)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be mapped ({error})", remedy) from error
    return {name: _array(mapped, view) for name, view in arrays.items()}


def check_unchanged(path: str, stamp: FileStamp, remedy: str) -> None:
    """Look whether a file is still the one that was verified; reads no data.

    Raises:
        StoreError: it is gone or changed.
    """
    try:
        now = FileStamp.of(os.stat(path))
    except OSError as error:
        raise StoreError(f"{path} is gone ({error.strerror})", remedy) from error
    if now != stamp:
        raise _changed(path)


def _array(mapped: mmap.mmap, view: ArrayView) -> NDArray[Any]:
    flat = np.frombuffer(mapped, NUMPY_TYPES[view.dtype], count=math.prod(view.shape), offset=view.offset)
    return flat.reshape(view.shape)


def _changed(path: str) -> StoreError:
    return StoreError(f"{path} changed since it was verified", "restart the runtime, which verifies it again")
