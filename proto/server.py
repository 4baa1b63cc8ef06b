"""The server's side of channels: `ChannelServer`.

Threads per connection: one answers pings, and one takes requests and runs the handler, so that a busy handler does not
make the process look dead.
"""

from __future__ import annotations

import atexit
import contextlib
import hmac
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, MessageError, RuntimeFailure
from . import grpc_transport as wire
from . import shm
from .channel import close_all as close_channels
from .codec import Pieces, from_bytes, to_bytes
from .messages import Hello, Ping, Pong, Welcome
from .options import Received, ServerOptions, Traffic
from .requests import Handler, answer

if TYPE_CHECKING:
    import grpc

_log = logging.getLogger(__name__)
_POLL_S = 1.0  # of a thread that waits on a ring
_CLOSE_S = 2.0
_REFUSALS = 8  # of calls without the token, at a time, that are told why
_open_servers: weakref.WeakSet[ChannelServer] = weakref.WeakSet()


@dataclass(eq=False)
class _Connection:
    """Of one client. traffic: counted by the one thread that serves it."""

    client: int
    traffic: Traffic = field(default_factory=Traffic)
    rings: shm.SharedRings | None = None
    thread: threading.Thread | None = None


class ChannelServer:
    """Listens from its construction to `close`.

    Args:
        handler: message -> answer, or None to acknowledge. Called by one thread per connection, concurrently. Its
            exceptions become the client's `RemoteFailure`.

    Raises:
        ConfigError: a TLS file cannot be read.
        RuntimeFailure: the port cannot be bound.
    """

    def __init__(self, handler: Handler, options: ServerOptions | None = None) -> None:
        self._options = options = options if options is not None else ServerOptions()
        self._handler = handler
        self._lock = threading.Lock()
        self._connections: dict[int, _Connection] = {}
        self._ended = Traffic()  # of connections that are over
        self._closed = False
        self._server, port = self._listen()
        self._address = f"{_in_brackets(options.host)}:{port}"
        _open_servers.add(self)

    def __enter__(self) -> ChannelServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """HOST:PORT for clients."""
        return self._address

    @property
    def connections(self) -> int:
        with self._lock:
            return len(self._connections)

    @property
    def traffic(self) -> Traffic:
        """Of all connections since the start."""
        found = Traffic()
        with self._lock:
            for one in (self._ended, *(connection.traffic for connection in self._connections.values())):
                found.add(one)
        return found

    def close(self) -> None:
        """End all connections; clients see `PeerLost`. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections = list(self._connections.values())
        if self._health is not None:
            self._health.enter_graceful_shutdown()
        for connection in connections:
            if connection.rings is not None:
                connection.rings.close()
        self._server.stop(grace=None).wait(_CLOSE_S)
        until = time.monotonic() + _CLOSE_S
        for connection in connections:
            if connection.thread is not None and connection.thread is not threading.current_thread():
                connection.thread.join(max(0.0, until - time.monotonic()))

    def _listen(self) -> tuple[grpc.Server, int]:
        import grpc

        options = self._options
        server = grpc.server(
            _DaemonThreads(),
            options=wire.settings(options.limits.max_message_bytes),
            interceptors=(_token_check(options.token),) if options.token else (),
            # a control stream and an exchange per connection, some calls of health, and those that are being refused
            maximum_concurrent_rpcs=2 * options.max_connections + 8 + _REFUSALS,
        )
        stream = grpc.stream_stream_rpc_method_handler
        methods = {wire.CONTROL: stream(self._control), wire.EXCHANGE: stream(self._exchange)}
        server.add_generic_rpc_handlers((_Methods(methods),))
        self._health = _add_health(server)
        where = f"{_in_brackets(options.host)}:0"
        try:
            if options.tls is not None:
                port = server.add_secure_port(where, wire.server_credentials(options.tls))
            else:
                port = server.add_insecure_port(where)
        except ConfigError:
            raise
        except RuntimeError as error:
            port, why = 0, str(error)
        else:
            why = "it is not an address of this host, or the certificate and the key do not match"
        if port == 0:
            raise RuntimeFailure(f"cannot listen on {options.host}: {why}", "choose another host")
        server.start()
        return server, port

    def _control(self, incoming: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Answer hello, then pings until the connection ends."""
        import grpc

        hello = self._hello(incoming, context)
        connection = _Connection(hello.client)
        nonce = b""
        if hello.ring_bytes and self._options.shared_memory:
            options = self._options
            found = shm.accept(
                hello.pid, hello.fd, hello.ring_bytes, options.spin_s, options.doze_s, options.helps
            )  # fmt: skip
            if found is not None:
                connection.rings, nonce = found
        with self._lock:
            full = len(self._connections) >= self._options.max_connections
            if not full and not self._closed:
                if hello.client in self._connections:
                    context.abort(grpc.StatusCode.ALREADY_EXISTS, "this client is connected")
                self._connections[hello.client] = connection
        if full:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many connections")
        try:
            if connection.rings is not None:
                connection.thread = threading.Thread(
                    target=self._serve_rings, args=(connection, connection.rings), name="channel-requests", daemon=True
                )
                connection.thread.start()
            most = self._options.limits.max_message_bytes
            yield to_bytes(Welcome(wire.PROTOCOL_VERSION, most, time.monotonic_ns(), nonce.hex()))
            for data in incoming:
                yield to_bytes(Pong(from_bytes(Ping, data).sequence, time.monotonic_ns()))
        finally:
            with self._lock:
                if self._connections.pop(hello.client, None) is not None:
                    self._ended.add(connection.traffic)
            if connection.rings is not None:
                connection.rings.close()
                connection.rings = found = None  # gRPC keeps this frame until a garbage collection

    def _hello(self, incoming: Iterator[bytes], context: Any) -> Hello:
        import grpc

        try:
            hello = from_bytes(Hello, next(incoming))
        except (MessageError, StopIteration):
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a control stream begins with hello")
        if hello.version != wire.PROTOCOL_VERSION:
            context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this server speaks version {wire.PROTOCOL_VERSION}, the client {hello.version}",
            )
        return hello

    def _exchange(self, incoming: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """Serve the requests of a client without shared memory."""
        import grpc

        client = wire.value_of(wire.CLIENT_KEY, context.invocation_metadata())
        with self._lock:
            known = {f"{number:016x}": found for number, found in self._connections.items()}
        connection = known.get(client or "")
        if connection is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "an exchange needs a control stream")
            raise AssertionError("abort raises")
        for data in incoming:
            if (pieces := self._answer(data, connection.traffic)) is not None:
                yield b"".join(pieces)

    def _answer(self, data: Received, traffic: Traffic) -> Pieces | None:
        """The answer to a frame, if it has one; both are counted."""
        began_s = time.perf_counter()
        traffic.received(len(data))
        found = answer(data, self._handler, self._options.limits)
        traffic.answering_s += time.perf_counter() - began_s
        if found is None:
            return None
        traffic.sent(found[1])
        return found[0]

    def _serve_rings(self, connection: _Connection, rings: shm.SharedRings) -> None:
        limits = self._options.limits
        try:
            while True:
                data = rings.requests.read(_POLL_S, limits.max_message_bytes, self._options.supply)
                if data is None or (pieces := self._answer(data, connection.traffic)) is None:
                    continue
                while not rings.replies.write(pieces, _POLL_S):
                    pass  # until the client takes its answers; its end closes the ring
        except shm.RingEnded as end:
            _log.debug("a connection ended: %s", end)
        finally:
            rings.close()


