"""One copy stream of a GPU: copies and parts of copies, enqueued back to back, and which of them have ended, when."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from ..device import Copied
from ..loader import LoadJob
from .event_clock import EventClock
from .runtime import GpuRuntime
from .staging import DeviceSide, chunks

_CAST_BYTES = 16 << 20  # of each stream's buffer for experts that are kept in another dtype than the store's

Pieces = list[tuple[torch.Tensor, torch.Tensor]]  # slot, source


class StreamCopy:
    """A job of the streams, and which of its pieces are enqueued.

    last: what was enqueued last; of a copy whose pieces are all enqueued, its end is the copy's.
    """

    __slots__ = ("ended", "job", "last", "nbytes", "pieces", "sent")

    def __init__(self, job: LoadJob, nbytes: int) -> None:
        self.job, self.nbytes = job, nbytes
        self.pieces: Pieces | None = None  # once the first of several is to be enqueued
        self.sent = 0
        self.last: Part | None = None
        self.ended = False

    def left(self, part_bytes: int) -> Pieces:
        """Its pieces that are not enqueued; the first time it is cut in pieces of so many bytes at most."""
        if self.pieces is None:
            self.pieces = [
                piece for d, s in zip(self.job.dst, self.job.src, strict=True)  # type: ignore[arg-type]  # no promises
                for piece in chunks(d, s, part_bytes)
            ]  # fmt: skip
        return self.pieces[self.sent :]

    def take(self, pieces: Pieces | None) -> tuple[Pieces, int]:
        """What is enqueued next, these pieces or (None) all that is left, and its bytes."""
        if self.pieces is None:
            job = self.job
            return list(zip(job.dst, job.src, strict=True)), self.nbytes  # type: ignore[arg-type]  # no promises
        if pieces is None:
            pieces = self.pieces[self.sent :]
        self.sent += len(pieces)
        return pieces, sum(s.nbytes for _, s in pieces)

    @property
    def all_taken(self) -> bool:
        """Whether nothing is left, after the first `take`."""
        return self.pieces is None or self.sent == len(self.pieces)

    @property
    def taken_share(self) -> float:
        """Of its bytes, those enqueued, where it is enqueued in pieces."""
        assert self.pieces is not None
        return sum(s.nbytes for _, s in self.pieces[: self.sent]) / self.nbytes


class Part:
    """What one event tells the end of: all of an expert or, of a prefetch, some of its pieces.

    start: an event where waiting for others ended, if there was any; else the part before tells.
    """

    __slots__ = ("copy", "end", "ended", "final", "lane", "nbytes", "start")

    def __init__(self, copy: StreamCopy, lane: Lane, nbytes: int, final: bool, start: Any, end: Any) -> None:
        self.copy, self.lane, self.nbytes, self.final = copy, lane, nbytes, final
        self.start, self.end, self.ended = start, end, False


class Lane:
    """One copy stream and what is enqueued on it, in order.

    Args:
        clock: reads the times of events.
        told: where `settle` adds what has ended and what it took.
    """

    def __init__(
        self, runtime: GpuRuntime, stream: Any, clock: EventClock, told: list[tuple[LoadJob, Copied]]
    ) -> None:
        self._runtime, self.stream, self._clock, self._told = runtime, stream, clock, told
        self.under_way: deque[Part] = deque()
        self.bytes = 0  # under way
        self._end_s = 0.0  # of the last one that has ended
        self.side = DeviceSide(runtime, _CAST_BYTES)
        self._scratch: torch.Tensor | None = None  # pinned bytes, where experts that are copied back go

    def enqueue(self, batch: Sequence[tuple[StreamCopy, Pieces | None]]) -> None:
        """Copies back to back; one wait for the last use of slots that were given away together.

        Args:
            batch: copies, and which of their next pieces; None: all that is left.
        """
        if not batch:
            return
        runtime, clock = self._runtime, self._clock
        after: Any = None
        start = clock.event()
        with runtime.on(self.stream):
            for copy, pieces in batch:
                job = copy.job
                if job.error is not None:
                    continue
                try:
                    if copy.last is None and job.after is not None and job.after is not after:
                        after = job.after
                        runtime.wait_event(self.stream, after)
                    if start is not None:
                        runtime.record(start, self.stream)
                    if copy.last is None and job.writeback:
                        self._write_back(job)
                    pieces, nbytes = copy.take(pieces)
                    for d, s in pieces:
                        self.side.copy(d, s)
                    end = clock.event()
                    runtime.record(end, self.stream)
                except Exception as error:  # the cache drops a guess and fails a forward that waits
                    job.error, job.copied, copy.ended = error, None, True
                    self._settle_failed()
                    continue
                copy.last = Part(copy, self, nbytes, copy.all_taken, start, end)
                start = None
                self.under_way.append(copy.last)
                self.bytes += nbytes
                if copy.last.final:
                    job.started, job.copied = True, Copied(0.0, 0.0, end)

    def settle(self) -> None:
        """Note what has ended, and when, without waiting."""
        under_way, clock = self.under_way, self._clock
        while under_way and self._runtime.query(under_way[0].end):
            part = under_way.popleft()
            part.ended = True
            self.bytes -= part.nbytes
            start_s = self._end_s if part.start is None else clock.read(part.start)
            self._end_s = clock.read(part.end)
            self._told.append((part.copy.job, Copied(start_s, self._end_s, None, self._end_s - start_s)))
            if part.final:
                part.copy.ended = True

    def finish(self) -> None:
        """Make the host wait until all of it has ended."""
        if self.under_way:
            self._runtime.synchronize(self.under_way[-1].end)
            self.settle()

    def _settle_failed(self) -> None:
        """Some of a copy may be enqueued, and its slot is given away: make the host wait for the stream."""
        with contextlib.suppress(Exception):  # where the device is lost, nothing will be written
            end = self._runtime.event(timing=False)
            self._runtime.record(end, self.stream)
            self._runtime.synchronize(end)

    def _write_back(self, job: LoadJob) -> None:
        """Copy what is in the slot to the host, where nobody needs it: only what it takes matters."""
        need = max(d.nbytes for d in job.dst)
        if self._scratch is None or self._scratch.nbytes < need:
            self._scratch = self._runtime.pinned(need)
        for d in job.dst:
            self._runtime.copy(self._scratch[: d.nbytes].view(d.dtype).view(d.shape), d)
