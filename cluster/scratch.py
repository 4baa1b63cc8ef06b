"""The temporary directory of a local Ray, and a helper process that clears it after the driver.

After SIGKILL or an interrupted start, Ray's processes and files may stay. So a helper process, run from this file,
reads a pipe whose other end only the driver holds. The pipe ends when the driver closes it or dies. Then the helper
kills every process that has a file open below the directory (all of Ray's log there) and removes the directory. An
orderly end and a crash take the same path.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

_MAX_TMPDIR = 32  # Ray's socket paths add some 65 characters, and the system allows 107
_SWEEP_DEADLINE_S = 15.0


class Scratch:
    """A private directory for one local Ray; `close` removes it together with every process that uses it."""

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        self.path = Path(tempfile.mkdtemp(prefix="tiermoe-", dir=base if len(base) <= _MAX_TMPDIR else "/tmp"))
        # a script by path, isolated: it must start in milliseconds and needs psutil only;
        # a session of its own: Ctrl-C in the terminal must not reach it
        self._helper = subprocess.Popen(
            [sys.executable, "-I", __file__, str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self) -> None:
        """Wait until the helper has cleared everything; bounded, idempotent."""
        if self._helper.stdin is not None:
            self._helper.stdin.close()
        try:
            ended = self._helper.wait(timeout=2 * _SWEEP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._helper.kill()
            ended = self._helper.wait()
        if ended != 0:  # somebody killed it
            sweep(self.path)


def users_of(directory: Path) -> list[psutil.Process]:
    """Processes of this user, besides the caller, with an open file below the directory."""
    prefix = f"{directory}{os.sep}"
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        with contextlib.suppress(psutil.Error, OSError):
            if any(file.path.startswith(prefix) for file in process.open_files()):
                found.append(process)
    return found


def sweep(directory: Path, spare: int | None = None) -> None:
    """Kill the users of the directory until there are none, then remove it.

    Args:
        directory: what `Scratch` made.
        spare: process id of a driver that still lives and must not be killed.
    """
    deadline = time.monotonic() + _SWEEP_DEADLINE_S
    while time.monotonic() < deadline:
        users = [process for process in users_of(directory) if process.pid != spare]
        if not users:
            break
        for process in users:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(users, timeout=1.0)
    shutil.rmtree(directory, ignore_errors=True)


def _main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service manager sends it to every process, and this one ends last
    driver = os.getppid()
    sys.stdin.buffer.read()  # returns at the end of the pipe: closed by the driver, or by its death
    sweep(Path(sys.argv[1]), spare=driver if os.getppid() == driver else None)


if __name__ == "__main__":
    _main()
