"""The plan of one layer: which experts run in which order, and the loads that make this possible.

Where experts are split, keys are those of their segments, which load and run separately.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from .eviction import EvictionPolicy
from .residency import Residency


class PlanError(ValueError):
    """No slot can be freed for the layer."""


class Load(NamedTuple):
    """Bring `key` into the cache once the first `after` experts of the plan have run.

    evict: the expert that loses its slot; None: a free slot.
    """

    key: int
    evict: int | None
    after: int


class Remote(NamedTuple):
    """Run `key` on process `peer`, an NDP worker or shard, on its replica of `bits` bits; 0: full precision."""

    key: int
    bits: int
    peer: str


class LayerPlan(NamedTuple):
    """What one layer does, in order.

    `run` and `remote` together hold every expert of the routing once. `run` is computed here: `resident` resident ones,
    then `arriving` ones in flight, then those to load, in load order. `loads` is ordered by `after`; a `Load` at `after
    = i` is issued when `run[:i]` is done, so a working set larger than the pool runs in waves. Other processes compute
    `remote` at the same time.
    """

    run: tuple[int, ...]
    resident: int
    arriving: int
    loads: tuple[Load, ...]
    remote: tuple[Remote, ...] = ()

    @property
    def first_loads(self) -> list[Load]:
        """Loads that are issued before anything runs."""
        return [load for load in self.loads if not load.after]

    @property
    def waves(self) -> int:
        """Passes over the layer: 1, plus one for each later point at which loads are issued."""
        return 1 + len({load.after for load in self.loads if load.after})


class LoadOnMiss:
    """Exact execution: every expert of the routing runs in full precision; missing ones are loaded.

    Rule, for each slot class: residents run first while loads are in flight. Loads take free slots, then slots of the
    eviction policy's victims that this layer does not need, then, one by one, slots of experts that have just run.
    Prefetches in flight for another layer are evicted later, experts to `keep` last. O(needed + slots that the policy
    examines).
    """

    def plan(
        self,
        needed: Sequence[int],
        residency: Residency,
        eviction: EvictionPolicy,
        keep: AbstractSet[int] = frozenset(),
    ) -> LayerPlan:
        """Plan one layer.

        Args:
            needed: keys that the routing asks for, without repeats.
            residency, eviction: the current state; not changed.
            keep: residents to evict last.

        Raises:
            PlanError: no slot can be freed for a missing expert.
        """
        resident, arriving, missing = residency.by_state(needed)
        if len(resident) == len(needed):
            return LayerPlan(tuple(needed), len(needed), 0, ())
        run = (*resident, *arriving, *missing)
        if len(residency.class_slots) == 1:
            loads = self._loads(0, run, missing, residency, eviction, keep)
        else:
            loads = self._loads_of_classes(run, residency.by_class(missing), residency, eviction, keep)
        return LayerPlan(run, len(resident), len(arriving), tuple(loads))

    def _loads_of_classes(
        self,
        run: tuple[int, ...],
        missing: Mapping[int, list[int]],
        residency: Residency,
        eviction: EvictionPolicy,
        keep: AbstractSet[int],
    ) -> list[Load]:
        """The loads of all classes in order of issue; each class reuses its own slots."""
        place = {key: i for i, key in enumerate(run)}
        members = residency.by_class(run)
        loads: list[Load] = []
        for slot_class, keys in missing.items():
            own = members[slot_class]
            for load in self._loads(slot_class, own, keys, residency, eviction, keep):
                if load.after:
                    load = Load(load.key, load.evict, place[own[load.after - 1]] + 1)
                loads.append(load)
        if len(missing) == 1:
            return loads
        return sorted(loads, key=lambda load: (load.after, place[load.key]))

    @staticmethod
    def _loads(
        slot_class: int,
        run: Sequence[int],
        missing: list[int],
        residency: Residency,
        eviction: EvictionPolicy,
        keep: AbstractSet[int],
    ) -> list[Load]:
        """The loads of one slot class; `run` and `missing` are of that class, and `Load.after` counts in this `run`."""
        free = residency.free_of(slot_class)
        short, loads = len(missing) - free, list[Load]()
        for key in missing[:free]:
            loads.append(Load(key, None, 0))
        if short <= 0:
            return loads
        eviction = eviction.of_class(slot_class)
        used = set(run)
        victims = _victims(short, used | keep, residency, eviction)
        if len(victims) == short:
            for key, victim in zip(missing[free:], victims, strict=True):
                loads.append(Load(key, victim, 0))
            return loads
        # What is kept gives way only where the layer has nothing of its own to take turns with.
        first = len(run) - len(missing)
        turns = [i for i, key in enumerate(run) if i >= first or key not in keep]
        if keep and run[turns[0]] == missing[free + len(victims)]:
            victims += _victims(short - len(victims), used | set(victims), residency, eviction)
            turns = list(range(len(run)))
        rest = missing[free:]
        loads += [Load(key, victim, 0) for key, victim in zip(rest, victims, strict=False)]
        # Each further load takes the slot of the next expert to have run.
        for i, key in zip(turns, rest[len(victims) :], strict=False):
            if run[i] == key:
                slots = residency.class_slots[slot_class]
                raise PlanError(f"no slot can be freed for expert {key}: the pool has {slots}")
            loads.append(Load(key, run[i], i + 1))
        return loads


def _victims(count: int, kept: AbstractSet[int], residency: Residency, eviction: EvictionPolicy) -> list[int]:
    """At most `count` (1 or more) experts to evict, residents first, then copies in flight for other layers."""
    found = eviction.victims(count, residency.evictable(kept))
    if len(found) < count:
        _, loading, _ = residency.by_state(residency.held())
        free_to_go = {key for key in loading if key not in kept and not residency.pinned(key)}
        found += eviction.victims(count - len(found), free_to_go.__contains__)
    return found
