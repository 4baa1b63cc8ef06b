"""Buddy lists: each equation of BuddyMoE against a direct transcription, and what it leaves open."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from tiermoe.actors.policies.buddymoe.buddies import (
    BINS,
    TEMPERATURES,
    BuddyOptions,
    Coactivations,
    ExpertProfile,
    Outputs,
    OutputsMissing,
    RoutingCounts,
    activating_entropy,
    alpha_schedule,
    blended_shares,
    buddy_sizes,
    buddy_table,
    coactivation_shares,
    entropy_counts,
    entropy_threshold,
    output_shares,
)

E, K = 7, 3


def _routing(tokens: int, seed: int, experts: int = E, top: int = K) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(tokens, experts)) * 2
    ids = np.argsort(-logits, axis=1)[:, :top]
    picked = np.exp(np.take_along_axis(logits, ids, axis=1))
    return ids, picked / picked.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("top", [1, 2, 3])
def test_counts_are_those_of_the_definition(top: int) -> None:
    ids, shares = _routing(40, 1, top=top)
    weight = np.linspace(0, 2, 40)
    counts = Coactivations(E)
    counts.add(ids[:15], shares[:15], weight[:15])
    counts.add(ids[15:], shares[15:], weight[15:])
    for i in range(E):
        mine = [t for t in range(40) if i in ids[t]]
        assert counts.activations[i] == pytest.approx(sum(weight[t] for t in mine))
        for j in range(E):
            both = [t for t in mine if j in ids[t] and i != j]
            assert counts.binary[i, j] == pytest.approx(sum(weight[t] for t in both))
            least = [min(shares[t][list(ids[t]).index(i)], shares[t][list(ids[t]).index(j)]) for t in both]
            expected = sum(weight[t] * share for t, share in zip(both, least, strict=True))
            assert counts.weighted[i, j] == pytest.approx(expected)


@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_equation_4(epsilon: float) -> None:
    counts = Coactivations(E)
    counts.add(*_routing(200, 2))
    q = coactivation_shares(counts.binary, counts.activations, epsilon)
    for i in range(E):
        total = sum(counts.binary[i, j] + epsilon for j in range(E) if j != i)
        expected = [0.0 if i == j else (counts.binary[i, j] + epsilon) / total for j in range(E)]
        assert q[i] == pytest.approx(expected)


def _transcribed(q: Sequence[float], alpha: float, most: int) -> list[int]:
    """Equations 5 and 6 for one pivot: sort, take the minimal prefix, cap."""
    order = sorted(range(len(q)), key=lambda j: -q[j])  # stable: the lower number first
    for t in range(1, len(q) + 1):
        if math.fsum(q[j] for j in order[:t]) >= alpha - 1e-12:
            break
    return order[: min(t, most, len(q) - 1)]


@examples(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000), alpha=st.sampled_from([0.1, 0.5, 0.75, 0.95, 1.0]), most=st.integers(1, 9),
    epsilon=st.sampled_from([0.0, 1.0]),
)  # fmt: skip
def test_equations_5_and_6(seed: int, alpha: float, most: int, epsilon: float) -> None:
    counts = Coactivations(E)
    counts.add(*_routing(30, seed))
    q = coactivation_shares(counts.binary, counts.activations, epsilon)
    table = buddy_table(q[None], (alpha,), most)
    for i in range(E):
        expected = _transcribed(q[i].tolist(), alpha, most) if counts.activations[i] else []
        assert table.ids[0, i, : table.sizes[0, i]].tolist() == expected
        assert table.q[0, i, : len(expected)] == pytest.approx(q[i, expected])
        assert (table.ids[0, i, len(expected) :] == i).all()
        assert not table.q[0, i, len(expected) :].any()
        assert bool(counts.activations[i]) == bool(expected)  # t_i >= 1 for any i with nonzero activity


def test_rounding_does_not_lengthen_a_list_of_alpha_1() -> None:
    ranked = np.array([[0.1] * 10 + [0.0] * 3])  # ten times 0.1 is less than 1
    assert buddy_sizes(ranked, 1.0, 99).tolist() == [10]


def test_each_layer_has_its_alpha() -> None:
    q = np.array([[[0, 0.6, 0.4], [0.5, 0, 0.5], [0.9, 0.1, 0]]] * 2)
    assert buddy_table(q, (0.5, 1.0), 16).sizes.tolist() == [[1, 1, 1], [2, 2, 2]]
    assert alpha_schedule(0.99, 0.75, 4) == pytest.approx((0.99, 0.91, 0.83, 0.75))
    assert BuddyOptions(alpha=0.9).alphas(2) == (0.9, 0.9)
    with pytest.raises(ValueError, match="2 alphas for 3 layers"):
        BuddyOptions(alpha=(0.9, 0.8)).alphas(3)


@pytest.mark.parametrize(
    "wrong",
    [{"alpha": 0.0}, {"alpha": 1.1}, {"alpha": ()}, {"max_buddies": 0}, {"epsilon": -1.0}, {"epsilon": math.nan},
     {"mix": 2.0}, {"by": "other"}],
)  # fmt: skip
def test_options_out_of_range(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        BuddyOptions(**wrong)  # type: ignore[arg-type]


def test_output_shares_and_blends() -> None:
    similarity = np.array([[1.0, 0.3, -0.2, 0.1], [0.0, 1, -1, 0], [0.5, 0.5, 1, 0], [0, 0, 0, 1]])
    q = output_shares(similarity)
    assert q == pytest.approx(np.array([[0, 0.75, 0, 0.25], [0] * 4, [0.5, 0.5, 0, 0], [0] * 4]))
    other = np.array([[0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 1], [0] * 4], float)
    mixed = blended_shares(other, q, 0.25)
    assert mixed[0] == pytest.approx([0, 0.5625, 0.25, 0.1875])
    assert mixed[1] == pytest.approx([0, 0, 0, 1])  # no output: co-activation alone
    assert not mixed[3].any()


def _profile(outputs: bool = True) -> ExpertProfile:
    routing = RoutingCounts(E)
    ids, shares = _routing(100, 3)
    routing.add(ids, shares, np.ones(100))
    y = np.random.default_rng(4).normal(size=(100, E, 5))
    dots, norms = np.zeros((E, E)), np.zeros((E, E))
    for t in range(100):
        for i, share in zip(ids[t], shares[t], strict=True):
            dots[i] += share**2 * y[t] @ y[t, i]
            norms[i] += share**2 * (y[t] ** 2).sum(1)
    pairs = routing.pairs
    return ExpertProfile(
        pairs.activations[None], pairs.binary[None], pairs.weighted[None], routing.entropies[None],
        Outputs(dots[None], norms[None]) if outputs else None,
    )  # fmt: skip


def test_similarity_of_outputs() -> None:
    outputs = _profile().outputs
    assert outputs is not None
    cosine, error = outputs.cosine()[0], outputs.error()[0]
    assert np.diagonal(cosine) == pytest.approx(np.ones(E))
    assert np.diagonal(error) == pytest.approx(np.zeros(E))
    own = np.diagonal(outputs.norms[0])
    for i in range(E):
        for j in range(E):
            assert abs(cosine[i, j]) <= 1
            assert error[i, j] == pytest.approx(
                (own[i] - 2 * outputs.dots[0, i, j] + outputs.norms[0, i, j]) / own[i], abs=1e-9
            )


def test_rankings() -> None:
    profile = _profile()
    for by in ("coactivation", "output", "blend"):
        q = profile.shares(BuddyOptions(by=by))
        assert q.sum(-1) == pytest.approx(np.ones((1, E)))
        assert not np.diagonal(q, axis1=1, axis2=2).any()
    weighted = profile.shares(BuddyOptions(weighted=True, epsilon=0.0))
    assert weighted == pytest.approx(coactivation_shares(profile.weighted, profile.activations, 0.0))
    best = profile.buddies(BuddyOptions(by="output", max_buddies=1)).ids[0, :, 0]
    assert profile.outputs is not None
    cosine = np.where(np.eye(E, dtype=bool), -2, profile.outputs.cosine()[0])
    assert best.tolist() == cosine.argmax(1).tolist()


def test_without_outputs_only_coactivation() -> None:
    profile = _profile(outputs=False)
    assert profile.buddies(BuddyOptions()).sizes.min() >= 1
    for by in ("output", "blend"):
        with pytest.raises(OutputsMissing, match=by):
            profile.buddies(BuddyOptions(by=by))


@pytest.mark.parametrize("temperature", [0.8, 1.0, 1.2])
def test_equation_1(temperature: float) -> None:
    logits = np.random.default_rng(5).normal(size=(30, K)) * 3
    soft = np.exp(logits / temperature) / np.exp(logits / temperature).sum(1, keepdims=True)
    expected = [-sum(p * math.log(p) for p in row) / math.log(K) for row in soft]
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert activating_entropy(shares, temperature) == pytest.approx(expected)


@pytest.mark.parametrize("percentile", [0, 10, 15, 50, 100])
def test_tau_is_a_percentile(percentile: float) -> None:
    _, shares = _routing(2000, 6)
    counts = entropy_counts(shares, np.ones(2000))
    for temperature in TEMPERATURES:
        tau = entropy_threshold(counts, percentile, temperature)
        found = activating_entropy(shares, temperature)
        expected = np.percentile(found, percentile, method="inverted_cdf") if percentile else 0.0
        assert tau == pytest.approx(expected, abs=1.5 / BINS)
        assert (found <= tau).mean() >= percentile / 100 - 1e-3
    assert entropy_threshold(counts, 50, 0.95) == pytest.approx(
        (entropy_threshold(counts, 50, 0.9) + entropy_threshold(counts, 50, 1.0)) / 2
    )
