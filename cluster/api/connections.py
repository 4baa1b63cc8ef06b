"""Connections of the server: their time limits, and bounds on all bytes outside a body.

One duration, uvicorn's `timeout_keep_alive`, bounds every silence: a connection without a request, the headers of a
request (together, however many bytes trickle in), and a client that does not read what it asked for. Bodies have their
own (`limits.body_s`).

Bytes outside a body (headers, chunk sizes and their extensions, trailers) are bounded until a request and its answer
are complete, however they are framed. Requests behind one that is answered wait as bytes, and those are bounded too.

An answer that comes before its request is whole says `Connection: close`, and the connection takes and drops what the
client still sends, within bounds: the next request is never read out of a body, and no reset takes the answer away.

An offer of another protocol (`Upgrade: h2c` of Java's clients, `websocket`) is ignored, as RFC 9110 (7.8) allows: the
request is answered over HTTP/1.1, with its body. What RFC 9112 calls invalid (3.2: not exactly one `Host`) gets 400.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from .refusals import ApiError

_FRAMING_BYTES = 64 * 1024  # of a request outside its body, at a stretch, as in h11; and in all, with those per byte
_FRAMING_PER_BYTE = 16  # of a body: a chunk of one byte has five
_PIECE_BYTES = 1024  # that are parsed at a time where a request may end in them, and others begin
_DRAIN_BYTES = 16 * 2**20  # that are dropped behind an early answer
_DRAIN_S = 5.0
_TCP = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # a host that is gone is noticed within a minute
_JSON = b"application/json"
_VERSIONS = frozenset({"1.0", "1.1"})
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(:[0-9]*)?")  # RFC 3986: host and port


class TimedConnection(HttpToolsProtocol):
    """uvicorn's connection with time limits, a bound on all bytes outside a body, and whole early answers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._due: asyncio.TimerHandle | None = None  # until a request's headers are complete, or a drain is over
        self._write_due: asyncio.TimerHandle | None = None  # while the client reads nothing
        self._begun = False  # whether a request's first byte has come
        self._in_headers = True
        self._waiting = bytearray()  # bytes that are not parsed yet
        # of the request that is parsed: bytes outside the body, in all and since the last one of the body; its body
        self._framing = self._stretch = self._body = 0
        self._body_left = 0  # of an announced length
        self._drained: int | None = None  # bytes; None: what comes is parsed
        self._offered = self._again = False  # the request offers another protocol; it is parsed again without

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
            self._feed(piece)
            if self._drained is not None:
                return
            if self._stretch > _FRAMING_BYTES or self._framing > _FRAMING_BYTES + _FRAMING_PER_BYTE * self._body:
                self._refuse(431, self._too_much())

    def _feed(self, piece: bytes) -> None:
        """Parse a piece. The parser stops behind the headers of a request that offers another protocol, as if what
        follows were that: another one gets the request without its offer, and then its body.
        """
        self._unset_keepalive_if_required()
        while True:
            try:
                self.parser.feed_data(piece)
                return
            except httptools.HttpParserUpgrade as stop:
                piece = self._without_offer() + piece[stop.args[0] :]
                self._offered, self._again = False, True
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
            except httptools.HttpParserError as error:
                why = error.__context__
                if isinstance(why, ApiError):
                    self._refuse(why.status, why.message)
                else:
                    self.send_400_response("")
                return

    def _without_offer(self) -> bytes:
        """The head of the request that was parsed, without `Upgrade`."""
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join(option for option in options if option.lower() != b"upgrade")
            if name != b"upgrade":
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _answering(self) -> bool:
        """Whether a whole request is not answered yet."""
        cycle = self.cycle
        return bool(self.pipeline) or (cycle is not None and not cycle.response_complete and not cycle.more_body)

    def _too_much(self) -> str:
        if self._in_headers:
            return f"the request's headers exceed {_FRAMING_BYTES} bytes; send fewer"
        return f"chunk sizes, extensions and trailers exceed {_FRAMING_BYTES} bytes; send larger chunks and no trailers"

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._again:  # its bytes are counted, and its time runs
            self._again = False
            return
        self._expect_request()
        self._begun = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # trailers are not headers (RFC 9110, 6.5.1), and are not read
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"CONNECT":
            raise ApiError(400, "this server is no proxy and opens no tunnels")
        if self.parser.should_upgrade():
            self._offered = True
            return
        self._check_head()
        self._stop()
        self._in_headers = False
        lengths = [value for name, value in self.headers if name == b"content-length"]
        self._body_left = int(lengths[0]) if lengths else 0  # the parser has checked it
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self._close_early_answer(self.cycle)

    def _check_head(self) -> None:
        """Refuse what RFC 9112 says to; of a target that is a whole URL (3.2.2) its authority becomes the `Host`.

        Raises:
            ApiError: 400, or 501: a transfer coding that is not known.
        """
        version = self.parser.get_http_version()
        if version not in _VERSIONS:
            raise ApiError(400, f"HTTP/{version} is not spoken here; send HTTP/1.1")
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (version == "1.1" and not hosts):
            raise ApiError(400, f"the request has {len(hosts) or 'no'} 'Host' headers; send one")
        if hosts and _HOST.fullmatch(hosts[0]) is None:
            raise ApiError(400, "the 'Host' header is no host with a port; send HOST or HOST:PORT")
        codings = [value.lower().strip() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and version == "1.0":
            raise ApiError(400, "HTTP/1.0 has no 'Transfer-Encoding'; send HTTP/1.1, or a 'Content-Length'")
        if codings not in ([], [b"chunked"]) and codings[-1].endswith(b"chunked"):  # else the parser refuses them
            raise ApiError(501, "of transfer codings only chunked is known; send 'Transfer-Encoding: chunked'")
        if not self.url.startswith(b"/"):
            self._take_authority()

    def _take_authority(self) -> None:
        if self.url == b"*" and self.parser.get_method() == b"OPTIONS":
            return
        target = httptools.parse_url(self.url)
        if target.schema is None or target.schema.lower() not in (b"http", b"https") or target.userinfo is not None:
            raise ApiError(400, "the request's target is no path of this server; send a path, such as /v1/models")
        host = b"[%b]" % target.host if b":" in target.host else target.host
        host += b"" if target.port is None else b":%d" % target.port
        self.headers[:] = [(name, host if name == b"host" else value) for name, value in self.headers]
        self.url = (target.path or b"/") + (b"" if target.query is None else b"?" + target.query)

    def on_message_complete(self) -> None:
        if not self._offered:
            super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        self._framing -= len(body)
        self._stretch = 0
        self._body += len(body)
        self._body_left = max(0, self._body_left - len(body))
        super().on_body(body)

    def _close_early_answer(self, cycle: RequestResponseCycle) -> None:
        """Mark an answer that begins before the end of its request; `_drain` follows it."""
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
        self._refuse(400, "this is not an HTTP request that the server can read")

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
        """Close once the client has closed or a bound is reached; what it sends until then is dropped.

        A connection closed while bytes arrive is reset, and the client may lose the answer that it has not read.
        """
        self._stop()
        self._waiting.clear()
        self._drained = 0
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._due = self.loop.call_later(min(_DRAIN_S, self.timeout_keep_alive), self.transport.close)
