"""An answer to come: `Pending`."""

from __future__ import annotations

import contextlib
import threading
from typing import Protocol

from .frame import Frame, Pieces
from .messages import Message


class Answers(Protocol):
    """Where answers come from; `client.Channel`."""

    def _poll(self, pending: Pending) -> bool: ...
    def _result(self, pending: Pending) -> Message | None: ...


class Pending:
    """An answer to come. Several threads may wait for different answers; one waits for the same."""

    __slots__ = (
        "_again_s", "_channel", "_deadline", "_pieces", "_probe_at", "_size", "answered", "number",
        "reply", "unknown",
    )  # fmt: skip

    def __init__(self, channel: Answers, number: int, deadline: float, again_s: float) -> None:
        self._channel, self.number, self._deadline = channel, number, deadline
        self._again_s, self._probe_at = again_s, 0.0
        self._pieces: Pieces = ()
        self._size = 0
        self.reply: Frame | None = None
        self.unknown = False  # the peer says that the request never came
        self.answered = threading.Lock()  # held until there is something to look at; where answers are delivered
        self.answered.acquire()

    def wake(self) -> None:
        """Let the thread that waits for this answer look again."""
        with contextlib.suppress(RuntimeError):  # it is awake
            self.answered.release()

    def done(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self._channel._poll(self)

    def result(self) -> Message | None:
        """The answer; None where it is "done".

        Raises:
            DeadlinePassed: none came in time.
            PeerLost: the other process died or does not answer.
            RemoteFailure: the answer is an error.
            MessageError: the answer is malformed.
        """
        return self._channel._result(self)
