"""Machines in miniature, and Ray nodes on them: Linux namespaces, or plain processes on loopback. For tests too.

A machine of `Switch` has a network, processes, shared memory and a folder of temporary files of its own; a virtual
cable joins it to the others, and nothing joins them to the rest. So addresses differ, shared memory between two of them
is refused as it is between pods, a cable can be cut, and two test runs may use the same addresses. Where namespaces
are not allowed, `Loopback` gives machines that differ in their addresses only.

A machine is held by one process, the first of its process namespace, whose standard input only the test holds. When it
ends, in whatever way, the kernel kills all others and their mounts, links and shared memory go with them.
"""

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

from tiermoe.cluster.scratch import Scratch, users_of

BIN = Path(sys.executable).parent
_RAY = str(BIN / "ray")
_DEADLINE_S = 20.0
_START_DEADLINE_S = 90.0
_OBJECT_STORE_BYTES = 100_000_000
_BURST_KB = 64  # that a cable carries at once after a pause; a packet of the kernel's has as many
_SUBNET = "10.77.0"
# A node counts as dead after some six seconds without an answer instead of half a minute: a cable that is cut for three
# seconds must not kill it, and its users must not wait for longer than it has to.
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
# /dev/shm and the folder are memory of the machine's own
_SET_UP = (
    'mount -t tmpfs -o size=2g tmpfs /dev/shm && mount -t tmpfs -o size=2g tmpfs "$1" && ip link set lo up '
    '&& exec "$2" -I -S -c "$3"'
)
# Orphans come to a machine's first process; ignoring their end keeps them from staying as zombies.
_HOLD = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
sys.stdin.read()
"""


class Machine:
    """An address of this machine; `IsolatedMachine` is a machine of its own.

    Attributes:
        address: by which the others reach it.
        folder: for temporary files, the same path on every machine.
    """

    def __init__(self, address: str, folder: Path) -> None:
        self.address, self.folder = address, folder

    def command(self, *argv: str) -> list[str]:
        """What to run here so that `argv` runs there."""
        return list(argv)

    def processes(self) -> list[psutil.Process]:
        """All that run there, with their numbers here: the raylet with this address and what it has started."""
        found = []
        for process in users_of(self.folder):
            with contextlib.suppress(psutil.Error):
                if f"--node_ip_address={self.address}" in process.cmdline():
                    found += [process, *process.children(recursive=True)]
        return found


class Loopback:
    """Machines that are none. `isolated`: whether machines share nothing but a network whose cables can be cut."""

    isolated = False

    def __init__(self) -> None:
        self._scratch = Scratch()
        self._count = 1  # Ray puts another address in the place of 127.0.0.1

    def add(self) -> Machine:
        """One more machine."""
        self._count += 1
        return Machine(f"127.0.0.{self._count}", self._scratch.path)

    def cut(self, machine: Machine) -> None:
        """Pull its cable."""
        raise NotImplementedError("there is no cable on loopback")

    def restore(self, machine: Machine) -> None:
        """Plug it in again."""
        raise NotImplementedError("there is no cable on loopback")

    def close(self) -> None:
        """End all machines and whatever runs on them. Idempotent."""
        self._scratch.close()


def why_not_isolated() -> str | None:
    """Why this user may not have a `Switch` here; None: it may."""
    try:
        with tempfile.TemporaryDirectory() as folder:  # hidden on the machine: nothing that is needed may lie there
            switch = Switch(Path(folder))
            try:
                switch.add()
            finally:
                switch.close()
    except (OSError, subprocess.SubprocessError) as error:
        text = error.stderr if isinstance(error, subprocess.CalledProcessError) and error.stderr else str(error)
        return f"no network namespaces here ({' '.join(str(text).split())})"
    return None


class _Held:
    """Namespaces that live as long as their holder.

    Raises:
        OSError: the set-up failed; its last words.
    """

    def __init__(self, command: list[str]) -> None:
        # a session of its own: Ctrl-C in the terminal must end the test first, which then ends this
        self.holder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        assert self.holder.stdout is not None
        assert self.holder.stderr is not None
        if self.holder.stdout.readline().strip() != "ready":
            self.holder.kill()
            raise OSError(self.holder.communicate()[1].strip() or "the namespaces did not come up")

    def close(self) -> None:
        if self.holder.poll() is None:
            self.holder.kill()
        self.holder.communicate(timeout=_DEADLINE_S)


class IsolatedMachine(Machine):
    """A machine of a `Switch`."""

    def __init__(self, held: _Held, enter: list[str], address: str, folder: Path) -> None:
        super().__init__(address, folder)
        self._held, self._enter = held, enter
        (first,) = psutil.Process(held.holder.pid).children()
        self.first = first.pid

    def command(self, *argv: str) -> list[str]:
        target = ["--target", str(self.first), "--net", "--mount", "--pid"]
        return [*self._enter, "nsenter", *target, "--", *argv]

    def processes(self) -> list[psutil.Process]:
        mine, found = os.readlink(f"/proc/{self.first}/ns/pid"), []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if os.readlink(f"/proc/{process.pid}/ns/pid") == mine and process.pid != self.first:
                    found.append(process)
        return found

    def hide(self, path: Path) -> None:
        """Put an empty folder in a folder's place, on this machine only."""
        _run(self.command("mount", "-t", "tmpfs", "tmpfs", str(path)))

    def show(self, path: Path) -> None:
        """Undo `hide`."""
        _run(self.command("umount", "--lazy", str(path)))


