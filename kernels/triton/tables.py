"""Small integer tables to a GPU, without a wait for it and without its copy engines.

A copy engine would queue a table behind whole experts on their way to the cache. Here a kernel on the compute stream
reads the table from pinned host memory in a few microseconds. Where the GPU cannot read host memory, the table is
copied.
"""

# mypy: allow-untyped-defs
# the types of a kernel's arguments are those of its launch
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

_BLOCK = 1024


@triton.jit(do_not_specialize=["count"])
def _fetch(source, target, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, mask=i < count, other=0), mask=i < count)


class TableRing:
    """A ring of pinned host buffers; one is reused only after the GPU has read it. For one thread at a time.

    The buffers are allocated at once, since allocating pinned memory may wait for the GPU; a larger table replaces its
    buffer. On the CPU (Triton's interpreter) a table is a plain tensor.

    Args:
        device: that reads the tables.
        entries: buffers, that is, tables in flight before `put` waits; a forward has a few for each layer.
        numbers: of a buffer.

    Attributes:
        mapped: whether a kernel reads host memory; False: tables are copied.
        waits: how often `put` waited for the GPU.
    """

    def __init__(self, device: torch.device, entries: int = 128, numbers: int = 4096) -> None:
        self._device = device
        self._next = self.waits = 0
        self.mapped = True
        if device.type == "cuda":
            slab = torch.empty((entries, numbers), dtype=torch.int32, pin_memory=True)
            self._buffers = list(slab)
            self._arrays = [buffer.numpy() for buffer in self._buffers]  # the same memory
            self._events: list[torch.cuda.Event | None] = [None] * entries
            self.mapped = self._reads_host_memory()

    def put(self, table: Sequence[int] | NDArray[np.int32]) -> torch.Tensor:
        """The numbers as int32 [n] on the device, for later work on the current stream."""
        count, device = len(table), self._device
        if device.type == "cpu":
            return torch.from_numpy(np.array(table, dtype=np.int32))
        at = self._next
        self._next = (at + 1) % len(self._buffers)
        event, buffer = self._events[at], self._buffers[at]
        if event is None:
            event = self._events[at] = torch.cuda.Event()
        elif not event.query():
            self.waits += 1
            event.synchronize()
        if len(buffer) < count:
            buffer = torch.empty(triton.next_power_of_2(count), dtype=torch.int32, pin_memory=True)
            self._buffers[at], self._arrays[at] = buffer, buffer.numpy()
        self._arrays[at][:count] = table
        target = torch.empty(count, dtype=torch.int32, device=device)
        if self.mapped:
            _fetch[(triton.cdiv(count, _BLOCK),)](buffer, target, count, BLOCK=_BLOCK, num_warps=4)
        else:
            target.copy_(buffer[:count], non_blocking=True)
        event.record(torch.cuda.current_stream(device))
        return target

    def _reads_host_memory(self) -> bool:
        """Try it once; waits for the GPU."""
        table = list(range(3, 3000))
        try:
            with torch.cuda.device(self._device):
                return self.put(table).tolist() == table
        except Exception:  # Triton cannot access the pointer, or the C compiler of its launchers failed
            return False
