"""How a process finds another one's channel: through the cluster's endpoint directory, or at a fixed address."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from ..proto.options import Supply
from .settings import MatcherSettings, NdpSettings, ShardSettings

MATCHER = "matcher"  # the name under which the matcher of expert maps is registered


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
class Noticeboard:
    """A directory for processes that are not on Ray: whoever starts them copies the addresses."""

    addresses: dict[str, str] = field(default_factory=dict)

    def lookup(self, name: str) -> str | None:
        return self.addresses.get(name)

    def register(self, name: str, address: str) -> None:
        self.addresses[name] = address

    def host(self) -> str:
        return "127.0.0.1"


@dataclass(frozen=True)
class PeerLink:
    """The way to a worker that computes experts, wherever it lives now.

    token: what it asks of those who connect; never printed. name: under which it is registered.
    """

    directory: Directory
    token: str | None = field(default=None, repr=False)
    name: str = field(kw_only=True)

    def address(self) -> str | None:
        """Where the worker is now; None when it has not said so."""
        return self.directory.lookup(self.name)

    def connect(
        self, address: str, settings: NdpSettings | ShardSettings | MatcherSettings, supply: Supply | None = None
    ) -> Any:
        """A `proto.channel.Channel` to the worker.

        Args:
            supply: where answers are put, see `proto.options.Supply`.

        Raises:
            RuntimeFailure: it cannot be reached, or refuses.
        """
        from ..proto.channel import ChannelOptions, open_channel

        return open_channel(address, ChannelOptions(transport=settings.transport, token=self.token, supply=supply))


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
