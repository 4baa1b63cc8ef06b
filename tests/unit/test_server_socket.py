"""Where the server listens: what it says while it starts and ends, and how its process gets the socket."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from second_user import as_nobody, needs_root

pytest.importorskip("uvicorn")

from tiermoe.cluster.api import server_socket as module
from tiermoe.cluster.api.origins import Access
from tiermoe.cluster.api.server_socket import Descriptors, ServerSocket
from tiermoe.cluster.report.steps import Steps
from tiermoe.errors import ConfigError, RuntimeFailure


class _Ready(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *args: Any) -> None: ...


@contextmanager
def edge(name: str) -> Iterator[None]:
    """What an edge does: it waits for the socket, and answers 200 on it."""

    def serve() -> None:
        listener = descriptors.listener()
        if listener is not None:
            server = ThreadingHTTPServer(("127.0.0.1", 0), _Ready, bind_and_activate=False)
            server.daemon_threads = True
            server.socket.close()
            server.socket = listener
            servers.append(server)
            server.serve_forever(0.05)

    descriptors, servers = Descriptors(name), list[ThreadingHTTPServer]()
    os.close(descriptors.standard_error)
    thread = threading.Thread(target=serve)
    thread.start()
    yield
    descriptors.close()
    for server in servers:
        server.shutdown()
        server.server_close()
    thread.join(20)


def test_a_port_is_ours_alone() -> None:
    with ServerSocket("127.0.0.1", 0) as held:
        with pytest.raises(ConfigError, match="choose another --port"):
            ServerSocket("127.0.0.1", held.port)
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", held.port))
    with pytest.raises(ConfigError, match="give an address of this machine"):
        ServerSocket("192.0.2.1", 0)
    ServerSocket("127.0.0.1", held.port).__exit__(None, None, None)  # at once


def test_the_server_socket_says_how_long_the_start_takes() -> None:
    steps = Steps(None, {"starting Ray": 6.0, "loading": 30.0})
    with ServerSocket("127.0.0.1", 0) as server_socket, httpx.Client(base_url=server_socket.url, timeout=20) as http:
        server_socket.open(steps.progress)
        assert http.get("/ready").json()["reason"] == "the server starts: the runtime is prepared"
        steps("starting Ray")
        ready, health = http.get("/ready"), http.head("/health")
        assert (ready.status_code, ready.json()["status"]) == (503, "not ready")
        assert ready.json()["reason"] == "the server starts: starting Ray"
        assert 30 < ready.json()["seconds_left"] <= 36
        assert 30 <= int(ready.headers["retry-after"]) <= 36
        assert health.status_code == 200
        refused = http.post("/v1/completions", json={"prompt": "p"})
        assert refused.status_code == 503
        assert refused.json()["error"]["message"].startswith("the server starts: starting Ray, ready in about 3")


def test_a_page_that_is_allowed_reads_that_the_server_starts() -> None:
    page = {"Origin": "https://a.example"}
    asks = page | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    with (
        ServerSocket("127.0.0.1", 0, access=Access(("https://a.example",))) as server_socket,
        httpx.Client(base_url=server_socket.url, timeout=20) as http,
    ):
        server_socket.open(lambda: ("starting", 1.0))
        permission, refused = http.options("/v1/completions", headers=asks), http.post("/v1/completions", headers=page)
        ready = http.get("/ready/", headers=page)
        assert (permission.status_code, refused.status_code, ready.status_code) == (204, 503, 503)
        for answer in (permission, refused, ready):
            assert answer.headers["access-control-allow-origin"] == "https://a.example"
        assert "retry-after" in refused.headers["access-control-expose-headers"]


def test_the_server_socket_answers_a_client_that_first_sends_its_whole_body() -> None:
    with ServerSocket("127.0.0.1", 0) as server_socket:
        server_socket.open(lambda: ("starting", 1.0))
        for path in ("/v1/completions", "/health"):
            connection = HTTPConnection("127.0.0.1", server_socket.port, timeout=20)
            connection.request("POST" if "v1" in path else "GET", path, b"x" * 2**22)
            answer = connection.getresponse()
            assert (answer.status, answer.getheader("connection")) == (200 if path == "/health" else 503, "close")
            assert json.loads(answer.read())
            connection.close()


def test_an_edge_that_ends_or_starts_again_is_not_noticed() -> None:
    def status() -> int:
        return httpx.get(f"{server_socket.url}/", timeout=20).status_code

    with ServerSocket("127.0.0.1", 0) as server_socket:
        server_socket.open(lambda: None)
        with edge(server_socket.name):
            assert status() == 503  # it is there, and gets nothing
            server_socket.hand_over()
            assert status() == 200
        late: list[int] = []
        waits = threading.Thread(target=lambda: late.append(status()))
        waits.start()  # nobody is there
        time.sleep(0.1)
        assert late == []
        with edge(server_socket.name):
            waits.join(20)
        assert late == [200]


def test_it_stands_in_while_no_edge_serves() -> None:
    """And no edge gets the listening socket twice: it would take the second one for the end of the command."""
    with ServerSocket("127.0.0.1", 0) as server_socket:
        server_socket.open(lambda: None)
        with edge(server_socket.name):
            server_socket.hand_over()
            assert httpx.get(f"{server_socket.url}/", timeout=20).status_code == 200
        server_socket.answer_unavailable("none serves")
        with httpx.Client(base_url=server_socket.url, timeout=20) as http:
            refused, ready = http.post("/v1/completions"), http.get("/ready")
        assert refused.status_code == ready.status_code == 503
        assert refused.json()["error"]["message"] == ready.json()["reason"] == "none serves"
        serves = Descriptors(server_socket.name)
        assert httpx.get(f"{server_socket.url}/ready", timeout=20).status_code == 503  # it has nothing yet
        for _ in range(2):
            server_socket.hand_over()
        listener = serves.listener()
        listener.close()
        serves._server_socket.settimeout(0.1)
        with pytest.raises(TimeoutError):
            serves._server_socket.recv(1)
        os.close(serves.standard_error)
        serves.close()


def test_at_its_end_it_answers_again() -> None:
    with ServerSocket("127.0.0.1", 0) as server_socket, httpx.Client(base_url=server_socket.url, timeout=20) as http:
        server_socket.open(lambda: None)
        with edge(server_socket.name):
            server_socket.hand_over()
            assert httpx.get(f"{server_socket.url}/", timeout=20).status_code == 200
        server_socket.end()
        with edge(server_socket.name):  # one that starts again gets nothing
            refused, ready = http.post("/v1/completions", json={}), http.get("/ready")
        assert refused.status_code == ready.status_code == 503
        assert refused.headers["retry-after"] == ready.headers["retry-after"] == "2"
        assert refused.json()["error"]["message"] == ready.json()["reason"] == "the server ends"
        assert http.get("/health").status_code == 200


def test_descriptors_are_given_by_and_to_this_user_only(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = module._user
    calls: list[Callable[[Any], int]] = [
        lambda peer: 1 + os.getuid(),
        plain,
    ]  # as the server socket, then as the edge, sees it
    with ServerSocket("127.0.0.1", 0) as server_socket:
        monkeypatch.setattr(module, "_user", lambda peer: calls.pop(0)(peer) if threading.current_thread() is not
                            threading.main_thread() else plain(peer))  # fmt: skip
        with pytest.raises(RuntimeFailure, match="passed no socket"):
            Descriptors(server_socket.name)
        monkeypatch.setattr(module, "_user", lambda peer: 1 + os.getuid() if threading.current_thread() is
                            threading.main_thread() else plain(peer))  # fmt: skip
        with pytest.raises(RuntimeFailure, match="another user's"):
            Descriptors(server_socket.name)
    with pytest.raises(RuntimeFailure, match="start it again"):
        Descriptors(server_socket.name)


@needs_root
def test_a_second_user_gets_no_descriptor() -> None:
    def ask() -> None:
        with socket.socket(socket.AF_UNIX) as asked:
            asked.settimeout(20)
            asked.connect(server_socket.name)
            if not socket.recv_fds(asked, 1, 1)[1]:
                raise PermissionError(errno.EACCES, "nothing")

    with ServerSocket("127.0.0.1", 0) as server_socket:
        server_socket.hand_over()
        ask()
        assert as_nobody(ask) == "EACCES"


def test_the_end_of_the_server_socket_reaches_the_edge() -> None:
    with ServerSocket("127.0.0.1", 0) as server_socket:
        waits = Descriptors(server_socket.name)
    assert waits.listener() is None
    os.close(waits.standard_error)
    with ServerSocket("127.0.0.1", 0) as server_socket:
        server_socket.hand_over()
        serves = Descriptors(server_socket.name)
        listener = serves.listener()
        assert listener is not None
    listener.close()
    serves.wait_for_end()
    os.close(serves.standard_error)


def test_after_the_first_good_answer_every_request_is_answered_well() -> None:
    """Guards a hand-over in which two processes answered in turns: 200, 503, 200, and connections were reset."""
    came: list[tuple[float, float, object]] = []  # begin, end, status or error of each request
    over = threading.Event()

    def poll(path: str) -> None:
        while not over.is_set():
            begin_s = time.monotonic()
            connection = HTTPConnection("127.0.0.1", server_socket.port, timeout=20)
            try:
                connection.request(*(("POST", path, b"{}") if "v1" in path else ("GET", path)))
                status: object = connection.getresponse().status
            except (OSError, HTTPException) as error:
                status = error
            connection.close()
            came.append((begin_s, time.monotonic(), status))

    with ServerSocket("127.0.0.1", 0) as server_socket:
        server_socket.open(lambda: ("starting", 1.0))
        pollers = [threading.Thread(target=poll, args=[path]) for path in ("/ready", "/ready", "/v1/completions")]
        for poller in pollers:
            poller.start()
        with edge(server_socket.name):
            time.sleep(0.3)
            assert {status for *_, status in came} == {503}
            server_socket.hand_over()
            time.sleep(0.3)
            over.set()
            for poller in pollers:
                poller.join(30)
    first_s = min(end_s for _, end_s, status in came if status == 200)
    assert len([begin_s for begin_s, *_ in came if begin_s > first_s]) > 20
    assert {status for begin_s, _, status in came if begin_s > first_s} == {200}
    assert {status for *_, status in came} == {503, 200}  # nobody was refused or reset
