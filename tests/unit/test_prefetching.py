"""The real engine carries out a policy: what the policy is shown, and in which order its wishes reach the cache.

Prefetch of the next layer by score, at random and by trained gates: decisions, and the engine's part in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from fake_engine import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    Block,
    FakeCache,
    FakeShards,
    at_rest,
    blocks_of,
    hidden_rows,
    make_routers,
    prefetching,
    view_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tiermoe.actors.core._core import Governor
from tiermoe.actors.engine.make_policies import gate_probes
from tiermoe.actors.engine.prefetching import RouterPrefetching
from tiermoe.actors.policies.baselines import PreGate, PreGatedPrefetch
from tiermoe.actors.policies.moepic import SpeculativePrefetch
from tiermoe.actors.policies.prefetch import (
    LayerSeen,
    NextGatePrefetch,
    PrefetchPolicy,
    RandomPrefetch,
    Span,
    Wanted,
    by_score,
    predicted_experts,
)
from tiermoe.actors.policies.routing import SequenceRows
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.store.artifacts import PolicyArtifacts
from tiermoe.errors import ConfigError


@pytest.fixture
def routers() -> list[torch.Tensor]:
    return make_routers()


class Scripted(PrefetchPolicy):
    """Says what it is told to, and keeps what it is shown."""

    name: ClassVar[str] = "scripted"
    needs_probabilities: ClassVar[bool] = True

    def __init__(self, says: list[Wanted] | None = None) -> None:
        self.says = says or []
        self.begun: list[Sequence[Span]] = []
        self.seen: list[LayerSeen] = []
        self.ended: list[str] = []

    def begin_forward(self, spans: Sequence[Span]) -> list[Wanted]:
        self.begun.append(spans)
        return []

    def observed(self, seen: LayerSeen) -> list[Wanted]:
        self.seen.append(seen)
        return self.says

    def end(self, sequence: str) -> None:
        self.ended.append(sequence)


class Embedding(Scripted):
    needs_embeddings: ClassVar[bool] = True


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(10, HIDDEN)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embedding


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("distance", [1, 2])
def test_next_gate_asks_as_before(distance: int, tokens: int, routers: list[torch.Tensor]) -> None:
    """Guards the decisions of the engine's first prefetcher: each layer on its own, nearest first, none given up."""
    cache, hidden = FakeCache(), hidden_rows(tokens)
    tested = prefetching(NextGatePrefetch(LAYERS, EXPERTS, 2, distance), cache, routers)
    ids = torch.zeros((tokens, 2), dtype=torch.int64)
    for layer in range(LAYERS):
        tested.layer(layer, view_of(hidden, ids))
    expected = []
    for layer in range(LAYERS):
        held: set[int] = set()
        for later in range(layer + 1, min(layer + 1 + distance, LAYERS)):
            keys = [later * EXPERTS + e for e in predicted_experts((hidden @ routers[later].T).numpy(), 2)]
            expected.append((keys, set(held), "next-gate"))
            held.update(keys)
    assert cache.asked == expected
    assert cache.finished == []


def test_order_sources_and_waiting(routers: list[torch.Tensor]) -> None:
    cache = FakeCache()
    says = [Wanted(8, 3.0), Wanted(7, 2.0), Wanted(14, 1.5, "other"), Wanted(15, 1.0), Wanted(6, 0.5)]
    policy = Scripted(says)
    policy.synchronous = True
    tested = prefetching(policy, cache, routers)
    tested.begin_forward([SequenceRows("a", 0, 1, decode=True)])
    tested.layer(0, view_of(hidden_rows(1), torch.tensor([[1, 2]])))
    assert cache.asked == [
        ([8, 7], set(), "scripted"),
        ([14], {8, 7}, "other"),
        ([15], {8, 7, 14}, "scripted"),
        ([6], {8, 7, 14, 15}, "scripted"),
    ]
    assert cache.finished == [([8, 7, 14, 15, 6], 0)]


def test_what_a_policy_is_shown(routers: list[torch.Tensor]) -> None:
    policy = Scripted()
    tested = prefetching(policy, FakeCache(), routers)
    tested.begin_forward([SequenceRows("a", 0, 2, decode=False), SequenceRows("b", 2, 3, decode=True)])
    hidden, ids = hidden_rows(3), torch.tensor([[0, 1], [2, 3], [4, 5]])
    tested.layer(0, view_of(hidden, ids))
    seen = policy.seen[0]
    assert policy.begun == [[Span("a", 0, 2, False), Span("b", 2, 3, True)]]
    assert (seen.layer, seen.spans) == (0, policy.begun[0])
    np.testing.assert_array_equal(seen.ids, ids.numpy())
    assert seen.probabilities is not None
    np.testing.assert_allclose(seen.probabilities, torch.softmax(hidden @ routers[0].T, -1).numpy(), rtol=1e-6)
    ahead = seen.lookahead(2)
    assert ahead is not None
    np.testing.assert_allclose(ahead, (hidden @ routers[2].T).numpy(), rtol=1e-6)


