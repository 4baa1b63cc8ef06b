"""How a process finds another one's channel, and connects again when it is lost.

Processes register the addresses of their servers in a directory. A process that restarts registers a new one, so
whoever lost it looks its address up again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ..errors import RuntimeFailure, TierMoeError
from .messages import HealthReport, HealthRequest, Message
from .options import ChannelOptions, Supply, TransportChoice

if TYPE_CHECKING:
    from .channel import Channel

MATCHER = "matcher"  # the name under which the matcher of expert maps is registered
_RETRY_S = 0.1  # seconds between attempts to connect
_HEALTH_S = 2.0


def ndp_name(index: int) -> str:
    """The name under which NDP worker 0..N-1 is registered."""
    return f"ndp/{index}"


def shard_name(index: int) -> str:
    """The name under which shard 1..G-1 is registered."""
    return f"shard/{index}"


def store_name(index: int) -> str:
    """The name under which a store of experts is registered."""
    return f"store/{index}"


class Directory(Protocol):
    """The cluster's endpoint directory as the actors see it (`cluster.endpoints`)."""

    def lookup(self, name: str) -> str | None: ...
    def register(self, name: str, address: str) -> object: ...
    def host(self) -> str:
        """The address of this node that the other processes of the cluster can reach."""
        ...


@dataclass
class LocalDirectory:
    """A directory for processes that are not on Ray: the process that starts them copies the addresses."""

    addresses: dict[str, str] = field(default_factory=dict)

    def lookup(self, name: str) -> str | None:
        return self.addresses.get(name)

    def register(self, name: str, address: str) -> None:
        self.addresses[name] = address

    def host(self) -> str:
        return "127.0.0.1"


@dataclass(frozen=True)
class PeerLink:
    """The way to another process, wherever it runs now.

    Attributes:
        token: what it asks of those who connect; never printed.
        name: under which it is registered.
    """

    directory: Directory
    token: str | None = field(default=None, repr=False)
    name: str = field(kw_only=True)

    def address(self) -> str | None:
        """Where it is now; None when it has not said so."""
        return self.directory.lookup(self.name)

    def connect(self, address: str, transport: TransportChoice, supply: Supply | None = None) -> Channel:
        """A channel to it.

        Args:
            supply: where answers are put, see `options.Supply`.

        Raises:
            RuntimeFailure: it cannot be reached, or refuses.
        """
        from .channel import open_channel  # protobuf: not for programs that only start processes

        return open_channel(address, ChannelOptions(transport=transport, token=self.token, supply=supply))


@dataclass(frozen=True)
class StoreLink:
    """The way to a store of experts on another node.

    Attributes:
        name: under which it is registered, such as "store/0".
        layers: that it holds.
        link: to its channel.
        actor: name of its Ray actor, through which object refs are had; None where it is none.
    """

    name: str
    layers: tuple[int, ...]
    link: PeerLink
    actor: str | None = None


class Connection(Protocol):
    """A `Channel`, or an object that wraps one."""

    @property
    def closed_because(self) -> str | None:
        """Why it is of no more use; None while it is."""

    def close(self) -> None:
        """End it; may take its time."""


C = TypeVar("C", bound=Connection)


class Reconnecting(Generic[C]):
    """One connection at a time, which a thread of its own makes whenever there is none. Users never wait for it.

    Args:
        name: of the peer.
        connect: makes a connection and checks that the peer is the expected one; None: the peer is not there yet. An
            error that it raises becomes the problem, and it is called again.
        changed: notified when a connection is made or lost; several may share it. None: its own.
        on_connect: called before a new connection can be seen.
        on_loss: called with the reason when one is lost.

    Attributes:
        connection: as of the last check; it may have ended.
        problem: why the last attempt to connect failed, or why the connection was lost.
        losses: how often one was lost.
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
        self.problem = "it registered no address"
        self.losses = 0
        self._lost_s = time.monotonic()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"tiermoe-{name}-link", daemon=True)

    def start(self) -> None:
        """Connect from now on; once. Returns at once."""
        self._lost_s = time.monotonic()
        self._thread.start()

    @property
    def current(self) -> C | None:
        """The connection; None while there is none. Checks whether it ended."""
        connection = self.connection
        if connection is not None and (why := connection.closed_because) is not None:
            self.lost(connection, why)
            return None
        return connection

    @property
    def lost_s(self) -> float | None:
        """Since when there is none, `time.monotonic` seconds; None while there is one."""
        return None if self.current is not None else self._lost_s

    def wait(self, timeout_s: float) -> bool:
        """Whether there is a connection within this time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.current is not None, timeout_s)

    def lost(self, connection: C, why: str) -> None:
        """This connection is of no more use: connect again. Nothing happens if another took its place."""
        with self._changed:
            if self.connection is not connection:
                return
            self.connection, self._lost_s = None, time.monotonic()
            self.losses, self.problem = self.losses + 1, why
            self._changed.notify_all()
        self._on_loss(why)
        threading.Thread(target=connection.close, name=f"tiermoe-{self.name}-hangup", daemon=True).start()

    def close(self) -> None:
        """Hang up and connect no more. Safe to call twice."""
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
                self.problem = str(error)
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
    """A channel to a peer that may restart. A health request checks that the peer is the expected one.

    Args:
        role: that the peer's health report must state.
        link: looks its address up and connects to it.
        transport: of the channel.
        expected: details that the health report must contain.
        supply: where answers are put, see `options.Supply`.
        on_connect, on_loss: as of `Reconnecting`.
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
        self._expected = dict(expected or {})

    def post(self, message: Message) -> bool:
        """Send what needs no answer; False: the peer is not there, or has no room for it now."""
        channel = self.current
        if channel is None:
            return False
        try:
            return channel.post(message)
        except RuntimeFailure as failure:
            self.lost(channel, str(failure))
            return False

    def _open(self) -> Channel | None:
        address = self._link.address()
        if address is None:
            return None
        channel = self._link.connect(address, self._transport, self._supply)
        try:
            difference = self._difference(channel.call(HealthRequest(), _HEALTH_S))
            if difference is not None:
                raise ConnectionError(f"{address} {difference}")
        except BaseException:
            channel.close()
            raise
        return channel

    def _difference(self, report: Message | None) -> str | None:
        """How the peer differs from the expected one; None if it does not."""
        if not isinstance(report, HealthReport) or report.role != self._role:
            return "answers as something else"
        for name, value in self._expected.items():
            if report.details.get(name) != value:
                return f"has {name} {report.details.get(name)}, this side {value}"
        return None
