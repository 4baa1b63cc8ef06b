"""The headers of GGUF files, read without the weights: metadata, and the type and place of every tensor.

They are read here and not by `gguf.GGUFReader`, which makes an array of every string of the vocabulary and does not
bound what a damaged file makes it read. Sizes of blocks and names of types are the package's.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ..actors.store.format import first_problem
from ..errors import CheckpointError, FormError, UnsupportedModelError
from ..kernels.forms import KINDS, ExpertForm, MatrixForm

SUFFIX = ".gguf"
REFETCH = "download the checkpoint again"
SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
EXPERT_REMEDY = "use a GGUF file of Q8_0, Q4_0, Q4_K, Q5_K, Q6_K, MXFP4, F16 or BF16"
_EXPERTS = re.compile(r"blk\.(?P<layer>\d+)\.ffn_(?P<part>(?:gate|up|down|gate_up)_exps\.(?:weight|bias))")
_FORMS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "MXFP4": "mxfp4_gguf", "Q5_0": "q8_0"}
_MOST = 1 << 24  # strings of a vocabulary, tensors, keys


@dataclass(frozen=True)
class Header:
    """The header of one file. metadata: strings and numbers by key; of an array of strings its length. data: bytes."""

    metadata: dict[str, Any]
    tensors: dict[str, tuple[tuple[int, ...], int, int]]  # shape, outermost first; type; offset in the file

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))


class _Reader:
    """Reads on in a file; every length is checked against the file's."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self.at = data, 0

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self._data, self.at)
        self.at += struct.calcsize(code)
        return value

    def text(self) -> str:
        length = self.number("<Q")
        if length > len(self._data) - self.at:
            raise ValueError("a string ends after the file")
        self.at += length
        return self._data[self.at - length : self.at].decode()

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
            code = _SCALARS[inner][1]
            values = struct.unpack_from(f"<{count}{code}", self._data, self.at)
            self.at += struct.calcsize(f"<{count}{code}")
            return list(values)
        if inner != _STRING:
            raise ValueError(f"an array of type {inner}")
        for _ in range(count):
            length = self.number("<Q")
            if length > len(self._data) - self.at:
                raise ValueError("a string ends after the file")
            self.at += length
        return count


def read_gguf_header(path: Path) -> Header:
    """Read and check a header: types, shapes, and data within the file.

    Raises:
        CheckpointError: unreadable, truncated, malformed, or not a GGUF file.
    """
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Reader(data), len(data))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})", REFETCH) from error
    except (ValueError, struct.error, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{path} is not a whole GGUF file ({first_problem(error)})", REFETCH) from error


def _parse(reader: _Reader, size: int) -> Header:
    if reader.number("<4s") != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    version = reader.number("<I")
    if version not in (2, 3):
        raise ValueError(f"version {version}")
    tensors, keys = reader.count("tensors"), reader.count("keys")
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        key = reader.text()
        metadata[key] = reader.value(reader.number("<I"))
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
    found = {name: (shape, kind, start + offset) for name, shape, kind, offset in table}
    if len(found) != len(table):
        raise ValueError("a tensor's name occurs twice")
    for name, (shape, kind, offset) in found.items():
        if offset + tensor_bytes(name, shape, kind) > size:
            raise ValueError(f"tensor {name!r} ends after the file")
    return Header(metadata, found)


def tensor_bytes(name: str, shape: tuple[int, ...], kind: int) -> int:
    if kind not in iter(GGMLQuantizationType):
        raise ValueError(f"tensor {name!r} is of the unknown type {kind}")
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if shape and shape[-1] % block:
        raise ValueError(f"the rows of tensor {name!r} are no whole blocks")
    return math.prod(shape) // block * size


def gguf_files(folder: Path) -> list[Path]:
    """The GGUF files of a folder that make one model: one, or all parts of one. Empty: there is none.

    Raises:
        CheckpointError: there are several models, or a part is missing.
    """
    there = sorted(path for path in folder.iterdir() if path.suffix == SUFFIX and not path.name.startswith("mmproj"))
    if not there:
        return []
    files = parts_of(there[0])
    if len(files) < len(there):
        other = next(path for path in there if path not in files)
        raise CheckpointError(f"{folder} has the GGUF files of several models ({there[0].name}, {other.name})",
                              "pass the file itself as --model")  # fmt: skip
    return files


def part_names(name: str) -> list[str]:
    """The names of all parts of a split file, by the name of one; else that name alone."""
    match = SPLIT.fullmatch(Path(name).name)
    if match is None:
        return [name]
    count = int(match["count"])
    parts = (f"{match['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1))
    return [str(Path(name).with_name(part)) for part in parts]


def parts_of(path: Path) -> list[Path]:
    """All parts of a split file, one of which is `path`; else `path` alone. Raises CheckpointError: one is missing."""
    files = [path.with_name(Path(name).name) for name in part_names(str(path))]
    if len(files) == 1:
        return [path]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"{path.parent} lacks {missing[0]}, a part of the model", REFETCH)
    return files


def tensors_of_gguf(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type, such as "Q4_K", and shape of every tensor of a folder's GGUF files. Raises CheckpointError: malformed."""
    return {
        name: (GGMLQuantizationType(kind).name, shape)
        for path in gguf_files(folder)
        for name, (shape, kind, _) in read_gguf_header(path).tensors.items()
    }


def expert_forms(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[tuple[ExpertForm, bool]]:
    """The form of each MoE layer's experts, and whether they are mapped. tensors: as `tensors_of_gguf` has them.

    Raises:
        CheckpointError: a layer lacks a matrix, or one has another shape. UnsupportedModelError: of an unknown type.
    """
    layers: dict[int, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for name, found in tensors.items():
        if match := _EXPERTS.fullmatch(name):
            layers.setdefault(int(match["layer"]), {})[match["part"].replace("_exps", "")] = found
    try:
        return [_expert_form(parts) for _, parts in sorted(layers.items())]
    except (FormError, KeyError, IndexError, TypeError) as error:
        what = f"the experts of the GGUF file are no gate, up and down ({first_problem(error)})"
        raise CheckpointError(what, REFETCH) from error


def _expert_form(parts: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[ExpertForm, bool]:
    """The form of a layer's experts, and whether slots want it as it lies: Q5_0 and gpt-oss's layout are repacked."""
    matrices: dict[str, Any] = {}
    for name, (kind, shape) in parts.items():
        form = _FORMS.get(kind, kind.lower())
        if form not in KINDS:
            raise UnsupportedModelError(f"the experts have the GGUF type {kind}, which is not supported", EXPERT_REMEDY)
        if name.endswith("weight"):
            matrices[name.removesuffix(".weight")] = MatrixForm(form, shape[1], shape[2])
    if "down.bias" not in parts:
        return ExpertForm(**matrices), all(kind != "Q5_0" for kind, _ in parts.values())
    gate, _ = matrices.pop("gate"), matrices.pop("up")
    both = replace(gate, outputs=2 * gate.outputs)
    return ExpertForm(gate_up=both, **matrices, bias=parts["down.bias"][0]), False
