"""The expert store on disk: its files, and what its manifest says of them.

A store is a folder (see `docs/store-format.md`): `manifest.json`, one safetensors file per MoE layer
with every expert neuron-major (DESIGN.md section 1), one with the dense rest, and copies of the
checkpoint's configuration and tokenizer. How its tensor files are laid out is in `tensor_file`.

NumPy-free and torch-free on purpose: every process of a node may import it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    model_serializer,
    model_validator,
)

from ..errors import StoreError
from .checksummed import Checksummed
from .tensor_file import ITEM_BYTES, Bytes

FORMAT_VERSION: Literal[1] = 1
MANIFEST_NAME = "manifest.json"
STAMP_NAME = "verified.json"
DENSE_NAME = "dense.safetensors"

REBUILD = "rebuild it with `tiermoe prepare MODEL OUT --force`"

DType = Literal["bfloat16", "float16", "float32"]
DTYPE_CODES: Mapping[str, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

Count = Annotated[int, Field(ge=1, le=1 << 24)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
# One path component that cannot climb out of the folder.
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,199}$")]


def layer_name(index: int) -> str:
    """File name of MoE layer `index`."""
    return f"layer-{index:03d}.safetensors"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FileRecord(_Frozen):
    """A file of the store, its length and its digest."""

    file: FileName
    nbytes: Bytes
    sha256: Sha256


class LayerFile(FileRecord):
    """The experts of one MoE layer.

    Attributes:
        index: MoE layer number in order, 0..L-1 (dense layers are not counted).
        module: path of the experts module in the model, such as `model.layers.3.mlp.experts`.
    """

    index: Annotated[int, Field(ge=0, le=1 << 16)]
    module: str


class TiedWeight(_Frozen):
    """A parameter that shares the storage of another one, which is in the dense file."""

    name: str
    source: str


class DenseFile(FileRecord):
    """Everything that is not a routed expert, under the names of `model.state_dict()`."""

    tied: tuple[TiedWeight, ...]


class SourceFile(_Frozen):
    """A checkpoint file as it was when the store was made.

    Attributes:
        mtime_ns: modification time of a weight file; None for a small file, whose digest tells all.
        sha256: of the header of a weight file, of all of a small file.
    """

    file: str
    nbytes: Bytes
    mtime_ns: int | None
    sha256: Sha256


class ExpertShape(_Frozen):
    """Shape of one expert; all experts of a store have the same.

    Attributes:
        gates: 2 where a gate and an up projection feed the activation, 1 where there is only up.
        has_bias: whether both projections have biases.
    """

    num_experts: Count
    hidden: Count
    intermediate: Count
    gates: Literal[1, 2]
    has_bias: bool

    @property
    def gate_up(self) -> tuple[int, int, int]:
        """[I, G, H]: neuron j is rows (gate j, up j), or (up j) alone."""
        return (self.intermediate, self.gates, self.hidden)

    @property
    def down(self) -> tuple[int, int]:
        """[I, H]: row j is column j of the down projection."""
        return (self.intermediate, self.hidden)

    @property
    def gate_up_bias(self) -> tuple[int, int] | None:
        """[I, G], or None where the model has no biases."""
        return (self.intermediate, self.gates) if self.has_bias else None

    @property
    def down_bias(self) -> tuple[int] | None:
        """[H], or None where the model has no biases."""
        return (self.hidden,) if self.has_bias else None

    def elements(self) -> int:
        """Numbers in one expert, biases included."""
        shapes = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return sum(math.prod(shape) for shape in shapes if shape is not None)

    def nbytes(self, itemsize: int) -> int:
        """Bytes of one expert at `itemsize` bytes a number."""
        return self.elements() * itemsize

    def stacked(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors of a layer file, in the order in which they lie: [E, ...]."""
        shapes: dict[str, tuple[int, ...] | None] = {
            "gate_up": self.gate_up,
            "down": self.down,
            "gate_up_bias": self.gate_up_bias,
            "down_bias": self.down_bias,
        }
        return {name: (self.num_experts, *shape) for name, shape in shapes.items() if shape is not None}


