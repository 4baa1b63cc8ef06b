"""The FastAPI application over a `Service`: what stands before every route, and the routes.

A completion's way: `Guard` -> parsed by FastAPI -> checked and tokenized (`answers`) -> `Service.submit` -> `Answer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from ...errors import TierMoeError
from ..host import versions
from .answers import Answer, Asked, Json, chat, completion
from .bodies import body_route
from .parameters import warning
from .schema import ApiError, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, from_findings
from .service import Service

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_OPEN = frozenset({"/health"})  # needs no key
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_CLIENT_GONE = 499  # nginx's code


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
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
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


def make_app(service: Service, key: str | None, *, answer_id: bool = True) -> FastAPI:
    """The server.

    Args:
        service: what answers.
        key: the bearer key for every route but /health; None: none is asked for.
        answer_id: whether answers carry their request's id; False behind a proxy that adds it.
    """
    app = FastAPI(title="tiermoe", version=versions()["tiermoe"])
    app.router.route_class = body_route(service.offload, service.limit_tokens)
    app.add_middleware(Guard, key=key, body_bytes=service.limits.body_bytes, answer_id=answer_id)
    _add_error_handlers(app)
    _add_generation(app, service)
    _add_state(app, service)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await _generate(service, request, await completion(service, body))

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await _generate(service, request, await chat(service, body))

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Json:
        body.check()
        service.check_model(body.model)
        if body.messages is not None:
            ids = await service.chat_ids(body.messages)
        else:
            ids = await service.prompt_ids(body.prompt or "", special=body.add_special_tokens)
        return {"tokens": ids, "count": len(ids), "max_model_len": service.limit_tokens}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Json:
        service.check_model(body.model)
        ids = await service.prompt_ids(body.tokens)
        return {"prompt": await service.text_of(ids)}


async def _generate(service: Service, request: Request, asked: Asked) -> Response:
    """The whole answer, or a stream of chunks. A client that leaves ends what it asked for."""
    name, headers = request.state.request_id, warning(asked.body.ignored)
    service.metrics.count_ignored(asked.body.ignored)
    run = service.submit(asked.choices, name)
    answer = Answer(asked, run, name, service.model_name)
    if asked.body.stream:
        return EventStream(_sse(answer.chunks()), run.close, headers)
    whole = asyncio.ensure_future(answer.whole())
    gone = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait((whole, gone), return_when=asyncio.FIRST_COMPLETED)
        return JSONResponse(whole.result(), headers=headers) if whole.done() else Response(status_code=_CLIENT_GONE)
    finally:
        whole.cancel()
        gone.cancel()
        run.close()


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> Json:
        plan = service.backend.plan
        model = {
            "id": service.model_name, "object": "model", "created": service.started_s, "owned_by": "tiermoe",
            "max_model_len": service.limit_tokens, "policy": plan.get("policy"), "lossless": plan.get("lossless"),
        }  # fmt: skip
        return {"object": "list", "data": [model]}

    @app.get("/health")
    async def health() -> Json:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        reason = await service.not_ready()
        if reason is not None:
            return JSONResponse({"status": "not ready", "reason": reason}, 503)
        return JSONResponse({"status": "ready", "runtime": await service.backend.ask("health")})

    @app.get("/metrics")
    async def metrics() -> Response:
        with contextlib.suppress(TierMoeError):  # the server's own numbers are worth having all the more then
            await service.metrics.refresh(service.admission.waiting)
        return Response(service.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": versions()["tiermoe"]} | versions()


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(Exception)  # Starlette raises it once more, for the log
    async def failed(request: Request, error: Exception) -> Response:
        return await refuse(request, ApiError(500, f"the server failed: {type(error).__name__}; report it"))

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        return await refuse(request, from_findings(error.errors()))

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return await refuse(request, ApiError(error.status_code, message, headers=error.headers))


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _sse(chunks: AsyncIterator[Json]) -> AsyncIterator[str]:
    """Server-sent events; what fails once the stream has begun is an event too."""
    try:
        async for chunk in chunks:
            yield _event(chunk)
    except ApiError as error:
        yield _event(error.body)
    yield "data: [DONE]\n\n"


def _event(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


class EventStream(StreamingResponse):
    """A stream of events that ends its work when its client leaves, even before the first one."""

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None], headers: dict[str, str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"} | headers)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
