"""Calls on a fresh server over a backend that answers from a table."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from fake_backend import FakeBackend, serving

WAIT_S = 20.0
Call = Callable[[httpx.AsyncClient], Awaitable[Any]]


def ask(backend: FakeBackend, call: Call, **options: Any) -> Any:
    """What a call on a client of a fresh server returns."""

    async def run() -> Any:
        service, client = serving(backend, **options)
        async with client() as http:
            result = await asyncio.wait_for(call(http), WAIT_S)
        assert service.admission.waiting == service.admission.inside == backend.open == 0
        return result

    return asyncio.run(run())


def post(path: str, body: Any, backend: FakeBackend | None = None, **options: Any) -> httpx.Response:
    headers = options.pop("headers", None)
    return ask(backend or FakeBackend(), lambda http: http.post(path, json=body, headers=headers), **options)


def complete(body: dict[str, Any], backend: FakeBackend | None = None, **options: Any) -> dict[str, Any]:
    response = post("/v1/completions", {"temperature": 0} | body, backend, **options)
    assert response.status_code == 200, response.text
    return response.json()


def chat(body: dict[str, Any], backend: FakeBackend | None = None, **options: Any) -> dict[str, Any]:
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    response = post("/v1/chat/completions", messages | body, backend, **options)
    assert response.status_code == 200, response.text
    return response.json()


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end as OpenAI's do."""
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def error(response: httpx.Response) -> tuple[int, str | None, str]:
    body = response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    return response.status_code, body["param"], body["message"]
