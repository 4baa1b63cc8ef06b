"""Calls of a layer to its peers: NDP workers and other shards.

    send (returns at once) -> the layer computes its own experts -> result

The channel's liveness check fails the calls to a killed peer within a second; the layer then computes those experts
itself. The connection looks up the peer's address and connects again, so a restarted worker rejoins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import MessageTooLarge, PolicyError, RemoteFailure, RuntimeFailure
from ...proto.channel import Channel, Pending
from ...proto.messages import ExpertBatch, ExpertResult, HealthReport, HealthRequest, Message
from ...proto.options import Supply
from ...proto.peers import PeerLink, ReconnectingChannel
from ..core import _core
from ..settings import NdpSettings, ShardSettings
from .cache.device import Outgoing
from .stats import EngineStats, PeerKind


@dataclass(slots=True, eq=False)
class RemoteCall:
    """A layer's experts that a peer computes.

    keys: the experts. pairs: how many. rows: of the layer's hidden states that take part [R], of `Outgoing.take`; None:
    all, or it was not sent. blocked_s, link_s: of a shard, its wait for copies and the busy time of its link for this
    layer. recomputed: the experts were loaded and computed here instead.
    """

    peer: RemoteExperts
    keys: list[int]
    pairs: int
    rows: Any = None
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
        rows_sent, rows_received: hidden states that went there, and sums of such rows that came back, in all.
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
        self.rows_sent = self.rows_received = 0
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
            self.rows_sent += len(states)
        return call

    def answer_of(self, channel: Channel, pending: Pending) -> ExpertResult | None:
        """Of `RemoteCall.result`."""
        try:
            answer = pending.result()
        except RuntimeFailure as failure:
            self._failed(channel, failure)
            return None
        assert isinstance(answer, ExpertResult)
        self.rows_received += len(answer.partial)
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

    @property
    def waited_s(self) -> float:
        """Seconds of waits for answers so far."""
        return self._peer.traffic.waited_s

    def traffic(self) -> dict[str, float]:
        """What went over all connections so far, as in `actors.sample.ProcessSample.peers`."""
        rows = {"rows_sent": self.rows_sent, "rows_received": self.rows_received}
        return self._peer.traffic.of_client() | rows

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

