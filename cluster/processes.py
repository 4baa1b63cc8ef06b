"""Which process one is: by its pid, when it started, and the boot that it started in. No clock has a part in it.

A pid alone is given out again, and the time of day at which a process started (as psutil computes it from the clock and
the time since boot) changes when the clock is set: two processes then disagree about a third.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_TEXT = re.compile(r"(?P<pid>[1-9][0-9]{0,9})-(?P<start>[0-9]{1,20})-(?P<boot>[0-9a-f]*)")
_STATE, _START = 0, 19  # fields 3 and 22 of /proc/PID/stat, counted behind the name (proc(5))


@dataclass(frozen=True)
class ProcessId:
    """One process of this machine. As text it is a part of a file's name.

    Attributes:
        pid: its number.
        start: clock ticks from boot to its start (`/proc/PID/stat`); hundredths of a second since 1970 where there is
            no /proc.
        boot: the kernel's id of the boot, in hexadecimal digits; empty if there is none.
    """

    pid: int
    start: int
    boot: str

    @classmethod
    def of(cls, pid: int | None = None) -> ProcessId:
        """The process that has a pid now; None: this one.

        Raises:
            ProcessLookupError: none has it, or it has ended and its parent has not asked after it.
        """
        pid = os.getpid() if pid is None else pid
        return cls(pid, _started(pid), _boot())

    @classmethod
    def parse(cls, text: str) -> ProcessId | None:
        """The inverse of `str`; None: not the text of an id."""
        match = _TEXT.fullmatch(text)
        return None if match is None else cls(int(match["pid"]), int(match["start"]), match["boot"])

    def __str__(self) -> str:
        return f"{self.pid}-{self.start}-{self.boot}"

    def lives(self) -> bool:
        """Whether it has not ended."""
        try:
            return ProcessId.of(self.pid) == self
        except ProcessLookupError:
            return False

    def process(self) -> psutil.Process | None:
        """It, to be signalled; None: it has ended, though another may have its pid."""
        try:
            process = psutil.Process(self.pid)  # remembers its own start: a later one of this pid gets no signal
        except psutil.NoSuchProcess:
            return None
        return process if self.lives() else None


def _started(pid: int) -> int:
    """Raises ProcessLookupError."""
    if sys.platform != "linux":
        try:
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                return round(100 * process.create_time())
        except psutil.NoSuchProcess:
            pass
        raise ProcessLookupError(f"no process {pid}")
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError as error:  # ESRCH: it ended meanwhile
        raise ProcessLookupError(f"no process {pid}") from error
    found = text.rpartition(")")[2].split()  # the name may hold spaces and brackets
    if found[_STATE] in "ZX":
        raise ProcessLookupError(f"process {pid} has ended")
    return int(found[_START])


def _boot() -> str:
    try:
        return _BOOT.read_text(encoding="ascii").strip().replace("-", "")
    except OSError:
        return ""
