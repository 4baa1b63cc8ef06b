"""Bounds of messages, and options of channels and servers."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from ..errors import ConfigError, MessageError, MessageTooLarge
from ..limits import cores_with_peers
from .tls import TlsFiles

MIB = 1 << 20
HEARTBEAT_S = 0.2  # between two pings
LIVENESS_S = 0.9  # of silence
TransportChoice = Literal["auto", "shm", "grpc"]
# Bytes of an arriving message -> a writable buffer of exactly that size, aligned to 16, or None for ordinary bytes.
# The reading thread calls it; the message and its arrays reference the buffer.
Supply = Callable[[int], Any]
Received = bytes | memoryview  # a frame that arrived; read-only


@dataclass(frozen=True)
class Limits:
    """Bounds of sent and accepted messages: bytes of a whole frame, layers and experts of the model.

    Raises:
        ConfigError: a bound is out of range.
    """

    max_message_bytes: int = 64 * MIB
    layers: int = 1024
    experts: int = 4096

    def __post_init__(self) -> None:
        for name, least, most in (
            ("max_message_bytes", 4096, 2**31 - MIB),
            ("layers", 1, 2**16),
            ("experts", 1, 2**15),  # so that layer * experts + expert is an int32
        ):
            if not least <= getattr(self, name) <= most:
                raise ConfigError(f"{name} is {getattr(self, name)}", f"give a number from {least} to {most}")


def malformed(what: str) -> MessageError:
    """The error of a message that breaks the rules of its kind."""
    return MessageError(f"malformed message: {what}", "run the same version of tiermoe at both ends")


def too_large(size: int, most: int) -> MessageTooLarge:
    """The error of a message of `size` bytes where `most` are allowed."""
    return MessageTooLarge(
        f"a message of {size} bytes is larger than the {most} that the channel carries",
        "send fewer rows or experts at once, or raise max_message_bytes at both ends",
    )


def default_spin_s() -> float:
    """How long a side polls before it sleeps: 200 us; after the first 5 us it yields the core between polls.

    A wake-up costs some 40 us. With 50 us, one late round trip made both sides sleep from then on. This process's
    affinity does not count: the peer is likely to run on a core outside it.
    """
    return 200e-6 if cores_with_peers() > 1 else 0.0


@dataclass(slots=True)
class Traffic:
    """What went over the channels to one peer, or over all of a server, since there is one.

    Attributes:
        waited_s: seconds that callers waited for answers. answering_s: seconds from a frame to its answer, of a server.
    """

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    waited_s: float = 0.0
    answering_s: float = 0.0

    def sent(self, size: int) -> None:
        self.messages_sent += 1
        self.bytes_sent += size

    def received(self, size: int) -> None:
        self.messages_received += 1
        self.bytes_received += size

    def add(self, other: Traffic) -> None:
        for part in fields(self):
            setattr(self, part.name, getattr(self, part.name) + getattr(other, part.name))

    def of_client(self) -> dict[str, float]:
        """By name, as in `actors.sample.ProcessSample.peers`."""
        return {name: value for name, value in asdict(self).items() if name != "answering_s"}

    def of_server(self) -> dict[str, float]:
        """By name, as in `actors.sample.ProcessSample.counters`."""
        return {name: value for name, value in asdict(self).items() if name != "waited_s"}


@dataclass(frozen=True)
class ChannelOptions:
    """Options of a client.

    Attributes:
        transport: "auto" takes shared memory if the peer is on this host.
        limits: bounds of messages, at most the server's.
        token: shared secret of the server.
        tls: None: no encryption.
        ring_bytes: of each direction's ring, a power of two. Longer messages go through in pieces.
        spin_s: how long a waiting thread polls before it sleeps.
        liveness_s: silence after which the peer counts as lost.
        open_deadline_s: for opening.
        queued_bytes: gRPC only: requests that wait to be sent; more make `submit` wait.
        supply: shared memory only: where answers are put, such as memory registered with a GPU; None: anywhere.
        traffic: counts what goes over all channels of these options.

    Raises:
        ConfigError: a value is out of range.
    """

    transport: TransportChoice = "auto"
    limits: Limits = field(default_factory=Limits)
    token: str | None = field(default=None, repr=False)
    tls: TlsFiles | None = None
    ring_bytes: int = 4 * MIB
    spin_s: float = field(default_factory=default_spin_s)
    liveness_s: float = field(default_factory=lambda: LIVENESS_S)
    open_deadline_s: float = 5.0
    queued_bytes: int = 32 * MIB
    supply: Supply | None = None
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        if self.transport not in ("auto", "shm", "grpc"):
            raise ConfigError(f"there is no transport '{self.transport}'", "give auto, shm or grpc")
        if not good_ring_bytes(self.ring_bytes):
            raise ConfigError(f"ring_bytes is {self.ring_bytes}", "give a power of two from 4096 to 2**30")
        positive = (self.open_deadline_s, self.queued_bytes)
        if min(positive) <= 0 or not 0 <= self.spin_s <= 1 or self.liveness_s <= HEARTBEAT_S:
            raise ConfigError(
                "a time of the channel is out of range", f"give times above 0, and liveness_s above {HEARTBEAT_S:g}"
            )


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server.

    Attributes:
        host: the address to bind, at any free port.
        limits: bounds of messages.
        token: shared secret; required unless `host` is a loopback address.
        tls: None: no encryption.
        shared_memory: whether clients of this host may use it.
        spin_s: how long a connection's thread polls for requests before it sleeps.
        doze_s: shared memory only: how long after a request its thread polls every 0.1 ms or so, so that a client need
            not wake it (a system call, some 10 us of the client's time).
        helps: shared memory only: a connection's thread leaves the core of the client that asks (`shm.Ring`). For a
            server that computes nothing else meanwhile.
        max_connections: more are refused.
        supply: shared memory only: where requests are put, as in `ChannelOptions`.

    Raises:
        ConfigError: a value is out of range, or a host other than loopback has no token.
    """

    host: str = "127.0.0.1"
    limits: Limits = field(default_factory=Limits)
    token: str | None = field(default=None, repr=False)
    tls: TlsFiles | None = None
    shared_memory: bool = True
    spin_s: float = field(default_factory=default_spin_s)
    doze_s: float = 0.0
    helps: bool = False
    max_connections: int = 64
    supply: Supply | None = None

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and not self.token:
            raise ConfigError(
                f"a channel server on '{self.host}' would be open to everybody who reaches it",
                "give it a token (and TLS), or bind 127.0.0.1",
            )
        if self.tls is not None and self.tls.certificate is None:
            raise ConfigError("TLS without a certificate of the server", "give certificate and key files")
        if self.max_connections < 1:
            raise ConfigError(f"max_connections is {self.max_connections}", "give a number above 0")
        for name in ("spin_s", "doze_s"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}", "give seconds from 0 to 1")


def good_ring_bytes(size: int) -> bool:
    return 4096 <= size <= 2**30 and size & (size - 1) == 0


def is_loopback(host: str) -> bool:
    """Whether only this host can reach a socket bound there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
