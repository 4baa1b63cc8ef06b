"""A Ray of several nodes for tests: one node on each machine of `machines`, started with plain `ray start`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from machines import Machine, Machines

_RAY = str(Path(sys.executable).with_name("ray"))
_START_DEADLINE_S = 90.0
_END_DEADLINE_S = 20.0
_OBJECT_STORE_BYTES = 100_000_000
# A node counts as dead after some six seconds without an answer instead of half a minute: a cable that is cut for three
# seconds must not kill it, and a test must not wait for longer than it has to.
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "6",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Node:
    """A Ray node.

    Attributes:
        cpus, resources: what it offers.
    """

    machine: Machine
    cpus: int
    resources: Mapping[str, float] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return self.machine.address

    def raylet(self) -> psutil.Process:
        """Ray's own process that makes it a node."""
        (found,) = [p for p in self.machine.processes() if p.name() == "raylet"]
        return found

    def actor(self, of: str) -> psutil.Process:
        """The process of the one actor of a class that runs here."""
        (found,) = [p for p in self.machine.processes() if _title(p).startswith(f"ray::{of}")]
        return found


class RayNodes:
    """Nodes of one Ray without authentication: reachable from its own machines only, or on loopback.

    Args:
        machines: where the nodes come from; they end with these.
        cpus, resources: of the head node.

    Raises:
        RuntimeError: a node did not start.
    """

    def __init__(self, machines: Machines, cpus: int, resources: Mapping[str, float] | None = None) -> None:
        self.machines = machines
        self.nodes: list[Node] = []
        self._port = 6379 if machines.isolated else _free_port()
        self.head = self.add(cpus, resources)

    @property
    def address(self) -> str:
        """HOST:PORT of the head."""
        return f"{self.nodes[0].address}:{self._port}"

    def add(self, cpus: int, resources: Mapping[str, float] | None = None) -> Node:
        """One more machine, and a node on it that has joined."""
        (node,) = self.add_all((cpus, resources or {}))
        return node

    def add_all(self, *offers: tuple[int, Mapping[str, float]]) -> list[Node]:
        """Several at once, by the CPUs and resources of each."""
        nodes = [Node(self.machines.add(), cpus, resources) for cpus, resources in offers]
        with ThreadPoolExecutor() as pool:
            list(pool.map(self.start, nodes))
        self.nodes += nodes
        return nodes

    def start(self, node: Node) -> None:
        """Start a node, for the first time or after its raylet was killed."""
        head = not self.nodes or node is self.nodes[0]
        as_head = ["--head", f"--port={self._port}", "--include-dashboard=false"]
        where = as_head if head else [f"--address={self.address}"]
        command = [
            _RAY, "start", *where, f"--node-ip-address={node.address}", f"--num-cpus={node.cpus}",
            f"--resources={json.dumps(dict(node.resources))}", f"--temp-dir={node.machine.folder}",
            "--include-log-monitor=false", "--disable-usage-stats", f"--object-store-memory={_OBJECT_STORE_BYTES}",
        ]  # fmt: skip
        try:
            self._run(node, *command)
        except RuntimeError:  # Ray gives a raylet thirty seconds, which a busy machine may exceed
            _kill(node.machine.processes())
            self._run(node, *command)

    def kill_raylet(self, node: Node) -> None:
        """SIGKILL to a node's raylet; returns when all that it had started has ended."""
        processes = node.machine.processes()
        node.raylet().kill()
        _, alive = psutil.wait_procs(processes, timeout=_END_DEADLINE_S)
        _kill(alive)  # what does not share the raylet's fate

    def close(self) -> None:
        """End all nodes and machines. Idempotent."""
        self.machines.close()

    def _run(self, node: Node, *command: str) -> None:
        with tempfile.TemporaryFile("w+") as log:  # Ray's servers inherit it: not a pipe, which would never end
            done = subprocess.run(
                node.machine.command(*command), env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                timeout=_START_DEADLINE_S, check=False,
            )  # fmt: skip
            if done.returncode != 0:
                log.seek(0)
                raise RuntimeError(f"{command} on {node.address} failed:\n{log.read()}")


def environment() -> dict[str, str]:
    """Of every program that uses such a Ray."""
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | _ENVIRONMENT


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(list(processes), timeout=_END_DEADLINE_S)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:1])
    except psutil.Error:
        return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
