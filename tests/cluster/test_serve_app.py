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

    from tiermoe.cluster.api.app import PortReservation, build
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
    leads = [process for process in psutil.process_iter() if _is_ours(process)]
    (lead,) = leads
    lead.kill()
    lead.wait(timeout=30)
    failed = _complete(url)
    assert failed.status_code in (500, 503)
    end_s = time.monotonic() + _WAIT_S
    while (again := _complete(url)).status_code != 200:
        assert time.monotonic() < end_s, again.text
    assert again.json()["choices"] == first.json()["choices"]


def _is_ours(process: psutil.Process) -> bool:
    """A lead of a Ray below this test."""
    try:
        named = "".join(process.cmdline()[:1]).startswith("ray::GpuWorker")
        return named and psutil.Process() in process.parents()
    except psutil.Error:
        return False
