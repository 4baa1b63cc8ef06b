"""Calls of the engine to its peers (NDP workers and other shards), and the pool of NDP workers.

    send (returns at once) -> the layer computes its own experts -> result

The channel's liveness check fails the calls to a killed peer within a second; the layer then computes those experts
itself. The connection looks up the peer's address and connects again, so a restarted worker rejoins.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ....errors import ConfigError, MessageTooLarge, PolicyError, RemoteFailure, RuntimeFailure
from ....proto.channel import Channel, Pending
from ....proto.messages import ExpertBatch, ExpertResult, HealthReport, HealthRequest, Message
from ....proto.options import Supply
from ....proto.peers import PeerLink, ReconnectingChannel, ndp_name
from ...core import _core
from ...policies.sharding import reassigned, spread_by_bytes
from ...settings import NdpSettings, ShardSettings
from ..cache.device import Outgoing
from ..stats import EngineStats, PeerKind


@dataclass(slots=True, eq=False)
class RemoteCall:
    """A layer's experts that a peer computes.

    keys: the experts. pairs: how many. rows: of the layer's hidden states that take part [R], int64 on the compute
    device; None: all, or it was not sent. blocked_s, link_s: of a shard, its wait for copies and the busy time of its
    link for this layer. recomputed: the experts were loaded and computed here instead.
    """

    peer: RemoteExperts
    keys: list[int]
    pairs: int
    rows: torch.Tensor | None = None
    sent_s: float = 0.0
    blocked_s: float = 0.0
    link_s: float = 0.0
    recomputed: bool = False
    _sent: tuple[Channel, Pending] | None = None

    @property
    def sent(self) -> bool:
        """False: the peer was lost after the plan was made."""
        return self._sent is not None

    def result(self) -> ExpertResult | None:
        """Waits; None: the peer was lost or is late. Raises PolicyError: its policy failed."""
        return None if self._sent is None else self.peer.answer_of(*self._sent)


class RemoteExperts:
    """Calls to one peer.

    Args:
        label: names the peer in messages.
        link: looks up the peer's address.
        settings: transport and deadline.
        activation: of the experts, for NDP workers.
        expected: fields that the peer's health report must have; a peer with others is refused.
        supply: memory for answers, see `proto.options.Supply`.

    Attributes:
        connections: number of connections so far; a peer on a new connection has lost its state.
        resident: a shard's latest residency (`shards.ShardResidency`); None: no answer on this connection yet.
        asked: keys that the shard was asked to prefetch since its last batch.
    """

    def __init__(
        self,
        kind: PeerKind,
        label: str,
        link: PeerLink,
        settings: NdpSettings | ShardSettings,
        activation: str,
        stats: EngineStats,
        expected: Mapping[str, Any] | None = None,
        supply: Supply | None = None,
    ) -> None:
        self.kind, self.label, self.name = kind, label, link.name
        self.connections = 0
        self.resident: NDArray[np.uint8] | None = None
        self.asked: set[int] = set()
        self._settings, self._activation, self._stats = settings, activation, stats
        self._peer = ReconnectingChannel(
            kind, link, settings.transport, expected, supply, on_connect=self._connected,
            on_loss=lambda why: stats.count_loss(kind, why),
        )  # fmt: skip

    def begin(self) -> None:
        """Connect in the background."""
        self._peer.start()

    def wait_for_the_first(self, deadline_s: float) -> None:
        """Wait for the first connection. Raises RuntimeFailure: none within `deadline_s` seconds."""
        if not self.wait_until_found(deadline_s):
            raise RuntimeFailure(
                f"{self.label} was not reached within {deadline_s:g} s ({self._peer.reason})",
                "see its log, or choose a policy that needs none, such as next-gate"
                if self.kind == "ndp"
                else "see its log, or use fewer shards",
            )

    def wait_until_found(self, deadline_s: float) -> bool:
        """Whether the peer is connected within `deadline_s` seconds."""
        return self._peer.wait(deadline_s)

    @property
    def available(self) -> bool:
        """Whether the peer takes batches now."""
        channel = self._peer.connection
        return channel is not None and (channel.alive or self._peer.current is not None)

    @property
    def transport(self) -> str | None:
        """Transport in use, "shm" or "grpc"; None while the peer is lost."""
        channel = self._peer.connection
        return None if channel is None else channel.transport

    def send(
        self, routing: _core.Routing, keys: list[int], bits: Sequence[int], outgoing: Outgoing,
        weights: NDArray[np.float32], decode: bool,
    ) -> RemoteCall:  # fmt: skip
        """Send some experts of a layer with the rows that they need.

        Args:
            keys, bits: of the experts; 0 bits: full precision.
            outgoing: the layer's rows [T, H]. weights: [T, K].
            decode: the forward carries no row of any prompt.
        """
        numbers, starts, rows, weights, tokens = routing.part(keys, weights)
        call, channel = RemoteCall(self, keys, len(rows)), self._peer.connection
        if channel is None:
            return call
        states, call.rows = outgoing.take(tokens)
        widths = np.array(bits, np.uint8)
        batch = ExpertBatch(
            routing.layer, numbers, widths, starts, rows, weights, states, self._activation, decode
        )  # fmt: skip
        call.sent_s = time.perf_counter()
        try:
            call._sent = channel, channel.submit(batch, self._settings.deadline_s)
        except RuntimeFailure as failure:
            self._failed(channel, failure)
        else:
            self.asked = set()  # the answer says what is resident
        return call

    def answer_of(self, channel: Channel, pending: Pending) -> ExpertResult | None:
        """Of `RemoteCall.result`."""
        try:
            answer = pending.result()
        except RuntimeFailure as failure:
            self._failed(channel, failure)
            return None
        assert isinstance(answer, ExpertResult)
        if answer.resident is not None and channel is self._peer.connection:
            self.resident = answer.resident
        return answer

    def ask(self, message: Message, deadline_s: float | None = None) -> Callable[[], bool] | None:
        """Send a command, which runs before any later batch; returns a wait for its success. None: the peer is lost.

        deadline_s: None: the settings' deadline.
        """
        channel = self._peer.connection
        if channel is None:
            return None
        try:
            pending = channel.submit(message, deadline_s or self._settings.deadline_s)
        except RuntimeFailure as failure:
            self._failed(channel, failure)
            return None

        def done() -> bool:
            try:
                pending.result()
            except RuntimeFailure as failure:
                self._failed(channel, failure)
                return False
            return True

        return done

    def post(self, message: Message) -> bool:
        """Send a message without answer; False: the peer is lost or its queue is full."""
        channel = self._peer.connection
        if channel is None:
            return False
        try:
            sent: bool = channel.post(message)
        except RuntimeFailure as failure:
            self._failed(channel, failure)
            return False
        return sent

    def account(self, deadline_s: float) -> dict[str, Any]:
        """The details of the peer's health report; without a report its `state`, "lost" or "late"."""
        channel = self._peer.connection
        if channel is not None:
            try:
                answer = channel.call(HealthRequest(), deadline_s)
                if isinstance(answer, HealthReport):
                    return dict(answer.details)
            except RuntimeFailure as failure:
                self._peer.problem = self._peer.reason = failure.what
        return {"state": "late" if self.available else "lost"}

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        self._peer.close()

    def _connected(self) -> None:
        self.connections += 1
        self.resident, self.asked = None, set()

    def _failed(self, channel: Any, failure: RuntimeFailure) -> None:
        """A call failed: the peer refused the call, or is lost. Raises PolicyError: its policy failed."""
        if isinstance(failure, RemoteFailure) and failure.kind == PolicyError.__name__:
            raise PolicyError(failure.what, failure.remedy)
        if isinstance(failure, RemoteFailure | MessageTooLarge):
            self._stats.count_refusal(self.kind, failure.what)
        else:
            self._peer.lost(channel, failure.what)


