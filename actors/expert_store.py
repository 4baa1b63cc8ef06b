"""The expert store in host memory: every process of a node maps the same files, so there is one copy.

`ExpertStore` verifies a store folder once and says where each array lies (`describe`); any other
process maps the files itself from that description (`open_views`). Read-only shared mappings of one
file share the pages of the operating system's cache, so nothing is sent and nothing is copied.

NumPy and mapped files only: it starts without torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import stat
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..errors import StoreError
from .store_format import (
    DATA_ALIGNMENT,
    MANIFEST_NAME,
    REBUILD,
    STAMP_NAME,
    FileRecord,
    Manifest,
    read_header,
    read_manifest,
)

# bfloat16 has no NumPy type: its bits travel as uint16, and the reader views them again.
_NUMPY_TYPES: dict[str, Any] = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}
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
class LayerView:
    """One layer file: absolute path, verified state, arrays by name (`gate_up`, `down`, biases)."""

    index: int
    module: str
    path: str
    stamp: FileStamp
    arrays: dict[str, ArrayView]


@dataclass(frozen=True)
class StoreView:
    """All that another process needs to map the store itself; picklable, holds no arrays."""

    path: str
    manifest: Manifest
    layers: tuple[LayerView, ...]
    dense_path: str
    dense_stamp: FileStamp


@dataclass(frozen=True)
class LayerArrays:
    """The mapped experts of one MoE layer, read-only.

    Arrays of bfloat16 are uint16 here: `torch.from_numpy(gate_up).view(torch.bfloat16)`.

    Attributes:
        dtype: "bfloat16", "float16" or "float32".
        gate_up: [E, I, G, H]; `gate_up[e, :n]` is one contiguous run of neurons.
        down: [E, I, H].
        gate_up_bias: [E, I, G] or None.
        down_bias: [E, H] or None.
    """

    index: int
    module: str
    dtype: str
    gate_up: np.ndarray
    down: np.ndarray
    gate_up_bias: np.ndarray | None
    down_bias: np.ndarray | None


@dataclass(frozen=True)
class StoreHealth:
    """Whether the files are still those that were verified.

    Attributes:
        problem: what changed; None when all is well.
    """

    layers: int
    nbytes: int
    problem: str | None


class ExpertStore:
    """A verified store folder.

    Opening checks the manifest (format, checksum), each file's length, the header of each tensor
    file (names, types, shapes, alignment) and the SHA-256 of every file.

    Args:
        path: the store folder.
        verify: "full" reads and hashes every file; "stamp" skips files whose size, modification time
            and inode are those of an earlier full verification, recorded in the folder.

    Raises:
        StoreError: not a store, of another format, incomplete, or its bytes do not match.
    """

    def __init__(self, path: str | os.PathLike[str], verify: Literal["full", "stamp"] = "full") -> None:
        self._path = Path(path).resolve()
        self._manifest = read_manifest(self._path)
        stamps = {record.file: _check_file(self._path, record) for record in self._manifest.files()}
        arrays = [self._check_layer(layer.file) for layer in self._manifest.layers]
        read_header(self._path / self._manifest.dense.file, _store_error)
        known = _read_stamps(self._path) if verify == "stamp" else {}
        _check_hashes(self._path, [r for r in self._manifest.files() if known.get(r.file) != stamps[r.file]])
        self._view = StoreView(
            path=str(self._path),
            manifest=self._manifest,
            layers=tuple(
                LayerView(layer.index, layer.module, str(self._path / layer.file), stamps[layer.file], views)
                for layer, views in zip(self._manifest.layers, arrays, strict=True)
            ),
            dense_path=str(self._path / self._manifest.dense.file),
            dense_stamp=stamps[self._manifest.dense.file],
        )
        # Maps now, so that a file replaced between hashing and mapping is noticed here.
        self._layers: tuple[LayerArrays, ...] | None = tuple(open_views(self._view))
        _check_unchanged(self._view.dense_path, self._view.dense_stamp)
        if known != stamps:
            _write_stamps(self._path, stamps)

    @property
    def manifest(self) -> Manifest:
        """What the store holds."""
        return self._manifest

    @property
    def layers(self) -> tuple[LayerArrays, ...]:
        """The mapped experts, one entry per MoE layer.

        Raises:
            StoreError: the store was closed.
        """
        if self._layers is None:
            raise StoreError(f"store {self._path} was closed", "open it again")
        return self._layers

    def describe(self) -> StoreView:
        """What another process needs to map the same files."""
        return self._view

    def health(self) -> StoreHealth:
        """Look whether any tensor file changed since it was verified; reads no data."""
        problem = None
        try:
            for layer in self._view.layers:
                _check_unchanged(layer.path, layer.stamp)
            _check_unchanged(self._view.dense_path, self._view.dense_stamp)
        except StoreError as error:
            problem = error.what
        nbytes = sum(record.nbytes for record in self._manifest.files())
        return StoreHealth(layers=len(self._view.layers), nbytes=nbytes, problem=problem)

    def close(self) -> None:
        """Drop the mappings; each is unmapped when the last array on it is gone."""
        self._layers = None

    def _check_layer(self, name: str) -> dict[str, ArrayView]:
        path = self._path / name
        _, specs = read_header(path, _store_error)
        found = {spec.name: (spec.dtype, spec.shape) for spec in specs}
        if found != self._manifest.expert_tensors():
            raise _store_error(f"{path} does not hold the tensors that the manifest promises")
        if specs[0].offset % DATA_ALIGNMENT:
            raise _store_error(f"{path}: data does not start at a multiple of {DATA_ALIGNMENT} bytes")
        return {spec.name: ArrayView(spec.offset, spec.shape, spec.dtype) for spec in specs}


def open_views(view: StoreView) -> list[LayerArrays]:
    """Map the layer files of a store read-only into this process.

    Raises:
        StoreError: a file is gone or changed since the store was verified.
    """
    return [_open_layer(layer, view.manifest.dtype) for layer in view.layers]


def _open_layer(layer: LayerView, dtype: str) -> LayerArrays:
    try:
        with open(layer.path, "rb") as file:
            if FileStamp.of(os.fstat(file.fileno())) != layer.stamp:
                raise _changed(layer.path)
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise _store_error(f"{layer.path} cannot be mapped ({error})") from error
    arrays = {name: _array(mapped, array) for name, array in layer.arrays.items()}
    return LayerArrays(
        index=layer.index,
        module=layer.module,
        dtype=dtype,
        gate_up=arrays["gate_up"],
        down=arrays["down"],
        gate_up_bias=arrays.get("gate_up_bias"),
        down_bias=arrays.get("down_bias"),
    )


def _array(mapped: mmap.mmap, view: ArrayView) -> np.ndarray:
    """A read-only array over the mapping, which lives as long as the array does."""
    flat = np.frombuffer(mapped, _NUMPY_TYPES[view.dtype], count=math.prod(view.shape), offset=view.offset)
    return flat.reshape(view.shape)


def hash_files(paths: Sequence[Path]) -> list[str]:
    """SHA-256 of each file, in hexadecimal; a few at a time (hashing lets go of the interpreter lock).

    Raises:
        OSError: a file cannot be read.
    """

    def digest(path: Path) -> str:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(max_workers=_HASH_THREADS) as pool:
        return list(pool.map(digest, paths))


def _check_file(store: Path, record: FileRecord) -> FileStamp:
    path = store / record.file
    try:
        status = path.stat()
    except OSError as error:
        raise _store_error(f"{path} is missing from the store ({error.strerror})") from error
    if not stat.S_ISREG(status.st_mode):
        raise _store_error(f"{path} is not a regular file")
    if status.st_size != record.nbytes:
        raise _store_error(f"{path} has {status.st_size} bytes, not {record.nbytes}")
    return FileStamp.of(status)


def _check_hashes(store: Path, records: Iterable[FileRecord]) -> None:
    expected = list(records)
    try:
        digests = hash_files([store / record.file for record in expected])
    except OSError as error:
        raise _store_error(f"{store} cannot be read ({error})") from error
    for record, digest in zip(expected, digests, strict=True):
        if digest != record.sha256:
            raise _store_error(f"{store / record.file} does not match its SHA-256: its bytes were altered")


def _check_unchanged(path: str, stamp: FileStamp) -> None:
    try:
        now = FileStamp.of(os.stat(path))
    except OSError as error:
        raise _store_error(f"{path} is gone ({error.strerror})") from error
    if now != stamp:
        raise _changed(path)


def _read_stamps(store: Path) -> dict[str, FileStamp]:
    """Stamps of the last full verification; none when there was none for this very manifest."""
    try:
        record = json.loads((store / STAMP_NAME).read_bytes())
        if record["manifest_sha256"] != hash_files([store / MANIFEST_NAME])[0]:
            return {}
        return {name: FileStamp(**stamp) for name, stamp in record["files"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}  # an absent or damaged record only means that everything is verified again


def _write_stamps(store: Path, stamps: dict[str, FileStamp]) -> None:
    record = {
        "manifest_sha256": hash_files([store / MANIFEST_NAME])[0],
        "files": {name: asdict(stamp) for name, stamp in stamps.items()},
    }
    temporary = store / f".{STAMP_NAME}.{os.getpid()}"
    with suppress(OSError):  # a store on read-only storage works, it is only verified each time
        temporary.write_text(json.dumps(record))
        temporary.replace(store / STAMP_NAME)


def _changed(path: str) -> StoreError:
    return StoreError(f"{path} changed since the store was verified", "restart the runtime, which verifies it again")


def _store_error(what: str) -> StoreError:
    return StoreError(what, REBUILD)
