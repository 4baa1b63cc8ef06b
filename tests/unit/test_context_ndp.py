"""Placement near data and its precision: hot sets, MoNDE's rule, Fiddler's placement and PREFIXSPLIT."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tiermoe.actors.policies.context_ndp import (
    HotSet,
    HotSlots,
    RoutingCounts,
    importance,
    monde_split,
    prefix_split,
    static_hot,
)
from tiermoe.actors.policies.cost import SplitCosts
from tiermoe.actors.policies.sharding import shard_of

E = 4


def counts(*rows: list[int]) -> RoutingCounts:
    """Counts [L, 4] whose routing weights are in proportion, so that S does not depend on alpha."""
    out = RoutingCounts(len(rows), E)
    out.P[:] = rows
    out.W[:] = np.asarray(rows) / 2
    return out


def hot_set(layers: int, per_layer: int, alpha: float = 0.5) -> HotSet:
    """On one GPU."""
    return HotSet(HotSlots.fit(np.zeros((layers, E)), [layers * E], per_layer), alpha)


class TestRoutingCounts:
    def test_adds_up_over_calls_and_layers(self) -> None:
        seen = RoutingCounts(2, E)
        seen.add(0, np.array([[0, 1], [1, 3]]), np.array([[0.75, 0.25], [0.5, 0.5]], np.float32))
        seen.add(1, np.array([[2, 0]]), np.array([[1.0, 0.0]]))
        seen.add(0, np.array([[1, 0]]), np.array([[1.0, 0.5]]))
        assert seen.P.tolist() == [[2, 3, 0, 1], [1, 0, 1, 0]]
        assert seen.W.tolist() == [[1.25, 1.75, 0.0, 0.5], [0.0, 0.0, 1.0, 0.0]]
        assert (seen.P.dtype, seen.W.dtype) == (np.int64, np.float64)


class TestImportance:
    def test_the_formula(self) -> None:
        seen = RoutingCounts(1, E)
        seen.P[:] = [[6, 2, 2, 0]]
        seen.W[:] = [[1.0, 1.0, 2.0, 0.0]]
        assert importance(seen, 1.0).tolist() == [[0.6, 0.2, 0.2, 0.0]]
        assert importance(seen, 0.0).tolist() == [[0.25, 0.25, 0.5, 0.0]]
        np.testing.assert_allclose(importance(seen, 0.5), [[0.425, 0.225, 0.35, 0.0]])


class TestHotSet:
    def test_two_sequences_share_by_the_sum(self) -> None:
        hot = hot_set(1, 2)
        hot.admit("a", counts([6, 4, 0, 0]))
        hot.admit("b", counts([0, 0, 9, 1]))  # sums 0.6 0.4 0.9 0.1
        assert hot.hot(0) == {0, 2}
        assert hot.order(0) == [2, 0, 1, 3]

    def test_a_sequence_does_not_mend_what_a_release_left(self) -> None:
        hot = hot_set(1, 2)
        hot.admit("a", counts([50, 50, 0, 0]))
        hot.admit("b", counts([0, 0, 52, 48]))  # sums .5 .5 .52 .48: 2 enters, 1 leaves
        assert hot.hot(0) == {0, 2}
        hot.release("a")  # now {2, 3} would be best
        assert (hot.hot(0), hot.order(0)) == ({0, 2}, [2, 3, 0, 1])
        hot.admit("c", counts([40, 0, 60, 0]))  # its top 2 are hot already
        assert hot.hot(0) == {0, 2}

    def test_each_gpu_ranks_its_own(self) -> None:
        hot = HotSet(HotSlots(np.array([[0, 1, 0, 1]]), np.array([[1, 1]])), 0.5)
        hot.admit("a", counts([5, 1, 4, 2]))  # 0 and 2 are the most important, and both on GPU 0
        assert hot.hot(0) == {0, 3}
        hot.admit("b", counts([0, 0, 8, 1]))  # sums .42 .08 1.22 .28
        assert hot.hot(0) == {2, 3}


class TestPlaces:
    def test_a_number_is_dealt_out_in_turn(self) -> None:
        owner = np.arange(3 * 5).reshape(3, 5) % 2
        assert HotSlots.fit(owner, [9, 9], 3).count.tolist() == [[2, 1], [1, 2], [2, 1]]
        assert HotSlots.fit(owner, [9, 9], 5).count.tolist() == [[3, 2], [2, 3], [3, 2]]
        lopsided = [[0, 0, 0, 1]] * 2
        assert HotSlots.fit(lopsided, [6, 2], 3).count.tolist() == [[2, 1], [2, 1]]  # GPU 1 owns no second one

    def test_what_does_not_fit_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"3 hot experts in 2 layers take 6 slots; the budget holds 5"):
            HotSlots.fit(np.zeros((2, E)), [5], 3)
        with pytest.raises(ValueError, match=r"take 3 slots on GPU 1; the budget holds 2"):
            HotSlots.fit(np.arange(8).reshape(2, E) % 2, [9, 2], 3)
        with pytest.raises(ValueError, match="hot_per_layer is 5; give 0 to 4"):
            HotSlots.fit(np.zeros((2, E)), [99], 5)

    @settings(max_examples=100, deadline=None)
    @given(
        layers=st.integers(1, 5), experts=st.integers(1, 9), gpus=st.integers(1, 4),
        rule=st.sampled_from(["layer-expert", "expert"]), budget=st.integers(0, 50), data=st.data(),
    )  # fmt: skip
    def test_no_gpu_gets_more_than_its_slots(
        self, layers: int, experts: int, gpus: int, rule: Any, budget: int, data: st.DataObject
    ) -> None:
        owner = np.array([[shard_of(a, e, experts, gpus, rule) for e in range(experts)] for a in range(layers)])
        slots = [min(budget, int((owner == gpu).sum())) for gpu in range(gpus)]
        per_layer = data.draw(st.none() | st.integers(0, experts))
        try:
            hot_slots = HotSlots.fit(owner, slots, per_layer)
        except ValueError:
            assert per_layer is not None
            return
        assert (hot_slots.count.sum(axis=0) <= slots).all()
        order = data.draw(st.permutations(range(experts)))
        for layer in range(layers):
            first = hot_slots.first(layer, order)
            assert np.bincount(owner[layer][first], minlength=gpus).tolist() == hot_slots.count[layer].tolist()
            assert per_layer is None or len(first) == per_layer


TABLE = st.lists(st.lists(st.integers(0, 9), min_size=E, max_size=E), min_size=2, max_size=2)
EVENTS = st.lists(st.one_of(st.tuples(st.integers(0, 3), TABLE), st.tuples(st.integers(0, 3), st.none())), max_size=12)


def top(table: NDArray[np.float64], layer: int, hot_slots: int) -> set[int]:
    return set(sorted(range(E), key=lambda e: (-table[layer, e], e))[:hot_slots])


@settings(max_examples=150, deadline=None)
@given(events=EVENTS, hot_slots=st.integers(0, E), alpha=st.sampled_from([0.0, 0.5, 1.0]))
def test_what_every_admission_keeps(
    events: list[tuple[int, list[list[int]] | None]], hot_slots: int, alpha: float
) -> None:
    hot = hot_set(2, hot_slots, alpha)
    active: dict[str, NDArray[np.float64]] = {}
    for number, rows in events:
        name = f"s{number}"
        before = [hot.hot(layer) for layer in range(2)]
        if rows is None:
            if name in active:
                hot.release(name)
                del active[name]
            assert [hot.hot(layer) for layer in range(2)] == before
            continue
        seen = counts(*rows)
        active[name] = importance(seen, alpha)
        hot.admit(name, seen)
        total = np.sum(list(active.values()), axis=0)
        for layer in range(2):
            now, own = hot.hot(layer), top(active[name], layer, hot_slots)
            enters = now - before[layer]
            assert len(now) == hot_slots
            assert len(enters) <= len(own - before[layer])
            assert sum(total[layer, list(now)]) >= sum(total[layer, list(before[layer])]) - 1e-9  # never worse
            if len(active) == 1:
                assert now == own
    assert hot.active == tuple(active)


def test_static_hot() -> None:
    def one_gpu(per_layer: int, layers: int = 1) -> HotSlots:
        return HotSlots.fit(np.zeros((layers, E)), [layers * E], per_layer)

    assert static_hot([[1, 5, 5, 9], [0, 0, 0, 0]], one_gpu(2, 2)) == [{1, 3}, {0, 1}]
    assert static_hot([[1, 2, 3, 4]], one_gpu(0)) == [frozenset()]
    two = HotSlots(np.array([[0, 1, 0, 1]]), np.array([[1, 1]]))
    assert static_hot([[1, 5, 5, 9]], two) == [{2, 3}]
    for popularity in ([1, 2, 3, 4], [[1.0, 2.0, 3.0, float("nan")]], [[1, 2]]):
        with pytest.raises(ValueError, match="popularity"):
            static_hot(popularity, one_gpu(1))


@settings(max_examples=150, deadline=None)
@given(
    experts=st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.integers(0, 9), st.integers(0, 9)), max_size=6),
    load_s=st.integers(0, 9),
    once=st.integers(0, 9),
)
def test_monde_split_is_the_best_of_its_kind(experts: list[tuple[int, bool, int, int]], load_s: int, once: int) -> None:
    rows, resident, gpu_s, ndp_s = (list(column) for column in zip(*experts, strict=True)) if experts else ([],) * 4
    order = sorted(range(len(rows)), key=lambda i: -rows[i])

    def slowest(split: tuple[bool, ...] | list[bool]) -> int:
        gpu = sum(g + (0 if here else load_s) for g, here, on in zip(gpu_s, resident, split, strict=True) if on)
        return max(gpu, sum(n for n, on in zip(ndp_s, split, strict=True) if not on) + (0 if all(split) else once))

    def hot_by_load(split: tuple[bool, ...]) -> bool:
        """On the GPU are the first of the residents and the first of the absent, each by rows."""
        kinds = [[split[i] for i in order if resident[i] == here] for here in (True, False)]
        return all(kind == sorted(kind, reverse=True) for kind in kinds)

    def loads(split: tuple[bool, ...] | list[bool]) -> int:
        return sum(on and not here for on, here in zip(split, resident, strict=True))

    splits = [s for s in product([True, False], repeat=len(rows)) if hot_by_load(s)]
    costs = SplitCosts(tuple(gpu_s), tuple(ndp_s), load_s, once)
    chosen = monde_split(rows, resident, costs)
    assert tuple(chosen) in splits
    assert (slowest(chosen), loads(chosen)) == min((slowest(s), loads(s)) for s in splits)


WIDTHS = (1, 2, 3, 4)
LOSSES = st.lists(st.lists(st.integers(0, 50), min_size=4, max_size=4), min_size=1, max_size=8)


def budget(count: int, average: Fraction, lowest: int = 1) -> int:
    """R, without floats."""
    return math.floor(count * (average - lowest))


def loss(losses: Sequence[Sequence[int]], chosen: Sequence[int], widths: Sequence[int]) -> int:
    return sum(row[widths.index(bits)] for row, bits in zip(losses, chosen, strict=True))


def brute_force(losses: Sequence[Sequence[int]], widths: Sequence[int], increments: int) -> int:
    """The least loss over all assignments that never ascend and spend exactly the budget."""
    count = len(losses)
    return min(
        loss(losses, chosen, widths)
        for chosen in product(reversed(widths), repeat=count)
        if all(a >= b for a, b in pairwise(chosen)) and sum(chosen) == increments + count * widths[0]
    )


_SENSITIVE, _OTHER = [100, 60, 20, 0], [1, 0.9, 0.8, 0.7]


@pytest.mark.parametrize(
    ("losses", "widths", "average", "bits"),
    [
        ([[8, 1, 0.5, 0.4]] * 4, WIDTHS, 2.0, [2, 2, 2, 2]),  # a steep first step spreads the bits
        ([_SENSITIVE, _OTHER, _OTHER, _OTHER], WIDTHS, 2.0, [4, 2, 1, 1]),
        ([_OTHER, _OTHER, _OTHER, _SENSITIVE], WIDTHS, 3.0, [3, 3, 3, 3]),  # the prefix holds all the same
        ([[3, 2, 1, 0]] * 3, WIDTHS, 2.0, [2, 2, 2]),  # ties take the most even
        ([[0, 0, 0, 0]] * 4, WIDTHS, 2.5, [3, 3, 2, 2]),
        ([[4, 2, 1, 0]] * 3, WIDTHS, 4 / 3, [2, 1, 1]),  # a whole budget, in floats a little less
        *(([[9, 5, 5, 0]], WIDTHS, average, [average]) for average in WIDTHS),
        (np.zeros((0, 4)), WIDTHS, 2.0, []),
        ([], WIDTHS, 2.0, []),
        ([[9, 3, 1]] * 2, (2, 3, 4), 3.0, [3, 3]),
        ([[9, 8, 1]] * 2, (2, 3, 4), 3.0, [4, 2]),
        ([[9, 1]] * 3, (3, 4), 3.4, [4, 3, 3]),
        ([[9]] * 3, (4,), 4, [4, 4, 4]),
    ],
)
def test_prefix_split(losses: Any, widths: tuple[int, ...], average: float, bits: list[int]) -> None:
    assert prefix_split(losses, widths, average) == bits


class TestProperties:
    @settings(max_examples=120, deadline=None)
    @given(losses=LOSSES, average=st.fractions(1, 4, max_denominator=12))
    def test_equal_to_brute_force(self, losses: list[list[int]], average: Fraction) -> None:
        chosen = prefix_split(losses, WIDTHS, float(average))
        increments = budget(len(losses), average)
        assert len(chosen) == len(losses)
        assert sum(chosen) == increments + len(losses)
        assert chosen == sorted(chosen, reverse=True)
        assert loss(losses, chosen, WIDTHS) == brute_force(losses, WIDTHS, increments)

    @settings(max_examples=60, deadline=None)
    @given(losses=LOSSES, average=st.fractions(2, 4, max_denominator=12), top=st.sampled_from([3, 4]))
    def test_other_widths_equal_brute_force(self, losses: list[list[int]], average: Fraction, top: int) -> None:
        widths = tuple(range(2, top + 1))
        average = min(average, Fraction(top))
        rows = [row[: len(widths)] for row in losses]
        chosen = prefix_split(rows, widths, float(average))
        assert loss(rows, chosen, widths) == brute_force(rows, widths, budget(len(rows), average, 2))


@pytest.mark.parametrize(
    ("losses", "widths", "average", "message"),
    [
        ([[1, 1, 1, 1]], WIDTHS, 0.9, "average width is 0.9; give 1 to 4 bits"),
        ([[1, 1, 1, 1]], WIDTHS, 4.1, "average width is 4.1"),
        ([[1, 1, 1, 1]], WIDTHS, math.nan, "average width is nan"),
        ([], WIDTHS, 5, "average width is 5"),
        ([[1, 1]], (2, 4), 3, "follow each other"),
        ([[1, 1]], (3, 2), 3, "follow each other"),
        ([[1]], (), 3, "follow each other"),
        ([[1] * 5], (1, 2, 3, 4, 5), 3, "follow each other"),
        ([[1, 1]], WIDTHS, 2, r"\[1, 4\], not \[1, 2\]"),
        ([1, 1, 1, 1], WIDTHS, 2, r"not \[4\]"),
        ([[1, math.inf, 1, 1]], WIDTHS, 2, "finite"),
    ],
)
def test_refusals(losses: object, widths: tuple[int, ...], average: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prefix_split(losses, widths, average)  # type: ignore[arg-type]