def test_embeddings_are_the_spans_means(routers: list[torch.Tensor]) -> None:
    policy, model = Embedding(), Model()
    tested = prefetching(policy, FakeCache(), routers)
    tested.watch_embeddings(model)
    rows = [SequenceRows("a", 0, 2, decode=False), SequenceRows("b", 2, 3, decode=True)]
    tested.begin_forward(rows)
    assert policy.begun == []  # nothing is known yet
    with torch.no_grad():
        embedded = model.embedding(torch.tensor([[1, 2, 3]]))[0]
    (spans,) = policy.begun
    for span, wanted in zip(spans, (embedded[:2].mean(0), embedded[2]), strict=True):
        np.testing.assert_allclose(span.embedding, wanted.numpy(), rtol=1e-6)
    tested.layer(0, view_of(hidden_rows(3), torch.zeros((3, 2), dtype=torch.int64)))
    assert len(policy.begun) == 1


def test_an_unannounced_forward_is_one_sequence(routers: list[torch.Tensor]) -> None:
    policy, model = Embedding(), Model()
    tested = prefetching(policy, FakeCache(), routers)
    tested.watch_embeddings(model)
    tested.begin_forward([SequenceRows("a", 0, 1, decode=True)])
    for _ in range(2):
        with torch.no_grad():
            embedded = model.embedding(torch.tensor([[4, 5, 6]]))[0]
        for layer in range(LAYERS):
            tested.layer(layer, view_of(hidden_rows(3), torch.zeros((3, 2), dtype=torch.int64)))
    assert [(s.start, s.stop, s.decode) for spans in policy.begun for s in spans] == [(0, 3, False)] * 2
    np.testing.assert_allclose(policy.begun[0][0].embedding, embedded.mean(0).numpy(), rtol=1e-6)
    assert policy.ended == []
    tested.begin_forward([])
    assert len(policy.ended) == 2


def test_sequences_end_between_forwards(routers: list[torch.Tensor]) -> None:
    policy = Scripted()
    tested = prefetching(policy, FakeCache(), routers)
    tested.end_sequence("a")
    assert policy.ended == []
    tested.begin_forward([SequenceRows("b", 0, 1, decode=False)])
    assert policy.ended == ["a"]


def test_while_prefetch_rests_only_those_that_learn_are_asked(routers: list[torch.Tensor]) -> None:
    cache = FakeCache(at_rest())
    learning = Scripted([Wanted(8, 1.0)])
    tested = prefetching(learning, cache, routers)
    tested.begin_forward([SequenceRows("a", 0, 1, decode=True)])
    tested.layer(0, view_of(hidden_rows(1), torch.tensor([[1, 2]])))
    assert len(learning.seen) == 1

    def refuse(hidden: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a router was asked in vain")

    blocks: Any = [Block(refuse)] * LAYERS
    plain = RouterPrefetching(NextGatePrefetch(LAYERS, EXPERTS, 2), cache, blocks, EXPERTS)  # type: ignore[arg-type]
    plain.layer(0, view_of(hidden_rows(1), torch.tensor([[1, 2]])))
    assert cache.asked == []


def test_shards_get_prefetches_of_their_experts_while_the_lead_rests(routers: list[torch.Tensor]) -> None:
    for governor, mine in ((Governor(), [8, 6]), (at_rest(), None)):
        cache, shards = FakeCache(governor), FakeShards()
        tested = prefetching(Scripted([Wanted(k, -float(k)) for k in (9, 8, 7, 6)]), cache, routers, shards)
        tested.begin_forward([SequenceRows("a", 0, 1, decode=True)])
        tested.layer(0, view_of(hidden_rows(1), torch.tensor([[1, 2]])))
        assert shards.told == [(0, [9, 7])]
        assert [keys for keys, _, _ in cache.asked] == ([mine] if mine else [])


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
    found, best = by_score(scores, top)
    assert found == transcription(scores, top)
    assert best == [scores[:, e].max() for e in found]
    assert by_score(scores, top, 40) == ([40 + e for e in found], best)


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


def test_other_shards_get_no_prefetches_of_the_next_forward(routers: list[torch.Tensor]) -> None:
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


@pytest.mark.parametrize("absent", [None, 1, 2])
def test_a_stateless_policy_is_not_asked_where_nothing_can_be_fetched(
    absent: int | None, routers: list[torch.Tensor]
) -> None:
    """Prefetch that cannot pay costs no router: at layer 0 only the experts of layer 1 matter."""
    cache = FakeCache(held={key for key in range(LAYERS * EXPERTS) if absent is None or key != absent * EXPERTS})
    tested = prefetching(NextGatePrefetch(LAYERS, EXPERTS, 2), cache, routers)
    assert tested.idle(0, allowed=True) == (absent != 1)
    tested.layer(0, view_of(hidden_rows(3), torch.zeros(3, 2, dtype=torch.int64)))
    assert bool(cache.asked) == (absent == 1)
