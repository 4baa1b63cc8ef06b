"""Files that a server opens again by name, or that expire, and the room where it writes: what is wrong with one is said
once, by its name.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from ...errors import ConfigError
from ...proto.tls import TlsFiles, expires_s
from ..api.keys import KeyRing
from ..api.request_log import check_file
from ..api.settings import ApiSettings

SHARED_MEMORY = Path("/dev/shm")  # of Ray
_ROOM_BYTES = 4 * 2**20  # a disk with less is full
Check = Callable[[], str | None]  # what is wrong; None: nothing
_SOON_S = {60.0: "a minute", 3600.0: "an hour", 86400.0: "a day", 14 * 86400.0: "14 days"}


class FileWatch:
    """Looks at files, and says what has become wrong with one, and that it is right again.

    Args:
        checks: of each file, by what it is and its name.
        say: called with each line.
    """

    def __init__(self, checks: Mapping[str, Check], say: Callable[[str], None]) -> None:
        self._checks, self._say = checks, say
        self._wrong: dict[str, str] = {}

    def look(self) -> None:
        """Look at each once; call this every few seconds."""
        for name, check in self._checks.items():
            problem, before = check(), self._wrong.pop(name, None)
            if problem is not None:
                self._wrong[name] = problem
                if problem != before:
                    self._say(problem)
            elif before is not None:
                self._say(f"{name} is right again")


def checks_of(server: ApiSettings, tls: TlsFiles | None) -> dict[str, Check]:
    """Of the files that a server was given."""
    checks = expiry_checks(tls)
    if server.api_key_file is not None:
        ring = KeyRing(Path(server.api_key_file), refused=lambda line: None)  # the server's own counts
        checks[f"key file '{server.api_key_file}'"] = ring.refresh
    if server.request_log != "off" and server.request_log_file is not None:
        log = Path(server.request_log_file)
        checks[f"request log '{log}'"] = lambda: _problem_of_log(log)
        checks |= room_checks({log.parent: "lines of the request log are lost, and counted in /metrics"})
    return checks


def room_checks(lost: Mapping[Path, str]) -> dict[str, Check]:
    """Whether the file systems of folders have room.

    Args:
        lost: by folder, what a full one costs.
    """
    return {f"the disk of '{folder}'": partial(_room, folder, what) for folder, what in lost.items()}


def ray_room_checks(session: Path, local: bool) -> dict[str, Check]:
    """Of what Ray writes on this machine.

    Args:
        session: its folder of logs and sockets.
        local: whether this process started it. It has its part of /dev/shm then.
    """
    lost = "a runtime that starts now gets none" if local else "a message above 100 KB may end Ray on this node"
    return room_checks(
        {session: "lines of Ray's logs are lost"} | ({SHARED_MEMORY: lost} if SHARED_MEMORY.is_dir() else {})
    )


def expiry_checks(tls: TlsFiles | None, now: Callable[[], float] = time.time) -> dict[str, Check]:
    """Of certificates: a line 14 days, a day, an hour and a minute before they expire, and one then.

    Args:
        tls: None: there is none.
        now: the date, in seconds since 1970.
    """
    files = [] if tls is None else [file for file in (tls.certificate, tls.ca) if file is not None]
    return {f"TLS certificate '{file}'": partial(_expiry, Path(file), now) for file in files}


def _problem_of_log(log: Path) -> str | None:
    try:
        if log.exists():  # a rotated one is made again with the next line
            check_file(log)
    except ConfigError as error:
        return f"{error} (lines are lost, and counted in /metrics, once it is opened again)"
    except OSError as error:
        return f"request log '{log}' cannot be looked at: {error.strerror}"
    return None


def _room(folder: Path, lost: str) -> str | None:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return f"'{folder}' cannot be looked at: {error.strerror}"
    return None if free >= _ROOM_BYTES else f"the disk of '{folder}' is full: {lost}; make room there"


def _expiry(file: Path, now: Callable[[], float]) -> str | None:
    try:
        end_s, now_s = expires_s(file), now()
    except ConfigError as error:
        return f"{error} (what was read before is in use)"
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(end_s))
    if end_s <= now_s:
        return f"TLS certificate '{file}' expired at {when}: new connections fail; replace it and start again"
    for within_s, name in _SOON_S.items():
        if end_s - now_s <= within_s:
            return f"TLS certificate '{file}' expires at {when}, within {name}: replace it and start again"
    return None
