"""Small arrays to a GPU in every layer: no wait, and no place in the copy engines' queue, where experts are.

The host writes an array into a ring of pinned buffers, and a kernel on the compute stream reads it there. Where kernels
cannot read host memory, the array is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ....kernels.device import on_device
from ....kernels.expert_ffn import Tables
from .runtime import GpuRuntime, runtime_of

TORCH_DTYPES = {
    np.dtype(np.float32): torch.float32, np.dtype(np.float16): torch.float16, np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32, np.dtype(np.int16): torch.int16, np.dtype(np.uint8): torch.uint8,
}  # fmt: skip

_SECTIONS = 8  # of a ring, marked as a whole: an event for each buffer would cost as much as the copy


class TableRing(Tables):
    """A ring of pinned host buffers; one is reused only after the GPU has read it. Thread-safe.

    The buffers are allocated at once, since allocating pinned memory may wait for the GPU; a larger array replaces its
    buffer.

    Args:
        entries: buffers, that is, arrays in flight before `put` waits; a forward has a few for each layer.
        nbytes: of a buffer.

    Attributes:
        waits: how often a table waited for the GPU.
    """

    def __init__(self, runtime: GpuRuntime, entries: int = 256, nbytes: int = 16384) -> None:
        self._runtime, copier = runtime, runtime.copier
        self._buffers = list(runtime.pinned(entries * nbytes).view(entries, nbytes))
        self._streams: list[list[Any]] = [[] for _ in range(_SECTIONS)]  # that read from a section since it was entered
        self._events: list[list[Any]] = [[] for _ in range(_SECTIONS)]  # of these, once it was left
        self._spare: list[Any] = []
        self.waits = 0
        launch, block, stream = (None, 0, None) if copier is None else copier[:3]
        buffers = [buffer.data_ptr() for buffer in self._buffers]
        super().__init__(buffers, nbytes, _SECTIONS, launch, block, stream)

    @property
    def mapped(self) -> bool:
        """Whether a kernel reads host memory; else arrays are copied."""
        return self._runtime.mapped

    def put(self, table: Sequence[int] | NDArray[Any]) -> torch.Tensor:
        """The array (numbers: as int32) on the device, for later work on the current stream."""
        array = np.ascontiguousarray(table, None if isinstance(table, np.ndarray) else np.int32)
        device = self._runtime.device
        target = torch.empty(array.shape, dtype=TORCH_DTYPES[array.dtype], device=device)
        with on_device(device):
            self.write(target, array)
        return target

    # what `ring.hpp` calls

    def turned(self, left: int, entered: int) -> None:
        """A section is left and another entered, once what was read from that has been read."""
        runtime, events = self._runtime, self._events[entered]
        for stream in self._streams[left]:
            event = self._spare.pop() if self._spare else runtime.event(timing=False)
            runtime.record(event, stream)
            self._events[left].append(event)
        self._streams[left].clear()
        while events:
            if not runtime.query(events[-1]):
                self.waits += 1
                runtime.wait(events[-1])
            self._spare.append(events.pop())

    def read_by_this_stream(self, section: int) -> None:
        """The current stream is about to read from a section."""
        stream = self._runtime.current()
        if stream not in self._streams[section]:
            self._streams[section].append(stream)

    def grown(self, at: int, nbytes: int) -> int:
        """The address of a buffer that has room for so many bytes."""
        self._buffers[at] = self._runtime.pinned(nbytes)
        return self._buffers[at].data_ptr()

    def source(self, at: int, nbytes: int, target: torch.Tensor) -> torch.Tensor:
        """A buffer's first bytes as a tensor of the target's type."""
        return self._buffers[at][:nbytes].view(target.dtype)

    def copied(self, at: int, nbytes: int, target: torch.Tensor) -> None:
        """Copy from a buffer where native code cannot."""
        source = self.source(at, nbytes, target)
        self._runtime.kernel_copy(target.view(-1)[: len(source)], source)


@cache
def ring_of(device: torch.device) -> TableRing:
    """The ring of a GPU; its engines share it."""
    return TableRing(runtime_of(device))
