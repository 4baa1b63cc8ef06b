"""Connections that are made again: what is seen of them while they come and go."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from channel_peer import wait_until

from tiermoe.errors import PeerLost
from tiermoe.proto.messages import HealthReport, Message
from tiermoe.proto.options import ServerOptions
from tiermoe.proto.peers import LocalDirectory, PeerLink, Reconnecting, ReconnectingChannel
from tiermoe.proto.server import ChannelServer

_SOON_S = 5.0


class Line:
    """A connection that ends when a test says so."""

    closed_because: str | None = None

    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


def test_a_lost_connection_is_closed_and_made_again() -> None:
    made: list[Line] = []
    events: list[str] = []
    gate = threading.Event()

    def connect() -> Line | None:
        if not gate.is_set():
            raise PeerLost("it is not up", "start it")
        made.append(Line())
        return made[-1]

    peer = Reconnecting(
        "x", connect, on_connect=lambda: events.append("connected"), on_loss=lambda why: events.append(why)
    )
    with closing(peer):
        assert peer.problem == "it registered no address"
        peer.start()
        wait_until(lambda: peer.problem == "it is not up; start it")
        assert peer.current is None
        assert peer.lost_s is not None
        gate.set()
        assert peer.wait(_SOON_S)
        assert (peer.current, peer.lost_s, peer.losses) == (made[0], None, 0)
        gate.clear()
        made[0].closed_because = "it died"
        assert peer.current is None
        assert (peer.losses, events) == (1, ["connected", "it died"])
        assert made[0].closed.wait(_SOON_S)
        peer.lost(made[0], "again")  # another took its place, or none: nothing happens
        gate.set()
        assert peer.wait(_SOON_S)
        assert peer.current is made[1]
    assert made[1].closed.is_set()
    assert peer.current is None
    peer.close()


@contextmanager
def _serving(role: str, index: int) -> Iterator[PeerLink]:
    def handle(message: Message) -> Message | None:
        return HealthReport(role, {"index": index})

    board = LocalDirectory()
    with ChannelServer(handle, ServerOptions()) as server:
        board.register("shard/1", server.address)
        yield PeerLink(board, name="shard/1")


@pytest.mark.parametrize(
    ("role", "index", "problem"),
    [("shard", 1, None), ("ndp", 1, "answers as something else"), ("shard", 2, "has index 2, this side 1")],
)
def test_the_peer_must_be_the_one_that_is_meant(role: str, index: int, problem: str | None) -> None:
    with _serving(role, index) as link, closing(ReconnectingChannel("shard", link, "auto", {"index": 1})) as peer:
        peer.start()
        if problem is None:
            assert peer.wait(_SOON_S)
            assert peer.post(HealthReport("lead", {}))
        else:
            wait_until(lambda: peer.problem == f"{link.address()} {problem}")
            assert not peer.post(HealthReport("lead", {}))
