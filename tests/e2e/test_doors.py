"""Who gets in at `tiermoe serve`: TLS of HTTP and of channels, ports of a local runtime, the end of the Ray below."""

from __future__ import annotations

import re
import ssl
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from certificates import certificate, folder_of
from listening import off_loopback
from started import ON_CPU, WAIT_S, started

from tiermoe.cluster.config import default_model_dir

pytest.importorskip("ray.serve")

_LOST_S, _HUNG_S = 10.0, 45.0  # in which the end of Ray is noticed; in which a hang of it ends what needs it
_ASKED = {"prompt": "import os", "max_tokens": 4}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not default_model_dir().is_dir(), reason="the default model is not there"),
]


def _trusts(ca: str, *own: str) -> ssl.SSLContext:
    """A client that accepts certificates of `ca`, and shows its own: file and key."""
    context = ssl.create_default_context(cafile=ca)
    if own:
        context.load_cert_chain(*own)
    return context


@pytest.mark.timeout(600)
def test_tls_of_http_and_of_channels_and_what_else_listens(tmp_path: Path) -> None:
    (server, server_key), (client, client_key) = (certificate(tmp_path, name) for name in ("server", "client"))
    options = [*ON_CPU, "--port", "0", "--host", "0.0.0.0"]
    options += ["--policy", "context-ndp-full", "--channel-tls", str(folder_of(tmp_path / "channels"))]
    options += ["--ssl-certfile", server, "--ssl-keyfile", server_key, "--ssl-ca-certs", client]
    with started(tmp_path, "serve", *options) as served:
        port = urlsplit(served.url).port
        url = f"https://127.0.0.1:{port}/v1/completions"
        answer = httpx.post(url, json=_ASKED, verify=_trusts(server, client, client_key), timeout=WAIT_S)
        assert answer.json()["usage"]["completion_tokens"] == 4
        for refused in (_trusts(server), _trusts(client, client, client_key), _trusts(server, server, server_key)):
            with pytest.raises(httpx.TransportError):
                httpx.post(url, json=_ASKED, timeout=WAIT_S, verify=refused)
        with pytest.raises(httpx.TransportError):
            httpx.post(url.replace("https", "http"), json=_ASKED, timeout=WAIT_S)
        assert list(off_loopback(served.process.pid).values()) == [{port}]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("hangs", [False, True], ids=["dead", "hung"])
@pytest.mark.parametrize("lost", ["gcs_server", "raylet"])
def test_the_end_of_ray_ends_an_attached_server(tmp_path: Path, lost: str, hangs: bool) -> None:
    name = {"gcs_server": "GCS", "raylet": "raylet"}[lost]
    with (
        started(tmp_path, "up", *ON_CPU) as up,
        started(tmp_path, "serve", "--attach", up.address, "--port", "0") as server,
    ):
        (process,) = [p for p in up.family() if p.name() == lost]
        begin_s = time.monotonic()
        (process.suspend if hangs else process.kill)()
        if hangs:
            while f"Ray's {name} has not answered for " not in server.said():
                assert time.monotonic() - begin_s < _LOST_S, server.said()
                time.sleep(0.1)
        assert server.process.wait(WAIT_S) == 1
        assert time.monotonic() - begin_s < (_HUNG_S if hangs else _LOST_S)
        shown = server.said().splitlines()
        assert [line for line in shown if line.startswith("error: ")] == shown[-1:], shown
        why = r"has not answered for \d+ s" if hangs else "ends"
        assert re.fullmatch(f"error: Ray's {name} {why}; start it again", shown[-1]), shown
        assert up.process.wait(WAIT_S) == 1  # it has ended what hangs
        assert not psutil.wait_procs([process], timeout=10)[1]
