"""Gates, score and rule of buddy substitution on hand-made cases, and against direct transcriptions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from buddymoe_reference import Beta, exp, log, margin, missing_shares, permitted, replaceable, token_entropy
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermoe.actors.engine.make_policies import make_rerouting
from tiermoe.actors.policies.buddymoe import MissRule, RandomRule, no_buddies
from tiermoe.actors.policies.buddymoe.buddies import BINS, TEMPERATURES, ExpertProfile, activating_entropy
from tiermoe.actors.policies.buddymoe.substitution import AdaptiveBeta, Buddies, SubstitutionOptions
from tiermoe.actors.policies.routing import Rerouted, RerouteView
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.store.artifacts import PolicyArtifacts

E = 8
PLAIN = SubstitutionOptions()


def lists(**of: list[int]) -> Buddies:
    """`e3=[5, 6]`: the buddies of expert 3, with similarities 0.5, 0.25, ..."""
    ids = np.tile(np.arange(E, dtype=np.int32)[:, None], (1, 4))
    similarity = np.zeros((E, 4), np.float32)
    for name, buddies in of.items():
        expert = int(name[1:])
        ids[expert, : len(buddies)] = buddies
        similarity[expert, : len(buddies)] = 0.5 ** np.arange(1, len(buddies) + 1)
    return Buddies(ids, similarity)


def run(
    ids: list[int],
    here: set[int],
    buddies: Buddies,
    options: SubstitutionOptions = PLAIN,
    weights: list[float] | None = None,
    probabilities: list[float] | None = None,
    tau: float | None = None,
    hop: list[int] | None = None,
) -> Rerouted:
    """One token. hop: of each expert; its shard."""
    view = RerouteView(np.isin(np.arange(E), list(here)), 0, len(ids))
    if hop is not None:
        view = view._replace(shard_of=np.array(hop), filling=np.zeros(2, np.bool_))
    w = np.array([weights or [1 / len(ids)] * len(ids)], np.float32)
    p = None if probabilities is None else np.array([probabilities], np.float32)
    rule = MissRule([buddies], options, taus=None if tau is None else [tau])
    return rule.reroute(0, np.array([ids]), w, p, view)


@settings(max_examples=200, deadline=None)
@given(st.floats(1e-38, 1e38), st.floats(-690, 0))
def test_log_and_exp(positive: float, negative: float) -> None:
    assert math.isclose(float(log(np.array([positive]))[0]), math.log(positive), rel_tol=1e-12, abs_tol=1e-12)
    assert math.isclose(float(exp(np.array([negative]))[0]), math.exp(negative), rel_tol=1e-11)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 8), st.sampled_from([0.8, 1.0, 1.2]))
def test_entropy_is_equation_1(seed: int, top_k: int, temperature: float) -> None:
    weights = np.random.default_rng(seed).dirichlet(np.ones(top_k), 5).astype(np.float32) * np.float32(2.5)
    got = token_entropy(weights, temperature)
    z = np.log(np.maximum(weights.astype(np.float64), 1e-300)) / temperature
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    expected = -(p * np.log(np.maximum(p, 1e-300))).sum(axis=1) / math.log(top_k) if top_k > 1 else np.zeros(5)
    np.testing.assert_allclose(got, expected, atol=1e-9)
    shares = weights / weights.sum(axis=1, keepdims=True, dtype=np.float64)
    np.testing.assert_allclose(got, activating_entropy(shares, temperature), atol=1e-7)  # what tau is calibrated with
    if top_k > 1:
        ordered = np.sort(p, axis=1)
        np.testing.assert_allclose(margin(weights, temperature), ordered[:, -1] - ordered[:, -2], atol=1e-9)


def test_entropy_and_margin_gates() -> None:
    even, peaky = [0.25, 0.25, 0.25, 0.25], [0.97, 0.01, 0.01, 0.01]
    weights = np.array([even, peaky, [0.0, 0.0, 0.0, 0.0]], np.float32)
    assert token_entropy(weights)[0] == pytest.approx(1.0)
    assert token_entropy(weights)[2] == 0
    assert permitted(weights, None, None).tolist() == [True, True, True]
    assert permitted(weights, 0.5, None).tolist() == [True, False, False]
    assert permitted(weights, None, 0.9).tolist() == [True, False, True]
    exact = float(token_entropy(weights)[1])
    assert not permitted(weights, exact, None)[1]  # TAE <= tau forbids
    assert permitted(weights, math.nextafter(exact, 0), None)[1]
    single = np.ones((1, 1), np.float32)
    assert not permitted(single, 0.0, None)[0]
    assert permitted(single, None, None)[0]


def test_distribution_gate_is_equation_2() -> None:
    ids = np.array([[0, 1], [0, 2], [3, 1]])  # four distinct experts
    resident = np.isin(np.arange(E), [0, 1, 2])
    assert missing_shares(ids, resident) == [(0.25, 1)]
    assert np.flatnonzero(replaceable(ids, resident, None)).tolist() == [3]
    assert np.flatnonzero(replaceable(ids, resident, 0.26)).tolist() == [3]
    assert not replaceable(ids, resident, 0.25).any()
    assert not replaceable(ids, resident, 0.0).any()


def test_beta_adapts_to_what_the_link_carries() -> None:
    beta = Beta(AdaptiveBeta(expert_bytes=10, budget_s=1.0))
    for delta, missing in ((0.25, 1), (0.5, 2), (0.5, 2), (1.0, 4)):
        beta.saw(delta, missing)
    # of 4 calls: 0, 36, 40, 76, 80, 90 bytes
    found = [beta.beta(bytes_per_s) for bytes_per_s in (0.0, 9.0, 10.0, 19.0, 20.0, 22.5)]
    assert found == [math.nextafter(1.0, 2.0), math.nextafter(1.0, 2.0), 1.0, 1.0, 0.5, 0.0]
    assert beta.beta(1e9) == 0.0  # bytes to spare: nothing is replaced


def test_algorithm_1() -> None:
    """The best resident buddy that the token does not use; the second miss finds the first one's taken."""
    buddies = lists(e0=[5, 6], e1=[5, 2, 7], e3=[4])
    found = run([0, 1, 2, 3], {2, 5, 7}, buddies, weights=[0.4, 0.3, 0.2, 0.1])
    assert found.ids.tolist() == [[5, 7, 2, 3]]  # 1 may take neither 5 (taken) nor 2 (the token's own)
    np.testing.assert_array_equal(found.weights, np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))  # weights stay
    assert (found.substituted, found.dropped) == (2, 0)
    assert run([0, 1, 2, 3], {2, 5, 7}, buddies, SubstitutionOptions(search=2)).ids.tolist() == [[5, 1, 2, 3]]
    assert run([0, 1, 2, 3], {2, 5, 7}, buddies, SubstitutionOptions(rho=1)).ids.tolist() == [[5, 1, 2, 3]]
    assert run([0, 1, 2, 3], {2, 5, 7}, buddies, tau=1.0).ids.tolist() == [[0, 1, 2, 3]]


