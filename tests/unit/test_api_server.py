"""The server around requests: the key, limits, clients that leave, request ids, tokens, readiness, metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from api_calls import WAIT_S, ask, error, post
from fake_backend import FakeBackend, serving
from prometheus_client.parser import text_string_to_metric_families

from tiermoe.cluster.api.settings import LimitSettings


def test_the_key_opens_everything_but_health() -> None:
    async def call(http: httpx.AsyncClient) -> list[tuple[int, str]]:
        good = {"Authorization": "Bearer sesame"}
        paths = ["/v1/models", "/metrics", "/version", "/ready", "/docs", "/openapi.json"]
        found = []
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sesame"}, good):
            found += [(await http.get(path, headers=headers)).status_code for path in paths]
            body = {"prompt": "hi"}
            found.append((await http.post("/v1/completions", json=body, headers=headers)).status_code)
        found.append((await http.get("/health")).status_code)
        return found

    assert ask(FakeBackend(), call, key="sesame") == [401] * 21 + [200] * 8


def test_bodies_are_bounded_whether_their_length_is_announced_or_not() -> None:
    async def stream() -> AsyncIterator[bytes]:
        for _ in range(8):
            yield b" " * 512

    async def call(http: httpx.AsyncClient) -> list[int]:
        said = await http.post("/v1/completions", content=b" " * 2000)
        unsaid = await http.post("/v1/completions", content=stream())
        return [said.status_code, unsaid.status_code]

    assert ask(FakeBackend(), call, limits=LimitSettings(body_bytes=1024)) == [413, 413]


def test_request_ids_come_back() -> None:
    async def call(http: httpx.AsyncClient) -> list[tuple[str, str]]:
        found = []
        for given in ("mine-1", "not a word"):
            response = await http.post("/v1/completions", json={"prompt": "p"}, headers={"X-Request-Id": given})
            found.append((response.headers["x-request-id"], response.json()["id"]))
        return found

    (name, answer), (other, _) = ask(FakeBackend(), call)
    assert (name, answer) == ("mine-1", "cmpl-mine-1")
    assert other != "not a word"


def test_a_full_queue_is_429_and_moves_on() -> None:
    async def call(http: httpx.AsyncClient) -> tuple[httpx.Response, list[int]]:
        backend.hold = asyncio.Event()
        body = {"prompt": "hello"}
        running = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(2)]
        while len(backend.requests) < 1:
            await asyncio.sleep(0)
        refused = await http.post("/v1/completions", json=body)
        backend.hold.set()
        return refused, [(await task).status_code for task in running]

    backend = FakeBackend(max_requests=1)
    refused, others = ask(backend, call, limits=LimitSettings(waiting=1))
    assert error(refused)[0] == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert others == [200, 200]
    assert error(post("/v1/completions", {"prompt": "p", "n": 3}, FakeBackend(max_requests=1),
                      limits=LimitSettings(waiting=1)))[0] == 429  # all choices or none  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(stream: bool) -> None:
    """Below HTTP: what the server sees is a disconnect while the answer is held."""

    async def run() -> None:
        backend = FakeBackend()
        backend.hold = asyncio.Event()
        service, client = serving(backend)
        body = json.dumps({"prompt": "hello", "stream": stream, "n": 2}).encode()
        inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
            "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
            "scheme": "http", "server": ("test", 80), "client": ("test", 1),
            "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip

        async def send(message: Any) -> None:
            return None

        call = asyncio.create_task(client()._transport.app(scope, inbox.get, send))  # type: ignore[attr-defined]
        while backend.open < 2:
            await asyncio.sleep(0)
        inbox.put_nowait({"type": "http.disconnect"})
        await asyncio.wait_for(call, WAIT_S)
        while backend.open or service.admission.inside:
            await asyncio.sleep(0)
        assert len(backend.cancelled) == 2
        assert service.admission.waiting == 0
        assert 'finished_reason="abort"} 2.0' in service.metrics.page().decode()

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_tokenize_and_back() -> None:
    found = post("/tokenize", {"prompt": "hé"}).json()
    assert found == {"tokens": [0x68, 0xC3, 0xA9], "count": 3, "max_model_len": 64}
    assert post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "hé"}
    assert error(post("/tokenize", {}))[0] == 400


def test_models_version_and_readiness() -> None:
    async def call(http: httpx.AsyncClient) -> list[Any]:
        models = (await http.get("/v1/models")).json()
        assert models["data"][0]["id"] == "fake"
        assert "tiermoe" in (await http.get("/version")).json()
        ready = await http.get("/ready")
        backend.failure = "the worker died"
        return [ready.status_code, (await http.get("/ready")).status_code, (await http.get("/health")).status_code]

    backend = FakeBackend()
    assert ask(backend, call) == [200, 503, 200]


def test_metrics_parse_and_count() -> None:
    async def call(http: httpx.AsyncClient) -> str:
        await http.post("/v1/completions", json={"prompt": "hi", "n": 2})
        await http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2})
        first = await http.get("/metrics")
        asked = backend.asked
        assert (await http.get("/metrics")).status_code == 200
        assert backend.asked == asked  # the runtime is not asked at every scrape
        return first.text

    backend = FakeBackend()
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(ask(backend, call))
        for sample in family.samples
    }
    assert found["tiermoe_request_success_total", "stop"] == 2
    assert found["tiermoe_request_success_total", "length"] == 1
    assert found["tiermoe_prompt_tokens_total",] == 9
    assert found["tiermoe_generation_tokens_total",] == 8
    assert found["tiermoe_time_to_first_token_seconds_count",] == 3
    assert found["tiermoe_inter_token_latency_seconds_count",] == 5
    assert found["tiermoe_e2e_request_latency_seconds_count",] == 3
    assert found["tiermoe_request_queue_time_seconds_count",] == 3
    assert found["tiermoe_expert_hits_total",] == 5
    assert found["tiermoe_expert_bytes_loaded_total", "prefetch"] == 64
    assert found["tiermoe_kv_cache_usage_ratio",] == 0.25
    wanted = ("expert_misses", "expert_bytes_wasted", "blocked_io_seconds", "ndp_tokens", "substitutions")
    assert all((f"tiermoe_{name}_total",) in found for name in wanted)
    assert {("tiermoe_num_requests_running",), ("tiermoe_num_requests_waiting",)} <= set(found)
