"""The headers of GGUF files, read without the weights: metadata, and the type and place of every tensor.

    read_gguf_header    of one file
    read_gguf           of all files of a model: metadata as llama.cpp takes it, which reads the first part's alone

They are read here and not by `gguf.GGUFReader`, which makes an array of every string of the vocabulary: 14 s and 540 MB
for 152,000 tokens, where this takes 0.2 s and 54 MB. It also does not check lengths against the file's. Sizes of blocks
and names of types are the package's.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from ...actors.store.format import first_problem
from ...actors.store.published import is_table
from ...errors import CheckpointError, FormError, UnsupportedModelError
from ...kernels.forms import BLOCKS, ExpertForm, MatrixForm
from ..host import stands_for_gguf
from .weight_files import gguf_in, refuse_outside

_OTHER_FILE = "use another GGUF file of the model, or its safetensors form"
REFETCH = "download the checkpoint again"
REWRITE = "write the file again with a current converter of llama.cpp"
_LITTLE_ENDIAN = "rewrite it with gguf-convert-endian, which the package `gguf` installs"
SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?:\.gguf)?", re.IGNORECASE)
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
EXPERT_REMEDY = "use a GGUF file of another type, such as Q4_K_M, IQ4_XS or Q8_0"
_EXPERTS = re.compile(  # all of a layer in one tensor; or one of them, as converters before April 2024 wrote them
    r"blk\.(?P<layer>\d+)\.ffn_(?:(?P<part>gate|up|down|gate_up)_exps\.(?P<kind>weight|bias)"
    r"|(?P<one>gate|up|down)\.(?P<expert>\d+)\.weight)"
)
_BLOCK = re.compile(r"blk\.(\d+)\.")
ROUTED = re.compile(r"_exps\.|\.ffn_(gate|up|down)\.\d+\.weight")
_Type = GGMLQuantizationType
# the form of each type that experts may have
FORM_OF: Mapping[GGMLQuantizationType, str] = {
    _Type.F32: "float32", _Type.F16: "float16", _Type.BF16: "bfloat16",
    **{_Type[kind.removesuffix("_gguf").upper()]: kind for kind in BLOCKS},
}  # fmt: skip
# tables that the model reads, such as the experts of a token: GGML's number -> safetensors' type
INTEGERS: Mapping[int, str] = {_Type[code]: code for code in ("I8", "I16", "I32", "I64")}
_MOST = 1 << 24  # strings of a vocabulary, tensors, keys


class Tensor(NamedTuple):
    """A tensor of a GGUF file. shape: outermost first. kind: GGML's number of its type. offset: bytes in the file."""

    shape: tuple[int, ...]
    kind: int
    offset: int
    path: Path


@dataclass(frozen=True)
class Header:
    """The header of one file, or of all files of a model.

    metadata: values by key; of an array of strings its length, or with `texts` the strings. files: in order of parts.
    """

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]
    files: tuple[Path, ...]

    @property
    def architecture(self) -> str:
        """By llama.cpp's name."""
        return str(self.metadata["general.architecture"])

    @property
    def name(self) -> str:
        """Of the file for people: of a split one, its first part's."""
        return self.files[0].name

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key of the architecture, such as "block_count"."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    @property
    def drafts(self) -> int:
        """Layers after the model's own that predict further tokens; llama.cpp counts them among its blocks."""
        found = self.get("nextn_predict_layers", 0)
        return found if isinstance(found, int) else 0

    def is_draft(self, tensor: str) -> bool:
        """Whether a tensor is of such a layer."""
        layer, blocks = _BLOCK.match(tensor), self.get("block_count", 0)
        return bool(self.drafts and layer and isinstance(blocks, int) and int(layer[1]) >= blocks - self.drafts)

    @property
    def dense(self) -> bool:
        """Whether the model has no routed experts."""
        return not self.get("expert_count") and not any(ROUTED.search(name) for name in self.tensors)


class _Truncated(ValueError):
    """The header says that there is more than the file has."""


