"""The pool of NDP workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from ....errors import ConfigError
from ....proto.options import Supply
from ....proto.peers import PeerLink, ndp_name
from ...policies.sharding import reassigned, spread_by_bytes
from ...settings import NdpSettings
from ..calls import RemoteExperts
from ..stats import EngineStats

# workers of a pool, by number -> the indices of those that own experts, ascending, at least one
Sharers = Callable[[Sequence[RemoteExperts]], Sequence[int]]


class NdpPool:
    """Calls to several NDP workers. Every worker maps all replicas and can compute any expert.

    Every expert has one owner among the workers (`policies.sharding.spread_by_bytes`), which limits the memory of each
    worker to its share. The experts of a lost worker move to the others until the worker is back. A worker that joins
    takes its share when the next forward begins: within a forward an expert's owner changes only by a loss.

    `share_by` lets the costs of reaching them say which workers own experts. The others stand by: they get work where
    all owners are lost.

    `refresh` and `choose` run on the forward's thread, everything else on any thread.

    Args:
        links: of the workers that exist at the start.
        activation: of the experts.
        nbytes: of each expert near data, by key [L * E].
        supply: memory for answers, see `proto.options.Supply`.

    Attributes:
        peers: all workers by name, also before their first connection.

    Raises:
        ConfigError: two links have one name, or a name is not an NDP worker's.
    """

    def __init__(
        self, links: Sequence[PeerLink], settings: NdpSettings, activation: str, stats: EngineStats,
        nbytes: Sequence[int], supply: Supply | None = None,
    ) -> None:  # fmt: skip
        self._settings, self._activation, self._stats, self._supply = settings, activation, stats, supply
        self._nbytes = tuple(nbytes)
        self._lock = threading.Lock()
        self._closed = False
        self.peers: dict[str, RemoteExperts] = {}
        self._members: tuple[RemoteExperts, ...] = ()  # by number
        self._owning: tuple[int, ...] = ()  # index in `_members` of those with a share
        self._sharers: Sharers | None = None
        self._judged: list[int] = []  # connections of the members, as they were when the owners were chosen
        self._joining: tuple[RemoteExperts, ...] = ()
        self._owners: tuple[int, ...] = ()  # index in `_members` of each key's owner
        self._seen: tuple[bool, ...] = ()  # availability of the members, for which `_table` was made
        self._table: tuple[int, ...] = ()  # as `_owners`, without lost members
        for link in links:
            self.peers[link.name] = self._peer(link)
        if len(self.peers) < len(links):
            raise ConfigError("two NDP workers have one name", "give each its own number")
        self._take_in(tuple(self.peers.values()))

    def start(self, deadline_s: float) -> None:
        """Connect to all workers. Raises RuntimeFailure: one was not reached within `deadline_s` seconds."""
        for peer in self._members:
            peer.begin()
        for peer in self._members:
            peer.wait_for_the_first(deadline_s)

    def add(self, link: PeerLink) -> None:
        """Connect to one more worker in the background; a known name changes nothing.

        Raises:
            ConfigError: the name is not an NDP worker's.
        """
        with self._lock:
            if self._closed or link.name in self.peers:
                return
            peer = self._peer(link)
            self.peers = self.peers | {link.name: peer}  # others may be reading the old one
            self._joining = (*self._joining, peer)
            peer.begin()

    def refresh(self) -> None:
        """A forward begins: workers that were reached for the first time take their share, and where the costs of
        reaching them decide, those that came back on a new connection are judged anew.
        """
        reached = list[RemoteExperts]()
        if self._joining:
            with self._lock:
                reached = [peer for peer in self._joining if peer.available]
                self._joining = tuple(peer for peer in self._joining if peer not in reached)
        if reached or (self._sharers is not None and self._judged != self._connections()):
            self._take_in((*self._members, *reached))

    def share_by(self, sharers: Sharers) -> None:
        """Let these be the members that own experts, also once others have joined. Between forwards."""
        self._sharers = sharers
        self._take_in(self._members)

    @property
    def members(self) -> tuple[RemoteExperts, ...]:
        """The workers that belong to the pool, by number."""
        return self._members

    @property
    def owners(self) -> int:
        """Number of members that own experts."""
        return len(self._owning)

    @property
    def bytes(self) -> int:
        """Of all experts near data."""
        return sum(self._nbytes)

    @property
    def living(self) -> int:
        """Number of members that take batches now."""
        return sum(peer.available for peer in self._members)

    @property
    def available(self) -> bool:
        """Whether any member takes batches now."""
        return any(peer.available for peer in self._members)

    def choose(self, keys: Sequence[int]) -> list[str] | None:
        """The worker that computes each of these experts now, by name; None: no worker is available."""
        there = tuple([peer.available for peer in self._members])
        if there != self._seen:
            living = [i for i in self._owning if there[i]] or [i for i, here in enumerate(there) if here]
            self._seen, self._table = there, reassigned(self._owners, self._nbytes, living) if living else ()
        table, members = self._table, self._members
        return [members[table[key]].name for key in keys] if table else None

    def experts_of(self, name: str) -> int:
        """Number of experts, over all layers, that a worker owns."""
        return sum(self._owners.count(i) for i, peer in enumerate(self._members) if peer.name == name)

    def close(self) -> None:
        """Hang up. Safe to call twice."""
        with self._lock:
            self._closed = True
        for peer in self.peers.values():
            peer.close()

    def _peer(self, link: PeerLink) -> RemoteExperts:
        index = _number(link.name)
        return RemoteExperts(
            "ndp", f"NDP worker {index}", link, self._settings, self._activation, self._stats, {"index": index},
            self._supply,
        )  # fmt: skip

    def _connections(self) -> list[int]:
        return [peer.connections for peer in self._members]

    def _take_in(self, members: Sequence[RemoteExperts]) -> None:
        self._members = tuple(sorted(members, key=lambda peer: _number(peer.name)))
        self._judged = self._connections()
        everyone = range(len(self._members))
        self._owning = tuple(everyone if self._sharers is None else self._sharers(self._members))
        self._owners = tuple(self._owning[i] for i in spread_by_bytes(self._nbytes, len(self._owning)))
        self._seen, self._table = (), ()


def _number(name: str) -> int:
    """The number in an NDP worker's name."""
    number = name.rpartition("/")[2]
    if not number.isdecimal() or name != ndp_name(int(number)):
        raise ConfigError(f"'{name}' is no name of an NDP worker", f"link it as {ndp_name(0)}, {ndp_name(1)} and so on")
    return int(number)
