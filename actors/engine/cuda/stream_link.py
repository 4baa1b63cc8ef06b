"""What a GPU's link (`_core.StreamLink`) has of Python: streams, casts, and copies of memory that is not pinned."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...core import _core
from ..cache.links import QueueLink
from ..cache.loader import Loader
from ..cache.places import place
from ..cache.slots import SlotMap
from .device import CudaDevice
from .staging import DeviceSide

_CAST_BYTES = 16 << 20  # of each stream's buffer for experts that are kept in another dtype than the store's


class StreamLinking:
    """Makes the link of one cache on a GPU.

    Args:
        pinned: of each MoE layer, whether its experts are in pinned memory. Others go through the loader's thread and
            staging buffers, and the host waits for them.
        ahead_bytes: of prefetches enqueued at a time; larger experts than half of that go in parts of that half.
        casts: whether slots have another dtype than the store.
    """

    def __init__(self, device: CudaDevice, pinned: Sequence[bool], ahead_bytes: int, casts: bool = False) -> None:
        self.pinned, self.ahead_bytes = tuple(pinned), ahead_bytes
        self._device, self._runtime = device, device.runtime
        self._streams = {urgent: self._runtime.stream(urgent) for urgent in (True, False)}
        self._sides = {urgent: DeviceSide(self._runtime, _CAST_BYTES) for urgent in (True, False)}
        self._scratch: list[torch.Tensor] = []
        self._where: SlotMap | None = None
        if casts:
            for urgent, side in self._sides.items():
                with self._runtime.on(self._streams[urgent]):
                    side.reserve()

    @property
    def cast_bytes(self) -> int:
        """Bytes of the buffers for casts."""
        return sum(side.bytes for side in self._sides.values())

    def link(self, where: SlotMap, clock: Callable[[], float]) -> _core.StreamLink:
        """The link of a cache with these slots and sources; its arguments are as `QueueLink` has them."""
        self._where, device, runtime = where, self._device, self._runtime
        other = None if all(self.pinned) else _core.PythonLink(QueueLink(Loader(device), where, device, clock))
        demand, prefetch = (runtime.handle(self._streams[urgent]) for urgent in (True, False))
        return _core.StreamLink(
            runtime.driver(), demand, prefetch, self.ahead_bytes, self._compute, self._cast, self._pinned, other
        )

    def place(self, link: _core.StreamLink, where: SlotMap, most: int) -> None:
        """`places.place`."""
        place(link, where, most, [layer for layer, pinned in enumerate(self.pinned) if not pinned])

    def _compute(self) -> int:
        return self._runtime.handle(self._device.compute_stream())

    def _cast(self, urgent: bool, segment: int, slot: int, tensor: int, first: int, count: int) -> None:
        where, stop = self._where, first + count
        assert where is not None  # set by `link`
        target, source = where.target(segment, slot)[tensor], where.source(segment)
        assert isinstance(source, tuple)  # it is in pinned memory
        with self._runtime.on(self._streams[urgent]):
            self._sides[urgent].copy(target.view(-1)[first:stop], source[tensor].view(-1)[first:stop])

    def _pinned(self, nbytes: int) -> int:
        self._scratch.append(self._runtime.pinned(nbytes))
        return self._scratch[-1].data_ptr()
