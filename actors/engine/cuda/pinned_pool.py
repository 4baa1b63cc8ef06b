"""Pinned host memory that is used for moments: by a message on its way, or by a copy.

    lease (bytes) -> a NumPy array -> views of it anywhere -> nothing refers to it any more -> leased again

Memory is not given back by a call, which whoever fails would forget: an array, every view of it and every message that
holds one keep it, and the last that goes returns it. What the GPU still reads or writes is kept besides until the
event after that copy is done.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

_SMALLEST = 64 * 1024  # bytes of a block; all are powers of two, as the allocator of pinned memory rounds up to them
_REMEMBERED = 256  # tensors over arrays: a few kinds, in a few blocks
_DTYPES = {
    np.dtype(np.float32): torch.float32, np.dtype(np.float16): torch.float16, np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32, np.dtype(np.int16): torch.int16, np.dtype(np.uint8): torch.uint8,
}  # fmt: skip


class PinnedRuntime(Protocol):
    """What the pool needs of a GPU; `cuda.runtime.GpuRuntime` has it."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Pinned host memory [nbytes], uint8."""
        ...

    def query(self, event: Any) -> bool:
        """Whether an event is done."""
        ...


class _Block(NamedTuple):
    address: int
    memory: torch.Tensor  # uint8


class _Lease:
    """The base of the arrays that use a block."""

    def __init__(self, block: _Block, home: deque[_Block], nbytes: int) -> None:
        self._block, self._home = block, home
        self.__array_interface__ = {"data": (block.address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        self._home.append(self._block)  # no lock: Python may come here from anywhere


class PinnedPool:
    """Blocks of pinned memory, allocated when they are first needed and kept.

    `lease` may be called by any thread.

    Args:
        runtime: allocates, and knows which events are done.
        most_bytes: of all blocks together.

    Attributes:
        nbytes: of all blocks.
        refused: leases for which there was no room.
        problem: why it has less memory than it may; None: nothing was refused by the driver.
    """

    def __init__(self, runtime: PinnedRuntime, most_bytes: int) -> None:
        self._runtime, self._most = runtime, most_bytes
        self._free: dict[int, deque[_Block]] = {}
        size = _SMALLEST
        while size <= most_bytes:
            self._free[size] = deque()
            size *= 2
        self._lock = threading.Lock()
        self._blocks: tuple[_Block, ...] = ()  # by address
        self._tensors: dict[tuple[int, np.dtype[Any], tuple[int, ...]], torch.Tensor] = {}
        self._under_way: deque[tuple[Any, object]] = deque()
        self._sweeping = threading.Lock()
        self.nbytes = self.refused = 0
        self.problem: str | None = None

    def lease(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Memory [nbytes] at a multiple of 64, with anything in it; None: there is no room now."""
        self._sweep()
        size = max(_SMALLEST, 1 << (nbytes - 1).bit_length()) if nbytes > 1 else _SMALLEST
        while size in self._free:
            try:
                block = self._free[size].pop()
            except IndexError:
                found = self._allocate(size)
                if found is None:
                    size *= 2  # a larger one may lie idle
                    continue
                block = found
            return np.asarray(_Lease(block, self._free[size], nbytes))
        self.refused += 1
        return None

    def keep(self, event: Any, held: object) -> None:
        """Hold memory until the event is done. Events follow each other, as on one stream."""
        self._under_way.append((event, held))

    def tensor(self, array: NDArray[Any]) -> torch.Tensor | None:
        """The pinned tensor over an array; None where that lies elsewhere, has gaps or is of no type known here."""
        if not array.flags.c_contiguous:
            return None
        address: int = array.__array_interface__["data"][0]
        key = (address, array.dtype, array.shape)
        known = self._tensors.get(key)  # a decode step's are where the last one's were
        if known is not None:
            return known
        blocks = self._blocks
        place = bisect_right(blocks, address, key=_address) - 1
        if place < 0:
            return None
        block = blocks[place]
        begin = address - block.address
        dtype = _DTYPES.get(array.dtype)
        if dtype is None or begin + array.nbytes > block.memory.nbytes:
            return None
        with torch.inference_mode(False):  # as below
            found = block.memory[begin : begin + array.nbytes].view(dtype).view(array.shape)
        if len(self._tensors) >= _REMEMBERED:
            self._tensors.clear()
        self._tensors[key] = found
        return found

    @property
    def under_way(self) -> int:
        """Copies that were not seen done yet."""
        self._sweep()
        return len(self._under_way)

    @property
    def idle_bytes(self) -> int:
        """Of blocks that nothing uses."""
        self._sweep()
        return sum(size * len(blocks) for size, blocks in self._free.items())

    def _allocate(self, size: int) -> _Block | None:
        with self._lock:
            if self.nbytes + size > self._most:
                return None
            self.nbytes += size
        try:
            with torch.inference_mode(False):  # else only a forward in that mode could write into it
                memory = self._runtime.pinned(size)
        except RuntimeError as error:  # the driver has no more: make do with what is there
            with self._lock:
                self.nbytes -= size
                self._most, self.problem = self.nbytes, str(error).partition("\n")[0]
            return None
        block = _Block(memory.data_ptr(), memory)
        with self._lock:
            self._blocks = tuple(sorted((*self._blocks, block), key=_address))
        return block

    def _sweep(self) -> None:
        if not self._under_way or not self._sweeping.acquire(blocking=False):
            return
        try:
            while self._under_way and self._runtime.query(self._under_way[0][0]):
                self._under_way.popleft()
        finally:
            self._sweeping.release()


def _address(block: _Block) -> int:
    return block.address
