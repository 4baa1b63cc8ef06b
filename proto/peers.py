"""How a process finds another one's channel in a directory of addresses, and reconnects after a loss.

A process that restarts registers a new address, so a reconnection looks the address up again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ..errors import RuntimeFailure, StoreError, TierMoeError
from .messages import HealthReport, HealthRequest, Message
from .options import ChannelOptions, Supply, Traffic, TransportChoice
from .tls import TlsFiles

if TYPE_CHECKING:
    from .channel import Channel

MATCHER = "matcher"  # registered name of the matcher of expert maps
_RETRY_S = 0.1  # seconds between attempts to connect
_HEALTH_S = 2.0


def ndp_name(index: int) -> str:
    """The registered name of NDP worker 0..N-1."""
    return f"ndp/{index}"


def shard_name(index: int) -> str:
    """The registered name of shard 1..G-1."""
    return f"shard/{index}"


def store_name(index: int) -> str:
    """The registered name of a store of experts."""
    return f"store/{index}"


class Directory(Protocol):
    """The cluster's endpoint directory (`cluster.endpoints`)."""

    def lookup(self, name: str) -> str | None: ...
    def register(self, name: str, address: str) -> object: ...
    def host(self) -> str:
        """This node's address that the other processes of the cluster can reach."""
        ...

    @property
    def tls(self) -> TlsFiles | None:
        """Files of the channels' TLS, the same of both sides; None: no encryption."""
        ...


@dataclass
class LocalDirectory:
    """A directory for processes outside Ray: the process that starts them copies the addresses."""

    addresses: dict[str, str] = field(default_factory=dict)
    tls: TlsFiles | None = None

    def lookup(self, name: str) -> str | None:
        return self.addresses.get(name)

    def register(self, name: str, address: str) -> None:
        self.addresses[name] = address

    def host(self) -> str:
        return "127.0.0.1"


@dataclass(frozen=True)
class PeerLink:
    """How to reach another process by its registered name; `token` is its secret, never printed."""

    directory: Directory
    token: str | None = field(default=None, repr=False)
    name: str = field(kw_only=True)

    def address(self) -> str | None:
        """Its address; None if not registered."""
        return self.directory.lookup(self.name)

    def connect(
        self, address: str, transport: TransportChoice, supply: Supply | None = None, traffic: Traffic | None = None
    ) -> Channel:
        """Open a channel; `supply` as in `options.Supply`. traffic: counts what goes over it; None: nobody asks.

        Raises:
            RuntimeFailure: it cannot be reached, or refuses.
        """
        from .channel import open_channel  # protobuf: not for programs that only start processes

        tls = self.directory.tls
        return open_channel(
            address,
            ChannelOptions(
                transport=transport, token=self.token, tls=tls, supply=supply, traffic=traffic or Traffic()
            ),
        )


@dataclass(frozen=True)
class StoreLink:
    """A store of experts on another node.

    Attributes:
        name: its registered name, such as "store/0".
        layers: the MoE layers that it holds.
        actor: name of its Ray actor, which gives object refs; None outside Ray.
    """

    name: str
    layers: tuple[int, ...]
    link: PeerLink
    actor: str | None = None


class Connection(Protocol):
    """A `Channel`, or a wrapper of one."""

    @property
    def closed_because(self) -> str | None:
        """Why it ended; None while it is open."""

    def close(self) -> None:
        """Close it; may take time."""


C = TypeVar("C", bound=Connection)


