"""`tiermoe serve` and `tiermoe up` in a process: ready inside a `with` block, ended with all it started behind it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

START_S, WAIT_S = 400.0, 120.0
ON_CPU = ("--threads", "1", "--device", "cpu")


def wait_until_said(process: subprocess.Popen[str], words: str) -> None:
    """Return when it has printed these words."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:  # ends with the process
        lines.append(line)
        if words in line:
            return
    pytest.fail("".join(lines))


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@dataclass
class Started:
    """A program of ours that stays.

    Attributes:
        folder: of its output, and of the registry that `tiermoe status` and `down` read.
        environment: its variables.
    """

    process: subprocess.Popen[bytes]
    folder: Path
    environment: dict[str, str]
    command: str

    def out(self) -> str:
        """What it wrote on standard output."""
        return (self.folder / f"{self.command}.stdout").read_text()

    def said(self) -> str:
        """What it wrote on standard error."""
        return (self.folder / f"{self.command}.stderr").read_text()

    def family(self) -> list[psutil.Process]:
        """Its living processes, without itself."""
        return [child for child in psutil.Process(self.process.pid).children(recursive=True) if _lives(child)]

    @property
    def url(self) -> str:
        """Of its HTTP server."""
        return self._told(r"(https?://\S+)/v1")

    @property
    def address(self) -> str:
        """Of its Ray."""
        return self._told(r"ready at (\S+)")

    def wait_until_ready(self) -> None:
        """Raises RuntimeError: it has ended, or is not ready in time."""
        end_s = time.monotonic() + START_S
        while "end it" not in self.out():
            if self.process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"{self.command} did not start: {self.said()}")
            time.sleep(0.2)

    def _told(self, pattern: str) -> str:
        found = re.search(pattern, self.out())
        assert found is not None, self.out()
        return found[1]


@contextmanager
def started(
    folder: Path, command: str, *arguments: str, variables: Mapping[str, str] | None = None, wait: bool = True,
    **options: Any,
) -> Iterator[Started]:  # fmt: skip
    """A program of ours; whatever is left of it is ended.

    Args:
        folder: an empty one, or one of another program of ours that it shall find.
        variables: more of its environment.
        wait: until it is ready.
        options: more of `Popen`.
    """
    environment = {key: value for key, value in os.environ.items() if key != "RAY_AUTH_MODE"}
    environment |= {"XDG_RUNTIME_DIR": str(folder)} | dict(variables or {})
    program = [sys.executable, "-c", "from tiermoe.cluster.cli import main; main()", command, *arguments]
    with (folder / f"{command}.stdout").open("wb") as out, (folder / f"{command}.stderr").open("wb") as errors:
        process = subprocess.Popen(program, env=environment, stdout=out, stderr=errors, **options)
    server, family = Started(process, folder, environment, command), list[psutil.Process]()
    try:
        if wait:
            server.wait_until_ready()
        yield server
    finally:
        if process.poll() is None:
            family = server.family()
            process.terminate()
            try:
                process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for left in psutil.wait_procs(family, timeout=20.0)[1]:
            left.kill()
