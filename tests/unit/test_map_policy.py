"""Expert maps behind the protocol of all prefetch policies."""

from __future__ import annotations

import numpy as np
import pytest
from map_contexts import SHAPE, TOP_K, forecasts, iteration, reference

from tiermoe.actors.policies.fmoe import ExpertMapEviction, ExpertMapPolicy
from tiermoe.actors.policies.prefetch import LayerSeen, Span, Wanted


def _seen(layer: int, spans: list[Span], probabilities: np.ndarray | None) -> LayerSeen:
    ids = np.zeros((spans[-1].stop, TOP_K), np.int64)
    return LayerSeen(layer, spans, ids, probabilities, lambda distance: None)


def test_wants_what_the_forecasts_want() -> None:
    """Two sequences, of one and of three rows: rows of a sequence count by their mean."""
    told: list[tuple[int, float]] = []
    maps, direct = reference(), reference()
    policy = ExpertMapPolicy(maps, SHAPE.hidden, lambda keys, p: told.extend(zip(keys, p, strict=True)))
    assert policy.distance == 2
    for number in range(4):
        shown = iteration(number, 2)
        spans = [
            Span("a", 0, 1, True, shown.embeddings[0]),
            Span("b", 1, 4, False, shown.embeddings[1]),
        ]
        expected = forecasts(direct, shown)
        told.clear()
        wanted = [policy.begin_forward(spans)]
        for layer in range(SHAPE.layers):
            p = shown.probabilities[layer].astype(np.float64)
            rows = np.stack([p[0], 0.5 * p[1], p[1], 1.5 * p[1]])
            wanted.append(policy.observed(_seen(layer, spans, rows)))
        for mine, forecast in zip(wanted, expected, strict=True):
            if forecast is None:
                assert mine == []
                continue
            pairs = zip(forecast.keys[: forecast.wanted], forecast.priorities, strict=False)
            assert mine == [Wanted(int(key), pytest.approx(float(priority))) for key, priority in pairs]
        assert [key for key, _ in told] == [key for f in expected if f is not None for key in f.keys.tolist()]
        if number:
            assert sorted(key for key, _ in told) == list(range(SHAPE.layers * SHAPE.experts))  # each expert once
            for layer in range(SHAPE.layers):  # of one matched map or two: probabilities, not priorities
                total = sum(p for key, p in told if key // SHAPE.experts == layer)
                assert 1.0 - 1e-5 <= total <= 2.0
    assert len(maps.store) == 8


def test_eviction_is_told() -> None:
    maps = reference()
    forecasts(maps, iteration(0))
    eviction = ExpertMapEviction()
    shown = iteration(1, seed=0)
    best = shown.probabilities[0, 0].argsort()
    for key in range(SHAPE.experts):
        eviction.admitted(key)
    policy = ExpertMapPolicy(maps, SHAPE.hidden, eviction.expect)
    policy.begin_forward([Span("a", 0, 1, True, shown.embeddings[0])])
    assert eviction.victims(SHAPE.experts, lambda key: True) == best.tolist()


def test_no_embedding_and_no_probabilities() -> None:
    maps = reference()
    forecasts(maps, iteration(0))
    policy = ExpertMapPolicy(maps, SHAPE.hidden)
    span = Span("a", 0, 1, True)
    assert policy.begin_forward([span]) == []  # not everything, as a similarity of 0 would say
    with pytest.raises(ValueError, match="does not expose"):
        policy.observed(_seen(0, [span], None))
