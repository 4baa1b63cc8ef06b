"""What stands before every route: the request's id, the key, the size of the body."""

from __future__ import annotations

import hmac
import re
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from .errors import ApiError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_OPEN = frozenset({"/health"})  # what a prober without the key may see
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Guard:
    """ASGI middleware.

    Args:
        app: what comes after.
        key: the bearer key; None: none is asked for.
        body_bytes: of one request's body, at most.
        answer_id: whether to send the request's id back; Serve's proxy does that itself.
    """

    def __init__(self, app: App, key: str | None, body_bytes: int, answer_id: bool = True) -> None:
        self._app, self._body_bytes, self._answer_id = app, body_bytes, answer_id
        self._expected = None if key is None else f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        request_id = _request_id(headers.get(b"x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start" and self._answer_id:
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        refusal = self._refusal(scope["path"], headers)
        if refusal is None:
            await self._app(scope, self._bounded(receive), named)
        else:
            await JSONResponse(refusal.body, refusal.status, refusal.headers)(scope, receive, named)

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        given = headers.get(b"authorization", b"")
        if self._expected is not None and path not in _OPEN and not hmac.compare_digest(given, self._expected):
            return ApiError(
                401, "the key is missing or wrong; send 'Authorization: Bearer KEY'", code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip
        length = headers.get(b"content-length", b"0")
        return self._too_large() if not length.isdigit() or int(length) > self._body_bytes else None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._body_bytes} bytes; send less at a time")

    def _bounded(self, receive: Receive) -> Receive:
        """Count what comes, also where no length was announced."""
        taken = 0

        async def bounded() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._body_bytes:
                raise HTTPException(413, self._too_large().message)  # any other would be a 400 of FastAPI's
            return message

        return bounded


def _request_id(given: bytes | None) -> str:
    """The client's id where it is a plain word, else a new one."""
    text = (given or b"").decode("latin-1")
    return text if _REQUEST_ID.fullmatch(text) else uuid.uuid4().hex
