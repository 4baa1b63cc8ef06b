"""Prefetch of the next layer by score, at random and by trained gates: decisions, and the engine's part in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    FakeCache,
    FakeShards,
    Resting,
    blocks_of,
    hidden_rows,
    make_routers,
    prefetching,
    view_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tiermoe.actors.engine.make_policies import gate_probes
from tiermoe.actors.engine.prefetching import RouterPrefetching
from tiermoe.actors.engine.serving.streams import SequenceRows
from tiermoe.actors.policies.baselines import PreGate, PreGatedPrefetch
from tiermoe.actors.policies.moepic import SpeculativePrefetch
from tiermoe.actors.policies.prefetch import (
    LayerSeen,
    NextGatePrefetch,
    RandomPrefetch,
    Span,
    Wanted,
    by_score,
    predicted_experts,
)
from tiermoe.actors.policies.registry import options
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.store.artifacts import PolicyArtifacts
from tiermoe.errors import ConfigError


@pytest.fixture
def routers() -> list[torch.Tensor]:
    return make_routers()


def softmax(logits: np.ndarray) -> np.ndarray:
    raised = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return raised / raised.sum(axis=-1, keepdims=True)


def transcription(scores: np.ndarray, top: int) -> list[int]:
    """Each row names its `top` experts; all of them by their highest score, ties always by number."""
    experts = scores.shape[1]
    named = {e for row in scores for e in sorted(range(experts), key=lambda e: (-row[e], e))[:top]}
    return [e for e in sorted(named, key=lambda e: (-max(scores[:, e]), e)) if max(scores[:, e]) > 0]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_by_score_follows_the_transcription_with_ties(data: st.DataObject) -> None:
    tokens, experts = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 12))
    scores = data.draw(arrays(np.float32, (tokens, experts), elements=st.integers(0, 3))) / 4
    top = data.draw(st.integers(1, experts + 1))
    found = by_score(scores, top)
    assert [e for e, _ in found] == transcription(scores, top)
    assert [score for _, score in found] == [scores[:, e].max() for e, _ in found]


@pytest.mark.parametrize("top", [2, 4])
@pytest.mark.parametrize("tokens", [1, 3])
def test_speculation_follows_equation_3(tokens: int, top: int, routers: list[torch.Tensor]) -> None:
    """And at the last layer the first one is foreseen by each sequence's last row."""
    cache, shown = FakeCache(), []
    tested = prefetching(SpeculativePrefetch(LAYERS, EXPERTS, top), cache, routers)
    tested.on_predicted = lambda layer, scores: shown.append((layer, scores))
    rows = [SequenceRows("a", 0, 2, False), SequenceRows("b", 2, 3, True)]
    if tokens == 1:
        rows = [SequenceRows("a", 0, 1, True)]
    tested.begin_forward(rows)
    hidden, expected = hidden_rows(tokens), []
    for layer in range(LAYERS):
        tested.layer(layer, view_of(hidden, torch.zeros((tokens, 2), dtype=torch.int64)))
        following = (layer + 1) % LAYERS
        last = [row.stop - 1 for row in rows]
        seen = hidden if following else hidden[last]
        expected.append((following, softmax((seen @ routers[following].T).numpy())))
    for (layer, scores), (wanted_layer, wanted) in zip(shown, expected, strict=True):
        assert layer == wanted_layer
        np.testing.assert_allclose(scores, wanted, rtol=1e-5)
    assert cache.asked == [
        ([layer * EXPERTS + e for e in transcription(scores, top)], set(), "speculative") for layer, scores in expected
    ]


def test_a_forward_that_nobody_announced_ends_with_its_last_row(routers: list[torch.Tensor]) -> None:
    cache = FakeCache()
    tested = prefetching(SpeculativePrefetch(LAYERS, EXPERTS, 2), cache, routers)
    tested.begin_forward([SequenceRows("a", 0, 1, True)])
    hidden = hidden_rows(3)
    for layer in range(LAYERS):
        tested.layer(layer, view_of(hidden, torch.zeros((3, 2), dtype=torch.int64)))
    assert cache.asked[-1][0] == transcription(softmax((hidden[2:] @ routers[0].T).numpy()), 2)


