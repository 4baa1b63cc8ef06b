"""The copy queue of the CPU stand-in: a throttled link whose thread never takes the interpreter's lock.

A copying Python thread would take that lock some ten times a copy and delay the forward (docs/experiments.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch

from ....errors import RuntimeFailure
from ....kernels import _cpu
from ...policies.moepic.split import Segments
from ...policies.residency import Reservation, Residency
from ...settings import CopySettings, LinkSettings
from .device import Copied, CpuDevice, Device, Tensors
from .form_slots import FormPool, FormWeights
from .loader import PREFETCH, CopyQueue, HostWaits, Loader, LoadJob
from .slots import ExpertSource, LayerWeights, SlotPool

if TYPE_CHECKING:
    from .counting import CacheCounters
    from .native_order import NativeOrder


class LinkQueue(HostWaits):
    """A `CopyQueue` from host memory into slots: demand before prefetch, then first come first served.

    A copy occupies the link for latency + bytes / rate. Copies do not overlap, and no gap lies between queued copies.
    A write-back and the load after it are one copy with one latency. `link.gbps` None: as fast as memory.
    """

    def __init__(self, link: LinkSettings) -> None:
        rate = 0.0 if link.gbps is None else link.gbps * 1e9
        self._link = _cpu.link(rate, link.latency_us * 1e-6)
        self._closed = False
        self._alive: deque[LoadJob] = deque()  # whose buffers the thread may still use
        self._scratch: Tensors | None = None  # where experts that are copied back go; they are not used there

    @staticmethod
    def supports(pool: SlotPool | FormPool, weights: Sequence[ExpertSource]) -> bool:
        """Whether the experts lie in this host's memory, in the slots' dtype or as bfloat16 for float32 slots."""
        return all(
            isinstance(layer, FormWeights)
            or (isinstance(layer, LayerWeights)
            and all(_copies(target, source) for target, source in zip(pool.tensors, layer.tensors, strict=True)))
            for layer in weights
        )

    def event(self) -> LinkDone:
        return LinkDone(self._link)

    def submit(self, jobs: list[LoadJob], priority: int) -> None:
        """Queue copies in this order. Raises RuntimeFailure after `close`."""
        if not jobs:
            return
        copies = None
        if not self._closed:
            copies = _cpu.link_submit(self._link, list(map(self._pieces, jobs)), priority == PREFETCH)
        if copies is None:
            for job in jobs:
                job.cancelled = True
                job.done.set()
            raise RuntimeFailure("the expert cache is closed", "start a new worker")
        alive = self._alive
        while alive and (alive[0].copied is not None or alive[0].done.is_set()):
            alive.popleft()
        for job, copy in zip(jobs, copies, strict=True):
            self.adopt(job, copy)

    def adopt(self, job: LoadJob, copy: _cpu.Copy) -> None:
        """This copy on the link is the job's."""
        done = job.done
        assert isinstance(done, LinkDone)  # made by `event`
        done.job, done.copy = job, copy
        self._alive.append(job)

    def native(
        self, pool: SlotPool | FormPool, weights: Sequence[ExpertSource], residency: Residency,
        segments: Segments | None, counters: CacheCounters, order: NativeOrder | None,
    ) -> NativeLoads | None:  # fmt: skip
        """Loads of mapped experts, or of their segments, in slots of one dtype; None: these are others."""
        layers = [layer for layer in weights if isinstance(layer, LayerWeights)]
        if not isinstance(pool, SlotPool) or len(layers) < len(weights):
            return None
        return NativeLoads(self, pool, layers, residency, segments, counters, order)

    def arrived(self, jobs: Iterable[LoadJob]) -> list[LoadJob]:
        ended, found = _cpu.copy_ended, list[LoadJob]()
        for job in jobs:
            done: LinkDone = job.done  # type: ignore[assignment]  # made by `event`
            if done.copy is not None and ended(done.copy):
                done.is_set()
                found.append(job)
        return found

    def promote(self, job: LoadJob) -> None:
        """Give a queued prefetch the priority of a demand load; nothing if it has started."""
        _cpu.link_promote(self._link, _copy(job))

    def cancel(self, job: LoadJob) -> bool:
        """Drop a copy that has not started. False if it has: then wait for `done`."""
        job.cancelled = _cpu.link_cancel(self._link, _copy(job))
        return job.cancelled

    @property
    def pending(self) -> int:
        """Copies queued or under way."""
        return _cpu.link_pending(self._link)

    def _pieces(self, job: LoadJob) -> tuple[_cpu.Piece, ...]:
        pieces: list[_cpu.Piece] = []
        if job.writeback:
            if self._scratch is None:
                self._scratch = tuple(torch.empty_like(d) for d in job.dst)
            for s, d in zip(self._scratch, job.dst, strict=True):
                pieces.append((s.data_ptr(), d.data_ptr(), d.nbytes, False))
        for d, s in zip(job.dst, job.src, strict=True):  # type: ignore[arg-type]  # none is pending, see `supports`
            widen = d.dtype != s.dtype
            pieces.append((d.data_ptr(), s.data_ptr(), s.numel() if widen else s.nbytes, widen))
        return tuple(pieces)

    def close(self) -> None:
        """Stop after the copy under way; queued copies are dropped. Safe to call twice."""
        self._closed = True
        _cpu.link_close(self._link)
        self._alive.clear()


