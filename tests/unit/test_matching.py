"""The lead's way to the matcher: it never waits, drops what is late, and says when it does without.

The lead's side of expert maps as a prefetch policy: what it publishes, and what becomes of commands.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pytest
from channel_peer import wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from map_contexts import MAPS, SETTINGS, SHAPE, TOP_K, Iteration, forecasts, iteration, reference
from orders_reference import Lru, MapOrder

from tiermoe.actors.engine.peers.matcher import MatcherLink, MatcherPrefetch, tell_eviction
from tiermoe.actors.engine.peers.shards import Shards
from tiermoe.actors.matcher import Matcher
from tiermoe.actors.policies.fmoe import ExpertMapEviction
from tiermoe.actors.policies.prefetch import LayerSeen, NextGatePrefetch, Span, Wanted
from tiermoe.actors.settings import ShardSettings
from tiermoe.errors import DeadlinePassed, PeerLost
from tiermoe.proto.messages import Context, HealthReport, Message, PrefetchCommand
from tiermoe.proto.peers import MATCHER, LocalDirectory, PeerLink, shard_name

_PATIENCE_S = 20.0
_DEEP = 6 * 8  # keys of all layers
TAIL = SHAPE.layers - 1 - MAPS.distance  # the first layer on which no forecast depends


class FakePending:
    """An answer that comes when the test says so."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.answer: Message | Exception | None = None
        self.here = False

    def give(self, answer: Message | Exception | None) -> None:
        self.answer, self.here = answer, True

    def done(self) -> bool:
        return self.here

    def result(self) -> Message | None:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@dataclass
class FakeChannel:
    """prompt: it answers at once, without a command."""

    report: HealthReport
    alive: bool = True
    prompt: bool = False
    sent: list[FakePending] = field(default_factory=list)

    @property
    def closed_because(self) -> str | None:
        return None if self.alive else "the channel closed"

    def call(self, message: Message, deadline_s: float) -> Message:
        return self.report

    def submit(self, message: Context, deadline_s: float) -> FakePending:
        if not self.alive:
            raise PeerLost("the matcher died", "restart it")
        self.sent.append(FakePending(message))
        if self.prompt:
            self.sent[-1].give(None)
        return self.sent[-1]

    def close(self) -> None:
        self.alive = False


class FakeLink:
    """Leads to one `FakeChannel` after the other, as many as the test provides."""

    def __init__(self) -> None:
        self.channels: list[FakeChannel] = []
        self.report = HealthReport("matcher", asdict(SHAPE) | {"distance": MAPS.distance})

    def provide(self) -> FakeChannel:
        self.channels.append(FakeChannel(self.report))
        return self.channels[-1]

    def address(self) -> str | None:
        return "nowhere" if self.channels and self.channels[-1].alive else None

    def connect(self, address: str, transport: str, supply: object = None, traffic: object = None) -> FakeChannel:
        return self.channels[-1]


@contextmanager
def linked() -> Iterator[tuple[MatcherLink, FakeLink, FakeChannel]]:
    fake = FakeLink()
    channel = fake.provide()
    with closing(MatcherLink(fake, SETTINGS, MAPS, SHAPE)) as link:  # type: ignore[arg-type]
        link.start()
        assert link.wait_until_found(_PATIENCE_S)
        yield link, fake, channel


def begin(link: MatcherLink, number: int) -> None:
    link.begin(number, np.zeros(1, np.int64), np.ones((1, SHAPE.hidden), np.float32))


def observe(link: MatcherLink, number: int, layer: int) -> None:
    link.take(number, layer - 1)
    link.observe(number, layer, np.zeros(1, np.int64), np.ones((1, SHAPE.experts), np.float32))


def command(number: int, layer: int, *keys: int, hints: int = 0) -> PrefetchCommand:
    priorities = np.arange(len(keys), 0, -1, dtype=np.float32)
    return PrefetchCommand(number, layer, np.array(keys, np.int32), priorities, hints)


