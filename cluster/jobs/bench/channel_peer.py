"""The other process of `tiermoe bench channel`: echoes over a channel server and over a bare gRPC stream.

Prints one JSON line with both addresses; ends with its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc

from ....proto import grpc_transport
from ....proto.messages import ExpertBatch, ExpertResult, Message
from ....proto.options import Limits
from ....proto.server import ChannelServer
from ...topology.spec import ModelFacts

BARE_ECHO = "/bench/Echo"


NO_MODEL = ModelFacts(
    name="none", layers=1, experts=4, top_k=1, hidden=1, intermediate=1, gates=2, expert_elements=3, dense_elements=1,
    kv_elements=1, item_bytes=4, source="this benchmark",
)  # fmt: skip


class EchoWorker:
    """For `Deployment`: an actor whose `cancel` gives its argument back."""

    def __init__(self, settings: Any, view: Any, ndp: Any = None) -> None: ...

    def start(self) -> dict[str, Any]:
        return {}

    def cancel(self, text: str) -> str:
        return text


class NoStore:
    """For `Deployment`: a store without a file."""

    def __init__(self, path: str, index: int) -> None: ...

    def describe(self) -> dict[str, Any]:
        return {}


class BareEcho:
    """A bidirectional stream of bytes, with the settings that the channel uses and nothing of its own."""

    def __init__(self) -> None:
        self._server = grpc.server(
            futures.ThreadPoolExecutor(4), options=grpc_transport.settings(Limits().max_message_bytes)
        )
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def service(self, details: Any) -> Any:
        return grpc.stream_stream_rpc_method_handler(_echo) if details.method == BARE_ECHO else None

    def close(self) -> None:
        self._server.stop(None).wait(2.0)


def _echo(incoming: Iterator[bytes], context: Any) -> Iterator[bytes]:
    yield from incoming


def _answer(message: Message) -> Message | None:
    assert isinstance(message, ExpertBatch)
    return ExpertResult(message.hidden, 0.0, 0.0, 0.0)


def main() -> None:
    """Usage: channel_peer [CORE]."""
    if len(sys.argv) > 1:
        os.sched_setaffinity(0, {int(sys.argv[1])})
    with ChannelServer(_answer) as server, contextlib.closing(BareEcho()) as bare:
        print(json.dumps({"channel": server.address, "bare": bare.address}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
