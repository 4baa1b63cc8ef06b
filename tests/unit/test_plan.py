"""The plan of a layer on four-slot caches: exact, and by simulation for any state."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tiermoe.actors.policies.eviction import Lru
from tiermoe.actors.policies.plan import LayerPlan, Load, LoadOnMiss, PlanError
from tiermoe.actors.policies.residency import Reservation, Residency, State

KEYS = 10


class View:
    """A residency and an LRU filled as told, oldest first."""

    def __init__(self, slots: int, resident: list[int] = (), loading: list[int] = (), pinned: list[int] = ()) -> None:
        self.residency, self.lru = Residency(KEYS, slots, 1), Lru()
        self.reservations: dict[int, Reservation] = {}
        for key in [*resident, *loading]:
            self.reservations[key] = self.residency.reserve(key)
            self.lru.admitted(key)
        for key in resident:
            self.residency.publish(self.reservations.pop(key))
        for key in pinned:
            self.residency.pin(key)

    def plan(self, *needed: int, keep: set[int] = frozenset()) -> LayerPlan:  # type: ignore[assignment]
        return LoadOnMiss().plan(needed, self.residency, self.lru, keep)


def test_all_resident() -> None:
    assert View(4, resident=[0, 1, 2]).plan(2, 0) == LayerPlan(run=(2, 0), resident=2, arriving=0, loads=())


def test_nothing_needed() -> None:
    assert View(4, resident=[0]).plan() == LayerPlan((), 0, 0, ())


def test_misses_take_free_slots() -> None:
    plan = View(4, resident=[0]).plan(5, 0, 6)
    assert plan == LayerPlan((0, 5, 6), resident=1, arriving=0, loads=(Load(5, None, 0), Load(6, None, 0)))
    assert plan.waves == 1


def test_victims_are_the_least_recently_used_that_the_layer_does_not_need() -> None:
    plan = View(4, resident=[0, 1, 2, 3]).plan(0, 5, 6)
    assert plan == LayerPlan((0, 5, 6), resident=1, arriving=0, loads=(Load(5, 1, 0), Load(6, 2, 0)))


def test_free_slots_before_victims() -> None:
    assert View(4, resident=[0, 1, 2]).plan(5, 6).loads == (Load(5, None, 0), Load(6, 0, 0))


def test_what_is_kept_is_evicted_last() -> None:
    view = View(4, resident=[0, 1, 2, 3])
    assert view.plan(5, 6, keep={0, 1}).loads == (Load(5, 2, 0), Load(6, 3, 0))
    # One slot that is not kept: the loads take turns in it rather than displace what is kept.
    assert view.plan(5, 6, keep={0, 1, 2}).loads == (Load(5, 3, 0), Load(6, 5, 1))
    # A kept expert that the layer runs is not made to give way either.
    assert view.plan(0, 5, 6, keep={0, 1, 2}).loads == (Load(5, 3, 0), Load(6, 5, 2))


def test_what_is_kept_gives_way_when_nothing_else_can() -> None:
    view = View(4, resident=[0, 1, 2, 3])
    assert view.plan(5, 6, keep={0, 1, 2, 3}).loads == (Load(5, 0, 0), Load(6, 1, 0))
    pinned = View(2, resident=[0, 1], pinned=[1])
    assert pinned.plan(5, 6, keep={0, 1}).loads == (Load(5, 0, 0), Load(6, 5, 1))
    with pytest.raises(PlanError, match="no slot"):
        View(1, resident=[0], pinned=[0]).plan(5, keep={0})


def test_a_kept_expert_that_is_missing_is_loaded_like_any_other() -> None:
    assert View(2, resident=[0, 1]).plan(5, 6, keep={5}).loads == (Load(5, 0, 0), Load(6, 1, 0))


def test_arriving_run_after_residents_and_before_misses() -> None:
    plan = View(4, resident=[0], loading=[1]).plan(5, 1, 0)
    assert plan == LayerPlan((0, 1, 5), resident=1, arriving=1, loads=(Load(5, None, 0),))


def test_pinned_residents_stay() -> None:
    assert View(3, resident=[0, 1, 2], pinned=[0]).plan(5).loads == (Load(5, 1, 0),)


def test_a_pinned_copy_in_flight_stays() -> None:
    """Guards the second search for victims: it took copies that a forward waits for."""
    assert View(3, loading=[1, 2, 3], pinned=[1]).plan(5).loads == (Load(5, 2, 0),)
    with pytest.raises(PlanError, match="expert 5: the pool has 2"):
        View(2, loading=[1, 2], pinned=[1, 2]).plan(5)


def test_a_prefetch_in_flight_gives_way_last() -> None:
    view = View(3, resident=[0, 1], loading=[2])
    assert view.plan(5, 6).loads == (Load(5, 0, 0), Load(6, 1, 0))
    assert view.plan(5, 6, 7).loads == (Load(5, 0, 0), Load(6, 1, 0), Load(7, 2, 0))


def test_waves_reuse_the_slots_of_experts_that_have_run() -> None:
    plan = View(2, resident=[0, 1]).plan(0, 1, 5, 6, 7)
    assert plan == LayerPlan(
        (0, 1, 5, 6, 7), resident=2, arriving=0, loads=(Load(5, 0, 1), Load(6, 1, 2), Load(7, 5, 3))
    )
    assert plan.waves == 4


def test_victims_before_waves() -> None:
    plan = View(3, resident=[0, 1, 9]).plan(0, 5, 6, 7)
    assert plan.loads == (Load(5, 1, 0), Load(6, 9, 0), Load(7, 0, 1))
    assert plan.waves == 2


def test_a_single_slot_serves_any_layer() -> None:
    assert View(1).plan(5, 6, 7).loads == (Load(5, None, 0), Load(6, 5, 1), Load(7, 6, 2))
    assert View(1, resident=[3]).plan(5, 6).loads == (Load(5, 3, 0), Load(6, 5, 1))
    assert View(1, loading=[3]).plan(5, 6).loads == (Load(5, 3, 0), Load(6, 5, 1))
    assert View(1, resident=[6]).plan(5, 6) == LayerPlan((6, 5), 1, 0, (Load(5, 6, 1),))


def test_no_slot_can_be_had() -> None:
    with pytest.raises(PlanError, match="expert 5: the pool has 2"):
        View(2, resident=[0, 1], pinned=[0, 1]).plan(5)


@st.composite
def views(draw: st.DrawFn) -> tuple[View, list[int]]:
    slots = draw(st.integers(1, 6))
    keys = draw(st.permutations(range(KEYS)))
    resident = draw(st.integers(0, slots))
    loading = draw(st.integers(0, slots - resident))
    held = keys[:resident]
    needed = draw(st.lists(st.integers(0, KEYS - 1), unique=True, max_size=KEYS))
    pinned = [key for key in held if key not in needed and draw(st.booleans())]
    assume(len(pinned) < slots)  # else there is no plan, rightly
    view = View(slots, resident=held, loading=keys[resident : resident + loading], pinned=pinned)
    return view, needed


def load(view: View, loads: list[Load]) -> None:
    """Carry loads out as the cache does; the residency refuses whatever is impossible."""
    for item in loads:
        if item.evict is not None:
            if view.residency.state(item.evict) == State.LOADING:
                view.residency.release(view.reservations.pop(item.evict))
            else:
                view.residency.evict(item.evict)
            view.lru.removed(item.evict)
        view.reservations[item.key] = view.residency.reserve(item.key)
        view.lru.admitted(item.key)


@settings(max_examples=300, deadline=None)
@given(views(), st.sets(st.integers(0, KEYS - 1)))
def test_every_plan_can_be_carried_out(case: tuple[View, list[int]], keep: set[int]) -> None:
    view, needed = case
    residency = view.residency
    before = {key: residency.state(key) for key in range(KEYS)}
    pinned = {key for key in range(KEYS) if residency.pinned(key)}
    plan = view.plan(*needed, keep=keep)
    assert {key: residency.state(key) for key in range(KEYS)} == before

    assert sorted(plan.run) == sorted(needed)
    assert [before[key] for key in plan.run] == (
        [State.RESIDENT] * plan.resident
        + [State.LOADING] * plan.arriving
        + [State.ABSENT] * (len(needed) - plan.resident - plan.arriving)
    )
    assert [item.key for item in plan.loads] == list(plan.run[plan.resident + plan.arriving :])
    assert [item.after for item in plan.loads] == sorted(item.after for item in plan.loads)
    assert plan.waves == 1 + len({item.after for item in plan.loads} - {0})

    for key in plan.run[: plan.resident + plan.arriving]:
        residency.pin(key)  # as the cache does: an eviction of what is still to run would be refused
    for i, key in enumerate((*plan.run, None)):
        issued = [item for item in plan.loads if item.after == i]
        load(view, issued)
        for item in issued:
            residency.pin(item.key)
        residency.check_integrity()
        if key is None:
            break
        if key in view.reservations:
            residency.publish(view.reservations.pop(key))
        assert residency.state(key) == State.RESIDENT
        residency.unpin(key)
    assert all(residency.state(key) == State.RESIDENT for key in pinned)