class TestPublish:
    @pytest.mark.parametrize("first", [0, TAIL, TAIL + 1])
    def test_the_layers_behind_the_last_forecast_go_together(self, first: int) -> None:
        """Also of a forward that began before the link, and none of one that failed."""
        rng = np.random.default_rng(first)
        shown = rng.random((SHAPE.layers, 2, SHAPE.experts)).astype(np.float32)
        with linked() as (link, _, channel):
            channel.prompt = True
            begin(link, 0)
            observe(link, 0, TAIL)  # the forward fails behind it
            begin(link, 1)
            channel.sent.clear()
            for layer in range(first, SHAPE.layers):
                link.take(1, layer)
                link.observe(1, layer, np.arange(2), shown[layer])
            sent = [pending.context for pending in channel.sent]
            tail = max(first, TAIL)
            assert [context.layer for context in sent] == [*range(first, TAIL), tail]
            np.testing.assert_array_equal(sent[-1].probabilities, np.concatenate(shown[tail:], axis=1))

    def test_layers_wait_while_an_answer_is_owed(self) -> None:
        """They go with the first layer behind the answer, in one message."""
        shown = np.random.default_rng(1).random((TAIL, 1, SHAPE.experts)).astype(np.float32)
        with linked() as (link, _, channel):
            begin(link, 0)
            for layer in range(TAIL):
                if layer == TAIL - 1:
                    channel.sent[0].give(command(0, 0, _DEEP - 1))
                    assert len(link.take(0, layer)) == 1
                link.observe(0, layer, np.zeros(1, np.int64), shown[layer])
                assert len(channel.sent) == 1 + (layer == TAIL - 1)
            context = channel.sent[1].context
            assert context.layer == 0
            np.testing.assert_array_equal(context.probabilities, np.concatenate(shown, axis=1))

    def test_nothing_waits_for_a_matcher_that_does_not_answer(self) -> None:
        with linked() as (link, _, channel):
            for number in range(20):
                begin(link, number)
                for layer in range(SHAPE.layers):
                    observe(link, number, layer)
                    assert link.take(number, layer) == []
            report = link.report()
            assert len(channel.sent) == report["published"] == 2 * (TAIL + 2)
            assert report["dropped"] == 2 * 20 - 2 * (TAIL + 2)
            assert "slow" in report["problem"]


class TestTake:
    def test_what_is_late_is_dropped_and_counted(self) -> None:
        with linked() as (link, _, channel):
            begin(link, 0)
            begin(link, 0)
            begin(link, 1)
            channel.sent[0].give(command(0, 0, 8))  # of the last iteration
            channel.sent[1].give(command(0, 1, 40))
            channel.sent[2].give(command(1, 0, 8, 17, 9, 18, 10, hints=2))
            taken = link.take(1, 1)  # layer 1 has its routing: keys 8 to 15 are of no use any more
            assert [(c.keys.tolist(), c.priorities.tolist(), c.hints) for c in taken] == [([17, 18], [4.0, 2.0], 1)]
            assert (link.report()["late"], link.report()["commands"]) == (2, 1)

    @pytest.mark.parametrize(
        ("answer", "layer", "silent", "late"),
        [(command(0, 0, 8, 17, hints=1), 1, 0, 1), (DeadlinePassed("no answer", "wait"), 0, 0, 1), (None, 0, 1, 0)],
        ids=["only hints are left", "after its deadline", "no forecast is no failure"],
    )
    def test_answers_without_keys(self, answer: Any, layer: int, silent: int, late: int) -> None:
        with linked() as (link, _, channel):
            begin(link, 0)
            channel.sent[0].give(answer)
            assert link.take(0, layer) == []
            assert (link.report()["silent"], link.report()["late"]) == (silent, late)


class TestSource:
    def test_slow_and_again_in_time(self, caplog: pytest.LogCaptureFixture) -> None:
        with linked() as (link, _, channel), caplog.at_level(logging.INFO):
            for number in range(16):
                begin(link, number)
                channel.sent[-1].give(command(number, 0, 40 if number % 2 else 0))  # every other one is late
                link.take(number, 0)
            assert "slow" in str(link.problem)
            assert link.source == "next-gate"
            assert "falls back to next-gate: the matcher is slow" in caplog.text
            for number in range(16, 40):
                begin(link, number)  # it is published to all the same
                channel.sent[-1].give(command(number, 0, 40))
                link.take(number, 0)
            assert link.source == "expert-map"
            assert "follows expert maps again" in caplog.text

    def test_lost_and_found(self, caplog: pytest.LogCaptureFixture) -> None:
        with linked() as (link, fake, channel), caplog.at_level(logging.INFO):
            begin(link, 0)
            channel.sent[0].give(command(0, 0, 9))
            link.take(0, 0)
            assert link.source == "expert-map"
            observe(link, 0, 0)
            channel.alive = False
            channel.sent[1].give(PeerLost("it died", "restart it"))
            assert link.take(0, 1) == []
            assert link.source == "next-gate"
            assert "falls back to next-gate: the matcher is not there" in caplog.text
            observe(link, 0, 1)
            assert (link.report()["lost"], link.report()["fallbacks"]) == (1, 1)
            second = fake.provide()
            assert link.wait_until_found(_PATIENCE_S)
            begin(link, 1)
            second.sent[0].give(command(1, 0, 9))
            assert len(link.take(1, 0)) == 1
            assert link.source == "expert-map"

    def test_a_submit_that_fails_is_a_loss(self) -> None:
        with linked() as (link, _, channel):
            channel.prompt = True
            begin(link, 0)
            real = channel.submit

            def dies(message: Context, deadline_s: float) -> FakePending:
                channel.alive = False
                return real(message, deadline_s)

            channel.submit = dies  # type: ignore[method-assign]
            observe(link, 0, 0)
            assert link.report()["lost"] == 1
            assert link.source == "next-gate"

    def test_a_matcher_for_another_model_is_not_used(self) -> None:
        fake = FakeLink()
        fake.report = HealthReport("matcher", dict(fake.report.details) | {"experts": 9})
        fake.provide()
        with closing(MatcherLink(fake, SETTINGS, MAPS, SHAPE)) as link:  # type: ignore[arg-type]
            link.start()
            wait_until(lambda: "experts 9" in str(link.problem))
            assert link.source == "next-gate"


