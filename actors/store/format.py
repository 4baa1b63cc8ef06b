"""The expert store on disk: manifests, and the safetensors headers of its files.

A store is a folder (see `docs/store-format.md`): `manifest.json`, one safetensors file per MoE layer with every expert
neuron-major (there, "Layout"), one with the dense weights, and copies of the checkpoint's configuration and
tokenizer. A manifest has one valid byte string, which contains its digest, so any altered byte is noticed. The data of
a tensor file starts at a multiple of 64 bytes, which aligns mapped arrays for vector loads.

Every process of a node may import this module: it needs neither NumPy nor torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    ValidationError,
    model_serializer,
    model_validator,
)

from ...errors import FormError, StoreError, TierMoeError
from ...kernels.forms import ExpertForm, MatrixForm, layout_bytes


class Record(BaseModel):
    """Base of manifests and their parts: frozen and strict, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ChecksummedManifest(Record):
    """Base of the manifests: a JSON file that carries its own digest.

    Attributes:
        file_name: in the store's folder.
        version_field, version: the field with the format's version, checked first, and the only version accepted.
        version_name: in errors, such as "store format".
        remedy: of every error.
    """

    file_name: ClassVar[str]
    version_field: ClassVar[str]
    version: ClassVar[int]
    version_name: ClassVar[str]
    remedy: ClassVar[str]

    def encode(self) -> bytes:
        """The only byte string that `decode` accepts for this manifest."""
        body = self.model_dump(mode="json")
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        return (json.dumps({**body, "checksum": digest}, indent=1) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes, where: str) -> Self:
        """Check and parse a manifest; `where` is the path for errors.

        Raises:
            StoreError: not a manifest, of another version, or altered.
        """
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{where} is not valid JSON ({first_problem(error)})", cls.remedy) from error
        if not isinstance(body, dict):
            raise StoreError(f"{where} is not a manifest", cls.remedy)
        version = body.get(cls.version_field)
        if version != cls.version:
            raise StoreError(f"{where} has {cls.version_name} {version!r}, not {cls.version}", cls.remedy)
        body.pop("checksum", None)
        try:
            manifest = cls.model_validate_json(json.dumps(body))
        except (ValidationError, ValueError, FormError) as error:
            raise StoreError(f"{where} is malformed ({first_problem(error)})", cls.remedy) from error
        if manifest.encode() != data:
            raise StoreError(f"{where} does not match its checksum", cls.remedy)
        return manifest

    @classmethod
    def read(cls, store: Path) -> Self | None:
        """The manifest in a store's folder; None without one. Raises as `decode`."""
        path = store / cls.file_name
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"{path} cannot be read ({error.strerror})", cls.remedy) from error
        return cls.decode(data, str(path))


def first_problem(error: Exception) -> str:
    """The first line of an error, of a validation error its first item."""
    if isinstance(error, ValidationError):
        item = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}".strip(": ")
    return str(error).splitlines()[0] if str(error) else type(error).__name__


DATA_ALIGNMENT = 64
MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors library

# safetensors type codes and bytes per element
ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}

Bytes = Annotated[int, Field(ge=0, le=1 << 50)]