class NeuronOrder(_Frozen):
    """In which order the neurons of each expert lie, where it is not the checkpoint's.

    Attributes:
        by: "activation-norm": greatest mean |activation| * ||down row|| first, over the tokens of a calibration text
            that the router sent to the expert; an expert that got none keeps its order.
        sha256: of the token ids that were run, window by window.
        tokens: how many.
    """

    by: Literal["activation-norm"]
    sha256: Sha256
    tokens: Count


class Manifest(_Frozen):
    """What a store holds. Written last, so a folder without one is not a store.

    Attributes:
        model: the checkpoint's folder name.
        architecture: class of the transformers model, such as `MixtralForCausalLM`.
        dtype: of the experts, as in the checkpoint.
        transformers_version: the one whose conversion gave the tensor names.
        extras: configuration and tokenizer files.
        source: the checkpoint's files, to notice that it changed.
        neuron_order: None: the checkpoint's; it is then not written, so that older stores keep their digest.
    """

    format_version: Literal[1]
    model: str
    architecture: str
    dtype: DType
    transformers_version: str
    experts: ExpertShape
    layers: Annotated[tuple[LayerFile, ...], Field(min_length=1)]
    dense: DenseFile
    extras: tuple[FileRecord, ...]
    source: tuple[SourceFile, ...]
    neuron_order: NeuronOrder | None = None

    @model_serializer(mode="wrap")
    def _plain(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        body: dict[str, Any] = dump(self)
        if self.neuron_order is None:
            body.pop("neuron_order", None)
        return body

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        if [layer.index for layer in self.layers] != list(range(len(self.layers))):
            raise ValueError("layers are not numbered 0..L-1")
        names = [record.file for record in self.files()]
        if len(set(names)) != len(names) or MANIFEST_NAME in names:
            raise ValueError("two files have one name")
        if len({layer.module for layer in self.layers}) != len(self.layers):
            raise ValueError("two layers have one module")
        return self

    def files(self) -> tuple[FileRecord, ...]:
        """Every file of the store but the manifest."""
        return (*self.layers, self.dense, *self.extras)

    def expert_nbytes(self) -> int:
        """Bytes of one expert as stored."""
        return self.experts.nbytes(ITEM_BYTES[DTYPE_CODES[self.dtype]])

    def expert_tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type code and shape of each tensor of a layer file."""
        code = DTYPE_CODES[self.dtype]
        return {name: (code, shape) for name, shape in self.experts.stacked().items()}


_MANIFEST = Checksummed(Manifest, "format_version", FORMAT_VERSION, "store format", REBUILD)


def encode_manifest(manifest: Manifest) -> bytes:
    """The only byte string that `decode_manifest` takes for this manifest; it carries its own digest."""
    return _MANIFEST.encode(manifest)


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Read a manifest and check it against its digest, byte for byte.

    Args:
        where: the path to name in errors.

    Raises:
        StoreError: not a manifest, of another format version, or altered.
    """
    return _MANIFEST.decode(data, where)


def manifest_digest(manifest: Manifest) -> str:
    """SHA-256 of a manifest's only byte string: two stores with the same hold the same bytes."""
    return hashlib.sha256(encode_manifest(manifest)).hexdigest()


def read_manifest(store: Path) -> Manifest:
    """The manifest of a store folder.

    Raises:
        StoreError: the folder is not a store, or its manifest is of no use.
    """
    path = store / MANIFEST_NAME
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(
            f"{store} is not an expert store ({path.name}: {error.strerror})",
            "make one with `tiermoe prepare MODEL OUT`",
        ) from error
    return decode_manifest(data, str(path))


def model_fingerprint(manifest: Manifest) -> str:
    """Of the files of the checkpoint that a store was made from."""
    source = "\n".join(file.model_dump_json() for file in manifest.source)
    return hashlib.sha256(source.encode()).hexdigest()
