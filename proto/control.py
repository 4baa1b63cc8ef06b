"""The control stream of a client: handshake, signs of life, and the news of the peer's death.

A peer that is killed breaks the stream within milliseconds. One that stops (SIGSTOP, a machine that is gone) does not
answer pings. Time in which this process itself was stopped does not count against the peer.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import ChannelRefused
from . import grpc_wire as wire
from .generated import channel_pb2
from .options import ChannelOptions

if TYPE_CHECKING:
    import grpc


class Control:
    """An open control stream.

    Args:
        address: of the server.
        channel: to it; closed with this.
        metadata: of the call.
        hello: the first message.

    Attributes:
        welcome: the server's answer.
        offset_ns: server's monotonic clock minus ours, at most too large by the time of one way.

    Raises:
        ChannelRefused: nobody answers in time, or the server refuses.
    """

    def __init__(
        self,
        address: str,
        channel: grpc.Channel,
        metadata: tuple[tuple[str, str], ...],
        hello: channel_pb2.Hello,
        options: ChannelOptions,
    ) -> None:
        self.address, self._channel, self._options = address, channel, options
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pong = 0
        self._lost: str | None = None
        self._code: Any = None
        self._closed = threading.Event()
        self._lose: Callable[[str], None] | None = None
        self._sent_ns = {0: time.monotonic_ns()}
        self.welcome: channel_pb2.Welcome | None = None
        self._outgoing.put(channel_pb2.ControlRequest(hello=hello).SerializeToString())
        self._call = channel.stream_stream(wire.CONTROL)(self._requests(), metadata=metadata)
        threading.Thread(target=self._read, name="channel-control", daemon=True).start()
        self._await_welcome()
        self._ping(1)  # the time of the hello holds that of connecting: this one measures the clocks
        self._await_pong(1, options.liveness_s)
        threading.Thread(target=self._watch, name="channel-heartbeat", daemon=True).start()

    def on_lost(self, lose: Callable[[str], None]) -> None:
        """Whom to tell when the peer is lost; at once where it already is."""
        with self._changed:
            self._lose = lose
            lost = self._lost
        if lost is not None:
            lose(lost)

    def close(self) -> None:
        """End the stream and its connection. Idempotent."""
        self._closed.set()
        self._outgoing.put(None)
        with contextlib.suppress(Exception):
            self._call.cancel()
        self._channel.close()

    def _requests(self) -> Iterator[bytes]:
        while (data := self._outgoing.get()) is not None:
            yield data

    def _read(self) -> None:
        import grpc

        try:
            for data in self._call:
                self._take(channel_pb2.ControlReply.FromString(data))
            self._end("the peer ended the connection")
        except grpc.RpcError as error:
            self._code = error.code()
            self._end(wire.reason(error))
        except Exception as error:  # what the peer sent is no control message
            self._end(f"the peer's control stream is malformed: {error}")

    def _take(self, reply: channel_pb2.ControlReply) -> None:
        now = time.monotonic_ns()
        with self._changed:
            if reply.HasField("welcome"):
                self.welcome = reply.welcome
                self.offset_ns = reply.welcome.clock_ns - self._sent_ns.pop(0, now)
            elif reply.HasField("pong"):
                self._pong = max(self._pong, reply.pong.sequence)
                sent = self._sent_ns.pop(reply.pong.sequence, None)
                if sent is not None:
                    self.offset_ns = min(self.offset_ns, reply.pong.clock_ns - sent)
            self._changed.notify_all()

    def _end(self, why: str) -> None:
        with self._changed:
            if self._lost is not None:
                return
            self._lost = why
            lose = self._lose
            self._changed.notify_all()
        self._closed.set()
        if lose is not None:
            lose(why)

    def _await_welcome(self) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self.welcome is not None or self._lost is not None, self._options.open_deadline_s
            )
            welcome, lost = self.welcome, self._lost
        if welcome is not None and welcome.version == wire.PROTOCOL_VERSION:
            return
        self.close()
        code = self._code.name if self._code is not None else ""
        if code == "UNAUTHENTICATED":
            raise ChannelRefused(f"{self.address} refused the token", "give the token that its server was started with")
        if code in ("FAILED_PRECONDITION", "INVALID_ARGUMENT") or welcome is not None:
            raise ChannelRefused(
                f"{self.address} speaks another version: {lost}", "install the same tiermoe everywhere"
            )
        if code == "RESOURCE_EXHAUSTED":
            raise ChannelRefused(f"{self.address} has too many connections", "close some, or raise max_connections")
        why = lost if lost is not None else f"no answer within {self._options.open_deadline_s:g} s"
        raise ChannelRefused(
            f"no channel server answers at {self.address}: {why}", "start the worker, and give the same TLS files"
        )

    def _watch(self) -> None:
        options = self._options
        patience_s = options.liveness_s - options.heartbeat_s
        sequence = 1
        while not self._closed.wait(options.heartbeat_s):
            sequence += 1
            begin = time.monotonic()
            self._ping(sequence)
            answered = self._await_pong(sequence, patience_s)
            took_s = time.monotonic() - begin
            if answered or took_s > 2 * patience_s:  # in the latter case it is us who were stopped
                continue
            self._end(f"no sign of life for {took_s + options.heartbeat_s:.1f} s")
            return

    def _ping(self, sequence: int) -> None:
        with self._changed:
            self._sent_ns = {sequence: time.monotonic_ns()}
        self._outgoing.put(channel_pb2.ControlRequest(ping=channel_pb2.Ping(sequence=sequence)).SerializeToString())

    def _await_pong(self, sequence: int, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._pong >= sequence or self._lost is not None, timeout_s)
