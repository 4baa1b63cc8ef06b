"""The copy queue of a GPU: copies from pinned memory on two streams, enqueued by the forward's own thread.

    demand      every copy at once, a batch back to back after one wait for the slots' last use
    prefetch    as much as `ahead_bytes` allow at a time, behind the demand that is under way, a large expert in parts;
                the rest waits here, where demand overtakes it, and is fed whenever the cache asks something

A copy engine takes copies in the order in which they were enqueued, whatever the priorities of their streams. So what
a demand load may have to wait for is bounded by `ahead_bytes`, and what keeps the link busy while the host is away too.
A guess that proves wrong while it is on its way costs what is enqueued of it; the rest is dropped.

The host never waits for a copy on a forward's way: `join` has the compute's stream wait for the copy's event. What the
compute waited is seen from timing events around that wait, which are read once they are done.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from ....errors import RuntimeFailure
from ..device import Copied
from ..loader import DEMAND, Books, Loader, LoadJob
from .device import CudaDevice
from .event_clock import EventClock
from .staging import DeviceSide, chunks

_CAST_BYTES = 16 << 20  # of each stream's buffer for experts that are kept in another dtype than the store's


class StreamDone:
    """Whether a copy has ended: one of a stream, or one that the loader's thread makes."""

    __slots__ = ("_event", "_queue", "copy")

    def __init__(self, queue: StreamQueue) -> None:
        self._queue = queue
        self.copy: _Copy | None = None  # of a stream
        self._event: threading.Event | None = None  # where a thread tells

    def by_thread(self) -> None:
        """The loader's thread makes this copy."""
        self._event = threading.Event()

    @property
    def of_thread(self) -> bool:
        return self._event is not None

    def is_set(self) -> bool:
        if self._event is not None:
            return self._event.is_set()
        return self.copy is not None and (self.copy.ended or self._queue.ended(self.copy))

    def wait(self) -> bool:
        """Make the host wait: for what is not on a forward's way."""
        if self._event is not None:
            return self._event.wait()
        if self.copy is not None and not self.copy.ended:
            self._queue.finish(self.copy)
        return True

    def set(self) -> None:
        """The copy was dropped, or the thread has ended it."""
        if self._event is not None:
            self._event.set()
        elif self.copy is not None:
            self.copy.ended = True


_Pieces = list[tuple[torch.Tensor, torch.Tensor]]  # slot, source


class _Copy:
    """A job of the streams, and which of its pieces are enqueued.

    last: what was enqueued last; of a copy whose pieces are all enqueued, its end is the copy's.
    """

    __slots__ = ("ended", "job", "last", "nbytes", "pieces", "sent")

    def __init__(self, job: LoadJob, nbytes: int) -> None:
        self.job, self.nbytes = job, nbytes
        self.pieces: _Pieces | None = None  # once the first of several is to be enqueued
        self.sent = 0
        self.last: _Part | None = None
        self.ended = False


class _Part:
    """What one event tells the end of: all of an expert or, of a prefetch, some of its pieces.

    start: an event where waiting for others ended, if there was any; else the part before tells.
    """

    __slots__ = ("copy", "end", "ended", "final", "lane", "nbytes", "start")

    def __init__(self, copy: _Copy, lane: _Lane, nbytes: int, final: bool, start: Any, end: Any) -> None:
        self.copy, self.lane, self.nbytes, self.final = copy, lane, nbytes, final
        self.start, self.end, self.ended = start, end, False


class _Lane:
    """One copy stream and what is enqueued on it, in order."""

    def __init__(self, device: CudaDevice, urgent: bool) -> None:
        self.stream = device.runtime.stream(urgent)
        self.under_way: deque[_Part] = deque()
        self.bytes = 0  # under way
        self.end_s = 0.0  # of the last one that has ended
        self.side = DeviceSide(device.runtime, _CAST_BYTES)
        self.scratch: torch.Tensor | None = None  # pinned bytes, where experts that are copied back go


