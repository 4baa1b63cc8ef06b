"""Two nodes of plain `ray start` with a job server: benchmarks and runtimes as jobs, jobs that end midway."""

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from ray.job_submission import JobSubmissionClient

from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.scratch import Scratch

_BIN = Path(sys.executable).parent
_TIERMOE = str(_BIN / "tiermoe")
_WAIT_S = 300.0
_TWO_GPUS = """\
import sys
from tiermoe.cluster.cli import main
from tiermoe.benchmarks import serving as scale

scale.VARIANTS = (scale.Variant(2, "per-GPU"),)
sys.argv = ["tiermoe", "bench", "scale", "--batch", "1", "--prompts", "1000000", "--json", sys.argv[1]]
main()
"""  # `tiermoe bench scale` with two processes instead of thirteen
_GONE_S = 60.0

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.skipif(not default_model_dir().is_dir(), reason="the default model is not there"),
]


@dataclass(frozen=True)
class Cluster:
    address: str
    dashboard: str
    folder: Path  # of the jobs, with job.yaml

    @property
    def runtime(self) -> Path:
        """Where entries of `tiermoe up` go: not among the user's, nor into the jobs' package, which stays the same."""
        return self.folder.with_name("runtime")

    def environment(self) -> dict[str, str]:
        self.runtime.mkdir(exist_ok=True)
        return os.environ | {"RAY_AUTH_MODE": "disabled", "XDG_RUNTIME_DIR": str(self.runtime)}

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environment() | variables, capture_output=True, text=True, timeout=_WAIT_S, check=False
        )

    def job(self, verb: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(_BIN / "ray"), "job", verb, "--address", self.dashboard, *arguments)

    def submit(self, *entrypoint: str, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        return self.job("submit", "--working-dir", str(self.folder), *options, "--", *entrypoint)

    def unpack(self, folder: Path) -> None:
        """Have a job's package on both nodes, which keep packages in one folder here: the second to unpack one deletes
        it under the first's job.
        """
        for options in ([], ["--entrypoint-resources", '{"second": 1}']):
            done = self.job("submit", "--working-dir", str(folder), *options, "--", "true")
            assert done.returncode == 0, done.stdout + done.stderr

    def begin(self, name: str, folder: Path, *entrypoint: str) -> psutil.Process:
        """Start a job on the second node with its temporary files in `folder`; the process of its entrypoint."""
        options = ["--no-wait", "--submission-id", name, "--entrypoint-resources", '{"second": 1}']
        variables = json.dumps({"env_vars": {"TMPDIR": str(folder)}})
        submitted = self.submit(*entrypoint, options=[*options, "--runtime-env-json", variables])
        assert submitted.returncode == 0, submitted.stdout + submitted.stderr
        words = {"up": "ready at", "bench": "repetitions: 1/"}.get(entrypoint[1], "batch 1: 1/")
        asyncio.run(asyncio.wait_for(_said(self, name, words), _WAIT_S))
        wanted = list(entrypoint[1:])  # a script's interpreter is named before it, or not
        processes = [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [])[-len(wanted) :] == wanted]
        (driver,) = [p for p in processes if p.environ().get("TMPDIR") == str(folder)]
        return driver


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
    second = [
        str(_BIN / "ray"), "start", f"--address={here.address}", "--num-cpus=2", '--resources={"second": 1}',
        f"--temp-dir={scratch.path}", "--dashboard-agent-listen-port=0", "--disable-usage-stats",
        "--object-store-memory=100000000",
    ]  # fmt: skip
    try:
        with (scratch.path / "start.log").open("w") as log:
            for node in (command, second):
                subprocess.run(node, env=here.environment(), stdout=log, stderr=log, timeout=90, check=True)
        (folder / "two_gpus.py").write_text(_TWO_GPUS)  # no test changes the folder: one package for all
        here.unpack(folder)
        yield here
    finally:
        scratch.close()


_LOAD = ["--streams", "2", "--repeats", "2", "--max-tokens", "64", "--ignore-eos"]


def test_a_deployment_is_measured_by_a_job(cluster: Cluster, tmp_path: Path) -> None:
    """As issue and documentation write it, on a node that is not the head's."""
    out = tmp_path / "out.json"
    on_second = ["--entrypoint-resources", '{"second": 1}']
    words = [_TIERMOE, "bench", "serve", "--config", "job.yaml", *_LOAD, "--json", str(out)]
    done = cluster.submit(*words, options=on_second)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "repetitions: 2/2" in done.stdout
    record = json.loads(out.read_text())
    assert (record["name"], record["executor"], record["settings"]["config"]) == ("serve", "emulated", "job.yaml")
    assert len(record["nodes"]) == 2
    assert {row["worker"] for row in record["workers"]} == {"lead", "store/0", "edge/0"}
    assert _none_runs(cluster)


def test_a_benchmark_that_has_no_use_for_a_cluster_refuses_one(cluster: Cluster) -> None:
    done = cluster.submit(_TIERMOE, "bench", "ttft", "--config", "job.yaml")
    assert done.returncode == 1
    assert "'job.yaml': key 'ray.address': this benchmark runs in one process" in done.stdout


def _none_runs(cluster: Cluster) -> bool:
    status = cluster.run(_TIERMOE, "status", "--address", cluster.address)
    return status.returncode == 1 and "no deployment runs at" in status.stderr


