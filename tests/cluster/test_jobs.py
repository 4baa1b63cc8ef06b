"""A cluster of plain `ray start` with its job server: benchmarks and runtimes as jobs, a job that is stopped."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from ray.job_submission import JobSubmissionClient

from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.scratch import Scratch

_BIN = Path(sys.executable).parent
_TIERMOE = str(_BIN / "tiermoe")
_WAIT_S = 90.0
_GONE_S = 30.0

pytestmark = pytest.mark.skipif(not default_model_dir().is_dir(), reason="the default model is not there")


@dataclass(frozen=True)
class Cluster:
    address: str
    dashboard: str
    folder: Path  # of the jobs, with job.yaml

    def environment(self) -> dict[str, str]:
        runtime = self.folder / "runtime"  # entries of `tiermoe up` go there and not among the user's
        runtime.mkdir(exist_ok=True)
        return os.environ | {"RAY_AUTH_MODE": "disabled", "XDG_RUNTIME_DIR": str(runtime)}

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environment() | variables, capture_output=True, text=True, timeout=_WAIT_S, check=False
        )

    def job(self, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(_BIN / "ray"), "job", verb, "--address", self.dashboard, *arguments)

    def submit(self, *entrypoint: str) -> subprocess.CompletedProcess[str]:
        return self.job("submit", "--working-dir", str(self.folder), "--", *entrypoint)


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]
    finally:
        for probe in probes:
            probe.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    scratch, folder = Scratch(), tmp_path_factory.mktemp("jobs")
    port, dashboard, client = _free_ports(3)
    command = [
        str(_BIN / "ray"), "start", "--head", f"--port={port}", "--num-cpus=2", f"--temp-dir={scratch.path}",
        "--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}",
        "--dashboard-agent-listen-port=0", f"--ray-client-server-port={client}", "--disable-usage-stats",
        "--object-store-memory=100000000",
    ]  # fmt: skip
    (folder / "job.yaml").write_text(f"budget: 50%\nthreads: 1\ndevice: cpu\nray:\n  address: 127.0.0.1:{port}\n")
    here = Cluster(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", folder)
    try:
        with (scratch.path / "start.log").open("w") as log:
            subprocess.run(command, env=here.environment(), stdout=log, stderr=log, timeout=90, check=True)
        yield here
    finally:
        scratch.close()


def test_a_benchmark_runs_as_a_job(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--repeats", "1", "--budget", "1.0", "--link-gbps", "100", "--config", "job.yaml", "--out", str(out)]
    done = cluster.submit(_TIERMOE, "bench", "prefetch", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "measuring: 4/4" in done.stdout
    assert "not taken from 'job.yaml', this benchmark sets: budget, ray, threads" in done.stdout
    record = json.loads(out.read_text())
    assert (record["name"], record["executor"], record["settings"]["config"]) == ("prefetch", "emulated", "job.yaml")


def test_a_job_that_is_refused_fails(cluster: Cluster) -> None:
    done = cluster.submit(_TIERMOE, "bench", "prefetch", "--config", "missing.yaml")
    assert done.returncode == 1
    assert "error: no configuration file 'missing.yaml'" in done.stdout
    assert "Traceback" not in done.stdout


def test_a_stopped_job_leaves_nothing(cluster: Cluster) -> None:
    """The job keeps a runtime in the cluster; `ray job stop` ends it with its actors."""
    submitted = cluster.job(
        "submit", "--no-wait", "--submission-id", "stopped", "--working-dir", str(cluster.folder), "--",
        _TIERMOE, "up", "--config", "job.yaml",
    )  # fmt: skip
    assert submitted.returncode == 0, submitted.stderr
    asyncio.run(asyncio.wait_for(_said(cluster, "stopped", "is ready at"), _WAIT_S))
    status = cluster.run(_TIERMOE, "status", "--address", cluster.address, "--json")
    assert status.returncode == 0, status.stderr
    (deployment,) = json.loads(status.stdout)["deployments"]
    assert {actor["role"]: actor["state"] for actor in deployment["actors"]} == {"lead": "ALIVE", "store/0": "ALIVE"}
    actors = [psutil.Process(actor["pid"]) for actor in deployment["actors"]]
    (driver,) = [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [])[1:3] == [_TIERMOE, "up"]]

    assert cluster.job("stop", "stopped").returncode == 0
    _, alive = psutil.wait_procs([*actors, driver], timeout=_GONE_S)
    assert not alive
    status = cluster.run(_TIERMOE, "status", "--address", cluster.address)
    assert status.returncode == 1
    assert "no deployment runs at" in status.stderr
    assert not list((cluster.folder / "runtime").iterdir())


def test_down_from_another_machine(cluster: Cluster, tmp_path: Path) -> None:
    """Only the address is known there: the actors are ended, and the process that keeps them takes it for orderly."""
    command = [_TIERMOE, "up", "--config", str(cluster.folder / "job.yaml")]
    up = subprocess.Popen(
        command, env=cluster.environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        name = _ready(up)
        elsewhere = {"XDG_RUNTIME_DIR": str(tmp_path)}
        down = cluster.run(_TIERMOE, "down", "--address", cluster.address, **elsewhere)
        assert (down.returncode, down.stdout) == (0, f"deployment {name} has ended\n"), down.stderr
        rest, _ = up.communicate(timeout=_GONE_S)
        assert up.returncode == 0
        assert f"deployment {name} was ended by `tiermoe down`" in rest
        again = cluster.run(_TIERMOE, "down", "--address", cluster.address, **elsewhere)
        assert again.returncode == 0
        assert "nothing to end" in again.stdout
    finally:
        up.kill()
        up.communicate()


async def _said(cluster: Cluster, job: str, text: str) -> None:
    """Return when the job has written this."""
    so_far = ""
    async for piece in JobSubmissionClient(cluster.dashboard).tail_job_logs(job):
        so_far += piece
        if text in so_far:
            return
    pytest.fail(so_far)


def _ready(process: subprocess.Popen[str]) -> str:
    """The id that `tiermoe up` says it is ready under."""
    assert process.stdout is not None
    end_s = time.monotonic() + _WAIT_S
    while time.monotonic() < end_s and select.select([process.stdout], [], [], end_s - time.monotonic())[0]:
        line = process.stdout.readline()
        if match := re.match(r"deployment (\w+) is ready", line):
            return match[1]
        if not line:
            break
    pytest.fail("the runtime did not come up")
