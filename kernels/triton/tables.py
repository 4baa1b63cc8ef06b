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

    Args:
        device: where the tables are read.
        entries: buffers. As many tables can be under way before `put` waits; a forward has a few for each layer.
        rows: of a buffer at first; it grows to what comes.
        columns: of every table.

    Attributes:
        mapped: whether a kernel reads host memory; False: tables are copied.
        waits: how often `put` had to wait for the GPU.
    """

    def __init__(self, device: torch.device, entries: int = 128, rows: int = 64, columns: int = 8) -> None:
        self._device, self._rows, self._columns = device, rows, columns
        self._buffers: list[torch.Tensor | None] = [None] * entries
        self._events: list[torch.cuda.Event | None] = [None] * entries
        self._next = self.waits = 0
        self.mapped = True
        if device.type == "cuda":
            self.mapped = self._reads_host_memory()

    def put(self, table: Sequence[Sequence[int]] | NDArray[np.int32]) -> torch.Tensor:
        """The table as int32 [rows, columns] on the device, for what is enqueued on the current stream from now on."""
        if self._device.type == "cpu":
            return torch.from_numpy(np.array(table, dtype=np.int32)).view(len(table), self._columns)
        at, self._next = self._next, (self._next + 1) % len(self._buffers)
        event = self._events[at]
        if event is None:
            event = self._events[at] = torch.cuda.Event()
        elif not event.query():
            self.waits += 1
            event.synchronize()
        buffer = self._buffers[at]
        if buffer is None or len(buffer) < len(table):
            rows = max(self._rows, triton.next_power_of_2(len(table)))
            buffer = self._buffers[at] = torch.empty((rows, self._columns), dtype=torch.int32, pin_memory=True)
        source = buffer[: len(table)]
        source.numpy()[:] = table
        target = torch.empty(source.shape, dtype=torch.int32, device=self._device)
        self._send(source, target)
        event.record(torch.cuda.current_stream(self._device))
        return target

    def _send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if self.mapped:
            count = source.numel()
            _fetch[(triton.cdiv(count, _BLOCK),)](source, target, count, BLOCK=_BLOCK, num_warps=4)
        else:
            target.copy_(source, non_blocking=True)

    def _reads_host_memory(self) -> bool:
        """Try it once; this waits for the GPU."""
        table = [[7 * i + j for j in range(self._columns)] for i in range(300)]
        try:
            return self.put(table).tolist() == table
        except (RuntimeError, ValueError):  # Triton: the pointer cannot be accessed
            return False
