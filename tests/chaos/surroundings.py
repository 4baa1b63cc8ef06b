"""The second table of `make chaos`: what changes around a server under load, while no process of it is killed.

A row is a context manager: it prepares, and gives what `served` starts and what is done when the streams run. What is
done returns once it is over; what it leaves behind is put back at the end of the block. A new row is a function here
and an entry in `SURROUNDINGS`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from certificates import certificate
from rig import Server

SUSPENDED_S = 60.0
EXPIRES_S = 180.0  # after its making: it starts, and has its undisturbed streams, before
_KEY = "sesame-open"
_MIB = 2**20
_TMP_BYTES, _SHM_BYTES = 64 * _MIB, 512 * _MIB  # of the file systems that are filled; in the second is Ray's store
_FILLED = "filled"
_LONG_WORDS = 900  # of a prompt
_LEAD = "ray::GpuWorker"
_LIMITS = (  # of a memory group's bytes: cgroup version 1, version 2
    Path("/sys/fs/cgroup/memory/{}/memory.limit_in_bytes"), Path("/sys/fs/cgroup/{}/memory.max"),
)  # fmt: skip
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 1 << 18  # linux/sched.h, linux/mount.h
_PR_CAPBSET_DROP, _CAPABILITIES = 24, (1, 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: files of mode 000 are root's, too


@dataclass(frozen=True)
class Row:
    """What is done to a server.

    Attributes:
        act: called in a thread when the streams run.
        options: of `tiermoe serve`, besides those of the table.
        says: words that it must say within the bar, in this order; empty: there is nothing to say.
        in_vain: asked after `act`: whether it changed nothing, so that there is nothing to say.
        headers: of the requests.
        check: called after the streams; what is wrong, or None.
        before: run in the server's process before the program.
        tmp: its temporary folder, where its Ray keeps logs and sockets; None: one of its own.
    """

    act: Callable[[Server], None]
    options: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    in_vain: Callable[[], bool] = lambda: False
    headers: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[Server], str | None] = lambda server: None
    before: Callable[[], None] | None = None
    tmp: Path | None = None


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as name:
        yield Path(name)


def _found_by_status(server: Server) -> str | None:
    """Whether `tiermoe status` and `down` find the runtime."""
    program = [sys.executable, "-c", "from tiermoe.cluster.registry import Registry; print(len(Registry().entries()))"]
    done = subprocess.run(program, env=server.environment, capture_output=True, text=True, check=False)
    return None if done.stdout.strip() == "1" else f"status finds {done.stdout.strip()} runtimes"


@contextmanager
def suspended() -> Iterator[Row]:
    """All processes are stopped for a minute, as on a laptop that sleeps; `said` counts from their return."""

    def act(server: Server) -> None:
        everyone = [psutil.Process(server.process.pid), *server.family()]
        for process in everyone:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGSTOP)
        time.sleep(SUSPENDED_S)
        for process in everyone:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)

    yield Row(act, says=("was stopped for",), check=_found_by_status)


@contextmanager
def expiring() -> Iterator[Row]:
    """The TLS certificate expires while it serves: open connections go on; clients here take an expired one."""
    with _folder() as folder:
        crt, key = certificate(folder, "server", seconds=EXPIRES_S)
        end_s = time.monotonic() + EXPIRES_S

        def act(server: Server) -> None:
            time.sleep(max(0.0, end_s - time.monotonic()))

        options = ("--ssl-certfile", crt, "--ssl-keyfile", key)
        yield Row(act, options, says=(f"'{crt}' expires at", f"'{crt}' expired at"))


def _as_ordinary_user() -> None:
    """Modes of files count for this process, also where it is root's."""
    if os.geteuid() == 0:
        for capability in _CAPABILITIES:
            ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, capability)


@contextmanager
def _without_mode(name: str, text: str, option: str, headers: Mapping[str, str]) -> Iterator[Row]:
    with _folder() as folder:
        file = folder / name
        file.write_text(text)
        file.chmod(0o600)
        yield Row(
            lambda server: file.chmod(0), (option, str(file)), says=(f"'{file}'",), headers=headers,
            before=_as_ordinary_user,
        )  # fmt: skip


def key_file() -> AbstractContextManager[Row]:
    """`chmod 000` of the key file, as an ordinary user: the keys before stay in force."""
    return _without_mode("keys", _KEY, "--api-key-file", {"Authorization": f"Bearer {_KEY}"})


def log_file() -> AbstractContextManager[Row]:
    """`chmod 000` of the request log, as an ordinary user: what is open goes on."""
    return _without_mode("log", "", "--request-log-file", {})


@contextmanager
def store() -> Iterator[Row]:
    """`chmod 000` of the store's folder, as an ordinary user: what is mapped goes on."""
    from tiermoe.cluster.config import default_model_dir
    from tiermoe.cluster.jobs.prepare.make_store import default_store_dir

    with _folder() as folder:
        copy = folder / "store"
        shutil.copytree(default_store_dir(default_model_dir()), copy)
        try:
            yield Row(lambda server: copy.chmod(0), ("--store", str(copy)), before=_as_ordinary_user)
        finally:
            copy.chmod(0o700)


