"""`/health` and `/ready` in the proxy: an answer within 100 ms whatever other requests send.

Between Serve's proxy and a replica, bodies of megabytes stand before a probe: in the processes' queues, in Ray's
object store, on its connections. So the proxy asks a replica beside the probe, and answers with what the replica says
now, or, where that takes longer than `PATIENCE_S`, with what it said last, which is `STALE_S` old at most. While probes
come, the last answer is renewed once a second. An answer is kept for the key that got it, and only a good one: nothing
else of a probe reaches the request by which a replica is asked for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import uuid
from dataclasses import dataclass, field, replace
from typing import Any

from .guard import READS, App, Message, Receive, Scope, Send
from .refusals import NO_APPLICATION

PATHS = frozenset({"/health", "/ready"})
PATIENCE_S = 0.03
STALE_S = 5.0
_RENEWED_S = 1.0
_ASKED_S = 60.0  # since the last probe: the answer is renewed no more
_ANSWER_S = 2.0  # of a replica; the next try may reach another
_MANY = 16  # answers that are kept
_NOBODY = "no server process answers"
_OWN = (b"x-request-id", b"connection")  # headers of one request


@dataclass(frozen=True)
class Answer:
    """One answer, whole; `at_s` is of the event loop's clock."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    at_s: float = 0.0


def starting(path: str, reason: str, left_s: float | None = None) -> Answer:
    """What a server says that is not there yet: /health is 200, as its process lives.

    Args:
        left_s: seconds until it serves; None: not known.
    """
    body: dict[str, Any] = {"status": "ok" if path == "/health" else "not ready", "leads": []}
    body |= {"reason": reason, "seconds_left": None if left_s is None else round(left_s, 1)}
    encoded = json.dumps(body).encode()
    headers = ((b"content-type", b"application/json"), (b"content-length", b"%d" % len(encoded)))
    if path == "/health":
        return Answer(200, headers, encoded)
    retry_s = 2 if left_s is None else min(60, max(1, round(left_s)))
    return Answer(503, (*headers, (b"retry-after", b"%d" % retry_s)), encoded)


@dataclass
class _Known:
    """What is known of one path for one key; `came` is set, and replaced, at each answer and at the end."""

    asked_s: float
    answer: Answer | None = None
    came: asyncio.Event = field(default_factory=asyncio.Event)
    wanted: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self) -> None:
        came, self.came = self.came, asyncio.Event()
        came.set()


class Probes:
    """ASGI middleware of the proxy.

    Args:
        app: what asks a replica.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._known: dict[tuple[str, bytes], _Known] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in READS or scope["path"] not in PATHS:
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        # /health needs no key, and is the same for all
        key = scope["path"], b"" if scope["path"] == "/health" else headers.get(b"authorization", b"")
        if key not in self._known and len(self._known) >= _MANY:
            await self._app(scope, receive, send)
            return
        answer = await self._answer(key)
        own = (b"x-request-id", headers.get(b"x-request-id", uuid.uuid4().hex.encode()))
        await send({"type": "http.response.start", "status": answer.status, "headers": [*answer.headers, own]})
        await send({"type": "http.response.body", "body": answer.body})

    async def _answer(self, key: tuple[str, bytes]) -> Answer:
        now_s = asyncio.get_running_loop().time
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = _Known(now_s())
            task = asyncio.create_task(self._renew(key, known), context=contextvars.Context())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        known.asked_s = now_s()
        known.wanted.set()
        with contextlib.suppress(TimeoutError):
            # nothing is known before the first answer: it may take its time
            async with asyncio.timeout(STALE_S if known.answer is None else PATIENCE_S):
                await known.came.wait()
        if known.answer is None or now_s() - known.answer.at_s > STALE_S:
            return starting("/ready", _NOBODY)
        return known.answer

    async def _renew(self, key: tuple[str, bytes], known: _Known) -> None:
        """Ask a replica whenever a probe comes, and once a second, while its answers are good and probes come."""
        now_s = asyncio.get_running_loop().time
        try:
            while now_s() - known.asked_s < _ASKED_S:
                known.wanted.clear()
                with contextlib.suppress(Exception):  # no answer: the last one grows old
                    async with asyncio.timeout(_ANSWER_S):
                        known.answer = replace(await self._ask(*key), at_s=now_s())
                    known.tell()
                    if known.answer.status != 200:
                        return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_RENEWED_S):
                        await known.wanted.wait()
        finally:
            del self._known[key]
            known.tell()

    async def _ask(self, path: str, authorization: bytes) -> Answer:
        """One request of our own, like a client's. Raises ConnectionError: its answer is not whole."""
        status, headers, body = 0, list[tuple[bytes, bytes]](), b""
        sent = whole = False

        async def receive() -> Message:
            nonlocal sent
            if sent:
                await asyncio.Event().wait()  # this client never leaves
            sent = True
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status, headers, body, whole
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [(name, value) for name, value in message["headers"] if name.lower() not in _OWN]
            else:
                body += message.get("body", b"")
                whole = not message.get("more_body", False)

        await self._app(_request(path, authorization), receive, send)
        if not whole:
            raise ConnectionError("the answer was cut off")
        # 404 is Serve's: the application has both routes, so there is none yet, or none any more
        if status == 404 or (status == 503 and NO_APPLICATION.encode() in body):
            return starting(path, "the server starts or ends")
        if status == 503 and body.startswith(b'{"error"'):  # the proxy's own
            return starting("/ready", _NOBODY)
        return Answer(status, tuple(headers), body)


def _request(path: str, authorization: bytes) -> Scope:
    """Of nobody's connection."""
    key = [(b"authorization", authorization)] if authorization else []
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "GET",
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(b"host", b"localhost"), *key], "client": ("127.0.0.1", 0), "server": ("127.0.0.1", 0), "state": {},
    }  # fmt: skip
