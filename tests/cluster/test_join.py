"""Joining a Ray that runs already, and leaving it as it was."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import FAKE_FACTS

from tiermoe.cluster.config import RaySettings, RunConfig, engine_settings
from tiermoe.cluster.deploy import Deployment
from tiermoe.cluster.scratch import Scratch
from tiermoe.errors import RuntimeFailure

_DRIVER = Path(__file__).with_name("driver.py")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A head node without authentication."""
    scratch = Scratch()
    port = _free_port()
    command = [
        str(Path(sys.executable).with_name("ray")), "start", "--head", f"--port={port}", "--num-cpus=2",
        f"--temp-dir={scratch.path}", "--include-dashboard=false", "--disable-usage-stats",
        "--object-store-memory=100000000",
    ]  # fmt: skip
    with (scratch.path / "start.log").open("w") as log:  # Ray's servers inherit it: not a pipe, which would never end
        subprocess.run(command, env=_environment("disabled"), stdout=log, stderr=log, timeout=90, check=True)
    yield f"127.0.0.1:{port}"
    scratch.close()


def _environment(mode: str) -> dict[str, str]:
    return os.environ | {"RAY_AUTH_MODE": mode}


def _join(address: str, mode: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(_DRIVER), "join", address]
    return subprocess.run(
        command, env=_environment(mode), capture_output=True, text=True, timeout=120, check=False
    )


def test_two_runs_after_each_other_join_and_leave(address: str) -> None:
    for _ in range(2):  # the second finds all CPUs free again
        done = _join(address, "disabled")
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["PLACED", "READY", "TOKEN"]


def test_another_authentication_mode_is_one_line_at_once(address: str) -> None:
    done = _join(address, "token")
    assert done.returncode == 1
    assert "has authentication mode 'disabled', this process has 'token'; set RAY_AUTH_MODE=disabled" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense"])
def test_an_address_without_ray_fails_at_once(address: str) -> None:
    config = RunConfig(threads=1, ray=RaySettings(address=address))
    deployment = Deployment(config, engine_settings(config), "store", facts=FAKE_FACTS)
    with pytest.raises(RuntimeFailure, match=f"'{address}'"), deployment:
        pytest.fail("started")
