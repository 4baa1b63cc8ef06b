"""The address of `tiermoe serve`: reserved before anything starts, and answered from then on.

    ServerSocket ("starting, N seconds left")  ->  the edge, once it is ready  ->  ServerSocket ("the server ends")
                                                   ServerSocket (while the edge cannot be restarted)

There is one listening socket, and the process of `tiermoe serve` holds it until it ends. It answers on it first. Then
the edge (`edge.py`) gets its descriptor: while an edge that died is started again, connections wait in the socket's
queue, and no client is refused or reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

import uvicorn
from fastapi import Response
from fastapi.responses import JSONResponse

from ...errors import ConfigError, RuntimeFailure
from ...proto.tls import TlsFiles
from .connections import BoundedConnection
from .guard import READS, App, Message, Receive, Scope, Send
from .origins import PROBED, Access, headers_of, path_of
from .refusals import ApiError, NotReady

SILENCE_S = 60  # of a connection; see `connections.py`
DRAIN_S = 20  # for requests under way when the server ends
BACKLOG = 2048  # connections that wait to be accepted
_END_S = 3.0
_TAKEN_S = 1.0  # for connections that the server socket has got and not answered
_STEP_S = 0.01
_GIVE_S = 30.0  # in which an edge gets standard error
_MARK = b"\0"  # a descriptor needs a byte to travel with
_STANDARD_ERROR = 2
_CLOSE = {"Connection": "close"}
Progress = Callable[[], tuple[str, float | None] | None]  # the current step of the start, seconds left


def server_options(tls: TlsFiles | None) -> dict[str, Any]:
    """uvicorn's options of whatever answers at the address: its connections, and HTTPS.

    Args:
        tls: with a CA, clients need a certificate of it. None: HTTP.
    """
    found: dict[str, Any] = {
        "interface": "asgi3", "http": BoundedConnection, "ws": "none", "lifespan": "off", "log_config": None,
        "access_log": False, "log_level": "error", "timeout_keep_alive": SILENCE_S, "backlog": BACKLOG,
    }  # fmt: skip
    if tls is not None:
        found |= {"ssl_keyfile": tls.key, "ssl_certfile": tls.certificate, "ssl_ca_certs": tls.ca}
        found |= {"ssl_cert_reqs": ssl.CERT_REQUIRED if tls.ca else ssl.CERT_NONE}
    return found


class ServerSocket:
    """Where the server listens, inside the `with` block.

    Args:
        host: address to bind.
        port: 0: one that is free.
        tls: for HTTPS; with a CA, clients need a certificate of it. None: HTTP.
        access: which web pages may read its answers.

    Attributes:
        port: the one that it got.
        url: of the server.
        tls, access: as given.
        name: by which the edge asks for the descriptors (`Descriptors`).

    Raises:
        ConfigError: the address is not this machine's, or the port is taken.
    """

    def __init__(self, host: str, port: int, tls: TlsFiles | None = None, access: Access | None = None) -> None:
        self.host, self.tls, self.access = host, tls, access
        self._listener = _bound(host, port)
        self.port = int(self._listener.getsockname()[1])
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http{'s' if tls is not None else ''}://{shown}:{self.port}"
        self._progress: Progress = lambda: None
        self._answering: tuple[uvicorn.Server, threading.Thread] | None = None
        self._why: str | None = None  # it answers, once it has handed over
        # in Linux's abstract namespace: no file that another user could replace, and none is left
        self.name = f"\0tiermoe-{secrets.token_hex(16)}"
        self._asked = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._lock = threading.Lock()
        self._edge: socket.socket | None = None  # the last one that asked
        self._waits = False  # whether it has not got the listening socket
        self._handed_over = False  # whether an edge gets the listening socket

    def __enter__(self) -> ServerSocket:
        self._asked.bind(self.name)
        self._asked.listen()
        threading.Thread(target=self._give, name="tiermoe-descriptors", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_answering()
        with contextlib.suppress(OSError):
            self._asked.shutdown(socket.SHUT_RDWR)  # wakes the thread
        with self._lock:
            if self._edge is not None:
                self._edge.close()
        self._asked.close()
        self._listener.close()

    def open(self, progress: Progress) -> None:
        """Answer from now on: /ready is 503 with the seconds left, /health is 200, and all else 503.

        Args:
            progress: asked at each answer.
        """
        self._progress = progress
        self._answer()

    def hand_over(self) -> None:
        """Answer the open connections, and leave all others to the edge, and to each that is started after it.

        Idempotent, bounded.
        """
        self._stop_answering()
        with self._lock:
            self._handed_over = True
            self._give_listener()

    def answer_unavailable(self, why: str) -> None:
        """Answer again, as the edge does not: 503 with the reason. It gets the listening socket at `hand_over`.

        Args:
            why: for everybody, with or without a key.
        """
        with self._lock:
            self._handed_over, self._why = False, why
        self._answer()

    def end(self) -> None:
        """The server ends: an edge gets the listening socket no more, and every client is told so."""
        self.answer_unavailable("the server ends")

    def _answer(self) -> None:
        if self._answering is not None:
            return
        config = uvicorn.Config(self._application, timeout_graceful_shutdown=1, **server_options(self.tls))
        server, listener = _Server(config), self._listener.dup()
        thread = threading.Thread(target=server.run, args=([listener],), name="tiermoe-server-socket", daemon=True)
        self._answering = server, thread
        thread.start()

    def _stop_answering(self) -> None:
        answering, self._answering = self._answering, None
        if answering is not None:
            server, thread = answering
            server.should_exit = True
            thread.join(_END_S)

    def _give(self) -> None:
        """Give the edge that asks the descriptors; a thread."""
        while True:
            try:
                edge, _ = self._asked.accept()
            except OSError:
                return
            if _user(edge) != os.getuid():
                edge.close()
                continue
            with self._lock:
                if self._edge is not None:  # it is gone
                    self._edge.close()
                self._edge, self._waits = edge, True
                _send(edge, _STANDARD_ERROR)
                if self._handed_over:
                    self._give_listener()

    def _give_listener(self) -> None:
        if self._edge is not None and self._waits:
            self._waits = False
            _send(self._edge, self._listener.fileno())

    async def _application(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._why is not None:
            waits = NotReady(self._why)
        else:
            step, left_s = self._progress() or ("the runtime is prepared", None)
            waits = NotReady(f"the server starts: {step}", left_s)
        path, headers, access = path_of(scope), headers_of(scope), self.access or Access()
        # a page learns nothing here but that it has to wait; what it may do is checked once there is something to do
        added = access.answer_headers(headers)

        async def readable(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        answer: App
        if access.is_preflight(scope, headers):
            permission = {name.decode(): value.decode() for name, value in access.permission(headers)}
            answer = Response(status_code=204, headers=permission | _CLOSE)
        else:
            probed = scope["method"] in READS and path in PROBED
            answer = _probed(path, waits) if probed else _refused(path, waits)
        await answer(scope, receive, readable)


class Descriptors:
    """What an edge gets of the process of `tiermoe serve`: its standard error, and the socket to listen on.

    Args:
        name: the server socket's.

    Raises:
        RuntimeFailure: that process has ended, or is another user's.
    """

    def __init__(self, name: str) -> None:
        self._server_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._server_socket.settimeout(_GIVE_S)
            self._server_socket.connect(name)
            if _user(self._server_socket) != os.getuid():
                raise ConnectionError("it is another user's")
            self.standard_error = self._next()
            self._server_socket.settimeout(None)
        except OSError as error:
            self._server_socket.close()
            raise RuntimeFailure(f"`tiermoe serve` passed no socket ({error})", "start it again") from error

    def listener(self) -> socket.socket | None:
        """Wait for the listening socket; None: the server has ended before."""
        try:
            return socket.socket(fileno=self._next())
        except OSError:
            return None

    def close(self) -> None:
        """Wait no more."""
        with contextlib.suppress(OSError):
            self._server_socket.shutdown(socket.SHUT_RDWR)

    def wait_for_end(self) -> None:
        """Return when the process of `tiermoe serve` has ended."""
        with contextlib.suppress(OSError):
            self._server_socket.recv(1)

    def _next(self) -> int:
        mark, found, *_ = socket.recv_fds(self._server_socket, 1, 1)
        if not mark or not found:
            raise ConnectionError("it ends")
        return found[0]


class _Server(uvicorn.Server):
    """uvicorn's, which at its end also answers connections whose request has not come yet."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        end_s = asyncio.get_running_loop().time() + _TAKEN_S
        while self.server_state.connections and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(_STEP_S)
        await super().shutdown(sockets)


