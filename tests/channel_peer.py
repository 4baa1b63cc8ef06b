"""For tests of the channel: a message, and a server in a process of its own.

`python channel_peer.py [seconds]` prints its address and ends with its standard input. A batch is answered with its own
hidden state, a health request after that many seconds.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from tiermoe.proto.messages import ExpertBatch, ExpertResult, HealthReport, HealthRequest, Message
from tiermoe.proto.server import ChannelServer


def batch(rows: int = 2, width: int = 8, layer: int = 3) -> ExpertBatch:
    """Two experts, each for the first row; the hidden state counts up."""
    return ExpertBatch(
        layer,
        np.array([1, 5], np.int32),
        np.array([3, 0], np.uint8),
        np.array([0, 1, 2], np.int32),
        np.array([0, 0], np.int32),
        np.array([0.25, 0.75], np.float32),
        np.arange(rows * width, dtype=np.float32).reshape(rows, width),
    )


def wait_until(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Ask again and again until it holds; fails when it takes too long."""
    until = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < until
        threading.Event().wait(0.001)


def main() -> None:
    pause_s = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0

    def handle(message: Message) -> Message | None:
        if isinstance(message, ExpertBatch):
            return ExpertResult(np.asarray(message.hidden, np.float32), 0.1, 0.2, 0.3)
        if isinstance(message, HealthRequest):
            threading.Event().wait(pause_s)
            return HealthReport("peer", {})
        return None

    with ChannelServer(handle) as server:
        print(server.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
