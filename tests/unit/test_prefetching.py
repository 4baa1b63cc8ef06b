"""The real engine carries out a policy: what the policy is shown, and in which order its wishes reach the cache."""

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
    Resting,
    hidden_rows,
    make_routers,
    prefetching,
    view_of,
)

from tiermoe.actors.engine.prefetching import RouterPrefetching
from tiermoe.actors.engine.serving.streams import SequenceRows
from tiermoe.actors.policies.prefetch import (
    LayerSeen,
    NextGatePrefetch,
    PrefetchGovernor,
    PrefetchPolicy,
    Span,
    Wanted,
    predicted_experts,
)


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


def test_a_layer_without_router_is_left_out(routers: list[torch.Tensor]) -> None:
    cache = FakeCache()
    tested = prefetching(NextGatePrefetch(LAYERS, EXPERTS, 2), cache, [*routers[:2], None, routers[3]])
    for layer in range(LAYERS):
        tested.layer(layer, view_of(hidden_rows(1), torch.zeros((1, 2), dtype=torch.int64)))
    assert [keys[0] // EXPERTS for keys, _, _ in cache.asked] == [1, 3]


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


def test_a_forward_that_nobody_announced_is_a_sequence_of_its_own(routers: list[torch.Tensor]) -> None:
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
    cache = FakeCache(Resting(0.5))
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


def test_shards_are_told_of_what_is_theirs_even_while_the_lead_rests(routers: list[torch.Tensor]) -> None:
    for governor, mine in ((PrefetchGovernor(0.0), [8, 6]), (Resting(0.5), None)):
        cache, shards = FakeCache(governor), FakeShards()
        tested = prefetching(Scripted([Wanted(k, -float(k)) for k in (9, 8, 7, 6)]), cache, routers, shards)
        tested.begin_forward([SequenceRows("a", 0, 1, decode=True)])
        tested.layer(0, view_of(hidden_rows(1), torch.tensor([[1, 2]])))
        assert shards.told == [(0, [9, 7])]
        assert [keys for keys, _, _ in cache.asked] == ([mine] if mine else [])
