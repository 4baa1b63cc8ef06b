"""Two Ray nodes on loopback: the store on one, the lead on the other; a third joins; a busy cluster is waited for."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.scratch import Scratch

_TIERMOE = [sys.executable, "-c", "from tiermoe.cluster.cli import main; main()"]
_RAY = str(Path(sys.executable).with_name("ray"))
_WAIT_S = 90.0

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.skipif(not default_model_dir().is_dir(), reason="the default model is not there"),
]


@dataclass(frozen=True)
class Cluster:
    scratch: Path
    address: str

    def environment(self) -> dict[str, str]:
        return os.environ | {"RAY_AUTH_MODE": "disabled", "XDG_RUNTIME_DIR": str(self.scratch)}

    def add_node(self, cpus: int, resources: dict[str, float]) -> None:
        self.ray("start", f"--address={self.address}", f"--num-cpus={cpus}", "--resources", json.dumps(resources))

    def ray(self, *arguments: str) -> None:
        command = [_RAY, *arguments, "--disable-usage-stats", "--object-store-memory=100000000"]
        with (self.scratch / "start.log").open("a") as log:  # Ray's servers inherit it: not a pipe, which never ends
            subprocess.run(command, env=self.environment(), stdout=log, stderr=log, timeout=90, check=True)

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*_TIERMOE, *arguments], env=self.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def tiermoe(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command, environment = [*_TIERMOE, *arguments], self.environment() | variables
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_WAIT_S, check=False
        )

    def actors(self) -> dict[str, dict[str, Any]]:
        done = self.tiermoe("status", "--address", self.address, "--json")
        assert done.returncode == 0, done.stderr
        (deployment,) = json.loads(done.stdout)["deployments"]
        return {actor["role"]: actor for actor in deployment["actors"]}

    def config(self, name: str, **keys: Any) -> str:
        path = self.scratch / f"{name}.yaml"
        common = {"budget": "0.25", "device": "cpu", "ray": {"address": self.address}}
        path.write_text(yaml.safe_dump(common | keys))
        return str(path)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    scratch = Scratch()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    here = Cluster(scratch.path, f"127.0.0.1:{port}")
    try:
        here.ray(
            "start", "--head", f"--port={port}", "--num-cpus=3", f"--temp-dir={scratch.ray}", "--resources",
            '{"ndp": 1}', "--include-dashboard=false",
        )  # fmt: skip
        here.add_node(1, {"store": 1})
        yield here
    finally:
        scratch.close()


@pytest.fixture(scope="module")
def up(cluster: Cluster) -> Iterator[subprocess.Popen[str]]:
    """A runtime whose lead maps no layer, and whose NDP workers grow with the cluster."""
    placed = {"store": {"nodes": "marked"}, "ndp_workers": "per-node"}
    config = cluster.config("up", policy="context-ndp-full", threads=1, cluster=placed)
    process = cluster.begin("up", "--config", config)
    try:
        assert process.stdout is not None
        assert any("is ready at" in line for line in process.stdout), process.communicate()[1]
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=_WAIT_S)


def _generate(cluster: Cluster, kill: int | None = None) -> str:
    """The text of a request that the runtime serves; `kill` is a process that is killed once some of it is there."""
    driver = cluster.begin("run", "import os", "--attach", cluster.address, "--max-tokens", "200")
    first = driver.stdout.read(60)
    if kill is not None:
        os.kill(kill, signal.SIGKILL)
    rest, errors = driver.communicate(timeout=_WAIT_S)
    assert driver.returncode == 0, errors
    text = first + rest
    assert "\nran " in errors
    return text


@pytest.mark.usefixtures("up")
def test_the_store_of_another_node_dies_and_is_back(cluster: Cluster) -> None:
    actors = cluster.actors()
    assert set(actors) == {"lead", "store/0", "ndp/0", "endpoints"}
    assert actors["store/0"]["node"] != actors["lead"]["node"] == actors["ndp/0"]["node"]
    assert actors["lead"]["health"]["store/0"] == "connected"
    undisturbed = _generate(cluster)
    assert len(undisturbed) > 200
    assert _generate(cluster, kill=actors["store/0"]["pid"]) == undisturbed
    end_s = time.monotonic() + _WAIT_S
    while (now := cluster.actors())["store/0"]["state"] != "ALIVE" or now["store/0"]["restarts"] != 1:
        assert time.monotonic() < end_s, now
    assert _generate(cluster) == undisturbed
    assert cluster.actors()["lead"]["health"]["store/0"] == "connected"


def test_a_node_that_joins_computes_its_share(cluster: Cluster, up: subprocess.Popen[str]) -> None:
    undisturbed = _generate(cluster)
    cluster.add_node(1, {"ndp": 1})
    assert up.stderr is not None
    said = next((line for line in up.stderr if "joined" in line), "")  # ends with the process
    assert re.search(r"joined: NDP worker 1 runs there", said)
    assert _generate(cluster) == undisturbed
    actors = cluster.actors()
    assert actors["lead"]["health"]["ndp/1"] == "connected"
    assert actors["ndp/1"]["node"] not in (actors["lead"]["node"], actors["store/0"]["node"])
    assert actors["ndp/1"]["health"]["pairs"] > 0


@pytest.mark.usefixtures("up")
def test_a_busy_cluster_is_waited_for_and_down_ends_the_waiting(cluster: Cluster, tmp_path: Path) -> None:
    placed = {"store": {"nodes": "marked"}}
    waiting = cluster.begin("up", "--config", cluster.config("busy", policy="next-gate", threads=3, cluster=placed))
    try:
        assert waiting.stderr is not None
        said = next((line for line in waiting.stderr if line.startswith("waiting for")), "")  # ends with the process
        short = ("3 CPU on [0-9.]+, which has 1 free", "1 CPU on [0-9.]+, which has 0 free", "1 store on [0-9.]+")
        assert all(re.search(part, said) for part in short), said
        found = cluster.tiermoe("status", "--address", cluster.address, "--json")
        names = {record["id"]: record for record in json.loads(found.stdout)["deployments"]}
        (name,) = [name for name, record in names.items() if not record["actors"]]
        elsewhere = {"XDG_RUNTIME_DIR": str(tmp_path)}  # another machine, which knows the address only
        down = cluster.tiermoe("down", "--address", cluster.address, "--deployment", name, **elsewhere)
        assert (down.returncode, down.stdout) == (0, f"deployment {name} has ended\n"), down.stderr
        out, errors = waiting.communicate(timeout=_WAIT_S)
        assert (waiting.returncode, errors) == (0, "")
        assert out == f"deployment {name} was ended by `tiermoe down`\n"
    finally:
        waiting.kill()
        waiting.communicate()
    assert cluster.actors()["lead"]["state"] == "ALIVE"


def test_what_does_not_fit_is_refused_at_once(cluster: Cluster) -> None:
    config = cluster.config("large", policy="next-gate", threads=2, cluster={"shards": 3})
    done = cluster.tiermoe("run", "import os", "--config", config)
    assert done.returncode == 2
    assert re.search(r"error: shard 1 fits on no node: .*CPU: needs 2, has 0 free of 3, short of 2", done.stderr)
    assert done.stderr.count("\n") == 2  # the step that came before, and the error
