"""Cache-conditional routing, against a transcription of the rule token by token, and by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermoe.actors.policies.cache_conditional import CachePrior
from tiermoe.actors.policies.registry import PolicyContext, make
from tiermoe.actors.policies.routing import RerouteView
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.cluster.config import load_policy

EXPERTS, TOP_K = 8, 4


def view(resident: set[int], experts: int = EXPERTS) -> RerouteView:
    return RerouteView(np.array([e in resident for e in range(experts)]), 0, TOP_K)


def routed(logits: Any, top_k: int = TOP_K, renormalise: bool = True) -> tuple[Any, Any, Any]:
    """ids, weights and probabilities of a plain router."""
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    ids = np.argsort(-p, axis=1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(p, ids, axis=1)
    return ids, (weights / weights.sum(axis=1, keepdims=True) if renormalise else weights).astype(np.float32), p


def transcription(rows: Any, resident: set[int], strength: float, best: int, seen: list[float]) -> list[set[int]]:
    """Equation by equation: z' = z + lambda Delta_avg m(C and the top J), then the top K; C grows by what ran."""
    cache, out = set(resident), []
    for z in rows.tolist():
        seen.append(max(z) - min(z))
        average = math.fsum(seen) / len(seen)
        by_score = sorted(range(len(z)), key=lambda e: -z[e])
        mask = cache | set(by_score[:best])
        biased = [z[e] + (strength * average if e in mask else 0.0) for e in range(len(z))]
        chosen = set(sorted(range(len(z)), key=lambda e: -biased[e])[:TOP_K])
        out.append(chosen)
        cache |= chosen
    return out


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), resident=st.sets(st.integers(0, EXPERTS - 1)), strength=st.floats(0, 1),
    best=st.integers(0, TOP_K), renormalise=st.booleans(),
)  # fmt: skip
def test_as_published(seed: int, resident: set[int], strength: float, best: int, renormalise: bool) -> None:
    rng, seen = np.random.default_rng(seed), list[float]()
    rule = CachePrior(2, strength, best, renormalise)
    for tokens in (1, 3):
        rows = rng.normal(size=(tokens, EXPERTS)) * 2
        ids, weights, p = routed(rows, renormalise=renormalise)
        found = rule.reroute(1, ids, weights, p.astype(np.float64), view(resident))
        want = transcription(rows, resident, strength, best, seen)
        assert [set(row) for row in found.ids.tolist()] == want
        assert found.substituted == sum(len(chosen - set(row)) for chosen, row in zip(want, ids.tolist(), strict=True))
        assert found.dropped == 0
        own = np.take_along_axis(p, found.ids, axis=1)  # the router's weights of what runs
        expected = own / own.sum(axis=1, keepdims=True) if renormalise else own
        np.testing.assert_allclose(found.weights, expected, rtol=1e-5)


def test_by_hand() -> None:
    """Range 4 and lambda 0.25: a resident may be 1 behind the expert that it replaces, the best expert never goes."""
    z = np.log(np.exp([[4.0, 2.0, 1.5, 0.0]]) / np.exp([4.0, 2.0, 1.5, 0.0]).sum())
    ids, weights, p = routed(z, 2)
    rule = make("routing", load_policy("cache-conditional").routing.model_copy(update={"strength": 0.25}),
                PolicyContext(1, 4, 2))  # fmt: skip
    found = rule.reroute(0, ids, weights, p, view({2}, 4))
    assert found.ids.tolist() == [[0, 2]]
    assert found.weights[0].tolist() == pytest.approx([p[0, 0] / (p[0, 0] + p[0, 2]), p[0, 2] / (p[0, 0] + p[0, 2])])
    assert rule.reroute(0, ids, weights, p, view({3}, 4)).ids is ids  # 3 is too far behind
    assert rule.reroute(0, ids, weights, p, view({0, 1}, 4)).ids is ids


def test_a_router_of_another_kind_keeps_its_routing() -> None:
    """Groups or a bias pick what is not most probable: then the scores that the rule needs are not these."""
    _, weights, p = routed(np.array([[4.0, 3.0, 2.0, 1.0, 0, 0, 0, 0]]))
    ids = np.array([[0, 1, 2, 7]])
    assert CachePrior(1, 1.0).reroute(0, ids, weights, p, view({3, 4})).ids is ids


def test_a_trace_without_probabilities_changes_nothing() -> None:
    """Its picks share them equally, and the others have none."""
    ids, p = np.array([[0, 1, 2, 3]]), np.array([[0.25] * 4 + [0.0] * 4])
    assert CachePrior(1, 1.0).reroute(0, ids, np.full((1, 4), 0.25, np.float32), p, view({6})).ids is ids


def test_it_is_lossy() -> None:
    with pytest.raises(ValueError, match="not lossless"):
        PolicySettings(**load_policy("cache-conditional").model_dump() | {"lossless": True})
