"""The end of a command, said at once and bounded: whatever Ray does, its processes are gone seconds after a signal.

Ray's calls return late, or never, when Ray is starting, or when its processes have ended or hang. The end in order gets
its time; then everything is ended by force.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

_START_S = 1.0  # to end in order while it starts
_SERVING_S = 40.0  # afterwards: requests under way have 20 s
_AGAIN_S = 1.0  # after a second signal
_SIGNAL_S = 1.0  # between the end of Ray's processes and a signal that ended them too, and this process
_INTERRUPTED, _TERMINATED = 130, 143
_SAY_S = 0.5
_AGAIN_AFTER_S = 0.01
_saying, _said = threading.RLock(), False  # a second signal's handler may run within the first one's
_codes: list[int] = []  # of the signals that came


def handle_signals() -> None:
    """SIGINT and SIGTERM end this process in order, as KeyboardInterrupt and SystemExit 143 in its main thread.

    A shell without job control starts background processes with SIGINT ignored, and Python keeps it ignored.
    """

    def interrupt(number: int, frame: object) -> None:
        _codes.append(_INTERRUPTED)
        say_ending()
        raise KeyboardInterrupt

    def terminate(number: int, frame: object) -> None:
        _codes.append(_TERMINATED)
        say_ending()
        sys.exit(_TERMINATED)

    def unraisable(failed: Any, before: Callable[[Any], Any] = sys.unraisablehook) -> None:
        """Python drops an interrupt that comes within a finalizer, or a callback of its import system: ask again."""
        if not _codes:
            before(failed)
        elif isinstance(failed.exc_value, KeyboardInterrupt | SystemExit):
            number = signal.SIGINT if _codes[0] == _INTERRUPTED else signal.SIGTERM
            threading.Timer(_AGAIN_AFTER_S, os.kill, (os.getpid(), number)).start()  # past this function, too

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, terminate)
    sys.unraisablehook = unraisable


def signalled() -> int | None:
    """The exit code of the first signal; None: there was none."""
    return _codes[0] if _codes else None


def say_ending() -> None:
    """Say on standard error that the command ends, once; returns when that is said, by whichever thread."""
    global _said
    if not _saying.acquire(timeout=_SAY_S):  # standard error is a pipe that nobody reads
        return
    try:
        if not _said:
            _said = True
            with contextlib.suppress(OSError, ValueError):
                # past Python's buffer: the main thread may be within a write
                os.write(sys.stderr.fileno(), b"ending ...\n")
    finally:
        _saying.release()


class BoundedEnd:
    """Inside the block, SIGINT and SIGTERM bound the time until the process ends; main thread only, else no effect.

    Args:
        force: ends by force what the process started, and says whether there was something; called on a thread.
        terminated: exit code after SIGTERM.
    """

    def __init__(self, force: Callable[[], bool], terminated: int = 0) -> None:
        self._force = force
        self._codes = {signal.SIGINT: _INTERRUPTED, signal.SIGTERM: terminated}
        self._code: int | None = None  # of the first signal
        self._until_s = 0.0
        self._lost: str | None = None
        self._lost_s = 0.0
        self._patience_s = _START_S
        self._wake, self._seen = socket.socketpair()
        self._before: int | None = None
        self._over = False
        self._muted = False

    def __enter__(self) -> BoundedEnd:
        if threading.current_thread() is threading.main_thread():
            self._seen.setblocking(False)
            self._before = signal.set_wakeup_fd(self._seen.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._run, name="tiermoe-ending", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        if self._before is not None:
            signal.set_wakeup_fd(self._before)
        self._seen.close()  # wakes the thread

    @property
    def terminated(self) -> bool:
        """Whether SIGTERM came first."""
        return self._code == self._codes[signal.SIGTERM]

    def serving(self) -> None:
        """It is ready: requests under way have their time to end."""
        self._patience_s = _SERVING_S

    def lost(self, reason: str) -> None:
        """Ray has ended or hangs: nothing can end in order. Called on any thread."""
        self._lost_s, self._lost = time.monotonic(), reason
        self._mute()
        with contextlib.suppress(OSError):
            self._seen.send(b"\0")

    def _run(self) -> None:
        while not self._over:
            self._wake.settimeout(0.1 if self._code is not None or self._lost is not None else None)
            with contextlib.suppress(TimeoutError, OSError):
                for number in self._wake.recv(64):
                    self._signalled(number)
            now_s = time.monotonic()
            if self._over:
                break
            if self._lost is not None and (self._code is not None or now_s > self._lost_s + _SIGNAL_S):
                self._end(1 if self._code is None else self._code)
            elif self._code is not None and now_s > self._until_s:
                self._end(self._code)
        self._wake.close()

    def _signalled(self, number: int) -> None:
        if number not in self._codes:
            return
        say_ending()  # Python's own handler waits until the main thread returns from native code
        patience_s = self._patience_s if self._code is None else _AGAIN_S
        self._until_s = time.monotonic() + patience_s
        if self._code is None:
            self._code = self._codes[signal.Signals(number)]
            self._mute()

    def _mute(self) -> None:
        """Drop what native code writes to standard error: Ray's client writes each call that an ending Ray fails."""
        if not self._muted:
            self._muted, before = True, sys.stderr
            before.flush()
            kept = os.dup(before.fileno())
            sys.stderr = os.fdopen(kept, "w", buffering=1, encoding=before.encoding, errors=before.errors)
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), before.fileno())

    def _end(self, code: int) -> None:
        """End by force, unless there is nothing to be ended so."""
        if code == 1:
            print(f"error: {self._lost}; start it again", file=sys.stderr, flush=True)
        if not self._force() and self._lost is None:
            self._until_s = time.monotonic() + _AGAIN_S  # Ray was not started yet
            return
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")  # the cursor, which a status line hides
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)
