"""What a server does with one frame, whichever way it came.

    unpack -> decode -> expired? known? stale? -> handler -> encode -> remember -> the frame of the answer
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable

from ..errors import MessageError, MessageTooLarge, TierMoeError
from . import frame as frames
from .codec import Encoded, decode, encode
from .dedup import ReplyCache, State
from .frame import POST, PROBE, REPLY, REQUEST, UNKNOWN, Frame, Pieces
from .messages import Acknowledged, Failure, Message
from .options import Received, ServerOptions

Handler = Callable[[Message], Message | None]
_log = logging.getLogger(__name__)
_MOST_CLIENTS = 256
_NO_DEADLINE_S = 3600.0  # a request without a deadline waits this long for its first execution


class Requests:
    """Executes each request once and answers it as often as it comes. Used by all threads of a server.

    Attributes:
        counts: requests executed, repeated, expired, stale, unknown, failed, malformed, and posts.
    """

    def __init__(self, handler: Handler, options: ServerOptions) -> None:
        self._handler, self._options = handler, options
        self._lock = threading.Lock()
        self._caches: OrderedDict[int, ReplyCache] = OrderedDict()
        self.counts: Counter[str] = Counter()

    def answer(self, data: Received) -> Pieces | None:
        """The answer to a frame, ready to be written; None: there is none to give."""
        try:
            frame = frames.unpack(data)
        except MessageError as error:
            # without its numbers nobody can be answered; the client sends again, and then its deadline passes
            self._count("malformed")
            _log.warning("dropped a frame: %s", error.what)
            return None
        if frame.role == POST:
            self._post(frame)
            return None
        if frame.role == PROBE:
            if not self._cache(frame.client).knows(frame.request):
                self._count("unknown")
                return frames.bare(frame.client, frame.request, 0, 0, UNKNOWN)
        elif frame.role != REQUEST:
            self._count("malformed")
            return None
        return self._packed(frame, self._reply(frame))

    def forget(self, client: int) -> None:
        """A client is gone: so are its answers."""
        with self._lock:
            self._caches.pop(client, None)

    def _post(self, frame: Frame) -> None:
        self._count("posts")
        failure = _failure_of(lambda: self._handler(self._message(frame)))
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
        result = _failure_of(lambda: self._handler(self._message(frame)))
        if isinstance(result, Failure):
            self._count("failed")
        try:
            encoded = encode(Acknowledged() if result is None else result)
            if encoded.arrangement.size > self._options.limits.max_message_bytes:
                self._too_large(encoded)
            return encoded
        except TierMoeError as error:
            return encode(Failure(type(error).__name__, error.what, error.remedy))

    def _message(self, frame: Frame) -> Message:
        return decode(frame.kind, frame.body, frame.layout, frame.payload, self._options.limits)

    def _packed(self, frame: Frame, reply: Encoded) -> Pieces:
        most = self._options.limits.max_message_bytes
        try:
            return frames.pack(reply, frame.client, frame.request, 0, 0, REPLY, most)[0]
        except MessageTooLarge as error:
            small = encode(Failure(type(error).__name__, error.what, error.remedy))
            return frames.pack(small, frame.client, frame.request, 0, 0, REPLY, most)[0]

    def _too_large(self, encoded: Encoded) -> None:
        frames.pack(encoded, 0, 0, 0, 0, REPLY, self._options.limits.max_message_bytes)

    def _refusal(self, count: str, kind: str, why: str) -> Encoded:
        self._count(count)
        return encode(Failure(kind, f"the request was not executed: {why}", "give it more time, or send it anew"))

    def _cache(self, client: int) -> ReplyCache:
        cache = self._caches.get(client)
        if cache is not None:
            return cache
        with self._lock:
            cache = self._caches.setdefault(
                client, ReplyCache(self._options.remembered_replies, self._options.remembered_bytes)
            )
            while len(self._caches) > _MOST_CLIENTS:
                self._caches.popitem(last=False)
            return cache

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1


def _left_s(frame: Frame) -> float:
    if not frame.deadline_ns:
        return _NO_DEADLINE_S
    return (frame.deadline_ns - time.monotonic_ns()) / 1e9


def _failure_of(run: Callable[[], Message | None]) -> Message | None:
    """The result, or what went wrong as a message."""
    try:
        return run()
    except TierMoeError as error:
        return Failure(type(error).__name__, error.what, error.remedy)
    except Exception as error:
        _log.exception("the handler failed")
        return Failure(
            "InternalError", f"{type(error).__name__}: {error}", "see the worker's log, and report it as a bug"
        )
