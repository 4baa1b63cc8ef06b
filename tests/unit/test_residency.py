"""Slots, states and pins of the core, and the plan of a layer on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tiermoe.actors.core import _core
from tiermoe.actors.policies.plan import PlanError
from tiermoe.actors.policies.residency import ResidencyError, State

KEYS, SLOTS, BYTES = 10, 4, 100  # experts of layer 0; layer 1 has as many
ABSENT, LOADING, RESIDENT = map(int, State)


def core_of(slots: Sequence[int] = (SLOTS,), keys: int = KEYS, most: int = 0) -> _core.Core:
    """By last use, with copies of a second; with two classes of slots the second is for replicas."""
    parts = len(slots)
    class_of = [0] * 2 * keys + [1] * 2 * keys if parts > 1 else []
    layout = _core.Layout(2, keys, parts, class_of, list(slots), [], [BYTES] * (2 * keys * parts), False, most)
    order = _core.WholeOrder("lru", 2, max(1, keys))
    clock = _core.Clock()
    return _core.Core(layout, _core.VirtualLink(clock, lambda nbytes: 1.0, 0.0), order, _core.Governor())


def seen(core: _core.Core) -> dict[str, Any]:
    """All that a test can see of slots."""
    found = {name: getattr(core, name).tolist() for name in ("states", "evictable", "slots", "pins")}
    return found | {"free": core.free_slots, "under way": core.under_way, "emptied": core.emptied}


def refused(core: _core.Core, call: Callable[[], Any], match: str) -> None:
    """The call raises, and nothing differs afterwards."""
    before = seen(core)
    with pytest.raises(ResidencyError, match=match):
        call()
    assert seen(core) == before
    assert core.check() == ""


def load(core: _core.Core, *keys: int) -> None:
    core.prefetch(list(keys), [], 1)
    core.wait_all()


def pin(core: _core.Core, *keys: int) -> None:
    """A pass has begun with these; it goes no further."""
    core.open(0, list(keys), [1] * len(keys), 1, [])
    core.plan(list(keys), [])
    core.begin()


@pytest.fixture
def core() -> _core.Core:
    return core_of()


def test_an_expert_that_comes_back_takes_what_its_last_copy_took_not() -> None:
    """Same expert, same slot, but it was given away in between: only the second copy counts."""
    core = core_of([2])
    core.prefetch([8, 3], [], 1)
    core.drop_stale(0, [8])
    core.prefetch([3], [], 2)
    assert core.state(3) == LOADING
    core.wait_all()
    assert core.state(3) == RESIDENT
    assert (core.source(1).cancelled, core.source(2).queued, core.counts(0).bytes_loaded_prefetch) == (1, 1, 2 * BYTES)


@pytest.mark.parametrize("key", [-1, -2 * KEYS, 2 * KEYS])
def test_keys_that_do_not_exist_are_refused(core: _core.Core, key: int) -> None:
    """Guards negative keys, which Python takes for keys from the end: one expert then had two slots."""
    text = f"expert {key} is not one of"
    load(core, 0)
    for call in (
        lambda: core.prefetch([1, key], [], 1), lambda: core.prefetch([1], [key], 1), lambda: core.preload([1, key]),
        lambda: core.migrate([1, key], False), lambda: core.finish_prefetch([key], 0), lambda: core.leave([key], 0),
        lambda: core.plan([1, key], []), lambda: core.plan([1], [key]), lambda: core.open(0, [1, key], [1, 1], 1, []),
    ):  # fmt: skip
        refused(core, call, text)


@pytest.mark.parametrize("layer", [-1, 2])
def test_layers_that_do_not_exist_are_refused(core: _core.Core, layer: int) -> None:
    for call in (
        lambda: core.open(layer, [], [], 1, []), lambda: core.vacate(1, layer), lambda: core.leave([], layer),
        lambda: core.finish_prefetch([], layer),
    ):  # fmt: skip
        refused(core, call, f"no MoE layer {layer}")


def test_a_layer_runs_experts_of_its_own_and_has_a_count_of_each(core: _core.Core) -> None:
    refused(core, lambda: core.open(0, [KEYS], [1], 1, []), "is not one of 0 to 9")
    refused(core, lambda: core.open(0, [0, 1], [1], 1, []), "as many counts")


def test_a_pass_runs_experts_of_its_layer_only(core: _core.Core) -> None:
    """Guards counters of experts beside those of the layer, which were written without asking."""
    core.open(1, [KEYS], [1], 1, [])
    core.plan([0], [])
    refused(core, core.begin, "segment 0 is not of layer 1")


def test_nothing_runs_before_a_pass_is_opened(core: _core.Core) -> None:
    for call in (core.begin, core.load, core.next, core.close):
        refused(core, call, "no pass is open")


def test_a_pinned_expert_stays_until_it_has_run(core: _core.Core) -> None:
    load(core, 0, 1)
    pin(core, 0)
    refused(core, lambda: core.leave([1, 0], 0), "pinned segment cannot leave: 0")
    assert core.prefetch([2, 3, 4, 5], [], 1) == 3
    assert (core.state(0), core.state(1)) == (RESIDENT, ABSENT)
    while core.next() != (1, 1):
        pass
    core.leave([0], 0)
    assert core.pins.tolist() == [0] * 2 * KEYS


def test_the_last_slots_come_and_go() -> None:
    core = core_of([2], most=4)
    arrays = core.states, core.evictable, core.slots, core.pins  # as readers have them
    assert core.resize(4) == []
    load(core, 0, 1, 2, 3)
    core.leave([1], 0)
    assert core.resize(3) == [(3, 3, 1)]  # expert 3 moves from slot 3 to slot 1
    assert (core.slots[3], core.free_slots) == (1, 0)
    core.leave([0], 0)
    core.leave([2], 0)
    assert core.resize(1) == [(3, 1, 0)]
    assert core.resize(4) == []
    load(core, 0, 1, 2)
    assert core.slots[:3].tolist() == [1, 2, 3]
    now = core.states, core.evictable, core.slots, core.pins
    assert [a.tolist() for a in arrays] == [a.tolist() for a in now]
    assert core.check() == ""


@pytest.mark.parametrize(("keys", "slots"), [(0, 1), (1, 0), (-1, 2)])
def test_an_empty_cache_is_refused(keys: int, slots: int) -> None:
    with pytest.raises(ValueError, match="there are no"):
        core_of([slots], keys)


@pytest.mark.parametrize(
    ("array", "key", "value"),
    [
        ("slots", 5, 0),  # shared
        ("slots", 0, -1),  # lost
        ("states", 0, ABSENT),
        ("states", 5, RESIDENT),
        ("evictable", 0, 0),
        ("pins", 5, 1),
        ("pins", 0, -1),
    ],
)
def test_check_sees(array: str, key: int, value: int, core: _core.Core) -> None:
    load(core, 0, 1)
    assert core.check() == ""
    getattr(core, array)[key] = value
    assert core.check() != ""


class View:
    """A cache filled as told, oldest first."""

    def __init__(
        self, slots: int, resident: Sequence[int] = (), loading: Sequence[int] = (), pinned: Sequence[int] = ()
    ) -> None:
        self.core = core_of([slots])
        self.core.preload(list(resident))
        self.core.migrate([*resident, *loading], True)
        if pinned:
            pin(self.core, *pinned)

    def plan(self, *needed: int, keep: Sequence[int] = ()) -> tuple[Any, ...]:
        """run, resident, arriving, and loads of (expert, victim, after); victim -1: a free slot."""
        self.core.open(0, list(needed), [1] * len(needed), 1, [])
        return self.core.plan(list(needed), list(keep))

    def loads(self, *needed: int, keep: Sequence[int] = ()) -> list[tuple[int, int, int]]:
        return self.plan(*needed, keep=keep)[3]


def test_experts_in_keep_are_evicted_when_no_others_are_left() -> None:
    view = View(4, resident=[0, 1, 2, 3])
    assert view.loads(5, 6, keep=[0, 1, 2, 3]) == [(5, 0, 0), (6, 1, 0)]
    pinned = View(2, resident=[0, 1], pinned=[1])
    assert pinned.loads(5, 6, keep=[0, 1]) == [(5, 0, 0), (6, 5, 1)]
    with pytest.raises(PlanError, match="no slot"):
        View(1, resident=[0], pinned=[0]).plan(5, keep=[0])


def test_a_pinned_copy_in_flight_stays() -> None:
    """Guards the second search for victims: it took copies that a forward waits for."""
    assert View(3, loading=[1, 2, 3], pinned=[1]).loads(5) == [(5, 2, 0)]
    with pytest.raises(PlanError, match="expert 5: the pool has 2"):
        View(2, loading=[1, 2], pinned=[1, 2]).plan(5)


@st.composite
def views(draw: st.DrawFn) -> tuple[View, list[int], list[int]]:
    slots = draw(st.integers(1, 6))
    keys = draw(st.permutations(range(KEYS)))
    resident = draw(st.integers(0, slots))
    loading = draw(st.integers(0, slots - resident))
    held = keys[:resident]
    needed = draw(st.lists(st.integers(0, KEYS - 1), unique=True, max_size=KEYS))
    pinned = [key for key in held if key not in needed and draw(st.booleans())]
    assume(len(pinned) < slots)  # else there is no plan, rightly
    return View(slots, held, keys[resident : resident + loading], pinned), needed, pinned


@settings(max_examples=100, deadline=None)
@given(views(), st.sets(st.integers(0, KEYS - 1)))
def test_every_plan_can_be_carried_out(case: tuple[View, list[int], list[int]], keep: set[int]) -> None:
    (view, needed, pinned), core = case, case[0].core
    before, waves = core.states.tolist(), core.counts(0).waves
    run, resident, arriving, loads = view.plan(*needed, keep=sorted(keep))
    assert core.states.tolist() == before

    assert sorted(run) == sorted(needed)
    missing = len(needed) - resident - arriving
    assert [before[key] for key in run] == [RESIDENT] * resident + [LOADING] * arriving + [ABSENT] * missing
    assert [key for key, _, _ in loads] == run[resident + arriving :]
    afters = [after for _, _, after in loads]
    assert afters == sorted(afters)

    core.begin()
    assert core.counts(0).waves - waves == 1 + len(set(afters) - {0})
    core.load()
    given: list[int] = []
    while True:
        first, stop = core.next()
        assert core.check() == ""
        if first == stop:
            break
        assert first == len(given)
        given += run[first:stop]
        assert all(core.state(key) == RESIDENT and core.pins[key] for key in run[first:stop])
    assert given == run
    core.close()
    assert [core.pins[key] for key in range(KEYS)] == [key in pinned for key in range(KEYS)]
    assert all(core.state(key) == RESIDENT for key in pinned)
