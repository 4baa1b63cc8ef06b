"""Activations to and from peers through pinned memory; the host waits only for what it sends.

    begin    hidden -> float32 -> pinned memory, enqueued behind the compute: at once where the rows are few (the
             routing's copy comes after it, so that the host waits once for both)
    take     -> the rows of a peer; many rows are gathered on the GPU and waited for here
    channel  writes the frame from pinned memory into its ring, reads the answer from the ring into pinned memory
    sums     -> copy to the GPU, enqueued; the memory stays leased until it is done
    add      -> added there, enqueued

and at a shard, whose server reads the frame from the ring into pinned memory:

    receive  -> copies of rows and weights to the GPU, enqueued before the kernels that read them
    deliver  -> the sums into pinned memory, enqueued behind the kernels; the host's only wait

The rings themselves are not pinned: a peer's rows and their place in its frame are known only after the routing, the
channel's copies are needed anyway, and checked data must not lie where the peer can write.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..cache.device import Outgoing
from .runtime import GpuRuntime
from .tables import TORCH_DTYPES

_SMALLEST = 64 * 1024  # bytes of a block; all are powers of two, as the allocator of pinned memory rounds up to them
_REMEMBERED = 256  # tensors over arrays: a few kinds, in a few blocks


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
    """Blocks of pinned memory, allocated on demand and reused.

    A leased array, any view of it and any message that has one keep the lease; the last reference ends it. `keep`
    extends it while the GPU reads or writes. `lease` is thread-safe.

    Args:
        most_bytes: of all blocks together.

    Attributes:
        nbytes: of all blocks.
        refused: leases for which there was no room.
        problem: why the driver refused more memory; None: it did not.
    """

    def __init__(self, runtime: GpuRuntime, most_bytes: int) -> None:
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
        """Uninitialised memory [nbytes], aligned to 64 bytes; None: there is no room now."""
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
        """Keep `held` alive until the event is done. Events follow each other, as on one stream."""
        self._under_way.append((event, held))

    def tensor(self, array: NDArray[Any]) -> torch.Tensor | None:
        """The pinned tensor over an array; None where the array is not in the pool, has gaps or an unknown type."""
        if not array.flags.c_contiguous:
            return None
        address: int = array.__array_interface__["data"][0]
        key = (address, array.dtype, array.shape)
        known = self._tensors.get(key)  # decode steps reuse the same places
        if known is not None:
            return known
        blocks = self._blocks
        place = bisect_right(blocks, address, key=attrgetter("address")) - 1
        if place < 0:
            return None
        block = blocks[place]
        begin = address - block.address
        dtype = TORCH_DTYPES.get(array.dtype)
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
        """Copies not seen done yet."""
        self._sweep()
        return len(self._under_way)

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
            self._blocks = tuple(sorted((*self._blocks, block), key=attrgetter("address")))
        return block

    def _sweep(self) -> None:
        if not self._under_way or not self._sweeping.acquire(blocking=False):
            return
        try:
            while self._under_way and self._runtime.query(self._under_way[0][0]):
                self._under_way.popleft()
        finally:
            self._sweeping.release()


_AT_ONCE = 256 * 1024  # bytes of rows that go to the host before the routing is known: 10 us of a slow link
_MOST = 256 * 1024 * 1024  # pinned bytes: several layers' prompts, to and fro
_LEAST = 1024  # bytes of a frame that is worth pinned memory: an answer with sums has more


class PinnedActivations:
    """`Activations` of a GPU. Where pinned memory is full, a copy is synchronous.

    Args:
        most_bytes: pinned memory in all.

    Attributes:
        pool: the pinned memory.
        waited: synchronous copies, because pinned memory was full.
    """

    def __init__(self, runtime: GpuRuntime, most_bytes: int = _MOST) -> None:
        self._runtime, self._device = runtime, runtime.device
        self.pool = PinnedPool(runtime, most_bytes)
        self.pool.lease(1)  # whether there is pinned memory to be had is known from the start
        self.waited = 0

    @property
    def label(self) -> str:
        return "pinned" if self.pool.problem is None else f"not pinned: {self.pool.problem}"

    def supply(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Memory for an answer; None for short ones, and where there is no room."""
        return self.pool.lease(nbytes) if nbytes >= _LEAST else None

    def begin(self, hidden: torch.Tensor) -> Outgoing:
        return PinnedRows(self, hidden)

    def receive(self, array: NDArray[Any]) -> torch.Tensor:
        if array.dtype == np.uint16:
            return self.up(array.view(np.int16)).view(torch.bfloat16)
        return self.up(array)

    def sums(self, array: NDArray[np.float32]) -> torch.Tensor:
        return self.up(array)

    def add(self, out: torch.Tensor, rows: torch.Tensor | None, sums: torch.Tensor) -> None:
        found = sums if sums.dtype == out.dtype else sums.to(out.dtype)
        out.add_(found) if rows is None else out.index_add_(0, rows, found)

    def deliver(self, sums: torch.Tensor) -> NDArray[np.float32]:
        array, event = self.down(sums)
        self.wait(event)
        return array

    def down(self, rows: torch.Tensor) -> tuple[NDArray[np.float32], Any]:
        """Enqueue a copy to the host, as float32.

        Returns:
            The array, and the event after which it is filled; None: it is filled now.
        """
        source = rows.detach().float().contiguous()
        memory = self.pool.lease(source.nbytes)
        if memory is None:
            self.waited += 1
            return source.cpu().numpy(), None
        array = memory.view(np.float32).reshape(source.shape)
        target = self.pool.tensor(array)
        assert target is not None  # it is the pool's
        self._move(target, source)
        return array, self._keep_until_copied(array)

    def up(self, array: NDArray[Any]) -> torch.Tensor:
        """A host array on the GPU, for what is enqueued from now on."""
        source, pinned = self.pool.tensor(array), array
        if source is None and (memory := self.pool.lease(array.nbytes)) is not None:  # not from a ring, or small
            pinned = memory.view(array.dtype).reshape(array.shape)
            pinned[...] = array
            source = self.pool.tensor(pinned)
        if source is None:
            self.waited += 1
            return torch.tensor(array, device=self._device)
        target = torch.empty(array.shape, dtype=source.dtype, device=self._device)
        self._move(target, source)
        self._keep_until_copied(pinned)
        return target

    def wait(self, event: Any) -> None:
        """Wait for an event of `down`."""
        if event is not None:
            self._runtime.wait(event)

    def _move(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Few rows do not queue behind the copies of experts; many are left to the copy engine."""
        (self._runtime.kernel_copy if src.nbytes <= _AT_ONCE else self._runtime.copy)(dst, src)

    def _keep_until_copied(self, array: NDArray[Any]) -> Any:
        """Keep the memory of a copy just enqueued until it is done; returns the event."""
        event = self._runtime.event(timing=False)
        self._runtime.record(event, self._runtime.current())
        self.pool.keep(event, array)
        return event


class PinnedRows:
    """`Outgoing` of a GPU, for hidden [T, H]."""

    __slots__ = ("_event", "_hidden", "_way", "_whole")

    def __init__(self, way: PinnedActivations, hidden: torch.Tensor) -> None:
        self._way, self._hidden = way, hidden
        self._whole: NDArray[np.float32] | None = None
        if hidden.numel() * 4 <= _AT_ONCE:
            self._whole, self._event = way.down(hidden)

    def take(self, tokens: NDArray[np.int64]) -> tuple[NDArray[np.float32], torch.Tensor | None]:
        way, whole = self._way, self._whole
        used = way.up(tokens) if len(tokens) < len(self._hidden) else None
        if whole is not None:
            way.wait(self._event)
            return whole if used is None else whole[tokens], used
        rows, event = way.down(self._hidden if used is None else self._hidden.index_select(0, used))
        way.wait(event)
        return rows, used