class TensorSpec(Record):
    """One tensor of a safetensors file. dtype: type code, such as "BF16". offset: in bytes from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: Bytes
    nbytes: Bytes


def build_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, tuple[TensorSpec, ...]]:
    """The safetensors header for tensors in this order, given as type code and shape by name.

    Returns:
        The header, a multiple of `DATA_ALIGNMENT` bytes long, and the position of each tensor.
    """
    entries: dict[str, dict[str, Any]] = {}
    begin = 0
    for name, (dtype, shape) in tensors.items():
        end = begin + math.prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    specs = tuple(
        TensorSpec(
            name=name,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            offset=len(head) + entry["data_offsets"][0],
            nbytes=entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in entries.items()
    )
    return head, specs


def read_header(
    path: Path, error: Callable[[str], TierMoeError], truncated: Callable[[str], TierMoeError] | None = None
) -> tuple[bytes, tuple[TensorSpec, ...]]:
    """Read and check the header of a safetensors file: types, shapes, and data without gap or overlap.

    Returns:
        The raw header, length field included, and the tensors in file order.

    Raises:
        TierMoeError: `error(description)`, when the file is absent or malformed; `truncated(description)`, by default
            `error`, when it is shorter or longer than its header says.
    """
    truncated = truncated or error
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            length = int.from_bytes(head, "little")
            if len(head) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise truncated(f"{path} is truncated or not a safetensors file ({size} bytes)")
            text = file.read(length)
    except OSError as cause:
        raise error(f"{path} cannot be read ({cause.strerror})") from cause
    try:
        entries = json.loads(text, object_pairs_hook=_no_duplicates)
        if not isinstance(entries, dict):
            raise ValueError("no names of tensors")
        specs = [_tensor_spec(name, entry, 8 + length) for name, entry in entries.items() if name != "__metadata__"]
    except (ValueError, RecursionError, AttributeError) as cause:
        raise error(f"{path} has a malformed header ({first_problem(cause)})") from cause
    specs.sort(key=lambda spec: (spec.offset, spec.nbytes))
    end = 8 + length
    for spec in specs:
        if spec.offset != end:
            raise error(f"{path}: the data of tensor {spec.name!r} overlaps another or leaves a gap")
        end += spec.nbytes
    if end != size:
        raise truncated(f"{path} has {size} bytes where its header needs {end}")
    return head + text, tuple(specs)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _tensor_spec(name: str, entry: Any, data_start: int) -> TensorSpec:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r} lacks dtype, shape or data_offsets")
    if not (name.isascii() and name.isprintable()):  # names appear in error messages and other files
        raise ValueError("a tensor's name has unprintable characters")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {name!r} has type {dtype!r}")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or any(type(n) is not int or not 0 <= n <= 1 << 50 for n in numbers):
            raise ValueError(f"tensor {name!r} has shape or offsets that are not natural numbers")
    if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"tensor {name!r} of type {dtype} and shape {shape} does not fit its data")
    return TensorSpec(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        offset=data_start + offsets[0],
        nbytes=offsets[1] - offsets[0],
    )


FORMAT_VERSION: Literal[1] = 1
MANIFEST_NAME = "manifest.json"
STAMP_NAME = "verified.json"
JOURNAL_NAME = "journal.json"  # of an unfinished store
DENSE_NAME = "dense.safetensors"

REBUILD = "rebuild it with `tiermoe prepare MODEL OUT --force`"

DType = Literal["bfloat16", "float16", "float32"]
DTYPE_CODES: Mapping[str, str] = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

Count = Annotated[int, Field(ge=1, le=1 << 24)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
# one path component, so no file outside the folder
FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,199}$")]


MAP_SUFFIX = ".json"  # of the file of a layer whose experts stay in the checkpoint (`store.published`)


def layer_name(index: int) -> str:
    """File name of MoE layer `index`."""
    return f"layer-{index:03d}.safetensors"


def part_tensor(name: str, part: str) -> str:
    """Name in the dense file of a part of a parameter in its published form."""
    return f"{name}:{part}"


class FileRecord(Record):
    """A file of the store."""

    file: FileName
    nbytes: Bytes
    sha256: Sha256


class LayerFile(FileRecord):
    """The experts of one MoE layer.

    index: 0..L-1, dense layers not counted. module: path in the model, such as `model.layers.3.mlp.experts`.
    """

    index: Annotated[int, Field(ge=0, le=1 << 16)]
    module: str

    @property
    def mapped(self) -> bool:
        """Whether the experts stay in the checkpoint, and the file says where."""
        return self.file.endswith(MAP_SUFFIX)


class TiedWeight(Record):
    """A parameter that shares the storage of `source`, which is in the dense file."""

    name: str
    source: str


class DenseFile(FileRecord):
    """Everything that is not a routed expert, under the names of `model.state_dict()`.

    forms: of matrices that stay in their published form, whose parts are tensors named by `part_tensor`.
    """

    tied: tuple[TiedWeight, ...]
    # left out without one, so that the checksums of stores that were made before it hold
    forms: dict[str, MatrixForm] = Field(default_factory=dict, exclude_if=lambda forms: not forms)


class SourceFile(Record):
    """A checkpoint file when the store was made. Of a weight file, `sha256` covers the header alone; of a small file,
    it covers everything, and `mtime_ns` is None.
    """

    file: str
    nbytes: Bytes
    mtime_ns: int | None
    sha256: Sha256


class ExpertShape(Record):
    """Shape of one expert; all experts of a store have the same.

    Attributes:
        gates: 2 with a gate and an up projection, 1 with up alone.
        has_bias: both projections have biases.
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
        """[I, G]; None without biases."""
        return (self.intermediate, self.gates) if self.has_bias else None

    @property
    def down_bias(self) -> tuple[int] | None:
        """[H]; None without biases."""
        return (self.hidden,) if self.has_bias else None

    def elements(self) -> int:
        """Numbers in one expert, biases included."""
        shapes = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return sum(math.prod(shape) for shape in shapes if shape is not None)

    def nbytes(self, itemsize: int) -> int:
        """Bytes of one expert at `itemsize` bytes a number."""
        return self.elements() * itemsize

    def stacked(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes [E, ...] of the tensors of a layer file, in file order."""
        shapes: dict[str, tuple[int, ...] | None] = {
            "gate_up": self.gate_up,
            "down": self.down,
            "gate_up_bias": self.gate_up_bias,
            "down_bias": self.down_bias,
        }
        return {name: (self.num_experts, *shape) for name, shape in shapes.items() if shape is not None}


def part_bytes(form: ExpertForm) -> dict[str, int]:
    """Bytes of each part of one expert in a published form, in the order of slots."""
    return {name: layout_bytes({name: what}) for name, what in form.parts().items()}


def _aligned(nbytes: int) -> int:
    return -(-nbytes // DATA_ALIGNMENT) * DATA_ALIGNMENT


class Published(Record):
    """The forms of experts that a store keeps as their checkpoint publishes them (`store.published`).

    Attributes:
        forms: the different ones. layers: of each MoE layer, the index of its form.
        checkpoint: absolute path of the folder with the mapped files; None: no layer is mapped.
    """

    forms: Annotated[tuple[ExpertForm, ...], Field(min_length=1)]
    layers: tuple[Annotated[int, Field(ge=0)], ...]
    checkpoint: str | None

    @staticmethod
    def of_layers(forms: Sequence[ExpertForm], checkpoint: str | None = None) -> Published:
        """Of the forms of the layers' experts, in their order."""
        different = tuple(dict.fromkeys(forms))
        return Published(forms=different, layers=tuple(map(different.index, forms)), checkpoint=checkpoint)

    @model_validator(mode="after")
    def _consistent(self) -> Published:
        if set(self.layers) != set(range(len(self.forms))):
            raise ValueError("layers name other forms than there are")
        return self

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that holds an expert of any layer: where forms differ, with aligned parts."""
        if len(self.forms) == 1:
            return self.forms[0].nbytes()
        return max(_aligned(sum(self.places(form)[-1])) for form in self.forms)

    @property
    def bits(self) -> int:
        """Bits of a weight with its scales, rounded up, of the largest form."""
        elements = 3 * self.forms[0].hidden * self.forms[0].intermediate
        return math.ceil(8 * max(form.nbytes() for form in self.forms) / elements)

    @property
    def width(self) -> int:
        """Whole bits of a weight, without scales, in the layer with the fewest."""
        return min(form.width for form in self.forms)

    def narrower(self, widths: Sequence[int]) -> tuple[int, ...]:
        """Those of some widths that replicas may have: at and above its own width a form serves itself."""
        return tuple(b for b in widths if b < self.width)

    @staticmethod
    def places(form: ExpertForm) -> list[tuple[int, int]]:
        """First byte and length of each part in a slot that holds any form."""
        out, first = [], 0
        for nbytes in part_bytes(form).values():
            out.append((first, nbytes))
            first += _aligned(nbytes)
        return out

    def of(self, layer: int) -> ExpertForm:
        """The form of a layer's experts."""
        return self.forms[self.layers[layer]]

    def part_tensors(self, layer: int, experts: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The parts of a layer's experts, stacked: bytes [E, n]."""
        return {name: ("U8", (experts, nbytes)) for name, nbytes in part_bytes(self.of(layer)).items()}

    def label(self) -> str:
        """For people, such as "q4_k, q6_k"."""
        kinds = [f"{m.kind}{m.bits or ''}" for form in self.forms for m in form.matrices.values()]
        return ", ".join(dict.fromkeys(kinds))


class Manifest(ChecksummedManifest):
    """The content of a store. Written last: a folder without a manifest is not a store.

    Attributes:
        model: the checkpoint's folder name.
        architecture: class of the transformers model, such as `MixtralForCausalLM`.
        dtype: of the experts, as in the checkpoint.
        transformers_version: of the conversion that gave the tensor names.
        extras: configuration and tokenizer files.
        source: the checkpoint's files, to detect a changed checkpoint.
        published: None: experts are neuron-major; then it is not written, so older stores have the same digest.
    """

    file_name = MANIFEST_NAME
    version_field, version, version_name = "format_version", FORMAT_VERSION, "store format"
    remedy = REBUILD

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
    published: Published | None = None

    @model_serializer(mode="wrap")
    def _plain(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        body: dict[str, Any] = dump(self)
        if body.get("published") is None:
            body.pop("published", None)
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
        if self.published is not None:
            shape, forms = self.experts, self.published.forms
            if len(self.published.layers) != len(self.layers):
                raise ValueError("not every layer has a form")
            if any((form.hidden, form.intermediate) != (shape.hidden, shape.intermediate) for form in forms):
                raise ValueError("a form has another shape than the experts")
        return self

    def files(self) -> tuple[FileRecord, ...]:
        """Every file of the store but the manifest."""
        return (*self.layers, self.dense, *self.extras)

    @property
    def expert_form(self) -> str | None:
        """The published form of the experts, such as "fp8_block"; None: neuron-major in `dtype`."""
        return None if self.published is None else self.published.label()

    def expert_nbytes(self) -> int:
        """Bytes of one expert as stored; of the largest, where layers differ."""
        if self.published is not None:
            return self.published.slot_bytes
        return self.experts.nbytes(ITEM_BYTES[DTYPE_CODES[self.dtype]])

    def layer_nbytes(self, layer: int) -> int:
        """Bytes of a layer's experts as stored."""
        nbytes = self.expert_nbytes() if self.published is None else self.published.of(layer).nbytes()
        return self.experts.num_experts * nbytes

    def expert_tensors(self, layer: int = 0) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type code and shape of each tensor of a layer's experts, stacked; published forms may differ by layer."""
        if self.published is not None:
            return self.published.part_tensors(layer, self.experts.num_experts)
        code = DTYPE_CODES[self.dtype]
        return {name: (code, shape) for name, shape in self.experts.stacked().items()}


def manifest_digest(manifest: Manifest) -> str:
    """SHA-256 of the encoded manifest: equal digests mean equal stores."""
    return hashlib.sha256(manifest.encode()).hexdigest()


def read_manifest(store: Path) -> Manifest:
    """The manifest of a store folder. Raises StoreError: not a store, or a malformed manifest."""
    path = store / MANIFEST_NAME
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(
            f"{store} is not an expert store ({path.name}: {error.strerror})",
            "make one with `tiermoe prepare MODEL OUT`",
        ) from error
    return Manifest.decode(data, str(path))


def model_fingerprint(manifest: Manifest) -> str:
    """SHA-256 that identifies the checkpoint of a store."""
    source = "\n".join(file.model_dump_json() for file in manifest.source)
    return hashlib.sha256(source.encode()).hexdigest()
