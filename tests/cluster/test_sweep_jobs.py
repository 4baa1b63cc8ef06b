"""`bench sweep` on two Ray nodes: ended midway it leaves nothing and resumes; a lost node or refused cell is a row."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tiermoe.benchmarks.machines import BIN, Loopback, Node, RayNodes, environment
from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.jobs.bench.cells import journal_file

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not default_model_dir().is_dir(), reason="the default model is not there"),
]

_WAIT_S = 300.0
_GPUS = [1, 2, 9]


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    machines = Loopback()
    try:
        found = RayNodes(machines, cpus=3)
        found.add(3)
        yield found
    finally:
        machines.close()


@pytest.fixture
def sweep(nodes: RayNodes, tmp_path: Path) -> Callable[[], subprocess.Popen[bytes]]:
    """Begins the sweep, whose result is `out.json`, and what it says `log`."""
    content = {
        "config": {
            "policy": "on-demand", "budget": "0.25", "threads": 1, "device": "cpu", "ray": {"address": nodes.address},
            "cluster": {"lead": nodes.head.address, "strategy": "spread"},
        },
        "load": {"streams": 2, "requests": 12, "max_tokens": 96, "ignore_eos": True, "warmup": 0},
        "repeats": 1, "cells": [{"cluster.shards": _GPUS}], "baseline": {"cluster.shards": 1},
    }  # fmt: skip
    (file := tmp_path / "sweep.yaml").write_text(yaml.safe_dump(content))
    command = [str(BIN / "tiermoe"), "bench", "sweep", str(file), "--out", str(tmp_path / "out.json")]
    (tmp_path / "run").mkdir()
    env = environment() | {"XDG_RUNTIME_DIR": str(tmp_path / "run")}
    with contextlib.ExitStack() as stack:

        def begin() -> subprocess.Popen[bytes]:
            with (tmp_path / "log").open("wb") as log:
                process = subprocess.Popen(command, env=env, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        yield begin


def _until(what: Callable[[], Any], process: subprocess.Popen[bytes]) -> Any:
    end_s = time.monotonic() + _WAIT_S
    while not (found := what()):
        assert time.monotonic() < end_s
        assert process.poll() is None, "the sweep has ended"
        time.sleep(0.1)
    return found


def _actors(nodes: RayNodes) -> list[psutil.Process]:
    """Of any deployment, on any node."""
    kinds = ("ray::GpuWorker", "ray::ShardWorker", "ray::ExpertStore", "ray::NdpWorker", "ray::Endpoints")
    found = []
    for process in (p for node in nodes.nodes for p in node.machine.processes()):
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(kinds):
                found.append(process)
    return found


def _works(node: Node, actor: str) -> bool:
    """Whether an actor there has computed for some time since the last look."""
    with contextlib.suppress(ValueError, psutil.Error):
        process = node.actor(actor)
        before_s = process.cpu_times().user
        time.sleep(0.5)
        return bool(process.cpu_times().user - before_s > 0.05 and process.num_threads() > 1)
    return False


def test_ended_midway_it_resumes_and_what_is_lost_or_refused_is_a_row(
    nodes: RayNodes, sweep: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    first = sweep()
    _until(journal_file(out).exists, first)  # one cell is finished
    _until(lambda: _actors(nodes), first)
    first.send_signal(signal.SIGTERM)
    assert first.wait(_WAIT_S) == 143
    assert not out.exists()
    assert len(json.loads(journal_file(out).read_text())["steps"]) == 1
    _gone(nodes, tmp_path)

    second = sweep()
    _until(lambda: "starting the HTTP server" in (tmp_path / "log").read_text(), second)
    _until(lambda: _works(nodes.nodes[1], "ShardWorker"), second)
    nodes.kill_raylet(nodes.nodes[1])
    second.wait(_WAIT_S)
    record = json.loads(out.read_text())
    rows = {row["cluster.shards"]: row for row in record["rows"]}
    assert list(rows) == _GPUS
    assert rows[1]["tokens_per_s"] > 0
    assert rows[1]["ratio"] == 1
    lost = {entry["what"] for visit in rows[2].get("visits", ()) for entry in visit["lost"]}
    assert "refused" in rows[2] or "node lost" in lost, (rows[2], (tmp_path / "log").read_text())
    assert "fits on no node" in rows[9]["refused"]
    assert second.returncode != 0  # a cell was refused
    _gone(nodes, tmp_path)


def _gone(nodes: RayNodes, folder: Path) -> None:
    """No actor is left, and no entry of a deployment that would run."""
    end_s = time.monotonic() + 30
    while _actors(nodes) and time.monotonic() < end_s:
        time.sleep(0.2)
    assert _actors(nodes) == []
    assert [path.name for path in (folder / "run").rglob("*.json")] == []
