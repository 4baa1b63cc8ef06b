"""A channel server in a process of its own: prints its address, ends with its standard input.

`python channel_peer.py [seconds]`: a batch is answered with its own hidden state, a health request after that many
seconds.
"""

from __future__ import annotations

import sys
import threading

import numpy as np

from tiermoe.proto.messages import ExpertBatch, ExpertResult, HealthReport, HealthRequest, Message
from tiermoe.proto.server import ChannelServer


def main() -> None:
    pause_s = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0
    never = threading.Event()

    def handle(message: Message) -> Message | None:
        if isinstance(message, ExpertBatch):
            return ExpertResult(np.asarray(message.hidden, np.float32), 0.1, 0.2, 0.3)
        if isinstance(message, HealthRequest):
            never.wait(pause_s)
            return HealthReport("peer", {})
        return None

    with ChannelServer(handle) as server:
        print(server.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