class Switch(Loopback):
    """Isolated machines and the switch that joins them.

    Args:
        folder: an existing one, over which every machine mounts its temporary files.

    Raises:
        OSError: namespaces are not allowed. subprocess.SubprocessError: the links cannot be made.
    """

    isolated = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._machines: list[_Held] = []
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        self._held = _Held(["unshare", *user, "--net", "--kill-child", "--fork", "sh", "-c", "echo ready && exec cat"])
        (first,) = psutil.Process(self._held.holder.pid).children()
        credentials = ["--user", "--preserve-credentials"] if user else []
        # who is not root may do all this in a user namespace, that of the switch
        self._as_owner = ["nsenter", "--target", str(first.pid), *credentials, "--"] if user else []
        self._enter = ["nsenter", "--target", str(first.pid), *credentials, "--net", "--"]
        try:
            self._ip("link", "add", "switch", "type", "bridge")
            self._ip("link", "set", "switch", "up")
        except BaseException:
            self.close()
            raise

    def add(self) -> IsolatedMachine:
        number = len(self._machines) + 1
        own = ["--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        set_up = ["sh", "-c", _SET_UP, "sh", str(self._folder), sys.executable, _HOLD]
        held = _Held([*self._as_owner, "unshare", *own, *set_up])
        self._machines.append(held)
        address = f"{_SUBNET}.{number}"
        port, machine = _port(address), IsolatedMachine(held, self._as_owner, address, self._folder)
        self._ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(machine.first))
        self._ip("link", "set", port, "master", "switch", "up")
        _run(machine.command("ip", "address", "add", f"{address}/24", "dev", "eth0"))
        _run(machine.command("ip", "link", "set", "eth0", "up"))
        return machine

    def cut(self, machine: Machine) -> None:
        self._ip("link", "set", _port(machine.address), "down")

    def restore(self, machine: Machine) -> None:
        self._ip("link", "set", _port(machine.address), "up")

    def shape(self, machine: Machine, gbit: float, delay_us: float) -> float:
        """Give a machine's cable a bandwidth each way, and what it sends a delay; the microseconds that it got.

        Kernels without `netem` delay nothing: 0.
        """
        into, out = [*self._enter, "tc"], machine.command("tc")
        bucket = ["tbf", "rate", f"{gbit:g}gbit", "burst", f"{_BURST_KB}kb", "latency", "100ms"]
        _run([*into, "qdisc", "add", "dev", _port(machine.address), "root", *bucket])
        try:
            slow = ["netem", "delay", f"{delay_us:g}us", "rate", f"{gbit:g}gbit", "limit", "10000"]
            _run([*out, "qdisc", "add", "dev", "eth0", "root", *slow])
        except subprocess.CalledProcessError:
            _run([*out, "qdisc", "add", "dev", "eth0", "root", *bucket])
            return 0.0
        return delay_us

    def close(self) -> None:
        for held in [*self._machines, self._held]:
            held.close()

    def _ip(self, *arguments: str) -> None:
        _run([*self._enter, "ip", *arguments])


def _port(address: str) -> str:
    """The switch's end of a machine's cable."""
    return f"port{address.rpartition('.')[2]}"


def _run(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=True)


# -- Ray nodes ---------------------------------------------------------------------------------------------------------


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

    def __init__(self, machines: Loopback, cpus: int, resources: Mapping[str, float] | None = None) -> None:
        self.machines = machines
        self.nodes: list[Node] = []
        self._port = 6379 if machines.isolated else free_port()
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
        _, alive = psutil.wait_procs(processes, timeout=_DEADLINE_S)
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
    psutil.wait_procs(list(processes), timeout=_DEADLINE_S)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:1])
    except psutil.Error:
        return ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
