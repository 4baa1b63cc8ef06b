"""The matcher: contexts in, commands out, and a store that outlives it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from map_contexts import MAPS, SETTINGS, SHAPE, TOP_K, Iteration, forecasts, iteration, reference

from tiermoe.actors.matcher import Matcher, ShardLinks
from tiermoe.actors.policies.fmoe import Forecast
from tiermoe.actors.policies.sharding import shard_of
from tiermoe.actors.settings import ShardSettings
from tiermoe.actors.store.artifacts import save_maps
from tiermoe.errors import ConfigError, RemoteFailure, StoreError
from tiermoe.proto.channel import open_channel
from tiermoe.proto.messages import Context, HealthReport, HealthRequest, Message, PrefetchCommand, StoreRequest
from tiermoe.proto.peers import MATCHER, LocalDirectory, PeerLink, shard_name
from tiermoe.proto.server import ChannelServer

_PATIENCE_S = 20.0


def matcher(**options: Any) -> Matcher:
    directory = options.pop("directory", LocalDirectory())
    return Matcher(options.pop("settings", SETTINGS), MAPS, SHAPE, TOP_K, directory, **options)


@pytest.fixture
def served() -> Iterator[Matcher]:
    with closing(matcher()) as it:
        yield it


def show(it: Matcher, shown: Iteration) -> list[Message | None]:
    return [it.handle(context) for context in shown.contexts()]


def check(answer: Message | None, forecast: Forecast | None, number: int) -> None:
    if forecast is None:
        assert answer is None
        return
    assert isinstance(answer, PrefetchCommand)
    assert (answer.iteration, answer.layer) == (number, forecast.now)
    assert answer.keys.tolist() == forecast.keys.tolist()
    assert answer.priorities.tolist() == forecast.priorities.tolist()
    assert answer.hints == len(forecast.keys) - forecast.wanted


@pytest.mark.parametrize("sequences", [1, 3])
def test_answers_are_the_forecasts(served: Matcher, sequences: int) -> None:
    policy = reference()
    for number in range(12):  # fills the store over its capacity when there are three
        shown = iteration(number, sequences)
        for answer, forecast in zip(show(served, shown), forecasts(policy, shown), strict=True):
            check(answer, forecast, number)
    health = served.health()
    assert health["maps"] == min(20, 12 * sequences)
    assert (health["iterations"], health["stored"]) == (12, 12 * sequences)
    assert -1.0 <= health["mean_semantic_score"] <= 1.0
    assert 0.0 < health["mean_trajectory_score"] <= 1.0


def test_over_a_channel() -> None:
    board, policy = LocalDirectory(), reference()
    with closing(matcher(directory=board)), open_channel(board.addresses[MATCHER]) as channel:
        for number in range(3):
            shown = iteration(number)
            for context, forecast in zip(shown.contexts(), forecasts(policy, shown), strict=True):
                check(channel.call(context, 5.0), forecast, number)
        report = channel.call(HealthRequest(), 5.0)
        assert isinstance(report, HealthReport)
        assert report.role == "matcher"
        assert report.details["maps"] == 3
        with pytest.raises(RemoteFailure, match="does not answer"):
            channel.call(StoreRequest(0, np.zeros(1, np.int32)), 5.0)


def test_unknown_and_unfinished_iterations_are_not_stored(served: Matcher) -> None:
    for context in iteration(0).contexts()[:3]:  # it failed
        served.handle(context)
    show(served, iteration(1))
    assert served.health()["maps"] == 1
    middle = iteration(2).contexts()[3:]  # the matcher started during it
    assert [served.handle(context) for context in middle] == [None] * 4
    assert served.health()["unknown_iterations"] == 4
    served.handle(iteration(3).first())
    assert served.handle(iteration(3, 2).at(0)) is None  # other sequences
    assert served.health()["unknown_iterations"] == 5
    assert served.health()["maps"] == 1


def test_what_is_not_for_it_is_refused(served: Matcher) -> None:
    shown = iteration(0)
    good, nothing = shown.first(), np.empty((1, 0), np.float32)
    p = shown.probabilities
    narrow = np.ones((1, 5), np.float32)
    for layer, sequences, embedding, probabilities, why in (
        (0, good.sequences, narrow, nothing, "another model"),
        (0, good.sequences, nothing, narrow, "another model"),
        (0, good.sequences, good.embedding, p[0], "both"),
        (0, good.sequences, nothing, nothing, "neither"),
        (SHAPE.layers, good.sequences, nothing, p[0], "layer 6"),
        (SHAPE.layers - 1, good.sequences, nothing, np.concatenate(p[:2], axis=1), "2 layers from layer 5"),
        (0, good.sequences[:0], good.embedding[:0], nothing[:0], "0 sequences"),
    ):
        with pytest.raises(ConfigError, match=why):
            served.handle(Context(0, layer, sequences, embedding, probabilities))
    served.handle(good)
    served.handle(shown.at(0))
    with pytest.raises(ConfigError, match="out of order"):
        served.handle(shown.at(0))
    show(served, iteration(1))
    assert served.health()["maps"] == 1


class TestStore:
    def test_a_restart_begins_with_the_snapshot(self, tmp_path: Path) -> None:
        path = str(tmp_path / "maps")
        with closing(matcher(snapshot=path)) as first:
            show(first, iteration(0))
            assert first.save()
            assert not first.save()  # nothing changed
            show(first, iteration(1))
        with closing(matcher(snapshot=path)) as second:
            assert (second.health()["maps"], second.health()["begun_from"]) == (2, "snapshot")
            policy = reference()
            for number in range(2):
                forecasts(policy, iteration(number))
            for answer, forecast in zip(show(second, iteration(2)), forecasts(policy, iteration(2)), strict=True):
                check(answer, forecast, 2)

    def test_an_unusable_snapshot_is_moved_aside(self, tmp_path: Path) -> None:
        path = tmp_path / "maps"
        path.write_bytes(b"no safetensors")
        with closing(matcher(snapshot=str(path))) as it:
            health = it.health()
            assert health["maps"] == 0
            assert "cannot be read" in health["snapshot_problem"]
            assert (tmp_path / "maps.unusable").read_bytes() == b"no safetensors"
            show(it, iteration(0))
        with closing(matcher(snapshot=str(path))) as it:
            assert it.health()["maps"] == 1

    def test_warm_start_from_a_file(self, tmp_path: Path) -> None:
        policy = reference()
        forecasts(policy, iteration(0))
        save_maps(tmp_path / "warm", policy.store.arrays(), SHAPE)
        with closing(matcher(settings=SETTINGS.model_copy(update={"warm": str(tmp_path / "warm")}))) as it:
            assert (it.health()["maps"], it.health()["begun_from"]) == (1, "file")
        with pytest.raises(StoreError, match="cannot be read"):
            matcher(settings=SETTINGS.model_copy(update={"warm": str(tmp_path / "none")}))

    def test_a_snapshot_that_cannot_be_written_does_not_stop_it(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with closing(matcher(snapshot=str(tmp_path / "file" / "maps"))) as it:
            show(it, iteration(0))
            with pytest.raises(StoreError, match="cannot be written"):
                it.save()
            show(it, iteration(1))
            assert it.health()["maps"] == 2


class FakeShard:
    """Keeps the commands that it is posted."""

    def __init__(self, index: int, board: LocalDirectory) -> None:
        self.commands: list[PrefetchCommand] = []
        self.came = threading.Semaphore(0)
        self._index = index
        self.server = ChannelServer(self._handle)
        board.register(shard_name(index), self.server.address)

    def _handle(self, message: Message) -> Message | None:
        if isinstance(message, HealthRequest):
            return HealthReport("shard", {"index": self._index})
        assert isinstance(message, PrefetchCommand)
        self.commands.append(message)
        self.came.release()
        return None

    def close(self) -> None:
        self.server.close()


def test_each_shard_gets_its_experts_and_the_lead_the_rest() -> None:
    board, sharding = LocalDirectory(), ShardSettings(count=3)
    with ExitStack() as stack:
        shards = [stack.enter_context(closing(FakeShard(i, board))) for i in (1, 2)]
        links = [PeerLink(board, name=shard_name(i)) for i in (1, 2)]
        it = stack.enter_context(closing(matcher(shards=ShardLinks(sharding, links))))
        assert all(shard.wait(_PATIENCE_S) for shard in it._shards)
        policy = reference()
        for number in range(2):
            forecasts(policy, iteration(number))
            show(it, iteration(number))
        for shard in shards:
            for _ in range(4):  # of the second iteration: one at its begin, three at the layers 0 to 2
                assert shard.came.acquire(timeout=_PATIENCE_S)
            shard.commands.clear()
        shown = iteration(2)
        forecast = policy.begin(shown.embeddings)
        answer = it.handle(shown.first())
        assert forecast is not None
        assert isinstance(answer, PrefetchCommand)
        assert all(shard.came.acquire(timeout=_PATIENCE_S) for shard in shards)
        for index, command in enumerate((answer, shards[0].commands[0], shards[1].commands[0])):
            mine = [shard_of(*divmod(key, 8), 8, 3) == index for key in forecast.keys.tolist()]
            assert command.keys.tolist() == forecast.keys[mine].tolist()
            assert command.priorities.tolist() == forecast.priorities[mine].tolist()
            assert command.hints == sum(mine[forecast.wanted :])
            assert (command.iteration, command.layer) == (2, 0)


def test_the_lead_gets_the_experts_of_a_lost_shard() -> None:
    board = LocalDirectory()
    links = [PeerLink(board, name=shard_name(1))]
    with closing(matcher(shards=ShardLinks(ShardSettings(count=2), links))) as it:  # the shard never comes
        show(it, iteration(0))
        answer = it.handle(iteration(1).first())
        assert isinstance(answer, PrefetchCommand)
        assert len(answer.keys) == 3 * SHAPE.experts
        assert it.health()["shards_connected"] == 0
