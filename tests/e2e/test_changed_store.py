"""A file of a store that changes under `tiermoe serve` ends who serves from it; once back, it is served."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tiermoe.actors.store.format import layer_name

sys.path.insert(0, str(Path(__file__).parents[1] / "chaos"))
from rig import Server, run_streams, served

pytestmark = pytest.mark.slow
NOTICED_S, AGAIN_S = 30.0, 120.0
BODY = {"prompt": "def read(path):", "max_tokens": 24, "temperature": 0, "ignore_eos": True}


def _within(seconds: float, reached: Callable[[], bool]) -> None:
    end_s = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end_s
        time.sleep(0.2)


def _ready(server: Server) -> httpx.Response:
    return httpx.get(f"{server.url}/ready", timeout=10.0)


def _refused_for(server: Server, path: Path) -> bool:
    ready = _ready(server)
    return ready.status_code == 503 and str(path) in ready.json()["reason"]


def test_a_changed_file_stops_serving_and_its_return_serves_again(tmp_path: Path) -> None:
    """Guards: 0 of 12 texts were right, with 200 and ready; a bad page failed all requests for good, with ready."""
    store = tmp_path / "store"
    with served("--store", str(store), "--policy", "next-gate", "--budget", "25%") as server:
        (expected,) = run_streams(server.url, [BODY])
        path = store / layer_name(1)
        before = path.read_bytes()
        for number, way in enumerate(("written in place", "truncated"), 1):
            if way == "truncated":
                os.truncate(path, 4096)
            else:
                with open(path, "r+b") as file:
                    file.write(before[: len(before) // 2] + bytes(len(before) - len(before) // 2))
            _within(NOTICED_S, lambda: _refused_for(server, path))
            refused = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=30.0)
            assert refused.status_code == 503
            assert str(path) in refused.json()["error"]["message"]
            assert "tiermoe_store_damaged 1.0" in httpx.get(f"{server.url}/metrics", timeout=10.0).text
            for who in ("the lead", "store/0"):
                said = f"{who} stopped serving: {path}"
                _within(NOTICED_S, lambda said=said, number=number: server.said().count(said) == number)
            path.write_bytes(before)
            _within(AGAIN_S, lambda: _ready(server).status_code == 200)
            _within(AGAIN_S, lambda number=number: server.said().count("store/0 serves again") == number)
            (again,) = run_streams(server.url, [BODY])
            assert (again.error, again.text) == (None, expected.text), way