class Reconnecting(Generic[C]):
    """One connection, made again by a thread whenever it is lost. Users never wait for it.

    Args:
        name: of the peer.
        connect: makes and checks a connection; None: the peer is not registered yet. After an error it is called again.
        changed: notified when a connection is made or lost; None: its own.
        on_connect: called before a new connection becomes visible.
        on_loss: called with the reason of a loss.

    Attributes:
        connection: as of the last check; it may have ended.
        problem: why the last attempt failed or the connection was lost.
        reason: the same without a remedy, for the messages of other errors.
        refused: whether the peer answered the last attempt, and its store is damaged or another one.
        losses: number of lost connections.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], C | None],
        *,
        changed: threading.Condition | None = None,
        on_connect: Callable[[], None] = lambda: None,
        on_loss: Callable[[str], None] = lambda why: None,
    ) -> None:
        self.name, self._connect, self._on_connect, self._on_loss = name, connect, on_connect, on_loss
        self._changed = changed if changed is not None else threading.Condition()
        self.connection: C | None = None
        self.problem = self.reason = "it registered no address"
        self.refused = False
        self.losses = 0
        self._lost_s = time.monotonic()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"tiermoe-{name}-link", daemon=True)

    def start(self) -> None:
        """Start to connect; call once. Returns at once."""
        self._lost_s = time.monotonic()
        self._thread.start()

    @property
    def current(self) -> C | None:
        """The connection, if it has not ended."""
        connection = self.connection
        if connection is not None and (why := connection.closed_because) is not None:
            self.lost(connection, why)
            return None
        return connection

    @property
    def lost_s(self) -> float | None:
        """`time.monotonic` of the loss; None while connected."""
        return None if self.current is not None else self._lost_s

    def wait(self, timeout_s: float) -> bool:
        """Whether there is a connection within `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self.current is not None, timeout_s)

    def lost(self, connection: C, why: str) -> None:
        """Report that this connection ended; a newer one stays."""
        with self._changed:
            if self.connection is not connection:
                return
            self.connection, self._lost_s, self.refused = None, time.monotonic(), False
            self.losses, self.problem, self.reason = self.losses + 1, why, why
            self._changed.notify_all()
        self._on_loss(why)
        threading.Thread(target=connection.close, name=f"tiermoe-{self.name}-hangup", daemon=True).start()

    def close(self) -> None:
        """Close, and connect no more. Idempotent."""
        with self._changed:
            self._closed = True
            connection, self.connection = self.connection, None
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        if connection is not None:
            connection.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.connection is None or self._closed)
                if self._closed:
                    return
            made = None
            try:
                made = self._connect()
            except (TierMoeError, OSError) as error:
                self.problem, self.refused = str(error), isinstance(error, StoreError)
                self.reason = error.what if isinstance(error, TierMoeError) else str(error)
            with self._changed:
                if made is not None and not self._closed:
                    self._on_connect()
                    self.connection = made
                    self._changed.notify_all()
                elif made is None:
                    self._changed.wait_for(lambda: self._closed, _RETRY_S)
                else:
                    break
        made.close()


class ReconnectingChannel(Reconnecting["Channel"]):
    """A channel to a peer that may restart.

    Args:
        role, expected: role and details that the peer's health report must state.
        supply: where answers are put, see `options.Supply`.
        on_connect, on_loss: as in `Reconnecting`.

    Attributes:
        traffic: over all of its connections.
    """

    def __init__(
        self,
        role: str,
        link: PeerLink,
        transport: TransportChoice,
        expected: Mapping[str, Any] | None = None,
        supply: Supply | None = None,
        on_connect: Callable[[], None] = lambda: None,
        on_loss: Callable[[str], None] = lambda why: None,
    ) -> None:
        super().__init__(role, self._open, on_connect=on_connect, on_loss=on_loss)
        self._role, self._link, self._transport, self._supply = role, link, transport, supply
        self._expected, self.traffic = dict(expected or {}), Traffic()

    def post(self, message: Message) -> bool:
        """Send without an answer; False: the peer is not connected, or the channel is full."""
        channel = self.current
        if channel is None:
            return False
        try:
            return channel.post(message)
        except RuntimeFailure as failure:
            self.lost(channel, failure.what)
            return False

    def _open(self) -> Channel | None:
        address = self._link.address()
        if address is None:
            return None
        channel = self._link.connect(address, self._transport, self._supply, self.traffic)
        try:
            difference = self._difference(channel.call(HealthRequest(), _HEALTH_S))
            if difference is not None:
                raise ConnectionError(f"{address} {difference}")
        except BaseException:
            channel.close()
            raise
        return channel

    def _difference(self, report: Message | None) -> str | None:
        if not isinstance(report, HealthReport) or report.role != self._role:
            return "answers as something else"
        for name, value in self._expected.items():
            if report.details.get(name) != value:
                return f"has {name} {report.details.get(name)}, this side {value}"
        return None
