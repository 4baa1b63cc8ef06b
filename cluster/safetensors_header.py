"""The header of a safetensors file: what tensors there are, without reading one."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from ..actors.tensor_file import MAX_HEADER_BYTES
from ..errors import CheckpointError


def read_header(path: Path) -> dict[str, Any]:
    """Of every tensor by name: dtype, shape, offsets.

    Raises:
        CheckpointError: the file cannot be read, or is none.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"header of {length} bytes")
            header = json.loads(file.read(length))
        if not isinstance(header, dict):
            raise ValueError("header is not an object")
        header.pop("__metadata__", None)
        if wrong := [name for name, tensor in header.items() if not _has_shape(tensor)]:
            raise ValueError(f"'{wrong[0]}' has no shape")
        return header
    except (OSError, ValueError, struct.error) as error:
        raise CheckpointError(f"'{path}' is not a safetensors file: {error}", "download it again") from error


def _has_shape(tensor: Any) -> bool:
    shape = tensor.get("shape") if isinstance(tensor, dict) else None
    return isinstance(shape, list) and all(isinstance(size, int) for size in shape)
