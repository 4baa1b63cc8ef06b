"""The NDP worker as the engine sees it: send a layer's cold experts, take their sum, find it again when it is lost.

    send (returns at once) -> the layer computes its resident experts -> result

A worker that is killed fails its calls within a second (the channel's liveness); the layer then computes those
experts itself. A thread looks the worker's address up and connects again, so a restarted worker rejoins.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...errors import MessageTooLarge, RemoteFailure, RuntimeFailure, TierMoeError
from ...proto.messages import ExpertBatch, ExpertResult, HealthReport, HealthRequest
from ..links import NdpLink
from ..settings import NdpSettings
from .stats import EngineStats

if TYPE_CHECKING:
    from .dispatch import Routing

_LOOK_S = 0.1  # seconds between looks for a lost worker
_CONNECT_S = 2.0


@dataclass(frozen=True, slots=True)
class RemoteCall:
    """Experts under way at the NDP worker.

    rows: rows of the layer's hidden states that take part [R], int64 on the compute device.
    """

    rows: torch.Tensor
    experts: int
    pairs: int
    sent_s: float
    result: Callable[[], ExpertResult | None]  # waits; None: the worker was lost or is late


class RemoteExperts:
    """Calls to one NDP worker.

    Args:
        link: looks the worker's address up and connects to it.
        settings: transport and deadline.
        activation: name of the experts' activation, which the worker cannot know.
        stats: told of losses.
    """

    def __init__(self, link: NdpLink, settings: NdpSettings, activation: str, stats: EngineStats) -> None:
        self._link, self._settings = link, settings
        self._activation, self._stats = activation, stats
        self._channel: Any = None
        self._wanted = threading.Event()  # the channel is lost: look for the worker
        self._found = threading.Event()
        self._closed = False
        self._problem = "it registered no address"
        self._thread = threading.Thread(target=self._keep_connected, name="tiermoe-ndp-link", daemon=True)

    def start(self, deadline_s: float) -> None:
        """Connect for the first time.

        Raises:
            RuntimeFailure: there was no worker to be reached within `deadline_s` seconds.
        """
        self._wanted.set()
        self._thread.start()
        if not self.wait_until_found(deadline_s):
            raise RuntimeFailure(
                f"the NDP worker was not reached within {deadline_s:g} s ({self._problem})",
                "see the worker's log, or choose a policy that needs none, such as next-gate",
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
        hidden: torch.Tensor,
        weights: torch.Tensor,
    ) -> RemoteCall | None:
        """Send some experts of a layer with the rows that they need.

        Args:
            experts: (place in `routing.experts`, bits of the replica or 0) of each.
            hidden: [T, H]. weights: [T, K].

        Returns:
            The call under way; None when the worker is not there.
        """
        channel = self._channel
        if channel is None:
            return None
        pairs = routing.pairs.cpu().numpy()
        spans = [pairs[routing.starts[i] : routing.starts[i + 1]] for i, _ in experts]
        chosen = np.concatenate(spans)
        tokens, rows = np.unique(chosen // routing.top_k, return_inverse=True)
        used = torch.from_numpy(tokens).to(hidden.device)
        states = hidden if len(tokens) == hidden.shape[0] else hidden[used]
        batch = ExpertBatch(
            layer=layer,
            experts=np.array([routing.experts[i] for i, _ in experts], np.int32),
            bits=np.array([bits for _, bits in experts], np.uint8),
            starts=np.cumsum([0, *map(len, spans)], dtype=np.int32),
            rows=rows.astype(np.int32),
            weights=weights.detach().float().cpu().numpy().ravel()[chosen],
            hidden=states.detach().float().contiguous().cpu().numpy(),
            activation=self._activation,
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
        """A call failed: the worker is gone, or is there and refuses this one call."""
        if isinstance(failure, RemoteFailure | MessageTooLarge):
            self._stats.ndp_refusals += 1
            self._stats.ndp_last_failure = str(failure)
        else:
            self._lost(channel, str(failure))

    def _lost(self, channel: Any, why: str) -> None:
        """Forget a channel, once, and have the worker looked for."""
        if self._channel is not channel:
            return
        self._channel = None
        self._found.clear()
        self._stats.ndp_losses += 1
        self._stats.ndp_last_failure = why
        threading.Thread(target=channel.close, name="tiermoe-ndp-hangup", daemon=True).start()
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
            self._channel = channel
            self._found.set()

    def _try_connect(self) -> Any:
        """A channel over which the worker said that it is well; None where there is none yet."""
        channel = None
        try:
            address = self._link.address()
            if address is None:
                return None
            channel = self._link.connect(address, self._settings)
            report = channel.call(HealthRequest(), _CONNECT_S)
            if isinstance(report, HealthReport):
                return channel
            self._problem = f"{address} answers as something else"
        except (TierMoeError, OSError) as error:
            self._problem = str(error)
        if channel is not None:
            channel.close()
        return None
