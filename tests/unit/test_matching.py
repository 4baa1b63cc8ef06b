"""The lead's way to the matcher: it never waits, drops what is late, and says when it does without."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field

import numpy as np
import pytest
from map_contexts import SETTINGS, SHAPE, TOP_K, Iteration, forecasts, iteration, reference

from tiermoe.actors.engine.peers.matcher import MatcherLink, sequence_means, tell_eviction, wanted_keys
from tiermoe.actors.matcher import Matcher
from tiermoe.actors.policies.eviction import Lru
from tiermoe.actors.policies.fmoe import ExpertMapEviction
from tiermoe.errors import DeadlinePassed, PeerLost
from tiermoe.proto.messages import Context, HealthReport, Message, PrefetchCommand
from tiermoe.proto.peers import MATCHER, LocalDirectory, PeerLink

_PATIENCE_S = 20.0
_DEEP = 6 * 8  # keys of all layers


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
    report: HealthReport
    alive: bool = True
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
        return self.sent[-1]

    def close(self) -> None:
        self.alive = False


class FakeLink:
    """Leads to one `FakeChannel` after the other, as many as the test provides."""

    def __init__(self) -> None:
        self.channels: list[FakeChannel] = []
        self.report = HealthReport("matcher", asdict(SHAPE) | {"distance": SETTINGS.distance})

    def provide(self) -> FakeChannel:
        self.channels.append(FakeChannel(self.report))
        return self.channels[-1]

    def address(self) -> str | None:
        return "nowhere" if self.channels and self.channels[-1].alive else None

    def connect(self, address: str, transport: str, supply: object = None) -> FakeChannel:
        return self.channels[-1]


@contextmanager
def linked() -> Iterator[tuple[MatcherLink, FakeLink, FakeChannel]]:
    fake = FakeLink()
    channel = fake.provide()
    with closing(MatcherLink(fake, SETTINGS, SHAPE)) as link:  # type: ignore[arg-type]
        link.start()
        assert link.wait_until_found(_PATIENCE_S)
        yield link, fake, channel


def begin(link: MatcherLink, number: int) -> None:
    link.begin(number, np.zeros(1, np.int64), np.ones((1, SHAPE.hidden), np.float32))


def observe(link: MatcherLink, number: int, layer: int) -> None:
    link.observe(number, layer, np.zeros(1, np.int64), np.ones((1, SHAPE.experts), np.float32))


def command(number: int, layer: int, *keys: int, hints: int = 0) -> PrefetchCommand:
    priorities = np.arange(len(keys), 0, -1, dtype=np.float32)
    return PrefetchCommand(number, layer, np.array(keys, np.int32), priorities, hints)


class TestPublish:
    def test_what_is_sent(self) -> None:
        with linked() as (link, _, channel):
            begin(link, 3)
            observe(link, 3, 1)
            first, second = (pending.context for pending in channel.sent)
            assert (first.iteration, first.layer, first.embedding.shape, first.probabilities.shape) == (
                3, 0, (1, SHAPE.hidden), (1, 0),
            )  # fmt: skip
            assert (second.iteration, second.layer, second.embedding.shape, second.probabilities.shape) == (
                3, 1, (1, 0), (1, SHAPE.experts),
            )  # fmt: skip
            assert link.report()["published"] == 2

    def test_a_forward_that_it_joins_midway(self) -> None:
        """Nothing was published of its beginning: no other number of sequences is assumed."""
        with linked() as (link, _, channel):
            link.observe(0, 3, np.zeros(2, np.int64), np.ones((2, SHAPE.experts), np.float32))
            assert channel.sent[0].context.embedding.shape == (2, 0)

    def test_nothing_waits_for_a_matcher_that_does_not_answer(self) -> None:
        with linked() as (link, _, channel):
            for number in range(9):
                begin(link, number)
                for layer in range(SHAPE.layers):
                    observe(link, number, layer)
                    assert link.take(number, layer) == []
            report = link.report()
            assert len(channel.sent) == report["published"] == 2 * (SHAPE.layers + 1)
            assert report["dropped"] == 7 * (SHAPE.layers + 1)
            assert "slow" in report["problem"]


class TestTake:
    def test_commands_in_the_order_of_their_contexts(self) -> None:
        with linked() as (link, _, channel):
            begin(link, 0)
            observe(link, 0, 0)
            channel.sent[1].give(command(0, 1, 24, 25))
            assert link.take(0, 0) == []  # the one before is not there
            channel.sent[0].give(command(0, 0, 8, 16, hints=1))
            taken = link.take(0, 0)
            assert [c.keys.tolist() for c in taken] == [[8, 16], [24, 25]]
            assert [c.hints for c in taken] == [1, 0]
            assert link.take(0, 0) == []

    def test_what_is_late_is_dropped_and_counted(self) -> None:
        with linked() as (link, _, channel):
            begin(link, 0)
            observe(link, 0, 0)
            begin(link, 1)
            channel.sent[0].give(command(0, 0, 8))  # of the last iteration
            channel.sent[1].give(command(0, 1, 40))
            channel.sent[2].give(command(1, 0, 8, 17, 9, 18, 10, hints=2))
            taken = link.take(1, 1)  # layer 1 has its routing: keys 8 to 15 are of no use any more
            assert [(c.keys.tolist(), c.priorities.tolist(), c.hints) for c in taken] == [([17, 18], [4.0, 2.0], 1)]
            assert (link.report()["late"], link.report()["commands"]) == (2, 1)

    def test_only_hints_left_is_late(self) -> None:
        with linked() as (link, _, channel):
            begin(link, 0)
            channel.sent[0].give(command(0, 0, 8, 17, hints=1))
            assert link.take(0, 1) == []
            assert link.report()["late"] == 1

    def test_an_answer_after_its_deadline_is_late(self) -> None:
        with linked() as (link, _, channel):
            begin(link, 0)
            channel.sent[0].give(DeadlinePassed("no answer", "wait"))
            assert link.take(0, 0) == []
            assert link.report()["late"] == 1

    def test_no_answer_is_no_failure(self) -> None:
        with linked() as (link, _, channel):
            begin(link, 0)
            channel.sent[0].give(None)
            assert link.take(0, 0) == []
            assert (link.report()["silent"], link.report()["late"]) == (1, 0)


class TestSource:
    def test_no_maps_then_maps(self) -> None:
        with linked() as (link, _, channel):
            assert link.source == "next-gate"
            begin(link, 0)
            channel.sent[0].give(None)
            link.take(0, 0)
            assert "no maps" in str(link.problem)
            begin(link, 1)
            channel.sent[1].give(command(1, 0, 9))
            link.take(1, 0)
            assert link.problem is None
            assert link.source == "expert-map"

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
        with closing(MatcherLink(fake, SETTINGS, SHAPE)) as link:  # type: ignore[arg-type]
            link.start()
            until_s, tick = time.monotonic() + _PATIENCE_S, threading.Event()
            while "experts 9" not in str(link.problem):
                assert time.monotonic() < until_s
                tick.wait(0.005)
            assert link.source == "next-gate"


def test_with_a_real_matcher() -> None:
    """What comes back over a channel is what the maps say, whenever it is looked for."""
    board, policy = LocalDirectory(), reference()
    with (
        closing(Matcher(SETTINGS, SHAPE, TOP_K, board)),
        closing(MatcherLink(PeerLink(board, name=MATCHER), SETTINGS, SHAPE)) as link,
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
    link.begin(shown.number, shown.sequences, shown.embeddings)
    for layer in range(SHAPE.layers):
        link.observe(shown.number, layer, shown.sequences, shown.probabilities[layer])
    taken: list[PrefetchCommand] = []
    until_s = time.monotonic() + _PATIENCE_S
    while link.waiting:
        assert time.monotonic() < until_s
        link._asked[0].pending.result()  # waits for the event; `take` does not
        taken += link.take(shown.number, -1)
    assert len(taken) == count
    return taken


def test_sequence_means() -> None:
    values = np.array([[1, 2], [3, 4], [5, 6], [7, 9]], np.float32)
    assert sequence_means(values, [0, 1, 4]).tolist() == [[1, 2], [5, pytest.approx(19 / 3)]]
    assert sequence_means(values, [0, 1, 2, 3, 4]).tolist() == values.tolist()


def test_wanted_keys_leave_hints_out() -> None:
    given = PrefetchCommand(0, 0, np.array([3, 9, 4, 5], np.int32), np.array([1, 2, 1, 7], np.float32), hints=1)
    assert wanted_keys(given) == [9, 3, 4]


def test_eviction_is_told_what_a_map_says_and_nothing_else() -> None:
    eviction = ExpertMapEviction()
    for key in (8, 9, 10):
        eviction.admitted(key)
    keys, priorities = np.array([9, 8, 10], np.int32), np.array([0.35, 0.1, 0.05], np.float32)
    guess = PrefetchCommand(0, 0, keys, np.array([1, 2, 3], np.float32))
    tell_eviction(eviction, guess, 8)
    assert eviction.victims(3, lambda key: True) == [8, 9, 10]
    tell_eviction(eviction, PrefetchCommand(0, 0, keys, priorities, 2, mapped=True), 8)
    assert eviction.victims(3, lambda key: True) == [10, 8, 9]
    assert eviction._weight[9] == pytest.approx(0.7)  # layer 1 with none seen: l - l_now is 2
    tell_eviction(Lru(), guess, 8)
