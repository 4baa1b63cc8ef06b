"""Who gets in at `tiermoe serve`: TLS of HTTP and of channels, ports of a local runtime, the end of the Ray below."""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from certificates import certificate, folder_of
from listening import off_loopback
from started import ON_CPU, WAIT_S, Started, started

from tiermoe.cluster.config import default_model_dir

pytest.importorskip("uvicorn")

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
        assert set().union(*off_loopback(served.process.pid).values()) == {port}


def _status(path: str, connection: HTTPSConnection) -> object:
    """The status of one request on a new connection, or its error."""
    try:
        body = json.dumps(_ASKED).encode() if path.endswith("completions") else None
        connection.request("POST" if body else "GET", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    except (OSError, HTTPException) as error:
        return error
    finally:
        connection.close()


@pytest.mark.timeout(900)
def test_after_the_first_ready_no_request_fails(tmp_path: Path) -> None:
    """From many new connections at once, through the whole start of a server before two leads."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server, key = certificate(tmp_path, "server")
    options = [*ON_CPU, "--port", str(port), "--budget", "25%", "--replicas", "2"]
    options += ["--ssl-certfile", server, "--ssl-keyfile", key]
    context = _trusts(server)
    came: list[tuple[float, float, str, object]] = []  # begin and end of each request
    over = threading.Event()

    def poll(path: str) -> None:
        while not over.is_set():
            begin_s = time.monotonic()
            status = _status(path, HTTPSConnection("127.0.0.1", port, timeout=WAIT_S, context=context))
            came.append((begin_s, time.monotonic(), path, status))
            if status != 200:
                over.wait(0.02)

    paths = ("/ready", "/ready", "/health", "/v1/models", "/v1/completions")
    pollers = [threading.Thread(target=poll, args=[path], daemon=True) for path in paths]
    with started(tmp_path, "serve", *options, wait=False) as served:
        for poller in pollers:
            poller.start()
        try:
            served.wait_until_ready()
            time.sleep(3.0)
        finally:
            over.set()
        for poller in pollers:
            poller.join(WAIT_S)
    first_s = min(end_s for _, end_s, path, status in came if (path, status) == ("/ready", 200))
    after = [(path, status) for begin_s, _, path, status in came if begin_s > first_s]
    assert {path for path, _ in after} == set(paths)
    assert {status for _, status in after} == {200}


_LATE = """
from pathlib import Path
from tiermoe.actors.policies.eviction import Lru

class Late(Lru):
    def used(self, keys):
        if Path(__file__).with_name("now").exists():
            raise KeyError("boom")
        super().used(keys)
"""


@pytest.mark.timeout(600)
def test_a_policy_that_fails_ends_its_server_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "late_policy.py").write_text(_LATE)
    (tmp_path / "late.yaml").write_text("name: late\nlossless: true\neviction: late_policy:Late\n")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    options = [*ON_CPU, "--port", "0", "--budget", "25%", "--policy", str(tmp_path / "late.yaml")]
    said = "policy late_policy:Late failed in used(), late_policy.py:8: KeyError: 'boom'"
    with started(tmp_path, "serve", *options, variables={"PYTHONPATH": paths}) as served:
        url = f"{served.url}/v1/completions"
        assert httpx.post(url, json=_ASKED, timeout=WAIT_S).status_code == 200
        (tmp_path / "now").touch()
        refused = httpx.post(url, json=_ASKED, timeout=WAIT_S)
        assert refused.status_code in (500, 503)
        assert said in refused.json()["error"]["message"]
        assert served.process.wait(WAIT_S) == 2
        assert served.said().splitlines()[-1].startswith(f"error: {said}; ")
        assert "Traceback" not in served.said()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("hangs", [False, True], ids=["dead", "hung"])
def test_the_end_of_ray_ends_an_attached_server(tmp_path: Path, hangs: bool) -> None:
    """One server loses its GCS and another its raylet, at the same time: both mostly wait."""
    lost = {"gcs_server": "GCS", "raylet": "raylet"}
    with ExitStack() as stack:

        def attached(name: str) -> tuple[Started, Started]:
            (folder := tmp_path / name).mkdir()
            up = stack.enter_context(started(folder, "up", *ON_CPU))
            return up, stack.enter_context(started(folder, "serve", "--attach", up.address, "--port", "0"))

        with ThreadPoolExecutor(len(lost)) as pool:
            pairs = dict(zip(lost, pool.map(attached, lost), strict=True))
        struck, processes = dict[str, float](), list[psutil.Process]()
        for name, (up, _) in pairs.items():
            (process,) = [p for p in up.family() if p.name() == name]
            processes.append(process)
            struck[name] = time.monotonic()
            (process.suspend if hangs else process.kill)()
        for name, (_, server) in pairs.items() if hangs else ():
            while f"Ray's {lost[name]} has not answered for " not in server.said():
                assert time.monotonic() - struck[name] < _LOST_S, server.said()
                time.sleep(0.1)
        for name, (up, server) in pairs.items():
            assert server.process.wait(WAIT_S) == 1
            assert time.monotonic() - struck[name] < (_HUNG_S if hangs else _LOST_S)
            shown = server.said().splitlines()
            assert [line for line in shown if line.startswith("error: ")] == shown[-1:], shown
            why = r"has not answered for \d+ s" if hangs else "ends"
            assert re.fullmatch(f"error: Ray's {lost[name]} {why}; start it again", shown[-1]), shown
            assert up.process.wait(WAIT_S) == 1  # it has ended what hangs
        assert not psutil.wait_procs(processes, timeout=10)[1]
