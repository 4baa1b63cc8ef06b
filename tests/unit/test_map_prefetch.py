"""The lead's side of expert maps as a prefetch policy: what it publishes, and what becomes of commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from map_contexts import SHAPE
from numpy.typing import NDArray

from tiermoe.actors.engine.peers.matcher import MatcherPrefetch
from tiermoe.actors.engine.peers.shards import Shards
from tiermoe.actors.policies.eviction import Lru
from tiermoe.actors.policies.fmoe import BlendPrefetch, ExpertMapEviction
from tiermoe.actors.policies.prefetch import LayerSeen, NextGatePrefetch, Span, Wanted
from tiermoe.actors.settings import ShardSettings
from tiermoe.actors.store.artifacts import MapShape
from tiermoe.proto.messages import PrefetchCommand
from tiermoe.proto.peers import LocalDirectory, PeerLink, shard_name

L, E, K = SHAPE.layers, SHAPE.experts, 2


@dataclass
class FakeLink:
    """Takes everything, answers with what is put into `commands`."""

    shape: MapShape = SHAPE
    source: str = "expert-map"
    commands: list[PrefetchCommand] = field(default_factory=list)
    begun: list[tuple[int, list[int], NDArray[np.float32]]] = field(default_factory=list)
    seen: list[tuple[int, int, list[int], NDArray[np.float32]]] = field(default_factory=list)
    fallback_layers: int = 0

    def begin(self, iteration: int, sequences: NDArray[np.int64], embeddings: NDArray[np.float32]) -> None:
        self.begun.append((iteration, sequences.tolist(), embeddings))

    def observe(
        self, iteration: int, layer: int, sequences: NDArray[np.int64], probabilities: NDArray[np.float32]
    ) -> None:
        self.seen.append((iteration, layer, sequences.tolist(), probabilities))

    def take(self, iteration: int, layer: int) -> list[PrefetchCommand]:
        out, self.commands = self.commands, []
        return out

    def fell_back(self) -> None:
        self.fallback_layers += 1


def _policy(link: Any, **more: Any) -> MatcherPrefetch:
    more = {"eviction": Lru()} | more
    return MatcherPrefetch(link, E, NextGatePrefetch(L, E, K), **more)


def _seen(layer: int, spans: list[Span], lookahead: Callable[[int], Any] | None = None) -> LayerSeen:
    tokens = spans[-1].stop
    probabilities = np.random.default_rng(layer).dirichlet(np.ones(E), tokens).astype(np.float32)
    return LayerSeen(layer, spans, np.zeros((tokens, K), np.int64), probabilities, lookahead or (lambda d: None))


def _command(pairs: dict[int, float], hints: int = 0, layer: int = 1, mapped: bool = True) -> PrefetchCommand:
    keys, priorities = np.array(list(pairs), np.int32), np.array(list(pairs.values()), np.float32)
    return PrefetchCommand(0, layer, keys, priorities, hints, mapped)


def test_contexts() -> None:
    link = FakeLink()
    policy = _policy(link)
    row = np.arange(SHAPE.hidden, dtype=np.float32)
    spans = [Span("a", 0, 2, False, row), Span("b", 2, 3, True, 2 * row)]
    assert policy.begin_forward(spans) == []
    seen = _seen(0, spans)
    assert policy.observed(seen) == []
    policy.end("a")
    policy.begin_forward([Span("b", 0, 1, True), Span("a", 1, 2, False)])  # b goes on, another a begins
    (first, numbers, embeddings), (second, later, unknown) = link.begun
    assert (second - first, numbers, later) == (1, [0, 1], [1, 2])
    np.testing.assert_array_equal(embeddings, [row, 2 * row])
    assert not unknown.any()
    iteration, layer, sequences, means = link.seen[0]
    assert (iteration, layer, sequences) == (first, 0, [0, 1])
    assert seen.probabilities is not None
    np.testing.assert_allclose(means, [seen.probabilities[:2].mean(0), seen.probabilities[2]], rtol=1e-6)


def test_commands_are_wanted_most_first_and_hints_are_for_eviction() -> None:
    link, eviction = FakeLink(), ExpertMapEviction()
    policy = _policy(link, eviction=eviction)
    spans = [Span("a", 0, 1, True)]
    policy.begin_forward(spans)
    link.commands = [_command({3 * E + 1: 0.1, 3 * E: 0.2, 3 * E + 2: 0.05}, hints=1)]  # decided as layer 1 ran
    first, second = Wanted(3 * E, pytest.approx(0.2)), Wanted(3 * E + 1, pytest.approx(0.1))
    assert policy.observed(_seen(1, spans)) == [first, second]
    assert eviction._probability == pytest.approx({3 * E: 0.6, 3 * E + 1: 0.3, 3 * E + 2: 0.15})
    assert link.fallback_layers == 0


def test_next_gate_steps_in() -> None:
    link = FakeLink(source="next-gate")
    policy = _policy(link)
    spans = [Span("a", 0, 1, True)]
    policy.begin_forward(spans)
    link.commands = [_command({3 * E: 0.2})]  # the last that the matcher could say
    scores = np.zeros((1, E), np.float32)
    scores[0, 2], scores[0, 1] = 2.0, 1.0
    wanted = policy.observed(_seen(1, spans, lambda d: scores))
    guesses = [(2 * E + 2, "next-gate"), (2 * E + 1, "next-gate")]
    assert [(want.key, want.source) for want in wanted] == [(3 * E, ""), *guesses]
    assert link.fallback_layers == 1


def test_blend_judges_by_ids() -> None:
    policy = _policy(FakeLink(), blend=BlendPrefetch(L, E, K, 2))
    assert policy.needs_ids
    assert not _policy(FakeLink()).needs_ids


def test_a_model_without_probabilities_is_refused() -> None:
    policy = _policy(FakeLink())
    spans = [Span("a", 0, 1, True)]
    policy.begin_forward(spans)
    with pytest.raises(ValueError, match="does not expose"):
        policy.observed(_seen(0, spans)._replace(probabilities=None))


class FakePeer:
    """A shard that takes every message."""

    available = True

    def __init__(self) -> None:
        self.posted: list[PrefetchCommand] = []

    def post(self, command: PrefetchCommand) -> None:
        self.posted.append(command)


@pytest.mark.parametrize("load", [True, False])
def test_commands_are_passed_on_to_the_owners(load: bool) -> None:
    shards = Shards(
        ShardSettings(count=2), [PeerLink(LocalDirectory(), name=shard_name(1))], L, E, SHAPE.hidden, None  # type: ignore[arg-type]
    )
    peer: Any = FakePeer()
    shards.peers = {"shard/1": peer}
    shards._owner = [("shard/1", peer) if key % 2 else None for key in range(L * E)]
    pairs = {8: 0.4, 9: 0.3, 11: 0.2, 10: 0.1, 13: 0.05}
    mine = shards.relay(_command(pairs, hints=2), load)
    (theirs,) = peer.posted
    assert theirs.keys.tolist() == [9, 11, 13]
    assert (theirs.hints, theirs.mapped, theirs.layer) == (1 if load else 3, True, 1)
    assert mine.keys.tolist() == ([8, 10] if load else list(pairs))
    assert mine.hints == (1 if load else 2)
    peer.available = False  # then its experts are the lead's
    assert len(shards.relay(_command(pairs, hints=2), load).keys) == len(pairs)