def test_with_a_real_matcher() -> None:
    """What comes back over a channel is what the maps say, whenever it is looked for."""
    board, policy = LocalDirectory(), reference()
    with (
        closing(Matcher(SETTINGS, MAPS, SHAPE, TOP_K, board)),
        closing(MatcherLink(PeerLink(board, name=MATCHER), SETTINGS, MAPS, SHAPE)) as link,
    ):
        link.start()
        assert link.wait_until_found(_PATIENCE_S)
        for number in range(4):
            shown = iteration(number, 2)
            expected = [f for f in forecasts(policy, shown) if f is not None]
            taken = _run(link, shown, len(expected))
            assert [c.keys.tolist() for c in taken] == [f.keys.tolist() for f in expected]
            assert [c.hints for c in taken] == [len(f.keys) - f.wanted for f in expected]
        report = link.report()
        assert (report["late"], report["dropped"], report["source"]) == (0, 0, "expert-map")
        assert report["publish_us_p50"] > 0
        assert report["lag_us_p50"] > 0


def _run(link: MatcherLink, shown: Iteration, count: int) -> list[PrefetchCommand]:
    """Publish a whole iteration and take its commands as if the forward stood before its first layer."""
    taken: list[PrefetchCommand] = []
    until_s = time.monotonic() + _PATIENCE_S

    def take() -> None:
        while link.waiting:
            assert time.monotonic() < until_s
            link._asked[0].pending.result()  # waits for the event; `take` does not
            taken.extend(link.take(shown.number, -1))

    link.begin(shown.number, shown.sequences, shown.embeddings)
    for layer in range(SHAPE.layers):
        take()
        link.observe(shown.number, layer, shown.sequences, shown.probabilities[layer])
    take()
    assert len(taken) == count
    return taken


def test_eviction_gets_the_probabilities_of_a_map_and_nothing_else() -> None:
    eviction = ExpertMapEviction(L, E)
    for key in (8, 9, 10):
        eviction.admitted(key)
    keys, priorities = np.array([9, 8, 10], np.int32), np.array([0.35, 0.1, 0.05], np.float32)
    guess = PrefetchCommand(0, 0, keys, np.array([1, 2, 3], np.float32))
    tell_eviction(eviction, guess, 8)
    assert eviction.victims(3, lambda key: True) == [8, 9, 10]
    tell_eviction(eviction, PrefetchCommand(0, 0, keys, priorities, 2, mapped=True), 8)
    assert eviction.victims(3, lambda key: True) == [10, 8, 9]
    assert eviction.probabilities[9] == pytest.approx(0.7)  # layer 1 with none seen: l - l_now is 2
    tell_eviction(Lru(), guess, 8)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(0, 12), now=st.integers(0, 2))
def test_native_probabilities_are_the_reference(seed: int, n: int, now: int) -> None:
    """Also of experts that the model lacks."""
    rng, evictions = np.random.default_rng(seed), [ExpertMapEviction(2, 8), MapOrder(2, 8)]
    for size in (4, n):
        keys = rng.permutation(np.arange(8 * now, 24))[:size].astype(np.int32)
        priorities = rng.random(len(keys)).astype(np.float32) * rng.integers(0, 2, len(keys))
        for eviction in evictions:
            eviction.expect_map(keys, priorities.astype(np.float32), now, 8)
        np.testing.assert_array_equal(*(eviction.probabilities for eviction in evictions))


L, E, K = SHAPE.layers, SHAPE.experts, 2


def _policy(link: MatcherLink, **more: Any) -> MatcherPrefetch:
    more = {"eviction": Lru()} | more
    return MatcherPrefetch(link, E, NextGatePrefetch(L, E, K), **more)


