"""The two ways that frames go from client to server and back: `RingLink` and `StreamLink`."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal, Protocol

from . import grpc_wire as wire
from .frame import Pieces
from .options import Received, Supply
from .shm import SharedRings

if TYPE_CHECKING:
    import grpc

Deliver = Callable[[Received], None]
Lose = Callable[[str], None]


class Link(Protocol):
    """One of the ways.

    Attributes:
        pull: whether answers are there for `receive` to take; else they are delivered.
        whole: longer frames are sent while the peer takes them out.
    """

    @property
    def name(self) -> Literal["shm", "grpc"]:
        """Of the transport."""

    pull: bool
    whole: int

    def start(self, deliver: Deliver, lose: Lose) -> None:
        """Called once, before anything is sent."""

    def send(self, pieces: Pieces, size: int, timeout_s: float, stall_s: float) -> bool:
        """Send a frame; one thread at a time. False: the way stayed full.

        Args:
            pieces, size: the frame.
            timeout_s: how long to wait for space.
            stall_s: how long to wait in the middle of a frame longer than `whole`; then the way is broken.
        """

    def receive(self, timeout_s: float) -> Received | None:
        """Take a frame; one thread at a time. None: none came in time."""

    def close(self) -> None:
        """End it and wake whoever waits. Idempotent."""


class RingLink:
    """Shared memory.

    Args:
        rings: of both directions.
        most: bytes of a frame.
        supply: where frames that arrive are put.
    """

    name: Literal["shm"] = "shm"
    pull = True

    def __init__(self, rings: SharedRings, most: int, supply: Supply | None = None) -> None:
        self._rings, self._most, self._supply = rings, most, supply
        self.send_ring, self.receive_ring = rings.requests, rings.replies
        self.whole = self.send_ring.whole

    def start(self, deliver: Deliver, lose: Lose) -> None:
        """Nothing: who waits reads."""

    def send(self, pieces: Pieces, size: int, timeout_s: float, stall_s: float) -> bool:
        return self.send_ring.write(pieces, timeout_s, stall_s)

    def receive(self, timeout_s: float) -> Received | None:
        return self.receive_ring.read(timeout_s, self._most, self._supply)

    def close(self) -> None:
        self._rings.close()


class StreamLink:
    """A gRPC bidirectional stream.

    Args:
        channel: connected.
        metadata: of the call.
        most_queued: bytes that may wait to be sent, one message in any case.
    """

    name: Literal["grpc"] = "grpc"
    pull = False

    def __init__(self, channel: grpc.Channel, metadata: tuple[tuple[str, str], ...], most_queued: int) -> None:
        self._channel, self._metadata, self._most_queued = channel, metadata, most_queued
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._space = threading.Condition(threading.Lock())
        self._queued = 0
        self._waiting = False
        self._closed = False
        self.whole = sys.maxsize

    def start(self, deliver: Deliver, lose: Lose) -> None:
        def arrived(data: bytes) -> bool:
            # gRPC's own thread is here with the bytes: from it the answer is one wake-up away from who waits for it,
            # from the thread below it is two
            deliver(data)
            return True

        exchange = self._channel.stream_stream(wire.EXCHANGE, response_deserializer=arrived)
        self._call = exchange(self._outgoing(), metadata=self._metadata)
        threading.Thread(target=self._read, args=(lose,), name="channel-replies", daemon=True).start()

    def send(self, pieces: Pieces, size: int, timeout_s: float, stall_s: float) -> bool:
        with self._space:
            if self._queued and self._queued + size > self._most_queued:
                self._waiting = True
                self._space.wait_for(
                    lambda: self._closed or self._queued == 0 or self._queued + size <= self._most_queued, timeout_s
                )
                self._waiting = False
                if self._queued and self._queued + size > self._most_queued:
                    return False
            if self._closed:
                return False
            self._queued += size
        self._queue.put(b"".join(pieces))
        return True

    def receive(self, timeout_s: float) -> Received | None:
        """Never asked: answers are delivered."""
        return None

    def close(self) -> None:
        with self._space:
            self._closed = True
            self._space.notify_all()
        self._queue.put(None)
        with contextlib.suppress(Exception):
            self._call.cancel()

    def _outgoing(self) -> Iterator[bytes]:
        """gRPC asks for the next frame when the one before is on its way."""
        while (data := self._queue.get()) is not None:
            with self._space:
                self._queued -= len(data)
                if self._waiting:
                    self._space.notify_all()
            yield data

    def _read(self, lose: Lose) -> None:
        """Asks gRPC for one answer after the other."""
        import grpc

        try:
            for _ in self._call:
                pass
            lose("the peer ended the stream")
        except grpc.RpcError as error:
            lose(wire.reason(error))
