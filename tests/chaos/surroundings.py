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
import struct
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
HOUR_S = 3600
_KEY = "sesame-open"
_PR_CAPBSET_DROP, _CAPABILITIES = 24, (1, 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: files of mode 000 are root's, too


@dataclass(frozen=True)
class Row:
    """What is done to a server.

    Attributes:
        act: called in a thread when the streams run.
        options: of `tiermoe serve`, besides those of the table.
        variables: of its environment.
        says: words that it must say within the bar, in this order; empty: there is nothing to say.
        headers: of the requests.
        check: called after the streams; what is wrong, or None.
        before: run in the server's process before the program.
    """

    act: Callable[[Server], None]
    options: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    says: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[Server], str | None] = lambda server: None
    before: Callable[[], None] | None = None


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as name:
        yield Path(name)


class _Clock:
    """The time of day of a server, which can be set."""

    def __init__(self, folder: Path) -> None:
        self._file, library = folder / "clock", folder / "clock.so"
        self.set(0)
        source = Path(__file__).with_name("clock.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
        self.variables = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(self._file)}

    def set(self, seconds: int) -> None:
        """So much off."""
        with open(self._file, "r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("q", seconds))


def _found_by_status(server: Server) -> str | None:
    """`tiermoe status` finds the runtime."""
    program = [sys.executable, "-c", "from tiermoe.cluster.registry import Registry; print(len(Registry().entries()))"]
    done = subprocess.run(program, env=server.environment, capture_output=True, text=True, check=False)
    return None if done.stdout.strip() == "1" else f"status finds {done.stdout.strip()} runtimes"


@contextmanager
def clock_back() -> Iterator[Row]:
    """NTP sets the time of day back by an hour."""
    with _folder() as folder:
        clock = _Clock(folder)
        yield Row(lambda server: clock.set(-HOUR_S), variables=clock.variables, check=_found_by_status)


@contextmanager
def clock_ahead() -> Iterator[Row]:
    """NTP sets the time of day ahead by an hour."""
    with _folder() as folder:
        clock = _Clock(folder)
        yield Row(lambda server: clock.set(HOUR_S), variables=clock.variables, check=_found_by_status)


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

    yield Row(act, says=("was stopped for",))


@contextmanager
def expiring() -> Iterator[Row]:
    """The TLS certificate expires: the server's time of day passes its end. Connections that are open go on."""
    with _folder() as folder:
        clock = _Clock(folder)
        crt, key = certificate(folder, "server", seconds=30 * 86400.0)

        def act(server: Server) -> None:
            clock.set(30 * 86400 - 120)
            end_s = time.monotonic() + 10
            while "expires at" not in server.said() and time.monotonic() < end_s:
                time.sleep(0.1)
            clock.set(30 * 86400 + 60)

        options = ("--ssl-certfile", crt, "--ssl-keyfile", key)
        yield Row(act, options, clock.variables, (f"'{crt}' expires at", f"'{crt}' expired at"))


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
    "clock set back by an hour": clock_back,
    "clock set ahead by an hour": clock_ahead,
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
