"""The NDP workers as one: which of them computes an expert now."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from ...errors import ConfigError
from ...proto.options import Supply
from ..links import PeerLink, ndp_name
from ..policies.sharding import reassigned, spread_by_bytes
from ..settings import NdpSettings
from .remote import RemoteExperts
from .stats import EngineStats

_REPORT_S = 5.0


class NdpPool:
    """Calls to several NDP workers, each of which could compute any expert: all map all replicas.

    Every expert has one worker that is its own (`policies.sharding.spread_by_bytes`, as in the plan of the cluster),
    so that each worker's memory is asked for its share only. What belongs to a lost one goes to those that are there
    until it is back. A worker that joins takes its share at the next forward after it was reached: within a forward
    no expert changes its owner but by a loss.

    `add` and the questions may come from any thread; `refresh` and `choose` only from the forward's.

    Args:
        links: of the workers that are there from the start.
        settings: transport and deadline.
        activation: name of the experts' activation.
        stats: told of losses.
        nbytes: of each expert near data, by key [L * E].
        supply: where answers are put, see `proto.options.Supply`.

    Attributes:
        peers: the workers by name, those that were not yet reached too.

    Raises:
        ConfigError: two have one name, or one has a name of something else.
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
        self._members: tuple[RemoteExperts, ...] = ()  # those who have a share, by number
        self._joining: tuple[RemoteExperts, ...] = ()
        self._owners: tuple[int, ...] = ()  # place in `_members` of each key's own worker
        self._seen: tuple[bool, ...] = ()  # who was there when `_table` was made
        self._table: tuple[int, ...] = ()
        for link in links:
            self.peers[link.name] = self._peer(link)
        if len(self.peers) < len(links):
            raise ConfigError("two NDP workers have one name", "give each its own number")
        self._take_in(tuple(self.peers.values()))

    def start(self, deadline_s: float) -> None:
        """Connect to all, side by side.

        Raises:
            RuntimeFailure: one was not reached within `deadline_s` seconds.
        """
        for peer in self._members:
            peer.begin()
        for peer in self._members:
            peer.wait_for_the_first(deadline_s)

    def add(self, link: PeerLink) -> None:
        """One more worker; looked for in the background. Nothing if it is known, for it is looked for anyway.

        Raises:
            ConfigError: its name is none of an NDP worker.
        """
        with self._lock:
            if self._closed or link.name in self.peers:
                return
            peer = self._peer(link)
            self.peers = self.peers | {link.name: peer}  # others may be reading the old one
            self._joining = (*self._joining, peer)
            peer.begin()

    def refresh(self) -> None:
        """A forward begins: who was reached for the first time takes its share."""
        if self._joining:
            with self._lock:
                reached = [peer for peer in self._joining if peer.available]
                self._joining = tuple(peer for peer in self._joining if peer not in reached)
            if reached:
                self._take_in((*self._members, *reached))

    @property
    def members(self) -> tuple[RemoteExperts, ...]:
        """The workers that have a share of the experts, by number."""
        return self._members

    @property
    def living(self) -> int:
        """How many of them may be sent experts now."""
        return sum(peer.available for peer in self._members)

    @property
    def available(self) -> bool:
        """Whether any of them may."""
        return any(peer.available for peer in self._members)

    def choose(self, keys: Sequence[int]) -> list[str] | None:
        """The name of the worker that computes each of these experts now; None where no worker is there."""
        there = tuple([peer.available for peer in self._members])
        if there != self._seen:
            living = [i for i, here in enumerate(there) if here]
            self._seen, self._table = there, reassigned(self._owners, self._nbytes, living) if living else ()
        table, members = self._table, self._members
        return [members[table[key]].name for key in keys] if table else None

    def experts_of(self, name: str) -> int:
        """How many experts, in all layers, are a worker's own."""
        places = [i for i, peer in enumerate(self._members) if peer.name == name]
        return sum(self._owners.count(i) for i in places)

    def reports(self) -> list[dict[str, Any]]:
        """Each worker's account of itself; of one that is lost or late only its name and that."""
        return [{"worker": name} | peer.account(_REPORT_S) for name, peer in self.peers.items()]

    def close(self) -> None:
        """Hang up. Safe to call twice."""
        with self._lock:
            self._closed = True
        for peer in self.peers.values():
            peer.close()

    def _peer(self, link: PeerLink) -> RemoteExperts:
        index = _number(link.name)
        label = f"NDP worker {index}"
        return RemoteExperts(
            "ndp", label, link, self._settings, self._activation, self._stats, {"index": index}, self._supply
        )

    def _take_in(self, members: Sequence[RemoteExperts]) -> None:
        """Spread the experts over these workers."""
        self._members = tuple(sorted(members, key=lambda peer: _number(peer.name)))
        self._owners = spread_by_bytes(self._nbytes, len(self._members))
        self._seen, self._table = (), ()


def _number(name: str) -> int:
    """The number in a name of `links.ndp_name`."""
    number = name.rpartition("/")[2]
    if not number.isdecimal() or name != ndp_name(int(number)):
        raise ConfigError(f"'{name}' is no name of an NDP worker", f"link it as {ndp_name(0)}, {ndp_name(1)} and so on")
    return int(number)
