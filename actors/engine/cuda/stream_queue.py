"""The copy queue of a GPU: copies from pinned memory on two streams, enqueued by the forward's own thread.

    demand      every copy at once, a batch back to back after one wait for the slots' last use
    prefetch    at most `ahead_bytes` at a time, behind the demand under way, a large expert in parts; the rest waits
                here, where demand overtakes it, and is enqueued whenever the cache asks something

A copy engine takes copies in the order of enqueueing, whatever the streams' priorities, so `ahead_bytes` bounds both a
demand load's wait and the work left for the link while the host is away. A wrong prefetch costs only what is enqueued.

The host never waits for a copy on a forward's way: `join` has the compute's stream wait for the copy's event. Timing
events around that wait, read later, show what the compute waited.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from ....errors import RuntimeFailure
from ..cache.device import Copied
from ..cache.loader import DEMAND, CopyTimes, Loader, LoadJob
from .device import CudaDevice
from .lane import Lane, Part, Pieces, StreamCopy
from .runtime import EventClock


class StreamDone:
    """Whether a copy has ended, made by a stream or by the loader's thread."""

    __slots__ = ("_event", "_queue", "copy")

    def __init__(self, queue: StreamQueue) -> None:
        self._queue = queue
        self.copy: StreamCopy | None = None  # of a stream
        self._event: threading.Event | None = None  # where a thread tells

    def by_thread(self) -> None:
        """The loader's thread makes this copy."""
        self._event = threading.Event()

    @property
    def of_thread(self) -> bool:
        return self._event is not None

    @property
    def seen(self) -> bool:
        """`is_set` as of the last look at the streams."""
        return self._event.is_set() if self._event is not None else self.copy is not None and self.copy.ended

    def is_set(self) -> bool:
        if self._event is not None:
            return self._event.is_set()
        return self.copy is not None and (self.copy.ended or self._queue.ended(self.copy))

    def wait(self) -> bool:
        """Make the host wait; not for a forward's way."""
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


