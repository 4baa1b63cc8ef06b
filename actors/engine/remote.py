"""A peer as the engine sees it: send some of a layer's experts, take their sum, find it again when it is lost.

    send (returns at once) -> the layer computes its own experts -> result

A peer is an NDP worker or another shard.

A worker that is killed fails its calls within a second (the channel's liveness); the layer then computes those
experts itself. A thread looks the peer's address up and connects again, so a restarted worker rejoins.
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

from ...errors import MessageTooLarge, RemoteFailure, RuntimeFailure, TierMoeError
from ...proto.messages import ExpertBatch, ExpertResult, HealthReport, HealthRequest, Message
from ...proto.options import Supply
from ..links import PeerLink
from ..settings import NdpSettings, ShardSettings
from .activations import Outgoing
from .routing import Routing
from .stats import EngineStats, PeerKind

_LOOK_S = 0.1  # seconds between looks for a lost worker
_CONNECT_S = 2.0


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
        self._link, self._settings, self._expected = link, settings, expected or {}
        self._activation, self._stats, self._supply = activation, stats, supply
        self._channel: Any = None
        self._wanted = threading.Event()  # the channel is lost: look for the worker
        self._found = threading.Event()
        self._closed = False
        self._problem = "it registered no address"
        self._thread = threading.Thread(target=self._keep_connected, name=f"tiermoe-{kind}-link", daemon=True)

    def begin(self) -> None:
        """Look for the worker from now on; returns at once."""
        self._wanted.set()
        self._thread.start()

    def wait_for_the_first(self, deadline_s: float) -> None:
        """Wait for the first connection, after `begin`.

        Raises:
            RuntimeFailure: there was no worker to be reached within `deadline_s` seconds.
        """
        if not self.wait_until_found(deadline_s):
            raise RuntimeFailure(
                f"{self.label} was not reached within {deadline_s:g} s ({self._problem})",
                "see its log, or choose a policy that needs none, such as next-gate"
                if self.kind == "ndp" else "see its log, or use fewer shards",
            )

    def wait_until_found(self, deadline_s: float) -> bool:
        """Whether the worker is connected within `deadline_s` seconds."""
        return self._found.wait(deadline_s)

    @property
    def available(self) -> bool:
        """Whether a layer may be sent now."""
        channel = self._channel
        if channel is None:
            return False
        if channel.alive:
            return True
        self._lost(channel, channel.closed_because or "the channel closed")
        return False

    @property
    def transport(self) -> str | None:
        """How it is reached now, "shm" or "grpc"; None while it is lost."""
        channel = self._channel
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
        channel = self._channel
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

        def result() -> ExpertResult | None:
            try:
                answer: ExpertResult = pending.result()
            except RuntimeFailure as failure:
                self._failed(channel, failure)
                return None
            return answer

        return RemoteCall(used, len(experts), len(chosen), sent_s, result)

    def ask(self, message: Message, deadline_s: float | None = None) -> Callable[[], bool] | None:
        """Send what is to be done; what it returns waits, and says whether that was done. None: the peer is not there.

        What is asked before a batch is done before that batch. deadline_s: None for that of the settings.
        """
        channel = self._channel
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
        channel = self._channel
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
        channel = self._channel
        if channel is None:
            return None
        try:
            answer = channel.call(HealthRequest(), deadline_s)
        except RuntimeFailure as failure:
            self._problem = str(failure)
            return None
        return answer if isinstance(answer, HealthReport) else None

    def account(self, deadline_s: float) -> dict[str, Any]:
        """The details of its report; of one that is lost or late only that, as its `state`."""
        report = self.report(deadline_s)
        return {"state": "late" if self.available else "lost"} if report is None else dict(report.details)

    def close(self) -> None:
        """Hang up. Safe to call twice."""
        self._closed = True
        self._wanted.set()
        if self._thread.is_alive():
            self._thread.join()
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _failed(self, channel: Any, failure: RuntimeFailure) -> None:
        """A call failed: the peer is gone, or is there and refuses this one call."""
        if isinstance(failure, RemoteFailure | MessageTooLarge):
            self._stats.count_refusal(self.kind, str(failure))
        else:
            self._lost(channel, str(failure))

    def _lost(self, channel: Any, why: str) -> None:
        """Forget a channel, once, and have the worker looked for."""
        if self._channel is not channel:
            return
        self._channel = None
        self._found.clear()
        self._stats.count_loss(self.kind, why)
        threading.Thread(target=channel.close, name=f"tiermoe-{self.kind}-hangup", daemon=True).start()
        self._wanted.set()

    def _keep_connected(self) -> None:
        while True:
            self._wanted.wait()
            if self._closed:
                return
            channel = self._try_connect()
            if channel is None:
                time.sleep(_LOOK_S)
                continue
            self._wanted.clear()
            self.connections += 1
            self._channel = channel
            self._found.set()

    def _try_connect(self) -> Any:
        """A channel over which the peer said that it is well; None where there is none yet."""
        channel = None
        try:
            address = self._link.address()
            if address is None:
                return None
            channel = self._link.connect(address, self._settings, self._supply)
            report = channel.call(HealthRequest(), _CONNECT_S)
            differs = self._difference(report)
            if differs is None:
                return channel
            self._problem = f"{address} {differs}"
        except (TierMoeError, OSError) as error:
            self._problem = str(error)
        if channel is not None:
            channel.close()
        return None

    def _difference(self, report: Message | None) -> str | None:
        """In what the peer is not the one that is meant; None where it is."""
        if not isinstance(report, HealthReport) or report.role != self.kind:
            return "answers as something else"
        for name, value in self._expected.items():
            if report.details.get(name) != value:
                return f"has {name} {report.details.get(name)}, this side {value}"
        return None
