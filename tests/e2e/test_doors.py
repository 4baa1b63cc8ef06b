"""Who gets in at `tiermoe serve`: TLS of HTTP and of channels, ports of a local runtime, the end of the Ray below."""

from __future__ import annotations

import os
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from certificates import certificate, folder_of
from listening import off_loopback

from tiermoe.cluster.config import default_model_dir

pytest.importorskip("ray.serve")

_TIERMOE = str(Path(sys.executable).with_name("tiermoe"))
_WAIT_S = 240.0
_LOST_S = 10.0  # in which the end of Ray is noticed
_ASKED = {"prompt": "import os", "max_tokens": 4}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not default_model_dir().is_dir(), reason="the default model is not there"),
]


@contextmanager
def _started(folder: Path, name: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A program of ours that is ready, and what it said."""
    variables = {key: value for key, value in os.environ.items() if key != "RAY_AUTH_MODE"}
    variables |= {"XDG_RUNTIME_DIR": str(folder)}
    with (folder / f"{name}.stderr").open("w") as errors:
        process = subprocess.Popen(
            [_TIERMOE, name, *arguments], env=variables, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:  # ends with the process; bounded by pytest
            said += line
            if "end it" in line:
                break
        assert "end it" in said, said + (folder / f"{name}.stderr").read_text()
        yield process, said
    finally:
        process.terminate()
        process.communicate(timeout=_WAIT_S)


def _trusts(ca: str, *own: str) -> ssl.SSLContext:
    """A client that accepts certificates of `ca`, and shows its own: file and key."""
    context = ssl.create_default_context(cafile=ca)
    if own:
        context.load_cert_chain(*own)
    return context


@pytest.mark.timeout(600)
def test_tls_of_http_and_of_channels_and_what_else_listens(tmp_path: Path) -> None:
    (server, server_key), (client, client_key) = (certificate(tmp_path, name) for name in ("server", "client"))
    options = ["--threads", "1", "--device", "cpu", "--port", "0", "--host", "0.0.0.0"]
    options += ["--policy", "context-ndp-full", "--channel-tls", str(folder_of(tmp_path / "channels"))]
    options += ["--ssl-certfile", server, "--ssl-keyfile", server_key, "--ssl-ca-certs", client]
    with _started(tmp_path, "serve", *options) as (process, said):
        port = int(re.search(r"https://0.0.0.0:(\d+)/v1", said)[1])  # type: ignore[index]
        url = f"https://127.0.0.1:{port}/v1/completions"
        answer = httpx.post(url, json=_ASKED, verify=_trusts(server, client, client_key), timeout=_WAIT_S)
        assert answer.json()["usage"]["completion_tokens"] == 4
        for refused in (_trusts(server), _trusts(client, client, client_key), _trusts(server, server, server_key)):
            with pytest.raises(httpx.TransportError):
                httpx.post(url, json=_ASKED, timeout=_WAIT_S, verify=refused)
        with pytest.raises(httpx.TransportError):
            httpx.post(url.replace("https", "http"), json=_ASKED, timeout=_WAIT_S)
        assert list(off_loopback(process.pid).values()) == [{port}]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lost", ["gcs_server", "raylet"])
def test_the_end_of_ray_ends_an_attached_server(tmp_path: Path, lost: str) -> None:
    with _started(tmp_path, "up", "--threads", "1", "--device", "cpu") as (up, said):
        address = re.search(r"ready at (\S+)", said)[1]  # type: ignore[index]
        with _started(tmp_path, "serve", "--attach", address, "--port", "0") as (server, _):
            (process,) = [p for p in psutil.Process(up.pid).children(recursive=True) if p.name() == lost]
            begin_s = time.monotonic()
            process.kill()
            assert server.wait(_WAIT_S) == 1
            assert time.monotonic() - begin_s < _LOST_S
            shown = (tmp_path / "serve.stderr").read_text()
            assert re.findall("^error: .*$", shown, re.M) == [shown.splitlines()[-1]], shown
            name = {"gcs_server": "GCS", "raylet": "raylet"}[lost]
            assert shown.splitlines()[-1] == f"error: Ray's {name} ends; start it again"
