"""Quantized replicas of a store's experts: their manifest, and their files in host memory.

They lie in the store's folder: one safetensors file per MoE layer and width (arrays of `kernels/pack.py`, stacked by
expert), one with the calibration tables, and `replicas.json`, written last (`docs/store-format.md`).

`describe_replicas` verifies the files and returns where each array lies; any process maps them from that description
(`open_replicas`, `read_tables`). NumPy without torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from ...errors import StoreError
from ...kernels.pack import PackedShape
from .files import FileView, VerifiedFiles
from .format import MANIFEST_NAME, ChecksummedManifest, Count, FileRecord, Manifest, Record, Sha256, read_manifest

REPLICA_VERSION: Literal[2] = 2
REPLICAS_NAME = "replicas.json"
REPLICA_STAMP_NAME = "replicas-verified.json"

REQUANTIZE = "make them again with `tiermoe prepare MODEL OUT --bits WIDTHS`"

Width = Literal[1, 2, 3, 4, 8]
Group = Literal[32, 64, 128]


def replica_name(bits: int, group: int, layer: int) -> str:
    """File name of the replicas of MoE layer `layer` at `bits` bits a weight."""
    return f"replicas-b{bits}-g{group}-{layer:03d}.safetensors"


def losses_name(widths: tuple[int, ...], group: int) -> str:
    """File name of the tables for these widths; each set of widths has its own file, so none in use is overwritten."""
    return f"losses-b{''.join(map(str, widths))}-g{group}.safetensors"


class ReplicaFile(FileRecord):
    """The experts of MoE layer `layer` at `bits` bits a weight."""

    bits: Width
    layer: Annotated[int, Field(ge=0, le=1 << 16)]


class Calibration(Record):
    """The calibration text. sha256: of the token ids, window by window."""

    sha256: Sha256
    tokens: Count


class ReplicaManifest(ChecksummedManifest):
    """The replicas of one store.

    Attributes:
        store_sha256: of the store's `manifest.json` when they were made.
        group: consecutive inputs that share a scale and an offset.
        widths: bits a weight, ascending.
        method: "data-free", each group fitted to its weights (`kernels/fit.py`); "gptq", each expert to its inputs.
        act_order: GPTQ took the inputs in the order of their Hessian diagonal, as earlier versions could.
        calibration: the text of GPTQ's inputs.
        files: by width, then by layer.
        losses: the file of `ReplicaTables`.
    """

    file_name = REPLICAS_NAME
    version_field, version, version_name = "replica_version", REPLICA_VERSION, "replica version"
    remedy = REQUANTIZE

    replica_version: Literal[2]
    store_sha256: Sha256
    group: Group
    widths: Annotated[tuple[Width, ...], Field(min_length=1)]
    method: Literal["data-free", "gptq"]
    act_order: bool
    calibration: Calibration | None
    files: tuple[ReplicaFile, ...]
    losses: FileRecord

    @model_validator(mode="after")
    def _consistent(self) -> ReplicaManifest:
        if list(self.widths) != sorted(set(self.widths)):
            raise ValueError("widths are not ascending")
        if (self.calibration is None) != (self.method == "data-free") or (self.act_order and self.calibration is None):
            raise ValueError("the method and the calibration do not fit together")
        layers = len(self.files) // len(self.widths)
        expected = [(bits, layer) for bits in self.widths for layer in range(layers)]
        if not layers or [(file.bits, file.layer) for file in self.files] != expected:
            raise ValueError("files are not one for each width and layer")
        if any(file.file != replica_name(file.bits, self.group, file.layer) for file in self.files):
            raise ValueError("a file has another name than its width and layer give it")
        if self.losses.file != losses_name(self.widths, self.group):
            raise ValueError("the tables are not those of these widths")
        return self

    @property
    def num_layers(self) -> int:
        """MoE layers, as in the store."""
        return len(self.files) // len(self.widths)

    def records(self) -> tuple[FileRecord, ...]:
        """Every file of the replicas but the manifest."""
        return (*self.files, self.losses)

    def nbytes(self, bits: int) -> int:
        """Bytes of all layers' files of one width."""
        return sum(file.nbytes for file in self.files if file.bits == bits)