class StreamQueue:
    """A `CopyQueue` for a GPU.

    Args:
        device: the GPU.
        pinned: of each MoE layer, whether its experts lie in pinned memory. The others' go through the loader's thread
            and staging buffers; for them the host waits.
        ahead_bytes: of prefetches enqueued at a time. Experts of more than half of that go in parts of that half.
        casts: whether slots have another dtype than the store.
    """

    def __init__(self, device: CudaDevice, pinned: Sequence[bool], ahead_bytes: int, casts: bool = False) -> None:
        self._device, self._runtime, self._pinned = device, device.runtime, tuple(pinned)
        self._ahead_bytes, self._part_bytes = ahead_bytes, max(1, ahead_bytes // 2)
        self._demand, self._prefetch = _Lane(device, urgent=True), _Lane(device, urgent=False)
        self._clock = EventClock(self._runtime, self._demand.stream)
        self._waiting: dict[LoadJob, None] = {}  # prefetches of which not all is enqueued
        self._staged = None if all(self._pinned) else Loader(device)
        self._told: list[tuple[LoadJob, Copied]] = []  # ended, in no book yet
        self._holds: deque[tuple[int, Any, Any]] = deque()  # layer, and the compute's events around a wait
        self._link_free_s = 0.0
        self._closed = False
        if casts:
            for lane in (self._demand, self._prefetch):
                with self._runtime.on(lane.stream):
                    lane.side.reserve()

    # -- as `CopyQueue` ----------------------------------------------------------------------------------

    def event(self) -> StreamDone:
        """For a new job's `done`."""
        return StreamDone(self)

    def submit(self, jobs: list[LoadJob], priority: int) -> None:
        """Enqueue demand, queue prefetches. Raises RuntimeFailure after `close`."""
        if self._closed:
            for job in jobs:
                job.cancelled = True
                copy = _done(job).copy = _Copy(job, 0)
                copy.ended = True
            raise RuntimeFailure("the expert cache is closed", "start a new worker")
        if self._staged is not None:
            jobs = self._stage(jobs, priority)
        for job in jobs:  # in pinned memory, so no promises
            _done(job).copy = _Copy(job, sum([s.nbytes for s in job.src]))  # type: ignore[union-attr]
        if priority == DEMAND:
            self._enqueue(self._demand, [(job, None) for job in jobs])
        else:
            self._waiting.update(dict.fromkeys(jobs))
        self._feed()

    def promote(self, job: LoadJob) -> None:
        """Enqueue what waits of a prefetch as demand; nothing if all of it is enqueued."""
        if _done(job).of_thread:
            assert self._staged is not None  # whose job it is
            self._staged.promote(job)
        elif job in self._waiting:
            del self._waiting[job]
            last = _copy(job).last
            if last is not None and not last.ended:
                self._runtime.wait_event(self._demand.stream, last.end)
            self._enqueue(self._demand, [(job, None)])

    def cancel(self, job: LoadJob) -> bool:
        """Drop a copy of which something waits; `job.moved_share` is of what does not. False: `overtake` it."""
        if _done(job).of_thread:
            assert self._staged is not None
            return self._staged.cancel(job)
        if job not in self._waiting:
            return False
        del self._waiting[job]
        job.cancelled, job.copied = True, None
        job.done.set()
        copy = _copy(job)
        if copy.last is not None:
            assert copy.pieces is not None
            job.moved_share = sum(s.nbytes for _, s in copy.pieces[: copy.sent]) / copy.nbytes
            self._fence(copy.last)
        return True

    def join(self, job: LoadJob, layer: int) -> bool:
        """Have the compute wait for a copy in its stream; True: the host has waited, for there was no stream to."""
        done = _done(job)
        if done.of_thread:
            done.wait()
            return True
        self.promote(job)
        copy = done.copy
        if copy is not None and copy.last is not None and not copy.ended:
            runtime, compute = self._runtime, self._device.compute_stream()
            before, after = self._clock.event(), self._clock.event()
            runtime.record(before, compute)
            runtime.wait_event(compute, copy.last.end)
            runtime.record(after, compute)
            self._holds.append((layer, before, after))
        return False

    def overtake(self, job: LoadJob) -> bool:
        """Let its slot be used anew: later copies come after this one. True: the host has waited."""
        done = _done(job)
        if done.of_thread:
            done.wait()
            return True
        copy = done.copy
        return copy is not None and copy.last is not None and not copy.ended and self._fence(copy.last)

    def poll(self) -> None:
        """Enqueue what there is room for; the compute may be on another stream since."""
        self._device.compute_stream()
        self._settle(self._demand)
        self._settle(self._prefetch)
        self._feed()

    def tell(self, books: Books) -> None:
        """Read the events that are done, without waiting for any."""
        self._settle(self._demand)
        self._settle(self._prefetch)
        told, self._told = self._told, []
        for job, copied in sorted(told, key=lambda one: one[1].end_s):
            start_s = min(max(copied.start_s, self._link_free_s), copied.end_s)  # the two streams share one link
            self._link_free_s = max(self._link_free_s, copied.end_s)
            books.timed(job, Copied(start_s, copied.end_s, None, copied.end_s - start_s))
        holds, clock = self._holds, self._clock
        while holds and self._runtime.query(holds[0][2]):
            layer, before, after = holds.popleft()
            books.held(layer, clock.read(before), clock.read(after))

    @property
    def pending(self) -> int:
        """Copies queued or under way, as far as the cache has looked; from any thread."""
        staged = 0 if self._staged is None else self._staged.pending
        return len(self._waiting) + len(self._demand.under_way) + len(self._prefetch.under_way) + staged

    def close(self) -> None:
        """Drop what waits, and wait for what is enqueued: then slots and pinned memory can go. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for job in list(self._waiting):
            self.cancel(job)
        if self._staged is not None:
            self._staged.close()
        for lane in (self._demand, self._prefetch):
            if lane.under_way:
                self._runtime.synchronize(lane.under_way[-1].end)
                self._settle(lane)

    # -- for `StreamDone` --------------------------------------------------------------------------------

    def ended(self, copy: _Copy) -> bool:
        """Whether a copy has ended, without waiting."""
        if copy.last is not None:
            self._settle(copy.last.lane)
        return copy.ended

    def finish(self, copy: _Copy) -> None:
        """Make the host wait for a copy."""
        self.promote(copy.job)
        if copy.last is not None and not copy.ended:
            self._runtime.synchronize(copy.last.end)
            self._settle(copy.last.lane)

    # -- inside ------------------------------------------------------------------------------------------

    def _stage(self, jobs: list[LoadJob], priority: int) -> list[LoadJob]:
        """Give the loader's thread what is not in pinned memory; the others."""
        assert self._staged is not None
        slow = [job for job in jobs if not self._pinned[job.layer]]
        if not slow:
            return jobs
        for job in slow:
            _done(job).by_thread()
        self._staged.submit(slow, priority)
        return [job for job in jobs if self._pinned[job.layer]]

    def _fence(self, part: _Part) -> bool:
        """Have copies that are enqueued from now on come after this one. True: the host has waited."""
        if part.ended:
            return False
        other = self._prefetch if part.lane is self._demand else self._demand
        self._runtime.wait_event(other.stream, part.end)
        if self._staged is None:
            return False
        self._runtime.synchronize(part.end)  # a thread's copy may be next, whose stream is its own affair
        return True

    def _feed(self) -> None:
        """Enqueue prefetches while less than `ahead_bytes` are under way."""
        if not self._waiting:
            return
        lane = self._prefetch
        self._settle(lane)
        left, batch = self._ahead_bytes - lane.bytes, list[tuple[LoadJob, _Pieces | None]]()
        for job in self._waiting:
            copy = _copy(job)
            if copy.nbytes <= self._part_bytes:
                if copy.nbytes > left:
                    break
                batch.append((job, None))
                left -= copy.nbytes
                continue
            if copy.pieces is None:
                copy.pieces = [
                    piece for d, s in zip(job.dst, job.src, strict=True)  # type: ignore[arg-type]  # no promises
                    for piece in chunks(d, s, self._part_bytes)
                ]  # fmt: skip
            for piece in copy.pieces[copy.sent :]:
                if piece[1].nbytes > left and (batch or lane.under_way):
                    left = -1
                    break
                batch.append((job, [piece]))
                left -= piece[1].nbytes
            if left < 0:
                break
        if not batch:
            return
        if self._demand.under_way:
            self._runtime.wait_event(lane.stream, self._demand.under_way[-1].end)
        self._enqueue(lane, batch)
        for job in dict.fromkeys(job for job, _ in batch):
            if job.started or job.error is not None:
                del self._waiting[job]

    def _enqueue(self, lane: _Lane, batch: Sequence[tuple[LoadJob, _Pieces | None]]) -> None:
        """Copies back to back; one wait for the last use of slots that were given away together.

        Args:
            batch: jobs, and which of their next pieces; None: all that is left.
        """
        if not batch:
            return
        runtime, clock = self._runtime, self._clock
        after: Any = None
        start = clock.event()
        with runtime.on(lane.stream):
            for job, pieces in batch:
                copy = _copy(job)
                if job.error is not None:
                    continue
                try:
                    if copy.last is None and job.after is not None and job.after is not after:
                        after = job.after
                        runtime.wait_event(lane.stream, after)
                    if start is not None:
                        runtime.record(start, lane.stream)
                    if copy.last is None and job.writeback:
                        self._write_back(lane, job)
                    pieces, nbytes = self._next(copy, pieces)
                    for d, s in pieces:
                        lane.side.copy(d, s)
                    end = clock.event()
                    runtime.record(end, lane.stream)
                except Exception as error:  # the cache drops a guess and fails a forward that waits
                    job.error, job.copied, copy.ended = error, None, True
                    self._settle_failed(lane)
                    continue
                final = copy.pieces is None or copy.sent == len(copy.pieces)
                copy.last = _Part(copy, lane, nbytes, final, start, end)
                start = None
                lane.under_way.append(copy.last)
                lane.bytes += nbytes
                if final:
                    job.started, job.copied = True, Copied(0.0, 0.0, end)

    def _settle_failed(self, lane: _Lane) -> None:
        """Some of a copy may be enqueued, and its slot is given away: make the host wait for the stream."""
        with contextlib.suppress(Exception):  # where the device is lost, nothing will be written
            end = self._runtime.event(timing=False)
            self._runtime.record(end, lane.stream)
            self._runtime.synchronize(end)

    @staticmethod
    def _next(copy: _Copy, pieces: _Pieces | None) -> tuple[_Pieces, int]:
        """What is enqueued next of a copy, and its bytes."""
        if copy.pieces is None:
            job = copy.job
            return list(zip(job.dst, job.src, strict=True)), copy.nbytes  # type: ignore[arg-type]  # no promises
        if pieces is None:
            pieces = copy.pieces[copy.sent :]
        copy.sent += len(pieces)
        return pieces, sum(s.nbytes for _, s in pieces)

    def _settle(self, lane: _Lane) -> None:
        """Note what has ended on a stream, and when."""
        under_way, clock = lane.under_way, self._clock
        while under_way and self._runtime.query(under_way[0].end):
            part = under_way.popleft()
            part.ended = True
            lane.bytes -= part.nbytes
            start_s = lane.end_s if part.start is None else clock.read(part.start)
            lane.end_s = clock.read(part.end)
            self._told.append((part.copy.job, Copied(start_s, lane.end_s, None, lane.end_s - start_s)))
            if part.final:
                part.copy.ended = True

    def _write_back(self, lane: _Lane, job: LoadJob) -> None:
        """Copy what is in the slot to the host, where nobody needs it: only what it takes matters."""
        need = max(d.nbytes for d in job.dst)
        if lane.scratch is None or lane.scratch.nbytes < need:
            lane.scratch = self._runtime.pinned(need)
        for d in job.dst:
            self._runtime.copy(lane.scratch[: d.nbytes].view(d.dtype).view(d.shape), d)


def _done(job: LoadJob) -> StreamDone:
    assert isinstance(job.done, StreamDone)  # made by `event`
    return job.done


def _copy(job: LoadJob) -> _Copy:
    copy = _done(job).copy
    assert copy is not None  # made when it was queued
    return copy
