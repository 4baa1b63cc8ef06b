"""Connections of the server: their time limits, and bounds on all bytes outside a body.

One duration, uvicorn's `timeout_keep_alive`, bounds every silence: a connection without a request, the headers of a
request (together, however many bytes trickle in), and a client that does not read what it asked for. Bodies have their
own (`limits.body_s`).

Bytes outside a body (headers, chunk sizes and their extensions, trailers) are bounded until a request and its answer
are complete, however they are framed. Requests behind one that is answered wait as bytes, and those are bounded too.

An answer that comes before its request is whole says `Connection: close`, and the connection takes and drops what the
client still sends, within bounds: the next request is never read out of a body, and no reset takes the answer away.
"""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from .refusals import ApiError

_FRAMING_BYTES = 64 * 1024  # of a request outside its body, at a stretch, as in h11; and in all, with those per byte
_FRAMING_PER_BYTE = 16  # of a body: a chunk of one byte has five
_PIECE_BYTES = 1024  # that are parsed at a time where a request may end in them, and others begin
_DRAIN_BYTES = 16 * 2**20  # that are dropped behind an early answer
_DRAIN_S = 5.0
_TCP = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # a host that is gone is noticed within a minute
_JSON = b"application/json"


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
        if self._in_headers:  # trailers are not headers (RFC 9110, 6.5.1), and are not read
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
