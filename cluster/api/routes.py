"""The FastAPI application over a `Service`: routes and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from ...errors import TierMoeError
from ..versions import versions
from .answers import Json
from .chat import Chat
from .completions import Completion
from .errors import ApiError, from_findings
from .middleware import Guard, Receive, Scope, Send
from .schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from .service import Service

_CLIENT_GONE = 499  # nobody reads it


def make_app(service: Service, key: str | None, *, answer_id: bool = True) -> FastAPI:
    """The server.

    Args:
        service: what answers.
        key: the bearer key for every route but /health; None: none is asked for.
        answer_id: whether answers carry their request's id; False behind a proxy that adds it.
    """
    app = FastAPI(title="tiermoe", version=versions()["tiermoe"])
    limit = service.limits.body_bytes
    app.add_middleware(Guard, key=key, body_bytes=limit, answer_id=answer_id)
    _add_error_handlers(app)
    _add_generation(app, service)
    _add_tokens(app, service)
    _add_state(app, service)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        name = request.state.request_id
        return await _respond(request, Completion.start(service, body, name), name, stream=bool(body.stream))

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        name = request.state.request_id
        return await _respond(request, Chat.start(service, body, name), name, stream=bool(body.stream))


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Json:
        body.check()
        service.check_model(body.model)
        if body.messages is not None:
            ids = service.chat_ids(body.messages)
        else:
            ids = service.prompt_ids(body.prompt or "", special=body.add_special_tokens)
        return {"tokens": ids, "count": len(ids), "max_model_len": service.limit_tokens}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Json:
        service.check_model(body.model)
        ids = service.prompt_ids(body.tokens)
        return {"prompt": service.tokenizer.decode(list(ids), skip_special_tokens=False)}


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
            await service.reader.refresh(service.gate.waiting)
        return Response(service.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": versions()["tiermoe"]} | versions()


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        return await refuse(request, from_findings(error.errors()))

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return await refuse(request, ApiError(error.status_code, message, headers=error.headers))


async def _respond(request: Request, job: Completion | Chat, name: str, *, stream: bool) -> Response:
    """The whole answer, or a stream of chunks. A client that leaves ends what it asked for."""
    if stream:
        return EventStream(_sse(job.chunks(name)), job.run.close)
    answer = asyncio.ensure_future(job.answer(name))
    gone = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        return JSONResponse(answer.result()) if answer.done() else Response(status_code=_CLIENT_GONE)
    finally:
        answer.cancel()
        gone.cancel()
        job.run.close()


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

    def __init__(self, events: AsyncIterator[str], close: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._close()
