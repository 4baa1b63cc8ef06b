"""A peer as the engine sees it: send some of a layer's experts, take their sum, find it again when it is lost.

    send (returns at once) -> the layer computes its own experts -> result

A peer is an NDP worker or another shard; `NdpPool` chooses the NDP worker that computes an expert now. A worker that is
killed fails its calls within a second (the channel's liveness); the layer then computes those experts itself. The
connection looks the peer's address up and connects again, so a restarted worker rejoins.
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

from ....errors import ConfigError, MessageTooLarge, RemoteFailure, RuntimeFailure
from ....proto.messages import ExpertBatch, ExpertResult, HealthReport, HealthRequest, Message
from ....proto.options import Supply
from ....proto.peers import PeerLink, ReconnectingChannel, ndp_name
from ...policies.sharding import reassigned, spread_by_bytes
from ...settings import NdpSettings, ShardSettings
from ..cache.device import Outgoing
from ..host_view import Routing
from ..stats import EngineStats, PeerKind


@dataclass(frozen=True, slots=True)
class RemoteCall:
    """Experts under way at a peer.

    rows: rows of the layer's hidden states that take part [R], int64 on the compute device.
    """

    rows: torch.Tensor
    experts: int
    pairs: int
    sent_s: float
    result: Callable[[], ExpertResult | None]  # waits; None: the peer was lost or is late


class RemoteExperts:
    """Calls to one peer.

    Args:
        kind: what it is.
        label: what to call it in a sentence.
        link: looks its address up and connects to it.
        settings: transport and deadline.
        activation: name of the experts' activation, which an NDP worker cannot know.
        stats: told of losses.
        expected: what its account of itself must say, so that both sides mean the same.
        supply: where its answers are put, see `proto.options.Supply`.

    Attributes:
        connections: how often it was connected; one that is connected anew has forgotten what it was told.
        resident: what a shard said last that it holds (`held.py`); None: nothing since it was connected.
        asked: experts that it was told to load ahead since the last batch that it was sent.
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
        """Look for the worker from now on; returns at once."""
        self._peer.start()

    def wait_for_the_first(self, deadline_s: float) -> None:
        """Wait for the first connection, after `begin`.

        Raises:
            RuntimeFailure: there was no worker to be reached within `deadline_s` seconds.
        """
        if not self.wait_until_found(deadline_s):
            raise RuntimeFailure(
                f"{self.label} was not reached within {deadline_s:g} s ({self._peer.problem})",
                "see its log, or choose a policy that needs none, such as next-gate"
                if self.kind == "ndp" else "see its log, or use fewer shards",
            )

    def wait_until_found(self, deadline_s: float) -> bool:
        """Whether the worker is connected within `deadline_s` seconds."""
        return self._peer.wait(deadline_s)

    @property
    def available(self) -> bool:
        """Whether a layer may be sent now."""
        channel = self._peer.connection
        return channel is not None and (channel.alive or self._peer.current is not None)

    @property
    def transport(self) -> str | None:
        """How it is reached now, "shm" or "grpc"; None while it is lost."""
        channel = self._peer.connection
        return None if channel is None else channel.transport

    def send(
        self,
        layer: int,
        routing: Routing,
        experts: Sequence[tuple[int, int]],
        outgoing: Outgoing,
        weights: NDArray[np.float32],
        decode: bool,
    ) -> RemoteCall | None:
        """Send some experts of a layer with the rows that they need.

        Args:
            experts: (place in `routing.experts`, bits of the replica or 0) of each.
            outgoing: the layer's rows [T, H].
            weights: [T, K].
            decode: whether the forward is known to hold no row of any prompt.

        Returns:
            The call under way; None when the worker is not there.
        """
        channel = self._peer.connection
        if channel is None:
            return None
        spans = [routing.order[routing.starts[i] : routing.starts[i + 1]] for i, _ in experts]
        chosen = np.concatenate(spans)
        tokens: NDArray[np.int64] = np.zeros(1, np.int64)
        rows: NDArray[np.integer[Any]] = np.zeros(len(chosen), np.int32)
        if routing.tokens != 1:
            tokens, rows = np.unique(chosen // routing.top_k, return_inverse=True)
        states, used = outgoing.take(tokens)
        batch = ExpertBatch(
            layer=layer,
            experts=np.array([routing.experts[i] for i, _ in experts], np.int32),
            bits=np.array([bits for _, bits in experts], np.uint8),
            starts=np.cumsum([0, *map(len, spans)], dtype=np.int32),
            rows=rows.astype(np.int32, copy=False),
            weights=weights.ravel()[chosen],
            hidden=states,
            activation=self._activation,
            decode=decode,
        )
        sent_s = time.perf_counter()
        try:
            pending = channel.submit(batch, self._settings.deadline_s)
        except RuntimeFailure as failure:
            self._failed(channel, failure)
            return None
        self.asked = set()  # what it holds when it answers is told with the answer

        def result() -> ExpertResult | None:
            try:
                answer = pending.result()
            except RuntimeFailure as failure:
                self._failed(channel, failure)
                return None
            assert isinstance(answer, ExpertResult)
            if answer.resident is not None and channel is self._peer.connection:
                self.resident = answer.resident
            return answer

        return RemoteCall(used, len(experts), len(chosen), sent_s, result)

    def ask(self, message: Message, deadline_s: float | None = None) -> Callable[[], bool] | None:
        """Send what is to be done; what it returns waits, and says whether that was done. None: the peer is not there.

        What is asked before a batch is done before that batch. deadline_s: None for that of the settings.
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
        """Send what needs no answer; False when the peer is not there or has no room for it now."""
        channel = self._peer.connection
        if channel is None:
            return False
        try:
            sent: bool = channel.post(message)
        except RuntimeFailure as failure:
            self._failed(channel, failure)
            return False
        return sent

    def report(self, deadline_s: float) -> HealthReport | None:
        """The peer's account of itself; None when it is not there."""
        channel = self._peer.connection
        if channel is None:
            return None
        try:
            answer = channel.call(HealthRequest(), deadline_s)
        except RuntimeFailure as failure:
            self._peer.problem = str(failure)
            return None
        return answer if isinstance(answer, HealthReport) else None

    def account(self, deadline_s: float) -> dict[str, Any]:
        """The details of its report; of one that is lost or late only that, as its `state`."""
        report = self.report(deadline_s)
        return {"state": "late" if self.available else "lost"} if report is None else dict(report.details)

    def close(self) -> None:
        """Hang up. Safe to call twice."""
        self._peer.close()

    def _connected(self) -> None:
        self.connections += 1
        self.resident, self.asked = None, set()

    def _failed(self, channel: Any, failure: RuntimeFailure) -> None:
        """A call failed: the peer is gone, or is there and refuses this one call."""
        if isinstance(failure, RemoteFailure | MessageTooLarge):
            self._stats.count_refusal(self.kind, str(failure))
        else:
            self._peer.lost(channel, str(failure))


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
