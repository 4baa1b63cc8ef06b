"""Small arrays to a GPU in every layer: no wait, and no place in the copy engines' queue, where experts are.

The host writes an array into a ring of pinned buffers, and a kernel on the compute stream reads it there. Where kernels
cannot read host memory, the array is copied.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .runtime import GpuRuntime, runtime_of, wait_for

TORCH_DTYPES = {
    np.dtype(np.float32): torch.float32, np.dtype(np.float16): torch.float16, np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32, np.dtype(np.int16): torch.int16, np.dtype(np.uint8): torch.uint8,
}  # fmt: skip

_INT32 = np.dtype(np.int32)
_KINDS = 16  # shapes and types of a buffer whose views are kept: decode has few
_Kind = tuple[tuple[int, ...], np.dtype[Any]]


class TableRing:
    """A ring of pinned host buffers; one is reused only after the GPU has read it. Thread-safe.

    The buffers are allocated at once, since allocating pinned memory may wait for the GPU; a larger array replaces its
    buffer.

    Args:
        entries: buffers, that is, arrays in flight before `put` waits; a forward has a few for each layer.
        nbytes: of a buffer.

    Attributes:
        waits: how often `put` waited for the GPU.
    """

    def __init__(self, runtime: GpuRuntime, entries: int = 256, nbytes: int = 16384) -> None:
        self._runtime, self._lock = runtime, threading.Lock()
        self._buffers = list(runtime.pinned(entries * nbytes).view(entries, nbytes))
        self._views: list[dict[_Kind, tuple[NDArray[Any], torch.Tensor]]] = [{} for _ in range(entries)]
        self._events: list[Any] = [None] * entries
        self._next = self.waits = 0

    @property
    def mapped(self) -> bool:
        """Whether a kernel reads host memory; else arrays are copied."""
        return self._runtime.mapped

    def put(self, table: Sequence[int] | NDArray[Any]) -> torch.Tensor:
        """The array (numbers: as int32) on the device, for later work on the current stream."""
        shape, dtype = (table.shape, table.dtype) if isinstance(table, np.ndarray) else ((len(table),), _INT32)
        runtime = self._runtime
        target = torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=runtime.device)
        if 0 in shape:
            return target
        with self._lock:
            at = self._next
            self._next = (at + 1) % len(self._buffers)
            event = self._events[at]
            if event is None:
                event = self._events[at] = runtime.event(timing=False)
            elif not runtime.query(event):
                self.waits += 1
                wait_for(runtime, event)
            array, source = self._views[at].get((shape, dtype)) or self._view(at, shape, dtype)
            array[...] = table
            runtime.kernel_copy(target, source)
            runtime.record(event, runtime.current())
        return target

    def _view(self, at: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[NDArray[Any], torch.Tensor]:
        """A buffer as an array of this kind, on the host and for kernels; it grows where it is too small."""
        nbytes, views = math.prod(shape) * dtype.itemsize, self._views[at]
        if len(self._buffers[at]) < nbytes:
            self._buffers[at] = self._runtime.pinned(1 << (nbytes - 1).bit_length())
            views.clear()
        elif len(views) >= _KINDS:
            views.clear()
        with torch.inference_mode(False):  # a forward may make it, and others use it
            source = self._buffers[at][:nbytes].view(TORCH_DTYPES[dtype]).view(shape)
        found = views[shape, dtype] = source.numpy(), source
        return found


@cache
def ring_of(device: torch.device) -> TableRing:
    """The ring of a GPU; its engines share it."""
    return TableRing(runtime_of(device))
