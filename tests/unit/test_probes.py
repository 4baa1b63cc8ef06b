"""`/health` and `/ready` in the proxy, and before there is one: soon, of the right key, and never older than said."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

pytest.importorskip("uvicorn")

from tiermoe.cluster.api import probes
from tiermoe.cluster.api.door import Door
from tiermoe.cluster.api.probes import Probes
from tiermoe.cluster.report.steps import Steps


class Replica:
    """What Serve's proxy asks.

    Attributes:
        hangs: whether requests wait until it is over.
        cuts: whether it ends answers behind their headers.
        answers: times that it has answered; its answers are numbered.
    """

    def __init__(self) -> None:
        self.hangs, self.cuts, self.status, self.answers = False, False, 200, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while self.hangs:
            await asyncio.sleep(0.001)
        self.answers += 1
        wrong = scope["path"] == "/ready" and (b"authorization", b"Bearer wrong") in scope["headers"]
        status = 401 if wrong else self.status
        headers = [(b"content-type", b"application/json"), (b"x-request-id", b"of another")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        if self.cuts:
            return
        await send({"type": "http.response.body", "body": json.dumps({"answer": self.answers}).encode()})


def run(call: Callable[[httpx.AsyncClient, Replica], Awaitable[None]]) -> None:
    async def inside() -> None:
        replica = Replica()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(Probes(replica)), base_url="http://test") as http:
            await asyncio.wait_for(call(http, replica), 20)

    asyncio.run(inside())


def test_an_answer_is_new_where_the_replica_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "PATIENCE_S", 20.0)  # a busy machine may take longer than 30 ms

    async def call(http: httpx.AsyncClient, replica: Replica) -> None:
        for number in (1, 2, 3):
            answer = await http.get("/ready", headers={"X-Request-Id": "mine"})
            assert (answer.json(), answer.headers.get_list("x-request-id")) == ({"answer": number}, ["mine"])
        replica.hangs = True
        monkeypatch.undo()
        assert (await http.head("/ready")).status_code == 200  # what it said last, as for GET
        replica.hangs = False
        assert (await http.get("/other")).headers["x-request-id"] == "of another"  # not one of these

    run(call)


def test_an_answer_that_is_cut_off_is_none() -> None:
    async def call(http: httpx.AsyncClient, replica: Replica) -> None:
        assert (await http.get("/health")).json() == {"answer": 1}
        replica.cuts = True
        for _ in range(2):
            assert (await http.get("/health")).json() == {"answer": 1}
        assert replica.answers > 1
        replica.cuts = False
        while (again := (await http.get("/health")).json()["answer"]) == 1:  # what it said last, on a busy machine
            pass
        assert again > 2

    run(call)


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_the_last_answer_serves_while_a_replica_is_busy_and_only_so_long(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def call(http: httpx.AsyncClient, replica: Replica) -> None:
        assert (await http.get(path)).json() == {"answer": 1}
        replica.hangs = True
        waits_s = []
        for _ in range(10):
            begin_s = asyncio.get_running_loop().time()
            assert (await http.get(path)).json() == {"answer": 1}
            waits_s.append(asyncio.get_running_loop().time() - begin_s)
        assert min(waits_s) < 0.5  # 0.03; the least, as a busy machine adds to some
        monkeypatch.setattr(probes, "STALE_S", 0.0)
        silent = await http.get(path)
        assert (silent.status_code, silent.json()["reason"]) == (503, "no server process answers")
        monkeypatch.undo()
        replica.hangs = False
        while (again := await http.get(path)).json() == {"answer": 1}:
            await asyncio.sleep(0.01)
        assert again.status_code == 200

    run(call)


def test_an_answer_is_kept_for_its_key_only() -> None:
    async def call(http: httpx.AsyncClient, replica: Replica) -> None:
        right, wrong = ({"Authorization": f"Bearer {key}"} for key in ("right", "wrong"))
        assert (await http.get("/ready", headers=right)).status_code == 200
        replica.hangs = True
        refused = asyncio.ensure_future(http.get("/ready", headers=wrong))
        await asyncio.sleep(0.1)
        assert not refused.done()
        replica.hangs = False
        assert (await refused).status_code == 401

    run(call)


def test_a_bad_answer_is_never_given_twice() -> None:
    async def call(http: httpx.AsyncClient, replica: Replica) -> None:
        replica.status = 503
        assert (await http.get("/ready")).json() == {"answer": 1}
        replica.hangs = True
        asked = asyncio.ensure_future(http.get("/ready"))
        await asyncio.sleep(0.1)
        assert not asked.done()
        replica.hangs, replica.status = False, 200
        assert (await asked).json() == {"answer": 2}

    run(call)


def test_serve_without_an_application_is_a_server_that_starts() -> None:
    async def call(http: httpx.AsyncClient, replica: Replica) -> None:
        replica.status = 404
        health, ready = await http.get("/health"), await http.get("/ready")
        assert (health.status_code, ready.status_code) == (200, 503)
        assert ready.json()["reason"] == "the server starts or ends"

    run(call)


def test_a_probe_lends_its_key_to_the_others_and_nothing_else() -> None:
    """The first prober's headers went with each request to a replica: its Content-Length gave others a 413."""
    asked: list[Any] = []

    async def replica(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": (await receive())["body"]})

    async def call() -> None:
        strange = {"Content-Length": "999999999999", "X-Request-Id": "mine", "Traceparent": "00-1", "Cookie": "a=b",
                   "Expect": "100-continue", "Authorization": "Bearer k"}  # fmt: skip
        app = Probes(replica)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            for path in ("/health", "/ready"):
                assert (await http.get(f"{path}?a=b", headers=strange)).status_code == 200

    asyncio.run(call())
    host = (b"host", b"localhost")
    assert [scope["headers"] for scope in asked] == [[host], [host, (b"authorization", b"Bearer k")]]
    for scope, path in zip(asked, ("/health", "/ready"), strict=True):
        assert (scope["method"], scope["path"], scope["query_string"], scope["state"]) == ("GET", path, b"", {})


class Ready(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *args: Any) -> None: ...


class Proxy(ThreadingHTTPServer):
    """As Serve's, which listens before the door has closed."""

    request_queue_size, daemon_threads = 512, True

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        super().server_bind()


def test_the_door_says_how_long_the_start_takes_and_hands_over() -> None:
    steps = Steps(None, {"starting Ray": 6.0, "loading": 30.0})
    with Door("127.0.0.1", 0) as door, httpx.Client(base_url=door.url, timeout=20) as http:
        with pytest.raises(httpx.ConnectError):
            http.get("/ready")
        door.open(steps.progress)
        assert http.get("/ready").json()["reason"] == "the server starts: the runtime is prepared"
        steps("starting Ray")
        ready, health = http.get("/ready"), http.get("/health")
        assert (ready.status_code, ready.json()["status"]) == (503, "not ready")
        assert ready.json()["reason"] == "the server starts: starting Ray"
        assert 30 < ready.json()["seconds_left"] <= 36
        assert 30 <= int(ready.headers["retry-after"]) <= 36
        assert (health.status_code, health.json()["status"]) == (200, "ok")
        refused = http.post("/v1/completions", json={"prompt": "p"})
        assert refused.status_code == 503
        assert refused.json()["error"]["message"].startswith("the server starts: starting Ray; ready in about 3")
        with socket.socket() as proxy:  # as Serve binds it, before the door closes
            proxy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            proxy.bind(("127.0.0.1", door.port))
            proxy.listen()
            door.hand_over()
            with socket.create_connection(("127.0.0.1", door.port), 10):
                proxy.settimeout(10)
                proxy.accept()[0].close()


def test_the_door_answers_a_client_that_first_sends_all_of_its_body() -> None:
    with Door("127.0.0.1", 0) as door:
        door.open(lambda: ("starting", 1.0))
        for path in ("/v1/completions", "/health"):
            connection = HTTPConnection("127.0.0.1", door.port, timeout=20)
            connection.request("POST" if "v1" in path else "GET", path, b"x" * 2**22)
            answer = connection.getresponse()
            assert (answer.status, answer.getheader("connection")) == (200 if path == "/health" else 503, "close")
            assert json.loads(answer.read())
            connection.close()


@pytest.mark.parametrize("steers", [True, False])
def test_a_server_that_ends_answers_503_until_its_process_ends(steers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions got 404 while the application ended, and no connection once the proxy had."""

    def refuse(*args: Any) -> None:
        raise OSError("no such filter")

    def ask(path: str, content: bytes | None) -> tuple[int, str | None, str]:
        connection = HTTPConnection("127.0.0.1", door.port, timeout=20)
        connection.request("GET" if content is None else "POST", path, content)
        answer = connection.getresponse()
        said = answer.read().decode()
        connection.close()
        return answer.status, answer.getheader("retry-after"), said

    if not steers:
        monkeypatch.setattr("tiermoe.cluster.api.door._steer", refuse)
    with Door("127.0.0.1", 0) as door:
        door.open(lambda: ("starting", 1.0))
        door.beside()
        with Proxy(("127.0.0.1", door.port), Ready) as proxy:
            threading.Thread(target=proxy.serve_forever, daemon=True).start()
            door.hand_over()
            assert ask("/v1/completions", b"{}")[0] == 200
            kept = HTTPConnection("127.0.0.1", door.port, timeout=20)
            kept.connect()
            door.end()
            if steers:
                assert {ask("/v1/completions", b"{}")[0] for _ in range(20)} == {503}
            kept.request("GET", "/v1/models")  # the proxy has it, and answers it
            assert kept.getresponse().status == 200
            kept.close()
            proxy.shutdown()
        for path, content in (("/v1/completions", b"{}"), ("/v1/models", None), ("/nothing", None)):
            status, retry, said = ask(path, content)
            assert (status, retry, json.loads(said)["error"]["message"]) == (503, "2", "the server ends")
        assert ask("/health", None)[0] == 200
        assert json.loads(ask("/ready", None)[2])["reason"] == "the server ends"


@pytest.mark.parametrize("steers", [True, False])
def test_after_the_first_good_answer_every_request_is_answered_well(
    steers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a hand-over in which door and proxy answered in turns: 200, 503, 200, and connections were reset."""

    def refuse(*args: Any) -> None:
        raise OSError("no such filter")

    if not steers:
        monkeypatch.setattr("tiermoe.cluster.api.door._steer", refuse)
    came: list[tuple[float, float, object]] = []  # begin, end, status or error of each request
    over = threading.Event()

    def poll(path: str) -> None:
        while not over.is_set():
            begin_s = time.monotonic()
            connection = HTTPConnection("127.0.0.1", door.port, timeout=20)
            try:
                connection.request(*(("POST", path, b"{}") if "v1" in path else ("GET", path)))
                status: object = connection.getresponse().status
            except (OSError, HTTPException) as error:
                status = error
            connection.close()
            came.append((begin_s, time.monotonic(), status))

    with Door("127.0.0.1", 0) as door:
        door.open(lambda: ("starting", 1.0))
        pollers = [threading.Thread(target=poll, args=[path]) for path in ("/ready", "/ready", "/v1/completions")]
        for poller in pollers:
            poller.start()
        time.sleep(0.5)
        if not steers:
            door.beside()
        with Proxy(("127.0.0.1", door.port), Ready) as proxy:
            serving = threading.Thread(target=proxy.serve_forever, daemon=True)
            serving.start()
            if steers:
                door.beside()
                time.sleep(0.5)
                assert {status for *_, status in came} == {503}  # the proxy is there, and gets nothing
            door.hand_over()
            time.sleep(0.5)
            over.set()
            for poller in pollers:
                poller.join(30)
            proxy.shutdown()
    first_s = min(end_s for _, end_s, status in came if status == 200)
    assert len([begin_s for begin_s, *_ in came if begin_s > first_s]) > 50
    assert {status for begin_s, _, status in came if begin_s > first_s} == {200}
    if steers:
        assert {status for *_, status in came} == {503, 200}  # nobody was refused or reset