def _bound(host: str, port: int) -> socket.socket:
    """A listening socket, which reserves the address. Raises ConfigError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        made = socket.socket(family, socket.SOCK_STREAM)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have just ended
            made.bind(address)
            made.listen(BACKLOG)
        except OSError:
            made.close()
            raise
        return made
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        remedy = "choose another --port, or 0 for a free one" if taken else "give an address of this machine"
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}", remedy) from error


def _send(edge: socket.socket, descriptor: int) -> None:
    with contextlib.suppress(OSError):  # the edge is gone, or there is no standard error
        socket.send_fds(edge, [_MARK], [descriptor])


def _user(peer: socket.socket) -> int:
    """Whose process is at the other end."""
    return int(struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1])


def _probed(path: str, waits: NotReady) -> App:
    """/health is 200, as the process lives; /ready is 503."""
    left_s = None if waits.left_s is None else round(waits.left_s, 1)
    body: dict[str, Any] = {"status": "ok" if path == "/health" else "not ready", "leads": []}
    body |= {"reason": waits.reason, "seconds_left": left_s}
    if path == "/health":
        return JSONResponse(body, 200, _CLOSE)
    return JSONResponse(body, 503, {"Retry-After": str(waits.retry_after_s)} | _CLOSE)


def _refused(path: str, waits: NotReady) -> App:
    error = ApiError(503, str(waits), headers={"Retry-After": str(waits.retry_after_s)} | _CLOSE)
    return JSONResponse(error.body_for(path), error.status, error.headers)
