"""The expert store in host memory: every process of a node maps the same files, so there is one copy.

`ExpertStore` verifies a store folder once, or a slice of its layers, and says where each array lies (`describe`);
any other process of the node maps the files itself from that description (`open_views`). Read-only shared mappings of
one file share the pages of the operating system's cache, so nothing is sent and nothing is copied. Other nodes read
through a `StoreWorker`.

NumPy and mapped files only: it starts without torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ..errors import StoreError
from .store_format import MANIFEST_NAME, REBUILD, STAMP_NAME, FileRecord, LayerFile, Manifest, read_manifest
from .tensor_file import read_header
from .verified_files import ArrayView, FileStamp, VerifiedFiles, check_unchanged, map_arrays
from .verified_files import hash_files as hash_files  # for those who write what a store holds


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
    """All that another process needs to map the store itself; picklable, holds no arrays.

    Attributes:
        manifest: of the whole store.
        layers: those that this node holds, by rising index; none where it has only the front of the model.
    """

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
        layers: a slice: only the files of these layers need to be there, are verified and mapped, beside the dense
            part and the small files; None: all.

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
        self._manifest = read_manifest(self._path)
        chosen = _slice_of(self._manifest, layers)
        self._records: tuple[FileRecord, ...] = (*chosen, self._manifest.dense, *self._manifest.extras)
        files = VerifiedFiles(self._path, "store", MANIFEST_NAME, STAMP_NAME, REBUILD)
        stamps = {record.file: files.stamp(record) for record in self._records}
        tensors = self._manifest.expert_tensors()
        arrays = [files.arrays(layer.file, tensors) for layer in chosen]
        read_header(self._path / self._manifest.dense.file, files.error)
        noted = files.read_stamps()
        known = noted if verify == "stamp" else {}
        files.check_hashes([r for r in self._records if known.get(r.file) != stamps[r.file]])
        self._view = StoreView(
            path=str(self._path),
            manifest=self._manifest,
            layers=tuple(
                LayerView(layer.index, layer.module, str(self._path / layer.file), stamps[layer.file], views)
                for layer, views in zip(chosen, arrays, strict=True)
            ),
            dense_path=str(self._path / self._manifest.dense.file),
            dense_stamp=stamps[self._manifest.dense.file],
        )
        # Maps now, so that a file replaced between hashing and mapping is noticed here.
        self._layers: tuple[LayerArrays, ...] | None = tuple(open_views(self._view))
        check_unchanged(self._view.dense_path, self._view.dense_stamp, REBUILD)
        if (all_known := noted | stamps) != noted:  # what another slice of the folder found stays
            files.write_stamps(all_known)

    @property
    def manifest(self) -> Manifest:
        """What the store holds."""
        return self._manifest

    @property
    def layers(self) -> tuple[LayerArrays, ...]:
        """The mapped experts, one entry per MoE layer held, in the order of `describe().layers`.

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
                check_unchanged(layer.path, layer.stamp, REBUILD)
            check_unchanged(self._view.dense_path, self._view.dense_stamp, REBUILD)
        except StoreError as error:
            problem = error.what
        nbytes = sum(record.nbytes for record in self._records)
        return StoreHealth(layers=len(self._view.layers), nbytes=nbytes, problem=problem)

    def close(self) -> None:
        """Drop the mappings; each is unmapped when the last array on it is gone."""
        self._layers = None


def _slice_of(manifest: Manifest, layers: Sequence[int] | None) -> tuple[LayerFile, ...]:
    if layers is None:
        return manifest.layers
    unknown = sorted(set(layers) - set(range(len(manifest.layers))))
    if unknown:
        raise StoreError(
            f"the store has MoE layers 0 to {len(manifest.layers) - 1}, not {unknown[0]}", "ask for layers that it has"
        )
    return tuple(manifest.layers[i] for i in sorted(set(layers)))


def open_views(view: StoreView) -> list[LayerArrays]:
    """Map the layer files of a store read-only into this process.

    Raises:
        StoreError: a file is gone or changed since the store was verified.
    """
    return [_open_layer(layer, view.manifest.dtype) for layer in view.layers]


def _open_layer(layer: LayerView, dtype: str) -> LayerArrays:
    arrays = map_arrays(layer.path, layer.stamp, layer.arrays, REBUILD)
    return LayerArrays(
        index=layer.index,
        module=layer.module,
        dtype=dtype,
        gate_up=arrays["gate_up"],
        down=arrays["down"],
        gate_up_bias=arrays.get("gate_up_bias"),
        down_bias=arrays.get("down_bias"),
    )
