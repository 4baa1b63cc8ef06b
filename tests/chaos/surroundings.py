"""The second table of `make chaos`: what changes around a server under load, while no process of it is killed.

A row is a context manager: it prepares, and gives what `served` starts and what is done when the streams run. What is
done returns once it is over; what it leaves behind is put back at the end of the block. A new row is a function here
and an entry in `SURROUNDINGS`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
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

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from certificates import certificate
from rig import Server

SUSPENDED_S = 60.0
EXPIRES_S = 180.0  # after its making: it starts, and has its undisturbed streams, before
_KEY = "sesame-open"
_PR_CAPBSET_DROP, _CAPABILITIES = 24, (1, 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: files of mode 000 are root's, too


@dataclass(frozen=True)
class Row:
    """What is done to a server.

    Attributes:
        act: called in a thread when the streams run.
        options: of `tiermoe serve`, besides those of the table.
        says: words that it must say within the bar, in this order; empty: there is nothing to say.
        headers: of the requests.
        check: called after the streams; what is wrong, or None.
        before: run in the server's process before the program.
    """

    act: Callable[[Server], None]
    options: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[Server], str | None] = lambda server: None
    before: Callable[[], None] | None = None


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
    from tiermoe.cluster.jobs.prepare.job import default_store_dir

    with _folder() as folder:
        copy = folder / "store"
        shutil.copytree(default_store_dir(default_model_dir()), copy)
        try:
            yield Row(lambda server: copy.chmod(0), ("--store", str(copy)), before=_as_ordinary_user)
        finally:
            copy.chmod(0o700)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Row]]] = {
    "suspended for a minute": suspended,
    "TLS certificate expires": expiring,
    "chmod 000 of the key file": key_file,
    "chmod 000 of the request log": log_file,
    "chmod 000 of the store": store,
}


def listed(said: list[str], words: tuple[str, ...]) -> Any:
    """Whether lines have the words, in this order."""
    lines = iter(said)
    return all(any(word in line for line in lines) for word in words)
