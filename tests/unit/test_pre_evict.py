"""ActiveEvict: the reference against the equations' direct transcription, and native code against the reference."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest
from activeevict_reference import (
    BudgetDrops,
    Hotness,
    ImportanceState,
    NativeState,
    PreEviction,
    kept_pairs,
    predicted_distribution,
    routing_widths,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tiermoe.actors.policies import activeevict
from tiermoe.actors.policies.activeevict import BudgetAwareTopK, ImportanceEviction
from tiermoe.actors.policies.routing import RerouteView

E, K = 8, 3
SEEDS = st.integers(0, 2**32 - 1)


def anything(key: int) -> bool:
    return True


def picks(rng: np.random.Generator, tokens: int, experts: int = E, top_k: int = K) -> NDArray[np.int64]:
    return np.array([rng.permutation(experts)[:top_k] for _ in range(tokens)], np.int64).reshape(tokens, top_k)


def usage(history: NDArray[np.int64], gamma: float, window: int) -> NDArray[np.float64]:
    """Equation 8, term by term."""
    last = history[-window:]
    u = np.zeros(E)
    for e in range(E):
        for t, row in enumerate(last, start=1):
            u[e] += gamma ** (len(last) - t) * (e in row)
    return u


class TestHotness:
    @settings(max_examples=60, deadline=None)
    @given(
        seed=SEEDS,
        gamma=st.sampled_from([0.3, 0.9, 1.0]),
        window=st.integers(1, 12),
        batches=st.lists(st.integers(0, 15), max_size=12),
    )
    def test_is_equation_8(self, seed: int, gamma: float, window: int, batches: list[int]) -> None:
        rng, hotness = np.random.default_rng(seed), Hotness(2, E, gamma, window)
        history = np.empty((0, K), np.int64)
        for tokens in batches:
            ids = picks(rng, tokens)
            hotness.saw(1, ids)
            history = np.concatenate([history, ids])
            np.testing.assert_allclose(hotness.values[1], usage(history, gamma, window), atol=1e-12)
        assert not hotness.values[0].any()


@settings(max_examples=60, deadline=None)
@given(
    seed=SEEDS, gamma=st.sampled_from([0.3, 0.97, 1.0]), window=st.integers(1, 9),
    alpha=st.sampled_from([0.0, 0.5, 1.0]),
    batches=st.lists(st.integers(1, 12), min_size=1, max_size=8), tau=st.sampled_from([0.0, 0.02, 1.0]),
    most=st.integers(0, 2 * E),
)  # fmt: skip
def test_the_native_state_is_the_reference(
    seed: int, gamma: float, window: int, alpha: float, batches: list[int], tau: float, most: int
) -> None:
    rng, sizes = np.random.default_rng(seed), (2, E, alpha, gamma, window, K)
    ours, theirs = ImportanceState(*sizes), NativeState(activeevict.ImportanceState(*sizes))
    for tokens in batches:
        layer, ids, held = int(rng.integers(2)), picks(rng, tokens), rng.random(E) < 0.5
        logits = np.round(rng.normal(0, 2, (tokens, E)), 1).astype(np.float32)  # rounded: some are equal
        targets = []
        for state in (ours, theirs):
            state.saw(layer, ids)
            targets.append(state.target(layer, logits, held, tau, most))
        np.testing.assert_allclose(theirs.values, ours.values, rtol=1e-12)
        np.testing.assert_allclose(theirs.predicted, ours.predicted, rtol=1e-12)
        assert targets[0] == targets[1]
        theirs.values[:], theirs.predicted[:] = ours.values, ours.predicted


@settings(max_examples=300, deadline=None)
@given(
    seed=SEEDS, tokens=st.integers(1, 6), top_k=st.integers(1, E), vacant=st.integers(0, E), ties=st.booleans(),
    min_top_k=st.integers(1, E + 1), renormalise=st.booleans(),
)  # fmt: skip
def test_the_native_drops_are_the_reference(
    seed: int, tokens: int, top_k: int, vacant: int, ties: bool, min_top_k: int, renormalise: bool
) -> None:
    rng = np.random.default_rng(seed)
    ids, resident = picks(rng, tokens, E, top_k), rng.random(E) < rng.random()
    weights = rng.dirichlet(np.ones(top_k), tokens).astype(np.float32)
    if ties:
        weights = np.round(weights * 4).astype(np.float32) / 4
    reference, rule, view = BudgetDrops(), BudgetAwareTopK(renormalise, min_top_k), RerouteView(resident, 0, K, vacant)
    assert reference.fits(ids, resident, vacant) == rule.keeps(ids, view)
    found = rule.reroute(0, ids, weights, None, view)
    expected = reference.drop(ids, weights, resident, vacant, min_top_k, renormalise)
    for mine, native in zip(expected, (found.ids, found.weights, found.dropped), strict=True):
        np.testing.assert_array_equal(mine, native)


def filled(keys: Iterable[int], layers: int, experts: int, alpha: float = 0.5) -> ImportanceEviction:
    policy = ImportanceEviction(layers, experts, alpha)
    for key in keys:
        policy.admitted(key)
    return policy


class TestImportance:
    @settings(max_examples=60, deadline=None)
    @given(seed=SEEDS, alpha=st.sampled_from([0.0, 0.25, 0.5, 1.0]), held=st.sets(st.integers(0, 2 * E - 1)))
    def test_victims_ascend_by_equations_9_and_13(self, seed: int, alpha: float, held: set[int]) -> None:
        rng, policy = np.random.default_rng(seed), ImportanceEviction(2, E, alpha, 0.8, 6, K)
        for key in sorted(held):
            policy.admitted(key)
        scores = np.zeros(2 * E)
        for layer in range(2):
            ids, predicted = picks(rng, 9), rng.dirichlet(np.ones(E))
            state = NativeState(policy.state)
            state.saw(layer, ids)
            state.target(layer, np.log(predicted)[None], np.zeros(E, np.bool_), 0.0, 0)
            u = usage(ids, 0.8, 6)
            residents = [e for e in range(E) if layer * E + e in held]
            total = sum(u[e] for e in residents)
            for e in residents:
                h = u[e] / total if total else 0.0
                scores[layer * E + e] = alpha * h + (1 - alpha) * predicted[e]
        victims = policy.victims(2 * E, anything)
        assert set(victims) == held
        assert all(scores[a] <= scores[b] + 1e-6 for a, b in pairwise(victims))

    def test_nothing_used_and_nothing_predicted_goes_least_recent_first(self) -> None:
        policy = filled((5, 3, 1), 1, E)
        policy.used([5])
        assert policy.victims(2, anything) == [3, 1]
        assert policy.victims(3, lambda key: key != 1) == [3, 5]


def test_prediction_is_equations_10_to_12() -> None:
    logits = np.random.default_rng(3).normal(0, 4, (5, E)).astype(np.float32)
    wanted = np.zeros(E)
    for row in logits.astype(np.float64):
        wanted += np.exp(row) / np.exp(row).sum()
    np.testing.assert_allclose(predicted_distribution(logits), wanted / 5, atol=1e-12)
    assert predicted_distribution(np.full((1, E), 1e4, np.float32)).tolist() == pytest.approx([1 / E] * E)


def direct_target(p: NDArray[np.float64], held: NDArray[np.bool_], k: int, tau: float, r_max: int) -> tuple[int, int]:
    """Equations 14 to 16, term by term; p_(j) is `order[j - 1]`'s."""
    order = sorted(range(len(p)), key=lambda e: (-p[e], e))
    here = sum(bool(held[e]) for e in order[:k])
    r = 0
    for j in range(r_max):
        if k + j + 1 <= len(p) and p[order[k + j - 1]] - p[order[k + j]] < tau:
            r += 1
    return k - here, r


