"""Connections of the server: what one client's bytes may take before any key is asked for.

h11 parses, and bounds headers, chunk sizes and trailers (64 KiB while they are incomplete), refuses two readings of one
request, ignores offers of another protocol (`Upgrade: h2c` of Java's clients), and reads a pipelined request once the
one before it is answered. What a client still sends behind an early answer is dropped. Added here:

- One duration, uvicorn's `timeout_keep_alive`, bounds every silence: a connection without a request, the headers of a
  request together, the rest of a body that is answered, and a client that does not read. Bodies have `limits.body_s`.
- A body in tiny chunks is refused: each takes the event loop the same time, whatever it holds.
- Refusals are JSON, as all others.
- A client that still sends can read its answer: a connection that is closed while bytes arrive is reset.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from .refusals import ApiError

FRAMING_BYTES = 64 * 1024  # of headers, of a chunk's size, of trailers
_PIECE_BYTES = 16 * 1024  # h11 bounds what is incomplete after each
_CHUNKS, _CHUNK_BYTES = 8192, 64  # of a body; beyond that number they must have so many bytes on average
_LINGER_S, _CLOSING_S = 5.0, 60.0
_WHOLE_URL = re.compile(rb"(?i:https?)://(?P<host>[^/?#@]+)(?P<path>[/?].*|)")
_VERSIONS = frozenset({b"1.0", b"1.1"})


class _Parser(h11.Connection):
    """h11's, for a server; refuses what h11 takes and a proxy in front may have read otherwise."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, FRAMING_BYTES)
        self._chunks = self._bytes = 0  # of the body
        self.of_head = False  # the present request, whose answer has no body

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
            self._check_head(event)
            event = _in_origin_form(event)
            self.of_head = event.method == b"HEAD"
        elif isinstance(event, h11.Data):
            self._chunks += event.chunk_start
            self._bytes += len(event.data)
            if self._chunks > _CHUNKS + self._bytes // _CHUNK_BYTES:
                raise h11.RemoteProtocolError("the body has too many chunks; send larger ones", error_status_hint=431)
        return event

    @staticmethod
    def _check_head(request: h11.Request) -> None:
        names = {name for name, _ in request.headers}
        if request.method == b"CONNECT":
            raise h11.RemoteProtocolError("this server is no proxy and opens no tunnels")
        if request.http_version not in _VERSIONS:
            raise h11.RemoteProtocolError(f"HTTP/{request.http_version.decode()} is not spoken here; send HTTP/1.1")
        if b"transfer-encoding" in names and (b"content-length" in names or request.http_version == b"1.0"):
            raise h11.RemoteProtocolError("'Transfer-Encoding' with 'Content-Length', or in HTTP/1.0; send one of both")


def _in_origin_form(request: h11.Request) -> h11.Request:
    """A request whose target is a whole URL, as proxies get it; the URL's host counts (RFC 9112, 3.2.2)."""
    found = _WHOLE_URL.fullmatch(request.target)
    if found is None:
        return request
    headers = [(name, value) for name, value in request.headers.raw_items() if name.lower() != b"host"]
    target = found["path"] if found["path"].startswith(b"/") else b"/" + found["path"]
    return h11.Request(
        method=request.method, headers=[(b"Host", found["host"]), *headers], target=target,
        http_version=request.http_version,
    )  # fmt: skip


class _Lingering:
    """A transport whose `close` leaves a client that still sends time to read; what it sends is dropped.

    Args:
        transport: the connection's.
        still_sends: whether the client does.
    """

    def __init__(self, transport: asyncio.Transport, still_sends: Callable[[], bool]) -> None:
        self._transport, self._still_sends, self._closing = transport, still_sends, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        self._closing = True
        if not self._still_sends():
            self._end()
            return
        end = self._transport.abort
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:  # TLS has no half of a connection to end: the client ends it, with its answer
            end = self._end
        self._transport.resume_reading()
        asyncio.get_running_loop().call_later(_LINGER_S, end)

    def _end(self) -> None:
        """Once what waits to be sent is read, if that is in time."""
        self._transport.close()
        if self._transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(_CLOSING_S, self._transport.abort)


class BoundedConnection(H11Protocol):
    """uvicorn's connection by h11, within bounds."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = self._parser = _Parser()
        self._due: asyncio.TimerHandle | None = None  # while no request is under way
        self._write_due: asyncio.TimerHandle | None = None  # while the client reads nothing

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, _Lingering(transport, self._client_sends)))
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for begin in range(0, len(data), _PIECE_BYTES):
            if self.transport.is_closing():
                return
            super().data_received(data[begin : begin + _PIECE_BYTES])

    def handle_events(self) -> None:
        before, sending = self.cycle, self.conn.their_state is h11.SEND_BODY
        super().handle_events()
        if self.cycle is not before and not self.cycle.response_complete:
            self._stop()
        elif sending and self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._expect_request()  # the rest of an answered body has come: the next request has its whole time

    def on_response_complete(self) -> None:
        answered = self.cycle
        super().on_response_complete()
        self._unset_keepalive_if_required()  # uvicorn's is over with the first byte
        if self.cycle is answered and not self.transport.is_closing():
            self._expect_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        if self._write_due is not None:
            self._write_due.cancel()
            self._write_due = None
        super().resume_writing()

    def _expect_reader(self, waiting: int) -> None:
        """The client is to read some of so many bytes in time."""

        def expired() -> None:
            left = self.transport.get_write_buffer_size()
            if left < waiting:
                self._expect_reader(left)
            else:
                self.transport.abort()

        self._write_due = self.loop.call_later(self.timeout_keep_alive, expired)

    def send_400_response(self, msg: str) -> None:
        """Refuse what h11 does not take; called where its error is handled."""
        error = sys.exc_info()[1]
        status = getattr(error, "error_status_hint", 400)
        if status == 431 and len(self.conn.trailing_data[0]) > FRAMING_BYTES:
            message = f"headers, a chunk's size or trailers exceed {FRAMING_BYTES} bytes; send fewer"
        else:
            message = f"this is not an HTTP request that the server can read ({str(error)[:200]})"
        self._refuse(status, message)

    def _expect_request(self) -> None:
        self._stop()
        self._due = self.loop.call_later(self.timeout_keep_alive, self._expired)

    def _stop(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _expired(self) -> None:
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(408, f"the headers did not come within {self.timeout_keep_alive} s; send them at once")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Say why, unless an answer is under way, and close."""
        if self.cycle is not None and not self.cycle.response_complete:  # the application learns it as the client's end
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps(ApiError(status, message).body).encode()
            headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            response = h11.Response(status_code=status, headers=[*headers.items()], reason=STATUS_PHRASES[status])
            for event in (response, h11.Data(data=b"" if self._parser.of_head else body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _client_sends(self) -> bool:
        """Whether more of a request is to come, or was refused."""
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR) or bool(self.conn.trailing_data[0])
