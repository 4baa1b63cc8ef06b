"""What a GPU's link (`_core.StreamLink`) has of Python: streams, casts, and copies of memory that is not pinned."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch

from ...core import _core
from ..cache.links import CacheLink, loader_link
from ..cache.loader import Loader
from ..cache.places import place
from ..cache.slot_map import SlotMap
from .device import CudaDevice
from .staging import DeviceSide

_CAST_BYTES = 16 << 20  # of each stream's buffer for experts that are kept in another dtype than the store's


def stream_link(
    device: CudaDevice, where: SlotMap, pinned: Sequence[bool], ahead_bytes: int, casts: bool = False
) -> CacheLink:
    """The link of one cache on a GPU.

    Args:
        pinned: of each MoE layer, whether its experts are in pinned memory. Others go through the loader's thread and
            staging buffers, and the host waits for them.
        ahead_bytes: of prefetches enqueued at a time; larger experts than half of that go in parts of that half.
        casts: whether slots have another dtype than the store.
    """
    streams, runtime = _Streams(device, where, casts), device.runtime
    other = None if all(pinned) else loader_link(Loader(device), where).core
    demand, prefetch = (runtime.handle(streams.of[urgent]) for urgent in (True, False))
    core = _core.StreamLink(
        runtime.driver(), demand, prefetch, ahead_bytes, streams.compute, streams.cast, streams.pinned, other
    )
    elsewhere = [layer for layer, found in enumerate(pinned) if not found]
    return CacheLink(core, time.perf_counter, partial(place, core, where, elsewhere))


class _Streams:
    """The streams of a link, and what it asks of Python. of: the streams for demand and for prefetches."""

    def __init__(self, device: CudaDevice, where: SlotMap, casts: bool) -> None:
        self._device, self._where, self._runtime = device, where, device.runtime
        self.of = {urgent: self._runtime.stream(urgent) for urgent in (True, False)}
        self._sides = {urgent: DeviceSide(self._runtime, _CAST_BYTES) for urgent in (True, False)}
        self._scratch: list[torch.Tensor] = []
        if casts:
            for urgent, side in self._sides.items():
                with self._runtime.on(self.of[urgent]):
                    side.reserve()

    def compute(self) -> int:
        return self._runtime.handle(self._device.compute_stream())

    def cast(self, urgent: bool, segment: int, slot: int, tensor: int, first: int, count: int) -> None:
        stop = first + count
        target, source = self._where.target(segment, slot)[tensor], self._where.source(segment)
        assert isinstance(source, tuple)  # it is in pinned memory
        with self._runtime.on(self.of[urgent]):
            self._sides[urgent].copy(target.view(-1)[first:stop], source[tensor].view(-1)[first:stop])

    def pinned(self, nbytes: int) -> int:
        self._scratch.append(self._runtime.pinned(nbytes))
        return self._scratch[-1].data_ptr()
