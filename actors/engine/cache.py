"""The expert cache: residency, slot tensors, loads and their counters, joined.

All methods run on the forward's thread; the loader's thread only copies and sets `LoadJob.done`.
So the bookkeeping needs no lock: an arrived copy becomes resident when the forward looks (`poll`, `await_expert`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, NoReturn

from ...errors import RuntimeFailure, StoreError
from ..policies.eviction import EvictionPolicy
from ..policies.plan import LayerPlan, Load
from ..policies.prefetch.governor import PrefetchGovernor
from ..policies.residency import Reservation, Residency, ResidencyError, State
from .loader import DEMAND, PREFETCH, Cause, CopyQueue, Loader, LoadJob
from .stats import EngineStats, SourceStats
from .timeline import Timeline

if TYPE_CHECKING:  # torch: the simulator uses this module without it
    from .device import Copied, Device
    from .pool import ExpertSource, SlotPool


class ExpertCache:
    """Slots for experts of all layers on one device.

    Args:
        pool: the slot tensors; `pool.bytes` is the whole expert memory, allocated once.
        weights: where the experts of each MoE layer come from.
        device: copies and waits.
        residency: bookkeeping over `len(weights) * experts` keys and the pool's slots.
        eviction: order of leaving.
        governor: told which prefetches were used.
        stats: counters, one `LayerStats` per MoE layer.
        loader: makes the copies; None: a thread. clock: seconds, of which the loader's copies tell the same.
            The simulator gives both.
        writeback: copy an evicted expert back to the host before its slot is used again, as systems do that swap;
            for comparison, since nothing here ever changes a weight.
    """

    def __init__(
        self,
        pool: SlotPool,
        weights: Sequence[ExpertSource],
        device: Device,
        residency: Residency,
        eviction: EvictionPolicy,
        governor: PrefetchGovernor,
        stats: EngineStats,
        timeline: Timeline,
        loader: CopyQueue | None = None,
        clock: Callable[[], float] = time.perf_counter,
        writeback: bool = False,
    ) -> None:
        self.pool, self.device, self.residency, self.eviction = pool, device, residency, eviction
        self.stats, self.governor, self.timeline = stats, governor, timeline
        self._weights = weights
        self._experts = residency.keys // len(weights)
        self._loader: CopyQueue = Loader(device) if loader is None else loader
        self._clock = clock
        self.uses = [0] * residency.keys  # forwards that ran each expert here, since the counters were reset
        self.decode_only = False  # whether the present forward is known to hold no row of any prompt
        self._jobs: dict[int, LoadJob] = {}  # keys that are LOADING
        self._unused_prefetches: dict[int, SourceStats] = {}
        self._unwritten: set[int] | None = set() if writeback else None  # slots whose last expert is not copied back
        self._vacated: set[int] = set()  # keys sent away by `vacate` since their layers last ran
        stats.expert_bytes_peak = pool.bytes

    # -- what the forward does, in the order of a layer ------------------------------------------------

    def poll(self) -> None:
        """Make every arrived copy resident; one that failed frees its slot, for no forward waits for it."""
        if self._jobs:
            for key in [k for k, job in self._jobs.items() if job.done.is_set()]:
                self._land(key)

    def drop_stale(self, layer: int, needed: Sequence[int]) -> None:
        """The routing of `layer` is known: forget its queued prefetches that guessed wrong."""
        if not self._jobs:
            return
        stale = [k for k, job in self._jobs.items() if job.layer == layer and job.prefetch and k not in needed]
        for key in stale:
            if self._loader.cancel(self._jobs[key]):
                self._release(key)

    def begin(self, layer: int, plan: LayerPlan) -> None:
        """Count hits and misses, pin what is here or on its way, and give late prefetches demand priority."""
        stats = self.stats.layers[layer]
        stats.forwards += 1
        stats.hits += plan.resident
        stats.misses += len(plan.run) - plan.resident
        stats.waves += plan.waves
        if self._vacated:
            self._count_premature(layer, plan)
        for key in plan.run[: plan.resident + plan.arriving]:
            self.residency.pin(key)
        for key in plan.run[: plan.resident]:
            if (source := self._unused_prefetches.pop(key, None)) is not None:
                self.governor.used()
                stats.prefetched_hits += 1
                source.hits += 1
        for key in plan.run[plan.resident : plan.resident + plan.arriving]:
            job = self._jobs[key]
            if job.prefetch:
                stats.late_prefetches += 1
                if (source := self._unused_prefetches.pop(key, None)) is not None:
                    source.late += 1
                self.governor.used()
                self._loader.promote(job)

    def issue(self, loads: Sequence[Load]) -> None:
        """Evict, reserve and queue these demand loads; each key is pinned."""
        for load in loads:
            if load.evict is not None:
                self._evict(load.evict, load.key // self._experts)
        jobs = [self._reserve(load.key, "demand") for load in loads]
        for load in loads:
            self.residency.pin(load.key)
        if self.decode_only and loads:
            layer = loads[0].key // self._experts
            self.stats.layers[layer].bytes_demanded_decode += len(loads) * self.residency.slot_bytes
        self._loader.submit(jobs, DEMAND)

    def await_expert(self, key: int, layer: int) -> int:
        """The slot of a pinned expert, after waiting for its copy if it is still on its way.

        Raises:
            RuntimeFailure: the copy failed (a failed prefetch is first loaded again) or the cache was closed.
            StoreError: no node has the expert now.
        """
        job = self._jobs.get(key)
        if job is not None:
            self._wait(job, layer)
            if job.copied is None:
                self._load_again(job, layer)
            self._land(key)
        return self.residency.slot(key)

    def ran(self, keys: Sequence[int]) -> None:
        """These experts of the present layer have run: unpin them and tell the eviction policy."""
        for key in keys:
            self.residency.unpin(key)
            self.uses[key] += 1
        self.eviction.used(keys)

    def prefetch(self, keys: Sequence[int], keep: AbstractSet[int] = frozenset(), source: str = "command") -> int:
        """Queue loads of absent experts, most wanted first; the number queued.

        Victims are residents that are neither pinned (the present layer's are) nor among `keys` or `keep`
        (what nearer layers want), so a pool as small as the working set is left to demand. `source` says whose guess
        they are, for the counters.
        """
        residency = self.residency
        absent = [k for k in keys if residency.state(k) == State.ABSENT]
        if not absent:
            return 0
        keep = keep | set(keys)
        short = len(absent) - residency.free_slots
        victims = self.eviction.victims(
            short, lambda k: k not in keep and residency.state(k) == State.RESIDENT and not residency.pinned(k)
        )
        for victim in victims:
            self._evict(victim, victim // self._experts)
        absent = absent[: residency.free_slots]
        counters = self.stats.source(source)
        counters.queued += len(absent)
        self._unused_prefetches.update(dict.fromkeys(absent, counters))
        self._loader.submit([self._reserve(k, "prefetch") for k in absent], PREFETCH)
        return len(absent)

    def finish_prefetch(self, keys: Sequence[int], layer: int) -> None:
        """Wait for the copies of these experts that are under way: what synchronous prefetch costs `layer`."""
        for key in keys:
            job = self._jobs.get(key)
            if job is not None:
                self._wait(job, layer)
                self._land(key)

    def vacate(self, slots: int, layer: int) -> None:
        """Before `layer` runs: evict until so many slots are free, of residents those that are not pinned."""
        residency = self.residency
        victims = self.eviction.victims(
            slots - residency.free_slots, lambda k: residency.state(k) == State.RESIDENT and not residency.pinned(k)
        )
        for victim in victims:
            self._evict(victim, layer)
        self._vacated.update(victims)
        self.stats.layers[layer].vacated += len(victims)

    # -- around forwards ---------------------------------------------------------------------------------

    def migrate(self, keys: Sequence[int], *, keep_others: bool) -> None:
        """Make these experts the cache's content; those that are absent are loaded in this order.

        Args:
            keys: what to hold, most urgent first; at most as many as there are slots are loaded.
            keep_others: let other residents stay where there is room, for a prefill that is using them.
        """
        residency, wanted = self.residency, set(keys)
        absent = [k for k in keys if residency.state(k) == State.ABSENT]
        going = len(absent) - residency.free_slots if keep_others else residency.slots
        victims = self.eviction.victims(going, lambda k: k not in wanted and not residency.pinned(k))
        for victim in victims:
            self._evict(victim, victim // self._experts)
        self._loader.submit([self._reserve(k, "migration") for k in absent[: residency.free_slots]], DEMAND)

    def preload(self, keys: Sequence[int]) -> None:
        """Load experts into free slots and wait for them; counted in `bytes_preloaded` and in no layer."""
        jobs = [self._reserve(k, "demand") for k in keys[: self.residency.free_slots]]
        self._loader.submit(jobs, DEMAND)
        for job in jobs:
            job.done.wait()
            if job.copied is None:
                self._fail(job)
            self._publish(job, job.copied)
        self.stats.bytes_preloaded += len(jobs) * self.residency.slot_bytes

    def flush(self) -> None:
        """Wait for every copy under way, then empty all slots; for tests and before a re-cut."""
        for key in list(self._jobs):
            self._jobs[key].done.wait()
            self._land(key)
        for key in list(self.residency.held()):
            self._evict(key, key // self._experts)

    def abandon(self) -> None:
        """The forward under way failed: what it pinned may go. Its loads still arrive."""
        self.residency.unpin_all()

    def check_integrity(self) -> None:
        """Raise ResidencyError unless slots, jobs and policy agree."""
        residency = self.residency
        residency.check_integrity()
        held = set(residency.held())
        loading = {key: residency.slot(key) for key in held if residency.state(key) == State.LOADING}
        if loading != {key: job.reservation.slot for key, job in self._jobs.items()}:
            raise ResidencyError(f"loading are {loading}, but loads are under way for {sorted(self._jobs)}")
        if held != set(self.eviction.victims(residency.slots, lambda key: True)):
            raise ResidencyError(f"the eviction policy does not know exactly the experts held, {sorted(held)}")
        if not self._unused_prefetches.keys() <= held:
            raise ResidencyError(f"unused prefetches {sorted(self._unused_prefetches)} are not all held")

    @property
    def loads_in_flight(self) -> int:
        return self._loader.pending

    def close(self) -> None:
        """Stop the loader. Safe to call twice."""
        self._loader.close()

    # -- inside ------------------------------------------------------------------------------------------

    def _count_premature(self, layer: int, plan: LayerPlan) -> None:
        first = layer * self._experts
        mine = {key for key in self._vacated if first <= key < first + self._experts}
        self._vacated -= mine
        again = len(mine.intersection(plan.run[plan.resident + plan.arriving :]))
        self.stats.layers[layer].bytes_premature += again * self.residency.slot_bytes

    def _reserve(self, key: int, cause: Cause) -> LoadJob:
        reservation = self.residency.reserve(key)
        self.eviction.admitted(key)
        return self._new_job(reservation, cause)

    def _new_job(self, reservation: Reservation, cause: Cause) -> LoadJob:
        key = reservation.key
        layer, expert = divmod(key, self._experts)
        job = self._jobs[key] = LoadJob(
            reservation=reservation,
            dst=self.pool.slot(reservation.slot),
            src=self._weights[layer].expert(expert),
            after=self.device.mark_use(),
            layer=layer,
            cause=cause,
            done=self._loader.event(),
            writeback=self._unwritten is not None and reservation.slot in self._unwritten,
        )
        if job.writeback and self._unwritten is not None:
            self._unwritten.remove(reservation.slot)
        return job

    def _land(self, key: int) -> bool:
        """Make a finished copy resident. False if it failed: then its slot is free."""
        job = self._jobs[key]
        copied = job.copied
        if copied is None:
            self._drop_failed(job)
            return False
        self._publish(job, copied)
        stats = self.stats.layers[job.layer]
        if job.cause == "prefetch":
            stats.bytes_loaded_prefetch += self.residency.slot_bytes
        elif job.cause == "migration":
            stats.bytes_loaded_migration += self.residency.slot_bytes
        else:
            stats.bytes_loaded_demand += self.residency.slot_bytes
        if job.writeback:
            stats.bytes_written_back += self.residency.slot_bytes
        stats.total_io_s += copied.end_s - copied.start_s
        stats.link_s += copied.link_s
        if self.timeline.enabled:
            track = "prefetch" if job.prefetch else "copy"
            self.timeline.span(track, f"L{job.layer} E{key % self._experts}", copied.start_s, copied.end_s)
        return True

    def _publish(self, job: LoadJob, copied: Copied) -> None:
        self.device.wait(copied)
        self.residency.publish(job.reservation)
        del self._jobs[job.reservation.key]

    def _load_again(self, job: LoadJob, layer: int) -> None:
        """A forward waited for a copy that did not happen: one more try unless it was its own, else it fails."""
        if job.cause != "demand" and job.error is not None:
            self._count_failed(job)
            self._unused_prefetches.pop(job.reservation.key, None)
            job = self._new_job(job.reservation, "demand")
            self._loader.submit([job], DEMAND)
            self._wait(job, layer)
        if job.copied is None:
            self._fail(job)

    def _drop_failed(self, job: LoadJob) -> None:
        """Give up a copy that no forward waits for. A failed demand load was reported by the forward that needed it."""
        if job.error is None:
            self._fail(job)
        self._count_failed(job)
        self._release(job.reservation.key)

    def _count_failed(self, job: LoadJob) -> None:
        if job.prefetch:
            self.stats.layers[job.layer].failed_prefetches += 1

    def _fail(self, job: LoadJob) -> NoReturn:
        """Give up the slot of a copy that did not happen, and with it the forward that pinned it."""
        self.abandon()
        self._forget(job)
        if job.error is None:
            raise RuntimeFailure("the expert cache was closed during a forward", "start a new worker")
        if isinstance(job.error, StoreError):  # says it better, and may pass
            raise job.error
        raise RuntimeFailure(
            f"copying an expert of MoE layer {job.layer} failed: {job.error}", "run again; report it if it stays"
        ) from job.error

    def _release(self, key: int) -> None:
        """Undo the reservation of a load that was cancelled or failed; its bytes count nowhere."""
        if (source := self._unused_prefetches.get(key)) is not None:
            self.governor.wasted()
            source.cancelled += 1
        self._forget(self._jobs[key])

    def _forget(self, job: LoadJob) -> None:
        key = job.reservation.key
        if job.writeback and not job.started and self._unwritten is not None:
            self._unwritten.add(job.reservation.slot)
        del self._jobs[key]
        self._unused_prefetches.pop(key, None)
        self.residency.release(job.reservation)
        self.eviction.removed(key)

    def _wait(self, job: LoadJob, layer: int) -> None:
        """Block until a copy is done; the time is `layer`'s, whose forward waits."""
        if job.done.is_set():
            return
        start_s = self._clock()
        job.done.wait()
        end_s = self._clock()
        self.stats.layers[layer].blocked_io_s += end_s - start_s
        if self.timeline.enabled:
            self.timeline.span("wait", f"L{layer} wait", start_s, end_s)

    def _evict(self, key: int, layer: int) -> None:
        """Free a slot, for the forward of `layer`; a copy under way into it is waited for."""
        job = self._jobs.get(key)
        if job is not None:
            if self._loader.cancel(job):
                self._release(key)
                return
            self._wait(job, layer)
            if not self._land(key):
                return
        if self._unwritten is not None:
            self._unwritten.add(self.residency.slot(key))
        self.residency.evict(key)
        self.eviction.removed(key)
        if (source := self._unused_prefetches.pop(key, None)) is not None:
            self.governor.wasted()
            source.wasted += 1
            self.stats.layers[key // self._experts].bytes_wasted += self.residency.slot_bytes
