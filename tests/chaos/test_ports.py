"""Raw bytes on every port on which a deployment listens: nothing dies or hangs, the next request is answered."""

from __future__ import annotations

import contextlib
import random
import socket
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from rig import Server, served, title_of

from tiermoe.cluster.config import default_model_dir

pytestmark = [
    pytest.mark.skipif(not default_model_dir().is_dir(), reason="the default model is not there"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
_OPTIONS = ("--policy", "context-ndp-full", "--budget", "25%", "--shards", "2", "--ndp-workers", "1")
_ANSWER_S = 0.3  # for which a client reads, however long the server would keep the connection
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
Address = tuple[str, int]


def corpus() -> Iterator[bytes]:
    """HTTP/1, HTTP/2, gRPC, TLS and noise, whole and broken."""
    rng = random.Random(0)
    yield b""
    yield b"\0" * 4096
    yield b"\xff" * 4096
    yield b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
    yield b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n{"
    yield b"GET / HTTP/1.1\r\n" + b"A: " + b"a" * 200_000 + b"\r\n\r\n"
    yield _HTTP2
    yield _HTTP2 + _SETTINGS
    yield _HTTP2 + _SETTINGS + b"\xff\xff\xff\x01\x05\0\0\0\x01" + rng.randbytes(2000)  # headers of 16 MiB
    yield _HTTP2 + _SETTINGS + b"\0\0\x08\x07\0\0\0\0\0" + b"\0" * 7 + b"\x02"  # go away
    yield _HTTP2 + _SETTINGS + b"\0\0\x05\x00\x01\0\0\0\x01" + b"\0\xff\xff\xff\xff"  # data of no stream
    yield b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + rng.randbytes(500)  # a client hello, but for its end
    yield b"\x28\xb5\x2f\xfd" + rng.randbytes(1000)
    yield b"\xff" * 8 + b"\x7f" + b"\0" * 55  # the greatest length in any order of bytes
    yield from (rng.randbytes(rng.choice((1, 8, 64, 1000, 70_000))) for _ in range(50))
    for _ in range(50):
        broken = bytearray(_HTTP2 + _SETTINGS + rng.randbytes(200))
        for _ in range(8):
            broken[rng.randrange(len(_HTTP2), len(broken))] = rng.randrange(256)
        yield bytes(broken)


def listening(server: Server) -> dict[Address, str]:
    """Each address on which one of its processes listens, and who it is. Ray ends a worker without an actor at will."""
    found: dict[Address, str] = {}
    for process in [psutil.Process(server.process.pid), *_lasting(server)]:
        try:
            connections = process.net_connections("tcp")
        except psutil.Error:
            continue
        for one in connections:
            if one.status == psutil.CONN_LISTEN:
                host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(one.laddr.ip, one.laddr.ip)
                found[host, one.laddr.port] = title_of(process)
    return found


def _lasting(server: Server) -> list[psutil.Process]:
    return [process for process in server.family() if title_of(process) != "ray::IDLE"]


def _logged(server: Server, pids: Iterable[int]) -> str:
    """What Ray's logs say of processes that are gone."""
    files = [Path(one.path) for process in server.family() for one in process.open_files()]
    folders = {file.parent for file in files if file.parent.name == "logs"}
    lines = [line for folder in folders for name in ("raylet.out", "gcs_server.out")
             for line in (folder / name).read_text(errors="replace").split("\n")]  # fmt: skip
    ends = [file.read_text(errors="replace")[-2000:]
            for folder in folders for pid in pids for file in folder.glob(f"*{pid}*")]  # fmt: skip
    return "\n".join([*(line for line in lines if any(str(pid) in line for pid in pids)), *ends])


def send(address: Address, data: bytes) -> None:
    """Send it, read for a moment, and leave. Who listens no more is found by the caller."""
    with contextlib.suppress(OSError), socket.create_connection(address, 20.0) as client:
        client.settimeout(_ANSWER_S)
        client.sendall(data)
        while client.recv(65536):
            pass


def test_raw_bytes_on_every_port() -> None:
    with served(*_OPTIONS) as server:
        body = {"prompt": "import os", "max_tokens": 16, "temperature": 0}
        first = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60.0)
        assert first.status_code == 200, first.text
        processes = {process.pid: title_of(process) for process in _lasting(server)}
        addresses = listening(server)
        titles = set(addresses.values())
        assert {"gcs_server", "raylet", "ray::NdpWorker", "ray::ShardWorker", "ray::Edge"} <= titles, titles
        with ThreadPoolExecutor(16) as pool:
            for address in addresses:
                list(pool.map(lambda data, to=address: send(to, data), corpus()))  # type: ignore[misc]
        died = {pid: title for pid, title in processes.items() if not psutil.pid_exists(pid)}
        assert died == {}, f"{server.said()}\n{_logged(server, died)}"
        closed = addresses.items() - listening(server).items()
        assert not closed, (closed, server.said())
        again = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60.0)
        assert again.status_code == 200, again.text
        assert again.json()["choices"] == first.json()["choices"]
        assert server.process.poll() is None