def test_score_is_equation_3() -> None:
    buddies = lists(e0=[1, 2])  # q = 0.5, 0.25
    p = [0.0, 0.1, 0.8, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert run([0, 7], {1, 2, 7}, buddies, probabilities=p).ids.tolist() == [[1, 7]]
    # 0.5 * (1 + 1.5 * 0.1) = 0.575 > 0.25 * (1 + 1.5 * 0.8) = 0.55; with eta = 2: 0.6 < 0.65
    assert run([0, 7], {1, 2, 7}, buddies, SubstitutionOptions(eta=1.5), probabilities=p).ids[0, 0] == 1
    assert run([0, 7], {1, 2, 7}, buddies, SubstitutionOptions(eta=2.0), probabilities=p).ids[0, 0] == 2
    # 0.5 * (1 - 0.4) > 0.25 > 0.5 * (1 - 0.6); a hop that costs all makes no candidate
    hop = [0, 1, 0, 0, 0, 0, 0, 0]
    assert run([0, 7], {1, 2, 7}, buddies, SubstitutionOptions(kappa=0.4), hop=hop).ids[0, 0] == 1
    assert run([0, 7], {1, 2, 7}, buddies, SubstitutionOptions(kappa=0.6), hop=hop).ids[0, 0] == 2
    assert run([0, 7], {1, 7}, buddies, SubstitutionOptions(kappa=1.0), hop=hop).ids[0, 0] == 0


def test_reuse_is_discouraged() -> None:
    buddies = lists(e0=[5], e1=[5, 6], e2=[5])
    assert run([0, 1, 2], {5, 6}, buddies).ids.tolist() == [[5, 6, 2]]
    # 1: 0.5 * 0.6 = 0.3 > 0.25; 2: 0.5 * 0.36
    assert run([0, 1, 2], {5, 6}, buddies, SubstitutionOptions(reuse=0.6)).ids.tolist() == [[5, 5, 5]]
    assert run([0, 1, 2], {5, 6}, buddies, SubstitutionOptions(reuse=0.4)).ids.tolist() == [[5, 6, 5]]


def test_what_has_no_buddy_is_dropped() -> None:
    weights = [0.4, 0.3, 0.2, 0.1]
    found = run([0, 1, 2, 3], {2, 5}, lists(e1=[5]), SubstitutionOptions(fallback="drop"), weights)
    assert found.ids.tolist() == [[5, 5, 2, 5]]
    np.testing.assert_allclose(found.weights, [[0, 0.3, 0.2, 0]])
    assert (found.substituted, found.dropped) == (1, 2)
    scaled = run([0, 1, 2, 3], {2, 5}, lists(e1=[5]), SubstitutionOptions(fallback="drop", renormalise=True), weights)
    np.testing.assert_allclose(scaled.weights, [[0, 0.6, 0.4, 0]], rtol=1e-6)
    none = run([0, 1], set(), lists(), SubstitutionOptions(fallback="drop"), [0.6, 0.4])
    assert none.ids.tolist() == [[0, 0]]  # the first is loaded after all
    np.testing.assert_allclose(none.weights, [[0.6, 0]])
    over = run([0, 1, 2], {5}, lists(e0=[5]), SubstitutionOptions(fallback="drop", rho=1))
    assert over.ids.tolist() == [[5, 1, 2]]  # over rho nothing is looked for, so nothing is dropped
    assert over.dropped == 0


def test_weights_by_the_buddy() -> None:
    p = [0.4, 0.2, 0.0, 0.0, 0.0, 0.1, 0.0, 0.0]
    options = SubstitutionOptions(weights="buddy")
    found = run([0, 1], {1, 5}, lists(e0=[5]), options, [0.4, 0.2], p)
    np.testing.assert_allclose(found.weights, [[0.1, 0.2]], rtol=1e-6)
    options = SubstitutionOptions(weights="buddy", renormalise=True)
    found = run([0, 1], {1, 5}, lists(e0=[5]), options, [2 / 3, 1 / 3], p)
    np.testing.assert_allclose(found.weights, [[1 / 3, 2 / 3]], rtol=1e-6)
    with pytest.raises(ValueError, match="probabilities"):
        run([0, 1], {1, 5}, lists(e0=[5]), options)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 30))