def table_tensors(layers: int, experts: int, widths: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type code and shape of each tensor of the tables' file, in file order."""
    return {
        "counts": ("I64", (layers, experts)),
        "scores": ("F64", (layers, experts)),
        "losses": ("F32", (layers, experts, widths)),
        "rtn_losses": ("F32", (layers, experts, widths)),
        "fallback": ("U8", (layers, experts, widths)),
    }


def store_digest(store: Path) -> str:
    """SHA-256 of a store's `manifest.json`, which ties replicas to their store. Raises OSError: unreadable."""
    return hashlib.sha256((store / MANIFEST_NAME).read_bytes()).hexdigest()


def read_replicas(store: Path, manifest: Manifest) -> ReplicaManifest | None:
    """The manifest of a store's replicas; None without any. `manifest` is the store's own.

    Raises:
        StoreError: it is malformed, or of another store.
    """
    if any(record.file == REPLICAS_NAME for record in manifest.files()):
        return None  # the checkpoint's own file of that name, copied
    replicas = ReplicaManifest.read(store)
    if replicas is not None and (
        replicas.store_sha256 != store_digest(store) or replicas.num_layers != len(manifest.layers)
    ):
        path = store / REPLICAS_NAME
        raise StoreError(f"{path} belongs to another store than the one around it", REQUANTIZE)
    return replicas


@dataclass(frozen=True)
class ReplicaView:
    """What another process needs to map the replicas: picklable, without arrays.

    shapes: of one expert, by width. layers: one file per MoE layer, by width. tables: the file of `read_tables`.
    """

    path: str
    manifest: ReplicaManifest
    shapes: dict[int, PackedShape]
    layers: dict[int, tuple[FileView, ...]]
    tables: FileView

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits a weight, ascending."""
        return self.manifest.widths


@dataclass(frozen=True)
class ReplicaTables:
    """What is known of the replicas of L MoE layers, E experts and B widths; read-only arrays.

    Attributes:
        widths: bits a weight, ascending: the last axis of the losses.
        losses: float32 [L, E, B], mean squared error of the expert's output against full precision, over its
            calibration rows and the hidden size (all rows of the layer for an expert without any). Data-free:
            expected for inputs of unit variance (`kernels/fit.py`).
        rtn_losses: float32 [L, E, B], the same for round-to-nearest; data-free: `losses` again.
        fallback: bool [L, E, B], the replica is rounded to nearest: too few rows for GPTQ.
        counts: int64 [L, E], calibration rows routed to the expert (P); zero if data-free.
        scores: float64 [L, E], sum of their routing weights (W); zero if data-free.
    """

    widths: tuple[int, ...]
    losses: NDArray[np.float32]
    rtn_losses: NDArray[np.float32]
    fallback: NDArray[np.bool_]
    counts: NDArray[np.int64]
    scores: NDArray[np.float64]


def describe_replicas(
    store: str | os.PathLike[str], verify: Literal["full", "stamp"] = "full", tables_only: bool = False
) -> ReplicaView | None:
    """Verify the replicas of a store: manifest, lengths, headers, shapes, SHA-256, finite scales and tables.

    Args:
        verify: as of `ExpertStore`.
        tables_only: verify the tables alone, on a node without the other files; the view has no layers.

    Returns:
        None for a store without replicas.

    Raises:
        StoreError: not a store; the replicas are incomplete, altered, or another store's.
    """
    folder = Path(store).resolve()
    main = read_manifest(folder)
    manifest = read_replicas(folder, main)
    if manifest is None:
        return None
    experts = main.experts
    files = VerifiedFiles(folder, "replicas", REPLICAS_NAME, REPLICA_STAMP_NAME, REQUANTIZE, replaceable=True)
    records = (manifest.losses,) if tables_only else manifest.records()
    stamps = {record.file: files.stamp(record) for record in records}
    shapes: dict[int, PackedShape] = {
        bits: PackedShape(experts.hidden, experts.intermediate, bits, manifest.group) for bits in manifest.widths
    }
    tensors = {
        bits: {name: (code, (experts.num_experts, *dims)) for name, (code, dims) in shape.tensors().items()}
        for bits, shape in shapes.items()
    }
    tables = table_tensors(len(main.layers), experts.num_experts, len(manifest.widths))
    view = ReplicaView(
        path=str(folder),
        manifest=manifest,
        shapes=shapes,
        layers={
            bits: tuple(files.view(file, tensors[bits]) for file in manifest.files if file.bits == bits)
            for bits in manifest.widths
            if not tables_only
        },
        tables=files.view(manifest.losses, tables),
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
    """Map the replicas of these MoE layers (None: all) read-only into this process.

    Returns:
        By width and layer, the arrays of `PackedShape.tensors()`, stacked by expert: [E, ...].

    Raises:
        StoreError: a file is gone or changed since it was verified.
    """
    wanted = range(view.manifest.num_layers) if layers is None else layers
    return {bits: [view.layers[bits][layer].mapped(REQUANTIZE) for layer in wanted] for bits in view.widths}


def read_tables(view: ReplicaView) -> ReplicaTables:
    """The calibration tables, copied. Raises StoreError: the file is gone or changed since it was verified."""
    arrays = {name: array.copy() for name, array in view.tables.mapped(REQUANTIZE).items()}
    arrays["fallback"] = arrays["fallback"].astype(np.bool_)
    for array in arrays.values():
        array.setflags(write=False)
    return ReplicaTables(widths=view.widths, **arrays)


def _check_values(view: ReplicaView, names: set[str]) -> None:
    """Refuse what digests cannot: scales and tables that were written non-finite or negative."""
    for file in [*(f for files in view.layers.values() for f in files), view.tables]:
        if Path(file.path).name not in names:
            continue
        for name, array in file.mapped(REQUANTIZE).items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise StoreError(f"{file.path}: tensor {name!r} is not finite", REQUANTIZE)
            if file is view.tables and bool((array < 0).any()):
                raise StoreError(f"{file.path}: tensor {name!r} has negative entries", REQUANTIZE)
