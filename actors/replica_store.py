"""A store's quantized replicas in host memory: verified once, mapped by every process of the node.

`describe_replicas` verifies and says where each array lies; any process maps the files itself from that
description (`open_replicas`, `read_tables`). NumPy and mapped files only, as the expert store.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import StoreError
from ..kernels.pack import PackedShape
from .replica_format import (
    REPLICA_STAMP_NAME,
    REPLICAS_NAME,
    REQUANTIZE,
    ReplicaManifest,
    read_replicas,
    table_tensors,
)
from .store_format import FileRecord, read_manifest
from .verified_files import ArrayView, FileStamp, VerifiedFiles, map_arrays


@dataclass(frozen=True)
class ReplicaFileView:
    """One file of the replicas: absolute path, verified state, arrays by name."""

    path: str
    stamp: FileStamp
    arrays: dict[str, ArrayView]


@dataclass(frozen=True)
class ReplicaView:
    """All that another process needs to map the replicas itself; picklable, holds no arrays.

    Attributes:
        num_experts, hidden, intermediate: of the store's experts.
        layers: by width, one entry per MoE layer.
        tables: the file that `read_tables` reads.
    """

    path: str
    manifest: ReplicaManifest
    num_experts: int
    hidden: int
    intermediate: int
    layers: dict[int, tuple[ReplicaFileView, ...]]
    tables: ReplicaFileView

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits a weight, ascending."""
        return self.manifest.widths

    def shape(self, bits: int) -> PackedShape:
        """Of one expert at `bits` bits a weight."""
        return PackedShape(self.hidden, self.intermediate, bits, self.manifest.group)


@dataclass(frozen=True)
class ReplicaTables:
    """What calibration measured. L MoE layers, E experts, B widths; read-only arrays.

    Attributes:
        widths: bits a weight, ascending: the last axis of the losses.
        losses: float32 [L, E, B], mean squared error of the expert's output against full precision, over its
            calibration rows and the hidden size (all rows of the layer for an expert that got none).
        rtn_losses: float32 [L, E, B], the same for round-to-nearest.
        fallback: bool [L, E, B], round-to-nearest is what is stored: too few rows for GPTQ.
        counts: int64 [L, E], calibration rows that the router sent to the expert (P).
        scores: float64 [L, E], sum of their routing weights (W).
    """

    widths: tuple[int, ...]
    losses: NDArray[np.float32]
    rtn_losses: NDArray[np.float32]
    fallback: NDArray[np.bool_]
    counts: NDArray[np.int64]
    scores: NDArray[np.float64]

    def losses_at(self, bits: int) -> NDArray[np.float32]:
        """float32 [L, E] of one width.

        Raises:
            StoreError: there are no replicas of that width.
        """
        if bits not in self.widths:
            raise StoreError(f"the store has replicas of {list(self.widths)} bits, not {bits}", REQUANTIZE)
        return self.losses[..., self.widths.index(bits)]


def describe_replicas(
    store: str | os.PathLike[str], verify: Literal["full", "stamp"] = "full", tables_only: bool = False
) -> ReplicaView | None:
    """Verify the replicas of a store: manifest, lengths, headers, shapes, SHA-256, finite scales and tables.

    Args:
        verify: "full" reads every file; "stamp" skips those whose size, modification time and inode are those of an
            earlier full verification, recorded in the folder.
        tables_only: look at the file of `read_tables` alone; the view has no layers. For a node without the others.

    Returns:
        None where the store has no replicas.

    Raises:
        StoreError: not a store; the replicas are incomplete, altered, or another store's.
    """
    folder = Path(store).resolve()
    main = read_manifest(folder)
    manifest = read_replicas(folder, main)
    if manifest is None:
        return None
    experts = main.experts
    files = VerifiedFiles(folder, "replicas", REPLICAS_NAME, REPLICA_STAMP_NAME, REQUANTIZE)
    records = (manifest.losses,) if tables_only else manifest.records()
    stamps = {record.file: files.stamp(record) for record in records}

    def file_view(record: FileRecord, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> ReplicaFileView:
        arrays = files.arrays(record.file, tensors)
        return ReplicaFileView(str(folder / record.file), stamps[record.file], arrays)

    def layer_tensors(bits: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        shape = PackedShape(experts.hidden, experts.intermediate, bits, manifest.group)
        return {name: (code, (experts.num_experts, *dims)) for name, (code, dims) in shape.tensors().items()}

    view = ReplicaView(
        path=str(folder),
        manifest=manifest,
        num_experts=experts.num_experts,
        hidden=experts.hidden,
        intermediate=experts.intermediate,
        layers={
            bits: tuple(file_view(file, layer_tensors(bits)) for file in manifest.files if file.bits == bits)
            for bits in manifest.widths
            if not tables_only
        },
        tables=file_view(
            manifest.losses, table_tensors(len(main.layers), experts.num_experts, len(manifest.widths))
        ),
    )
    known = files.read_stamps() if verify == "stamp" else {}
    doubtful = [record for record in records if known.get(record.file) != stamps[record.file]]
    files.check_hashes(doubtful)
    _check_values(view, {record.file for record in doubtful})
    if known != stamps and not tables_only:
        files.write_stamps(stamps)
    return view


def open_replicas(
    view: ReplicaView, layers: Sequence[int] | None = None
) -> dict[int, list[dict[str, NDArray[Any]]]]:
    """Map the replicas read-only into this process.

    Args:
        layers: the MoE layers wanted, in this order; None: all.

    Returns:
        By width, per layer, the arrays of `PackedShape.tensors()` with the experts in front: [E, ...].

    Raises:
        StoreError: a file is gone or changed since it was verified.
    """
    wanted = range(view.manifest.num_layers) if layers is None else layers
    return {bits: [_map(view.layers[bits][layer]) for layer in wanted] for bits in view.widths}


def read_tables(view: ReplicaView) -> ReplicaTables:
    """What calibration measured, in memory of its own.

    Raises:
        StoreError: the file is gone or changed since it was verified.
    """
    arrays = {name: array.copy() for name, array in _map(view.tables).items()}
    arrays["fallback"] = arrays["fallback"].astype(np.bool_)
    for array in arrays.values():
        array.setflags(write=False)
    return ReplicaTables(widths=view.widths, **arrays)


def _map(file: ReplicaFileView) -> dict[str, NDArray[Any]]:
    return map_arrays(file.path, file.stamp, file.arrays, REQUANTIZE)


def _check_values(view: ReplicaView, names: set[str]) -> None:
    """Scales and tables that are not finite would pass every digest if they were written so."""
    for file in [*(f for files in view.layers.values() for f in files), view.tables]:
        if Path(file.path).name not in names:
            continue
        for name, array in _map(file).items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise StoreError(f"{file.path}: tensor {name!r} is not finite", REQUANTIZE)
            if file is view.tables and bool((array < 0).any()):
                raise StoreError(f"{file.path}: tensor {name!r} has negative entries", REQUANTIZE)
