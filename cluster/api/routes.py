"""The FastAPI application: its routes, and the form of errors.

A request goes forward:

    Guard   ->  parsed by FastAPI  ->  checked and tokenized       ->  Runs.submit  ->  Answer
    (key)       (`schema`)             (`checks`, `ServedModel`)       (`runs`)         (`answers`, `responses`)
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from ...errors import TierMoeError
from ..host import versions
from .answers import Answer, CheckedRequest, Json, Written
from .anthropic import CountBody, MessagesAnswer, MessagesBody
from .bodies import body_route
from .checks import chat, chat_tokens, completion, refuse_tools
from .guard import Guard, Receive, Scope, Send
from .keys import KeyRing
from .model import ServedModel
from .offload import LARGE_BYTES
from .origins import Access
from .parameters import warning
from .records import CLIENT_GONE, RequestRecord, Sink
from .refusals import ApiError
from .responses import ResponsesAnswer, ResponsesBody
from .runs import Runs
from .schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, from_findings

_LOG = logging.getLogger("tiermoe.server")
# JSON leaves them as they are, and Python's `splitlines`, by which httpx reads lines, ends an event's line there
_LINE_ENDS = {ord(letter): f"\\u{ord(letter):04x}" for letter in "\x85\u2028\u2029"}


def make_app(
    model: ServedModel, runs: Runs, keys: KeyRing | None, *, sinks: Sequence[Sink] = (), access: Access | None = None
) -> FastAPI:
    """The server.

    Args:
        model, runs: what answers.
        keys: the bearer keys for every route but /health; None: none is asked for.
        sinks: receivers of each request's record at its end, in addition to the metrics.
        access: which web pages may ask; None: only those of the server itself.
    """
    app = FastAPI(title="tiermoe", version=versions()["tiermoe"], redirect_slashes=False)
    app.router.route_class = body_route(model.offload, model.limit_tokens)
    sinks = (runs.metrics.request, *sinks)
    app.add_middleware(Guard, keys=keys, limits=runs.limits, sinks=sinks, access=access)
    _add_error_handlers(app)
    _add_generation(app, model, runs)
    _add_state(app, model, runs)
    return app


def _add_generation(app: FastAPI, model: ServedModel, runs: Runs) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await _generate(runs, request, await completion(model, body, request.state.key))

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await _generate(runs, request, await chat(model, body, request.state.key))

    @app.post("/v1/responses")
    async def responses(body: ResponsesBody, request: Request) -> Response:
        chats = await model.offload.run(body.size, lambda: body.chat)
        return await _generate(runs, request, await chat(model, chats, request.state.key), ResponsesAnswer)

    @app.post("/v1/messages")
    async def messages(body: MessagesBody, request: Request) -> Response:
        chats = await model.offload.run(body.size, lambda: body.chat)
        return await _generate(runs, request, await chat(model, chats, request.state.key), MessagesAnswer)

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountBody, request: Request) -> Json:
        chats = await model.offload.run(body.size, lambda: body.chat)
        return {"input_tokens": await chat_tokens(model, chats, request.state.key)}

    @app.post("/v1/embeddings")
    async def embeddings() -> Response:
        message = "this server generates text and gives no embeddings; ask a server with an embedding model for them"
        raise ApiError(400, message, code="unsupported_endpoint")

    @app.post("/tokenize", response_model=Json)
    async def tokenize(body: TokenizeBody, request: Request) -> Response:
        body.check()
        model.check_name(body.model)
        if body.messages is not None:
            tools = [tool.plain for tool in body.tools or ()]
            refuse_tools(model, offered=bool(tools))
            text = await model.chat_text(body, body.messages, tools=tools, key=request.state.key)
            ids = await model.prompt_ids(text, special=False, parameter="messages")
        else:
            ids = await model.prompt_ids(body.prompt or "", special=body.add_special_tokens)
        found = {"tokens": ids, "count": len(ids), "max_model_len": model.limit_tokens}
        # FastAPI would look at each id, on the event loop
        return Response(await model.offload.run(len(ids), lambda: json.dumps(found)), media_type="application/json")

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Json:
        model.check_name(body.model)
        ids = await model.prompt_ids(body.tokens, parameter="tokens")
        return {"prompt": await model.text_of(ids)}


async def _generate(
    runs: Runs, request: Request, checked: CheckedRequest, form: Callable[..., Written] = Answer
) -> Response:
    """The whole answer, or a stream of chunks. A client that disconnects cancels its request."""
    record: RequestRecord = request.state.record
    name, ignored = record.request_id, checked.body.ignored
    headers = warning(ignored)
    runs.metrics.count_ignored(ignored)
    run = runs.submit(checked.choices, name, request.state.key)
    record.choices, record.prompts = run.times, checked.prompts
    answer = form(checked, run, name)
    if checked.body.stream:
        return EventStream(_sse(answer, record), run.close, headers)
    whole = asyncio.ensure_future(answer.whole())
    gone = asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait((whole, gone), return_when=asyncio.FIRST_COMPLETED)
        if not whole.done():
            return Response(status_code=CLIENT_GONE)
        return Response(await _written(whole.result()), headers=headers, media_type="application/json")
    finally:
        whole.cancel()
        gone.cancel()
        run.close()


async def _written(answer: Json) -> bytes:
    """An answer's JSON. The scores of many prompts would hold the event loop for seconds, so choices that have scores
    are written beside it, one at a time: whoever writes JSON holds the interpreter until it is written."""
    parts = []
    for name, value in answer.items():
        text = _json(value) if name != "choices" else "[" + ",".join([
            await asyncio.to_thread(_json, choice) if choice.get("logprobs") else _json(choice) for choice in value
        ]) + "]"  # fmt: skip
        parts.append(f"{_json(name)}:{text}")
    written = "{" + ",".join(parts) + "}"
    return await asyncio.to_thread(written.encode) if len(written) > LARGE_BYTES else written.encode()


def _add_state(app: FastAPI, served: ServedModel, runs: Runs) -> None:
    started_s = int(time.time())

    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [await model(served.name)]}

    @app.get("/v1/models/{name:path}")  # a name may have slashes
    async def model(name: str) -> Json:
        served.check_name(name)
        return {
            "id": served.name, "object": "model", "created": started_s, "owned_by": "tiermoe",
            "max_model_len": served.limit_tokens, "policy": served.plan.get("policy"),
            "lossless": served.plan.get("lossless"),
        }  # fmt: skip

    @app.get("/health")
    async def health() -> Json:
        return {"status": "ok", "leads": [state.as_dict() for state in runs.backend.states()]}

    @app.get("/ready")
    async def ready() -> Response:
        states, waits = runs.backend.states(), runs.not_ready()
        leads = [state.as_dict() for state in states]
        if waits is not None:
            left = {"reason": str(waits), "seconds_left": waits.left_s}
            body = {"status": "not ready", "leads": leads} | left
            return JSONResponse(body, 503, {"Retry-After": str(waits.retry_after_s)})
        runtime = next(state.health for state in states if state.serves)
        return JSONResponse({"status": "ready", "runtime": runtime, "leads": leads})

    @app.get("/metrics")
    async def metrics() -> Response:
        runs.metrics.runtime.damaged = sum(state.damaged for state in runs.backend.states())
        with contextlib.suppress(TierMoeError):  # the server's own numbers are worth having all the more then
            await runs.metrics.refresh(runs.admission.waiting)
        return Response(runs.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": versions()["tiermoe"]} | versions()


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refuse(request: Request, error: ApiError) -> Response:
        record: RequestRecord = request.state.record
        record.refuse(error)
        return JSONResponse(error.body_for(record.path), error.status, error.headers)

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


async def _sse(answer: Written, record: RequestRecord) -> AsyncIterator[str]:
    """Server-sent events; what fails once the stream has begun is an event too."""
    try:
        async for chunk in answer.chunks():
            yield _event(chunk, answer.names_events)
    except ApiError as error:
        record.refuse(error)
        yield _event(error.body_for(record.path), answer.names_events)
    except Exception as error:  # the stream reports it, and ends normally
        _LOG.exception("a stream failed")
        failure = ApiError(500, f"the server failed: {type(error).__name__}; report it")
        record.refuse(failure)
        yield _event(failure.body_for(record.path), answer.names_events)
    yield answer.ending


def _event(value: Json, named: bool) -> str:
    kind = f"event: {value['type']}\n" if named and "type" in value else ""
    return kind + f"data: {_json(value).translate(_LINE_ENDS)}\n\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


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
