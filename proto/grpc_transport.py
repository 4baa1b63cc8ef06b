"""The gRPC side of a client: names, settings and credentials, the control stream, and the stream of frames.

The control stream detects a lost peer: a killed one breaks the stream, a stopped one misses its pings. Time in which
this process itself was stopped does not count. grpc is imported when first used.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ChannelRefused
from .codec import Pieces, from_bytes, to_bytes
from .messages import Hello, Ping, Pong, Welcome
from .options import HEARTBEAT_S, ChannelOptions, Received
from .tls import TlsFiles

if TYPE_CHECKING:
    import grpc

PROTOCOL_VERSION = 3
CHANNEL_SERVICE = "tiermoe.v1.Channel"
CONTROL, EXCHANGE = f"/{CHANNEL_SERVICE}/Control", f"/{CHANNEL_SERVICE}/Exchange"
TOKEN_KEY = "tiermoe-token"
CLIENT_KEY = "tiermoe-client"
_OVERHEAD = 64 * 1024  # of gRPC, above the largest message
_LATE_S = 0.1  # a wait that ends later than this says that this process was not run


def settings(max_message_bytes: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_send_message_length", max_message_bytes + _OVERHEAD),
        ("grpc.max_receive_message_length", max_message_bytes + _OVERHEAD),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.so_reuseport", 0),
        ("grpc.enable_http_proxy", 0),
        # one connection per channel, shared with no other
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
    ]


def dial(address: str, options: ChannelOptions) -> grpc.Channel:
    """A gRPC channel to an address, connected at first use; raises ConfigError if a TLS file cannot be read."""
    import grpc

    wire = settings(options.limits.max_message_bytes)
    if options.tls is None:
        return grpc.insecure_channel(address, options=wire)
    if options.tls.server_name is not None:
        wire.append(("grpc.ssl_target_name_override", options.tls.server_name))
    ca, certificate, key = options.tls.read()
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, certificate), options=wire)


def server_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """The certificate of a server; with a CA, clients must show one too. Raises ConfigError as `dial` does."""
    import grpc

    ca, certificate, key = tls.read()
    return grpc.ssl_server_credentials([(key, certificate)], root_certificates=ca, require_client_auth=ca is not None)


def metadata(options: ChannelOptions, client: int) -> tuple[tuple[str, str], ...]:
    token = () if options.token is None else ((TOKEN_KEY, options.token),)
    return (*token, (CLIENT_KEY, f"{client:016x}"))


def value_of(key: str, given: Iterable[Any]) -> str | None:
    return next((value for name, value in given if name == key), None)


def reason(error: Any) -> str:
    """Why a call ended, by gRPC."""
    return f"{error.code().name.lower()}: {error.details()}"


class ControlStream:
    """An open control stream to the server at `address`; owns `channel`.

    Attributes:
        welcome: the server's answer to `hello`.
        offset_ns: server's monotonic clock minus ours, at most one way's time too large.

    Raises:
        ChannelRefused: no server answers in time, or the server refuses.
    """

    def __init__(
        self,
        address: str,
        channel: grpc.Channel,
        metadata: tuple[tuple[str, str], ...],
        hello: Hello,
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
        self.welcome: Welcome | None = None
        self._outgoing.put(to_bytes(hello))
        self._call = channel.stream_stream(CONTROL)(self._requests(), metadata=metadata)
        threading.Thread(target=self._read, name="channel-control", daemon=True).start()
        self._await_welcome()
        self._ping(1)  # measures the clocks' offset: the hello's time includes connecting
        self._await_pong(1, options.liveness_s)
        threading.Thread(target=self._watch, name="channel-heartbeat", daemon=True).start()

    def on_lost(self, lose: Callable[[str], None]) -> None:
        """Call `lose` with the reason once the peer is lost; at once if it already is."""
        with self._changed:
            self._lose = lose
            lost = self._lost
        if lost is not None:
            lose(lost)

    def close(self) -> None:
        """Close the stream and its connection. Idempotent."""
        with self._changed:
            self._lose = None
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
                self._take(data)
            self._end("the peer ended the connection")
        except grpc.RpcError as error:
            self._code = error.code()
            self._end(reason(error))
        except Exception as error:  # what the peer sent is no control message
            self._end(f"the peer's control stream is malformed: {error}")

    def _take(self, data: bytes) -> None:
        now = time.monotonic_ns()
        with self._changed:
            if self.welcome is None:
                self.welcome = from_bytes(Welcome, data)
                self.offset_ns = self.welcome.clock_ns - self._sent_ns.pop(0, now)
            else:
                pong = from_bytes(Pong, data)
                self._pong = max(self._pong, pong.sequence)
                sent = self._sent_ns.pop(pong.sequence, None)
                if sent is not None:
                    self.offset_ns = min(self.offset_ns, pong.clock_ns - sent)
            self._changed.notify_all()

    def _end(self, why: str) -> None:
        with self._changed:
            if self._lost is not None:
                return
            self._lost = why
            lose, self._lose = self._lose, None  # a channel that is over frees its rings without a garbage collection
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
        if welcome is not None and welcome.version == PROTOCOL_VERSION:
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
        patience_s = self._options.liveness_s - HEARTBEAT_S
        sequence = 1
        while not self._closed.wait(HEARTBEAT_S):
            sequence += 1
            begin = time.monotonic()
            self._ping(sequence)
            answered = self._await_pong(sequence, patience_s)
            took_s = time.monotonic() - begin
            if answered or took_s > patience_s + _LATE_S:  # the latter: this process had no time either; ask again
                continue
            self._end(f"no sign of life for {took_s + HEARTBEAT_S:.1f} s")
            return

    def _ping(self, sequence: int) -> None:
        with self._changed:
            self._sent_ns = {sequence: time.monotonic_ns()}
        self._outgoing.put(to_bytes(Ping(sequence)))

    def _await_pong(self, sequence: int, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._pong >= sequence or self._lost is not None, timeout_s)


class GrpcTransport:
    """A gRPC bidirectional stream; at most `max_queued` bytes wait to be sent, or one message."""

    name: Literal["grpc"] = "grpc"
    pull = False

    def __init__(self, channel: grpc.Channel, metadata: tuple[tuple[str, str], ...], max_queued: int) -> None:
        self._channel, self._metadata, self._max_queued = channel, metadata, max_queued
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._space = threading.Condition(threading.Lock())
        self._queued = 0
        self._waiting = False
        self._closed = False
        self.whole = sys.maxsize

    def start(self, deliver: Callable[[Received], None], lose: Callable[[str], None]) -> None:
        def arrived(data: bytes) -> bool:
            # On gRPC's own thread: one wake-up fewer than from `_read`.
            deliver(data)
            return True

        exchange = self._channel.stream_stream(EXCHANGE, response_deserializer=arrived)
        self._call = exchange(self._outgoing(), metadata=self._metadata)
        threading.Thread(target=self._read, args=(lose,), name="channel-replies", daemon=True).start()

    def send(self, pieces: Pieces, size: int, timeout_s: float, stall_s: float) -> bool:
        with self._space:
            if self._queued and self._queued + size > self._max_queued:
                self._waiting = True
                self._space.wait_for(
                    lambda: self._closed or self._queued == 0 or self._queued + size <= self._max_queued, timeout_s
                )
                self._waiting = False
                if self._queued and self._queued + size > self._max_queued:
                    return False
            if self._closed:
                return False
            self._queued += size
        self._queue.put(b"".join(pieces))
        return True

    def receive(self, timeout_s: float) -> Received | None:
        """Not used: answers are delivered."""
        return None

    def close(self) -> None:
        with self._space:
            self._closed = True
            self._space.notify_all()
        self._queue.put(None)
        with contextlib.suppress(Exception):
            self._call.cancel()

    def _outgoing(self) -> Iterator[bytes]:
        """gRPC asks for the next frame when the previous one is sent."""
        while (data := self._queue.get()) is not None:
            with self._space:
                self._queued -= len(data)
                if self._waiting:
                    self._space.notify_all()
            yield data

    def _read(self, lose: Callable[[str], None]) -> None:
        import grpc

        try:
            for _ in self._call:
                pass
            lose("the peer ended the stream")
        except grpc.RpcError as error:
            lose(reason(error))