class TestTarget:
    @settings(max_examples=100, deadline=None)
    @given(
        seed=SEEDS, k=st.integers(1, E), tau=st.sampled_from([0.0, 0.01, 0.1, 1.0]), most=st.integers(0, 2 * E),
        ties=st.booleans(),
    )  # fmt: skip
    def test_is_equations_14_to_17(self, seed: int, k: int, tau: float, most: int, ties: bool) -> None:
        rng = np.random.default_rng(seed)
        p = np.full(E, 1 / E) if ties else rng.dirichlet(np.ones(E))
        held = rng.random(E) < 0.5
        target = PreEviction(k, tau, most).target_for(k, p, held)
        assert (target.gap, target.redundancy) == direct_target(p, held, k, tau, most)
        assert target.slots == target.gap + target.redundancy
        assert 0 <= target.gap <= k
        assert 0 <= target.redundancy <= most

    def test_a_batch_counts_the_experts_that_its_tokens_pick(self) -> None:
        logits = np.array([[9, 8, 0, 0, 0.0], [9, 0, 8, 0, 0.0]])
        target = PreEviction(2, 0.0, 2).target(logits, predicted_distribution(logits), np.array([1, 0, 0, 0, 0], bool))
        assert (target.width, target.gap, target.redundancy) == (3, 2, 0)


