"""A channel to another process: its death is noticed, nothing is left behind, TLS holds."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from channel_peer import batch, wait_until

from tiermoe.errors import PeerLost
from tiermoe.proto.channel import open_channel
from tiermoe.proto.messages import ExpertResult, HealthReport, HealthRequest, Message
from tiermoe.proto.options import ChannelOptions
from tiermoe.proto.server import ChannelServer

TRANSPORTS = ("grpc", "shm") if sys.platform == "linux" else ("grpc",)
_SOON_S = 5.0


@contextmanager
def _peer(*args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    program = Path(__file__).parents[1] / "channel_peer.py"
    process = subprocess.Popen(
        [sys.executable, str(program), *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait(_SOON_S)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("number", "liveness_s"), [(signal.SIGKILL, 20), (signal.SIGSTOP, 0.9)], ids=["kill", "stop"])
def test_a_peer_that_dies_or_stops_is_lost_soon(transport: str, number: int, liveness_s: float) -> None:
    """A death is seen before the silence has lasted."""
    options = ChannelOptions(transport=transport, liveness_s=liveness_s)  # type: ignore[arg-type]
    with _peer("30") as (process, address), open_channel(address, options) as channel:
        assert isinstance(channel.call(batch(), _SOON_S), ExpertResult)
        pendings = [channel.submit(HealthRequest(), 30.0) for _ in range(3)]
        begin = time.monotonic()
        process.send_signal(number)
        for pending in pendings:
            with pytest.raises(PeerLost):
                pending.result()
        assert time.monotonic() - begin < _SOON_S
        assert not channel.alive
        assert channel.closed_because
        with pytest.raises(PeerLost):
            channel.submit(batch(), 1.0)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_busy_peer_is_not_lost(transport: str) -> None:
    options = ChannelOptions(transport=transport, liveness_s=1.8)  # type: ignore[arg-type]
    with _peer("3") as (_, address), open_channel(address, options) as channel:
        assert isinstance(channel.call(HealthRequest(), 10.0), HealthReport)


def test_a_killed_client_leaves_the_server_as_it_was() -> None:
    """No memory, no descriptor and no connection of a client that was killed stays with the server."""

    def handle(message: Message) -> Message | None:
        return None

    code = (
        "import sys; from tiermoe.proto.channel import open_channel; from tiermoe.proto.messages import HealthRequest;"
        "c = open_channel(sys.argv[1]); c.call(HealthRequest(), 5.0); print(c.transport, flush=True); sys.stdin.read()"
    )
    with ChannelServer(handle) as server:
        with open_channel(server.address) as warm:  # what gRPC opens once and keeps
            warm.call(HealthRequest(), _SOON_S)
        wait_until(lambda: server.connections == 0)
        gc.collect()
        before, mapped = _descriptors(), _mappings()
        for _ in range(2):
            client = subprocess.Popen(
                [sys.executable, "-c", code, server.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert client.stdout is not None
            assert client.stdin is not None
            assert client.stdout.readline().strip() == TRANSPORTS[-1]
            assert server.connections == 1
            client.kill()
            client.wait(_SOON_S)
            client.stdout.close()
            client.stdin.close()
            wait_until(lambda: server.connections == 0)
        wait_until(lambda: gc.collect() >= 0 and _descriptors() <= before and _mappings() <= mapped)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


def _mappings() -> int:
    maps = Path("/proc/self/maps")
    return maps.read_text(encoding="utf-8").count("tiermoe-channel") if maps.exists() else 0


def test_a_process_ends_although_its_channels_are_open() -> None:
    code = (
        "from tiermoe.proto.channel import open_channel; from tiermoe.proto.server import ChannelServer;"
        "from tiermoe.proto.messages import HealthRequest;"
        "s = ChannelServer(lambda m: None); cs = [open_channel(s.address) for _ in range(2)];"
        "cs[0].call(HealthRequest(), 5.0); print('done')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr.strip()) == (0, "done", "")
