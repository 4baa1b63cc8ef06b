"""Which misses are loaded in low precision: HOBBIT's scores transcribed, the rule on hand-made cases, guesses."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from cache_rigs import with_replicas
from hypothesis import given
from hypothesis import strategies as st

from tiermoe.actors.policies.hobbit import LowBitOptions, MixedGatePrefetch, MixedPlan, MixedPrecision, unimportance
from tiermoe.actors.policies.prefetch import LayerSeen, Span, Wanted
from tiermoe.actors.policies.registry import PolicyContext, options
from tiermoe.actors.slot_budget import mixed_slots
from tiermoe.cluster.config import load_policy
from tiermoe.errors import BudgetError

RULE = MixedPrecision(0.6, 0.9, renormalise=True)


def transcribed(weights: list[float]) -> list[float]:
    """Section 3.2, literally: experts in the order of falling weight, s_i the sum of those before, normalised."""
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    total, scores, before = sum(weights), [0.0] * len(weights), 0.0
    for i in order:
        scores[i] = before / total if total else 0.0
        before += weights[i]
    return scores


@given(st.lists(st.lists(st.floats(0, 1, width=32), min_size=3, max_size=3), min_size=1, max_size=5))
def test_scores(rows: list[list[float]]) -> None:
    found = unimportance(np.array(rows, np.float32))
    np.testing.assert_allclose(found, [transcribed(row) for row in rows], rtol=1e-12, atol=1e-12)
    assert (found.min(axis=1) == 0).all()


def decide(
    weights: list[list[float]],
    ids: list[list[int]],
    full: set[int],
    packed: set[int] = frozenset(),  # type: ignore[assignment]
) -> MixedPlan:
    plan = RULE.decide(np.array(ids), np.array(weights, np.float32), lambda e: e in full, lambda e: e in packed)
    assert plan.low <= set(plan.ids.ravel().tolist())
    return plan


def test_one_token() -> None:
    # scores 0, 0.5, 0.75, 0.95
    weights, ids = [[0.2, 0.5, 0.05, 0.25]], [[7, 3, 9, 4]]
    plan = decide(weights, ids, full=set())
    assert plan.low == {7}  # 0.75; 3 and 4 are loaded in full
    assert plan.dropped == 1  # 9
    assert plan.ids.tolist() == [[7, 3, 3, 4]]
    np.testing.assert_allclose(plan.weights, [[0.2 / 0.95, 0.5 / 0.95, 0, 0.25 / 0.95]], rtol=1e-6)
    here = decide(weights, ids, full={7, 9})
    assert (here.low, here.dropped, here.ids.tolist()) == (frozenset(), 0, ids)  # what is there in full runs in full
    there = decide(weights, ids, full=set(), packed={3, 9})
    assert (there.low, there.dropped) == ({7, 9}, 0)  # 9 costs nothing; 3 is too important for its replica


def test_the_row_to_which_an_expert_matters_most_decides() -> None:
    # expert 5: 0.8 in the first row, 0.5 in the second; expert 6: 0.9 and 0.95
    weights, ids = [[0.8, 0.1, 0.1], [0.5, 0.45, 0.05]], [[1, 5, 6], [2, 5, 6]]
    plan = decide(weights, ids, full={1, 2})
    assert (plan.low, plan.dropped) == ({6}, 0)
    assert decide(weights, ids, full={1, 2, 6}).low == set()


def test_a_token_keeps_its_first_expert() -> None:
    """Also where its weights are all 0, or where nothing is at hand and the thresholds are at their strictest."""
    strict = MixedPrecision(0.0, 0.0, renormalise=False)
    plan = strict.decide(np.array([[1, 2]]), np.array([[0.4, 0.6]], np.float32), lambda e: False, lambda e: False)
    assert (plan.ids.tolist(), plan.dropped) == ([[2, 2]], 1)
    zeros = strict.decide(np.array([[1, 2]]), np.zeros((1, 2), np.float32), lambda e: False, lambda e: False)
    assert zeros.dropped == 0
    with pytest.raises(ValueError, match="T1 <= T2"):
        MixedPrecision(0.7, 0.6, renormalise=False)


@given(st.integers(0, 10_000))
def test_higher_thresholds_never_load_less(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(12)[:4] for _ in range(3)])
    weights = rng.dirichlet(np.ones(4), 3).astype(np.float32)
    full, packed = (set(rng.permutation(12)[:3].tolist()) for _ in range(2))
    previous: tuple[int, int] | None = None
    for t1, t2 in ((0.0, 0.0), (0.0, 0.5), (0.3, 0.5), (0.6, 0.9), (1.0, 1.0)):
        plan = MixedPrecision(t1, t2, False).decide(ids, weights, full.__contains__, packed.__contains__)
        asked = set(plan.ids[plan.weights > 0].tolist())
        in_full = len(asked - plan.low)
        assert not plan.low & full
        if previous is not None:
            assert in_full >= previous[0]
            assert plan.dropped <= previous[1]
        previous = in_full, plan.dropped
    assert previous is not None
    assert previous[1] == 0


def test_guesses_have_a_precision() -> None:
    """Two layers ahead; probabilities 0.5, 0.3, 0.15, 0.05 of layer 1 give scores 0, 0.53, 0.84 for a top of 3."""
    scores = {1: np.array([[0.15, 0.5, 0.05, 0.3]]), 2: np.array([[0.7, 0.1, 0.15, 0.05]])}
    policy = LowBitOptions(t1=0.6, t2=0.8).make_prefetch(
        options("prefetch", {"kind": "next-gate", "distance": 2}), PolicyContext(3, 4, 3)
    )
    assert isinstance(policy, MixedGatePrefetch)
    seen = LayerSeen(0, [Span("a", 0, 1, True)], np.array([[0]]), None, scores.get)
    # layer 1: 1 and 3 in full, 0 not at all; layer 2 (0, 0.74, 0.89): 0 in full, 2 as the replica 12 + 10, 1 not at all
    assert policy.observed(seen) == [Wanted(5, 0.0), Wanted(7, -1.0), Wanted(8, -2.0), Wanted(22, -3.0)]
    assert policy.predicted is scores[1]
    several = {1: np.concatenate([scores[1], scores[1][:, ::-1]])}  # in the second row expert 0 is the second best
    found = policy.observed(seen._replace(lookahead=several.get, layer=0))
    assert {want.key for want in found} == {4, 5, 6, 7}


def test_each_width_has_its_order_of_eviction() -> None:
    policy = with_replicas(1, 10, "lfu")
    for key in (1, 2, 11, 12):
        policy.admitted(key)
    policy.used([1, 1, 12, 11, 2])
    assert policy.victims(3, lambda key: True) == [2, 1, 12]
    policy.removed(12)
    assert policy.victims(9, lambda key: True) == [2, 1, 11]


@given(st.integers(1, 10**7), st.integers(1, 5000), st.floats(0.01, 0.99))
def test_both_kinds_of_slots_fit_the_budget(held: int, replica: int, share: float) -> None:
    slot = replica * 4
    if held * share < replica * 1.01 or held * (1 - share) < slot * 1.01:
        with contextlib.suppress(BudgetError):
            mixed_slots(held, slot, replica, share, 64)
        return
    full, low = mixed_slots(held, slot, replica, share, 64)
    assert full * slot + low * replica <= held
    assert 1 <= full <= 64
    assert 1 <= low <= 64
    assert low == 64 or low * replica > held * share - replica - 1


def test_presets_and_settings() -> None:
    found = load_policy("hobbit")
    assert not found.lossless
    assert found.on_miss.kind == "low-bit"
    assert found.low_bit == LowBitOptions(bits=4, t1=0.6, t2=0.9)
    assert found.replica_widths == (4,)
    assert isinstance(found.make_prefetch(PolicyContext(3, 4, 3)), MixedGatePrefetch)
    assert not isinstance(load_policy("next-gate").make_prefetch(PolicyContext(3, 4, 3)), MixedGatePrefetch)
    with pytest.raises(ValueError, match=r"t1 0\.9 is above"):
        LowBitOptions(t1=0.9, t2=0.5)
