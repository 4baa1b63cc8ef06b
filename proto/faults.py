"""Faults on purpose, for tests: the n-th message of a direction is lost, late or repeated."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """What happens to one message: it arrives `copies` times (0: never), `delay_s` seconds late."""

    copies: int = 1
    delay_s: float = 0.0


DROP, REPEAT = Fault(copies=0), Fault(copies=2)
_NONE = Fault()


class FaultInjector:
    """Faults by the number of the message, counted from 0 as this side sends them.

    A client's injector meets requests and posts, a server's replies; messages that are sent again count anew.
    """

    def __init__(self, faults: Mapping[int, Fault]) -> None:
        self._faults = dict(faults)
        self._lock = threading.Lock()
        self._sent = 0

    def next(self) -> Fault:
        """The fate of the message that is about to be sent."""
        with self._lock:
            number, self._sent = self._sent, self._sent + 1
        return self._faults.get(number, _NONE)

    @property
    def sent(self) -> int:
        """Messages met so far."""
        with self._lock:
            return self._sent
