"""Files listed in a manifest: verified once, then mapped read-only by any process of the node.

`ExpertStore` verifies a store folder, or some of its layers, and describes where each array lies; any process of the
node maps the files from that description (`open_views`). All mappings share the pages of the operating system's cache,
so a node has one copy. Other nodes read through a `StoreWorker`. A store's replicas are verified and mapped alike.

A verification leaves a stamp of each file (size, modification and change time, inode). The stamps are written into the
folder, so the next opening may skip the hashing, and are part of every description, so no process maps a file that
changed since; `pages.FileWatch` ends one that maps a file when it changes.
NumPy without torch.
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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import StoreError
from .format import (
    DATA_ALIGNMENT,
    MANIFEST_NAME,
    REBUILD,
    STAMP_NAME,
    FileRecord,
    LayerFile,
    Manifest,
    SourceFile,
    read_header,
    read_manifest,
)
from .pages import FileStamp, map_file
from .published import (
    FormArrays,
    LayerMap,
    head_digest,
    map_layer,
    mapped_files,
    stacked_layer,
)

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
class ArrayView:
    """Position of an array in its file. offset: in bytes. dtype: safetensors type code, such as "BF16"."""

    offset: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class FileView:
    """A verified file: absolute path, stamp, arrays by name. replaceable: as of `map_file`."""

    path: str
    stamp: FileStamp
    arrays: dict[str, ArrayView]
    replaceable: bool = field(default=False, kw_only=True)

    def mapped(self, remedy: str) -> dict[str, NDArray[Any]]:
        """Map the arrays read-only into this process; the mapping lives as long as any of them.

        Raises:
            StoreError: the file changed since it was verified, or cannot be mapped (with `remedy`).
        """
        pages = self.pages(remedy)
        return {
            name: np.frombuffer(pages, NUMPY_TYPES[a.dtype], math.prod(a.shape), a.offset).reshape(a.shape)
            for name, a in self.arrays.items()
        }

    def pages(self, remedy: str, writable: bool = False) -> mmap.mmap:
        """Map the whole file, as `map_file`. Raises as `mapped`."""
        try:
            with open(self.path, "rb") as file:
                if self.stamp.written_since(FileStamp.of(os.fstat(file.fileno()))):
                    raise self._changed()
                return map_file(file.fileno(), self.path, self.stamp, writable, self.replaceable)
        except (OSError, ValueError) as error:
            raise StoreError(f"{self.path} cannot be mapped ({error})", remedy) from error

    def check_unchanged(self, remedy: str) -> None:
        """Compare the file's stamp; reads no data. Raises StoreError: the file is gone or changed."""
        try:
            now = FileStamp.of(os.stat(self.path))
        except OSError as error:
            raise StoreError(f"{self.path} is gone ({error.strerror})", remedy) from error
        if self.stamp.written_since(now):
            raise self._changed()

    def _changed(self) -> StoreError:
        return StoreError(f"{self.path} changed since it was verified", "restart the runtime, which verifies it again")


@dataclass(frozen=True)
class LayerView(FileView):
    """One layer file; its arrays are `gate_up`, `down` and the biases, or the parts of the layer's form.

    where: the runs of the experts in the checkpoint's files; None: the arrays are in the layer file.
    """

    index: int
    module: str
    where: LayerMap | None = None


@dataclass(frozen=True)
class StoreView:
    """What another process needs to map the store: picklable, without arrays.

    manifest: of the whole store. layers: of this node, ascending; may be empty. dense: file of the dense weights.
    checkpoint: the checkpoint's files that the layers map, by their index in the manifest.
    """

    path: str
    manifest: Manifest
    layers: tuple[LayerView, ...]
    dense: FileView
    checkpoint: Mapping[int, FileView] = field(default_factory=dict)


