"""`tiermoe bench serve` on a cluster: what it places and what runs, with a worker that is killed, and what stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from ray_nodes import head, joining_environment
from started import wait_until_said

from tiermoe.cluster.config import default_model_dir

_TIERMOE = str(Path(sys.executable).with_name("tiermoe"))
_WAIT_S = 300.0
_GONE_S = 60.0

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.skipif(not default_model_dir().is_dir(), reason="the default model is not there"),
    pytest.mark.timeout(900),
]
_LOAD = ("--streams", "2", "--requests", "2", "--repeats", "3", "--warmup", "2", "--max-tokens", "160", "--ignore-eos")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with head("--resources", '{"ndp": 1}', cpus=3) as found:
        yield found


@pytest.fixture
def config(address: str, tmp_path: Path) -> Path:
    file = tmp_path / "nodes.yaml"
    keys = {"policy": "context-ndp-full", "budget": "25%", "threads": 1, "device": "cpu", "ray": {"address": address}}
    file.write_text(yaml.safe_dump(keys))
    return file


def _begun(*arguments: object, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [_TIERMOE, *map(str, arguments)], env=joining_environment() | {"XDG_RUNTIME_DIR": str(folder)}, cwd=folder,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def _actors(address: str) -> list[psutil.Process]:
    """Processes of the deployments' actors."""
    mine = [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [""])[0].startswith("ray::")]
    titles = ("GpuWorker", "NdpWorker", "StoreWorker", "EndpointDirectory", "Edge")
    return [p for p in mine if any(title in p.info["cmdline"][0] for title in titles) and _is_of(p, address)]


def _is_of(process: psutil.Process, address: str) -> bool:
    try:
        raylet = process.parent()
        return raylet is not None and any(word.endswith(address[address.rindex(":") :]) for word in raylet.cmdline())
    except psutil.Error:
        return False


def _worker(address: str) -> psutil.Process:
    (found,) = [process for process in _actors(address) if "NdpWorker" in process.cmdline()[0]]
    return found


def _gone(address: str) -> None:
    _, alive = psutil.wait_procs(_actors(address), timeout=_GONE_S)
    assert not alive


def _check(record: dict[str, Any], address: str) -> None:
    """The run went on, and says where the rows went, and what was lost."""
    (row,) = record["rows"]
    assert (row["requests"], row["failed"]) == (12, 0)
    assert (record["executor"], record["settings"]["model"]) == ("emulated", default_model_dir().name)
    (node,) = record["nodes"]
    assert node["hardware"]["cores"] > 0
    workers = {one["worker"] for one in record["workers"]}
    assert {"lead", "store/0", "ndp/0", "endpoints"} <= workers
    rows = [one for one in record["peers"] if (one["worker"], one["peer"]) == ("lead", "ndp/0")]
    assert any(one["rates"]["rows_sent"] > 0 for one in rows)
    assert all(one["cpu"] >= 0 and one["rss_mib"] > 0 for one in record["workers"])
    assert any(one["shares"]["near_data"] > 0 for one in record["workers"] if "shares" in one)
    lost = [one["what"] for one in record["lost"] if one["worker"] == "ndp/0"]
    assert lost, record["lost"]
    assert any("restarts: 1" in what for what in lost), lost


def _measured_while_a_worker_dies(address: str, out: Path, *target: object) -> None:
    process = _begun("bench", "serve", *target, *_LOAD, "--out", out, folder=out.parent)
    try:
        wait_until_said(process, "repetitions: 1/3")
        _worker(address).kill()
        rest, _ = process.communicate(timeout=_WAIT_S)
        assert process.returncode == 0, rest
    finally:
        process.kill()
    _check(json.loads(out.read_text()), address)


def test_a_deployment_is_placed_measured_and_ended(address: str, config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    _measured_while_a_worker_dies(address, out, "--config", config)
    _gone(address)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_run_that_is_ended_leaves_nothing(
    address: str, config: Path, tmp_path: Path, number: int, code: int
) -> None:
    process = _begun("bench", "serve", "--config", config, *_LOAD, folder=tmp_path)
    try:
        wait_until_said(process, "repetitions: 1/3")
        before = _actors(address)
        assert len(before) == 5
        os.kill(process.pid, number)
        process.communicate(timeout=_WAIT_S)
        assert process.returncode == code
    finally:
        process.kill()
    _, alive = psutil.wait_procs(before, timeout=_GONE_S)
    assert not alive


def test_a_running_deployment_is_measured_and_stays(address: str, config: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    up = _begun("up", "--config", config, folder=tmp_path)
    try:
        wait_until_said(up, "is ready at")
        _measured_while_a_worker_dies(address, out, "--attach", address)
        end_s = time.monotonic() + _GONE_S
        while len(_actors(address)) != 4:  # without the server that was put before it
            assert time.monotonic() < end_s, _actors(address)
        assert up.poll() is None
    finally:
        up.terminate()
        up.communicate(timeout=_WAIT_S)
    _gone(address)
