"""The client's side of channels: `Channel`, the same on both transports."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
import time
import weakref
from types import TracebackType

from ..errors import DeadlinePassed, MessageError, PeerLost, RemoteFailure
from . import frame as frames
from .codec import decode, encode
from .control import Control
from .frame import POST, PROBE, REPLY, REQUEST, UNKNOWN, Frame, Pieces
from .links import Link
from .messages import Acknowledged, Failure, Message
from .options import ChannelOptions, Received
from .pending import Pending
from .shm import RingEnded

_open_channels: weakref.WeakSet[Channel] = weakref.WeakSet()
_FULL_S = 0.001  # while the way is full: how long to wait before looking for answers that may clear it


class Channel:
    """An open channel; made by `open_channel`. All methods may be called by any thread.

    On shared memory the thread that waits for an answer reads the ring itself (one at a time: the others sleep until it
    has theirs, or leaves the ring to them), so that no second thread has to be woken. On gRPC its own thread delivers.
    """

    def __init__(self, control: Control, link: Link, client: int, most: int, options: ChannelOptions) -> None:
        self._control, self._link, self._client, self._most, self._options = control, link, client, most, options
        self._faults = options.faults
        self._numbers = itertools.count(1)
        self._pendings: dict[int, Pending] = {}
        self._sending = threading.Lock()
        self._reading = threading.Lock()
        self._changed = threading.Condition(threading.Lock())
        self._waiters = 0
        self._timers: set[threading.Timer] = set()
        self._lost: str | None = None
        self._dropped = 0
        self._probes = 0
        self._resent = 0
        self._unexpected = 0
        link.start(self._deliver, self._lose)
        control.on_lost(self._lose)
        _open_channels.add(self)

    def __enter__(self) -> Channel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def transport(self) -> str:
        """ "shm" or "grpc"."""
        return self._link.name

    @property
    def alive(self) -> bool:
        """False once the peer is lost or the channel closed; it does not come back."""
        return self._lost is None

    @property
    def closed_because(self) -> str | None:
        """Why it is not alive."""
        return self._lost

    @property
    def counts(self) -> dict[str, int]:
        """Posts dropped, late answers asked for, requests sent again, answers that nobody waited for."""
        return {
            "dropped": self._dropped, "probes": self._probes, "resent": self._resent, "unexpected": self._unexpected,
        }  # fmt: skip

    def submit(self, message: Message, deadline_s: float) -> Pending:
        """Send a request; waits only where the way is full.

        Args:
            message: the request.
            deadline_s: seconds from now until which an answer is worth something, here and there.

        Raises:
            MessageError: the message is malformed, or too large (`MessageTooLarge`).
            DeadlinePassed: the way stayed full.
            PeerLost: the other process died or does not answer.
        """
        encoded = encode(message)
        deadline = time.monotonic() + deadline_s
        deadline_ns = max(1, int(deadline * 1e9) + self._control.offset_ns)
        self._lock_sending(deadline)
        try:
            number = next(self._numbers)
            pending = Pending(self, number, deadline, self._options.resend_after_s)
            pieces, size = frames.pack(
                encoded, self._client, number, self._settled(number), deadline_ns, REQUEST, self._most
            )
            pending._pieces, pending._size = pieces, size
            self._pendings[number] = pending
            if not self._transmit(pieces, size, deadline):
                self._pendings.pop(number, None)
                raise _passed(deadline_s, "the way to the peer stayed full")
        except BaseException:
            if "pending" in locals():
                self._pendings.pop(pending.number, None)
            raise
        finally:
            self._sending.release()
        pending._probe_at = time.monotonic() + pending._again_s
        return pending

    def call(self, message: Message, deadline_s: float) -> Message | None:
        """`submit` and `result`."""
        return self.submit(message, deadline_s).result()

    def post(self, message: Message) -> bool:
        """Send without an answer, at once or not at all.

        Returns:
            False: the way was full, or the message is longer than the ring; it is dropped and counted.

        Raises:
            MessageError, PeerLost: as in `submit`.
        """
        encoded = encode(message)
        pieces, size = frames.pack(encoded, self._client, 0, 0, 0, POST, self._most)
        if size > self._link.whole or not self._sending.acquire(blocking=False):
            self._dropped += 1
            return False
        try:
            sent = self._transmit(pieces, size, 0.0)
        finally:
            self._sending.release()
        if not sent:
            self._dropped += 1
        return sent

    def close(self) -> None:
        """End the channel; whoever waits gets `PeerLost`. Idempotent."""
        self._lose("the channel was closed")
        for timer in list(self._timers):
            timer.cancel()
        self._control.close()

    # sending

    def _lock_sending(self, deadline: float) -> None:
        if not self._sending.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise _passed(0.0, "the way to the peer stayed full")

    def _settled(self, number: int) -> int:
        """The oldest request that waits for its answer: what is below is settled."""
        try:
            return next(iter(self._pendings), number)
        except RuntimeError:  # an answer came in between
            return 0

    def _transmit(self, pieces: Pieces, size: int, deadline: float) -> bool:
        """Send, with `_sending` held; False: the way stayed full until the deadline."""
        if self._faults is None:
            return self._send(pieces, size, deadline)
        fault = self._faults.next()
        if fault.delay_s:
            timer = threading.Timer(fault.delay_s, self._send_late, (pieces, size, fault.copies))
            timer.daemon = True
            self._timers.add(timer)
            timer.start()
            return True
        sent = [self._send(pieces, size, deadline) for _ in range(fault.copies)]
        return all(sent)

    def _send_late(self, pieces: Pieces, size: int, copies: int) -> None:
        with self._sending, contextlib.suppress(PeerLost):
            for _ in range(copies):
                self._send(pieces, size, time.monotonic() + 1.0)

    def _send(self, pieces: Pieces, size: int, deadline: float) -> bool:
        if size > self._link.whole and self._lost is None:
            return self._send_long(pieces, size, deadline)
        try:
            if self._lost is None and self._link.send(pieces, size, 0.0, 0.0):
                return True
            while self._lost is None:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                self._drain()  # the peer may be waiting for us to take its answers
                if self._link.send(pieces, size, min(left_s, _FULL_S), 0.0):
                    return True
        except RingEnded as end:
            self._lose(str(end))
        raise self._peer_lost()

    def _send_long(self, pieces: Pieces, size: int, deadline: float) -> bool:
        """A frame longer than the ring. The peer may have to write answers before it takes the rest: take them."""
        sent = threading.Event()

        def take_answers() -> None:
            while not sent.is_set() and self._lost is None:
                self._drain(_FULL_S)

        helper = threading.Thread(target=take_answers, name="channel-drain", daemon=True)
        helper.start()
        try:
            left_s = max(0.0, deadline - time.monotonic())
            return self._link.send(pieces, size, left_s, max(left_s, self._options.liveness_s))
        except RingEnded as end:
            self._lose(str(end))
            raise self._peer_lost() from None
        finally:
            sent.set()
            helper.join()

    def _ask_again(self, pending: Pending, now: float) -> None:
        """Ask where the answer is; send the request again where the peer says that it never came."""
        pending._again_s *= 2
        pending._probe_at = now + pending._again_s
        if not self._sending.acquire(blocking=False):
            return  # somebody sends; the next time
        try:
            if pending.unknown:
                pending.unknown = False
                self._resent += self._transmit(pending._pieces, pending._size, pending._deadline)
            else:
                deadline_ns = max(1, int(pending._deadline * 1e9) + self._control.offset_ns)
                number = pending.number
                probe = frames.bare(self._client, number, self._settled(number), deadline_ns, PROBE)
                self._probes += self._transmit(probe, len(probe[0]), now)
        finally:
            self._sending.release()

    # receiving

    def _result(self, pending: Pending) -> Message | None:
        while pending.reply is None:
            now = time.monotonic()
            left_s = pending._deadline - now
            if self._lost is not None or left_s <= 0:
                self._poll(pending)  # what came before the end counts
                if pending.reply is not None:
                    break
                self._pendings.pop(pending.number, None)
                if self._lost is not None:
                    raise self._peer_lost()
                raise DeadlinePassed(
                    f"no answer from {self._control.address} before the deadline",
                    "give the call more time, or see what keeps the worker busy",
                )
            if now >= pending._probe_at or pending.unknown:
                self._ask_again(pending, now)
            wait_s = min(left_s, max(0.0, pending._probe_at - now))
            if self._link.pull and self._reading.acquire(blocking=False):
                try:
                    if pending.reply is None:
                        self._take(wait_s)
                finally:
                    self._reading.release()
                if self._waiters:
                    self._wake()
            elif self._link.pull:
                self._sleep(pending, wait_s)
            elif self._lost is None:
                pending.answered.acquire(timeout=wait_s)
        return self._message(pending.reply)

    def _take(self, timeout_s: float) -> bool:
        """Read one answer from the ring, with `_reading` held; False: there was none."""
        try:
            data = self._link.receive(timeout_s)
        except RingEnded as end:
            self._lose(str(end))
            return False
        if data is None:
            return False
        self._deliver(data)
        return True

    def _drain(self, timeout_s: float = 0.0) -> None:
        if self._link.pull and self._reading.acquire(blocking=False):
            try:
                while self._take(timeout_s):
                    pass
            finally:
                self._reading.release()
            if self._waiters:
                self._wake()

    def _poll(self, pending: Pending) -> bool:
        if pending.reply is None:
            self._drain()
        return pending.reply is not None or self._lost is not None or time.monotonic() >= pending._deadline

    def _sleep(self, pending: Pending, timeout_s: float) -> None:
        with self._changed:
            # Counted before the look at what it waits for: whoever changes that looks at the count afterwards.
            self._waiters += 1
            try:
                waits = pending.reply is None and not pending.unknown and self._lost is None
                if waits and self._reading.locked():
                    self._changed.wait(timeout_s)
            finally:
                self._waiters -= 1

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _deliver(self, data: Received) -> None:
        """An answer arrived."""
        try:
            frame = frames.unpack(data)
        except MessageError as error:
            self._lose(f"the peer sends what is no frame: {error.what}")
            return
        if frame.role == UNKNOWN:
            asked = self._pendings.get(frame.request)
            if asked is not None:
                asked.unknown = True
                asked.wake()
                if self._waiters:
                    self._wake()
            return
        pending = self._pendings.pop(frame.request, None)
        if pending is None or frame.role != REPLY or frame.client != self._client:
            self._unexpected += 1  # the answer to a request that was sent again, or given up
            return
        pending.reply = frame
        if not self._link.pull:
            pending.wake()
        elif self._waiters:
            self._wake()

    def _message(self, frame: Frame) -> Message | None:
        message = decode(frame.kind, frame.body, frame.layout, frame.payload, self._options.limits)
        if isinstance(message, Failure):
            if message.kind == DeadlinePassed.__name__:
                raise DeadlinePassed(message.what, message.remedy)
            raise RemoteFailure(message.what, message.remedy, message.kind)
        return None if isinstance(message, Acknowledged) else message

    # the end

    def _lose(self, why: str) -> None:
        with self._changed:
            if self._lost is not None:
                return
            self._lost = why
            self._changed.notify_all()
        for pending in list(self._pendings.values()):
            pending.wake()
        self._link.close()

    def _peer_lost(self) -> PeerLost:
        return PeerLost(
            f"the channel to {self._control.address} ended: {self._lost}", "restart the worker, or go on without it"
        )


def _passed(deadline_s: float, why: str) -> DeadlinePassed:
    return DeadlinePassed(f"the request was not sent: {why}", "give the call more time, or send less at once")


def close_all() -> None:
    """End every channel of this process, so that no thread of theirs waits when the interpreter ends."""
    for channel in list(_open_channels):
        with contextlib.suppress(Exception):
            channel.close()


atexit.register(close_all)
