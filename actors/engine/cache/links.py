"""The link of a cache, and what carries its copies in Python: a loader's thread, or what a virtual clock moves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from ....errors import RuntimeFailure, StoreError
from ...core import _core
from .loader import DEMAND, PREFETCH, Cause, Loader, LoadJob

if TYPE_CHECKING:
    from .device import Tensors
    from .slot_map import SlotMap
    from .slots import PendingExpert

_COPIED, _FAILED, _CANCELLED = range(1, 4)  # `core::Ending`
EndedCopy = tuple[int, int, tuple[float, float, float, float] | None]
LinkReport = tuple[bool, Sequence[EndedCopy]]
CAUSES: tuple[Cause, ...] = ("demand", "prefetch", "migration", "demand")  # by `core::Cause`, the last of preloads


def fail(error: BaseException, layer: int) -> NoReturn:
    """Raise the error of a copy in the forward that needs it."""
    if isinstance(error, StoreError):  # says it better, and may pass
        raise error
    raise RuntimeFailure(
        f"copying an expert of MoE layer {layer} failed: {error}", "run again, and report it if it stays"
    ) from error


@dataclass(frozen=True)
class CacheLink:
    """Makes the copies of one cache.

    core: the link in native code. clock: seconds, on the scale of its times.
    place: tells a link that copies by addresses where all segments lie; called now and after each new split.
    gbps: 1e9 bytes per second of a disk, as measured when the link was made; None: it is no disk's.
    """

    core: _core.Link
    clock: Callable[[], float] = time.perf_counter
    place: Callable[[], object] = lambda: None
    gbps: float | None = None


def loader_link(loader: Loader, where: SlotMap, clock: Callable[[], float] = time.perf_counter) -> CacheLink:
    """The link of a loader, which it closes; arguments as of `QueueLink`."""
    return CacheLink(_core.PythonLink(QueueLink(loader, where, clock)), clock)


class QueueLink:
    """A `Loader` as the core's link (`core::Link`, through `_core.PythonLink`), on the forward's thread.

    `poll`, `look`, `join`, `overtake` and `wait` return a `LinkReport`: whether the host has waited, and the copies
    that ended since the last report: (ticket, `core::Ending`, (start, end, seconds of the link, of these the copy back)
    or None).

    Args:
        where: gives the tensors of slots and of sources.
        clock: seconds, on the same scale as the times of the queue's copies.
    """

    def __init__(self, loader: Loader, where: SlotMap, clock: Callable[[], float]) -> None:
        self.loader, self._where, self._device, self.now_s = loader, where, loader.device, clock
        self.jobs: dict[int, LoadJob] = {}  # by ticket: under way
        self._failed: dict[int, BaseException] = {}
        self._after: Any = None  # the device's mark of slots' last uses
        self._marks = 0

    def mark(self) -> int:
        """Number of a new mark: what was enqueued before it comes before copies that are submitted after it."""
        self._after = self._device.mark_use()
        self._marks += 1
        return self._marks

    def submit(self, copies: Sequence[tuple[int, int, int, int, int, bool]], urgent: bool) -> bool:
        """Queue these, of (ticket, segment, slot, bytes, cause, back). False: the queue is closed."""
        where, after, jobs = self._where, self._after, list[LoadJob]()
        for ticket, segment, slot, nbytes, cause, back in copies:
            job = self.jobs[ticket] = LoadJob(
                segment, slot, where.target(segment, slot), where.source(segment), after,
                where.layer_of(segment), CAUSES[cause], nbytes=nbytes, writeback=back, ticket=ticket,
            )  # fmt: skip
            jobs.append(job)
        try:
            self.loader.submit(jobs, DEMAND if urgent else PREFETCH)
        except RuntimeFailure:  # it is closed: all are cancelled
            return False
        return True

    def promote(self, ticket: int) -> None:
        self.loader.promote(self.jobs[ticket])

    def cancel(self, ticket: int) -> float | None:
        """The share of its bytes that had been moved: none; None: it has begun, and arrives."""
        job = self.jobs[ticket]
        if not self.loader.cancel(job):
            return None
        del self.jobs[ticket]
        return 0.0

    def poll(self) -> LinkReport:
        return False, self._ended()

    def look(self) -> LinkReport:
        return False, self._ended()

    def join(self, ticket: int, layer: int) -> LinkReport:
        return self.wait(ticket)

    def overtake(self, ticket: int) -> LinkReport:
        return self.wait(ticket)

    def wait(self, ticket: int) -> LinkReport:
        job = self.jobs[ticket]
        job.done.wait()
        return True, [self._end(job), *self._ended()]

    def _ended(self) -> list[EndedCopy]:
        """The copies that ended since the last report."""
        return [self._end(job) for job in list(self.jobs.values()) if job.done.is_set()]

    def _end(self, job: LoadJob) -> EndedCopy:
        ticket, copied = job.ticket, job.copied
        del self.jobs[ticket]
        if copied is not None and not job.cancelled:
            return ticket, _COPIED, (copied.start_s, copied.end_s, copied.link_s, copied.writeback_s)
        if job.error is None or job.cancelled:
            return ticket, _CANCELLED, None
        self._failed[ticket] = job.error
        return ticket, _FAILED, None

    def fail(self, ticket: int, layer: int) -> None:
        fail(self._failed[ticket], layer)

    def forget(self, ticket: int) -> None:
        """Of a failed copy."""
        del self._failed[ticket]

    def pending(self) -> int:
        return self.loader.pending

    def close(self) -> None:
        self.loader.close()


class Carrier:
    """Moves the bytes of a virtual link's copies (`_core.CarryingLink`), each when it ends.

    where: gives the tensors.
    """

    def __init__(self, where: SlotMap) -> None:
        self._where = where
        self._errors: dict[int, Exception] = {}  # by ticket

    def carry(self, ticket: int, segment: int, slot: int) -> bool:
        """False: it failed."""
        try:
            copy_now(self._where.target(segment, slot), self._where.source(segment))
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