class _Reader:
    """Reads on in a file; every length is checked against the file's. texts: arrays of strings are read, too.

    damaged: a string since this was last set is no UTF-8, and has signs in place of the bytes that are none.
    """

    def __init__(self, data: mmap.mmap | bytes, texts: bool) -> None:
        self._data, self._texts, self.at, self.damaged = data, texts, 0, False

    def number(self, code: str) -> Any:
        if struct.calcsize(code) > len(self._data) - self.at:
            raise _Truncated("its header ends after the file")
        (value,) = struct.unpack_from(code, self._data, self.at)
        self.at += struct.calcsize(code)
        return value

    def skip(self) -> None:
        """Go past a string."""
        length = self.number("<Q")
        if length > len(self._data) - self.at:
            raise _Truncated("a string ends after the file")
        self.at += length

    def text(self) -> str:
        first = self.at + 8
        self.skip()
        raw = self._data[first : self.at]
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.damaged = True
            return raw.decode(errors="replace")

    def count(self, what: str) -> int:
        found: int = self.number("<Q")
        if found > _MOST:
            raise ValueError(f"{found} {what}")
        return found

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"a value of type {kind}")
        inner, count = self.number("<I"), self.count("values")
        if inner in _SCALARS:
            code = f"<{count}{_SCALARS[inner][1]}"
            if struct.calcsize(code) > len(self._data) - self.at:
                raise _Truncated("an array ends after the file")
            values = struct.unpack_from(code, self._data, self.at)
            self.at += struct.calcsize(code)
            return list(values)
        if inner != _STRING:
            raise ValueError(f"an array of type {inner}")
        if self._texts:
            return [self.text() for _ in range(count)]
        for _ in range(count):
            self.skip()
        return count


