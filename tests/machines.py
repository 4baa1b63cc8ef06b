"""Machines in miniature, for tests of what happens between machines: Linux namespaces, or plain processes on loopback.

A machine of `Switch` has a network, processes, shared memory and a folder of temporary files of its own; a virtual
cable joins it to the others, and nothing joins them to the rest. So addresses differ, shared memory between two of them
is refused as it is between pods, a cable can be cut, and two test runs may use the same addresses. Where namespaces
are not allowed, `Loopback` gives machines that differ in their addresses only.

A machine is held by one process, the first of its process namespace, whose standard input only the test holds. When it
ends, in whatever way, the kernel kills all others and their mounts, links and shared memory go with them.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from tiermoe.cluster.scratch import Scratch, users_of

_DEADLINE_S = 20.0
_SUBNET = "10.77.0"
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

    restore = cut

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

    def __init__(self, held: _Held, enter: list[str], address: str, port: str, folder: Path) -> None:
        super().__init__(address, folder)
        self._held, self._enter, self.port = held, enter, port
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
        port, address = f"port{number}", f"{_SUBNET}.{number}"
        machine = IsolatedMachine(held, self._as_owner, address, port, self._folder)
        self._ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(machine.first))
        self._ip("link", "set", port, "master", "switch", "up")
        _run(machine.command("ip", "address", "add", f"{address}/24", "dev", "eth0"))
        _run(machine.command("ip", "link", "set", "eth0", "up"))
        return machine

    def cut(self, machine: IsolatedMachine) -> None:
        self._ip("link", "set", machine.port, "down")

    def restore(self, machine: IsolatedMachine) -> None:
        self._ip("link", "set", machine.port, "up")

    def close(self) -> None:
        for held in [*self._machines, self._held]:
            held.close()

    def _ip(self, *arguments: str) -> None:
        _run([*self._enter, "ip", *arguments])


def _run(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=True)
