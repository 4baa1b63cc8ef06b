"""The plan of one layer: which experts run when, and which loads make that possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .eviction import EvictionPolicy
from .residency import Residency, State


class PlanError(ValueError):
    """No plan exists: not one slot can be freed for the layer."""


@dataclass(frozen=True, slots=True)
class Load:
    """Bring `key` into the cache, once the first `after` experts of the plan have run.

    `evict` names the expert that gives up its slot; None takes a free one.
    """

    key: int
    evict: int | None
    after: int


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What one layer does, in order.

    `run` holds every expert that the routing asks for, once: first the resident ones
    (the first `resident`), then those already on their way (the next `arriving`), then those
    to be loaded, in load order. `loads` is ordered by `after`; a `Load` at `after = i` is issued
    when `run[:i]` is done, so a working set larger than the pool is served in waves.
    """

    run: tuple[int, ...]
    resident: int
    arriving: int
    loads: tuple[Load, ...]

    @property
    def waves(self) -> int:
        """Passes over the layer: 1, plus one for each later point at which loads are issued."""
        return 1 + len({load.after for load in self.loads if load.after})


class LoadOnMiss:
    """Exact execution: every expert of the routing runs in full precision; missing ones are loaded.

    Rule: residents run first while the loads fly. Free slots are filled first, then the eviction
    policy's victims among experts that this layer does not need; when both are used up, the slots of
    experts that have just run are reused one by one. Experts whose prefetch is still in flight
    for another layer give way last. O(needed + slots looked at by the eviction policy).
    """

    def plan(self, needed: Sequence[int], residency: Residency, eviction: EvictionPolicy) -> LayerPlan:
        """Plan one layer.

        Args:
            needed: keys that the routing asks for, without repeats.
            residency: the present view; not changed.
            eviction: asked for victims; not changed.

        Raises:
            PlanError: no slot can be had for a missing expert.
        """
        state = residency.state
        resident = [k for k in needed if state(k) == State.RESIDENT]
        if len(resident) == len(needed):
            return LayerPlan(tuple(needed), len(needed), 0, ())
        arriving = [k for k in needed if state(k) == State.LOADING]
        missing = [k for k in needed if state(k) == State.ABSENT]
        run = (*resident, *arriving, *missing)
        return LayerPlan(run, len(resident), len(arriving), self._loads(run, missing, residency, eviction))

    @staticmethod
    def _loads(
        run: tuple[int, ...], missing: list[int], residency: Residency, eviction: EvictionPolicy
    ) -> tuple[Load, ...]:
        kept = set(run)
        free = residency.free_slots
        short = len(missing) - free
        victims = eviction.victims(
            short, lambda k: k not in kept and residency.state(k) == State.RESIDENT and not residency.pinned(k)
        )
        if len(victims) < short:  # only then disturb copies that are on their way for other layers
            victims += eviction.victims(
                short - len(victims),
                lambda k: k not in kept and residency.state(k) == State.LOADING and not residency.pinned(k),
            )
        loads = [Load(key, None, 0) for key in missing[:free]]
        rest = missing[free:]
        loads += [Load(key, victim, 0) for key, victim in zip(rest, victims, strict=False)]
        # The i-th further load takes the slot of the i-th expert to have run.
        for i, key in enumerate(rest[len(victims) :]):
            if run[i] == key:
                raise PlanError(f"no slot can be freed for expert {key}: the pool has {residency.slots}")
            loads.append(Load(key, run[i], i + 1))
        return tuple(loads)
