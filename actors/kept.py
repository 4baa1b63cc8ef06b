"""A connection that is kept: made in the background, noticed when it is lost, made again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from ..errors import TierMoeError

T = TypeVar("T")
_LOOK_S = 0.1  # seconds between looks for a lost peer


class Kept(Generic[T]):
    """One connection at a time, which a thread of its own makes whenever there is none.

    Args:
        name: of the peer.
        connect: makes a connection, once the peer said that it is the one that is meant and well. What it raises is
            kept as the problem, and it is called again.
        hang_up: ends one; may take its time.
        ended: why a connection is of no more use; None while it is.
        changed: notified when one is made or lost; several may share it. None: its own.

    Attributes:
        problem: why there was none at the last look.
        losses: how often one was lost.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], T],
        hang_up: Callable[[T], None],
        ended: Callable[[T], str | None],
        changed: threading.Condition | None = None,
    ) -> None:
        self.name, self._connect, self._hang_up, self._ended = name, connect, hang_up, ended
        self._changed = changed if changed is not None else threading.Condition()
        self._current: T | None = None
        self._lost_s = time.monotonic()
        self._closed = False
        self.problem = "it registered no address"
        self.losses = 0
        self._thread = threading.Thread(target=self._keep, name=f"tiermoe-{name}-link", daemon=True)
        self._thread.start()

    @property
    def current(self) -> T | None:
        """The connection; None while there is none. Looks whether it ended."""
        connection = self._current
        if connection is not None and (why := self._ended(connection)) is not None:
            self.lost(connection, why)
            return None
        return connection

    @property
    def lost_s(self) -> float | None:
        """Since when there is none, `time.monotonic` seconds; None while there is one."""
        return None if self.current is not None else self._lost_s

    def wait(self, timeout_s: float) -> bool:
        """Whether there is a connection within this time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.current is not None, timeout_s)

    def lost(self, connection: T, why: str) -> None:
        """This connection is of no more use; nothing if another took its place."""
        with self._changed:
            if self._current is not connection:
                return
            self._current, self._lost_s = None, time.monotonic()
            self.losses, self.problem = self.losses + 1, why
            self._changed.notify_all()
        name = f"tiermoe-{self.name}-hangup"
        threading.Thread(target=self._hang_up, args=(connection,), name=name, daemon=True).start()

    def close(self) -> None:
        """Hang up and look no more. Safe to call twice."""
        with self._changed:
            self._closed = True
            connection, self._current = self._current, None
            self._changed.notify_all()
        self._thread.join()
        if connection is not None:
            self._hang_up(connection)

    def _keep(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._current is None or self._closed)
                if self._closed:
                    return
            try:
                made = self._connect()
            except (TierMoeError, OSError) as error:
                self.problem = str(error)
                with self._changed:
                    if self._changed.wait_for(lambda: self._closed, _LOOK_S):
                        return
                continue
            with self._changed:
                if not self._closed:
                    self._current = made
                    self._changed.notify_all()
                    continue
            self._hang_up(made)
            return
