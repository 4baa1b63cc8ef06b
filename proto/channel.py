"""Channels between processes: messages of `messages.py` over shared memory or gRPC.

    server = ChannelServer(handler)                  # handler: message -> answer
    channel = open_channel(server.address)
    result = channel.call(batch, deadline_s=1.0)     # raises DeadlinePassed, PeerLost, RemoteFailure

A control stream over gRPC opens every channel, detects shared memory, and carries heartbeats. Messages travel through
rings in shared memory, else through a second stream. Both deliver each frame once and in order, or end: a request is
sent once and runs once, and an answer that cannot come is a `PeerLost`. A deadline holds on both sides. When the
transport is full, `submit` waits, and `post` drops the message.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, Protocol

from ..errors import ChannelRefused, DeadlinePassed, MessageError, PeerLost, RemoteFailure
from . import grpc_transport, shm
from .codec import POST, REPLY, REQUEST, Frame, Pieces, decode, encode, pack, unpack
from .messages import Acknowledged, Failure, Hello, Message
from .options import ChannelOptions, Received

_open_channels: weakref.WeakSet[Channel] = weakref.WeakSet()
_FULL_S = 0.001  # between attempts to send while the transport is full


class Transport(Protocol):
    """Carries frames both ways: `shm.ShmTransport`, `grpc_transport.GrpcTransport`.

    Attributes:
        pull: whether the channel calls `receive`; else the transport calls `deliver`.
        whole: bytes; a longer frame is sent in pieces while the peer reads it.
    """

    @property
    def name(self) -> Literal["shm", "grpc"]: ...

    pull: bool
    whole: int

    def start(self, deliver: Callable[[Received], None], lose: Callable[[str], None]) -> None:
        """Called once, before the first `send`."""

    def send(self, pieces: Pieces, size: int, timeout_s: float, stall_s: float) -> bool:
        """Send a frame; one thread at a time. False: the transport stayed full for `timeout_s`.

        A frame longer than `whole` that stalls for `stall_s` breaks the transport.
        """

    def receive(self, timeout_s: float) -> Received | None:
        """Take a frame; one thread at a time. None: none arrived in time."""

    def close(self) -> None:
        """Close, and wake the threads that wait. Idempotent."""


def open_channel(address: str, options: ChannelOptions | None = None) -> Channel:
    """Connect to a `ChannelServer` at HOST:PORT.

    Raises:
        ChannelRefused: no server answers, the token or version is wrong, or "shm" is demanded and impossible.
        ConfigError: a TLS file cannot be read.
    """
    options = options if options is not None else ChannelOptions()
    client = secrets.randbits(63) + 1
    max_bytes = options.limits.max_message_bytes
    hello = Hello(grpc_transport.PROTOCOL_VERSION, client, max_bytes)
    offered: shm.Offer | None = None
    if options.transport != "grpc" and shm.supported():
        with contextlib.suppress(OSError):  # gRPC then
            offered = shm.offer(options.ring_bytes, options.spin_s)
            hello = replace(hello, pid=os.getpid(), fd=offered.fd, ring_bytes=offered.ring_bytes)
    metadata = grpc_transport.metadata(options, client)
    try:
        grpc_channel = grpc_transport.dial(address, options)
        control = grpc_transport.ControlStream(address, grpc_channel, metadata, hello, options)
    finally:
        if offered is not None:
            offered.close_fd()
    assert control.welcome is not None
    transport: Transport
    if offered is not None and control.welcome.nonce == offered.nonce.hex():
        transport = shm.ShmTransport(offered.rings, max_bytes, options.supply)
    elif options.transport == "shm":
        control.close()
        raise ChannelRefused(
            f"{address} cannot share memory with this process", "use transport auto or grpc, or run both on one host"
        )
    else:
        transport = grpc_transport.GrpcTransport(grpc_channel, metadata, options.queued_bytes)
    return Channel(control, transport, min(max_bytes, control.welcome.max_message_bytes), options)


class Pending:
    """A future answer; one thread at a time may wait for it."""

    __slots__ = ("_channel", "answered", "deadline", "number", "reply")

    def __init__(self, channel: Channel, number: int, deadline: float) -> None:
        self._channel, self.number, self.deadline = channel, number, deadline
        self.reply: Frame | None = None
        self.answered: threading.Lock | None = None  # released by `wake`; where the transport delivers
        if not channel._transport.pull:
            self.answered = threading.Lock()
            self.answered.acquire()

    def wake(self) -> None:
        """Let the waiting thread check again."""
        if self.answered is not None:
            with contextlib.suppress(RuntimeError):  # it is awake
                self.answered.release()

    def done(self) -> bool:
        """Whether `result` returns or raises at once."""
        return self.reply is not None or self._channel._poll(self)

    def result(self) -> Message | None:
        """The answer; None for an acknowledgement.

        Raises:
            DeadlinePassed: no answer arrived in time.
            PeerLost: the other process died or does not answer.
            RemoteFailure: the answer is an error.
            MessageError: the answer is malformed.
        """
        return self._channel._result(self)


class Channel:
    """An open channel, made by `open_channel`. Thread-safe.

    On shared memory the thread that waits for an answer reads the ring itself, so no second thread must wake. One
    thread reads at a time; the others sleep. On gRPC a thread of gRPC delivers.
    """

    def __init__(
        self,
        control: grpc_transport.ControlStream,
        transport: Transport,
        max_bytes: int,
        options: ChannelOptions,
    ) -> None:
        self._control, self._transport = control, transport
        self._max_bytes, self._options, self._traffic = max_bytes, options, options.traffic
        self._numbers = itertools.count(1)
        self._pendings: dict[int, Pending] = {}
        self._sending = threading.Lock()
        self._reading = threading.Lock()
        self._changed = threading.Condition(threading.Lock())
        self._waiters = 0
        self._lost: str | None = None
        transport.start(self._deliver, self._lose)
        control.on_lost(self._lose)
        _open_channels.add(self)

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def transport(self) -> str:
        """ "shm" or "grpc"."""
        return self._transport.name

    @property
    def alive(self) -> bool:
        """False once the peer is lost or the channel closed; final."""
        return self._lost is None

    @property
    def closed_because(self) -> str | None:
        """Why it is not alive."""
        return self._lost

    def submit(self, message: Message, deadline_s: float) -> Pending:
        """Send a request; wait only while the transport is full.

        Args:
            message: the request.
            deadline_s: seconds from now; holds for the server too.

        Raises:
            MessageError: the message is malformed, or too large (`MessageTooLarge`).
            DeadlinePassed: the transport stayed full.
            PeerLost: the other process died or does not answer.
        """
        encoded = encode(message)
        deadline = time.monotonic() + deadline_s
        deadline_ns = self._peer_deadline_ns(deadline)
        sending = self._sending
        if not (sending.acquire(False) or sending.acquire(timeout=max(0.0, deadline - time.monotonic()))):
            raise _not_sent()
        try:
            number = next(self._numbers)
            pieces, size = pack(encoded, number, deadline_ns, REQUEST, self._max_bytes)
            pending = self._pendings[number] = Pending(self, number, deadline)
            try:
                if not self._send(pieces, size, deadline):
                    raise _not_sent()
                self._traffic.sent(size)
            except BaseException:
                self._pendings.pop(number, None)
                raise
        finally:
            self._sending.release()
        return pending

    def call(self, message: Message, deadline_s: float) -> Message | None:
        return self.submit(message, deadline_s).result()

    def post(self, message: Message) -> bool:
        """Send without an answer, at once or not at all.

        Returns:
            False: the transport is full, or the message longer than the ring; it is dropped.

        Raises:
            MessageError, PeerLost: as in `submit`.
        """
        encoded = encode(message)
        pieces, size = pack(encoded, 0, 0, POST, self._max_bytes)
        if size > self._transport.whole or not self._sending.acquire(blocking=False):
            return False
        try:
            sent = self._send(pieces, size, 0.0)
            if sent:
                self._traffic.sent(size)
            return sent
        finally:
            self._sending.release()

    def close(self) -> None:
        """Close the channel; waiting calls raise `PeerLost`. Idempotent."""
        self._lose("the channel was closed")
        self._control.close()

    # sending

    def _peer_deadline_ns(self, deadline: float) -> int:
        return max(1, int(deadline * 1e9) + self._control.offset_ns)

    def _send(self, pieces: Pieces, size: int, deadline: float) -> bool:
        """Send, with `_sending` held; False: the transport stayed full until the deadline."""
        if size > self._transport.whole and self._lost is None:
            return self._send_long(pieces, size, deadline)
        try:
            if self._lost is None and self._transport.send(pieces, size, 0.0, 0.0):
                return True
            while self._lost is None:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return False
                self._drain()  # the peer may wait for us to take its answers
                if self._transport.send(pieces, size, min(left_s, _FULL_S), 0.0):
                    return True
        except shm.RingEnded as end:
            self._lose(str(end))
        raise self._peer_lost()

    def _send_long(self, pieces: Pieces, size: int, deadline: float) -> bool:
        """Send a frame longer than the ring, and take the answers that the peer must write before it reads on."""
        sent = threading.Event()

        def take_answers() -> None:
            while not sent.is_set() and self._lost is None:
                self._drain(_FULL_S)

        helper = threading.Thread(target=take_answers, name="channel-drain", daemon=True)
        helper.start()
        try:
            left_s = max(0.0, deadline - time.monotonic())
            return self._transport.send(pieces, size, left_s, max(left_s, self._options.liveness_s))
        except shm.RingEnded as end:
            self._lose(str(end))
            raise self._peer_lost() from None
        finally:
            sent.set()
            helper.join()

    # receiving

    def _result(self, pending: Pending) -> Message | None:
        if pending.reply is None:
            began_s = time.monotonic()
            try:
                self._await(pending, began_s)
            finally:
                self._traffic.waited_s += time.monotonic() - began_s
        reply = pending.reply
        assert reply is not None  # else `_await` raised
        message = decode(reply.kind, reply.body, reply.layout, reply.payload, self._options.limits)
        if isinstance(message, Failure):
            if message.kind == DeadlinePassed.__name__:
                raise DeadlinePassed(message.what, message.remedy)
            raise RemoteFailure(message.what, message.remedy, message.kind)
        return None if isinstance(message, Acknowledged) else message

    def _await(self, pending: Pending, now_s: float) -> None:
        """Return once there is an answer. Raises DeadlinePassed, PeerLost."""
        while pending.reply is None:
            left_s = pending.deadline - now_s
            if self._lost is not None or left_s <= 0:
                self._poll(pending)  # an answer before the end counts
                if pending.reply is not None:
                    break
                self._pendings.pop(pending.number, None)
                if self._lost is not None:
                    raise self._peer_lost()
                raise DeadlinePassed(
                    f"no answer from {self._control.address} before the deadline",
                    "give the call more time, or see what keeps the worker busy",
                )
            self._wait(pending, left_s)
            now_s = time.monotonic()

    def _wait(self, pending: Pending, timeout_s: float) -> None:
        """Read the ring, or sleep while another thread reads it."""
        if not self._transport.pull:
            if self._lost is None and pending.answered is not None:
                pending.answered.acquire(timeout=timeout_s)
        elif self._reading.acquire(blocking=False):
            try:
                if pending.reply is None:
                    self._take(timeout_s)
            finally:
                self._reading.release()
            if self._waiters:
                self._wake()
        else:
            with self._changed:
                # Count before the check: the thread that changes the state reads the count afterwards.
                self._waiters += 1
                try:
                    if pending.reply is None and self._lost is None and self._reading.locked():
                        self._changed.wait(timeout_s)
                finally:
                    self._waiters -= 1

    def _take(self, timeout_s: float) -> bool:
        """Read one answer from the ring, with `_reading` held; False: there was none."""
        try:
            data = self._transport.receive(timeout_s)
        except shm.RingEnded as end:
            self._lose(str(end))
            return False
        if data is None:
            return False
        self._deliver(data)
        return True

    def _drain(self, timeout_s: float = 0.0, pending: Pending | None = None) -> None:
        """Read answers until none is there, or until that of `pending` was."""
        if self._transport.pull and self._reading.acquire(blocking=False):
            try:
                while self._take(timeout_s) and (pending is None or pending.reply is None):
                    pass
            finally:
                self._reading.release()
            if self._waiters:
                self._wake()

    def _poll(self, pending: Pending) -> bool:
        if pending.reply is None:
            self._drain(pending=pending)
        return pending.reply is not None or self._lost is not None or time.monotonic() >= pending.deadline

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _deliver(self, data: Received) -> None:
        try:
            frame = unpack(data)
        except MessageError as error:
            self._lose(f"the peer sends what is no frame: {error.what}")
            return
        self._traffic.received(len(data))
        pending = self._pendings.pop(frame.request, None)
        if pending is None or frame.role != REPLY:  # of a request that was given up
            return
        pending.reply = frame
        if not self._transport.pull:
            pending.wake()
        elif self._waiters:
            self._wake()

    # the end

    def _lose(self, why: str) -> None:
        with self._changed:
            if self._lost is not None:
                return
            self._lost = why
            self._changed.notify_all()
        for pending in list(self._pendings.values()):
            pending.wake()
        self._transport.close()

    def _peer_lost(self) -> PeerLost:
        return PeerLost(
            f"the channel to {self._control.address} ended: {self._lost}", "restart the worker, or go on without it"
        )


def _not_sent() -> DeadlinePassed:
    return DeadlinePassed(
        "the request was not sent: the queue to the peer stayed full", "give the call more time, or send less at once"
    )


def close_all() -> None:
    """End every channel of this process, so that none of its threads waits at exit."""
    for channel in list(_open_channels):
        with contextlib.suppress(Exception):
            channel.close()


atexit.register(close_all)