class NativeLoads:
    """The slots of a cache, and the copies that native code has under way (`kernels/cpu/loads.hpp`).

    A copy under way is here or a `LoadJob`, never both. All methods are for the forward's thread.

    Attributes:
        queue: of the link. handle: for `CpuKernel.native`.
        orders: whether the order of eviction is in native code.
    """

    def __init__(
        self, queue: LinkQueue, pool: SlotPool, weights: Sequence[LayerWeights], residency: Residency,
        segments: Segments | None, counters: CacheCounters, order: NativeOrder | None,
    ) -> None:  # fmt: skip
        parts: list[_cpu.ExpertPart] = []
        for target, *sources in zip(pool.tensors, *[layer.tensors for layer in weights], strict=True):
            source, widen = sources[0], sources[0].dtype != target.dtype
            one = target[0] if segments is None else target[0, 0]  # of the units of a slot: an expert, or a neuron
            parts.append(
                (target.data_ptr(), target.stride(0 if segments is None else 1) * target.itemsize,
                 source.stride(0) * source.itemsize, 0 if segments is None else source.stride(1) * source.itemsize,
                 one.numel() if widen else one.nbytes, widen, tuple([source.data_ptr() for source in sources]))
            )  # fmt: skip
        layers = len(weights)
        experts = (residency.keys if segments is None else segments.keys) // layers
        self.queue, self.orders = queue, order is not None
        self.handle = _cpu.loads(
            queue._link, experts, layers, parts, *self._slots_of(residency, segments),
            counters.handle if segments is None else None,  # of segments `_cpu.split` counts
            None if order is None else order.handle,
        )  # fmt: skip
        self._held = pool, weights, counters, order

    def divide(self, residency: Residency, segments: Segments | None) -> None:
        """Other slots of the same pool; no copy is known here (`take`)."""
        _cpu.loads_divide(self.handle, *self._slots_of(residency, segments))

    def _slots_of(
        self, residency: Residency, segments: Segments | None
    ) -> tuple[int, int, tuple[int, ...], _cpu.Layout | None]:
        """Keys, slots, addresses of the arrays, which stay alive here, and the layout."""
        self._arrays = [np.frombuffer(array, np.uint8) for array in residency.arrays]
        layout = None
        if segments is not None:
            firsts = [0, *accumulate(segments.slots)][:-1]
            layout = segments.class_of, firsts, segments.first, segments.begins, segments.neurons
        return residency.keys, residency.slots, tuple([array.ctypes.data for array in self._arrays]), layout

    def give(self, job: LoadJob) -> None:
        """The copy of a job on the link is known here from now on."""
        _cpu.loads_give(self.handle, job.reservation.key, job.prefetch, _copy(job))

    @property
    def under_way(self) -> list[int]:
        """Keys, oldest copy first."""
        return _cpu.loads_keys(self.handle)

    def start(self, keys: list[int]) -> None:
        """Copy these absent experts into free slots, behind all demand. Raises RuntimeFailure: the link is closed."""
        if not _cpu.loads_start(self.handle, keys):
            raise RuntimeFailure("the expert cache is closed", "start a new worker")

    def prefetch(self, wanted: list[int], nearer: list[int], source: int) -> int:
        """`ExpertCache.prefetch` with the native order. source: its number. Raises RuntimeFailure: as `start`."""
        queued = _cpu.loads_prefetch(self.handle, wanted, nearer, source)
        if queued < 0:
            raise RuntimeFailure("the expert cache is closed", "start a new worker")
        return queued

    def land(self, key: int, layer: int) -> float | None:
        """Wait for a copy under way, whose expert then is resident: the seconds. None: it was cancelled."""
        return _cpu.loads_land(self.handle, key, layer)

    def landed(self) -> list[tuple[int, int, int, float, float, float]]:
        """What has landed since the last call: (layer, units of demand loads, of prefetches, seconds that the link was
        busy by the wall's clock and by its own, part of those while the layer ran).
        """
        return _cpu.loads_landed(self.handle)

    def dropped(self) -> list[int]:
        """Keys whose prefetches a layer has cancelled since the last call."""
        return _cpu.loads_dropped(self.handle)

    def take(self) -> list[tuple[Reservation, bool, _cpu.Copy]]:
        """All copies under way, which are no longer known here: reservation, whether it is a prefetch, copy."""
        taken = _cpu.loads_take(self.handle)
        return [(Reservation(key, slot, generation), prefetch, copy) for key, slot, generation, prefetch, copy in taken]


