"""One copy stream of a GPU (`Lane`), and staged copies of host memory that is not pinned (`Staging`)."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from ..cache.device import Copied, Tensors
from ..cache.loader import LoadJob
from .runtime import EventClock, GpuRuntime


class Staging:
    """Two pinned buffers of `nbytes` on a stream of their own: the host fills one while the other is copied.

    Where dtypes differ, the store's bytes cross the link and are cast on the device. `copy` returns when the bytes have
    arrived, so that demand overtakes what is queued.
    """

    def __init__(self, runtime: GpuRuntime, nbytes: int) -> None:
        self._runtime, self._stream = runtime, runtime.stream()
        self._nbytes = nbytes
        self._buffers = [runtime.pinned(nbytes) for _ in range(2)]
        self._free: list[Any] = [None, None]  # done when the device has read the buffer
        self._turn = 0
        self._device_side = DeviceSide(runtime, nbytes)

    def copy(self, dst: Tensors, src: Tensors, after: Any) -> None:
        """dst <- src, after the event `after` (None: at once); either side may be the host's. The host waits."""
        runtime, stream = self._runtime, self._stream
        if after is not None:
            runtime.wait_event(stream, after)
        for d, s in zip(dst, src, strict=True):
            to_host = s.device == runtime.device and d.device != runtime.device
            for d_part, s_part in chunks(d, s, self._nbytes):
                if to_host:
                    self._down(d_part, s_part)
                else:
                    self._up(d_part, s_part)
        done = runtime.event(timing=False)
        runtime.record(done, stream)
        runtime.synchronize(done)

    def _up(self, d: torch.Tensor, s: torch.Tensor) -> None:
        runtime = self._runtime
        staged = self._next(s)
        staged.copy_(s)
        with runtime.on(self._stream):
            self._device_side.copy(d, staged)
        self._sent()

    def _down(self, d: torch.Tensor, s: torch.Tensor) -> None:
        runtime = self._runtime
        staged = self._next(s)
        with runtime.on(self._stream):
            runtime.copy(staged, s)
        runtime.synchronize(self._sent())
        d.copy_(staged)

    def _next(self, like: torch.Tensor) -> torch.Tensor:
        """A part of the next buffer shaped like a tensor, once the device has read its last content."""
        self._turn ^= 1
        if (free := self._free[self._turn]) is not None:
            self._runtime.synchronize(free)
        return self._buffers[self._turn][: like.nbytes].view(like.dtype).view(like.shape)

    def _sent(self) -> Any:
        event = self._free[self._turn] or self._runtime.event(timing=False)
        self._runtime.record(event, self._stream)
        self._free[self._turn] = event
        return event


class DeviceSide:
    """Copies on the entered stream, cast on the device where dtypes differ.

    Each stream has one cast buffer; operations of a stream run in order, so a chunk is cast before the next one lands.
    """

    def __init__(self, runtime: GpuRuntime, nbytes: int) -> None:
        self._runtime, self._nbytes = runtime, nbytes
        self._buffer: torch.Tensor | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the cast buffer."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def reserve(self) -> None:
        """Allocate the cast buffer now."""
        if self._buffer is None:
            self._buffer = self._runtime.buffer(self._nbytes)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """dst (device) <- src (pinned); both contiguous, of one shape."""
        if dst.dtype == src.dtype:
            self._runtime.copy(dst, src)
            return
        self.reserve()
        assert self._buffer is not None
        for d, s in chunks(dst, src, self._nbytes):
            landed = self._buffer[: s.nbytes].view(s.dtype)
            self._runtime.copy(landed, s)
            self._runtime.copy(d, landed)


