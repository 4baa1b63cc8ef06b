"""Connections of the HTTP proxy: their time limits, and its own errors as JSON.

Ray Serve's proxy is a process of its own with uvicorn in it. It hands requests to a replica once their headers are
complete, so what a client does before, and what Serve says when no replica answers, is out of the application's reach.
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names `install`, which the proxy calls before it opens its port.

One duration, `keep_alive_timeout_s` of Serve's `http_options`, bounds every silence: a connection without a request,
the headers of a request (together, however many bytes trickle in), and a client that does not read what it asked for.
Bodies have their own (`limits.body_s`).

Bytes that are no body (headers, chunk sizes and their extensions, trailers) are bounded until a request and its answer
are complete, however they are framed. Requests behind one that is answered wait as bytes, and those are bounded too.

An answer that comes before its request is whole says `Connection: close`, and the connection takes and drops what the
client still sends, within bounds: the next request is never read out of a body, and no reset takes the answer away.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Mapping
from typing import Any

import uvicorn.config
from starlette.middleware import Middleware
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from .guard import App, Message, Receive, Scope, Send
from .probes import Probes
from .refusals import NO_APPLICATION, ApiError

_plain_ssl_context = uvicorn.config.create_ssl_context
_FRAMING_BYTES = 64 * 1024  # of a request that are no body, at a stretch, as in h11; and in all, with those per byte
_FRAMING_PER_BYTE = 16  # of a body: a chunk of one byte has five
_PIECE_BYTES = 1024  # that are parsed at a time where a request may end in them, and others begin
_DRAIN_BYTES = 16 * 2**20  # that are dropped behind an early answer
_DRAIN_S = 5.0
_TCP = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # a host that is gone is noticed within a minute
_JSON = b"application/json"
_WORDS = {
    404: "this server has no such route",
    408: "the request took too long; ask for less at a time",
    429: "too many requests are under way; try again in a moment",
    503: "the server cannot carry the request out at the moment; send it again",
}
_GONE = "the server starts or ends; send it again in a moment"


def install() -> list[Middleware]:
    """Make the proxy's connections `TimedConnection`s; its middleware is `JsonErrors`, and `Probes` around it."""
    # Serve leaves uvicorn's `http` at "auto", and has no option for it
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{TimedConnection.__name__}"
    uvicorn.config.create_ssl_context = _ssl_context
    return [Middleware(JsonErrors), Middleware(Probes)]  # Serve puts each one around those before it


def _ssl_context(*args: Any, ca_certs: Any = None, cert_reqs: int = ssl.CERT_NONE, **options: Any) -> ssl.SSLContext:
    """uvicorn's, which demands a certificate of clients where there is a CA: Serve passes on the CA only."""
    demanded = ssl.CERT_REQUIRED if ca_certs else cert_reqs
    return _plain_ssl_context(*args, **options | {"ca_certs": ca_certs, "cert_reqs": demanded})


class TimedConnection(HttpToolsProtocol):
    """uvicorn's connection, with an end to every silence, a bound on all that is no body, and whole early answers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._due: asyncio.TimerHandle | None = None  # until a request's headers are complete, or a drain is over
        self._write_due: asyncio.TimerHandle | None = None  # while the client reads nothing
        self._begun = False  # whether a request's first byte has come
        self._in_headers = True
        self._waiting = bytearray()  # bytes that are not parsed yet
        # of the request that is parsed: bytes that are no body, in all and since the last one of the body; its body
        self._framing = self._stretch = self._body = 0
        self._body_left = 0  # of an announced length
        self._drained: int | None = None  # bytes; None: what comes is parsed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if (found := transport.get_extra_info("socket")) is not None and found.family != socket.AF_UNIX:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _TCP.items():
                if hasattr(socket, name):
                    found.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self._waiting.clear()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._drained is None:
            self._waiting += data
            self._parse()
            return
        self._drained += len(data)
        if self._drained > _DRAIN_BYTES:
            self.transport.close()

    def _parse(self) -> None:
        """Parse what waits, up to the end of a request that is not answered yet."""
        while self._waiting and self._drained is None and not self.transport.is_closing():
            if self._answering():
                if len(self._waiting) > _FRAMING_BYTES:
                    self.flow.pause_reading()  # until the answer is complete
                return
            # a piece holds few requests: parsed ones take a hundred times the memory of their bytes
            size = max(_PIECE_BYTES, self._body_left)
            piece = bytes(self._waiting[:size])
            del self._waiting[:size]
            self._framing += len(piece)
            self._stretch += len(piece)
            super().data_received(piece)
            if self._stretch > _FRAMING_BYTES or self._framing > _FRAMING_BYTES + _FRAMING_PER_BYTE * self._body:
                self._refuse(431, self._too_much())

    def _answering(self) -> bool:
        """Whether a whole request is not answered yet."""
        cycle = self.cycle
        return bool(self.pipeline) or (cycle is not None and not cycle.response_complete and not cycle.more_body)

    def _too_much(self) -> str:
        if self._in_headers:
            return f"the request's headers exceed {_FRAMING_BYTES} bytes; send fewer"
        return f"chunk sizes, extensions and trailers exceed {_FRAMING_BYTES} bytes; send larger chunks and no trailers"

    def handle_websocket_upgrade(self) -> None:
        self._stop()
        self._waiting.clear()
        super().handle_websocket_upgrade()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_request()
        self._begun = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # trailers are no headers (RFC 9110, 6.5.1), and nobody reads them
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop()
        self._in_headers = False
        lengths = [value for name, value in self.headers if name == b"content-length"]
        self._body_left = int(lengths[0]) if lengths else 0  # the parser has checked it
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self._close_early_answer(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._framing -= len(body)
        self._stretch = 0
        self._body += len(body)
        self._body_left = max(0, self._body_left - len(body))
        super().on_body(body)

    def _close_early_answer(self, cycle: RequestResponseCycle) -> None:
        """Let an answer that begins before the end of its request say so, and be followed by `_drain`."""
        plain = cycle.send

        async def send(message: Any) -> None:
            if cycle.more_body:
                begins = message["type"] == "http.response.start"
                if begins:
                    cycle.keep_alive = False  # and uvicorn adds the header
                elif not message.get("more_body", False):
                    cycle.keep_alive = True  # uvicorn would close at once; `on_response_complete` does it
            await plain(message)

        cycle.send = send  # type: ignore[method-assign]  # uvicorn has no other place for it

    def on_response_complete(self) -> None:
        early = self.cycle.more_body and not self.pipeline
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if early:
            self._drain()
            return
        if self.cycle.response_complete and not (self._begun and self._in_headers):  # none is under way, none has begun
            self._expect_request()
        self._parse()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_due = self.loop.call_later(self.timeout_keep_alive, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_due is not None:
            self._write_due.cancel()
            self._write_due = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is no HTTP request that the server can read")

    def _expect_request(self) -> None:
        self._stop()
        self._in_headers, self._begun = True, False
        self._framing = self._stretch = self._body = self._body_left = 0
        self._due = self.loop.call_later(self.timeout_keep_alive, self._expired)

    def _stop(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _expired(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:  # this one is pipelined behind it
            self._due = self.loop.call_later(self.timeout_keep_alive, self._expired)
        elif self._begun:
            self._refuse(408, f"the headers did not come within {self.timeout_keep_alive} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Say why, unless an answer is under way, and close."""
        cycle = self.cycle
        under_way = cycle is not None and not cycle.response_complete
        if under_way and cycle.response_started:
            self.transport.close()
        if self.transport.is_closing():
            return
        if under_way:  # the application learns it as the client's end
            cycle.disconnected = True
            cycle.message_event.set()
        body = json.dumps(ApiError(status, message).body).encode()
        head = [b"content-type: " + _JSON, b"content-length: %d" % len(body), b"connection: close"]
        self.transport.write(STATUS_LINE[status] + b"\r\n".join(head) + b"\r\n\r\n" + body)
        self._drain()

    def _drain(self) -> None:
        """Close once the client has done so, or a bound is met; what it sends until then is dropped.

        A connection that is closed while bytes come is reset, and the client may lose the answer that it has not read.
        """
        self._stop()
        self._waiting.clear()
        self._drained = 0
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._due = self.loop.call_later(min(_DRAIN_S, self.timeout_keep_alive), self.transport.close)


