"""The expert cache's decisions and accounts in plain Python, on a virtual clock: what `actors.core` is compared with.

Written for reading: states and slots, the plan of a layer, the life of a load, counters. The methods are those of
`_core.Core`, whose comments say what they are for. Copies on a virtual clock do not fail.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tiermoe.actors.policies.eviction import EvictionPolicy
from tiermoe.actors.policies.plan import PlanError

ABSENT, LOADING, RESIDENT = range(3)


class Load(NamedTuple):
    """Bring `key` into the cache once the first `after` experts of the plan have run.

    evict: the expert that loses its slot; None: a free slot.
    """

    key: int
    evict: int | None
    after: int


class LayerPlan(NamedTuple):
    """What one layer does here, in order.

    `run`: `resident` resident ones, then `arriving` ones in flight, then those to load, in load order. `loads` is
    ordered by `after`; a `Load` at `after = i` is issued when `run[:i]` is done, so a working set larger than the pool
    runs in waves.
    """

    run: tuple[int, ...]
    resident: int
    arriving: int
    loads: tuple[Load, ...]


def of_class(order: Any, slot_class: int) -> EvictionPolicy:
    """The order of one class of slots; most have only one."""
    found: EvictionPolicy = order.of_class(slot_class) if hasattr(order, "of_class") else order
    return found


@dataclass
class Slots:
    """Where segments live: `core::Layout`. nbytes: 0 where there is no such segment; slots: of each class."""

    layers: int
    experts: int
    nbytes: list[int]
    slots: list[int]
    class_of: list[int] = field(default_factory=list)  # empty: all are of class 0
    split: bool = False

    @property
    def keys(self) -> int:
        return self.layers * self.experts


@dataclass(eq=False)
class Copy:
    segment: int
    slot: int
    layer: int
    cause: str
    nbytes: int
    back: bool
    submitted_s: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0
    ended: bool = False


class Link:
    """Carries one copy at a time, demand first, then first come first served."""

    def __init__(self, copy_s: Callable[[int], float], late_s: float) -> None:
        self._copy_s, self._late_s = copy_s, late_s
        self.now_s = self._free_s = 0.0
        self._demand, self._prefetch, self._current = deque[Copy](), deque[Copy](), list[Copy]()

    def submit(self, copies: Sequence[Copy], urgent: bool) -> None:
        self.catch_up()
        for copy in copies:
            copy.submitted_s = self.now_s
            (self._demand if urgent else self._prefetch).append(copy)
        self.catch_up()

    def promote(self, copy: Copy) -> None:
        if self.cancel(copy):
            self._demand.append(copy)

    def cancel(self, copy: Copy) -> bool:
        self.catch_up()
        queue = next((queue for queue in (self._demand, self._prefetch) if copy in queue), None)
        if queue is not None:
            queue.remove(copy)
        return queue is not None

    def ended(self, copy: Copy) -> bool:
        self.catch_up()
        return copy.ended

    def wait(self, copy: Copy) -> None:
        begin_s = self.now_s
        while not self.ended(copy):
            self.now_s = self._current[0].end_s
        self.now_s += self._late_s if self.now_s > begin_s else 0.0

    def catch_up(self) -> None:
        while True:
            if self._current and self._current[0].end_s <= self.now_s:
                copy = self._current.pop()
                copy.ended, self._free_s = True, copy.end_s
            queue = self._demand or self._prefetch
            if self._current or not queue:
                return
            copy = queue.popleft()
            copy.start_s = max(self._free_s, copy.submitted_s)
            copy.end_s = copy.start_s + self._copy_s(copy.nbytes) * (2 if copy.back else 1)
            self._current.append(copy)


class Reference:
    """The cache of one device. asked: of the link, as `_core.AskedLog` has it. `Link` has the other arguments."""

    def __init__(
        self, slots: Slots, order: EvictionPolicy, copy_s: Callable[[int], float], late_s: float = 0.0,
        writeback: bool = False,
    ) -> None:  # fmt: skip
        self.order, self.link, self.writeback = order, Link(copy_s, late_s), writeback
        self.decode_only, self.emptied, self.asked = False, 0, list[tuple[str, int, int]]()
        self.counts: list[Counter[str]] = [Counter() for _ in range(slots.layers)]
        self.sources: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.totals, self.uses = Counter[Any](), [0] * slots.keys
        self._lay_out(slots)

    def _lay_out(self, slots: Slots) -> None:
        self.where, segments = slots, len(slots.nbytes)
        self.states, self.slot, self.pins = [ABSENT] * segments, [-1] * segments, [0] * segments
        firsts = [sum(slots.slots[:number]) for number in range(len(slots.slots))]
        self.free = [list(range(first, first + n))[::-1] for first, n in zip(firsts, slots.slots, strict=True)]
        self.flights: dict[int, Copy] = {}  # by segment, oldest first
        self.pending: dict[int, str] = {}  # source of each prefetch that was not used yet
        self.vacant = set[int]()  # keys that were vacated since their layer last ran
        self.unwritten = set[int]()  # slots whose last expert is not copied back

    def class_of(self, segment: int) -> int:
        return self.where.class_of[segment] if self.where.class_of else 0

    def layer_of(self, segment: int) -> int:
        return segment % self.where.keys // self.where.experts

    def segments(self, keys: Sequence[int]) -> list[int]:
        parts = (0, self.where.keys) if self.where.split else (0,)
        return [key + part for key in keys for part in parts if self.where.nbytes[key + part]]

    def by_class(self, segments: Sequence[int]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for segment in segments:
            found[self.class_of(segment)].append(segment)
        return found

    def evictable(self, kept: Collection[int] = ()) -> Callable[[int], bool]:
        return lambda s: self.states[s] == RESIDENT and not self.pins[s] and s not in kept

    def _leave_slot(self, segment: int) -> None:
        assert not self.pins[segment]
        self.free[self.class_of(segment)].append(self.slot[segment])
        self.slot[segment], self.states[segment] = -1, ABSENT
        self.emptied += sum(map(len, self.free)) == sum(self.where.slots)

    def _start(self, segments: Sequence[int], cause: str, urgent: bool) -> None:
        """Slots for absent segments, whose copies are queued."""
        for s in segments:
            assert self.states[s] == ABSENT
            slot = self.slot[s] = self.free[self.class_of(s)].pop()
            self.states[s] = LOADING
            self.flights[s] = Copy(s, slot, self.layer_of(s), cause, self.where.nbytes[s], slot in self.unwritten)
            self.unwritten.discard(slot)
            self.order.admitted(s)
            self.asked.append(({"prefetch": "p", "migration": "m"}.get(cause, "d"), s, slot))
        if segments:
            self.link.submit([self.flights[s] for s in segments], urgent)

    def _land(self, copy: Copy) -> None:
        counts, took_s = self.counts[copy.layer], copy.end_s - copy.start_s
        counts[f"bytes_loaded_{copy.cause}"] += copy.nbytes
        counts["bytes_loaded_low_bit"] += copy.nbytes * (not self.where.split and copy.segment >= self.where.keys)
        counts["bytes_written_back"] += copy.nbytes * copy.back
        counts["writebacks"] += copy.back
        counts.update(total_io_s=took_s, link_s=took_s, writeback_link_s=took_s / 2 * copy.back)  # type: ignore[call-overload]
        self.states[copy.segment] = RESIDENT
        del self.flights[copy.segment]

    def _wait(self, copy: Copy, layer: int) -> None:
        """The compute of `layer` waits."""
        if self.link.ended(copy):
            return
        start_s = self._wait_free(copy)
        end_s, totals = self.link.now_s, Counter[Any](blocked_io_s=self.link.now_s - start_s)
        if copy.back:
            written_s = copy.start_s + (copy.end_s - copy.start_s) / 2
            totals["writeback_blocked_s"] = max(0.0, min(end_s, written_s) - max(start_s, copy.start_s))
        self.counts[layer].update(totals)
        self.totals["decode_blocked_io_s"] += totals["blocked_io_s"] * self.decode_only

    def _wait_free(self, copy: Copy) -> float:
        """At nobody's cost; when the wait began."""
        self.asked.append(("w", copy.segment, copy.slot))
        start_s = self.link.now_s
        self.link.wait(copy)
        return start_s

    def _drop(self, copy: Copy) -> bool:
        dropped = self.link.cancel(copy)
        self.asked.append(("x" if dropped else "-", copy.segment, copy.slot))
        if dropped:
            self._outcome(copy.segment, "cancelled")
            self.unwritten.update([copy.slot] * copy.back)
            del self.flights[copy.segment]
            self._leave_slot(copy.segment)
            self.order.removed(copy.segment)
        return dropped

    def _outcome(self, segment: int, what: str) -> bool:
        """Of a prefetch that was not used yet; False: it is none."""
        source = self.pending.pop(segment, None)
        if source is not None:
            self.sources[source][what] += 1
        return source is not None

    def _evict(self, segments: Sequence[int], layer: int = -1) -> None:
        here = list[int]()
        for s in segments:
            if (copy := self.flights.get(s)) is not None:
                if self._drop(copy):
                    continue
                self._wait(copy, copy.layer if layer < 0 else layer)
                self._land(copy)
            here.append(s)
        for s in here:
            assert self.states[s] == RESIDENT
            if self.writeback and s < self.where.keys:
                self.unwritten.add(self.slot[s])
            self._leave_slot(s)
        for s in here:
            self.order.removed(s)
            if self._outcome(s, "wasted"):
                self.counts[self.layer_of(s)]["bytes_wasted"] += self.where.nbytes[s]

    def _make_room(self, absent: Sequence[int], evictable: Callable[[int], bool]) -> list[int]:
        fit = set[int]()
        for number, segments in self.by_class(absent).items():
            if (lacking := len(segments) - len(self.free[number])) > 0:
                self._evict(of_class(self.order, number).victims(lacking, evictable))
            fit.update(segments[: len(self.free[number])])
        return [s for s in absent if s in fit]

    def arrive(self, layer: int = -1) -> None:
        self._before = Counter(self.counts[layer]) if layer >= 0 else Counter()
        for copy in [copy for copy in self.flights.values() if self.link.ended(copy)]:
            self._land(copy)

    def wait_all(self) -> None:
        for copy in list(self.flights.values()):
            self._wait_free(copy)
            self._land(copy)

    def flush(self) -> None:
        self.wait_all()
        self._evict([s for s, state in enumerate(self.states) if state])

    def divide(self, slots: Slots, fill: Sequence[int]) -> None:
        for copy in list(self.flights.values()):
            self._drop(copy)
        self.flush()
        self._lay_out(slots)
        self._load_behind(fill)

    def _load_behind(self, keys: Sequence[int]) -> list[int]:
        room, loads = [len(free) for free in self.free], list[int]()
        absent = [key for key in dict.fromkeys(keys) if self.where.nbytes[key] and self.states[key] == ABSENT]
        for number, members in self.by_class(absent).items():
            loads += members[: room[number]]
        loads.sort(key=absent.index)
        self._start(loads, "migration", urgent=False)
        return loads

    def fill(self, keys: Sequence[int]) -> int:
        loads = self._load_behind(keys)
        for key in reversed(loads):
            self.order.removed(key)
            self.order.admitted(key)
        return len(loads)

    def migrate(self, keys: Sequence[int], keep_others: bool) -> None:
        wanted = self.segments(keys)
        absent = [s for s in wanted if self.states[s] == ABSENT]
        for number, count in enumerate(self.where.slots if not keep_others else ()):
            self._evict(of_class(self.order, number).victims(count, lambda s: s not in wanted and not self.pins[s]))
        fit = self._make_room(absent, lambda s: s not in wanted and not self.pins[s])
        self._start(fit, "migration", urgent=True)

    def preload(self, keys: Sequence[int]) -> None:
        fit = self._make_room(self.segments(keys), lambda s: False)
        self._start(fit, "demand", urgent=True)
        for s in fit:
            self._wait_free(self.flights.pop(s))
            self.states[s] = RESIDENT
            self.totals["bytes_preloaded"] += self.where.nbytes[s]

    def resize(self, slots: int) -> list[tuple[int, int, int]]:
        before, (free,) = self.where.slots[0], self.free
        for copy in list(self.flights.values()):
            if copy.slot >= min(slots, before) and not self._drop(copy):
                self._wait_free(copy)
                self._land(copy)
        for _ in range(before - len(free) - slots):
            self._evict(self.order.victims(1, self.evictable()))
        held = {slot: s for s, slot in enumerate(self.slot) if slot >= 0}
        room = [slot for slot in range(slots) if slot not in held]
        moving = sorted(slot for slot in held if slot >= slots)
        moves = [(held[slot], slot, to) for slot, to in zip(moving, room, strict=False)]
        for s, _, to in moves:
            self.slot[s] = to
        self.free, self.where.slots = [room[len(moves) :][::-1]], [slots]
        self.emptied += slots > before
        return moves

    def reset_counts(self) -> None:
        self.counts, self.uses = [Counter() for _ in self.counts], [0] * len(self.uses)
        self.totals = Counter(bytes_preloaded=self.totals["bytes_preloaded"])
        self.sources.clear()
        self.pending = dict.fromkeys(self.pending, "before the reset")

    def open(
        self, layer: int, keys: Sequence[int], counts: Sequence[int], tokens: int, low: Collection[int]
    ) -> list[int]:
        self.layer = layer
        for key in keys:
            self.uses[key] += 1
        needed = [s + self.where.keys * (s in low) for s in self.segments(keys)]
        for copy in [c for c in self.flights.values() if c.layer == layer and c.cause == "prefetch"]:
            if copy.segment not in needed:
                self._drop(copy)
        self.order.routed(keys, counts, tokens)
        return needed

    def plan(self, here: Sequence[int], keep: Collection[int]) -> LayerPlan:
        """Residents first, then what arrives, then what is missing; each class takes turns in its own slots."""
        resident, arriving, missing = ([s for s in here if self.states[s] == x] for x in (RESIDENT, LOADING, ABSENT))
        run, loads = (*resident, *arriving, *missing), list[Load]()
        place, members = {s: at for at, s in enumerate(run)}, self.by_class(run)
        for number, segments in self.by_class(missing).items():
            own = members[number]
            for s, victim, after in self._loads(number, own, segments, set(keep)):
                loads.append(Load(s, victim, place[own[after - 1]] + 1 if after else 0))
        loads.sort(key=lambda load: (load.after, place[load.key]))
        self.present = LayerPlan(run, len(resident), len(arriving), tuple(loads))
        self.given = self.done = 0
        return self.present

    def _victims(self, number: int, count: int, kept: Collection[int]) -> list[int]:
        """Residents first, then copies in flight for other layers."""
        order = of_class(self.order, number)
        found = order.victims(count, self.evictable(kept))
        flying = {s for s in self.flights if s not in kept and not self.pins[s]}
        return found + (order.victims(count - len(found), flying.__contains__) if len(found) < count else [])

    def _loads(self, number: int, run: Sequence[int], missing: Sequence[int], keep: set[int]) -> list[Load]:
        free = len(self.free[number])
        loads, rest = [Load(s, None, 0) for s in missing[:free]], missing[free:]
        if not rest:
            return loads
        victims = self._victims(number, len(rest), {*run} | keep)
        first = len(run) - len(missing)
        turns = [at for at, s in enumerate(run) if at >= first or s not in keep]
        if len(victims) < len(rest) and keep and run[turns[0]] == rest[len(victims)]:
            victims += self._victims(number, len(rest) - len(victims), {*run, *victims})
            turns = list(range(len(run)))
        loads += [Load(s, victim, 0) for s, victim in zip(rest, victims, strict=False)]
        for at, s in zip(turns, rest[len(victims) :], strict=False):
            if run[at] == s:
                raise PlanError(f"no slot can be freed for expert {s}: the pool has {self.where.slots[number]}")
            loads.append(Load(s, run[at], at + 1))
        return loads

    def begin(self) -> None:
        plan, keys, split = self.present, self.where.keys, self.where.split
        resident, others = plan.run[: plan.resident], plan.run[plan.resident :]
        here, lacking = {s % keys for s in resident}, {s % keys for s in others}
        now = Counter(forwards=1, waves=1 + len({load.after for load in plan.loads} - {0}))
        now["hits"], now["misses"] = (len(here - lacking), len(lacking)) if split else (len(resident), len(others))
        now["top_hits"] = len(lacking.intersection(resident)) * split
        now["low_bit_hits"] = sum(s >= keys for s in resident) * (not split)
        now["low_bit_misses"] = sum(s >= keys for s in others) * (not split)
        now["bytes_premature"] = sum(self.where.nbytes[s] for s in others[plan.arriving :] if s in self.vacant)
        self.vacant = {s for s in self.vacant if self.layer_of(s) != self.layer}
        if self.decode_only:
            self.totals.update(decode_hits=now["hits"], decode_misses=now["misses"])
        now["prefetched_hits"] = len({s % keys for s in resident if self._outcome(s, "hits")} - lacking)
        late = [s for s in others[: plan.arriving] if self.flights[s].cause == "prefetch"]
        now["late_prefetches"] = len({s % keys for s in late})
        self.counts[self.layer].update(now)
        for s in plan.run[: plan.resident + plan.arriving]:
            self.pins[s] += 1
        for s in others[: plan.arriving]:
            self._outcome(s, "late")
            if s in late or (split and self.flights[s].cause == "migration"):
                self.asked.append(("^", s, self.slot[s]))
                self.link.promote(self.flights[s])

    def load(self, after: int = 0) -> None:
        loads = [load for load in self.present.loads if load.after == after]
        self._evict([load.evict for load in loads if load.evict is not None], self.layer)
        nbytes = sum(self.where.nbytes[load.key] for load in loads) * self.decode_only
        self.counts[self.layer]["bytes_demanded_decode"] += nbytes
        self._start([load.key for load in loads], "demand", urgent=True)
        for load in loads:
            self.pins[load.key] += 1

    def next(self) -> tuple[int, int]:
        plan, first = self.present, self.done
        late, size = {load.after for load in plan.loads if load.after}, len(plan.run)
        if self.given < first and (late or first == size):
            self._ran(plan.run[self.given if late else 0 : first])
            if late:
                self.load(first)
        self.given = first
        if first == size:
            return first, first
        stop = plan.resident if first < plan.resident else first + 1 if late else size
        stop = min([stop, *[after for after in late if after > first]])
        for at in range(first, stop):
            copy = self.flights.get(plan.run[at])
            if copy is not None and at > first and not late and not self.link.ended(copy):
                stop = at  # those that have landed behind the first run with it
                break
            if copy is not None:
                self._wait(copy, self.layer)
                self._land(copy)
        self.done = stop
        return first, stop

    def _ran(self, segments: Sequence[int]) -> None:
        for s in segments:
            self.pins[s] -= 1
        self.order.used(segments)

    def close(self) -> None:
        for path, of in (("io_path_s", "blocked_io_s"), ("link_path_s", "link_s")):
            self.counts[self.layer][path] += self.counts[self.layer][of] - self._before[of]

    def prefetch(self, keys: Sequence[int], keep: Collection[int], source: str) -> int:
        whole = self.where.keys
        if not self.where.split:  # no replica of an expert that is there
            keys = [s for s in keys if s < whole or self.states[s - whole] == ABSENT]
        absent = [s for s in self.segments(keys) if self.states[s] == ABSENT]
        kept = {*keys, *keep}
        fit = self._make_room(absent, self.evictable(kept | {s + whole for s in kept if s < whole}))
        self.sources[source]["queued"] += len(fit)
        self.pending |= dict.fromkeys(fit, source)
        self._start(fit, "prefetch", urgent=False)
        return len(fit)

    def finish_prefetch(self, keys: Sequence[int], layer: int) -> None:
        for copy in [self.flights[s] for s in self.segments(keys) if s in self.flights]:
            self._wait(copy, layer)
            self._land(copy)

    def leave(self, victims: Sequence[int], layer: int) -> None:
        self._evict(victims, layer)
        self.vacant.update(s for s in victims if s < self.where.keys)
        self.counts[layer]["vacated"] += len(victims)

    def vacate(self, slots: int, layer: int) -> None:
        self.leave(self.order.victims(slots - sum(map(len, self.free)), self.evictable()), layer)