class StreamQueue:
    """A `CopyQueue` for a GPU.

    Args:
        pinned: of each MoE layer, whether its experts are in pinned memory. Others go through the loader's thread and
            staging buffers, and the host waits for them.
        ahead_bytes: of prefetches enqueued at a time; larger experts than half of that go in parts of that half.
        casts: whether slots have another dtype than the store.
    """

    def __init__(self, device: CudaDevice, pinned: Sequence[bool], ahead_bytes: int, casts: bool = False) -> None:
        self._device, self._runtime, self._pinned = device, device.runtime, tuple(pinned)
        self._ahead_bytes, self._part_bytes = ahead_bytes, max(1, ahead_bytes // 2)
        self._told: list[tuple[LoadJob, Copied]] = []  # ended, in no book yet
        urgent, other = self._runtime.stream(True), self._runtime.stream(False)
        self._clock = EventClock(self._runtime, urgent)
        self._demand = Lane(self._runtime, urgent, self._clock, self._told)
        self._prefetch = Lane(self._runtime, other, self._clock, self._told)
        self._waiting: dict[LoadJob, None] = {}  # prefetches of which not all is enqueued
        self._staged = None if all(self._pinned) else Loader(device)
        self._holds: deque[tuple[int, StreamCopy, Any, Any]] = deque()  # layer, and the compute's events around a wait
        self._link_free_s = 0.0
        self._closed = False
        if casts:
            for lane in (self._demand, self._prefetch):
                with self._runtime.on(lane.stream):
                    lane.side.reserve()

    # -- as `CopyQueue` ----------------------------------------------------------------------------------

    def event(self) -> StreamDone:
        return StreamDone(self)

    def submit(self, jobs: list[LoadJob], priority: int) -> None:
        """Enqueue demand, queue prefetches. Raises RuntimeFailure after `close`."""
        if self._closed:
            for job in jobs:
                job.cancelled = True
                copy = _done(job).copy = StreamCopy(job, 0)
                copy.ended = True
            raise RuntimeFailure("the expert cache is closed", "start a new worker")
        if self._staged is not None:
            jobs = self._stage(jobs, priority)
        copies = list[StreamCopy]()
        for job in jobs:  # in pinned memory, so none is pending
            copy = _done(job).copy = StreamCopy(job, sum([s.nbytes for s in job.src]))  # type: ignore[union-attr]
            copies.append(copy)
        if priority == DEMAND:
            self._demand.enqueue([(copy, None) for copy in copies])
        else:
            self._waiting.update(dict.fromkeys(jobs))
        self._feed()

    def promote(self, job: LoadJob) -> None:
        """Enqueue the rest of a prefetch as demand."""
        if _done(job).of_thread:
            assert self._staged is not None  # whose job it is
            self._staged.promote(job)
        elif job in self._waiting:
            del self._waiting[job]
            copy = _copy(job)
            if copy.last is not None and not copy.last.ended:
                self._runtime.wait_event(self._demand.stream, copy.last.end)
            self._demand.enqueue([(copy, None)])

    def cancel(self, job: LoadJob) -> bool:
        """Drop a copy of which something waits; `job.moved_share` says what does not. False: `overtake` it."""
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
            job.moved_share = copy.taken_share
            self._fence(copy.last)
        return True

    def wait(self, job: LoadJob) -> None:
        job.done.wait()

    def join(self, job: LoadJob, layer: int) -> bool:
        """Have the compute wait for a copy in its stream; True: the host has waited for the loader's thread."""
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
            self._holds.append((layer, copy, before, after))
        return False

    def overtake(self, job: LoadJob) -> bool:
        """Order later copies behind this one, so that its slot can be used. True: the host has waited."""
        done = _done(job)
        if done.of_thread:
            done.wait()
            return True
        copy = done.copy
        return copy is not None and copy.last is not None and not copy.ended and self._fence(copy.last)

    def poll(self) -> None:
        """Enqueue what there is room for, and follow the compute to its present stream."""
        self._device.compute_stream()
        self._feed()

    def arrived(self, jobs: Iterable[LoadJob]) -> list[LoadJob]:
        for lane in (self._demand, self._prefetch):
            if lane.under_way:
                lane.settle()
        return [job for job in jobs if _done(job).seen]

    def tell(self, times: CopyTimes) -> None:
        """Report the events that are done, without waiting."""
        self._demand.settle()
        self._prefetch.settle()
        told = sorted(self._told, key=lambda one: one[1].end_s)
        self._told.clear()
        for job, copied in told:
            start_s = min(max(copied.start_s, self._link_free_s), copied.end_s)  # the two streams share one link
            self._link_free_s = max(self._link_free_s, copied.end_s)
            writeback_s = max(0.0, copied.start_s + copied.writeback_s - start_s)
            times.timed(job, Copied(start_s, copied.end_s, None, copied.end_s - start_s, writeback_s))
        holds, clock = self._holds, self._clock
        while holds and self._runtime.query(holds[0][3]):
            layer, copy, before, after = holds.popleft()
            start_s, end_s = clock.read(before), clock.read(after)
            self.ended(copy)  # as it has by now: its times are read
            times.device_waited(layer, start_s, end_s, writing_s(copy.writing, start_s, end_s))

    @property
    def pending(self) -> int:
        """Copies queued or under way, at the last look; from any thread."""
        staged = 0 if self._staged is None else self._staged.pending
        return len(self._waiting) + len(self._demand.under_way) + len(self._prefetch.under_way) + staged

    def close(self) -> None:
        """Drop what waits, and wait for what is enqueued. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        for job in list(self._waiting):
            self.cancel(job)
        if self._staged is not None:
            self._staged.close()
        self._demand.finish()
        self._prefetch.finish()

    # -- for `StreamDone` --------------------------------------------------------------------------------

    def ended(self, copy: StreamCopy) -> bool:
        """Whether a copy has ended, without waiting."""
        if copy.last is not None:
            copy.last.lane.settle()
        return copy.ended

    def finish(self, copy: StreamCopy) -> None:
        """Make the host wait for a copy."""
        self.promote(copy.job)
        if copy.last is not None and not copy.ended:
            self._runtime.synchronize(copy.last.end)
            copy.last.lane.settle()

    # -- inside ------------------------------------------------------------------------------------------

    def _stage(self, jobs: list[LoadJob], priority: int) -> list[LoadJob]:
        """Give the loader's thread the jobs outside pinned memory; returns the others."""
        assert self._staged is not None
        slow = [job for job in jobs if not self._pinned[job.layer]]
        if not slow:
            return jobs
        for job in slow:
            _done(job).by_thread()
        self._staged.submit(slow, priority)
        return [job for job in jobs if self._pinned[job.layer]]

    def _fence(self, part: Part) -> bool:
        """Order copies enqueued from now on behind this part. True: the host has waited."""
        if part.ended:
            return False
        other = self._prefetch if part.lane is self._demand else self._demand
        self._runtime.wait_event(other.stream, part.end)
        if self._staged is None:
            return False
        self._runtime.synchronize(part.end)  # a thread's copy may be next, on a stream of its own
        return True

    def _feed(self) -> None:
        """Enqueue prefetches while less than `ahead_bytes` are under way."""
        if not self._waiting:
            return
        self._prefetch.settle()
        batch = self._next_batch(self._ahead_bytes - self._prefetch.bytes)
        if not batch:
            return
        if self._demand.under_way:
            self._runtime.wait_event(self._prefetch.stream, self._demand.under_way[-1].end)
        self._prefetch.enqueue(batch)
        for job in dict.fromkeys(copy.job for copy, _ in batch):
            if job.started or job.error is not None:
                del self._waiting[job]

    def _next_batch(self, left: int) -> list[tuple[StreamCopy, Pieces | None]]:
        """The next prefetches within `left` bytes, for `Lane.enqueue`: small experts whole, others in pieces.

        Where nothing is under way, one piece larger than `left` is allowed.
        """
        batch = list[tuple[StreamCopy, Pieces | None]]()
        for job in self._waiting:
            copy = _copy(job)
            if copy.nbytes <= self._part_bytes:
                if copy.nbytes > left:
                    break
                batch.append((copy, None))
                left -= copy.nbytes
                continue
            for piece in copy.left(self._part_bytes):
                if piece[1].nbytes > left and (batch or self._prefetch.under_way):
                    return batch
                batch.append((copy, [piece]))
                left -= piece[1].nbytes
            if left < 0:
                break
        return batch


def _done(job: LoadJob) -> StreamDone:
    assert isinstance(job.done, StreamDone)  # made by `event`
    return job.done


def _copy(job: LoadJob) -> StreamCopy:
    copy = _done(job).copy
    assert copy is not None  # made when it was queued
    return copy


def writing_s(copied: Copied | None, start_s: float, end_s: float) -> float:
    """Seconds of a wait in which the awaited copy's slot was being copied back."""
    if copied is None or not copied.writeback_s:
        return 0.0
    return max(0.0, min(end_s, copied.start_s + copied.writeback_s) - max(start_s, copied.start_s))