class LinkDone:
    """Whether a copy on the link has ended; seeing the end sets the job's `copied`."""

    __slots__ = ("_ended", "_link", "copy", "job")

    def __init__(self, link: _cpu.Link) -> None:
        self._link, self._ended = link, False
        self.job: LoadJob | None = None  # both are set when the job is queued
        self.copy: _cpu.Copy | None = None

    def is_set(self) -> bool:
        if not self._ended and self.copy is not None and _cpu.copy_ended(self.copy):
            self._see_end(self.copy)
        return self._ended

    def wait(self) -> bool:
        if not self._ended:
            assert self.copy is not None
            _cpu.link_wait(self._link, self.copy)
            self._see_end(self.copy)
        return True

    def set(self) -> None:
        """End a job that was never queued."""
        self._ended = True

    def _see_end(self, copy: _cpu.Copy) -> None:
        times = _cpu.copy_times(copy)
        if times is not None and self.job is not None:
            start_s, end_s, link_s = times
            job, writeback_s = self.job, 0.0
            if job.writeback:  # one copy, one latency: shared by bytes
                back, up = (sum(t.nbytes for t in some) for some in (job.dst, job.src))  # type: ignore[union-attr]
                writeback_s = link_s * back / (back + up)
            job.copied = Copied(start_s, end_s, None, link_s, writeback_s)
        self._ended, self.job = True, None  # ends the reference cycle of the job and its event


def copy_queue(
    device: Device, pool: SlotPool | FormPool, weights: Sequence[ExpertSource], settings: CopySettings | None = None,
    replicas: Sequence[LayerWeights] = (),
) -> CopyQueue:  # fmt: skip
    """The queue for a device: a GPU's streams, the stand-in's link thread, or a Python thread for other sources.

    Args:
        weights: pinned before, where they are to be. settings: of copies to a GPU; None: the defaults.
        replicas: of the same layers, for slots of their own; empty: the cache has no such slots.
    """
    if isinstance(device, CpuDevice):
        return LinkQueue(device.link) if LinkQueue.supports(pool, weights) else Loader(device)
    from ..cuda.device import CudaDevice
    from ..cuda.stream_queue import StreamQueue

    if not isinstance(device, CudaDevice):
        return Loader(device)
    settings = CopySettings() if settings is None else settings
    mapped = [layer.tensors if isinstance(layer, LayerWeights | FormWeights) else None for layer in weights]
    casts = isinstance(pool, SlotPool) and any(
        s.dtype != d.dtype for t in mapped if t is not None for s, d in zip(t, pool.tensors, strict=True)
    )
    pinned = [tensors is not None and device.is_pinned(tensors) for tensors in mapped]
    if replicas:
        pinned = [all_in and device.is_pinned(r.tensors) for all_in, r in zip(pinned, replicas, strict=True)]
    return StreamQueue(device, pinned, settings.ahead_mib << 20, casts)


def _copies(target: torch.Tensor, source: torch.Tensor) -> bool:
    alike = target.dtype == source.dtype
    widened = target.dtype == torch.float32 and source.dtype == torch.bfloat16
    return (alike or widened) and target[0].is_contiguous() and source[0].is_contiguous()


def _copy(job: LoadJob) -> _cpu.Copy:
    assert isinstance(job.done, LinkDone)
    assert job.done.copy is not None  # the job is queued
    return job.done.copy
