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

_INSIDE = "r"  # Ray's part
# A socket's path has at most 107 bytes: /tiermoe-????????/r, and at most 64 of Ray's, from /session_ to /plasma_store.
_MAX_TMPDIR = 107 - 17 - 2 - 64
_SWEEP_DEADLINE_S = 15.0
_GUESTS_S = 8.0  # for drivers that have joined: they notice the end of Ray, and say so
_POLL_S = 0.1


class Scratch:
    """A private directory for one local Ray; `close` removes it together with every process that uses it.

    Ray makes its directory, and most below it, writable to everybody. So it gets one inside this folder, which no
    other user can enter.

    Attributes:
        path: the private directory.
        ray: Ray's own directory.
    """

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        self.path = Path(tempfile.mkdtemp(prefix="tiermoe-", dir=base if len(base) <= _MAX_TMPDIR else "/tmp"))
        self.ray = self.path / _INSIDE
        self._helper = self._start()

    def look(self) -> bool:
        """Start another helper where this one has died; whether it had."""
        if self._helper.poll() is None:
            return False
        assert self._helper.stdin is not None
        self._helper.stdin.close()
        self._helper = self._start()
        return True

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

    def _start(self) -> subprocess.Popen[bytes]:
        # a script by path, isolated: it must start in milliseconds and needs psutil only;
        # a session of its own: Ctrl-C in the terminal must not reach it
        return subprocess.Popen(
            [sys.executable, "-I", __file__, str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )


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
    """Kill the users of the directory until there are none, then remove it. Drivers that have joined end first.

    Args:
        directory: what `Scratch` made.
        spare: process id of a driver that still lives and must not be killed.
    """
    begin = time.monotonic()
    deadline = begin + _SWEEP_DEADLINE_S
    while time.monotonic() < deadline:
        users = [process for process in users_of(directory) if process.pid != spare]
        if not users:
            break
        late = time.monotonic() > begin + _GUESTS_S
        doomed = [process for process in users if late or _of_ray(process, directory)]
        for process in doomed:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(doomed, timeout=1.0)
        if not doomed:
            time.sleep(_POLL_S)
    shutil.rmtree(directory, ignore_errors=True)


def _of_ray(process: psutil.Process, directory: Path) -> bool:
    """Whether it is one of the processes of the Ray there, and no driver that joined it."""
    with contextlib.suppress(psutil.Error):
        names = ("ray::", "ray.util.client.")  # of actors; of the server for Ray's client
        return any(part.startswith(names) or str(directory) in part for part in process.cmdline())
    return True  # it has ended


def _main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a service manager sends it to every process, and this one ends last
    driver = os.getppid()
    sys.stdin.buffer.read()  # returns at the end of the pipe: closed by the driver, or by its death
    sweep(Path(sys.argv[1]), spare=driver if os.getppid() == driver else None)


if __name__ == "__main__":
    _main()
