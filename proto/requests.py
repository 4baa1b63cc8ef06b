"""What a server does with one frame, on both transports.

    unpack -> decode -> expired? known? stale? -> handler -> encode -> remember -> the frame of the answer

A request that arrives twice runs once. Per client, the server remembers running requests and answers that the client
may lack; every request states below which number the client has all answers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from ..errors import MessageError, MessageTooLarge, TierMoeError
from .codec import POST, PROBE, REPLY, REQUEST, UNKNOWN, Encoded, Frame, Pieces, decode, encode, pack, pack_bare, unpack
from .messages import Acknowledged, Failure, Message
from .options import Received, ServerOptions, too_large

Handler = Callable[[Message], Message | None]
_log = logging.getLogger(__name__)
_MAX_CLIENTS = 256
_NO_DEADLINE_S = 3600.0  # the wait of a repeated request without a deadline


class Requests:
    """Executes each request once, and answers every copy of it. Thread-safe."""

    def __init__(self, handler: Handler, options: ServerOptions) -> None:
        self._handler, self._options = handler, options
        self._lock = threading.Lock()
        self._caches: OrderedDict[int, ReplyCache] = OrderedDict()
        self.counts: Counter[str] = Counter()

    def answer(self, data: Received) -> Pieces | None:
        """The answer to a frame, ready to be written, if it has one."""
        try:
            frame = unpack(data)
        except MessageError as error:
            # a frame without ids cannot be answered; the client sends it again until its deadline passes
            self._count("malformed")
            _log.warning("dropped a frame: %s", error.what)
            return None
        if frame.role == POST:
            self._post(frame)
            return None
        if frame.role == PROBE:
            if not self._cache(frame.client).knows(frame.request):
                self._count("unknown")
                return pack_bare(frame.client, frame.request, 0, 0, UNKNOWN)
        elif frame.role != REQUEST:
            self._count("malformed")
            return None
        return self._packed(frame, self._reply(frame))

    def forget(self, client: int) -> None:
        with self._lock:
            self._caches.pop(client, None)

    def _post(self, frame: Frame) -> None:
        self._count("posts")
        failure = _result_of(lambda: self._handler(self._message(frame)))
        if isinstance(failure, Failure):
            self._count("failed")
            _log.warning("a post failed: %s", failure.what)

    def _reply(self, frame: Frame) -> Encoded:
        cache = self._cache(frame.client)
        state = cache.begin(frame.request, frame.settled)
        if state is State.KNOWN:
            self._count("repeated")
            known = cache.reply_of(frame.request, _left_s(frame))
            return known if known is not None else self._refusal("expired", "DeadlinePassed", "its deadline passed")
        if state is State.STALE:
            return self._refusal("stale", "StaleRequest", "it was answered or given up before")
        if frame.deadline_ns and time.monotonic_ns() > frame.deadline_ns:
            reply = self._refusal("expired", "DeadlinePassed", "it came after its deadline")
        else:
            reply = self._execute(frame)
        cache.finish(frame.request, reply)
        return reply

    def _execute(self, frame: Frame) -> Encoded:
        self._count("executed")
        result = _result_of(lambda: self._handler(self._message(frame)))
        if isinstance(result, Failure):
            self._count("failed")
        max_bytes = self._options.limits.max_message_bytes
        try:
            encoded = encode(Acknowledged() if result is None else result)
            if encoded.arrangement.size > max_bytes:
                raise too_large(encoded.arrangement.size, max_bytes)
            return encoded
        except TierMoeError as error:
            return encode(_failure(error))

    def _message(self, frame: Frame) -> Message:
        return decode(frame.kind, frame.body, frame.layout, frame.payload, self._options.limits)

    def _packed(self, frame: Frame, reply: Encoded) -> Pieces:
        max_bytes = self._options.limits.max_message_bytes
        try:
            return pack(reply, frame.client, frame.request, 0, 0, REPLY, max_bytes)[0]
        except MessageTooLarge as error:
            return pack(encode(_failure(error)), frame.client, frame.request, 0, 0, REPLY, max_bytes)[0]

    def _refusal(self, count: str, kind: str, why: str) -> Encoded:
        self._count(count)
        return encode(Failure(kind, f"the request was not executed: {why}", "give it more time, or send it anew"))

    def _cache(self, client: int) -> ReplyCache:
        cache = self._caches.get(client)
        if cache is not None:
            return cache
        new = ReplyCache(self._options.remembered_replies, self._options.remembered_bytes)
        with self._lock:
            cache = self._caches.setdefault(client, new)
            while len(self._caches) > _MAX_CLIENTS:
                self._caches.popitem(last=False)
            return cache

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1


def _left_s(frame: Frame) -> float:
    if not frame.deadline_ns:
        return _NO_DEADLINE_S
    return (frame.deadline_ns - time.monotonic_ns()) / 1e9


def _failure(error: TierMoeError) -> Failure:
    return Failure(type(error).__name__, error.what, error.remedy)


def _result_of(run: Callable[[], Message | None]) -> Message | None:
    try:
        return run()
    except TierMoeError as error:
        return _failure(error)
    except Exception as error:
        _log.exception("the handler failed")
        return Failure(
            "InternalError", f"{type(error).__name__}: {error}", "see the worker's log, and report it as a bug"
        )


class State(Enum):
    """The state of a request that arrives."""

    NEW = "new"  # execute it, then `finish`
    KNOWN = "known"  # running or done: `reply_of` waits for the answer
    STALE = "stale"  # settled by its client, or forgotten


@dataclass(slots=True)
class _Entry:
    reply: Encoded | None = None
    done: threading.Event | None = None  # made for the first waiting thread: most requests arrive once


class ReplyCache:
    """The answers that one client may ask for again.

    Args:
        max_replies: answers remembered.
        max_bytes: of their arrays together; the newest is always remembered.
    """

    def __init__(self, max_replies: int, max_bytes: int) -> None:
        self._max_replies, self._max_bytes = max_replies, max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._bytes = 0
        self._floor = 0  # requests below without an entry are stale

    def begin(self, request: int, settled: int) -> State:
        """The state of a request that arrived; a new one is now known."""
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
        """Whether the request arrived. Stale requests count as arrived."""
        with self._lock:
            return request in self._entries or request < self._floor

    def finish(self, request: int, reply: Encoded) -> None:
        """Remember the answer of a new request, and wake the threads that wait for it."""
        with self._lock:
            entry = self._entries.get(request)
            if entry is None:  # settled while it ran
                return
            entry.reply = reply
            if entry.done is not None:
                entry.done.set()
            self._bytes += reply.arrangement.size
            while len(self._entries) > self._max_replies or (self._bytes > self._max_bytes and len(self._entries) > 1):
                oldest = next((n for n, e in self._entries.items() if e.reply is not None and n != request), None)
                if oldest is None:
                    break
                self._forget(oldest)
                self._floor = max(self._floor, oldest + 1)

    def reply_of(self, request: int, timeout_s: float) -> Encoded | None:
        """The answer of a known request; None: it is late or forgotten."""
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