@contextmanager
def _small(folder: Path, size: int) -> Iterator[None]:
    """A file system in memory of so many bytes at a folder, which this process and those that it starts see alone.

    Raises:
        OSError: this user may not mount; one who is not root runs `unshare --map-root-user --mount COMMAND`.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def called(result: int) -> None:
        if result != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))

    called(libc.unshare(_CLONE_NEWNS))
    called(libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None))
    options = f"size={size},mode=0700".encode()
    called(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", ctypes.c_ulong(0), options))
    try:
        yield
    finally:
        called(libc.umount2(os.fsencode(folder), 2))  # MNT_DETACH


def _passes_messages(server: Server) -> str | None:
    """Whether Ray passes what it keeps in its shared memory: messages above 100 KB, such as very long prompts."""
    program = [
        sys.executable, "-c", "import sys; from tiermoe.cluster.ray_auth import adopt_mode; adopt_mode(sys.argv[1]); "
        "import ray; from tiermoe.cluster.ray_session import join; join(sys.argv[1]); "
        "print(len(ray.get(ray.put(bytes(2**23)))))", server.address,
    ]  # fmt: skip
    done = subprocess.run(program, env=server.environment, capture_output=True, text=True, check=False, timeout=60.0)
    return None if done.stdout.strip() == str(2**23) else f"Ray passes no message of 8 MiB: {done.stderr[-200:]}"


def _fill(folder: Path) -> None:
    """Take all that is free in a file system."""
    with (folder / _FILLED).open("wb", buffering=0) as file:
        for part in (_MIB, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(part))


@contextmanager
def full_disk() -> Iterator[Row]:
    """The disk with Ray's logs and sockets, the server's counters and the request log is full."""
    with _folder() as folder, _small(folder, _TMP_BYTES):
        log = ("--request-log-file", str(folder / "log"))
        yield Row(lambda server: _fill(folder), log, says=("is full",), tmp=folder)


@contextmanager
def full_shared_memory() -> Iterator[Row]:
    """Another program fills /dev/shm."""
    shm = Path("/dev/shm")
    with _small(shm, _SHM_BYTES):
        (shm / _FILLED).touch()  # before the server: it is not left by it
        yield Row(lambda server: _fill(shm), says=("is full",), check=_passes_messages)


@contextmanager
def _without_memory(limit: Callable[[psutil.Process], None]) -> Iterator[Row]:
    """The lead may have no more memory than it has, and gets a long prompt; it ends, unless its heap has room."""
    answers, leads = list[httpx.Response](), list[psutil.Process]()

    def act(server: Server) -> None:
        (lead,) = server.members(_LEAD)
        leads.append(lead)
        limit(lead)
        prompt = {"prompt": "word " * _LONG_WORDS, "max_tokens": 1}
        answers.append(httpx.post(f"{server.url}/v1/completions", json=prompt, timeout=120.0))

    def check(server: Server) -> str | None:
        found = answers[0]
        return None if found.status_code == 200 else f"the long prompt got {found.status_code}: {found.text[:200]}"

    def lives() -> bool:
        return leads[0].is_running() and leads[0].status() != psutil.STATUS_ZOMBIE

    yield Row(act, says=("the lead died",), in_vain=lives, check=check)


@contextmanager
def memory_group() -> Iterator[Row]:
    """The lead is in a control group whose memory is at its limit: the kernel kills it."""
    name = f"tiermoe-chaos-{os.getpid()}"
    limit = next((path for path in _LIMITS if path.parents[1].is_dir()), None)
    if limit is None:
        raise OSError(errno.ENOTSUP, "there are no control groups for memory")
    limit = Path(str(limit).format(name))
    limit.parent.mkdir()

    def enter(lead: psutil.Process) -> None:
        limit.write_text(str(_MIB))  # besides what it has already
        (limit.parent / "cgroup.procs").write_text(str(lead.pid))

    try:
        with _without_memory(enter) as row:
            yield row
    finally:
        limit.parent.rmdir()


def address_space() -> AbstractContextManager[Row]:
    """The lead's address space is at its limit (`ulimit -v`): an allocation fails."""
    return _without_memory(lambda lead: lead.rlimit(resource.RLIMIT_AS, (lead.memory_info().vms,) * 2))


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Row]]] = {
    "suspended for a minute": suspended,
    "TLS certificate expires": expiring,
    "chmod 000 of the key file": key_file,
    "chmod 000 of the request log": log_file,
    "chmod 000 of the store": store,
    "the disk of logs and sockets is full": full_disk,
    "/dev/shm is full": full_shared_memory,
    "memory limit of the lead's control group": memory_group,
    "the lead's address space is at its limit": address_space,
}


def listed(said: list[str], words: tuple[str, ...]) -> Any:
    """Whether lines have the words, in this order."""
    lines = iter(said)
    return all(any(word in line for line in lines) for word in words)
