"""Slots, states and pins of the expert cache, and the plan of a layer on them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tiermoe.actors.policies.eviction import Lru
from tiermoe.actors.policies.plan import LayerPlan, Load, LoadOnMiss, PlanError
from tiermoe.actors.policies.residency import Reservation, Residency, ResidencyError, State

KEYS, SLOTS, SLOT_BYTES = 6, 4, 100


@pytest.fixture
def residency() -> Residency:
    return Residency(KEYS, SLOTS, SLOT_BYTES)


def data(residency: Residency) -> dict[str, Any]:
    """Its fields, without bound methods of those."""
    return {name: value for name, value in vars(residency).items() if not callable(value)}


def refused(residency: Residency, call: Callable[[], Any], match: str) -> None:
    """The call raises, and not one field differs afterwards."""
    before = deepcopy(data(residency))
    with pytest.raises(ResidencyError, match=match):
        call()
    assert data(residency) == before
    residency.check_integrity()


def resident(residency: Residency, *keys: int) -> None:
    for key in keys:
        residency.publish(residency.reserve(key))


def test_it_counts_how_often_it_became_empty(residency: Residency) -> None:
    """What a rule on misses sees of a flush: the cache is to fill again."""
    resident(residency, 1, 2)
    residency.evict(1)
    assert residency.emptied == 0
    residency.evict(2)
    assert residency.emptied == 1
    residency.release(residency.reserve(3))
    assert residency.emptied == 2


def test_reserve_then_publish(residency: Residency) -> None:
    reservation = residency.reserve(3)
    assert reservation == Reservation(key=3, slot=0, generation=1)
    assert (residency.state(3), residency.slot(3), residency.free_slots) == (State.LOADING, 0, 3)
    residency.publish(reservation)
    assert (residency.state(3), residency.slot(3), residency.bytes_held) == (State.RESIDENT, 0, SLOT_BYTES)
    assert list(residency.held()) == [3]


def test_lowest_slots_are_given_first_and_the_last_freed_is_reused(residency: Residency) -> None:
    assert [residency.reserve(key).slot for key in range(SLOTS)] == [0, 1, 2, 3]
    residency = Residency(KEYS, SLOTS, SLOT_BYTES)
    resident(residency, 0, 1, 2)
    residency.evict(1)
    assert residency.reserve(4) == Reservation(4, slot=1, generation=2)


def test_release_frees_the_slot(residency: Residency) -> None:
    reservation = residency.reserve(3)
    residency.release(reservation)
    assert (residency.state(3), residency.free_slots, residency.bytes_held) == (State.ABSENT, SLOTS, 0)
    with pytest.raises(KeyError):
        residency.slot(3)


def test_a_full_pool_holds_its_whole_budget_and_no_more(residency: Residency) -> None:
    resident(residency, 0, 1, 2, 3)
    assert (residency.free_slots, residency.bytes_held) == (0, SLOTS * SLOT_BYTES)
    refused(residency, lambda: residency.reserve(4), "no free slot")


@pytest.mark.parametrize("state", [State.LOADING, State.RESIDENT])
def test_reserve_refuses_what_is_held(residency: Residency, state: State) -> None:
    reservation = residency.reserve(0)
    if state == State.RESIDENT:
        residency.publish(reservation)
    refused(residency, lambda: residency.reserve(0), f"{state.name}, not ABSENT")


@pytest.mark.parametrize("key", [-1, -KEYS, KEYS])
def test_reserve_refuses_keys_that_do_not_exist(residency: Residency, key: int) -> None:
    """Guards negative keys, which Python takes for keys from the end: one expert then had two slots."""
    refused(residency, lambda: residency.reserve(key), f"no expert {key}: keys are 0 to {KEYS - 1}")


def test_a_reservation_ends_once(residency: Residency) -> None:
    published, released = residency.reserve(0), residency.reserve(1)
    residency.publish(published)
    residency.release(released)
    for stale in (published, released):
        refused(residency, lambda stale=stale: residency.publish(stale), "not loading")
        refused(residency, lambda stale=stale: residency.release(stale), "not loading")


def test_a_copy_for_an_earlier_generation_is_not_published(residency: Residency) -> None:
    """Same expert, same slot, but the slot was given away in between: the late copy must not count."""
    stale = residency.reserve(0)
    residency.release(stale)
    current = residency.reserve(0)
    assert (current.slot, current.generation) == (stale.slot, stale.generation + 1)
    refused(residency, lambda: residency.publish(stale), "given away since generation 1")
    refused(residency, lambda: residency.release(stale), "given away since generation 1")
    residency.publish(current)


def test_a_copy_for_another_slot_is_not_published(residency: Residency) -> None:
    stale = residency.reserve(0)
    residency.release(stale)
    residency.reserve(1)
    assert residency.reserve(0).slot != stale.slot
    refused(residency, lambda: residency.publish(stale), "not loading into slot 0")


def test_evict_takes_residents_only(residency: Residency) -> None:
    refused(residency, lambda: residency.evict(0), "ABSENT, not RESIDENT")
    residency.reserve(0)
    refused(residency, lambda: residency.evict(0), "LOADING, not RESIDENT")
    resident(residency, 1)
    residency.evict(1)
    assert residency.state(1) == State.ABSENT


def test_pins_are_counted(residency: Residency) -> None:
    resident(residency, 0)
    residency.pin(0)
    residency.pin(0)
    residency.unpin(0)
    refused(residency, lambda: residency.evict(0), "pinned")
    residency.unpin(0)
    assert not residency.pinned(0)
    residency.evict(0)


def test_a_pinned_load_is_not_released(residency: Residency) -> None:
    reservation = residency.reserve(0)
    residency.pin(0)
    refused(residency, lambda: residency.release(reservation), "pinned")
    residency.publish(reservation)
    assert residency.pinned(0)


def test_pins_need_an_expert_that_is_held(residency: Residency) -> None:
    refused(residency, lambda: residency.pin(0), "ABSENT")
    refused(residency, lambda: residency.unpin(0), "not pinned")


def test_unpin_all(residency: Residency) -> None:
    resident(residency, 0, 1)
    for key in (0, 0, 1):
        residency.pin(key)
    residency.unpin_all()
    residency.evict(0)
    residency.evict(1)


def test_the_last_slots_come_and_go() -> None:
    residency = Residency(KEYS, 2, SLOT_BYTES, most=4)
    arrays = [memoryview(array) for array in residency.arrays]  # as native code has them
    assert residency.resize(4) == []
    resident(residency, 0, 1, 2, 3)
    residency.evict(1)
    assert residency.resize(3) == [(3, 3, 1)]  # expert 3 moves from slot 3 to slot 1
    assert (residency.slot(3), residency.free_slots, residency.class_slots) == (1, 0, (3,))
    residency.evict(0)
    residency.evict(2)
    assert residency.resize(1) == [(3, 1, 0)]
    assert residency.resize(4) == []
    assert [residency.reserve(key).slot for key in (0, 1, 2)] == [1, 2, 3]
    assert all(view.obj is array for view, array in zip(arrays, residency.arrays, strict=True))
    residency.check_integrity()


def test_slots_of_several_classes_keep_their_number(residency: Residency) -> None:
    residency.divide([0] * KEYS + [1] * KEYS, [2, 2], [SLOT_BYTES, 10])
    refused(residency, lambda: residency.resize(3), "in 2 classes")


@pytest.mark.parametrize(("keys", "slots"), [(0, 1), (1, 0), (-1, 2)])
def test_an_empty_residency_is_refused(keys: int, slots: int) -> None:
    with pytest.raises(ResidencyError, match="at least one"):
        Residency(keys, slots, SLOT_BYTES)


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda r: r._counts.__setitem__(1, 3),  # a slot given twice
        lambda r: r._counts.__setitem__(1, 1),  # a slot lost
        lambda r: r._slot.__setitem__(5, 0),  # shared
        lambda r: r._state.__setitem__(0, State.ABSENT),
        lambda r: r._state.__setitem__(5, State.RESIDENT),
        lambda r: r._pins.__setitem__(5, 1),
        lambda r: r._pins.__setitem__(0, -1),
    ],
)
def test_check_integrity_sees(corrupt: Callable[[Residency], Any], residency: Residency) -> None:
    resident(residency, 0, 1)
    corrupt(residency)
    with pytest.raises(ResidencyError):
        residency.check_integrity()


class ResidencyMachine(RuleBasedStateMachine):
    """Any sequence of verbs, legal or not, against a plain model."""

    keys = st.integers(0, KEYS - 1)

    def __init__(self) -> None:
        super().__init__()
        self.residency, self.slots = Residency(KEYS, SLOTS - 1, SLOT_BYTES, most=SLOTS), SLOTS - 1
        self.loading: dict[int, Reservation] = {}
        self.ended: list[Reservation] = []
        self.resident: dict[int, int] = {}  # key -> slot
        self.pins: dict[int, int] = {}

    def attempt(self, legal: bool, call: Callable[[], Any]) -> Any:
        if legal:
            return call()
        refused(self.residency, call, ".")
        return None

    @rule(key=keys)
    def reserve(self, key: int) -> None:
        held = len(self.loading) + len(self.resident)
        legal = key not in self.loading and key not in self.resident and held < self.slots
        reservation = self.attempt(legal, lambda: self.residency.reserve(key))
        if reservation is not None:
            assert reservation.slot not in self.resident.values()
            self.loading[key] = reservation

    @rule(key=keys, publish=st.booleans())
    def end(self, key: int, publish: bool) -> None:
        reservation = self.loading.get(key)
        if reservation is None:
            return
        verb = self.residency.publish if publish else self.residency.release
        legal = publish or not self.pins.get(key)
        self.attempt(legal, lambda: verb(reservation))
        if legal:
            del self.loading[key]
            self.ended.append(reservation)
            if publish:
                self.resident[key] = reservation.slot

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), publish=st.booleans())
    def end_again(self, data: st.DataObject, publish: bool) -> None:
        stale = data.draw(st.sampled_from(self.ended))
        verb = self.residency.publish if publish else self.residency.release
        self.attempt(False, lambda: verb(stale))

    @rule(key=keys)
    def evict(self, key: int) -> None:
        legal = key in self.resident and not self.pins.get(key)
        self.attempt(legal, lambda: self.residency.evict(key))
        if legal:
            del self.resident[key]

    @rule(key=keys)
    def pin(self, key: int) -> None:
        legal = key in self.loading or key in self.resident
        self.attempt(legal, lambda: self.residency.pin(key))
        if legal:
            self.pins[key] = self.pins.get(key, 0) + 1

    @rule(key=keys)
    def unpin(self, key: int) -> None:
        legal = self.pins.get(key, 0) > 0
        self.attempt(legal, lambda: self.residency.unpin(key))
        if legal:
            self.pins[key] -= 1

    @rule(slots=st.integers(0, SLOTS + 1))
    def resize(self, slots: int) -> None:
        behind = {key for key, slot in self.resident.items() if slot >= slots}
        stuck = [key for key in behind if self.pins.get(key)] + [r for r in self.loading.values() if r.slot >= slots]
        legal = 1 <= slots <= SLOTS and not stuck and len(self.loading) + len(self.resident) <= slots
        moves = self.attempt(legal, lambda: self.residency.resize(slots))
        if moves is None:
            return
        assert {key for key, _, _ in moves} == behind
        for key, before, now in moves:
            assert self.resident[key] == before
            assert now not in self.resident.values()
            self.resident[key] = now
        self.slots = slots

    @invariant()
    def agrees(self) -> None:
        residency = self.residency
        residency.check_integrity()
        held = {key: r.slot for key, r in self.loading.items()} | self.resident
        assert {key: residency.slot(key) for key in residency.held()} == held
        for key in range(KEYS):
            state = State.LOADING if key in self.loading else State.RESIDENT if key in self.resident else State.ABSENT
            assert residency.state(key) == state
            assert residency.pinned(key) == (self.pins.get(key, 0) > 0)
        assert residency.bytes_held == len(held) * SLOT_BYTES <= self.slots * SLOT_BYTES
        assert (residency.slots, residency.free_slots) == (self.slots, self.slots - len(held))


ResidencyMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestResidencyMachine = ResidencyMachine.TestCase


PLAN_KEYS = 10


class View:
    """A residency and an LRU filled as told, oldest first."""

    def __init__(self, slots: int, resident: list[int] = (), loading: list[int] = (), pinned: list[int] = ()) -> None:
        self.residency, self.lru = Residency(PLAN_KEYS, slots, 1), Lru()
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
    keys = draw(st.permutations(range(PLAN_KEYS)))
    resident = draw(st.integers(0, slots))
    loading = draw(st.integers(0, slots - resident))
    held = keys[:resident]
    needed = draw(st.lists(st.integers(0, PLAN_KEYS - 1), unique=True, max_size=PLAN_KEYS))
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
@given(views(), st.sets(st.integers(0, PLAN_KEYS - 1)))
def test_every_plan_can_be_carried_out(case: tuple[View, list[int]], keep: set[int]) -> None:
    view, needed = case
    residency = view.residency
    before = {key: residency.state(key) for key in range(PLAN_KEYS)}
    pinned = {key for key in range(PLAN_KEYS) if residency.pinned(key)}
    plan = view.plan(*needed, keep=keep)
    assert {key: residency.state(key) for key in range(PLAN_KEYS)} == before

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