def test_more_is_replaced_as_rho_search_and_beta_grow(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = np.array([rng.permutation(E)[:4] for _ in range(6)])
    weights = rng.dirichlet(np.ones(4), 6).astype(np.float32)
    resident = rng.random(E) < 0.5
    order = np.array([rng.permutation(np.delete(np.arange(E), e))[:5] for e in range(E)], np.int32)
    buddies = Buddies(order, -np.sort(-rng.random((E, 5), np.float32)) + np.float32(0.01))
    view = RerouteView(resident, 0, 4)

    def count(beta: float | None, **options: int) -> int:
        found = MissRule([buddies], SubstitutionOptions(**options), beta=beta).reroute(0, ids, weights, None, view)
        for before, after in zip(ids, found.ids, strict=True):
            new = after[after != before]
            assert len(set(after)) == 4
            assert resident[new].all()
            assert not set(new) & set(before)
        return found.substituted

    by_rho = [count(None, rho=rho) for rho in range(5)]
    assert by_rho[0] == 0
    assert by_rho == sorted(by_rho)
    by_beta = [count(beta) for beta in (0.0, 0.3, 0.6, 1.0)]
    assert by_beta[0] == 0
    assert by_beta == sorted(by_beta)
    assert count(None, search=1) <= count(None, search=5)


def test_the_rule_waits_until_the_cache_is_full() -> None:
    rule = MissRule([lists(e0=[5])], SubstitutionOptions())
    ids, weights = np.array([[0, 1]]), np.array([[0.5, 0.5]], np.float32)
    here = np.isin(np.arange(E), [1, 5])
    assert rule.reroute(0, ids, weights, None, RerouteView(here, 3, 2, vacant=1)).substituted == 0
    assert rule.reroute(0, ids, weights, None, RerouteView(here, 3, 2, vacant=0)).ids.tolist() == [[5, 1]]
    assert rule.reroute(0, ids, weights, None, RerouteView(here, 3, 2, vacant=1)).substituted == 1  # it was full once
    emptied = RerouteView(here, 3, 2, vacant=1, emptied=1)
    assert rule.reroute(0, ids, weights, None, emptied).substituted == 0, "a flushed cache fills again"
    assert rule.reroute(0, ids, weights, None, RerouteView(here, 3, 2, vacant=0, emptied=1)).substituted == 1
    assert ids.tolist() == [[0, 1]]
    nothing = rule.reroute(0, ids, weights, None, RerouteView(np.ones(E, bool), 0, 2))
    assert nothing.ids is ids


# experts 0 to 3 on the lead, 4 to 7 on shard 1
SHARD_OF = np.arange(E) // 4


def sharded(*here: int, filling: bool = False, vacant: int = 0) -> RerouteView:
    return RerouteView(np.isin(np.arange(E), here), 0, 4, vacant, SHARD_OF, np.array([False, filling]))


def test_each_shard_has_its_own_distribution_gate() -> None:
    """The lead misses 1 of 3, shard 1 misses 1 of 1: beta 0.5 closes for shard 1 alone."""
    ids, weights = np.array([[0, 1, 2, 4]]), np.full((1, 4), 0.25, np.float32)
    view = sharded(1, 2, 3, 5)
    buddies = [lists(e0=[3], e4=[5])]
    found = MissRule(buddies, PLAIN, beta=0.5).reroute(0, ids, weights, None, view)
    assert found.ids.tolist() == [[3, 1, 2, 4]]
    found = MissRule(buddies, PLAIN).reroute(0, ids, weights, None, view)
    assert found.ids.tolist() == [[3, 1, 2, 5]]
    one = RerouteView(view.available, 0, 4)  # as one GPU: 2 of 4
    assert MissRule(buddies, PLAIN, beta=0.5).reroute(0, ids, weights, None, one).substituted == 0


def test_whose_hop_counts() -> None:
    """hop(j) is of j alone: a missing expert of shard 1 has its neighbours a hop away, too."""
    ids, weights = np.array([[4]]), np.ones((1, 1), np.float32)
    for kappa, expected in ((0.0, 5), (0.75, 1), (1.0, 1)):
        rule = MissRule([lists(e4=[5, 1])], SubstitutionOptions(kappa=kappa))
        assert rule.reroute(0, ids, weights, None, sharded(1, 5)).ids.tolist() == [[expected]]
    rule = MissRule([lists(e4=[5])], SubstitutionOptions(kappa=1.0))
    assert rule.reroute(0, ids, weights, None, sharded(1, 5)).substituted == 0


def test_a_shard_that_fills_its_cache_loads() -> None:
    ids, weights = np.array([[0, 4]]), np.full((1, 2), 0.5, np.float32)
    rule = MissRule([lists(e0=[1], e4=[5])], PLAIN)
    assert rule.reroute(0, ids, weights, None, sharded(1, 5, filling=True, vacant=1)).substituted == 0
    assert rule.reroute(0, ids, weights, None, sharded(1, 5, vacant=1)).ids.tolist() == [[0, 5]]
    assert rule.reroute(0, ids, weights, None, sharded(1, 5, filling=True)).ids.tolist() == [[1, 4]]
    assert rule.reroute(0, ids, weights, None, sharded(1, 5, vacant=1)).ids.tolist() == [[1, 5]]  # both were full once


def made(**options: object) -> MissRule:
    """As an engine makes it, by a profile in which expert 0 is used with 5 in nine of ten cases, and with 6."""
    pairs = np.full((2, E, E), 1e-3)
    pairs[:, 0, 5], pairs[:, 0, 6] = 90, 10
    entropies = np.ones((2, len(TEMPERATURES), BINS))
    profile = ExpertProfile(pairs.sum(axis=2), pairs, pairs, entropies, None)
    policy = PolicySettings(
        name="test",
        lossless=False,
        on_miss="substitute",
        substitution={"epsilon": 0.0, **options},  # type: ignore
    )
    rule = make_rerouting(policy, 2, E, True, PolicyArtifacts(profile=profile), expert_bytes=10)
    assert isinstance(rule, MissRule)
    return rule


def replaced(rule: MissRule, layer: int, *here: int) -> int:
    """Of expert 0 beside 1, with even weights: by which expert."""
    ids, weights = np.array([[0, 1]]), np.array([[0.5, 0.5]], np.float32)
    return int(rule.reroute(layer, ids, weights, None, RerouteView(np.isin(np.arange(E), [1, *here]), 0, 2)).ids[0, 0])


def test_lists_are_as_long_as_their_coverage_asks() -> None:
    plain, growing = made(alpha=0.5), made(alpha=0.5, alpha_last=0.95)
    assert [replaced(rule, layer, 5, 6) for rule in (plain, growing) for layer in (0, 1)] == [5] * 4
    assert [replaced(plain, layer, 6) for layer in (0, 1)] == [0, 0]
    assert [replaced(growing, layer, 6) for layer in (0, 1)] == [0, 6]  # the last layer's list is longer
    assert replaced(made(alpha=0.95, max_buddies=1), 0, 6) == 0


def test_gates_are_those_of_the_settings() -> None:
    assert replaced(made(), 0, 5) == 5
    assert [replaced(made(percentile=percentile), 0, 5) for percentile in (0, 100)] == [5, 0]
    assert [replaced(made(gamma=gamma), 0, 5) for gamma in (0.5, 1e-9)] == [5, 5]  # even weights have no margin
    assert [replaced(made(beta=beta), 0, 5) for beta in (0.5, 0.51)] == [0, 5]


@pytest.mark.parametrize(("link_ms", "then"), [(1000, 0), (1, 5)])
def test_the_share_that_is_replaced_follows_the_link(link_ms: float, then: int) -> None:
    """An expert takes the link of 10 bytes a second a second: there is room for its load, or for none."""
    rule = made(link_ms=link_ms)
    assert replaced(rule, 0, 5) == 0  # nothing was seen yet
    rule.measured(10.0)
    assert replaced(rule, 0, 5) == then


def test_random_replacement_is_uniform_and_repeats() -> None:
    ids, weights = np.tile([0, 1, 2, 3], (2000, 1)), np.full((2000, 4), 0.25, np.float32)
    view = RerouteView(np.isin(np.arange(E), [3, 4, 5, 6, 7]), 0, 4)
    found = [RandomRule(1, E, SubstitutionOptions(), seed=s).reroute(0, ids, weights, None, view) for s in (0, 0, 1)]
    assert found[0].substituted == 6000
    np.testing.assert_array_equal(found[0].ids, found[1].ids)
    assert (found[0].ids != found[2].ids).any()
    assert all(len(set(row)) == 4 for row in found[0].ids.tolist())
    for slot in range(3):
        counts = np.bincount(found[0].ids[:, slot], minlength=E)
        assert counts[:4].sum() == 0
        assert (np.abs(counts[4:] - 500) < 100).all()


def test_drop_leaves_out_what_is_missing() -> None:
    rule = MissRule(no_buddies(1, E), SubstitutionOptions(fallback="drop", renormalise=True))
    ids, weights = np.array([[0, 1, 2], [4, 0, 2]]), np.array([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]], np.float32)
    found = rule.reroute(0, ids, weights, None, RerouteView(np.isin(np.arange(E), [1, 2]), 0, 3))
    assert found.ids.tolist() == [[1, 1, 2], [2, 2, 2]]
    np.testing.assert_allclose(found.weights, [[0, 0.6, 0.4], [0, 0, 1]], rtol=1e-6)
    assert (found.substituted, found.dropped) == (0, 3)
