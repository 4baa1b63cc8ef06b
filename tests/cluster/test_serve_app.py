"""The Serve application as `serve run` and KubeRay deploy it: it starts its own runtime, and another when that dies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tiermoe.cluster.config import default_model_dir

pytest.importorskip("ray.serve")
pytest.importorskip("fastapi")

_WAIT_S = 200.0

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.skipif(not default_model_dir().is_dir(), reason="the default model is not there"),
]


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An application in a Ray of its own."""
    from ray import serve

    from tiermoe.cluster.api.app import build
    from tiermoe.cluster.api.door import PortReservation
    from tiermoe.cluster.ray_session import leave, start_local
    from tiermoe.cluster.scratch import Scratch

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    scratch, port = Scratch(), PortReservation("127.0.0.1", 0)
    try:
        start_local(scratch, 3, {}, 100_000_000, 1)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port.port})
        args = {"runtime": {"device": "cpu", "threads": 1, "budget": 0.25}, "model_name": "mine"}
        serve.run(build(args), name="tiermoe")
        yield f"http://127.0.0.1:{port.port}"
    finally:
        serve.shutdown()
        leave()
        port.close()
        scratch.close()


def _complete(url: str) -> httpx.Response:
    body: dict[str, Any] = {"prompt": "import os", "max_tokens": 8, "temperature": 0, "model": "mine"}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=_WAIT_S)


def test_it_starts_a_runtime_and_another_when_that_dies(url: str) -> None:
    first = _complete(url)
    assert first.status_code == 200, first.text
    _kill("ray::GpuWorker")  # the lead: the runtime starts it again, and the request waits
    resumed = _complete(url)
    assert resumed.status_code == 200, resumed.text
    assert resumed.json()["choices"] == first.json()["choices"]
    _kill("tiermoe.cluster.cli", "up")  # the runtime
    end_s = time.monotonic() + _WAIT_S
    while (again := _complete(url)).status_code != 200:
        assert again.status_code == 503, again.text
        assert time.monotonic() < end_s, again.text
    assert again.json()["choices"] == first.json()["choices"]


def _kill(*words: str) -> None:
    """Kill the only process below this test whose command line has these words."""
    (process,) = [child for child in psutil.Process().children(recursive=True) if _has(child, words)]
    process.kill()
    psutil.wait_procs([process], timeout=30)


def _has(process: psutil.Process, words: tuple[str, ...]) -> bool:
    try:
        line = process.cmdline()
    except psutil.Error:
        return False
    return all(any(argument.startswith(word) for argument in line) for word in words)