def chunks(dst: torch.Tensor, src: torch.Tensor, nbytes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Both as flat parts of at most `nbytes` of the source; contiguous tensors of one shape (else ValueError)."""
    if dst.shape != src.shape:
        raise ValueError(f"a copy of {tuple(src.shape)} to {tuple(dst.shape)}")
    step = max(1, nbytes // src.element_size())
    return list(zip(dst.view(-1).split(step), src.view(-1).split(step), strict=True))


_CAST_BYTES = 16 << 20  # of each stream's buffer for experts that are kept in another dtype than the store's

Pieces = list[tuple[torch.Tensor, torch.Tensor]]  # slot, source


class StreamCopy:
    """A job of the streams, and which of its pieces are enqueued. last: the part enqueued last."""

    __slots__ = ("ended", "job", "last", "nbytes", "pieces", "sent", "writing")

    def __init__(self, job: LoadJob, nbytes: int) -> None:
        self.job, self.nbytes = job, nbytes
        self.pieces: Pieces | None = None  # once the first of several is to be enqueued
        self.sent = 0
        self.last: Part | None = None
        self.ended = False
        self.writing = Copied(0.0, 0.0, None)  # its first part, once that has ended and if it copied the slot back

    def left(self, part_bytes: int) -> Pieces:
        """Its pieces not enqueued yet; the first call divides it into pieces of at most `part_bytes`."""
        if self.pieces is None:
            self.pieces = [
                piece for d, s in zip(self.job.dst, self.job.src, strict=True)  # type: ignore[arg-type]  # none is pending
                for piece in chunks(d, s, part_bytes)
            ]  # fmt: skip
        return self.pieces[self.sent :]

    def take(self, pieces: Pieces | None) -> tuple[Pieces, int]:
        """Take these pieces or (None) all that is left; returns them and their bytes."""
        if self.pieces is None:
            job = self.job
            return list(zip(job.dst, job.src, strict=True)), self.nbytes  # type: ignore[arg-type]  # none is pending
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
        """The share of its bytes that is enqueued, of a copy in pieces."""
        assert self.pieces is not None
        return sum(s.nbytes for _, s in self.pieces[: self.sent]) / self.nbytes


class Part:
    """What one event marks the end of: a whole expert, or some pieces of a prefetch.

    start: the event at which waiting ended, if there was a wait; None: the part before ends there. written: the event
    at which the slot's expert was copied back; None: it was not.
    """

    __slots__ = ("copy", "end", "ended", "final", "lane", "nbytes", "start", "written")

    def __init__(
        self, copy: StreamCopy, lane: Lane, nbytes: int, final: bool, start: Any, written: Any, end: Any
    ) -> None:
        self.copy, self.lane, self.nbytes, self.final = copy, lane, nbytes, final
        self.start, self.written, self.end, self.ended = start, written, end, False


class Lane:
    """One copy stream and what is enqueued on it, in order. `settle` adds ended copies and their times to `told`."""

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
        """Enqueue copies back to back, with one wait for each distinct last use of their slots.

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
                    written = None
                    if copy.last is None and job.writeback:
                        self._write_back(job)
                        written = clock.event()
                        runtime.record(written, self.stream)
                    pieces, nbytes = copy.take(pieces)
                    for d, s in pieces:
                        self.side.copy(d, s)
                    end = clock.event()
                    runtime.record(end, self.stream)
                except Exception as error:  # the cache drops a prefetch and fails a forward that waits
                    job.error, job.copied, copy.ended = error, None, True
                    self._settle_failed()
                    continue
                copy.last = Part(copy, self, nbytes, copy.all_taken, start, written, end)
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
            writeback_s = 0.0 if part.written is None else clock.read(part.written) - start_s
            self._end_s = clock.read(part.end)
            copied = Copied(start_s, self._end_s, None, self._end_s - start_s, writeback_s)
            if part.written is not None:
                part.copy.writing = copied
            self._told.append((part.copy.job, copied))
            if part.final:
                part.copy.ended = True

    def finish(self) -> None:
        """Make the host wait until all of it has ended."""
        if self.under_way:
            self._runtime.synchronize(self.under_way[-1].end)
            self.settle()

    def _settle_failed(self) -> None:
        """Make the host wait for the stream: a part of a failed copy may be enqueued, and its slot is given away."""
        with contextlib.suppress(Exception):  # where the device is lost, nothing will be written
            end = self._runtime.event(timing=False)
            self._runtime.record(end, self.stream)
            self._runtime.synchronize(end)

    def _write_back(self, job: LoadJob) -> None:
        """Copy the slot's content to scratch memory on the host: only the time counts."""
        need = max(d.nbytes for d in job.dst)
        if self._scratch is None or self._scratch.nbytes < need:
            self._scratch = self._runtime.pinned(need)
        for d in job.dst:
            self._runtime.copy(self._scratch[: d.nbytes].view(d.dtype).view(d.shape), d)
