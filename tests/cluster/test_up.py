"""`tiermoe up` on a Ray of its own: requests from other processes, its status, its end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tiermoe.cluster.config import default_model_dir

_TIERMOE = str(Path(sys.executable).with_name("tiermoe"))
_WAIT_S = 120.0

pytestmark = pytest.mark.skipif(not default_model_dir().is_dir(), reason="the default model is not there")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    return variables | {"XDG_RUNTIME_DIR": str(tmp_path)}


@pytest.fixture
def up(environment: dict[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A runtime that is ready."""
    command = [_TIERMOE, "up", "--policy", "next-gate", "--device", "cpu", "--budget", "25%"]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        assert any("is ready at" in line for line in process.stdout)  # ends with the process; bounded by pytest
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=_WAIT_S)


def _tiermoe(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [_TIERMOE, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_WAIT_S, check=False)


def test_two_attached_drivers_status_and_down(
    environment: dict[str, str], up: subprocess.Popen[str], tmp_path: Path
) -> None:
    (entry,) = [json.loads(path.read_text()) for path in (tmp_path / "tiermoe").iterdir()]
    address = entry["address"]
    family = psutil.Process(up.pid).children(recursive=True)

    command = [_TIERMOE, "run", "import os", "--attach", address, "--max-tokens", "24", "--json"]
    drivers = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [driver.communicate(timeout=_WAIT_S) for driver in drivers]
    assert [driver.returncode for driver in drivers] == [0, 0], said
    first, second = (json.loads(out) for out, _ in said)
    assert first["token_ids"] == second["token_ids"]
    assert len(first["token_ids"]) == first["generated_tokens"] == 24
    assert first["attached_to"] == entry["deployment"]

    status = _tiermoe(environment, "status", "--json")
    assert status.returncode == 0, status.stderr
    (deployment,) = json.loads(status.stdout)["deployments"]
    pids = {actor["role"]: actor["pid"] for actor in deployment["actors"]}
    assert set(pids) == {"lead", "store/0"}
    assert {p.pid for p in family} >= set(pids.values())
    slots, plan = deployment["counters"]["slots"], deployment["plan"]
    states = [state for layer in deployment["residency"] for state in layer["states"]]
    assert len(states) == plan["experts"]
    assert 0 < sum(state == 2 for state in states) <= slots
    assert sum(use for layer in deployment["residency"] for use in layer["uses"]) == (
        deployment["counters"]["hits"] + deployment["counters"]["misses"]
    )

    down = _tiermoe(environment, "down")
    assert (down.returncode, down.stdout) == (0, f"deployment {entry['deployment']} has ended\n"), down.stderr
    assert up.wait(timeout=_WAIT_S) == 0
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
    assert not (tmp_path / "tiermoe").exists()
    assert "nothing to end" in _tiermoe(environment, "down").stdout
    none = _tiermoe(environment, "status")
    assert none.returncode == 1
    assert "start one with `tiermoe up`" in none.stderr


@pytest.mark.slow
def test_down_while_it_starts(environment: dict[str, str], tmp_path: Path) -> None:
    """It is found as soon as it has a Ray, and takes its end for an orderly one."""
    command = [_TIERMOE, "up", "--threads", "1", "--device", "cpu"]
    up = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        end_s = time.monotonic() + _WAIT_S
        while not list(tmp_path.glob("tiermoe/*.json")):
            assert up.poll() is None
            assert time.monotonic() < end_s
            time.sleep(0.02)
        (entry,) = [json.loads(path.read_text()) for path in (tmp_path / "tiermoe").iterdir()]
        family = psutil.Process(up.pid).children(recursive=True)
        down = _tiermoe(environment, "down")
        assert (down.returncode, down.stdout) == (0, f"deployment {entry['deployment']} has ended\n"), down.stderr
        out, errors = up.communicate(timeout=_WAIT_S)
        assert (up.returncode, out) == (0, f"deployment {entry['deployment']} was ended by `tiermoe down`\n"), errors
        step = re.compile(r".+ \.\.\.( \(ready in about \d+ s\))?")  # seconds where such a start is remembered
        assert all(step.fullmatch(line) for line in errors.splitlines()), errors
        _, alive = psutil.wait_procs(family, timeout=30)
        assert not alive
    finally:
        up.kill()
        up.communicate()