def _seen(layer: int, spans: list[Span], lookahead: Callable[[int], Any] | None = None) -> LayerSeen:
    tokens = spans[-1].stop
    probabilities = np.random.default_rng(layer).dirichlet(np.ones(E), tokens).astype(np.float32)
    return LayerSeen(layer, spans, np.zeros((tokens, K), np.int64), probabilities, lookahead or (lambda d: None))


def _command(pairs: dict[int, float], hints: int = 0, layer: int = 1, mapped: bool = True) -> PrefetchCommand:
    keys, priorities = np.array(list(pairs), np.int32), np.array(list(pairs.values()), np.float32)
    return PrefetchCommand(1, layer, keys, priorities, hints, mapped)


def test_contexts() -> None:
    row = np.arange(SHAPE.hidden, dtype=np.float32)
    spans = [Span("a", 0, 2, False, row), Span("b", 2, 3, True, 2 * row)]
    seen = _seen(0, spans)
    with linked() as (link, _, channel):
        channel.prompt = True
        policy = _policy(link)
        assert policy.begin_forward(spans) == []
        assert list(policy.observed(seen)) == []
        policy.end("a")
        policy.begin_forward([Span("b", 0, 1, True), Span("a", 1, 2, False)])  # b goes on, another a begins
        first, observed, second = (pending.context for pending in channel.sent)
    assert second.iteration - first.iteration == 1
    assert (first.sequences.tolist(), second.sequences.tolist()) == ([0, 1], [1, 2])
    np.testing.assert_array_equal(first.embedding, [row, 2 * row])
    assert not second.embedding.any()
    assert (observed.iteration, observed.layer, observed.sequences.tolist()) == (first.iteration, 0, [0, 1])
    assert seen.probabilities is not None
    means = [seen.probabilities[:2].mean(0), seen.probabilities[2]]
    np.testing.assert_allclose(observed.probabilities, means, rtol=1e-6)


def test_commands_are_wanted_most_first_and_hints_are_for_eviction() -> None:
    eviction, spans = ExpertMapEviction(L, E), [Span("a", 0, 1, True)]
    with linked() as (link, _, channel):
        policy = _policy(link, eviction=eviction)
        policy.begin_forward(spans)
        # decided as layer 1 ran
        channel.sent[0].give(_command({3 * E + 1: 0.1, 3 * E: 0.2, 3 * E + 2: 0.05}, hints=1))
        first, second = Wanted(3 * E, pytest.approx(0.2)), Wanted(3 * E + 1, pytest.approx(0.1))
        assert list(policy.observed(_seen(1, spans))) == [first, second]
        assert link.report()["fallback_layers"] == 0
    assert eviction.probabilities[3 * E : 3 * E + 3] == pytest.approx([0.6, 0.3, 0.15])


def test_next_gate_steps_in() -> None:
    spans, scores = [Span("a", 0, 1, True)], np.zeros((1, E), np.float32)
    scores[0, 2], scores[0, 1] = 2.0, 1.0
    with linked() as (link, _, channel):
        policy = _policy(link)
        policy.begin_forward(spans)
        channel.sent[0].give(_command({3 * E: 0.2}))  # the last that the matcher could say
        channel.alive = False
        wanted = policy.observed(_seen(1, spans, lambda d: scores))
        guesses = [(2 * E + 2, "next-gate"), (2 * E + 1, "next-gate")]
        assert [(want.key, want.source) for want in wanted] == [(3 * E, ""), *guesses]
        assert link.report()["fallback_layers"] == 1


class FakePeer:
    """A shard that takes every message."""

    available = True

    def __init__(self) -> None:
        self.posted: list[PrefetchCommand] = []

    def post(self, command: PrefetchCommand) -> None:
        self.posted.append(command)


def test_commands_are_passed_on_to_the_owners() -> None:
    shards = Shards(
        ShardSettings(count=2),
        [PeerLink(LocalDirectory(), name=shard_name(1))],
        L,
        E,
        SHAPE.hidden,
        None,  # type: ignore[arg-type]
    )
    peer: Any = FakePeer()
    shards.peers = {"shard/1": peer}
    shards._owner = [("shard/1", peer) if key % 2 else None for key in range(L * E)]
    pairs = {8: 0.4, 9: 0.3, 11: 0.2, 10: 0.1, 13: 0.05}
    mine = shards.relay(_command(pairs, hints=2))
    (theirs,) = peer.posted
    assert theirs.keys.tolist() == [9, 11, 13]
    assert (theirs.hints, theirs.mapped, theirs.layer) == (1, True, 1)
    assert (mine.keys.tolist(), mine.hints) == ([8, 10], 1)
    peer.available = False  # then its experts are the lead's
    assert len(shards.relay(_command(pairs, hints=2)).keys) == len(pairs)