def direct_width(row: list[int], resident: NDArray[np.bool_], available: int, k_min: int) -> int:
    """Equations 19 and 20 for experts in falling order of weight."""

    def u(k: int) -> int:
        return len({e for e in row[:k] if not resident[e]})

    room = max(available, u(k_min))
    return max(k for k in range(k_min, len(row) + 1) if u(k) <= room)


class TestWidths:
    @settings(max_examples=100, deadline=None)
    @given(seed=SEEDS, available=st.integers(0, E), k_min=st.integers(1, 4), ties=st.booleans())
    def test_of_one_token_is_equation_20(self, seed: int, available: int, k_min: int, ties: bool) -> None:
        rng = np.random.default_rng(seed)
        ids, resident = picks(rng, 1, E, 4), rng.random(E) < 0.5
        weights = np.full((1, 4), 0.25) if ties else rng.random((1, 4))
        row = [int(ids[0, i]) for i in sorted(range(4), key=lambda i: (-weights[0, i], i))]
        widths = routing_widths(ids, weights, resident, available, k_min)
        assert widths.tolist() == [direct_width(row, resident, available, k_min)]
        kept = ids[kept_pairs(weights, widths)]
        assert set(kept.tolist()) == set(row[: widths[0]])

    @settings(max_examples=100, deadline=None)
    @given(seed=SEEDS, tokens=st.integers(1, 9), available=st.integers(0, E))
    def test_of_a_batch_the_union_fits(self, seed: int, tokens: int, available: int) -> None:
        rng = np.random.default_rng(seed)
        ids, resident, weights = picks(rng, tokens, E, 4), rng.random(E) < 0.4, rng.random((tokens, 4))
        widths = routing_widths(ids, weights, resident, available)
        kept = kept_pairs(weights, widths)
        assert ((widths >= 1) & (widths <= 4)).all()
        assert kept.sum(axis=1).tolist() == widths.tolist()
        first = ids[np.arange(tokens), weights.argmax(axis=1)]
        forced = {int(e) for e in first if not resident[e]}
        missing = {int(e) for e in ids[kept] if not resident[e]}
        assert len(missing) <= max(available, len(forced))
        wider = routing_widths(ids, weights, resident, available + 1)
        assert (wider >= widths).all()
        assert (routing_widths(ids, weights, resident, E) == 4).all()

    def test_first_choices_come_before_second_ones(self) -> None:
        ids, weights = np.array([[0, 1], [2, 3]]), np.array([[0.9, 0.8], [0.7, 0.1]])
        resident = np.zeros(4, bool)
        assert routing_widths(ids, weights, resident, 2).tolist() == [1, 1]
        assert routing_widths(ids, weights, resident, 3).tolist() == [2, 1]
        assert routing_widths(ids, weights, resident, 4).tolist() == [2, 2]

    def test_what_another_token_loads_is_free(self) -> None:
        ids, weights = np.array([[0, 1], [1, 0]]), np.array([[0.9, 0.1], [0.6, 0.4]])
        assert routing_widths(ids, weights, np.zeros(4, bool), 0).tolist() == [2, 2]
        assert routing_widths(np.empty((0, 2), int), np.empty((0, 2)), np.zeros(4, bool), 0).tolist() == []
