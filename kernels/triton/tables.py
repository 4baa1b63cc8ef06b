"""Small tables of integers on their way to a GPU, without waiting for it and without its copy engines.

A copy engine carries out one host-to-device copy after another, so that a table copied by it would queue behind whole
experts on their way to the cache. Here a kernel reads the table out of pinned host memory, which the GPU sees, and
writes it to device memory: a few microseconds on the compute stream whatever the engines do. Where the GPU cannot read
host memory so, the table is copied.
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
    """A ring of pinned host buffers, each of which is written again only when the GPU has read it.

    On the CPU (Triton's interpreter) a table is a plain tensor. One thread uses it at a time.

    The buffers are allocated at once, since allocating pinned memory may wait for the GPU; only a table that is too
    large for its buffer has that replaced.

    Args:
        device: where the tables are read.
        entries: buffers. As many tables can be under way before `put` waits; a forward has a few for each layer.
        numbers: that a buffer holds.

    Attributes:
        mapped: whether a kernel reads host memory; False: tables are copied.
        waits: how often `put` had to wait for the GPU.
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
        """The numbers as int32 [n] on the device, for what is enqueued on the current stream from now on."""
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
        """Try it once; this waits for the GPU."""
        table = list(range(3, 3000))
        try:
            with torch.cuda.device(self._device):
                return self.put(table).tolist() == table
        except Exception:  # Triton: the pointer cannot be accessed, or whatever the C compiler of its launchers says
            return False
