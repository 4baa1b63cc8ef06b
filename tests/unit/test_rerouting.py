"""Routing rules on hand-made cases and against direct transcriptions, and how the engine carries them out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermoe.actors.engine.host_view import HostViews
from tiermoe.actors.engine.make_policies import make_rerouting
from tiermoe.actors.engine.rerouting import Rerouter
from tiermoe.actors.engine.stats import EngineStats
from tiermoe.actors.policies.adapmoe import AdaptiveGating, Rerouted, RerouteView, Rerouting, drop_pairs, drop_places
from tiermoe.actors.policies.registry import options
from tiermoe.actors.policies.residency import Residency
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.store.artifacts import PolicyArtifacts
from tiermoe.errors import ConfigError

VIEW = RerouteView(np.ones(8, np.bool_), 0, 4)


def transcription(weights: Sequence[float], sensitivity: float, threshold: float) -> set[int]:
    """The places of one token that adaptive gating drops: least weights first while d^2 * s < threshold."""
    gone: set[int] = set()
    order = sorted(range(len(weights)), key=lambda k: weights[k])
    for place in order[:-1]:
        d = sum(weights[k] for k in gone | {place})
        if not d < math.sqrt(threshold / sensitivity):
            break
        gone.add(place)
    return gone


def _routing(rng: np.random.Generator, tokens: int, top_k: int) -> tuple[Any, Any]:
    ids = np.stack([rng.permutation(8)[:top_k] for _ in range(tokens)]).astype(np.int64)
    weights = rng.dirichlet(np.ones(top_k), tokens).astype(np.float32)
    return ids, -np.sort(-weights, axis=1)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), tokens=st.integers(1, 5), top_k=st.integers(1, 4), sensitivity=st.floats(0.01, 100),
    threshold=st.floats(0, 2), renormalise=st.booleans(),
)  # fmt: skip
def test_adaptive_gating_follows_the_transcription(
    seed: int, tokens: int, top_k: int, sensitivity: float, threshold: float, renormalise: bool
) -> None:
    ids, weights = _routing(np.random.default_rng(seed), tokens, top_k)
    kept_ids, kept_weights = ids.copy(), weights.copy()
    found = AdaptiveGating([1.0, sensitivity], threshold, renormalise).reroute(1, ids, weights, None, VIEW)
    np.testing.assert_array_equal(ids, kept_ids)
    np.testing.assert_array_equal(weights, kept_weights)
    dropped = 0
    for t in range(tokens):
        gone = transcription(weights[t].tolist(), sensitivity, threshold)
        dropped += len(gone)
        kept = [k for k in range(top_k) if k not in gone]
        assert set(found.ids[t]) == set(ids[t, kept])
        np.testing.assert_array_equal(found.ids[t, kept], ids[t, kept])
        assert not found.weights[t, sorted(gone)].any()
        scale = weights[t].sum() / weights[t, kept].sum() if renormalise and gone else 1.0
        np.testing.assert_allclose(found.weights[t, kept], weights[t, kept] * scale, rtol=1e-5)
    assert (found.dropped, found.substituted) == (dropped, 0)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), threshold=st.floats(0, 1), renormalise=st.booleans(), ties=st.booleans())
def test_a_row_alone_goes_as_it_does_in_a_batch(seed: int, threshold: float, renormalise: bool, ties: bool) -> None:
    ids, weights = _routing(np.random.default_rng(seed), 6, 4)
    if ties:
        weights = np.round(weights * 4).astype(np.float32) / 4
    rule = AdaptiveGating([1.0], threshold, renormalise)
    whole, dropped = rule.reroute(0, ids, weights, None, VIEW), 0
    for t in range(6):
        alone = rule.reroute(0, ids[t : t + 1], weights[t : t + 1], None, VIEW)
        np.testing.assert_array_equal(alone.ids[0], whole.ids[t])
        np.testing.assert_array_equal(alone.weights[0], whole.weights[t])
        dropped += alone.dropped
    assert dropped == whole.dropped


def test_top_2_is_the_paper_s_rule() -> None:
    """(1 - a)^2 * s < threshold: s = 4, threshold 0.36, so the second goes where its weight is below 0.3."""
    rule = AdaptiveGating([4.0], 0.36)
    ids = np.array([[1, 2], [3, 4]])
    found = rule.reroute(0, ids, np.array([[0.69, 0.31], [0.71, 0.29]], np.float32), None, VIEW)
    assert found.ids.tolist() == [[1, 2], [3, 3]]
    np.testing.assert_allclose(found.weights, [[0.69, 0.31], [1.0, 0.0]], rtol=1e-6)
    assert found.dropped == 1


def test_threshold_0_changes_nothing_and_more_drops_more() -> None:
    ids, weights = _routing(np.random.default_rng(3), 50, 4)
    weights[0] = [1, 0, 0, 0]
    counts, before = [], np.zeros(ids.shape, bool)
    for threshold in (0.0, 0.001, 0.01, 0.1, 1.0, 100.0):
        found = AdaptiveGating([2.0], threshold).reroute(0, ids, weights, None, VIEW)
        gone = found.weights == 0
        assert not (before & ~gone).any()
        counts.append(found.dropped)
        before = gone
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == 50 * 3  # one always stays


def test_a_layer_without_sensitivity_keeps_one() -> None:
    ids, weights = _routing(np.random.default_rng(1), 2, 4)
    assert AdaptiveGating([0.0], 0.1).reroute(0, ids, weights, None, VIEW).dropped == 6
    assert AdaptiveGating([0.0], 0.0).reroute(0, ids, weights, None, VIEW).dropped == 0


def test_what_a_dropped_pair_becomes() -> None:
    ids = np.array([[5, 6, 7], [1, 2, 3]])
    weights = np.array([[0.2, 0.5, 0.3], [0.4, 0.4, 0.2]], np.float32)
    found = drop_pairs(ids, weights, np.array([[True, False, False], [False, False, True]]), renormalise=False)
    assert found.ids.tolist() == [[6, 6, 7], [1, 2, 1]]
    np.testing.assert_array_equal(found.weights, np.array([[0, 0.5, 0.3], [0.4, 0.4, 0]], np.float32))
    assert found.dropped == 2
    again = drop_pairs(ids, weights, np.array([[True, False, False], [False, False, False]]), renormalise=True)
    np.testing.assert_allclose(again.weights, [[0, 0.625, 0.375], [0.4, 0.4, 0.2]], rtol=1e-6)
    assert drop_pairs(ids, weights, np.zeros((2, 3), bool), True).ids is ids
    with pytest.raises(ValueError, match="keeps at least one"):
        drop_pairs(ids, weights, np.array([[True] * 3, [False] * 3]), True)
    with pytest.raises(ValueError, match="keeps at least one"):
        drop_places(ids[:1], weights[:1], [0, 1, 2], True)


@pytest.mark.parametrize(("sensitivity", "threshold"), [([-1.0], 0.1), ([1.0], -0.1)])
def test_negative_numbers_are_refused(sensitivity: list[float], threshold: float) -> None:
    with pytest.raises(ValueError, match="not negative"):
        AdaptiveGating(sensitivity, threshold)


# -- the engine's side ---------------------------------------------------------------------------------------


@dataclass
class Cache:
    """Four experts a layer and five slots."""

    residency: Residency = field(default_factory=lambda: Residency(8, 5, 10))
    stats: EngineStats = field(default_factory=EngineStats)

    def standing(self, layer: int) -> tuple[Any, int]:
        return self.residency.occupied(layer * 4, layer * 4 + 4), 5

    def vacant(self, layer: int) -> int:
        return 0


class Scripted(Rerouting):
    """Answers what it is told to, and keeps what it is shown."""

    name: ClassVar[str] = "scripted"
    needs_probabilities: ClassVar[bool] = True

    def __init__(self, says: Rerouted) -> None:
        self.says = says
        self.shown: list[tuple[Any, ...]] = []

    def reroute(self, layer: int, ids: Any, weights: Any, probabilities: Any, view: RerouteView) -> Rerouted:
        self.shown.append((layer, ids, weights, probabilities, view))
        return self.says


def _rerouter(rule: Rerouting, cache: Cache, mute: bool = False) -> Rerouter:
    router = None if mute else (lambda hidden: hidden * 2)
    blocks: Any = [SimpleNamespace(router=router)] * 2
    return Rerouter(rule, cache, blocks, 2)  # type: ignore[arg-type]


def test_a_rule_sees_routing_and_cache_and_is_counted() -> None:
    cache = Cache()
    for key in (0, 4, 6):  # of layer 0, and two of layer 1: one there, one on its way
        reservation = cache.residency.reserve(key)
        if key != 6:
            cache.residency.publish(reservation)
    rule = Scripted(Rerouted(np.array([[2, 0]]), np.array([[0.7, 0.3]], np.float32), substituted=1))
    hidden, ids, weights = torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.tensor([[3, 0]]), torch.tensor([[0.6, 0.4]])
    seen = HostViews().look(1, hidden, ids, weights.to(torch.bfloat16))
    assert _rerouter(rule, cache).layer(1, seen) == set()
    layer, seen_ids, seen_weights, probabilities, view = rule.shown[0]
    assert (layer, seen_ids.tolist(), seen_weights.dtype) == (1, [[3, 0]], np.float32)
    np.testing.assert_allclose(probabilities, torch.softmax(hidden * 2, -1).numpy(), rtol=1e-6)
    assert view.available.tolist() == [True, False, True, False]
    assert (view.free_slots, view.top_k) == (3, 2)
    assert (seen.ids.tolist(), seen.ids.dtype, seen.weights.dtype) == ([[2, 0]], np.int64, np.float32)
    assert seen.picked.tolist() == [[3, 0]]
    assert (cache.stats.substitutions, cache.stats.dropped) == (1, 0)


def test_places_that_nobody_uses_are_left_out() -> None:
    cache = Cache()
    ids, weights = torch.tensor([[3, 0], [1, 2]]), torch.tensor([[0.6, 0.4], [0.5, 0.5]])
    one = Rerouted(np.array([[3, 3], [1, 2]]), np.array([[1, 0], [0.5, 0.5]], np.float32), dropped=1)
    two = Rerouted(np.array([[3, 3], [1, 1]]), np.array([[1, 0], [1, 0]], np.float32), dropped=2)
    seen = HostViews().look(0, torch.zeros(2, 4), ids, weights)
    _rerouter(Scripted(one), cache).layer(0, seen)
    assert seen.ids.tolist() == [[3, 3], [1, 2]]
    seen = HostViews().look(0, torch.zeros(2, 4), ids, weights)
    _rerouter(Scripted(two), cache).layer(0, seen)
    assert (seen.ids.tolist(), seen.weights.tolist()) == ([[3], [1]], [[1.0], [1.0]])
    assert cache.stats.dropped == 3


def test_an_unchanged_routing_is_the_model_s_own() -> None:
    ids, weights = torch.tensor([[3, 0]]), torch.tensor([[0.6, 0.4]])
    rule = Scripted(Rerouted(ids.numpy(), weights.numpy()))
    seen = HostViews().look(0, torch.zeros(1, 4), ids, weights)
    _rerouter(rule, Cache()).layer(0, seen)
    assert seen.ids is seen.picked


def test_a_rule_that_needs_a_mute_router_is_refused() -> None:
    rule = Scripted(Rerouted(np.zeros((1, 1), np.int64), np.ones((1, 1), np.float32)))
    with pytest.raises(ConfigError, match="does not expose"):
        _rerouter(rule, Cache(), mute=True)


def _policy(**kwargs: Any) -> PolicySettings:
    kwargs.setdefault("lossless", False)
    return PolicySettings(name="test", **kwargs)


def test_settings_make_the_rule_or_say_what_is_missing() -> None:
    assert make_rerouting(_policy(lossless=True), 2, 4, True, PolicyArtifacts()) is None
    adaptive = _policy(routing={"kind": "adaptive", "threshold": 0.1})
    assert isinstance(make_rerouting(adaptive, 2, 4, True, PolicyArtifacts((1.0, 2.0))), AdaptiveGating)
    for lacking in (PolicyArtifacts(), PolicyArtifacts((1.0,))):
        with pytest.raises(ConfigError, match="--sensitivity TEXT"):
            make_rerouting(adaptive, 2, 4, True, lacking)


def test_settings_that_contradict_are_refused() -> None:
    for kind, threshold in (("exact", 0.1), ("adaptive", None)):
        with pytest.raises(ValueError, match="threshold"):
            options("routing", {"kind": kind, "threshold": threshold})  # type: ignore[arg-type]
    routing = {"kind": "adaptive", "threshold": 0.1}
    with pytest.raises(ValueError, match="not lossless"):
        _policy(routing=routing, lossless=True)
    with pytest.raises(ValueError, match="model's own routing"):
        _policy(routing=routing, placement={"kind": "static"})
