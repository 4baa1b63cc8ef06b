"""Reads tensors of a checkpoint.

Into ordinary memory: the touched pages of mapped files count as this process's memory, so its peak would grow with the
checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from ...actors.engine.model.model import TORCH_TYPES
from ...errors import CheckpointError
from .matrices import Entry, QuantizedEntry
from .weight_files import read_bytes

BLOCK_BYTES = 16 << 20  # of rows that are read, checked and written together
_ROWS = 128  # of quantized matrices: those of a block of FP8
_TYPE_CODES = {dtype: code for code, dtype in TORCH_TYPES.items()}


def type_code(dtype: torch.dtype) -> str:
    """The safetensors type code of a torch type. Raises CheckpointError: there is none."""
    if dtype not in _TYPE_CODES:
        raise CheckpointError(f"tensors of type {dtype} cannot be stored", "convert the checkpoint to bfloat16")
    return _TYPE_CODES[dtype]


def read_rows(entry: Entry, start: int, stop: int) -> torch.Tensor:
    """Entries start..stop-1 of a tensor's first dimension, dequantized to float32 if it is quantized.

    Raises:
        CheckpointError: unreadable, truncated, or not of the form that the configuration says.
    """
    if isinstance(entry, QuantizedEntry):
        return torch.from_numpy(np.ascontiguousarray(entry.dequantized(start, stop)))
    shape = (stop - start, *entry.spec.shape[1:]) if entry.spec.shape else ()
    dtype = TORCH_TYPES[entry.spec.dtype]
    data = read_bytes(entry, start * entry.row_nbytes, (stop - start) * entry.row_nbytes)
    return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def read_blocks(entry: Entry) -> Iterator[torch.Tensor]:
    """A tensor in runs of rows of about `BLOCK_BYTES` at most (or `_ROWS` rows), in order. Raises as `read_rows`."""
    step = max(1, BLOCK_BYTES // max(1, entry.row_nbytes))
    if isinstance(entry, QuantizedEntry):
        step = entry.rows if entry.repack is not None else max(1, step // _ROWS) * _ROWS
    for start in range(0, entry.rows, step):
        yield read_rows(entry, start, min(start + step, entry.rows))


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor, in place."""
    if math.prod(tensor.shape) == 0:
        return memoryview(b"")
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a contiguous tensor holds no NaN and no infinity; integers always pass."""
    if not tensor.is_floating_point():
        return True
    # A finite sum proves it many times faster; only a sum that overflows needs the second test.
    return all(
        bool(torch.isfinite(chunk.sum())) or bool(torch.isfinite(chunk).all())
        for chunk in tensor.view(-1).split(BLOCK_BYTES // 2)
    )
