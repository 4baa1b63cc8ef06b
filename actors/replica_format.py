"""Quantized replicas of a store's experts on disk: what their manifest says.

Replicas lie in the store's own folder: one safetensors file per MoE layer and width (the packed arrays of
`kernels/pack.py`, experts stacked in front), one with what calibration measured, and `replicas.json`, written last.
A store without it has no replicas. See `docs/store-format.md`.

NumPy-free and torch-free, as `store_format`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..errors import StoreError
from .checksummed import Checksummed
from .store_format import MANIFEST_NAME, Count, FileRecord, Manifest, Sha256, _Frozen

REPLICA_VERSION: Literal[1] = 1
REPLICAS_NAME = "replicas.json"
REPLICA_STAMP_NAME = "replicas-verified.json"

REQUANTIZE = "make them again with `tiermoe prepare MODEL OUT --bits WIDTHS --calibration FILE`"

Width = Literal[1, 2, 3, 4, 8]
Group = Literal[32, 64, 128]


def replica_name(bits: int, group: int, layer: int) -> str:
    """File name of the replicas of MoE layer `layer` at `bits` bits a weight."""
    return f"replicas-b{bits}-g{group}-{layer:03d}.safetensors"


def losses_name(widths: tuple[int, ...], group: int) -> str:
    """File name of the tables for these widths: another set of widths never overwrites a table that is in use."""
    return f"losses-b{''.join(map(str, widths))}-g{group}.safetensors"


class ReplicaFile(FileRecord):
    """The experts of MoE layer `layer` at `bits` bits a weight."""

    bits: Width
    layer: Annotated[int, Field(ge=0, le=1 << 16)]


class Calibration(_Frozen):
    """The text that the replicas were fitted to.

    Attributes:
        sha256: of the token ids that were run, window by window.
        tokens: how many.
    """

    sha256: Sha256
    tokens: Count


class ReplicaManifest(_Frozen):
    """The replicas of one store.

    Attributes:
        store_sha256: of the store's `manifest.json` when they were made.
        group: consecutive inputs that share a scale and an offset.
        widths: bits a weight, ascending.
        act_order: whether GPTQ took the inputs in the order of their Hessian diagonal.
        files: by width, then by layer.
        losses: the file of `ReplicaTables`.
    """

    replica_version: Literal[1]
    store_sha256: Sha256
    group: Group
    widths: Annotated[tuple[Width, ...], Field(min_length=1)]
    act_order: bool
    calibration: Calibration
    files: tuple[ReplicaFile, ...]
    losses: FileRecord

    @model_validator(mode="after")
    def _consistent(self) -> ReplicaManifest:
        if list(self.widths) != sorted(set(self.widths)):
            raise ValueError("widths are not ascending")
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
        """Bytes of all files of one width."""
        return sum(file.nbytes for file in self.files if file.bits == bits)


def table_tensors(layers: int, experts: int, widths: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type code and shape of the tensors of the tables' file, in the order in which they lie."""
    return {
        "counts": ("I64", (layers, experts)),
        "scores": ("F64", (layers, experts)),
        "losses": ("F32", (layers, experts, widths)),
        "rtn_losses": ("F32", (layers, experts, widths)),
        "fallback": ("U8", (layers, experts, widths)),
    }


def store_digest(store: Path) -> str:
    """SHA-256 of a store's manifest, by which replicas know the store that they belong to.

    Raises:
        OSError: it cannot be read.
    """
    return hashlib.sha256((store / MANIFEST_NAME).read_bytes()).hexdigest()


_MANIFEST = Checksummed(ReplicaManifest, "replica_version", REPLICA_VERSION, "replica version", REQUANTIZE)


def encode_replicas(manifest: ReplicaManifest) -> bytes:
    """The only byte string that `decode_replicas` takes for this manifest; it carries its own digest."""
    return _MANIFEST.encode(manifest)


def decode_replicas(data: bytes, where: str) -> ReplicaManifest:
    """Read a manifest of replicas and check it against its digest, byte for byte.

    Args:
        where: the path to name in errors.

    Raises:
        StoreError: not one, of another version, or altered.
    """
    return _MANIFEST.decode(data, where)


def read_replicas(store: Path, manifest: Manifest) -> ReplicaManifest | None:
    """The manifest of a store's replicas; None where it has none.

    Args:
        manifest: the store's own.

    Raises:
        StoreError: it is of no use, or of another store.
    """
    path = store / REPLICAS_NAME
    if any(record.file == REPLICAS_NAME for record in manifest.files()):
        return None  # the checkpoint's own file of that name, copied
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path} cannot be read ({error.strerror})", REQUANTIZE) from error
    replicas = decode_replicas(data, str(path))
    if replicas.store_sha256 != store_digest(store) or replicas.num_layers != len(manifest.layers):
        raise StoreError(f"{path} belongs to another store than the one around it", REQUANTIZE)
    return replicas

