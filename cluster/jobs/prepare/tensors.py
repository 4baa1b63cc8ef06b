"""Tensors read from checkpoint files into ordinary memory, and looked at.

Mapping the files instead would leave every page that was touched on this process's account, and the
peak memory of a conversion would grow with the checkpoint.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator

import torch

from ....errors import CheckpointError
from .checkpoint import REFETCH, TensorEntry

BLOCK_BYTES = 16 << 20  # tensors are looked at and written in runs of this length

_TORCH_TYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_TYPE_CODES = {dtype: code for code, dtype in _TORCH_TYPES.items()}


def torch_dtype(code: str) -> torch.dtype:
    """The torch type of a safetensors type code."""
    return _TORCH_TYPES[code]


def type_code(dtype: torch.dtype) -> str:
    """The safetensors type code of a torch type.

    Raises:
        CheckpointError: there is none.
    """
    if dtype not in _TYPE_CODES:
        raise CheckpointError(f"tensors of type {dtype} cannot be stored", "convert the checkpoint to bfloat16")
    return _TYPE_CODES[dtype]


def read_rows(entry: TensorEntry, start: int, stop: int) -> torch.Tensor:
    """Entries start..stop-1 of a tensor's first dimension, in memory of their own.

    Raises:
        CheckpointError: the file ends before the tensor does, or cannot be read.
    """
    shape = (stop - start, *entry.spec.shape[1:]) if entry.spec.shape else ()
    dtype = torch_dtype(entry.spec.dtype)
    nbytes = (stop - start) * entry.row_nbytes
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    # Pages of its own: the allocator keeps freed megabytes, and a layer is hundreds of such tensors.
    pages = mmap.mmap(-1, nbytes)
    buffer = memoryview(pages)
    done = 0
    try:
        with open(entry.path, "rb", buffering=0) as file:
            file.seek(entry.spec.offset + start * entry.row_nbytes)
            while done < len(buffer):
                count = file.readinto(buffer[done:])
                if not count:
                    raise CheckpointError(f"{entry.path} was truncated while it was read", REFETCH)
                done += count
    except OSError as error:
        raise CheckpointError(f"{entry.path} cannot be read ({error.strerror})", REFETCH) from error
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def read_tensor(entry: TensorEntry) -> torch.Tensor:
    """A whole tensor, in memory of its own.

    Raises:
        CheckpointError: as `read_rows`.
    """
    return read_rows(entry, 0, entry.rows)


def read_blocks(entry: TensorEntry) -> Iterator[torch.Tensor]:
    """A tensor in runs of rows of at most 16 MiB (or one row), in order.

    Raises:
        CheckpointError: as `read_rows`.
    """
    step = max(1, BLOCK_BYTES // max(1, entry.row_nbytes))
    for start in range(0, entry.rows, step):
        yield read_rows(entry, start, min(start + step, entry.rows))


def meta_tensor(entry: TensorEntry) -> torch.Tensor:
    """A tensor of the same type and shape without data."""
    return torch.empty(entry.spec.shape, dtype=torch_dtype(entry.spec.dtype), device="meta")


def loader(entry: TensorEntry, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """What transformers' converters call to get a tensor when they need it."""
    return lambda: read_tensor(entry).to(dtype)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor, in place."""
    if math.prod(tensor.shape) == 0:
        return memoryview(b"")
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a contiguous tensor holds no NaN and no infinity; integers always pass."""
    if not tensor.is_floating_point():
        return True
    # A finite sum proves it, and is many times faster; the sum of finite numbers may still overflow.
    return all(
        bool(torch.isfinite(chunk.sum())) or bool(torch.isfinite(chunk).all())
        for chunk in tensor.view(-1).split(BLOCK_BYTES // 2)
    )
