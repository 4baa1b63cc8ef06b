"""The loader: one thread that copies experts into slots, demand loads always first."""

from __future__ import annotations

import heapq
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from ....errors import RuntimeFailure
from .slots import PendingExpert

if TYPE_CHECKING:
    from .device import Copied, Device, Tensors

DEMAND, PREFETCH = 0, 1
_LOOK_AHEAD = 64  # queued jobs whose bytes a source may ask for ahead; the source decides how many
Cause = Literal["demand", "prefetch", "migration"]


@dataclass(eq=False, slots=True)
class LoadJob:
    """One segment of an expert to be copied into one slot.

    The loader's thread sets `copied`, or `error` where the copy raised, before `done`.
    """

    segment: int
    slot: int
    dst: Tensors
    src: Tensors | PendingExpert
    after: Any
    layer: int
    cause: Cause  # why it was asked for; stays so when demand overtakes it
    done: threading.Event = field(default_factory=threading.Event)
    nbytes: int = 0  # that it moves into the slot
    copied: Copied | None = None
    error: BaseException | None = None
    started: bool = False
    cancelled: bool = False
    writeback: bool = False  # the expert that was in the slot is copied back to the host first
    ticket: int = 0  # of the core

    @property
    def prefetch(self) -> bool:
        return self.cause == "prefetch"


class Loader:
    """A priority queue of copies in front of one device link.

    Order: demand before prefetch, then first come first served. A started copy is never interrupted. The thread
    requests the bytes of a `PendingExpert`, and of those behind it, before it waits for them and again before it copies
    them, so that fetches and copies overlap.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._heap: list[tuple[int, int, LoadJob]] = []
        self._sequence = 0
        self._wake = threading.Condition()
        self._closed = False
        self._busy = False
        self._scratch: Tensors | None = None  # of one expert, on the host
        self._thread = threading.Thread(target=self._run, name="tiermoe-loader", daemon=True)
        self._thread.start()

    def submit(self, jobs: list[LoadJob], priority: int) -> None:
        """Queue copies in this order. Raises RuntimeFailure after `close`."""
        with self._wake:
            if self._closed:
                for job in jobs:
                    job.cancelled = True
                    job.done.set()
                raise RuntimeFailure("the expert cache is closed", "start a new worker")
            for job in jobs:
                heapq.heappush(self._heap, (priority, self._sequence, job))
                self._sequence += 1
            self._wake.notify()

    def promote(self, job: LoadJob) -> None:
        """Give a queued prefetch the priority of a demand load; nothing if it has started."""
        with self._wake:
            if job.started or job.cancelled:
                return
            self._remove(job)
            heapq.heappush(self._heap, (DEMAND, self._sequence, job))
            self._sequence += 1

    def cancel(self, job: LoadJob) -> bool:
        """Drop a copy that has not started. False if it has: then wait for `done`."""
        with self._wake:
            if job.started:
                return False
            job.cancelled = True
            self._remove(job)
            job.done.set()
            return True

    def _remove(self, job: LoadJob) -> None:
        self._heap = [entry for entry in self._heap if entry[2] is not job]
        heapq.heapify(self._heap)

    @property
    def pending(self) -> int:
        """Copies queued or under way."""
        with self._wake:
            return len(self._heap) + self._busy

    def close(self) -> None:
        """Stop after the copy under way; queued copies are dropped. Safe to call twice."""
        with self._wake:
            self._closed = True
            for _, _, job in self._heap:
                job.cancelled = True
                job.done.set()
            self._heap.clear()
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                src = self._fetch(job.src) if isinstance(job.src, PendingExpert) else job.src
                written = self._write_back(job) if job.writeback else None
                copied = self.device.copy(job.dst, src, job.after)
                if written is not None:  # both copies as one
                    copied = replace(
                        copied, start_s=written.start_s, link_s=written.link_s + copied.link_s,
                        writeback_s=written.end_s - written.start_s,
                    )  # fmt: skip
                job.copied = copied
            except BaseException as error:  # handed to the cache, which drops a prefetch and fails a forward that waits
                job.error = error
            job.done.set()

    def _write_back(self, job: LoadJob) -> Copied:
        """Copy the slot's content to scratch memory on the host: only the time counts."""
        if self._scratch is None:
            self._scratch = tuple(t.cpu().clone() for t in job.dst)
        return self.device.copy(self._scratch, job.dst, job.after)

    def _fetch(self, source: PendingExpert) -> Tensors:
        source.ask(self._pending())
        tensors = source.tensors()
        if behind := self._pending():
            behind[0].ask(behind[1:])
        return tensors

    def _pending(self) -> list[PendingExpert]:
        """The queued pending experts, in copy order."""
        with self._wake:
            jobs = [job for _, _, job in heapq.nsmallest(_LOOK_AHEAD, self._heap)]
        return [job.src for job in jobs if isinstance(job.src, PendingExpert)]

    def _next(self) -> LoadJob | None:
        with self._wake:
            self._busy = False
            while not self._heap and not self._closed:
                self._wake.wait()
            if self._closed:
                return None
            _, _, job = heapq.heappop(self._heap)
            job.started = True
            self._busy = True
            return job
