"""Rows to the peers and sums back through pinned memory: nothing on the way waits but the host, for what it sends.

    begin    hidden -> float32 -> copy into pinned memory, enqueued behind the compute: of a few rows all, at once
             (the host then reads the layer's routing, whose copy is enqueued after these: one wait is for both)
    take     -> the rows of a peer; of many rows they are gathered on the GPU and waited for here
    channel  writes the frame into its ring from pinned memory, reads the answer out of the ring into pinned memory
    receive  -> copy to the GPU, enqueued; the memory is kept until it is done

and at a shard, whose server reads the frame out of the ring into pinned memory:

    receive  -> copies of rows and weights to the GPU, enqueued before the kernels that read them
    deliver  -> the sums into pinned memory, enqueued behind the kernels, and waited for: the host's only wait

Pinned memory lies beside the rings, not in them: which rows a peer gets, and where they lie in its frame, is known only
when the routing has been read, and the rows are on the host by then. The copies from pinned memory into the ring and
out of the ring into pinned memory are those that a channel makes anyway. And what is checked on arrival must not lie
where the peer can still write.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ..activations import Outgoing
from .pinned_pool import PinnedPool

_AT_ONCE = 256 * 1024  # bytes of rows that go to the host before anybody knows which are needed: 10 us of a slow link
_MOST = 256 * 1024 * 1024  # pinned bytes: several layers' prompts, to and fro
_FEW_ROWS = 64  # of a decode step
_LEAST = 1024  # bytes of a frame that is worth pinned memory: an answer with sums has more


class ComputeRuntime(Protocol):
    """What is asked of the GPU; `cuda.runtime.GpuRuntime` has it."""

    device: torch.device

    def current(self) -> Any:
        """The stream that this thread computes on."""
        ...

    def event(self, timing: bool = True) -> Any: ...
    def record(self, event: Any, stream: Any) -> None: ...
    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Enqueue dst <- src behind this thread's compute; the host tensor is pinned."""
        ...

    def query(self, event: Any) -> bool: ...
    def synchronize(self, event: Any) -> None: ...
    def pinned(self, nbytes: int) -> torch.Tensor: ...


class PinnedActivations:
    """`Activations` of a GPU.

    Where there is no room left in pinned memory, a copy waits as any other does; `waited` counts those.

    Args:
        runtime: of the compute device.
        most_bytes: pinned memory in all.

    Attributes:
        pool: the pinned memory.
        waited: copies that had to wait because pinned memory was full.
    """

    def __init__(self, runtime: ComputeRuntime, most_bytes: int = _MOST) -> None:
        self._runtime, self._device = runtime, runtime.device
        self.pool = PinnedPool(runtime, most_bytes)
        self.pool.lease(1)  # whether there is pinned memory to be had is known from the start
        self.waited = 0
        self._all_rows: dict[int, torch.Tensor] = {}

    @property
    def label(self) -> str:
        return "pinned" if self.pool.problem is None else f"not pinned: {self.pool.problem}"

    def supply(self, nbytes: int) -> NDArray[np.uint8] | None:
        """Where an answer is put; None for short ones, and where there is no room."""
        return self.pool.lease(nbytes) if nbytes >= _LEAST else None

    def begin(self, hidden: torch.Tensor) -> Outgoing:
        return PinnedRows(self, hidden)

    def receive(self, array: NDArray[Any]) -> torch.Tensor:
        if array.dtype == np.uint16:
            return self.up(array.view(np.int16)).view(torch.bfloat16)
        return self.up(array)

    def deliver(self, sums: torch.Tensor) -> NDArray[np.float32]:
        array, event = self.down(sums)
        self.wait(event)
        return array

    def down(self, rows: torch.Tensor) -> tuple[NDArray[np.float32], Any]:
        """Enqueue a copy to the host, as float32.

        Returns:
            The array that will hold it, and the event after which it does; None: it does now.
        """
        source = rows.detach().float().contiguous()
        memory = self.pool.lease(source.nbytes)
        if memory is None:
            self.waited += 1
            return source.cpu().numpy(), None
        array = memory.view(np.float32).reshape(source.shape)
        target = self.pool.tensor(array)
        assert target is not None  # it is the pool's
        self._runtime.copy(target, source)
        return array, self._kept(array)

    def up(self, array: NDArray[Any]) -> torch.Tensor:
        """A host array on the GPU, for what is enqueued from now on."""
        held: NDArray[Any] | None = array
        source = self.pool.tensor(array)
        if source is None:  # it came by another way than a ring, or is small
            held = self._staged(array)
            source = None if held is None else self.pool.tensor(held)
        if source is None or held is None:
            self.waited += 1
            return torch.tensor(array, device=self._device)
        target = torch.empty(array.shape, dtype=source.dtype, device=self._device)
        self._runtime.copy(target, source)
        self._kept(held)
        return target

    def all_rows(self, count: int) -> torch.Tensor:
        """0 to `count` - 1 on the GPU; shared, so never written to."""
        found = self._all_rows.get(count)
        if found is None:
            found = torch.arange(count, device=self._device)
            if count <= _FEW_ROWS:
                self._all_rows[count] = found
        return found

    def wait(self, event: Any) -> None:
        """Until an event of `down` is done; by then it mostly is."""
        if event is not None and not self._runtime.query(event):
            self._runtime.synchronize(event)

    def _staged(self, array: NDArray[Any]) -> NDArray[Any] | None:
        memory = self.pool.lease(array.nbytes)
        if memory is None:
            return None
        staged = memory.view(array.dtype).reshape(array.shape)
        staged[...] = array
        return staged

    def _kept(self, array: NDArray[Any]) -> Any:
        """Keep the memory of a copy just enqueued until it is done; the event that says so."""
        event = self._runtime.event(timing=False)
        self._runtime.record(event, self._runtime.current())
        self.pool.keep(event, array)
        return event


class PinnedRows:
    """`Outgoing` of a GPU.

    Args:
        way: of the engine.
        hidden: [T, H].
    """

    __slots__ = ("_event", "_hidden", "_way", "_whole")

    def __init__(self, way: PinnedActivations, hidden: torch.Tensor) -> None:
        self._way, self._hidden = way, hidden
        self._whole: NDArray[np.float32] | None = None
        if hidden.numel() * 4 <= _AT_ONCE:
            self._whole, self._event = way.down(hidden)

    def take(self, tokens: NDArray[np.int64]) -> tuple[NDArray[np.float32], torch.Tensor]:
        way, count, total = self._way, len(tokens), len(self._hidden)
        used = way.all_rows(total) if count == total else way.up(tokens)
        whole = self._whole
        if whole is not None:
            way.wait(self._event)
            return whole if count == total else whole[tokens], used
        rows, event = way.down(self._hidden if count == total else self._hidden.index_select(0, used))
        way.wait(event)
        return rows, used
