"""The expert cache: residency, slot tensors and loads, joined; `loads` has the life cycle, `counting` the counters.

An expert is one segment or, with a split (`policies.moepic.split`), two, which are loaded, pinned, run and evicted one
by one. Plans, loads and jobs name segments; an unsplit expert's segment has the expert's key.

All methods run on the forward's thread, without locks; the loader's thread only copies and sets `LoadJob.done`. An
arrived copy becomes resident in `poll` or `await_experts`; on a GPU, once the compute's stream waits for the copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from ....errors import RuntimeFailure
from ...policies.eviction import EvictionPolicy
from ...policies.moepic.split import SplitLayout
from ...policies.plan import LayerPlan, Load, LoadOnMiss
from ...policies.prefetch import PrefetchGovernor
from ...policies.residency import Residency, ResidencyError, State
from ..stats import EngineStats, LayerResidency, PhaseCounter, Timeline
from .counting import CacheCounters, PassRecord
from .loader import DEMAND, PREFETCH, CopyQueue, Loader
from .loads import Loads
from .native_order import native_order
from .native_split import NativeSplit, SplitOrder
from .slots import LowBitPart, SlotMap

if TYPE_CHECKING:
    from ....kernels.expert_ffn import Needed
    from ..layer import NativeRun
    from .device import Device
    from .form_slots import FormPool
    from .link_queue import NativeLoads
    from .slots import ExpertSource, SlotMemory, SlotPool


_LOADS = LoadOnMiss()


class ExpertCache:
    """Slots for experts of all layers on one device.

    Args:
        pool: the slot tensors, allocated once; `pool.bytes` is the whole expert memory, with `memory` at its most.
        weights: the sources of each MoE layer's experts.
        residency: bookkeeping over `len(weights) * experts` keys and the pool's slots.
        eviction: with a split, one with an order for each slot class (`split_eviction`).
        governor: told which prefetches were used.
        stats: counters, one `LayerStats` per MoE layer.
        loader: makes the copies; None: a thread. clock: seconds, on the scale of the loader's times.
        writeback: copy an evicted expert back to the host before its slot is used again, as systems that swap do; for
            comparison only. Replicas are not copied back.
        cut: how slots are split between tops and bottoms; None: a slot is a whole expert, for good.
        low_bit: further slots within the same budget, for low-bit replicas; not with a split.
        memory: of the pool, if its last slots come and go (`resize`): of whole experts, without write-back.

    Attributes:
        policy: `eviction` as given, which is told of predictions.
        eviction: the same decisions in native code, where there is such an order (`native_order`).

    Raises:
        ValueError: the split does not fit the pool.
    """

    def __init__(
        self, pool: SlotPool | FormPool, weights: Sequence[ExpertSource], device: Device, residency: Residency,
        eviction: EvictionPolicy, governor: PrefetchGovernor, stats: EngineStats, timeline: Timeline,
        loader: CopyQueue | None = None, clock: Callable[[], float] = time.perf_counter, cut: SplitLayout | None = None,
        writeback: bool = False, low_bit: LowBitPart | None = None, memory: SlotMemory | None = None,
    ) -> None:  # fmt: skip
        self.memory = memory
        self.pool, self.device, self.residency, self.clock = pool, device, residency, clock
        self.policy = self.eviction = eviction
        self.passes = PassRecord()
        self.decode_only = False  # whether the present forward is known to hold no row of any prompt
        self._map = SlotMap(pool, weights, residency)
        self._layer_of, self.bytes_of, self.whole_slots = self._map.layer_of, self._map.bytes_of, self._map.whole_slots
        self.segments, self.place = self._map.of, self._map.place
        self.neurons = pool.neurons
        self.states, self.standing, self.vacant = self._map.states, self._map.standing, self._map.vacant
        stats.expert_bytes_peak = pool.bytes if memory is None else memory.least * residency.slot_bytes
        self.divided = cut is not None  # whether experts are cut in two; stays so
        self.counters = CacheCounters(stats, governor, timeline, self._map, self.divided, low_bit is not None)
        self._phases = PhaseCounter(stats)
        self.stats, self.governor, self.timeline, self.uses = stats, governor, timeline, self.counters.uses
        self._queue: CopyQueue = Loader(device) if loader is None else loader
        if cut is not None:
            self._map.divide(cut)
        make_native = getattr(self._queue, "native", None)
        plain = low_bit is None and not writeback and (cut is None or isinstance(eviction, SplitOrder))
        self.native: NativeLoads | None = None
        if make_native is not None and plain:
            order = native_order(eviction, len(weights), self._map.experts) if cut is None else None
            self.native = make_native(pool, weights, residency, self._map.segment_layout, self.counters, order)
            if self.native is not None and order is not None:
                self.eviction = eviction = order
        self.split: NativeSplit | None = None
        if self.native is not None and isinstance(eviction, SplitOrder):
            self.split = NativeSplit(self.native.handle, eviction, self.counters, self.passes)
        self.loads = Loads(
            self._queue, device, residency, eviction, self._map, self.counters, clock, writeback, self.native
        )
        self._under_way = self.loads.under_way
        # Counts the times of GPU copies that have ended by now; on the forward's thread. Not between a layer's two
        # readings of its counters: late times belong to the layers before.
        self.settle_times = partial(self._queue.tell, self.counters)
        self._run: tuple[int, ...] = ()  # of the present plan
        self._resident = self._given = self._done = self._layer = 0
        self._loads: Sequence[Load] = ()
        self._late: list[Load] = []  # loads that wait until some experts have run
        self.low_bit = low_bit
        if low_bit is not None:
            self._map.add_low_bit(low_bit)
            stats.expert_bytes_peak += low_bit.pool.bytes
            stats.low_bit_slots = low_bit.slots

    def begin_forward(self, decode: bool) -> None:
        """A forward begins. decode: it is known to hold no row of any prompt."""
        self.decode_only = decode
        self._phases.begin(decode)

    # -- experts and their segments ----------------------------------------------------------------------

    @property
    def cut(self) -> SplitLayout | None:
        """The present split of the slots; None where a slot is a whole expert."""
        return self._map.cut

    @property
    def layout(self) -> tuple[list[int], list[int]]:
        """Where experts are split: the first neuron of each slot in the pool, and the neurons of each segment."""
        return self._map.layout

    def replica_slot(self, segment: int, layer: int) -> int:
        """`await_expert` of a pinned replica: its slot among the replicas' slots."""
        return self.await_expert(segment, layer) - self.whole_slots

    def recut(self, cut: SplitLayout, fill: Sequence[int] = ()) -> None:
        """Split the same memory anew, between forwards; drops what is cached.

        Args:
            fill: experts whose tops are loaded at once, most urgent first, as many as their layers have slots, behind
                demand loads.

        Raises:
            ValueError: the split does not fit the pool; then nothing has changed.
        """
        if not self.divided:
            raise ValueError("a cache of whole experts cannot be cut")
        self._map.check(cut)
        self.loads.drop(self._under_way)
        self.flush()
        self._map.divide(cut)
        if self.native is not None and self._map.segment_layout is not None:
            self.native.divide(self.residency, self._map.segment_layout)
        room, loads = list(self.residency.class_slots), list[int]()
        for key in dict.fromkeys(fill):
            layer = self._layer_of(key)
            if room[layer]:
                room[layer] -= 1
                loads.append(key)
        self._queue.submit(self.loads.reserve(loads, "migration"), PREFETCH)

    # -- what the forward does, in the order of a layer ------------------------------------------------

    @property
    def quiet(self) -> bool:
        """Whether native code may run a pass: it knows all copies under way, and nobody draws a timeline."""
        return not self.timeline.enabled and (not self._under_way or self.loads.hand_back())

    def count_passes(self) -> None:
        """Count the passes of native calls and tell an order in Python: once a forward, and before any decision."""
        self.counters.count_native([] if self.native is None else self.native.landed())
        if self.split is not None:
            self.split.count()
            return
        if self.passes.words[0] == 1:
            return
        eviction = self.eviction
        for _, tokens, keys, counts in self.passes.take():
            eviction.routed(keys, counts, tokens)
            eviction.used(keys)

    def poll(self) -> None:
        """Make every arrived copy resident; a failed one frees its slot."""
        if self.native is not None:
            self.loads.adopt()
        self._queue.poll()
        if self._under_way:
            self.loads.land_ended()

    def drop_stale(self, layer: int, needed: Sequence[int]) -> None:
        """The routing of `layer` is known: cancel its queued prefetches that are not needed."""
        stale = []
        for key, job in self._under_way.items():
            if job.layer == layer and job.cause == "prefetch" and key not in needed:
                stale.append(key)
        if stale:
            self.loads.drop(stale)

    def open(
        self, layer: int, keys: Sequence[int], counts: Sequence[int], tokens: int, low: AbstractSet[int] = frozenset()
    ) -> Sequence[int]:
        """The routing of a layer is known, as it runs: the segments that it needs.

        Queued prefetches of the layer that it does not need are cancelled, and the order of eviction is told.

        Args:
            keys: experts, as `Routing.experts`. counts: rows of each. low: of these, those that run on their replicas.
        """
        needed = self.segments(keys, low)
        self.drop_stale(layer, needed)
        self.eviction.routed(keys, counts, tokens)
        return needed

    def plan(self, here: Sequence[int], keep: AbstractSet[int] = frozenset()) -> LayerPlan:
        """Plan the segments that run on this device (`LoadOnMiss`). Raises PlanError: no slot can be freed."""
        return _LOADS.plan(here, self.residency, self.eviction, keep)

    def begin(self, layer: int, plan: LayerPlan) -> None:
        """Count hits and misses, pin resident and loading segments, and promote late prefetches to demand."""
        self.counters.begin(layer, plan)
        run, resident, arrivals, loads, _ = plan
        self._run, self._resident, self._given, self._done = run, resident, 0, 0
        self._layer, self._loads, self._late = layer, loads, [load for load in loads if load.after] if loads else []
        here = resident + arrivals
        self.residency.pin(*run[:here])
        if not arrivals:
            return
        arriving = run[resident:here]
        self.counters.late(layer, [key for key in arriving if self._under_way[key].cause == "prefetch"])
        for key in arriving:
            job = self._under_way[key]
            # a recut's loads come after demand, too
            if job.cause == "prefetch" or (self.divided and job.cause == "migration"):
                self._queue.promote(job)

    def load(self) -> None:
        """Victims leave, and the demand loads that wait for no slot of the layer's own are queued."""
        if self._loads:
            self.issue([load for load in self._loads if not load.after])

    def next(self) -> tuple[int, int]:
        """The next stretch of the plan's `run` that is in its slots: first and end; equal: all are given.

        Residents together, then arrivals as they land. All compute on what was given before is issued: where loads
        wait for slots of the layer's own, they follow.

        Raises:
            RuntimeFailure: a copy failed (a failed prefetch is first loaded again) or the cache was closed.
            StoreError: no node has the expert now.
        """
        run, done, late = self._run, self._done, self._late
        if late and self._given < done:
            self.ran(run[self._given : done])
            self.issue([load for load in late if load.after == done])
        if done == len(run):
            if not late and self._given < done:
                self.ran(run)
            self._given = done
            return done, done
        stop = self._resident if done < self._resident else len(run)
        if late:
            stop = min([stop if done < self._resident else done + 1, *[x.after for x in late if x.after > done]])
        if late or done < self._resident:
            self.await_experts(run[done:stop], self._layer)
        else:  # with the arrivals behind it that have landed by then
            stop = done + len(self.await_first(run[done:stop], self._layer))
        self._given, self._done = done, stop
        return done, stop

    def issue(self, loads: Sequence[Load]) -> None:
        """Evict, reserve and queue these demand loads of one layer, and pin them."""
        if not loads:
            return
        keys, victims = list[int](), list[int]()
        for load in loads:
            keys.append(load.key)
            if load.evict is not None:
                victims.append(load.evict)
        if victims:
            self.loads.evict(victims, self._layer_of(keys[0]))
        jobs = self.loads.reserve(keys, "demand")
        self.residency.pin(*keys)
        if self.decode_only:
            self.counters.demanded(self._layer_of(keys[0]), keys)
        self._queue.submit(jobs, DEMAND)

    def load_native(self, layer: int, needed: Needed, native: NativeRun) -> None:
        """`issue` of a pass that native code has planned and counted, with an order of eviction in Python."""
        eviction, missing = self.eviction, needed.run[needed.resident + needed.arriving :]
        if 1 in self.counters.vacant:
            self.counters.premature(layer, missing)
        if needed.resident == len(needed.run):
            return
        victims = eviction.victims(needed.victims, self.residency.evictable()) if needed.victims else []
        loading = native.load(victims, self.decode_only)
        for key in victims:
            eviction.removed(key)
        for key in missing:
            eviction.admitted(key)
        if not loading:
            self.fail_native(())

    def fail_native(self, keys: Sequence[int]) -> NoReturn:
        """A native pass was not run: a copy of these was cancelled, or, with no keys, the link was closed before.

        Raises RuntimeFailure.
        """
        if keys:
            self.loads.fail_cancelled(keys)
        raise RuntimeFailure("the expert cache is closed", "start a new worker")

    def await_expert(self, key: int, layer: int) -> int:
        """The slot of a pinned expert; waits for its copy.

        Raises:
            RuntimeFailure: the copy failed (a failed prefetch is first loaded again) or the cache was closed.
            StoreError: no node has the expert now.
        """
        return self.await_experts((key,), layer)[0]

    def await_experts(self, keys: Sequence[int], layer: int) -> list[int]:
        """`await_expert` of each, in this order."""
        under_way = self._under_way
        if not under_way.keys().isdisjoint(keys):
            for key in keys:
                if key in under_way:
                    self.loads.land_needed(under_way[key], layer)
        return list(map(self.residency.held_slot, keys))

    def await_first(self, keys: Sequence[int], layer: int) -> list[int]:
        """`await_expert` of the first; its slot, and the slots of those right behind it that have arrived by then."""
        loads = self.loads
        if keys[0] in self._under_way:
            loads.land_needed(self._under_way[keys[0]], layer)
        arrived = 1 + (loads.land_behind(keys[1:]) if len(keys) > 1 else 0)
        return list(map(self.residency.held_slot, keys[:arrived]))

    def ran(self, keys: Sequence[int]) -> None:
        """These experts of the present layer have run: unpin them and tell the eviction policy."""
        self.residency.unpin(*keys)
        self.counters.ran(keys)
        self.eviction.used(keys)

    def prefetch(self, keys: Sequence[int], keep: AbstractSet[int] = frozenset(), source: str = "command") -> int:
        """Queue loads of absent experts, most wanted first; returns the number queued.

        A replica (`LowBitPart`) is not loaded where its expert is present. Victims are neither pinned nor among `keys`
        or `keep` (what nearer layers want), so demand has a small pool to itself. `source` names the policy, for the
        counters.
        """
        residency, experts, native = self.residency, self._map.keys, self.native
        if native is not None and native.orders and not self._under_way:
            return native.prefetch(list(keys), list(keep), self.counters.number_of(source))
        if self.low_bit is not None:
            keys = [k for k in keys if k < experts or residency.state(k - experts) == State.ABSENT]
        _, _, absent = residency.by_state(self.segments(keys))
        if not absent:
            return 0
        kept = [*keys, *keep]
        if residency.keys > experts:  # with an expert its bottom, or its replica, stays
            kept += [key + experts for key in kept if key < experts]
        fit = self.loads.make_room(absent, residency.evictable(kept))
        self.counters.prefetched(fit, source)
        if native is not None and not self._under_way:
            self.loads.prefetch_native(fit)
        elif fit:
            self._queue.submit(self.loads.reserve(fit, "prefetch"), PREFETCH)
        return len(fit)

    def finish_prefetch(self, keys: Sequence[int], layer: int) -> None:
        """Wait, at the cost of `layer`, for the copies of these experts that are under way: synchronous prefetch."""
        for segment in self.segments(keys):
            self.loads.land_prefetch(segment, layer)

    def vacate(self, slots: int, layer: int) -> None:
        """Before `layer` runs: evict unpinned experts until `slots` are free; for a cache of whole experts."""
        residency = self.residency
        self.leave(self.eviction.victims(slots - residency.free_slots, residency.evictable()), layer)

    def leave(self, victims: Sequence[int], layer: int) -> None:
        """`vacate` of these evictable experts."""
        self.loads.evict(victims, layer)
        self.counters.vacated(layer, victims)

    # -- around forwards ---------------------------------------------------------------------------------

    def migrate(self, keys: Sequence[int], *, keep_others: bool) -> None:
        """Make these experts the cache's content; absent ones are loaded in this order.

        Args:
            keys: most urgent first; as many are loaded as there are slots.
            keep_others: evict other residents only where room is needed, for a prefill that uses them.
        """
        self.count_passes()
        self.loads.adopt()
        residency, segments = self.residency, self.segments(keys)
        wanted = set(segments)
        absent = [k for k in segments if residency.state(k) == State.ABSENT]

        def evictable(k: int) -> bool:
            return k not in wanted and not residency.pinned(k)

        if not keep_others:
            self.loads.evict(self.eviction.victims(residency.slots, evictable))
        self._queue.submit(self.loads.reserve(self.loads.make_room(absent, evictable), "migration"), DEMAND)

    def preload(self, keys: Sequence[int]) -> None:
        """Load experts into free slots and wait; counted in `bytes_preloaded` and in no layer."""
        fit = self.loads.make_room(self.segments(keys), lambda k: False)
        self.counters.preloaded(self.loads.preload(fit))

    def resize(self, slots: int) -> None:
        """Give the last slots' memory back, or take it again, between forwards; `memory` says how many there may be.

        Experts leave in the order of eviction; those that stay move out of the slots that go. Copies into those slots
        are cancelled or waited for.

        Raises:
            ResidencyError: a pinned expert is in the way. torch.OutOfMemoryError: no room for more slots. Then as many
                slots are there as before.
        """
        residency, memory = self.residency, self.memory
        if memory is None or not memory.least <= slots <= memory.most:
            raise ValueError(f"{slots} slots are not within what this cache may have")
        self.count_passes()
        self.loads.clear_slots(min(slots, residency.slots))
        if slots > residency.slots:
            memory.resize(slots)
            residency.resize(slots)
        elif slots < residency.slots:
            self._give_back(slots, memory)
        if self.native is not None:
            self.native.divide(residency, None)
        self.stats.slots = slots
        self.stats.expert_bytes_peak = max(self.stats.expert_bytes_peak, slots * residency.slot_bytes)

    def _give_back(self, slots: int, memory: SlotMemory) -> None:
        residency, where = self.residency, self._map
        excess = residency.slots - residency.free_slots - slots
        for _ in range(excess):  # one by one: an order that shares slots out between layers goes by what each has left
            self.loads.evict(self.eviction.victims(1, residency.evictable()))
        moves = residency.resize(slots)
        self.device.settle()  # what runs, or is copied, in slots that go, and dropped copies into those that are free
        for key, before, now in moves:
            layer = self._layer_of(key)
            self.device.move(where.pool.slot(now, layer), where.pool.slot(before, layer))
        if moves:
            self.device.settle()
        memory.resize(slots)

    def flush(self) -> None:
        """Wait for every copy under way, then empty all slots."""
        self.count_passes()
        self.loads.land_all()
        self.settle_times()
        self.loads.evict(list(self.residency.held()))

    def abandon(self) -> None:
        """The forward under way failed: unpin its experts. Its loads still arrive."""
        self.loads.adopt()
        self.residency.unpin_all()

    def check_integrity(self) -> None:
        """Raise ResidencyError unless slots, jobs and policy agree."""
        self.count_passes()
        residency = self.residency
        residency.check_integrity()
        self.loads.check_integrity()
        held = set(residency.held())
        if held != set(self.eviction.victims(residency.slots, lambda key: True)):
            raise ResidencyError(f"the eviction policy does not know exactly the experts held, {sorted(held)}")
        self.counters.check_integrity(held)

    def live_stats(self) -> EngineStats:
        """The counters so far; the record is live."""
        self._phases.settle()
        self.stats.loads_in_flight, self.stats.prefetch_resting = self._queue.pending, self.governor.resting
        return self.stats

    def reset_stats(self) -> None:
        """Zero the counters; residency stays."""
        self.stats.reset()
        self.counters.reset()

    def layer_residency(self) -> list[LayerResidency]:
        """State and uses of each layer's experts at this moment; from any thread."""
        states, uses, n = [int(state) for state in self.states()], self.uses[:], self._map.experts
        return [LayerResidency(tuple(states[i : i + n]), tuple(uses[i : i + n])) for i in range(0, len(states), n)]

    @property
    def loads_in_flight(self) -> int:
        return self._queue.pending

    def close(self) -> None:
        """Stop the loader. Safe to call twice."""
        self._queue.close()
