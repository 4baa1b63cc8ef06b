"""`GET /status`: what it says of the server and its runtime."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from fake_api import FakeBackend, ask

from tiermoe.actors.engine.stats import LayerResidency


def read_status(backend: FakeBackend, prompts: tuple[str, ...] = ()) -> dict[str, Any]:
    async def call(http: httpx.AsyncClient) -> dict[str, Any]:
        for prompt in prompts:
            await http.post("/v1/completions", json={"prompt": prompt})
        response = await http.get("/status")
        assert response.headers["content-type"] == "application/json"
        return response.json()

    return ask(backend, call)


def test_what_it_says() -> None:
    found = read_status(FakeBackend(), ("hi", "hello"))
    assert (found["model"], found["policy"], found["lossless"], found["not_ready"]) == ("fake", "next-gate", True, None)
    assert found["fresh"] is True
    assert found["queue"] == {"running": 0, "waiting": 0, "kv_usage": 0.25}
    assert found["tokens"] == {"prompt": 7, "generated": 9}
    assert found["latency"]["requests"] == 2
    assert 0 < found["latency"]["ttft_s"]["p50"] <= found["latency"]["ttft_s"]["p99"]
    assert (found["experts"]["hits"], found["experts"]["misses"], found["experts"]["needed"]) == (5, 2, 7)
    assert found["experts"]["hit_rate"] == found["experts"]["shares"]["hit"] == 5 / 7
    assert found["links"] == [{"gpu": "shard/0", "busy_s": 0.0}]
    assert found["residency"] == [
        {"states": [2, 0, 1], "uses": [4, 0, 1]}, {"states": [0, 2, 2], "uses": [0, 1, 8]},
    ]  # fmt: skip


def test_the_map_is_of_all_gpus_that_answer() -> None:
    backend = FakeBackend()
    backend.plan["shards"] = [{"shard": number, "experts": 3, "slots": 2} for number in range(3)]
    lead, shard = LayerResidency((2, 0, 0), (4, 0, 0)), LayerResidency((0, 2, 0), (0, 7, 0))
    backend.residency = {None: [lead], "shard/1": [shard]}
    backend.shard_stats = [{"shard": "shard/0", "state": "serving", "hits": 3, "misses": 1, "total_io_s": 0.5},
                           {"shard": "shard/1", "state": "serving", "hits": 2, "misses": 2, "total_io_s": 0.25},
                           {"shard": "shard/2", "state": "lost"}]  # fmt: skip
    found = read_status(backend)
    assert found["residency"] == [{"states": [2, 2, 0], "uses": [4, 7, 0]}]
    assert (found["experts"]["hits"], found["experts"]["misses"], found["experts"]["hit_rate"]) == (5, 3, 5 / 8)
    assert found["links"] == [{"gpu": "shard/0", "busy_s": 0.5}, {"gpu": "shard/1", "busy_s": 0.25}]


def test_a_runtime_that_does_not_answer_is_said() -> None:
    backend = FakeBackend()
    backend.failure = "the worker died"
    found = read_status(backend)
    assert (found["fresh"], found["residency"], "the worker died" in found["not_ready"]) == (False, None, True)


def test_many_clients_ask_the_runtime_once_a_second() -> None:
    backend = FakeBackend()

    async def call(http: httpx.AsyncClient) -> int:
        await asyncio.gather(*(http.get("/status") for _ in range(20)))
        return backend.asked

    assert ask(backend, call) <= 5
