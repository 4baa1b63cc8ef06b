"""The life cycle of loads behind `ExpertCache`, on the forward's thread.

    reserve     a free slot and a job for each absent segment        ABSENT -> LOADING
    land        the copy is in the slot                              LOADING -> RESIDENT
    drop        the copy was not begun, or it failed                 LOADING -> ABSENT
    evict       the slot is for another segment                      RESIDENT -> ABSENT
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ....errors import RuntimeFailure, StoreError
from ...policies.eviction import EvictionPolicy
from ...policies.residency import Reservation, Residency, ResidencyError, State
from .counting import CacheCounters
from .loader import DEMAND, Cause, CopyQueue, LoadJob
from .slots import SlotMap

if TYPE_CHECKING:
    from .device import Copied, Device
    from .link_queue import NativeLoads


def writing_s(copied: Copied | None, start_s: float, end_s: float) -> float:
    """Seconds of a wait in which the awaited copy's slot was being copied back."""
    if copied is None or not copied.writeback_s:
        return 0.0
    return max(0.0, min(end_s, copied.start_s + copied.writeback_s) - max(start_s, copied.start_s))


class _NotCounted:
    """Ignores the times of a preload, which no layer waits for."""

    def timed(self, job: LoadJob, copied: Copied) -> None:
        return None

    def device_waited(self, layer: int, start_s: float, end_s: float, writing_s: float) -> None:
        return None