_REPORT_S = 5.0


class NdpPool:
    """Calls to several NDP workers. Every worker maps all replicas and can compute any expert.

    Every expert has one owner among the workers (`policies.sharding.spread_by_bytes`), which limits the memory of each
    worker to its share. The experts of a lost worker move to the others until the worker is back. A worker that joins
    takes its share when the next forward begins: within a forward an expert's owner changes only by a loss.

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
        self._members: tuple[RemoteExperts, ...] = ()  # workers with a share, by number
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
        """A forward begins: workers that were reached for the first time take their share."""
        if self._joining:
            with self._lock:
                reached = [peer for peer in self._joining if peer.available]
                self._joining = tuple(peer for peer in self._joining if peer not in reached)
            if reached:
                self._take_in((*self._members, *reached))

    @property
    def members(self) -> tuple[RemoteExperts, ...]:
        """The workers with a share of the experts, by number."""
        return self._members

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
            living = [i for i, here in enumerate(there) if here]
            self._seen, self._table = there, reassigned(self._owners, self._nbytes, living) if living else ()
        table, members = self._table, self._members
        return [members[table[key]].name for key in keys] if table else None

    def experts_of(self, name: str) -> int:
        """Number of experts, over all layers, that a worker owns."""
        return sum(self._owners.count(i) for i, peer in enumerate(self._members) if peer.name == name)

    def reports(self) -> list[dict[str, Any]]:
        """The `RemoteExperts.account` of each worker."""
        return [{"worker": name} | peer.account(_REPORT_S) for name, peer in self.peers.items()]

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

    def _take_in(self, members: Sequence[RemoteExperts]) -> None:
        self._members = tuple(sorted(members, key=lambda peer: _number(peer.name)))
        self._owners = spread_by_bytes(self._nbytes, len(self._members))
        self._seen, self._table = (), ()


def _number(name: str) -> int:
    """The number in an NDP worker's name."""
    number = name.rpartition("/")[2]
    if not number.isdecimal() or name != ndp_name(int(number)):
        raise ConfigError(f"'{name}' is no name of an NDP worker", f"link it as {ndp_name(0)}, {ndp_name(1)} and so on")
    return int(number)
