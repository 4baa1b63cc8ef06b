"""The expert cache: residency, slot tensors and loads, joined. What became of them, `ledger` counts.

An expert is one segment or, under a cut (`policies.split.cut`), two, which are loaded, pinned, run and evicted one by
one. Plans, loads and jobs go by segment; without a cut an expert's segment is the expert, and has its key.

All methods run on the forward's thread; the loader's thread only copies and sets `LoadJob.done`.
So the bookkeeping needs no lock: an arrived copy becomes resident when the forward looks (`poll`, `await_expert`).
On a GPU an expert is resident once the compute's stream waits for its copy: what is enqueued from then on finds it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, NoReturn

from ...errors import RuntimeFailure, StoreError
from ..policies.eviction import EvictionPolicy
from ..policies.plan import LayerPlan, Load
from ..policies.prefetch.governor import PrefetchGovernor
from ..policies.residency import Reservation, Residency, ResidencyError, State
from ..policies.split.cut import CacheCut
from .ledger import CacheLedger
from .loader import DEMAND, PREFETCH, Cause, CopyQueue, Loader, LoadJob
from .slot_map import SlotMap
from .stats import EngineStats
from .timeline import Timeline

if TYPE_CHECKING:  # torch: the simulator uses this module without it
    from .device import Copied, Device
    from .pool import ExpertSource, SlotPool


class _NoBooks:
    """For what a preload took, which no layer waited for."""

    def timed(self, job: LoadJob, copied: Copied) -> None:
        return None

    def held(self, layer: int, start_s: float, end_s: float) -> None:
        return None


class ExpertCache:
    """Slots for experts of all layers on one device.

    Args:
        pool: the slot tensors; `pool.bytes` is the whole expert memory, allocated once.
        weights: where the experts of each MoE layer come from.
        device: copies and waits.
        residency: bookkeeping over `len(weights) * experts` keys and the pool's slots.
        eviction: order of leaving; with a cut one that has an order for each slot class (`SplitEviction`).
        governor: told which prefetches were used.
        stats: counters, one `LayerStats` per MoE layer.
        loader: makes the copies; None: a thread. clock: seconds, of which the loader's copies tell the same.
            The simulator gives both.
        writeback: copy an evicted expert back to the host before its slot is used again, as systems do that swap;
            for comparison, since nothing here ever changes a weight.
        cut: how slots are divided between tops and bottoms; None: a slot is a whole expert. Only a cache that begins
            with a cut can be cut anew.

    Raises:
        ValueError: the cut is none of this pool.
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
        cut: CacheCut | None = None,
        writeback: bool = False,
    ) -> None:
        self.pool, self.device, self.residency, self.eviction = pool, device, residency, eviction
        self._loader: CopyQueue = Loader(device) if loader is None else loader
        self._clock = clock
        self.decode_only = False  # whether the present forward is known to hold no row of any prompt
        self._jobs: dict[int, LoadJob] = {}  # keys that are LOADING
        self._unwritten: set[int] | None = set() if writeback else None  # slots whose last expert is not copied back
        self._map = SlotMap(pool, weights, residency)
        self._layer_of, self.bytes_of = self._map.layer_of, self._map.bytes_of
        self.segments, self.place, self.neurons = self._map.of, self._map.place, pool.neurons
        self.states, self.standing, self.vacant = self._map.states, self._map.standing, self._map.vacant
        stats.expert_bytes_peak = pool.bytes
        self.divided = cut is not None  # whether experts are cut in two; stays so
        self.ledger = CacheLedger(stats, governor, timeline, self._map, self.divided)
        self.stats, self.governor, self.timeline, self.uses = stats, governor, timeline, self.ledger.uses
        if cut is not None:
            self._map.divide(cut)

    # -- experts and their segments ----------------------------------------------------------------------

    @property
    def cut(self) -> CacheCut | None:
        """The present division of the slots; None where a slot is a whole expert."""
        return self._map.cut

    def recut(self, cut: CacheCut, fill: Sequence[int] = ()) -> None:
        """Divide the same memory anew, between forwards and on their thread; what was cached is dropped.

        Args:
            fill: experts whose tops are loaded at once, most urgent first, as many as their layers have slots. Demand
                loads overtake these.

        Raises:
            ValueError: the cut is none of this pool; then nothing has changed.
        """
        if not self.divided:
            raise ValueError("a cache of whole experts cannot be cut")
        self._map.check(cut)
        for segment in [s for s, job in self._jobs.items() if self._loader.cancel(job)]:
            self._release(segment)
        self.flush()
        self._map.divide(cut)
        room, loads = list(self.residency.class_slots), list[int]()
        for key in dict.fromkeys(fill):
            layer = self._layer_of(key)
            if room[layer]:
                room[layer] -= 1
                loads.append(key)
        self._loader.submit(self._reserve(loads, "migration"), PREFETCH)

    # -- what the forward does, in the order of a layer ------------------------------------------------

    def poll(self) -> None:
        """Make every arrived copy resident; one that failed frees its slot, for no forward waits for it."""
        self._loader.poll()
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
        self.ledger.begin(layer, plan)
        for key in plan.run[: plan.resident + plan.arriving]:
            self.residency.pin(key)
        if not plan.arriving:
            return
        arriving = plan.run[plan.resident : plan.resident + plan.arriving]
        self.ledger.arriving(layer, arriving, self._jobs)
        for key in arriving:
            job = self._jobs[key]
            if job.prefetch or (self.divided and job.cause == "migration"):  # a new cut's loads come after demand, too
                self._loader.promote(job)

    def issue(self, loads: Sequence[Load]) -> None:
        """Evict, reserve and queue these demand loads; each key is pinned."""
        for load in loads:
            if load.evict is not None:
                self._evict(load.evict, self._layer_of(load.key))
        jobs = self._reserve([load.key for load in loads], "demand")
        for load in loads:
            self.residency.pin(load.key)
        if self.decode_only and loads:
            self.ledger.demanded(loads)
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
        self.ledger.ran(self._map.experts_of(keys) if self.divided else keys)
        self.eviction.used(keys)

    def prefetch(self, keys: Sequence[int], keep: AbstractSet[int] = frozenset(), source: str = "command") -> int:
        """Queue loads of absent experts, most wanted first; the number queued.

        Victims are residents that are neither pinned (the present layer's are) nor among `keys` or `keep`
        (what nearer layers want), so a pool as small as the working set is left to demand. `source` says whose guess
        they are, for the counters.
        """
        residency, experts = self.residency, self._map.keys
        absent = [k for k in self.segments(keys) if residency.state(k) == State.ABSENT]
        if not absent:
            return 0
        keep = keep | set(keys)

        def may_go(k: int) -> bool:
            return k % experts not in keep and residency.state(k) == State.RESIDENT and not residency.pinned(k)

        absent = self._make_room(absent, may_go)
        self.ledger.guessed(absent, source)
        self._loader.submit(self._reserve(absent, "prefetch"), PREFETCH)
        return len(absent)

    def finish_prefetch(self, keys: Sequence[int], layer: int) -> None:
        """Wait for the copies of these experts that are under way: what synchronous prefetch costs `layer`."""
        for segment in self.segments(keys):
            job = self._jobs.get(segment)
            if job is not None:
                self._wait(job, layer)
                self._land(segment)

    def vacate(self, slots: int, layer: int) -> None:
        """Before `layer` runs: evict until so many slots are free, of residents those that are not pinned.

        For a cache of whole experts, whose slots serve all layers.
        """
        residency = self.residency
        victims = self.eviction.victims(
            slots - residency.free_slots, lambda k: residency.state(k) == State.RESIDENT and not residency.pinned(k)
        )
        for victim in victims:
            self._evict(victim, layer)
        self.ledger.vacated(layer, victims)

    # -- around forwards ---------------------------------------------------------------------------------

    def migrate(self, keys: Sequence[int], *, keep_others: bool) -> None:
        """Make these experts the cache's content; those that are absent are loaded in this order.

        Args:
            keys: what to hold, most urgent first; at most as many as there are slots are loaded.
            keep_others: let other residents stay where there is room, for a prefill that is using them.
        """
        residency, segments = self.residency, self.segments(keys)
        wanted = set(segments)
        absent = [k for k in segments if residency.state(k) == State.ABSENT]

        def may_go(k: int) -> bool:
            return k not in wanted and not residency.pinned(k)

        if not keep_others:
            for victim in self.eviction.victims(residency.slots, may_go):
                self._evict(victim, self._layer_of(victim))
        self._loader.submit(self._reserve(self._make_room(absent, may_go), "migration"), DEMAND)

    def preload(self, keys: Sequence[int]) -> None:
        """Load experts into free slots and wait for them; counted in `bytes_preloaded` and in no layer."""
        jobs = self._reserve(self._make_room(self.segments(keys), lambda k: False), "demand")
        self._loader.submit(jobs, DEMAND)
        for job in jobs:
            job.done.wait()
            if job.copied is None:
                self._fail(job)
            self._publish(job)
        self._loader.tell(_NoBooks())
        self.ledger.preloaded(jobs)

    def flush(self) -> None:
        """Wait for every copy under way, then empty all slots; for tests and before a re-cut."""
        for key in list(self._jobs):
            self._jobs[key].done.wait()
            self._land(key)
        self.settle_times()
        for key in list(self.residency.held()):
            self._evict(key, self._layer_of(key))

    def settle_times(self) -> None:
        """Count what copies took that have ended by now; on the forward's thread. Only a GPU's are timed late.

        Not between a layer's two looks at its counters: what comes late is counted for the forward's way here.
        """
        self._loader.tell(self.ledger)

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
        self.ledger.check_integrity(held)

    @property
    def loads_in_flight(self) -> int:
        return self._loader.pending

    def close(self) -> None:
        """Stop the loader. Safe to call twice."""
        self._loader.close()

    # -- inside ------------------------------------------------------------------------------------------

    def _make_room(self, absent: Sequence[int], may_go: Callable[[int], bool]) -> list[int]:
        """Evict for these absent ones; those of them that have room now, in the same order."""
        residency, fit = self.residency, list[int]()
        for slot_class, keys in residency.by_class(absent).items():
            short = len(keys) - residency.free_of(slot_class)
            for victim in self.eviction.of_class(slot_class).victims(short, may_go):
                self._evict(victim, self._layer_of(victim))
            fit += keys[: residency.free_of(slot_class)]
        if len(residency.class_slots) == 1:
            return fit
        found = set(fit)
        return [key for key in absent if key in found]

    def _reserve(self, keys: Sequence[int], cause: Cause) -> list[LoadJob]:
        """Slots for absent experts and their jobs. Whatever ran in these slots is before one mark for all of them."""
        after, jobs = self.device.mark_use() if keys else None, list[LoadJob]()
        for key in keys:
            reservation = self.residency.reserve(key)
            self.eviction.admitted(key)
            jobs.append(self._new_job(reservation, cause, after))
        return jobs

    def _new_job(self, reservation: Reservation, cause: Cause, after: Any) -> LoadJob:
        key = reservation.key
        dst, src = self._map.copy_of(reservation)
        job = self._jobs[key] = LoadJob(
            reservation=reservation,
            dst=dst,
            src=src,
            after=after,
            layer=self._layer_of(key),
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
        self._publish(job)
        self.ledger.landed(job, copied)
        return True

    def _publish(self, job: LoadJob) -> None:
        self.residency.publish(job.reservation)
        del self._jobs[job.reservation.key]

    def _load_again(self, job: LoadJob, layer: int) -> None:
        """A forward waited for a copy that did not happen: one more try unless it was its own, else it fails."""
        if job.cause != "demand" and job.error is not None:
            self.ledger.failed(job)
            self.ledger.forget(job.reservation.key)
            job = self._new_job(job.reservation, "demand", job.after)
            self._loader.submit([job], DEMAND)
            self._wait(job, layer)
        if job.copied is None:
            self._fail(job)

    def _drop_failed(self, job: LoadJob) -> None:
        """Give up a copy that no forward waits for. A failed demand load was reported by the forward that needed it."""
        if job.error is None:
            self._fail(job)
        self.ledger.failed(job)
        self._release(job.reservation.key)

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
        """Undo the reservation of a load that was cancelled or failed."""
        job = self._jobs[key]
        self.ledger.cancelled(key, job.moved_share)
        self._forget(job)

    def _forget(self, job: LoadJob) -> None:
        key = job.reservation.key
        if job.writeback and job.cancelled and self._unwritten is not None:
            self._unwritten.add(job.reservation.slot)
        del self._jobs[key]
        self.ledger.forget(key)
        self.residency.release(job.reservation)
        self.eviction.removed(key)

    def _wait(self, job: LoadJob, layer: int) -> None:
        """Have the compute wait until a copy is done; the time is `layer`'s, whose forward waits."""
        if job.done.is_set():
            return
        start_s = self._clock()
        if self._loader.join(job, layer):
            self.ledger.waited(layer, start_s, self._clock())

    def _overtake(self, job: LoadJob, layer: int) -> None:
        """Have the slot of a copy under way given to another one; where that takes time it is `layer`'s."""
        if job.done.is_set():
            return
        start_s = self._clock()
        if self._loader.overtake(job):
            self.ledger.waited(layer, start_s, self._clock())

    def _evict(self, key: int, layer: int) -> None:
        """Free a slot, for the forward of `layer`; a copy under way into it comes to its end first."""
        job = self._jobs.get(key)
        if job is not None:
            if self._loader.cancel(job):
                self._release(key)
                return
            self._overtake(job, layer)
            if not self._land(key):
                return
        if self._unwritten is not None:
            self._unwritten.add(self.residency.slot(key))
        self.residency.evict(key)
        self.eviction.removed(key)
        self.ledger.evicted(key)
