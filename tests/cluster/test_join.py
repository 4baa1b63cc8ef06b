"""Joining a Ray that runs already, leaving it as it was, and placing an NDP worker where the resource `ndp` is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import FAKE_FACTS
from ray_nodes import head
from ray_nodes import joining_environment as environment

from tiermoe.benchmarks.machines import BIN
from tiermoe.cluster.config import RaySettings, RunConfig, engine_settings
from tiermoe.cluster.deploy import Deployment
from tiermoe.cluster.launch import Launch, StandIns
from tiermoe.errors import ConfigError, RuntimeFailure

_DRIVER = Path(__file__).with_name("driver.py")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with head(cpus=4) as address:
        yield address


def _join(address: str, mode: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(_DRIVER), "join", address]
    return subprocess.run(command, env=environment(mode), capture_output=True, text=True, timeout=120, check=False)


def _run_with_ndp(address: str, folder: Path) -> subprocess.CompletedProcess[str]:
    config = folder / "run.yaml"
    config.write_text(f"policy: context-ndp-full\nbudget: 50%\nthreads: 1\nray:\n  address: {address}\n")
    command = [str(BIN / "tiermoe"), "run", "import os", "--config", str(config), "--max-tokens", "48", "--json"]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=150, check=False)


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


@pytest.mark.parametrize(("address", "error"), [("127.0.0.1:1", RuntimeFailure), ("nonsense", ConfigError)])
def test_an_address_without_ray_fails_at_once(address: str, error: type[Exception]) -> None:
    config = RunConfig(threads=1, policy="next-gate", ray=RaySettings(address=address))
    deployment = Deployment(Launch(config, engine_settings(config), "store", StandIns(facts=FAKE_FACTS)))
    with pytest.raises(error, match=f"'{address}'"), deployment:
        pytest.fail("started")


def test_a_cluster_without_the_resource_is_refused(address: str, tmp_path: Path) -> None:
    done = _run_with_ndp(address, tmp_path)
    assert done.returncode == 2
    assert "policy 'context-ndp-full' needs 1 of the resource ndp, the nodes have none" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_ndp_worker_goes_where_the_resource_is(tmp_path: Path) -> None:
    with head("--resources", '{"ndp": 1}', cpus=4) as address:
        done = _run_with_ndp(address, tmp_path)
        assert done.returncode == 0, done.stderr
        record = json.loads(done.stdout)
        # a full machine may silence the worker for longer than a peer counts as alive, once or more
        failure = record["ndp_losses"], record["ndp_refusals"], record["ndp_last_failure"]
        assert record["ndp_tokens"] > 0 or record["ndp_losses"] > 0, failure
        assert record["ndp_refusals"] == 0, failure
        assert record["plan"]["ndp"]["transport"] in ("shm", "grpc")
