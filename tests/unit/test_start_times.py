"""What a start says about the seconds left, and the server about what it waits for; what starts first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_api import FakeBackend, ask

from tiermoe.cluster.config import RunConfig
from tiermoe.cluster.report.steps import LastStart

BEFORE = {"starting Ray": 4.0, "loading weights": 10.0, "probing": 1.0}


@pytest.mark.parametrize("text", ["", "[]", '{"x": 3}', "\x00", '{"KEY": {"a": "b"}}', '{"KEY": {"a": -1}}'])
def test_a_damaged_file_is_as_none(text: str, tmp_path: Path) -> None:
    file = tmp_path / "starts.json"
    last = LastStart("serve", RunConfig(), file)
    file.write_text(text.replace("KEY", last._key))
    damaged = LastStart("serve", RunConfig(), file)
    assert damaged.seconds == {}
    damaged.remember({"a": 1})
    assert LastStart("serve", RunConfig(), file).seconds == {"a": 1}
    LastStart("serve", RunConfig(), Path("/proc/none/starts.json")).remember({"a": 1})  # cannot be written


@pytest.mark.parametrize(
    ("plan", "health", "reason", "after"),
    [
        ({"start_s": BEFORE}, {"state": "loading weights", "since_s": 2.5}, "the runtime is loading weights, ready in "
         "about 8 s", "8"),
        ({}, {"state": "loading weights", "since_s": 2.5}, "the runtime is loading weights", "2"),
        ({"start_s": BEFORE}, {"state": "created"}, "the runtime is created", "2"),
    ],
)  # fmt: skip
def test_ready_says_what_it_waits_for(plan: dict[str, Any], health: dict[str, Any], reason: str, after: str) -> None:
    backend = FakeBackend()
    backend.plan |= plan
    backend.health = health

    async def call(http: httpx.AsyncClient) -> tuple[Any, ...]:
        response = await http.get("/ready")
        return response.status_code, response.json()["reason"], response.headers["retry-after"]

    assert ask(backend, call) == (503, reason, after)
