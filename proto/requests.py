"""What a server does with one frame, on both transports: unpack, look whether it has expired, decode, answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..errors import MessageError, TierMoeError
from .codec import POST, REPLY, REQUEST, Frame, Pieces, decode, encode, pack, unpack
from .messages import Acknowledged, Failure, Message
from .options import Limits, Received, malformed

Handler = Callable[[Message], Message | None]
_log = logging.getLogger(__name__)


def answer(data: Received, handler: Handler, limits: Limits) -> tuple[Pieces, int] | None:
    """The answer to a frame, ready to be written, and its bytes; None: it has none."""
    try:
        frame = unpack(data)
        if frame.role not in (REQUEST, POST):
            raise malformed(f"a frame of role {frame.role}")
    except MessageError as error:  # without a number it cannot be answered: the client waits until its deadline
        _log.warning("dropped a frame: %s", error.what)
        return None
    if frame.role == REQUEST:
        return _packed(frame, _result(frame, handler, limits), limits)
    if isinstance(failure := _result(frame, handler, limits), Failure):
        _log.warning("a post failed: %s", failure.what)
    return None


def _result(frame: Frame, handler: Handler, limits: Limits) -> Message:
    """What the handler answers; its error as a Failure."""
    if frame.deadline_ns and time.monotonic_ns() > frame.deadline_ns:
        return Failure("DeadlinePassed", "the request came after its deadline", "give it more time")
    try:
        found = handler(decode(frame.kind, frame.body, frame.layout, frame.payload, limits))
        return Acknowledged() if found is None else found
    except TierMoeError as error:
        return _failure(error)
    except Exception as error:
        _log.exception("the handler failed")
        return Failure(
            "InternalError", f"{type(error).__name__}: {error}", "see the worker's log, and report it as a bug"
        )


def _packed(frame: Frame, reply: Message, limits: Limits) -> tuple[Pieces, int]:
    def packed(message: Message) -> tuple[Pieces, int]:
        return pack(encode(message), frame.request, 0, REPLY, limits.max_message_bytes)

    try:
        return packed(reply)
    except TierMoeError as error:  # it is malformed, or larger than the channel carries
        return packed(_failure(error))


def _failure(error: TierMoeError) -> Failure:
    return Failure(type(error).__name__, error.what, error.remedy)