def test_a_mute_router_is_not_foreseen(routers: list[torch.Tensor]) -> None:
    cache = FakeCache()
    tested = prefetching(SpeculativePrefetch(LAYERS, EXPERTS, 2), cache, [None, *routers[1:3], None])
    tested.on_predicted = lambda layer, scores: seen.append(layer)
    seen: list[int] = []
    for layer in range(LAYERS):
        tested.layer(layer, view_of(hidden_rows(1), torch.zeros((1, 2), dtype=torch.int64)))
    assert seen == [1, 2]
    assert [keys[0] // EXPERTS for keys, _, _ in cache.asked] == [1, 2]


def test_while_prefetch_rests_scores_are_made_for_who_records_them_only(routers: list[torch.Tensor]) -> None:
    cache, seen = FakeCache(Resting(0.5)), []
    tested = prefetching(SpeculativePrefetch(LAYERS, EXPERTS, 2), cache, routers)
    for layer in range(LAYERS):
        tested.layer(layer, view_of(hidden_rows(1), torch.zeros((1, 2), dtype=torch.int64)))
    tested.on_predicted = lambda layer, scores: seen.append(layer)
    for layer in range(LAYERS):
        tested.layer(layer, view_of(hidden_rows(1), torch.zeros((1, 2), dtype=torch.int64)))
    assert (cache.asked, seen) == ([], [1, 2, 3, 0])


def test_next_gate_does_not_wrap_and_shows_its_scores(routers: list[torch.Tensor]) -> None:
    seen: list[int] = []
    tested = prefetching(NextGatePrefetch(LAYERS, EXPERTS, 2, 2), FakeCache(), routers)
    tested.on_predicted = lambda layer, scores: seen.append(layer)
    for layer in range(LAYERS):
        tested.layer(layer, view_of(hidden_rows(1), torch.zeros((1, 2), dtype=torch.int64)))
    assert seen == [1, 2, 3]


def test_other_shards_are_not_told_of_the_next_forward(routers: list[torch.Tensor]) -> None:
    cache, shards = FakeCache(), FakeShards()
    tested = prefetching(SpeculativePrefetch(LAYERS, EXPERTS, EXPERTS), cache, routers, shards)
    tested.begin_forward([SequenceRows("a", 0, 1, True)])
    for layer in range(LAYERS):
        tested.layer(layer, view_of(hidden_rows(1), torch.zeros((1, 2), dtype=torch.int64)))
    assert [layer for layer, _ in shards.told] == [0, 1, 2]
    assert all(key % 2 == 0 for keys, _, _ in cache.asked for key in keys)
    assert len(cache.asked[-1][0]) == EXPERTS // 2


def _seen(layer: int, tokens: int, spans: Sequence[Span] = ()) -> LayerSeen:
    ids: Any = np.zeros((tokens, 2), np.int64)
    return LayerSeen(layer, spans or [Span("a", 0, tokens, True)], ids, None, lambda distance: None)


def test_random_guesses_are_the_same_each_time_and_of_the_next_layer() -> None:
    def guesses(seed: int) -> list[list[Wanted]]:
        policy = RandomPrefetch(LAYERS, EXPERTS, 2, seed=seed)
        return [policy.observed(_seen(layer, tokens)) for tokens in (1, 3) for layer in range(LAYERS)]

    found = guesses(0)
    assert found == guesses(0)
    assert found != guesses(1)
    for i, wanted in enumerate(found):
        assert {want.key // EXPERTS for want in wanted} == {(i + 1) % LAYERS}
        priorities = [want.priority for want in wanted]
        assert priorities == sorted(priorities, reverse=True)
        assert len(wanted) == 2 or (i >= LAYERS and i % LAYERS != LAYERS - 1 and 2 <= len(wanted) <= 6)


def test_random_guesses_are_uniform() -> None:
    policy = RandomPrefetch(LAYERS, EXPERTS, 2)
    counts = np.zeros(EXPERTS)
    for _ in range(600):
        for want in policy.observed(_seen(0, 1)):
            counts[want.key % EXPERTS] += 1
    assert abs(counts - 200).max() < 60


def test_pre_gates_answer_in_place_of_the_routers(routers: list[torch.Tensor]) -> None:
    rng = np.random.default_rng(5)
    gates = tuple(
        PreGate(rng.normal(size=(EXPERTS, HIDDEN)).astype(np.float32), rng.normal(size=EXPERTS).astype(np.float32))
        for _ in range(LAYERS - 1)
    )
    policy = PolicySettings(name="test", lossless=True, prefetch={"kind": "pre-gated"})
    probes = gate_probes(policy, PolicyArtifacts(gates=gates), LAYERS, torch.device("cpu"))
    cache, made = FakeCache(), PreGatedPrefetch(LAYERS, EXPERTS, 2)
    tested = RouterPrefetching(made, cache, blocks_of([None] * LAYERS), EXPERTS, None, probes)  # type: ignore[arg-type]
    hidden = hidden_rows(2)
    for layer in range(LAYERS):
        tested.layer(layer, view_of(hidden.to(torch.bfloat16), torch.zeros((2, 2), dtype=torch.int64)))
    shown = hidden.to(torch.bfloat16).float().numpy()
    assert cache.asked == [
        ([(i + 1) * EXPERTS + e for e in predicted_experts(gate(shown), 2)], set(), "pre-gated")
        for i, gate in enumerate(gates)
    ]
    for lacking in (PolicyArtifacts(), PolicyArtifacts(gates=gates[:1])):
        with pytest.raises(ConfigError, match="--gates TEXT"):
            gate_probes(policy, lacking, LAYERS, torch.device("cpu"))


@pytest.mark.parametrize("kind", ["speculative", "random", "pre-gated"])
def test_these_look_one_layer_ahead(kind: Any) -> None:
    assert options("prefetch", {"kind": kind, "top": 9}).distance == 1
    with pytest.raises(ValueError, match="leave distance out"):
        options("prefetch", {"kind": kind, "distance": 2})
