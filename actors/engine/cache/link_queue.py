"""The copy queue of the CPU stand-in: a throttled link whose thread never takes the interpreter's lock.

A GPU's copy engine costs the thread of the forward nothing. A stand-in that copied on a Python thread would: each copy
would take the interpreter's lock some ten times, and every wait for it is one of the forward (docs/experiments.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from ....errors import RuntimeFailure
from ....kernels import _cpu
from ...settings import CopySettings, LinkSettings
from .device import Copied, CpuDevice, Device, Tensors
from .loader import PREFETCH, CopyQueue, HostWaits, Loader, LoadJob
from .slots import ExpertSource, LayerWeights, SlotPool


class LinkQueue(HostWaits):
    """A `CopyQueue` of copies from host memory into slots, demand before prefetch, then first come first served.

    A copy occupies the link for latency + bytes / rate. Copies follow each other without overlap, and without a gap
    where one was asked for before the last had ended. `close` drops what is queued and joins the thread.

    A slot whose last expert is to be copied back first is one copy of both, with the latency once.

    Args:
        link: rate (none: as fast as memory) and latency.
    """

    def __init__(self, link: LinkSettings) -> None:
        rate = 0.0 if link.gbps is None else link.gbps * 1e9
        self._link = _cpu.link(rate, link.latency_us * 1e-6)
        self._closed = False
        self._alive: deque[LoadJob] = deque()  # whose buffers the thread may still use
        self._scratch: Tensors | None = None  # where experts that are copied back go; they are not used there

    @staticmethod
    def supports(pool: SlotPool, weights: Sequence[ExpertSource]) -> bool:
        """Whether experts lie in this host's memory, in the slots' dtype or in one that the thread can widen."""
        return all(
            isinstance(layer, LayerWeights)
            and all(_copies(target, source) for target, source in zip(pool.tensors, layer.tensors, strict=True))
            for layer in weights
        )

    def event(self) -> LinkDone:
        """For a new job's `done`."""
        return LinkDone(self._link)

    def submit(self, jobs: list[LoadJob], priority: int) -> None:
        """Queue copies in this order. Raises RuntimeFailure after `close`."""
        if not jobs:
            return
        pieces = [self._pieces(job) for job in jobs]
        copies = None if self._closed else _cpu.link_submit(self._link, pieces, priority == PREFETCH)
        if copies is None:
            for job in jobs:
                job.cancelled = True
                job.done.set()
            raise RuntimeFailure("the expert cache is closed", "start a new worker")
        for job, copy in zip(jobs, copies, strict=True):
            _done(job).follow(job, copy)
        alive = self._alive
        while alive and alive[0].done.is_set():
            alive.popleft()
        alive.extend(jobs)

    def promote(self, job: LoadJob) -> None:
        """Give a queued prefetch the priority of a demand load; nothing if it has started."""
        _cpu.link_promote(self._link, _done(job).copy)

    def cancel(self, job: LoadJob) -> bool:
        """Drop a copy that has not started. False if it has: then wait for `done`."""
        job.cancelled = _cpu.link_cancel(self._link, _done(job).copy)
        return job.cancelled

    @property
    def pending(self) -> int:
        """Copies queued or under way."""
        return _cpu.link_pending(self._link)

    def _pieces(self, job: LoadJob) -> tuple[_cpu.Piece, ...]:
        if not job.writeback:
            return _pieces(job)
        if self._scratch is None:
            self._scratch = tuple(torch.empty_like(d) for d in job.dst)
        back = tuple((s.data_ptr(), d.data_ptr(), d.nbytes, False) for s, d in zip(self._scratch, job.dst, strict=True))
        return back + _pieces(job)

    def close(self) -> None:
        """Stop after the copy under way; queued copies are dropped. Safe to call twice."""
        self._closed = True
        _cpu.link_close(self._link)
        self._alive.clear()


class LinkDone:
    """Whether a copy on the link has ended; seeing so gives the job its `copied`."""

    __slots__ = ("_copy", "_ended", "_job", "_link")

    def __init__(self, link: _cpu.Link) -> None:
        self._link, self._ended = link, False
        self._job: LoadJob | None = None
        self._copy: _cpu.Copy | None = None

    @property
    def copy(self) -> _cpu.Copy:
        assert self._copy is not None  # asked for queued jobs only
        return self._copy

    def follow(self, job: LoadJob, copy: _cpu.Copy) -> None:
        """The job was queued as this copy."""
        self._job, self._copy = job, copy

    def is_set(self) -> bool:
        if not self._ended and self._copy is not None and _cpu.copy_ended(self._copy):
            self._see_end()
        return self._ended

    def wait(self) -> bool:
        if not self._ended:
            _cpu.link_wait(self._link, self.copy)
            self._see_end()
        return True

    def set(self) -> None:
        """The job was never queued."""
        self._ended = True

    def _see_end(self) -> None:
        times = _cpu.copy_times(self.copy)
        if times is not None and self._job is not None:
            start_s, end_s, link_s = times
            self._job.copied = Copied(start_s, end_s, None, link_s)
        self._ended, self._job = True, None  # a job and its event know each other no longer


def copy_queue(
    device: Device,
    pool: SlotPool,
    weights: Sequence[ExpertSource],
    settings: CopySettings | None = None,
    replicas: Sequence[LayerWeights] = (),
) -> CopyQueue:
    """What makes a cache's copies: on a GPU its streams, as far as experts are in pinned memory; for the CPU stand-in
    the link's own thread, where it can read the experts itself; else a Python thread.

    Args:
        weights: pinned already, where that is done. settings: of copies to a GPU; None: as they are by default.
        replicas: of the same layers, which go into slots of their own; none: the cache has no such slots.
    """
    if isinstance(device, CpuDevice):
        return LinkQueue(device.link) if LinkQueue.supports(pool, weights) else Loader(device)
    from ..cuda.device import CudaDevice
    from ..cuda.stream_queue import StreamQueue

    if not isinstance(device, CudaDevice):
        return Loader(device)
    settings = CopySettings() if settings is None else settings
    mapped = [layer.tensors if isinstance(layer, LayerWeights) else None for layer in weights]
    casts = any(s.dtype != d.dtype for t in mapped if t is not None for s, d in zip(t, pool.tensors, strict=True))
    pinned = [tensors is not None and device.is_pinned(tensors) for tensors in mapped]
    if replicas:
        pinned = [all_in and device.is_pinned(r.tensors) for all_in, r in zip(pinned, replicas, strict=True)]
    return StreamQueue(device, pinned, settings.ahead_mib << 20, casts)


def _copies(target: torch.Tensor, source: torch.Tensor) -> bool:
    alike = target.dtype == source.dtype
    widened = target.dtype == torch.float32 and source.dtype == torch.bfloat16
    return (alike or widened) and target[0].is_contiguous() and source[0].is_contiguous()


def _pieces(job: LoadJob) -> tuple[_cpu.Piece, ...]:
    return tuple(
        (d.data_ptr(), s.data_ptr(), s.numel(), True)
        if d.dtype != s.dtype
        else (d.data_ptr(), s.data_ptr(), s.nbytes, False)
        for d, s in zip(job.dst, job.src, strict=True)  # type: ignore[arg-type]  # none is pending, see `supports`
    )


def _done(job: LoadJob) -> LinkDone:
    assert isinstance(job.done, LinkDone)  # made by `event`
    return job.done
