"""A channel that is found again when it is lost: what a process keeps of a peer that may restart."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from ..errors import RuntimeFailure, TierMoeError
from ..proto.channel import Channel
from ..proto.messages import HealthReport, HealthRequest, Message
from .links import PeerLink
from .settings import MatcherSettings, ShardSettings

_LOOK_S = 0.1  # seconds between looks for a lost peer
_CONNECT_S = 2.0


class PeerConnection:
    """Looks a peer up, connects, asks whether it is the one that is meant; anew whenever the channel is lost.

    Nothing here waits but the thread of its own, so that users send when a channel is there and go on when not.

    Args:
        role: what the peer's account of itself must say it is.
        link: looks its address up and connects to it.
        settings: with the transport.
        expected: what else its account must say.
    """

    def __init__(
        self,
        role: str,
        link: PeerLink,
        settings: ShardSettings | MatcherSettings,
        expected: Mapping[str, Any] | None = None,
    ) -> None:
        self._role, self._link, self._settings, self._expected = role, link, settings, dict(expected or {})
        self._channel: Channel | None = None
        self._lock = threading.Lock()  # held while the channel changes, so that `_found` tells the same
        self._changed = threading.Event()  # the channel is lost, or `close` was called
        self._found = threading.Event()
        self._closed = False
        self.problem = "it registered no address"
        self._thread = threading.Thread(target=self._keep_connected, name=f"tiermoe-{role}-link", daemon=True)

    def start(self) -> None:
        """Begin to look; once."""
        self._changed.set()
        self._thread.start()

    def wait(self, deadline_s: float) -> bool:
        """Whether the peer is connected within `deadline_s` seconds."""
        return self._found.wait(deadline_s)

    @property
    def channel(self) -> Channel | None:
        """Where to send now; None: the peer is lost."""
        channel = self._channel
        if channel is not None and not channel.alive:
            self.lose(channel, channel.closed_because or "the channel closed")
            return None
        return channel

    def post(self, message: Message) -> bool:
        """Send what needs no answer; False: the peer is not there, or has no room for it now."""
        channel = self.channel
        if channel is None:
            return False
        try:
            return channel.post(message)
        except RuntimeFailure as failure:
            self.lose(channel, str(failure))
            return False

    def lose(self, channel: Channel, why: str) -> None:
        """A call failed: forget this channel, if it is still the present one, and have the peer looked for."""
        with self._lock:
            if self._channel is not channel:
                return
            self._channel, self.problem = None, why
            self._found.clear()
        threading.Thread(target=channel.close, name=f"tiermoe-{self._role}-hangup", daemon=True).start()
        self._changed.set()

    def close(self) -> None:
        """Hang up. Safe to call twice."""
        self._closed = True
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join()
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _keep_connected(self) -> None:
        pause = threading.Event()  # never set
        while True:
            self._changed.wait()
            if self._closed:
                return
            channel = self._try_connect()
            if channel is None:
                pause.wait(_LOOK_S)
                continue
            with self._lock:
                self._changed.clear()
                self._channel = channel
                self._found.set()
            if self._closed:  # `close` was called before the event was cleared
                return

    def _try_connect(self) -> Channel | None:
        """A channel over which the peer said who it is; None: there is none yet."""
        channel: Channel | None = None
        try:
            address = self._link.address()
            if address is None:
                return None
            channel = self._link.connect(address, self._settings)
            differs = self._difference(channel.call(HealthRequest(), _CONNECT_S))
            if differs is None:
                return channel
            self.problem = f"{address} {differs}"
        except (TierMoeError, OSError) as error:
            self.problem = str(error)
        if channel is not None:
            channel.close()
        return None

    def _difference(self, report: Message | None) -> str | None:
        if not isinstance(report, HealthReport) or report.role != self._role:
            return "answers as something else"
        for name, value in self._expected.items():
            if report.details.get(name) != value:
                return f"has {name} {report.details.get(name)}, this side {value}"
        return None
