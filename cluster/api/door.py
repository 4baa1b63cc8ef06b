"""The address of `tiermoe serve`: reserved before anything starts, and answered from then on.

    Door (this process: it starts, so many seconds left)  ->  Serve's proxy, once the application is there
    Serve's proxy  ->  Door (it ends), from the moment in which the application ends until this process does

Both listen on the same port by SO_REUSEPORT, and a filter in the kernel gives each new connection to one of them: to
the door, until `hand_over` gives them to the proxy. So nobody who has had the proxy's answer meets the door again, and
the door ends once it has answered what was given to it. It keeps no connection for a second request.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import uvicorn
from fastapi.responses import JSONResponse

from ...errors import ConfigError
from ...proto.tls import TlsFiles
from .connections import TimedConnection
from .guard import READS, Receive, Scope, Send
from .probes import PATHS, starting
from .refusals import ApiError

SILENCE_S = 60  # of a connection; see `connections.py`
_CLIENTS = 256  # connections at a time while it starts
_END_S = 2.0
_DRAIN_S = 1.0  # for connections that the door has got and not answered
_STEP_S = 0.01
_SO_ATTACH_REUSEPORT_CBPF = 51  # asm-generic/socket.h
_RETURN = 0x06  # BPF_RET | BPF_K
_DOOR, _PROXY = 0, 1  # in the order in which they listened
_LAST = 1  # the door behind the proxy; once that is gone no listener has this place, and the kernel takes any: the door
Progress = Callable[[], tuple[str, float | None] | None]  # the step of the start that goes on, seconds left


class PortReservation:
    """A port that no other process gets before Serve's proxy binds it.

    Serve does not report which port it got for port 0, so the port is chosen here. The reserving socket never listens,
    and with SO_REUSEPORT the proxy, a process of the same user, binds the same port.

    Args:
        host: address to bind.
        port: 0: one that is free.

    Raises:
        ConfigError: the address is not this machine's, or the port is taken.
    """

    def __init__(self, host: str, port: int) -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, address = found[0]
            with socket.socket(family, socket.SOCK_STREAM) as probe:  # alone: with SO_REUSEPORT two servers could share
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
            self._socket = _bound(family, address)  # no SO_REUSEADDR: the next one's probe shall fail
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            remedy = "choose another --port, or 0 for a free one" if taken else "give an address of this machine"
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}", remedy) from error
        self.host, self.port = str(self._socket.getsockname()[0]), int(self._socket.getsockname()[1])

    def listener(self) -> socket.socket:
        """One more socket of this address, to listen on."""
        return _bound(self._socket.family, self._socket.getsockname())

    def close(self) -> None:
        """Release it."""
        self._socket.close()


def _steer(listener: socket.socket, to: int) -> None:
    """Give new connections to one of the sockets that listen on an address by SO_REUSEPORT, by the order in which they
    did; where there is no such socket, to any. Raises OSError: the kernel cannot.
    """
    code = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, to))  # struct sock_filter
    program = struct.pack("HP", 1, ctypes.addressof(code))  # struct sock_fprog
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, program)


def _bound(family: int, address: Any) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


class Door:
    """Where the server listens, inside the `with` block.

    Args:
        host: address to bind.
        port: 0: one that is free.
        tls: for HTTPS; with a CA, clients need a certificate of it. None: HTTP.

    Attributes:
        address: the host's, as a number: what else listens there may take a name for another one.
        port: the one that it got.
        url: of the server.
        ssl: uvicorn's options for HTTPS.

    Raises:
        ConfigError: the address is not this machine's, or the port is taken.
    """

    def __init__(self, host: str, port: int, tls: TlsFiles | None = None) -> None:
        self.host = host
        named = {} if tls is None else {"keyfile": tls.key, "certfile": tls.certificate, "ca_certs": tls.ca}
        self.ssl: dict[str, Any] = {f"ssl_{name}": file for name, file in named.items()}
        self._reserved = PortReservation(host, port)
        self.address, self.port = self._reserved.host, self._reserved.port
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http{'s' if tls is not None else ''}://{shown}:{self.port}"
        self._progress: Progress = lambda: None
        self._ends = False
        self._server: uvicorn.Server | None = None
        self._listener: socket.socket | None = None
        self._steers = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Door:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()
        self._reserved.close()

    def open(self, progress: Progress) -> None:
        """Answer from now on: /ready is 503 with the seconds left, /health is 200, and all else 503.

        Args:
            progress: asked at each answer.
        """
        self._progress = progress
        self._listen(_DOOR)

    def end(self) -> None:
        """Answer that the server ends, to whoever connects from now on; the proxy answers those that it has."""
        self._ends = True
        if self._thread is None:
            self._listen(_LAST)

    def _listen(self, place: int) -> None:
        demanded = ssl.CERT_REQUIRED if self.ssl.get("ssl_ca_certs") else ssl.CERT_NONE
        config = uvicorn.Config(
            self._answer, interface="asgi3", http=TimedConnection, ws="none", lifespan="off", log_config=None,
            access_log=False, timeout_keep_alive=SILENCE_S, timeout_graceful_shutdown=1,
            limit_concurrency=_CLIENTS, ssl_cert_reqs=demanded, **self.ssl,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        listener = self._listener = self._reserved.listener()
        listener.listen(config.backlog)
        with contextlib.suppress(OSError):  # gVisor's has no such filter
            _steer(listener, place)
            self._steers = True
        run = self._server.run
        self._thread = threading.Thread(target=lambda: run([listener]), name="tiermoe-door", daemon=True)
        self._thread.start()

    def beside(self) -> None:
        """Another one listens beside this one, and is not ready. Where connections cannot be steered, it answers."""
        if not self._steers:
            self.hand_over()

    def hand_over(self) -> None:
        """Take no more connections, answer those that came, and end; who listens beside it gets all others.

        Idempotent, bounded.
        """
        if self._server is None or self._listener is None or self._thread is None or not self._thread.is_alive():
            return
        if self._steers:
            _steer(self._listener, _PROXY)
        end_s = time.monotonic() + _DRAIN_S
        while time.monotonic() < end_s and self._waits(self._server, self._listener):
            time.sleep(_STEP_S)
        self._end()

    def _end(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None and self._server is not None:
            self._server.should_exit = True
            thread.join(_END_S)

    @staticmethod
    def _waits(server: uvicorn.Server, listener: socket.socket) -> bool:
        """Whether somebody has a connection to the door."""
        return bool(server.server_state.connections or select.select([listener], [], [], 0)[0])

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        step, left_s = self._progress() or ("the runtime is prepared", None)
        state, left_s = ("the server ends", None) if self._ends else (f"the server starts: {step}", left_s)
        if scope["method"] in READS and scope["path"] in PATHS:
            answer = starting(scope["path"], state, left_s)
            closing = [*answer.headers, (b"connection", b"close")]
            await send({"type": "http.response.start", "status": answer.status, "headers": closing})
            await send({"type": "http.response.body", "body": answer.body})
            return
        when = "" if left_s is None else f"; ready in about {max(1, round(left_s))} s"
        retry = str(2 if left_s is None else min(60, max(1, round(left_s))))
        headers = {"Retry-After": retry, "Connection": "close"}
        error = ApiError(503, f"{state}{when}", headers=headers)
        await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)
