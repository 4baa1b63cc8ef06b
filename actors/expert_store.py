"""The expert store in host memory: every process of a node maps the same files, so there is one copy.

`ExpertStore` verifies a store folder once and says where each array lies (`describe`); any other
process maps the files itself from that description (`open_views`). Read-only shared mappings of one
file share the pages of the operating system's cache, so nothing is sent and nothing is copied.

NumPy and mapped files only: it starts without torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ..errors import StoreError
from .store_format import MANIFEST_NAME, REBUILD, STAMP_NAME, Manifest, read_header, read_manifest
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
        files = VerifiedFiles(self._path, "store", MANIFEST_NAME, STAMP_NAME, REBUILD)
        stamps = {record.file: files.stamp(record) for record in self._manifest.files()}
        tensors = self._manifest.expert_tensors()
        arrays = [files.arrays(layer.file, tensors) for layer in self._manifest.layers]
        read_header(self._path / self._manifest.dense.file, files.error)
        known = files.read_stamps() if verify == "stamp" else {}
        files.check_hashes([r for r in self._manifest.files() if known.get(r.file) != stamps[r.file]])
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
        check_unchanged(self._view.dense_path, self._view.dense_stamp, REBUILD)
        if known != stamps:
            files.write_stamps(stamps)

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
                check_unchanged(layer.path, layer.stamp, REBUILD)
            check_unchanged(self._view.dense_path, self._view.dense_stamp, REBUILD)
        except StoreError as error:
            problem = error.what
        nbytes = sum(record.nbytes for record in self._manifest.files())
        return StoreHealth(layers=len(self._view.layers), nbytes=nbytes, problem=problem)

    def close(self) -> None:
        """Drop the mappings; each is unmapped when the last array on it is gone."""
        self._layers = None


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