_POLICY = """
from tiermoe.actors.policies.eviction import Lru

class Mine(Lru):
    def used(self, keys):
        super().used(keys)
        print(end="")
"""


@pytest.mark.parametrize("where", ["own", "joined"])
def test_a_runtime_runs_as_a_job(cluster: Cluster, where: str) -> None:
    """Guards a Ray of its own that took over the job's runtime environment, whose package only the cluster has.

    Policies come from the job's folder, and a variable that both the job and `tiermoe` set is no conflict.
    """
    folder = cluster.folder.with_name(f"policies-{where}")
    (folder / "of_job").mkdir(parents=True)
    (folder / "of_job" / "__init__.py").write_text(f"# {where}\n{_POLICY}")  # not the other job's package
    (folder / "mine.yaml").write_text("name: mine\nlossless: true\neviction: of_job:Mine\n")
    (folder / "job.yaml").write_text((cluster.folder / "job.yaml").read_text())
    options = ["--runtime-env-json", '{"env_vars": {"OMP_NUM_THREADS": "1"}}']
    joined = ["--config", "job.yaml"] if where == "joined" else ["--budget", "50%", "--device", "cpu"]
    run = [_TIERMOE, "run", "import os", "--policy", "mine.yaml", "--max-tokens", "4", "--json", *joined]
    cluster.unpack(folder)
    done = cluster.job("submit", "--working-dir", str(folder), *options, "--", *run)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"name"')))
    assert record["policy"] == "mine"
    assert record["generated_tokens"] == 4


def test_an_experiment_as_a_job_takes_the_cluster_s_nodes(cluster: Cluster, tmp_path: Path) -> None:
    """Each row says which node measured it."""
    out, prompts = tmp_path / "out.json", tmp_path / "prompts.txt"
    prompts.write_text("def main(arguments):\n")
    words = ["--prompts", str(prompts), "--policies", "on-demand,next-gate", "--budgets", "0.25,0.5"]
    words += ["--links", "none", "--max-tokens", "3", "--repeats", "1"]
    done = cluster.submit(_TIERMOE, "bench", "compare", *words, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cells on the cluster's nodes: 2/2" in done.stdout
    rows = json.loads(out.read_text())["rows"]
    assert [(row["budget"], row["policy"]) for row in rows] == [
        ("0.25", "on-demand"), ("0.25", "next-gate"), ("0.5", "on-demand"), ("0.5", "next-gate"),
    ]  # fmt: skip
    assert all(row["node"] for row in rows)
    assert rows[0]["node"] == rows[1]["node"]  # one cell
    assert all(row["tpot_ms"] > 0 for row in rows)


def test_a_job_that_is_refused_fails(cluster: Cluster) -> None:
    done = cluster.submit(_TIERMOE, "bench", "ttft", "--config", "missing.yaml")
    assert done.returncode == 1
    assert "error: no configuration file 'missing.yaml'" in done.stdout
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_a_benchmark_that_is_ended_midway_leaves_nothing(cluster: Cluster, how: str, tmp_path: Path) -> None:
    """Its GPUs are processes of their own, which end with it, however it ends."""
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "two_gpus.py", str(tmp_path / "out.json")]
    driver = cluster.begin(f"scale-{how}", tmp_path / "tmp", *command)
    shards = driver.children(recursive=True)
    assert len(shards) == 1
    _end(cluster, f"scale-{how}", driver, how)
    _, alive = psutil.wait_procs([driver, *shards], timeout=_GONE_S)
    assert not alive
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]
    assert not _left_in(tmp_path / "tmp")


@pytest.mark.parametrize("how", ["stopped", "killed"])
@pytest.mark.parametrize("command", [["up"], ["bench", "serve", *_LOAD, "--repeats", "99"]], ids=["up", "bench"])
def test_a_runtime_that_is_ended_leaves_nothing(
    cluster: Cluster, command: list[str], how: str, tmp_path: Path
) -> None:
    """The job has a runtime in the cluster; its actors end with it, however it ends."""
    job = f"{command[0]}-{how}"
    driver = cluster.begin(job, tmp_path, _TIERMOE, *command, "--config", "job.yaml")
    status = cluster.run(_TIERMOE, "status", "--address", cluster.address, "--json")
    assert status.returncode == 0, status.stderr
    (deployment,) = json.loads(status.stdout)["deployments"]
    server = {"edge/0": "ALIVE"} if command[0] == "bench" else {}
    states = {actor["role"]: actor["state"] for actor in deployment["actors"]}
    assert states == {"lead": "ALIVE", "store/0": "ALIVE"} | server
    actors = [psutil.Process(actor["pid"]) for actor in deployment["actors"]]

    _end(cluster, job, driver, how)
    _, alive = psutil.wait_procs([*actors, driver], timeout=_GONE_S)
    assert not alive
    assert _none_runs(cluster)
    if how == "stopped":  # the entry of one that was killed is removed by whoever reads it next on that machine
        assert not list(cluster.runtime.iterdir())
    assert not _left_in(tmp_path)


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


def _end(cluster: Cluster, job: str, driver: psutil.Process, how: str) -> None:
    """End a job through the job server, or kill its process behind the server's back."""
    if how == "stopped":
        assert cluster.job("stop", job).returncode == 0
    else:
        driver.kill()


def _left_in(folder: Path) -> list[str]:
    """What a job left in its temporary folder, besides the cache that PyTorch keeps for the user."""
    return [path.name for path in folder.iterdir() if not path.name.startswith("torchinductor_")]


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