def _in_brackets(host: str) -> str:
    """A host for an address with a port: IPv6 stands in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _token_check(token: str) -> grpc.ServerInterceptor:
    """Refuses calls of every service by their metadata: before a message is received, however large it is.

    The handlers of calls without the token read nothing and end at once. More of them at a time than `_REFUSALS` are
    told that there is no such method, which takes no thread and none of the places of other calls.
    """
    import grpc

    expected = token.encode()
    places = threading.Semaphore(_REFUSALS)

    class TokenCheck(grpc.ServerInterceptor):
        def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
            given = wire.value_of(wire.TOKEN_KEY, details.invocation_metadata) or ""
            if hmac.compare_digest(expected, given.encode()):
                return continuation(details)
            if not places.acquire(blocking=False):
                return None

            def refuse(incoming: Iterator[bytes], context: Any) -> Iterator[bytes]:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong or no token")
                raise AssertionError("abort raises")

            weakref.finalize(refuse, places.release)  # also where gRPC refuses the call by itself
            return grpc.stream_stream_rpc_method_handler(refuse)  # a unary one would wait for the message

    return TokenCheck()


class _Methods:
    def __init__(self, methods: dict[str, Any]) -> None:
        self._methods = methods

    def service(self, details: Any) -> Any:
        return self._methods.get(details.method)


class _DaemonThreads(futures.Executor):
    """A daemon thread for each call: concurrent.futures would join its threads at exit, open streams included."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        future: futures.Future[Any] = futures.Future()

        def run() -> None:
            future.set_running_or_notify_cancel()
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="channel-grpc", daemon=True).start()
        return future


def _add_health(server: Any) -> Any:
    """Add the standard health service; None if its package is not installed, as on a bare GPU machine."""
    try:
        from grpc_health.v1 import health, health_pb2, health_pb2_grpc
    except ModuleNotFoundError:
        return None
    servicer = health.HealthServicer()
    for service in ("", wire.CHANNEL_SERVICE):
        servicer.set(service, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    return servicer


def close_all() -> None:
    """Close this process's channels, then its servers."""
    close_channels()
    for server in list(_open_servers):
        with contextlib.suppress(Exception):
            server.close()


atexit.register(close_all)