def read_gguf_header(path: Path, *, texts: bool = False) -> Header:
    """Read and check a header: types, shapes, and data within the file.

    Args:
        texts: read arrays of strings too: the vocabulary.

    Raises:
        CheckpointError: unreadable, truncated, malformed, or not a GGUF file.
    """
    try:
        with open(path, "rb") as file:
            if not file.read(1):
                raise _Truncated("it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                if data[:4] == b"FUGG" or data[:8] in (b"GGUF\0\0\0\2", b"GGUF\0\0\0\3"):
                    raise CheckpointError(f"{path} is of the other byte order (big-endian)", _LITTLE_ENDIAN)
                if data[:4] != b"GGUF":
                    raise _not_gguf(path, data[:64])
                return _parse(_Reader(data, texts), len(data), path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})", "make it readable") from error
    except _Truncated as error:
        raise CheckpointError(f"{path} is truncated ({first_problem(error)})", REFETCH) from error
    except (ValueError, struct.error, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{path} is malformed ({first_problem(error)})", REWRITE) from error


def _not_gguf(path: Path, head: bytes) -> CheckpointError:
    if head.startswith(b"version https://git-lfs"):
        return CheckpointError(f"{path} is a Git LFS pointer, not the file that it stands for", "run `git lfs pull`")
    return CheckpointError(f"{path} is not a GGUF file: it begins with {head[:4]!r}", "pass a GGUF file")


def _parse(reader: _Reader, size: int, path: Path) -> Header:
    reader.number("<4s")
    version = reader.number("<I")
    if version not in (2, 3):
        raise ValueError(f"version {version}")
    tensors, keys = reader.count("tensors"), reader.count("keys")
    metadata: dict[str, Any] = {}
    damaged: list[str] = []
    for _ in range(keys):
        key = reader.text()
        if key in metadata:
            raise ValueError(f"the key {key!r} occurs twice")
        reader.damaged = False
        metadata[key] = reader.value(reader.number("<I"))
        if reader.damaged:
            damaged.append(key)
    _refuse_damaged(path, metadata, damaged)
    table = []
    for _ in range(tensors):
        name, dims = reader.text(), reader.number("<I")
        if dims > 4 or not (name.isascii() and name.isprintable()):
            raise ValueError(f"a tensor of {dims} dimensions, or with an unprintable name")
        shape = tuple(reversed([reader.number("<Q") for _ in range(dims)]))
        table.append((name, shape, reader.number("<I"), reader.number("<Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
        raise ValueError(f"alignment {alignment}")
    start = -(-reader.at // alignment) * alignment
    found = {name: Tensor(shape, kind, start + offset, path) for name, shape, kind, offset in table}
    if len(found) != len(table):
        raise ValueError("a tensor's name occurs twice")
    for name, (shape, kind, offset, _) in found.items():
        if kind not in iter(GGMLQuantizationType):
            what = f"tensor {name!r} has the type number {kind}, which today's llama.cpp does not have"
            raise UnsupportedModelError(f"{path}: {what}", EXPERT_REMEDY)
        if offset + tensor_bytes(name, shape, kind) > size:
            raise _Truncated(f"tensor {name!r} ends after the file")
    return Header(metadata, found, (path,))


def _refuse_damaged(path: Path, metadata: Mapping[str, Any], damaged: Sequence[str]) -> None:
    """Refuse strings that are not UTF-8 where they count; a name or a licence is read with signs in their place.

    Raises:
        CheckpointError: a key of the architecture or of the tokenizer has such a string.
    """
    counts = ("tokenizer.", f"{metadata.get('general.architecture')}.", "general.architecture", "general.type")
    for key in damaged:
        if key.startswith(counts):
            own = ", or put the model's own tokenizer.json beside it" if key.startswith("tokenizer.") else ""
            raise CheckpointError(f"{path}: a string of the key {key!r} is not UTF-8", f"{REWRITE}{own}")


def read_gguf(files: Sequence[Path], *, texts: bool = False) -> Header:
    """The header of a model in one file, or in all parts of a split one, in their order.

    llama.cpp reads metadata of the first part alone, and tensors of all.

    Args:
        texts: read arrays of strings too: the vocabulary.

    Raises:
        CheckpointError: a file is unreadable or malformed, or the parts are not those of one model.
    """
    headers = [read_gguf_header(path, texts=texts and not number) for number, path in enumerate(files)]
    first = headers[0]
    if not isinstance(first.metadata.get("general.architecture"), str):
        raise CheckpointError(f"{files[0]} has no key 'general.architecture'", REWRITE)
    if (kind := first.metadata.get("general.type", "model")) != "model":
        raise CheckpointError(f"{files[0]} is of the type {kind!r}, not a model", "pass the model's own file")
    prefixes = (f"{first.architecture}.", "tokenizer.")
    tensors: dict[str, Tensor] = {}
    for number, (path, header) in enumerate(zip(files, headers, strict=True)):
        for key, value in header.metadata.items():
            if number and key.startswith(prefixes) and not _same(value, first.metadata.get(key)):
                what = f"{path} has another {key!r} than {first.name}, whose metadata is the model's"
                raise CheckpointError(what, "write the parts again with llama.cpp's gguf-split")
        wanted = {"split.no": number, "split.count": len(files)} if len(files) > 1 else {"split.no": 0}
        for key, value in wanted.items():
            if header.metadata.get(key, value) != value:
                raise CheckpointError(f"{path} has {key} {header.metadata[key]}, where {value} is expected", _PARTS)
        if twice := next((name for name in header.tensors if name in tensors), None):
            raise CheckpointError(f"{path} has tensor {twice!r}, which another part has", _PARTS)
        tensors |= header.tensors
    count = first.metadata.get("split.count", 1)
    if len(files) == 1 and count > 1:
        raise CheckpointError(f"{files[0]} is a part of {count}, which its name does not say", _PARTS)
    if len(files) > 1 and len(tensors) != first.metadata.get("split.tensors.count", len(tensors)):
        said = first.metadata["split.tensors.count"]
        raise CheckpointError(f"{files[0]} and its other parts have {len(tensors)} tensors, not {said}", _PARTS)
    return Header(first.metadata, tensors, tuple(files))


HEAD_BYTES = 1 << 16  # in which the architecture's keys end, before the vocabulary


def dense_architecture(head: bytes) -> str | None:
    """The architecture of a model whose first bytes show that it has no experts; None: they show nothing like that."""
    reader, found = _Reader(head, texts=False), dict[str, Any]()
    try:
        reader.number("<Q")  # magic and version
        reader.count("tensors")
        for _ in range(reader.count("keys")):
            key = reader.text()
            if key == "tokenizer.ggml.tokens":
                break
            found[key] = reader.value(reader.number("<I"))
    except ValueError:
        return None
    architecture = found.get("general.architecture")
    is_model = f"{architecture}.block_count" in found
    return architecture if is_model and not found.get(f"{architecture}.expert_count") else None


def no_experts(file: Path | str, architecture: str) -> UnsupportedModelError:
    """The refusal of a dense model."""
    what = f"{file} is a dense model (architecture {architecture}): it has no experts"
    return UnsupportedModelError(what, "serve it with llama.cpp: tiermoe offloads routed experts")


def read_experts(files: Sequence[Path]) -> Header:
    """As `read_gguf`, of a model with routed experts.

    Raises:
        UnsupportedModelError: it is dense, or a tensor has a type that its place cannot have.
    """
    header = read_gguf(files)
    if header.dense:
        raise no_experts(files[0], header.architecture)
    for name, (_, number, _, path) in header.tensors.items():
        kind = _Type(number)
        if kind in FORM_OF or number in INTEGERS or header.is_draft(name):
            continue
        if _EXPERTS.fullmatch(name) is not None:
            raise _no_expert_type(name, kind.name, f"{path}: ")
        if not _has_values(kind):
            what = f"{path}: tensor {name!r} has the type {kind.name}, which is not supported"
            raise UnsupportedModelError(what, "use another GGUF file of the model, such as Q4_K_M or Q8_0")
    return header


@cache
def _has_values(kind: GGMLQuantizationType) -> bool:
    """Whether the package can dequantize a type."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _no_expert_type(name: str, kind: str, where: str = "") -> UnsupportedModelError:
    what = f"{where}the experts' tensor {name!r} has the type {kind}, which is not supported for experts"
    return UnsupportedModelError(what, EXPERT_REMEDY)


_PARTS = "put the parts of one model together, named MODEL-00001-of-0000N.gguf, as gguf-split does"


def _same(one: Any, other: Any) -> bool:
    """Whether two values of a key are equal; an array of strings may be read in one header, and counted in another."""
    if isinstance(one, int) and isinstance(other, list):
        return one == len(other)
    return bool(one == other)


def shortest(value: Any) -> Any:
    """A float of 32 bits as the shortest number that means it: 1e-06, not 9.999999974752427e-07."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def unsupported(header: Header, key: str, value: Any) -> UnsupportedModelError:
    shown = str(value) if len(str(value)) <= 60 else f"{str(value)[:57]}..."
    what = f"{header.name}: the key '{header.architecture}.{key}' = {shown} is not supported"
    return UnsupportedModelError(what, _OTHER_FILE)


def count(header: Header, key: str) -> int:
    value = header.get(key)
    if type(value) is not int or not 1 <= value < 1 << 40:
        raise no_number(header, key, value)
    return value


def no_number(header: Header, key: str, value: Any) -> CheckpointError:
    what = f"{header.name}: the key '{header.architecture}.{key}' is {value!r}, not a number"
    return CheckpointError(what, REWRITE)


def tensor_bytes(name: str, shape: tuple[int, ...], kind: int) -> int:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if shape and shape[-1] % block:
        raise ValueError(f"the rows of tensor {name!r} are not whole blocks")
    return math.prod(shape) // block * size


def gguf_files(folder: Path) -> list[Path]:
    """The GGUF files of a folder that make one model: one, or all parts of one. Empty: there is none.

    Raises:
        CheckpointError: there are several models, a part is missing, or a link leads out of the folder.
    """
    there = gguf_in(folder)
    if not there:
        return []
    files = parts_of(there[0])
    if not stands_for_gguf(folder):
        refuse_outside(files, folder)
    if len(files) < len(there):
        other = next(path for path in there if path not in files)
        raise CheckpointError(f"{folder} has the GGUF files of several models ({there[0].name}, {other.name})",
                              "pass the file itself as --model")  # fmt: skip
    return files


def part_names(name: str) -> list[str]:
    """The names of all parts of a split file, by the name of one; else that name alone."""
    own = Path(name).name
    match = SPLIT.fullmatch(own)
    if match is None:
        return [name]
    first, last = match.span("number")
    parts = (f"{own[:first]}{i:05d}{own[last:]}" for i in range(1, int(match["count"]) + 1))
    return [str(Path(name).with_name(part)) for part in parts]


def parts_of(path: Path) -> list[Path]:
    """All parts of a split file, one of which is `path`; else `path` alone. Raises CheckpointError: one is missing."""
    files = [path.with_name(Path(name).name) for name in part_names(str(path))]
    if len(files) == 1:
        return [path]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        what = f"{path.parent} lacks {missing[0]}, a part of the model"
        raise CheckpointError(what, "put all parts into this folder")
    return files


def typed_tensors(header: Header) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type, such as "Q4_K", and shape of every tensor of a model, without layers for drafts."""
    return {
        name: (GGMLQuantizationType(found.kind).name, found.shape)
        for name, found in header.tensors.items()
        if not header.is_draft(name)
    }


def published_gguf(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[int, int, int]:
    """Numbers and bytes of a dense part's matrices that stay in blocks, or are tables; and bytes of those tables.

    Args:
        tensors: as `typed_tensors` has them.
    """
    numbers = nbytes = of_tables = 0
    for name, (kind, shape) in tensors.items():
        if len(shape) != 2:
            continue
        weights, size = GGML_QUANT_SIZES[_Type[kind]]
        each = math.prod(shape) // weights * size
        table = is_table(name, each) and (name != "token_embd.weight" or "output.weight" in tensors)
        if table or FORM_OF.get(_Type[kind]) in BLOCKS:
            numbers, nbytes, of_tables = numbers + math.prod(shape), nbytes + each, of_tables + table * each
    return numbers, nbytes, of_tables


def expert_layers(tensors: Iterable[str]) -> int:
    """How many layers have routed experts. tensors: names."""
    return len({match["layer"] for name in tensors if (match := _EXPERTS.fullmatch(name)) is not None})


def expert_forms(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[tuple[ExpertForm, bool]] | None:
    """The form of each MoE layer's experts, and whether they are mapped; None: they are dequantized, without a gate.

    Args:
        tensors: as `typed_tensors` has them.

    Raises:
        CheckpointError: a layer lacks a matrix, or one has another shape. UnsupportedModelError: of an unknown type.
    """
    layers: dict[int, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for name, (kind, shape) in tensors.items():
        if (match := _EXPERTS.fullmatch(name)) is None:
            continue
        if FORM_OF.get(_Type[kind]) is None and match["kind"] != "bias":
            raise _no_expert_type(name, kind)
        layer, part = layers.setdefault(int(match["layer"]), {}), f"{match['part']}.{match['kind']}"
        if match["one"] is not None:  # of experts apart, which have one form, or are refused when they are prepared
            part, shape = f"{match['one']}.weight", (1, *shape)
        layer[part] = (kind, shape)
    if not any(name.startswith("gate") for parts in layers.values() for name in parts):
        return None
    try:
        return [_expert_form(parts) for _, parts in sorted(layers.items())]
    except (FormError, KeyError, IndexError, TypeError) as error:
        what = f"the experts of the GGUF file are not gate, up and down ({first_problem(error)})"
        raise CheckpointError(what, REWRITE) from error


def _expert_form(parts: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[ExpertForm, bool]:
    """The form of a layer's experts, and whether slots want it as it lies: gpt-oss's layout is repacked."""
    matrices: dict[str, Any] = {}
    for name, (kind, shape) in parts.items():
        if name.endswith("weight"):
            matrices[name.removesuffix(".weight")] = MatrixForm(FORM_OF[_Type[kind]], shape[1], shape[2])
    if "down.bias" not in parts:
        return ExpertForm(**matrices), True
    gate, _ = matrices.pop("gate"), matrices.pop("up")
    both = replace(gate, outputs=2 * gate.outputs)
    return ExpertForm(gate_up=both, **matrices, bias=parts["down.bias"][0]), False