class JsonErrors:
    """ASGI middleware of the proxy: what Serve says itself, in OpenAI's form.

    A request that Serve could not carry out, which is its 500 or no answer at all, is a 503: the same request may go
    well a moment later. So is its 404 where it has no application at all, which starts or ends. A stream that breaks
    off ends with an error event.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _ProxyAnswer(self._app, scope, send)
        await self._app(scope, receive, answer.send)
        await answer.finish()


class _ProxyAnswer:
    """One answer on its way through the proxy."""

    def __init__(self, app: App, scope: Scope, send: Send) -> None:
        self._app, self._scope, self._send = app, scope, send
        self._started = self._ended = self._replaced = False
        self._streams = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._start(message)
        elif not self._replaced:
            self._ended = not message.get("more_body", False)
            await self._send(message)

    async def finish(self) -> None:
        """The application has returned: end what it left open."""
        if not self._started:
            await self._fail(503, {})
        elif self._streams and not self._ended:
            body = json.dumps(_failure(503, self._scope).body).encode()
            await self._send({"type": "http.response.body", "body": b"data: %s\n\ndata: [DONE]\n\n" % body})

    async def _start(self, message: Message) -> None:
        headers = {name.lower(): value for name, value in message["headers"]}
        kind, status = headers.get(b"content-type", b""), int(message["status"])
        self._started = True
        # the application's errors are JSON, Serve's are not
        if status >= 400 and not kind.startswith(_JSON) and not self._scope["path"].startswith("/-/"):
            gone = status == 404 and not await self._has_applications()
            await self._fail(503 if gone or status >= 500 else status, headers, gone=gone)
            return
        self._streams = kind.startswith(b"text/event-stream")
        await self._send(message)

    async def _has_applications(self) -> bool:
        """Whether Serve routes any request to an application."""
        said = b""

        async def take(message: Message) -> None:
            nonlocal said
            said += message.get("body", b"")

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        asked = {**self._scope, "method": "GET", "path": "/-/routes", "raw_path": b"/-/routes", "query_string": b""}
        await self._app(asked, receive, take)
        return said.startswith(b"{") and bool(json.loads(said))  # else it says in words that it ends

    async def _fail(self, status: int, headers: Mapping[bytes, bytes], *, gone: bool = False) -> None:
        self._started = self._ended = self._replaced = True
        retry = {b"retry-after": b"1"} if status == 503 else {}
        headers = retry | dict(headers)
        failure = ApiError(503, _GONE, code=NO_APPLICATION) if gone else _failure(status, self._scope)
        body = json.dumps(failure.body).encode()
        kept = [(b"content-type", _JSON), (b"content-length", b"%d" % len(body))]
        kept += [(name, headers[name]) for name in (b"retry-after", b"x-request-id", b"connection") if name in headers]
        await self._send({"type": "http.response.start", "status": status, "headers": kept})
        await self._send({"type": "http.response.body", "body": body})


def _failure(status: int, scope: Scope) -> ApiError:
    return ApiError(status, _WORDS.get(status, f"{scope['method']} {scope['path']}: refused"))