@dataclass(frozen=True)
class VerifiedFiles:
    """The files of one manifest. what: their name in errors, such as "store". stamp_name: file of their stamps.
    replaceable: as of `map_file`.
    """

    folder: Path
    what: str
    manifest_name: str
    stamp_name: str
    remedy: str
    replaceable: bool = False

    def error(self, what: str) -> StoreError:
        """A `StoreError` with the set's remedy."""
        return StoreError(what, self.remedy)

    def stamp(self, record: FileRecord) -> FileStamp:
        """The file's stamp now. Raises StoreError: missing, not a regular file, or of another length."""
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
        """Positions of the arrays of a tensor file, which must hold exactly `tensors` (type code and shape by name).

        Raises:
            StoreError: the header is malformed, lists other tensors, or leaves the data misaligned.
        """
        path = self.folder / name
        _, specs = read_header(path, self.error)
        if {spec.name: (spec.dtype, spec.shape) for spec in specs} != tensors:
            raise self.error(f"{path} does not hold the tensors that {self.manifest_name} promises")
        if specs[0].offset % DATA_ALIGNMENT:
            raise self.error(f"{path}: data does not start at a multiple of {DATA_ALIGNMENT} bytes")
        return {spec.name: ArrayView(spec.offset, spec.shape, spec.dtype) for spec in specs}

    def view(self, record: FileRecord, tensors: Mapping[str, tuple[str, tuple[int, ...]]] | None = None) -> FileView:
        """One of the files now, with the arrays of `tensors`. Raises as `stamp` and `arrays`."""
        arrays = {} if tensors is None else self.arrays(record.file, tensors)
        path = str(self.folder / record.file)
        return FileView(path, self.stamp(record), arrays, replaceable=self.replaceable)

    def check_hashes(self, records: Sequence[FileRecord]) -> None:
        """Hash whole files. Raises StoreError: unreadable, or the digest differs."""
        try:
            digests = hash_files([self.folder / record.file for record in records])
        except OSError as error:
            raise self.error(f"{self.folder} cannot be read ({error})") from error
        for record, digest in zip(records, digests, strict=True):
            if digest != record.sha256:
                path = self.folder / record.file
                raise self.error(f"{path} does not match its SHA-256: its bytes were altered")

    def read_stamps(self) -> dict[str, FileStamp]:
        """Stamps of the last full verification under this manifest, if any."""
        try:
            record = json.loads((self.folder / self.stamp_name).read_bytes())
            if record["manifest_sha256"] != self._manifest_sha256():
                return {}
            return {name: FileStamp(**stamp) for name, stamp in record["files"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return {}  # absent or damaged: everything is verified again

    def write_stamps(self, stamps: Mapping[str, FileStamp]) -> None:
        """Record a full verification."""
        temporary = self.folder / f".{self.stamp_name}.{os.getpid()}"
        with suppress(OSError):  # on read-only storage, every opening verifies
            record = {
                "manifest_sha256": self._manifest_sha256(),
                "files": {name: asdict(stamp) for name, stamp in stamps.items()},
            }
            temporary.write_text(json.dumps(record))
            temporary.replace(self.folder / self.stamp_name)

    def _manifest_sha256(self) -> str:
        return hash_files([self.folder / self.manifest_name])[0]


def hash_files(paths: Iterable[Path]) -> list[str]:
    """SHA-256 of each file, in hexadecimal. In threads: hashing releases the GIL. Raises OSError: unreadable."""

    def digest(path: Path) -> str:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(max_workers=_HASH_THREADS) as pool:
        return list(pool.map(digest, paths))


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


class ExpertStore:
    """A verified store folder.

    Opening checks the manifest (format, checksum), each file's length and SHA-256, and the header of each tensor file
    (names, types, shapes, alignment). Of the checkpoint's files that it maps, it checks length, modification time and
    the header's digest.

    Args:
        verify: "full" hashes every file; "stamp" skips files whose stamp a full verification recorded in the folder.
        layers: only the files of these layers, the dense weights and the small files must be present, are verified
            and mapped; None: all layers.

    Raises:
        StoreError: not a store, of another format, incomplete, without such a layer, or its bytes do not match.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        verify: Literal["full", "stamp"] = "full",
        layers: Sequence[int] | None = None,
    ) -> None:
        self._path = Path(path).resolve()
        self._manifest = manifest = read_manifest(self._path)
        chosen = [manifest.layers[i] for i in _slice_of(manifest, layers)]
        self._records: tuple[FileRecord, ...] = (*chosen, manifest.dense, *manifest.extras)
        files = VerifiedFiles(self._path, "store", MANIFEST_NAME, STAMP_NAME, REBUILD)
        stamps = {record.file: files.stamp(record) for record in self._records}
        views = [_layer_view(files, manifest, layer) for layer in chosen]
        read_header(self._path / manifest.dense.file, files.error)
        recorded = files.read_stamps()
        known = recorded if verify == "stamp" else {}
        files.check_hashes([r for r in self._records if known.get(r.file) != stamps[r.file]])
        self._view = StoreView(
            str(self._path),
            manifest,
            tuple(views),
            FileView(str(self._path / manifest.dense.file), stamps[manifest.dense.file], {}),
            _checkpoint_files(manifest, views),
        )
        # mapped now: a file that was replaced after its hashing is refused here
        self._layers: tuple[LayerArrays | FormArrays, ...] | None = tuple(open_views(self._view))
        self._view.dense.check_unchanged(REBUILD)
        if (all_known := recorded | stamps) != recorded:  # stamps of other layers stay
            files.write_stamps(all_known)

    @property
    def manifest(self) -> Manifest:
        """The store's manifest."""
        return self._manifest

    @property
    def layers(self) -> tuple[LayerArrays, ...]:
        """The mapped neuron-major experts, in the order of `describe().layers`.

        Raises:
            StoreError: the store was closed, or its experts are in their published form.
        """
        found = tuple(layer for layer in self.mapped if isinstance(layer, LayerArrays))
        if len(found) < len(self.mapped):
            raise published_refused(f"store {self._path}")
        return found

    @property
    def mapped(self) -> tuple[LayerArrays | FormArrays, ...]:
        """The mapped experts in either layout, in the order of `describe().layers`. Raises StoreError: closed."""
        if self._layers is None:
            raise StoreError(f"store {self._path} was closed", "open it again")
        return self._layers

    def describe(self) -> StoreView:
        """What another process needs to map the same files."""
        return self._view

    @property
    def nbytes(self) -> int:
        """Bytes of the verified files."""
        return sum(record.nbytes for record in self._records)

    def close(self) -> None:
        """Drop the mappings; each is unmapped with its last array."""
        self._layers = None


def renewed(view: StoreView) -> StoreView:
    """A view that was described earlier, with the stamps of now: a file whose stamp differs is hashed again.

    Raises:
        StoreError: its bytes differ, or the folder holds another store now.
    """
    try:
        for file in (*view.layers, view.dense, *view.checkpoint.values()):
            file.check_unchanged(REBUILD)
        return view
    except StoreError:
        found = ExpertStore(view.path, "stamp", [layer.index for layer in view.layers]).describe()
    if found.manifest != view.manifest:
        raise StoreError(f"{view.path} holds another store than the one that is served", "restart the runtime")
    return found


def _slice_of(manifest: Manifest, layers: Sequence[int] | None) -> list[int]:
    if layers is None:
        return list(range(len(manifest.layers)))
    unknown = sorted(set(layers) - set(range(len(manifest.layers))))
    if unknown:
        raise StoreError(
            f"the store has MoE layers 0 to {len(manifest.layers) - 1}, not {unknown[0]}", "ask for layers that it has"
        )
    return sorted(set(layers))


def open_views(view: StoreView) -> list[LayerArrays | FormArrays]:
    """Map the layers of a store read-only. Raises StoreError: a file is gone or changed since verified."""
    absent = {"gate_up_bias": None, "down_bias": None}
    pages = {index: file.pages(REBUILD) for index, file in view.checkpoint.items()}
    out: list[LayerArrays | FormArrays] = []
    for layer in view.layers:
        if (published := view.manifest.published) is None:
            arrays = absent | layer.mapped(REBUILD)
            out.append(LayerArrays(layer.index, layer.module, view.manifest.dtype, **arrays))  # type: ignore[arg-type]
        elif layer.where is None:
            out.append(stacked_layer(layer.index, layer.module, published.of(layer.index), layer.mapped(REBUILD)))
        else:
            layer.check_unchanged(REBUILD)
            out.append(map_layer(layer.index, layer.module, published.of(layer.index), layer.where, pages))
    return out


def published_refused(what: str) -> StoreError:
    """The error of a task that needs neuron-major experts."""
    return StoreError(
        f"{what} keeps its experts in the quantized form in which their checkpoint publishes them, without neurons of "
        "full precision",
        "use the unquantized checkpoint of the model for this",
    )


def _layer_view(files: VerifiedFiles, manifest: Manifest, layer: LayerFile) -> LayerView:
    published, stamp, path = manifest.published, files.stamp(layer), files.folder / layer.file
    if published is None:
        arrays = files.arrays(layer.file, manifest.expert_tensors())
    elif layer.mapped:
        where = LayerMap.read(path, published.of(layer.index), manifest.experts.num_experts, manifest.source)
        return LayerView(str(path), stamp, {}, layer.index, layer.module, where)
    else:
        arrays = files.arrays(layer.file, manifest.expert_tensors(layer.index))
    return LayerView(str(path), stamp, arrays, layer.index, layer.module)


def _checkpoint_files(manifest: Manifest, layers: Sequence[LayerView]) -> dict[int, FileView]:
    """The checkpoint's files that these layers map. Raises StoreError: one is gone or changed."""
    found: dict[int, FileView] = {}
    for index in mapped_files([layer.where for layer in layers if layer.where is not None]):
        if manifest.published is None or manifest.published.checkpoint is None:
            raise StoreError("the manifest does not say where the mapped checkpoint is", REBUILD)
        path = Path(manifest.published.checkpoint) / manifest.source[index].file
        found[index] = FileView(str(_named(path)), _unchanged(path, manifest.source[index]), {})
    return found


def _named(path: Path) -> Path:
    """The user's own path of a checkpoint's file: the end of the link in a folder that stands for a GGUF file."""
    end = path.readlink() if path.is_symlink() else path
    return end if end.is_absolute() else path


def _unchanged(path: Path, source: SourceFile) -> FileStamp:
    """The stamp of a checkpoint's file that is unchanged since preparation. Raises StoreError: it changed."""
    try:
        status = path.stat()
    except OSError as error:
        raise StoreError(
            f"{_named(path)}, which the store maps, is gone ({error.strerror})",
            f"put the checkpoint back, or {REBUILD}",
        ) from error
    same = (status.st_size, status.st_mtime_ns) == (source.nbytes, source.mtime_ns)
    if not same or head_digest(path) != source.sha256:
        raise StoreError(f"{_named(path)}, which the store maps, changed since the store was made", REBUILD)
    return FileStamp.of(status)
