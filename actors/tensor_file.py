"""Tensor files: ordinary safetensors whose data starts at a multiple of 64 bytes, laid out and checked here.

So mapped arrays are aligned for vector loads. NumPy-free and torch-free on purpose: every process of a node may import
it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ..errors import TierMoeError
from .checksummed import first_problem

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


class TensorSpec(BaseModel):
    """One tensor of a safetensors file.

    Attributes:
        dtype: safetensors type code, such as "BF16".
        offset: of the first byte, from the start of the file.
        nbytes: length of the data.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: Bytes
    nbytes: Bytes


def build_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, tuple[TensorSpec, ...]]:
    """Lay tensors out in order and make the safetensors header for them.

    Args:
        tensors: type code and shape by name.

    Returns:
        The first bytes of the file, a multiple of `DATA_ALIGNMENT` long, and where each tensor lies.
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


def read_header(path: Path, error: Callable[[str], TierMoeError]) -> tuple[bytes, tuple[TensorSpec, ...]]:
    """Read and check the header of a safetensors file: types, shapes, and data without gap or overlap.

    Args:
        error: makes the error to raise from what is wrong.

    Returns:
        The raw header, length field included, and the tensors in the order in which they lie.

    Raises:
        TierMoeError: what `error` makes, when the file is absent, truncated or malformed.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            length = int.from_bytes(head, "little")
            if len(head) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise error(f"{path} is truncated or not a safetensors file ({size} bytes)")
            text = file.read(length)
    except OSError as cause:
        raise error(f"{path} cannot be read ({cause.strerror})") from cause
    try:
        entries = json.loads(text, object_pairs_hook=_no_duplicates)
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
        raise error(f"{path} has {size} bytes where its header needs {end}")
    return head + text, tuple(specs)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _tensor_spec(name: str, entry: Any, data_start: int) -> TensorSpec:
    """One entry of a header, checked: shape x item size is the length of the data."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r} lacks dtype, shape or data_offsets")
    if not (name.isascii() and name.isprintable()):  # it would end up in error messages and other files
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