class Loads:
    """Jobs, slots and eviction order of one cache, kept consistent.

    Args:
        clock: seconds, on the same scale as the times of the queue's copies.
        writeback: copy an evicted expert back to the host before its slot is used again.

    Attributes:
        under_way: the job of each LOADING key; the dict object never changes.
        native: loads in native code, which are under way beside those until `adopt`; None: there are none.
    """

    def __init__(
        self, queue: CopyQueue, device: Device, residency: Residency, eviction: EvictionPolicy, slot_map: SlotMap,
        counters: CacheCounters, clock: Callable[[], float], writeback: bool, native: NativeLoads | None = None,
    ) -> None:  # fmt: skip
        self.native = native
        self.queue, self._device, self._residency, self._eviction = queue, device, residency, eviction
        self._map, self._counters, self._clock = slot_map, counters, clock
        self.under_way: dict[int, LoadJob] = {}
        self._unwritten: set[int] | None = set() if writeback else None  # slots whose last expert is not copied back

    # -- in ----------------------------------------------------------------------------------------------

    def reserve(self, keys: Sequence[int], cause: Cause) -> list[LoadJob]:
        """Slots and jobs for absent segments; one mark for all covers what ran in these slots."""
        if not keys:
            return []
        after, reserved = self._device.mark_use(), list[Reservation]()
        reserve, admitted = self._residency.reserve, self._eviction.admitted
        for key in keys:
            reserved.append(reserve(key))
            admitted(key)
        return self.new_jobs(reserved, cause, after)

    def new_jobs(self, reserved: Sequence[Reservation], cause: Cause, after: Any) -> list[LoadJob]:
        """The jobs of reserved slots, not queued yet. after: the device's mark of the slots' last use."""
        where, event, under_way, jobs = self._map, self.queue.event, self.under_way, list[LoadJob]()
        bytes_of, layer_of, targets, sources = where.bytes_of, where.layer_of, where.targets, where.sources
        for reservation in reserved:
            key, slot, _ = reservation
            nbytes = bytes_of(key)
            dst, known = targets.get((slot, nbytes)), sources.get(key)
            if dst is None:
                dst = where.target(key, slot)
            src = where.source(key) if known is None else known
            job = LoadJob(reservation, dst, src, after, layer_of(key), cause, event(), nbytes)
            under_way[key] = job
            jobs.append(job)
        if self._unwritten:
            for job in jobs:
                job.writeback = job.reservation.slot in self._unwritten
            self._unwritten.difference_update([job.reservation.slot for job in jobs])
        return jobs

    def prefetch_native(self, keys: list[int]) -> None:
        """`reserve` and queue prefetches of these absent experts in native code, for an order in Python."""
        assert self.native is not None
        for key in keys:
            self._eviction.admitted(key)
        if keys:
            self.native.start(keys)

    def copying(self) -> list[int]:
        """The keys whose copies native code has under way."""
        assert self.native is not None
        return list(self.native.under_way)

    def adopt(self) -> None:
        """What native code has under way becomes jobs."""
        if self.native is not None:
            for reservation, prefetch, copy in self.native.take():
                (job,) = self.new_jobs((reservation,), "prefetch" if prefetch else "demand", None)
                self.native.queue.adopt(job, copy)

    def hand_back(self) -> bool:
        """All jobs become what native code has under way; False: they do not, since one is of another kind."""
        jobs = list(self.under_way.values())
        if self.native is None or any(job.cause == "migration" or job.writeback for job in jobs):
            return False
        for job in jobs:
            self.native.give(job)
        self.under_way.clear()
        return True

    def dropped(self) -> None:
        """Tell an order in Python of the prefetches that native code has cancelled."""
        if self.native is not None:
            for key in self.native.dropped():
                self._eviction.removed(key)

    def fail_cancelled(self, keys: Sequence[int]) -> NoReturn:
        """A native pass found the copy of one of these cancelled. Raises RuntimeFailure."""
        self.adopt()
        for key in keys:
            job = self.under_way.get(key)
            if job is not None and self.queue.arrived((job,)) and job.copied is None:
                self._fail(job)
        raise AssertionError(f"no copy of {keys} was cancelled")

    def land_ended(self) -> None:
        """Make every arrived copy resident; a failed one frees its slot."""
        if ended := self.queue.arrived(self.under_way.values()):
            self._land(ended)

    def land_needed(self, job: LoadJob, layer: int) -> None:
        """Wait for a copy that `layer` needs, and make it resident.

        Raises:
            RuntimeFailure: it failed (a prefetch is first loaded again) or the queue was closed. StoreError: no node
                has the expert now.
        """
        self._wait(job, layer)
        if job.copied is None:
            self._load_again(job, layer)
        self._land([self.under_way[job.reservation.key]])  # the second try's job, where there was one

    def land_behind(self, keys: Sequence[int]) -> int:
        """Make the first of these needed copies resident as far as they have ended well; returns how many."""
        jobs = list[LoadJob]()
        for key in keys:
            if key in self.under_way:
                jobs.append(self.under_way[key])
        ended, landed = self.queue.arrived(jobs), list[LoadJob]()
        for job in jobs:
            if job not in ended or job.copied is None:
                break
            landed.append(job)
        if landed:
            self._land(landed)
        for number, key in enumerate(keys):
            if key in self.under_way:
                return number
        return len(keys)

    def land_prefetch(self, key: int, layer: int) -> None:
        """Wait, at the cost of `layer`, for a copy that is under way."""
        if self.native is not None and key in self.native.under_way:
            waited_s = self.native.land(key, layer)
            if waited_s is None:
                self.fail_cancelled((key,))
            if waited_s:
                self._counters.waited(layer, 0.0, waited_s, 0.0)
            return
        job = self.under_way.get(key)
        if job is not None:
            self._wait(job, layer)
            self._land([job])

    def land_all(self) -> None:
        """Wait on the host for every copy under way; counted in no layer."""
        self.adopt()
        for job in list(self.under_way.values()):
            self.queue.wait(job)
            self._land([job])

    def clear_slots(self, first: int) -> None:
        """No copy is under way into a slot from this one on: begun ones are waited for, the others cancelled."""
        self.adopt()
        for job in [job for job in self.under_way.values() if job.reservation.slot >= first]:
            if self.queue.cancel(job):
                self._release(job.reservation.key)
            else:
                self.queue.wait(job)
                self._land([job])

    def preload(self, keys: Sequence[int]) -> list[LoadJob]:
        """Load into free slots and wait; counted in no layer. Returns the finished jobs."""
        jobs = self.reserve(keys, "demand")
        self.queue.submit(jobs, DEMAND)
        for job in jobs:
            self.queue.wait(job)
            if job.copied is None:
                self._fail(job)
            self._residency.publish(job.reservation)
            del self.under_way[job.reservation.key]
        self.queue.tell(_NotCounted())
        return jobs

    # -- out ---------------------------------------------------------------------------------------------

    def drop(self, keys: Iterable[int]) -> None:
        """Cancel those loads under way that the queue has not begun."""
        for key in list(keys):
            if self.queue.cancel(self.under_way[key]):
                self._release(key)

    def make_room(self, absent: Sequence[int], evictable: Callable[[int], bool]) -> list[int]:
        """Evict for these absent segments; returns those that fit now, in the same order."""
        residency, fit = self._residency, list[int]()
        if len(residency.class_slots) == 1:
            if (free := residency.free_of(0)) < len(absent):
                self.evict(self._eviction.victims(len(absent) - free, evictable))
                free = residency.free_of(0)
            return list(absent[:free])
        for slot_class, keys in residency.by_class(absent).items():
            free = residency.free_of(slot_class)
            if free < len(keys):
                self.evict(self._eviction.of_class(slot_class).victims(len(keys) - free, evictable))
                free = residency.free_of(slot_class)
            fit += keys[:free]
        found = set(fit)
        return [key for key in absent if key in found]

    def evict(self, keys: Sequence[int], layer: int | None = None) -> None:
        """Free these segments' slots, each after a copy under way into it has ended.

        layer: whose forward waits for that; None: the segment's own.
        """
        here, under_way, removed = list[int](), self.under_way, self._eviction.removed
        for key in keys:
            if key not in under_way or self._displaced(under_way[key], layer):
                here.append(key)
        if self._unwritten is not None:
            self._unwritten.update([self._residency.slot(key) for key in here if key < self._map.keys])  # no replicas
        self._residency.evict(*here)
        for key in here:
            removed(key)
        self._counters.evicted(here)

    def check_integrity(self) -> None:
        """Raise ResidencyError unless the loads under way are exactly the LOADING slots."""
        residency = self._residency
        loading = {key: residency.slot(key) for key in residency.held() if residency.state(key) == State.LOADING}
        here = {key: job.reservation.slot for key, job in self.under_way.items()}
        native = [] if self.native is None else self.native.under_way
        if here.keys() & native or loading != here | {key: loading.get(key) for key in native}:
            raise ResidencyError(f"loading are {loading}, but loads are under way for {sorted(here)} and {native}")

    # -- inside ------------------------------------------------------------------------------------------

    def _land(self, jobs: Sequence[LoadJob]) -> None:
        """Make finished copies resident; the slots of failed ones are free then."""
        landed = list[Reservation]()
        for job in jobs:
            if job.copied is None:
                self._drop_failed(job)
            else:
                landed.append(job.reservation)
        self._counters.landed(jobs)
        self._residency.publish(*landed)
        for key, _, _ in landed:
            del self.under_way[key]

    def _displaced(self, job: LoadJob, layer: int | None) -> bool:
        """Drop a load, or wait for its copy. True: it has become resident."""
        if self.queue.cancel(job):
            self._release(job.reservation.key)
            return False
        self._overtake(job, job.layer if layer is None else layer)
        self._land([job])
        return job.copied is not None

    def _load_again(self, job: LoadJob, layer: int) -> None:
        """A needed copy failed: load it once more unless it was a demand load, else raise."""
        if job.cause != "demand" and job.error is not None:
            self._counters.failed(job)
            self._counters.forget(job.reservation.key)
            (job,) = self.new_jobs((job.reservation,), "demand", job.after)
            self.queue.submit([job], DEMAND)
            self._wait(job, layer)
        if job.copied is None:
            self._fail(job)

    def _drop_failed(self, job: LoadJob) -> None:
        """Give up a failed copy that no forward waits for."""
        if job.error is None:
            self._fail(job)
        self._counters.failed(job)
        self._release(job.reservation.key)

    def _fail(self, job: LoadJob) -> NoReturn:
        """Give up the slot of a failed copy, and raise for the forward that pinned it."""
        self._residency.unpin_all()
        self._forget(job)
        if job.error is None:
            raise RuntimeFailure("the expert cache was closed during a forward", "start a new worker")
        if isinstance(job.error, StoreError):  # says it better, and may pass
            raise job.error
        raise RuntimeFailure(
            f"copying an expert of MoE layer {job.layer} failed: {job.error}", "run again, and report it if it stays"
        ) from job.error

    def _release(self, key: int) -> None:
        """Undo the reservation of a load that was cancelled or failed."""
        job = self.under_way[key]
        self._counters.cancelled(key, job.moved_share)
        self._forget(job)

    def _forget(self, job: LoadJob) -> None:
        key = job.reservation.key
        if job.writeback and job.cancelled and self._unwritten is not None:
            self._unwritten.add(job.reservation.slot)
        del self.under_way[key]
        self._counters.forget(key)
        self._residency.release(job.reservation)
        self._eviction.removed(key)

    def _wait(self, job: LoadJob, layer: int) -> None:
        """Have the compute wait until a copy is done; the time counts for `layer`."""
        if self.queue.arrived((job,)):
            return
        start_s = self._clock()
        if self.queue.join(job, layer):
            end_s = self._clock()
            written_s = writing_s(job.copied, start_s, end_s) if job.writeback else 0.0
            self._counters.waited(layer, start_s, end_s, written_s)

    def _overtake(self, job: LoadJob, layer: int) -> None:
        """Give the slot of a copy under way to another load; waiting time counts for `layer`."""
        if self.queue.arrived((job,)):
            return
        start_s = self._clock()
        if self.queue.overtake(job):
            end_s = self._clock()
            written_s = writing_s(job.copied, start_s, end_s) if job.writeback else 0.0
            self._counters.waited(layer, start_s, end_s, written_s)
