"""What carries copies for a cache's core: the stand-in's thread, a virtual clock, or a `CopyQueue` of Python."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ....errors import RuntimeFailure, StoreError
from .loader import DEMAND, PREFETCH, Cause, CopyQueue, LoadJob

if TYPE_CHECKING:
    from .device import Device, Tensors
    from .slots import PendingExpert, SlotMap

_UNDER_WAY, _COPIED, _FAILED, _CANCELLED = range(4)  # `core::Ending`
CAUSES: tuple[Cause, ...] = ("demand", "prefetch", "migration", "demand")  # by `core::Cause`


def fail(error: BaseException, layer: int) -> NoReturn:
    """Raise what a forward is told of a copy's error."""
    if isinstance(error, StoreError):  # says it better, and may pass
        raise error
    raise RuntimeFailure(
        f"copying an expert of MoE layer {layer} failed: {error}", "run again, and report it if it stays"
    ) from error


class QueueLink:
    """A `CopyQueue` as the core's link (`core::Link`, through `_core.PythonLink`), on the forward's thread.

    A copy's times may come after its layer (`ExpertCache.settle_times`).

    Args:
        where: gives the tensors of slots and of sources.
        clock: seconds, on the same scale as the times of the queue's copies.
    """

    def __init__(self, queue: CopyQueue, where: SlotMap, device: Device, clock: Callable[[], float]) -> None:
        self.queue, self._where, self._device, self.now_s = queue, where, device, clock
        self.jobs: dict[int, LoadJob] = {}  # by ticket
        self._marks = deque[tuple[int, Any]]()  # the device's marks of slots' last uses, by number
        self._last = 0  # mark
        self.poll = queue.poll

    def mark(self) -> int:
        """Number of a new mark: what was enqueued before it comes first."""
        oldest = min((job.mark for job in self.jobs.values()), default=self._last + 1)
        while self._marks and self._marks[0][0] < oldest:
            self._marks.popleft()
        self._last += 1
        self._marks.append((self._last, self._device.mark_use()))
        return self._last

    def submit(self, copies: Sequence[tuple[int, int, int, int, int, int, bool]], urgent: bool) -> bool:
        """Queue these, of (ticket, segment, slot, bytes, cause, mark, back). False: the queue is closed."""
        where, jobs, marks = self._where, list[LoadJob](), dict(self._marks)
        for ticket, segment, slot, nbytes, cause, mark, back in copies:
            job = LoadJob(
                segment, slot, where.target(segment, slot), where.source(segment), marks[mark],
                where.layer_of(segment), CAUSES[cause], self.queue.event(), nbytes, writeback=back, mark=mark,
            )  # fmt: skip
            self.jobs[ticket] = job
            jobs.append(job)
        try:
            self.queue.submit(jobs, DEMAND if urgent else PREFETCH)
        except RuntimeFailure:  # it is closed: all are cancelled
            return False
        return True

    def promote(self, ticket: int) -> None:
        self.queue.promote(self.jobs[ticket])

    def cancel(self, ticket: int) -> bool:
        return self.queue.cancel(self.jobs[ticket])

    def moved(self, ticket: int) -> float:
        return self.jobs[ticket].moved_share

    def ending(self, ticket: int) -> int:
        """`core::Ending`. On a stream a copy that the compute waits for counts as copied."""
        job = self.jobs[ticket]
        if job.joined or self.queue.arrived((job,)):
            return _CANCELLED if job.cancelled or (job.copied is None and job.error is None) else (
                _FAILED if job.copied is None else _COPIED
            )
        return _UNDER_WAY

    def join(self, ticket: int, layer: int) -> bool:
        job = self.jobs[ticket]
        waited = self.queue.join(job, layer)
        job.joined = True
        return waited

    def overtake(self, ticket: int) -> bool:
        job = self.jobs[ticket]
        waited = self.queue.overtake(job)
        job.joined = True
        return waited

    def wait(self, ticket: int) -> None:
        self.queue.wait(self.jobs[ticket])

    def fail(self, ticket: int, layer: int) -> None:
        error = self.jobs[ticket].error
        assert error is not None  # it failed
        fail(error, layer)

    def times(self, ticket: int) -> tuple[float, float, float, float] | None:
        """Of a copy that has ended: start, end, seconds of the link, of these the copy back; None: not known yet."""
        copied = self.jobs[ticket].copied
        if copied is None or copied.event is not None:
            return None
        return copied.start_s, copied.end_s, copied.link_s, copied.writeback_s

    def forget(self, ticket: int) -> None:
        del self.jobs[ticket]

    def pending(self) -> int:
        return self.queue.pending

    def close(self) -> None:
        self.queue.close()


class Carrier:
    """Moves the bytes of a virtual link's copies (`_core.CarryingLink`), each when it ends.

    Attributes:
        where: gives the tensors; set before the first copy.
    """

    where: SlotMap

    def __init__(self) -> None:
        self._errors: dict[int, Exception] = {}  # by ticket

    def carry(self, ticket: int, segment: int, slot: int) -> bool:
        """False: it failed."""
        try:
            copy_now(self.where.target(segment, slot), self.where.source(segment))
        except Exception as error:  # handed to the forward that needs the copy
            self._errors[ticket] = error
            return False
        return True

    def fail(self, ticket: int, layer: int) -> None:
        fail(self._errors[ticket], layer)

    def forget(self, ticket: int) -> None:
        """No one asks for a failed copy's error any more."""
        del self._errors[ticket]


def copy_now(dst: Tensors, src: Tensors | PendingExpert) -> None:
    """Copy an expert between tensors of this host."""
    if not isinstance(src, tuple):
        src.ask(())
        src = src.tensors()
    for target, source in zip(dst, src, strict=True):
        target.copy_(source)
