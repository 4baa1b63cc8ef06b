"""Requests that arrive twice are executed once.

Per client: the requests that are running or whose answer the client may not have. A client sends with every request the
number below which it needs no answer any more; what lies below is forgotten and, should it arrive again, refused.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from .codec import Encoded


class State(Enum):
    """Of a request that arrives."""

    NEW = "new"  # execute it, then `finish`
    KNOWN = "known"  # running or done: `reply_of` waits for the answer
    STALE = "stale"  # its client has its answer, or gave it up, or too many came since


@dataclass(slots=True)
class _Entry:
    reply: Encoded | None = None
    done: threading.Event | None = None  # made for the first who waits: most answers come before anybody asks again


class ReplyCache:
    """The answers that one client may ask for again.

    Args:
        most: answers kept.
        most_bytes: of their arrays together; the newest is kept in any case.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._bytes = 0
        self._floor = 0  # requests below are stale where there is no entry

    def begin(self, request: int, settled: int) -> State:
        """What to do with a request that arrived."""
        with self._lock:
            if settled > self._floor:
                self._floor = settled
                for number in [n for n in self._entries if n < settled]:
                    self._forget(number)
            if request in self._entries:
                return State.KNOWN
            if request < self._floor:
                return State.STALE
            self._entries[request] = _Entry()
            return State.NEW

    def knows(self, request: int) -> bool:
        """Whether the request came; a stale one did, or nobody asks for it."""
        with self._lock:
            return request in self._entries or request < self._floor

    def finish(self, request: int, reply: Encoded) -> None:
        """Keep the answer of a request that `begin` called new, and give it to those who wait."""
        with self._lock:
            entry = self._entries.get(request)
            if entry is None:  # settled while it ran
                return
            entry.reply = reply
            if entry.done is not None:
                entry.done.set()
            self._bytes += reply.arrangement.size
            while len(self._entries) > self._most or (self._bytes > self._most_bytes and len(self._entries) > 1):
                oldest = next((n for n, e in self._entries.items() if e.reply is not None and n != request), None)
                if oldest is None:
                    break
                self._forget(oldest)
                self._floor = max(self._floor, oldest + 1)

    def reply_of(self, request: int, timeout_s: float) -> Encoded | None:
        """The answer of a known request; None: it did not come in time, or was forgotten."""
        with self._lock:
            entry = self._entries.get(request)
            if entry is None or entry.reply is not None:
                return None if entry is None else entry.reply
            if entry.done is None:
                entry.done = threading.Event()
            done = entry.done
        return entry.reply if done.wait(max(0.0, timeout_s)) else None

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def _forget(self, number: int) -> None:
        entry = self._entries.pop(number)
        if entry.reply is not None:
            self._bytes -= entry.reply.arrangement.size
        if entry.done is not None:
            entry.done.set()
