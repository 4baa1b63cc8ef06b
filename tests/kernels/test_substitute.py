"""BuddyMoE's rule in C++ against the plain one (`buddymoe_reference`), to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from buddymoe_reference import MissRule as Reference
from buddymoe_reference import token_entropy
from numpy.typing import NDArray

from tiermoe.actors.policies.buddymoe import MissRule
from tiermoe.actors.policies.buddymoe.substitution import AdaptiveBeta, Buddies, SubstitutionOptions
from tiermoe.actors.policies.routing import Rerouted, RerouteView

SHAPES = [(1, 1, 4), (1, 4, 8), (3, 2, 5), (8, 8, 64), (33, 6, 60), (128, 8, 256)]
OPTIONS = {
    "plain": SubstitutionOptions(),
    "rho 3": SubstitutionOptions(rho=3),
    "rho 0": SubstitutionOptions(rho=0),
    "search 2": SubstitutionOptions(search=2),
    "score": SubstitutionOptions(eta=0.7, reuse=0.5, rho=4),
    "reuse": SubstitutionOptions(reuse=0.9),
    "drop": SubstitutionOptions(fallback="drop", search=1),
    "drop renormalised": SubstitutionOptions(fallback="drop", search=1, renormalise=True),
    "buddy": SubstitutionOptions(weights="buddy"),
    "buddy renormalised": SubstitutionOptions(weights="buddy", renormalise=True, fallback="drop", eta=0.1, search=3),
    "gates": SubstitutionOptions(gamma=0.3, rho=2),
    "tempered": SubstitutionOptions(gamma=0.4, temperature=1.2, weights="buddy", renormalise=True),
    "cold": SubstitutionOptions(temperature=0.8, fallback="drop"),
}
Routing = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]


def buddies_of(rng: np.random.Generator, experts: int, ranks: int, steps: int = 0) -> Buddies:
    """Random lists of random lengths; with `steps`, similarities are multiples of 1/steps, so that many are equal."""
    ids = np.tile(np.arange(experts, dtype=np.int32)[:, None], (1, ranks))
    similarity = np.zeros((experts, ranks), np.float32)
    for expert in range(experts):
        others = np.delete(np.arange(experts), expert)
        length = int(rng.integers(0, min(ranks, len(others)) + 1))
        ids[expert, :length] = rng.permutation(others)[:length]
        values = np.sort(rng.random(length))[::-1]
        if steps:
            values = np.ceil(values * steps) / steps
        similarity[expert, :length] = values
    return Buddies(ids, similarity)


def routing(rng: np.random.Generator, tokens: int, top_k: int, experts: int) -> Routing:
    """Of random logits; some weights are 0."""
    logits = rng.standard_normal((tokens, experts), dtype=np.float32) * np.float32(2)
    probabilities = np.exp(logits)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    ids = np.argsort(-probabilities, axis=1, kind="stable")[:, :top_k].astype(np.int64)
    weights = np.take_along_axis(probabilities, ids, axis=1)
    weights[rng.random((tokens, top_k)) < 0.02] = 0
    return ids, weights, probabilities


def view_of(rng: np.random.Generator, experts: int, shards: int = 1) -> RerouteView:
    """Half of the experts are there."""
    here = rng.random(experts) < 0.5
    if shards == 1:
        return RerouteView(here, 0, 1)
    filling = rng.random(shards) < 0.2
    return RerouteView(here, 0, 1, int(rng.integers(2)), rng.integers(0, shards, experts), filling)


def assert_same(found: Rerouted, expected: Rerouted) -> None:
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.weights.view(np.int32), expected.weights.view(np.int32))
    assert (found.substituted, found.dropped) == (expected.substituted, expected.dropped)


def both(buddies: Sequence[Buddies], options: SubstitutionOptions, **gates: Any) -> tuple[MissRule, Reference]:
    return MissRule(buddies, options, **gates), Reference(buddies, options, **gates)


def taus(name: str, weights: NDArray[np.float32]) -> list[float | None]:
    """No gate, and for some options a threshold at the very entropy of one of the tokens."""
    options = OPTIONS[name]
    entropies = np.sort(token_entropy(weights, options.temperature))
    return [None, float(entropies[len(entropies) // 3])] if options.gamma or options.temperature != 1 else [None]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_gives_what_the_plain_rule_gives(shape: tuple[int, int, int], name: str) -> None:
    rng, (tokens, top_k, experts) = np.random.default_rng(sum(shape)), shape
    for steps in (0, 4):
        buddies, asked = buddies_of(rng, experts, min(16, experts), steps), routing(rng, tokens, top_k, experts)
        view = view_of(rng, experts)
        for tau in taus(name, asked[1]):
            rule, reference = both([buddies], OPTIONS[name], taus=None if tau is None else [tau])
            assert_same(rule.reroute(0, *asked, view), reference.reroute(0, *asked, view))


@pytest.mark.parametrize("name", ["rho 3", "buddy renormalised", "tempered"])
def test_the_largest_shape(name: str) -> None:
    rng = np.random.default_rng(1)
    rule, reference = both([buddies_of(rng, 256, 16)], OPTIONS[name])
    asked, view = routing(rng, 512, 8, 256), view_of(rng, 256)
    expected = reference.reroute(0, *asked, view)
    assert expected.substituted > 100
    assert_same(rule.reroute(0, *asked, view), expected)


@pytest.mark.parametrize("beta", [None, 0.0, 0.25, 0.5, 1.0, AdaptiveBeta(10, 1.0, window=5)], ids=str)
@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("name", ["rho 3", "score", "buddy renormalised"])
def test_gates_and_hops_of_a_run(name: str, shards: int, beta: float | AdaptiveBeta | None) -> None:
    """Two layers whose slots fill, are emptied and fill again, with buddies on all shards."""
    rng, changed = np.random.default_rng(shards), 0
    for kappa in (0.0, 0.5, 1.0):
        options = SubstitutionOptions(**{field: getattr(OPTIONS[name], field) for field in (
            "rho", "search", "eta", "reuse", "fallback", "weights", "renormalise",
        )}, kappa=kappa)  # fmt: skip
        gate = {"adaptive": beta} if isinstance(beta, AdaptiveBeta) else {"beta": beta}
        rule, reference = both([buddies_of(rng, 24, 8, 4) for _ in range(2)], options, **gate)
        for step in range(40):
            rule.measured(10.0 * (step % 7))
            reference.link_bytes_per_s = 10.0 * (step % 7)
            view = view_of(rng, 24, shards)._replace(emptied=step // 25)
            if step % 25 < 4:
                view = view._replace(vacant=3)
            if step % 9 == 8:
                view = view._replace(available=np.ones(24, bool))
            asked = routing(rng, int(rng.integers(1, 5)), int(rng.integers(1, 5)), 24)
            expected = reference.reroute(step % 2, *asked, view)
            assert_same(rule.reroute(step % 2, *asked, view), expected)
            changed += expected.substituted + expected.dropped
    assert (changed > 0) == (beta != 0.0)


def test_random_numbers_are_read_in_the_order_in_which_they_are_drawn() -> None:
    rng = np.random.default_rng(5)
    draws = [partial(np.random.default_rng(7).random, dtype=np.float32) for _ in range(2)]
    buddies = [buddies_of(rng, 64, 16)]
    rule = MissRule(buddies, OPTIONS["score"], draw=draws[0])
    reference = Reference(buddies, OPTIONS["score"], draw=draws[1])
    for tokens in (1, 3, 300, 1, 7, 255, 300, 2):  # of 64 numbers each: one call takes more than are drawn ahead
        asked, view = routing(rng, tokens, 4, 64), view_of(rng, 64)
        assert_same(rule.reroute(0, *asked, view), reference.reroute(0, *asked, view))


def test_it_refuses_what_it_cannot_read() -> None:
    rng = np.random.default_rng(0)
    (ids, weights, probabilities), here = routing(rng, 2, 2, 5), np.ones(5, bool)
    rule = MissRule([buddies_of(rng, 5, 4)], SubstitutionOptions()).handle
    for wrong in (
        (0, ids + 5, weights, None, here, 0, 0),
        (0, ids - 5, weights, None, here, 0, 0),
        (0, ids.astype(np.int32), weights, None, here, 0, 0),
        (0, ids, weights.astype(np.float64), None, here, 0, 0),
        (0, ids, weights[:, :1].copy(), None, here, 0, 0),
        (0, ids, weights, probabilities[:1], here, 0, 0),
        (0, ids, weights, None, here[:-1], 0, 0),
        (1, ids, weights, None, here, 0, 0),
        (-1, ids, weights, None, here, 0, 0),
        (0, ids, weights, None, here, 0, 0, np.array([0, 0, 0, 0, 2]), here[:2]),
        (0, ids, weights, None, here, 0, 0, np.zeros(4, np.int64), here[:2]),
    ):
        with pytest.raises(ValueError, match=r"there is no|must be numpy|weights are|probabilities are|has a shard"):
            rule.reroute(*wrong)
    with pytest.raises((ValueError, BufferError)):
        rule.reroute(0, ids.T.copy().T, weights, None, here, 0, 0)
    scored = MissRule([buddies_of(rng, 5, 4)], SubstitutionOptions(eta=0.1))
    with pytest.raises(ValueError, match="needs the router's probabilities"):
        scored.reroute(0, ids, weights, None, RerouteView(here, 0, 2))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"taus": [0.5] * 2}, "each layer has a threshold"),
        ({"beta": 1.5}, "a share"),
        ({"adaptive": AdaptiveBeta(0, 1.0)}, "experts have bytes"),
        ({"adaptive": AdaptiveBeta(1, 1.0, window=0)}, "a window holds a call"),
    ],
)
def test_numbers_out_of_range_are_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        MissRule([buddies_of(np.random.default_rng(0), 5, 4)], SubstitutionOptions(), **given)
