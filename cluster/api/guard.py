"""What stands before every route: the key, web pages, the request's id, and the size and time of its body."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import partial
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

from .keys import ANYONE, Key, KeyRing, fingerprint
from .origins import Access, headers_of, path_of
from .records import CLIENT_GONE, RequestRecord, Sink
from .refusals import ApiError, speaks_anthropic
from .settings import LimitSettings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

READS = frozenset({"GET", "HEAD"})  # HTTP wants HEAD wherever GET is (RFC 9110, 9.1)
_OPEN = frozenset({"/health"})  # needs no key
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Guard:
    """ASGI middleware. It leaves the `RequestRecord` as `record` and the `Key` as `key` in the request's state.

    Args:
        app: the guarded application.
        keys: the bearer keys; None: none is asked for.
        limits: on bodies.
        sinks: what gets the record of each request at its end; they must not block.
        access: which web pages may ask.
    """

    def __init__(
        self, app: App, keys: KeyRing | None, limits: LimitSettings, sinks: Sequence[Sink] = (),
        access: Access | None = None,
    ) -> None:  # fmt: skip
        self._app, self._keys, self._limits = app, keys, limits
        self._access = Access(keyed=keys is not None) if access is None else access
        self._sinks = tuple(sinks)
        self._held = Counter[str]()  # bytes of the bodies of all requests under way, by the names of keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = headers_of(scope)
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        path = path_of(scope)
        record = RequestRecord(request_id, scope["method"], path)
        scope.setdefault("state", {})["record"] = record
        scope = {**scope, "path": path, "raw_path": scope.get("raw_path", path.encode()).rstrip(b"/") or b"/"}
        names = [b"x-request-id", b"request-id"] if speaks_anthropic(path) else [b"x-request-id"]
        added = [*((name, request_id.encode()) for name in names), *self._access.answer_headers(headers)]

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        try:
            await self._answer(scope, receive, named, headers, record)
        except ClientDisconnect:  # a client that left a stream is not a failure of the server
            raise
        except Exception as error:  # raised once more, for the log
            failure = ApiError(500, f"the server failed: {type(error).__name__}; report it")
            record.refuse(failure)
            if record.status == CLIENT_GONE:  # no answer has begun
                await JSONResponse(failure.body_for(path), failure.status)(scope, receive, named)
            raise
        finally:
            record.ended_s = time.perf_counter()
            for sink in self._sinks:
                sink(record)

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, headers: dict[bytes, bytes], record: RequestRecord
    ) -> None:
        try:
            if (foreign := self._access.refusal(scope, headers)) is not None:
                raise foreign
            if self._access.is_preflight(scope, headers):
                permission = {name.decode(): value.decode() for name, value in self._access.permission(headers)}
                await Response(status_code=204, headers=permission)(scope, receive, send)
                return
            scope["state"]["key"] = self._check(record, headers)
            if record.method not in READS:
                _check_coding(headers.get(b"content-encoding", b"").decode("latin-1"))
        except ApiError as refusal:
            record.refuse(refusal)
            answer = JSONResponse(refusal.body_for(record.path), refusal.status, refusal.headers)
            await answer(scope, receive, send)
            return
        key = record.key or ""
        body = _Body(receive, self._limits, partial(self._hold, key))
        # the connection leaves a HEAD's body out
        routed = {**scope, "method": "GET"} if record.method == "HEAD" else scope
        try:
            await self._app(routed, body.receive, send)
        finally:
            self._held[key] -= body.taken
            if not self._held[key]:
                del self._held[key]

    def _check(self, record: RequestRecord, headers: dict[bytes, bytes]) -> Key | None:
        """The request's key. Raises ApiError 401 or 413."""
        given = [headers[b"authorization"]] if b"authorization" in headers else []
        if b"x-api-key" in headers:  # of Anthropic's clients, some of which send both
            given.append(b"Bearer " + headers[b"x-api-key"])
        keys = [ANYONE if self._keys is None else self._keys.find(one) for one in given or [b""]]
        key = next((found for found in keys if found is not None), None)
        record.key = key.name if key is not None else fingerprint(b" ".join(given))
        if key is None and record.path not in _OPEN:
            raise ApiError(
                401, "the key is missing or wrong; send 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 20 or int(length) > self._limits.body_bytes:
            raise _too_large(self._limits)
        return key

    def _hold(self, key: str, count: int) -> None:
        """Count more bytes of a key. Where there are keys, one alone leaves half of the room to others: bodies that do
        not end would take all of it. Raises ApiError: 429."""
        most, all_held, own = self._limits.held_bytes, self._held.total(), self._held[key] + count
        if all_held + count > most or (self._keys is not None and own > max(most // 2, self._limits.body_bytes)):
            raise ApiError(
                429, f"{all_held} bytes of requests are under way; try again in a moment",
                code="rate_limit_exceeded", headers={"Retry-After": "1"},
            )  # fmt: skip
        self._held[key] += count


class _Body:
    """The body of one request as it arrives: counted even without an announced length, and within its deadline."""

    def __init__(self, receive: Receive, limits: LimitSettings, hold: Callable[[int], None]) -> None:
        self._receive, self._limits, self._hold = receive, limits, hold
        self._due_s: float | None = asyncio.get_running_loop().time() + limits.body_s
        self.taken = 0

    async def receive(self) -> Message:
        """The next message.

        Raises:
            ApiError: 408, 413 or 429.
        """
        try:
            async with asyncio.timeout_at(self._due_s):
                message = await self._receive()
        except TimeoutError:
            what = f"the body did not arrive within {self._limits.body_s:g} s; send it again"
            raise ApiError(408, what, headers={"Connection": "close"}) from None
        if message["type"] != "http.request" or not message.get("more_body", False):
            self._due_s = None  # what comes after it is the end of the connection
        count = len(message.get("body", b""))
        if self.taken + count > self._limits.body_bytes:
            raise _too_large(self._limits)
        self._hold(count)
        self.taken += count
        return message


def _check_coding(coding: str) -> None:
    """Refuse a compressed body. Raises ApiError: 415."""
    if coding.strip().lower() not in ("", "identity"):
        raise ApiError(
            415, f"the content encoding is '{coding[:100]}'; send the body as it is",
            code="unsupported_content_encoding", headers={"Accept-Encoding": "identity"},
        )  # fmt: skip


def _too_large(limits: LimitSettings) -> ApiError:
    return ApiError(413, f"the body is larger than {limits.body_bytes} bytes; send less at a time")
