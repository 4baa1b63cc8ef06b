"""`tiermoe bench serve` over two Ray nodes, each a machine of its own: what is lost is in the result, nothing stays.

The lead and the store are on the head, the NDP worker is on the second node.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest
import yaml
from started import wait_until_said

from tiermoe.benchmarks.machines import BIN, Loopback, Node, RayNodes, Switch, environment, why_not_isolated
from tiermoe.cluster.config import default_model_dir

_WAIT_S = 300.0
_GONE_S = 60.0
_NOT_ISOLATED = why_not_isolated()

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.skipif(not default_model_dir().is_dir(), reason="the default model is not there"),
    pytest.mark.timeout(900),
]
_LOAD = ("--streams", "2", "--requests", "2", "--warmup", "0", "--max-tokens", "160", "--ignore-eos", "--repeats", "4")


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="bench-")))  # short: Ray makes sockets in it
        machines = Switch(folder) if _NOT_ISOLATED is None else Loopback()
        stack.callback(machines.close)
        found = RayNodes(machines, cpus=3)
        found.add(cpus=2, resources={"ndp": 1})
        yield found


def _begun(nodes: RayNodes, at: Node, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """`tiermoe bench serve --config` on a node's machine."""
    config = folder / "nodes.yaml"
    keys = {"policy": "context-ndp-full", "budget": "25%", "threads": 1, "device": "cpu",
            "cluster": {"lead": nodes.head.address, "ndp_workers": "per-node"},
            "ray": {"address": nodes.address}}  # fmt: skip
    config.write_text(yaml.safe_dump(keys))
    command = [str(BIN / "tiermoe"), "bench", "serve", "--config", str(config), *_LOAD, *arguments]
    return subprocess.Popen(
        at.machine.command(*command), env=environment() | {"XDG_RUNTIME_DIR": str(folder)}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def _actors(node: Node) -> list[psutil.Process]:
    titles = ("GpuWorker", "NdpWorker", "StoreWorker", "EndpointDirectory", "Edge")
    found = [process for process in node.machine.processes() if process.is_running()]
    return [p for p in found if any(p.cmdline() and p.cmdline()[0].startswith(f"ray::{title}") for title in titles)]


def test_a_worker_and_a_node_are_lost_and_the_run_goes_on(nodes: RayNodes, tmp_path: Path) -> None:
    head, second = nodes.nodes
    out = tmp_path / "out"
    process = _begun(nodes, head, tmp_path, "--out", str(out))
    try:
        wait_until_said(process, "repetitions: 1/4")
        second.actor("NdpWorker").kill()
        wait_until_said(process, "repetitions: 2/4")
        nodes.kill_raylet(second)
        rest, _ = process.communicate(timeout=_WAIT_S)
        assert process.returncode == 0, rest
    finally:
        process.kill()
    record = json.loads((out / "serve.json").read_text())
    (row,) = record["rows"]
    assert (row["requests"], row["failed"]) == (16, 0)
    assert [node["node"] for node in record["nodes"]] == [head.address, second.address]
    homes = {one["worker"]: one["node"] for one in record["workers"]}
    assert (homes["lead"], homes["store/0"], homes["ndp/0"]) == (head.address, head.address, second.address)
    sent = [one["rates"] for one in record["peers"] if (one["worker"], one["peer"]) == ("lead", "ndp/0")]
    assert any(rates.get("rows_sent", 0) > 0 for rates in sent)
    lost = [(one["worker"], one["node"], one["what"]) for one in record["lost"]]
    assert ("", second.address, "node lost") in lost, lost
    assert any(worker == "ndp/0" for worker, _, _ in lost), lost
    assert "node lost" in (out / "serve.md").read_text()
    _, alive = psutil.wait_procs(_actors(head), timeout=_GONE_S)
    assert not alive
    nodes.start(second)


def test_the_node_of_the_command_is_lost_and_nothing_stays(nodes: RayNodes, tmp_path: Path) -> None:
    head, second = nodes.nodes
    process = _begun(nodes, second, tmp_path)
    try:
        wait_until_said(process, "repetitions: 1/4")
        before = _actors(head)
        assert len(before) >= 2  # lead and store
        nodes.kill_raylet(second)
        rest, _ = process.communicate(timeout=_WAIT_S)
        # with what was answered before its deployment was seen to have ended, or without, where Ray was missed first
        assert process.returncode in (0, 1), rest
        assert ("requests" if process.returncode == 0 else "Ray") in rest
    finally:
        process.kill()
    _, alive = psutil.wait_procs(before, timeout=_GONE_S)
    assert not alive
