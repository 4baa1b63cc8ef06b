"""Generated requests, right and wrong ones, against the OpenAPI document; and broken bytes on the port.

The application with its real service, tokenizer and connections, as in the server, before canned tokens: what is
tested is the edge. `make fuzz-api` runs 10,000 cases in parts, each of which fits a time limit.
"""

from __future__ import annotations

import random
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fake_api import EOS, FakeBackend, byte_tokenizer
from hypothesis import HealthCheck, given, seed
from hypothesis import settings as hypothesis_settings

from tiermoe.cluster.api.model import ServedModel
from tiermoe.cluster.api.routes import make_app
from tiermoe.cluster.api.runs import Runs
from tiermoe.cluster.api.settings import LimitSettings
from tiermoe.cluster.api.templates import ChatTemplate

schemathesis = pytest.importorskip("schemathesis")
uvicorn = pytest.importorskip("uvicorn")

_HANG_S = 20.0
_SILENCE_S = 1
_POSTS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/tokenize", "/detokenize",
)  # fmt: skip
_MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, dict[str, Any]]]:
    """Address and OpenAPI document."""
    from tiermoe.cluster.api.connections import BoundedConnection

    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    limits = LimitSettings(body_s=_SILENCE_S)
    backend, tokenizer = FakeBackend(max_requests=64), byte_tokenizer()
    model = ServedModel("fake", backend.plan, tokenizer, template, limits)
    app = make_app(model, Runs(backend, tokenizer, limits), None)
    config = uvicorn.Config(
        app, http=BoundedConnection, timeout_keep_alive=_SILENCE_S, lifespan="off", log_config=None
    )
    serving = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        thread = threading.Thread(target=serving.run, kwargs={"sockets": [listener]})
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", app.openapi()
        serving.should_exit = True
        thread.join(_HANG_S)
    assert not thread.is_alive()


def fitted(value: Any, name: str = "") -> Any:
    """A legal value of parameter `name`, with what the document cannot say: the vocabulary, the model, some text."""
    if isinstance(value, dict):
        found = {key: fitted(item, key) for key, item in value.items()}
        return found | {"content": found.get("content") or "a"} if "role" in found else found
    if isinstance(value, list):
        value = [fitted(item, name) for item in value]
    elif isinstance(value, int) and name in ("prompt", "tokens", "stop_token_ids"):
        return value % EOS
    if name == "model" and value is not None:
        return "fake"
    return "a" if name in ("prompt", "input") and value in ("", []) else value


def check(path: str, status: int, kind: str, body: Any) -> None:
    """An answer is a success, or says in its protocol's form what is wrong; 503 is the only failure of the server."""
    assert status < 500 or status == 503, body
    if status >= 400:
        assert kind.startswith("application/json")
        names = {"message", "type"} if path.startswith("/v1/messages") else {"message", "type", "param", "code"}
        assert set(body["error"]) == names
        assert body["error"]["message"]


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("mode", _MODES, ids=str)
@pytest.mark.parametrize("path", _POSTS)
def test_generated_bodies(server: tuple[str, Any], path: str, mode: Any, request: pytest.FixtureRequest) -> None:
    url, document = server
    part = request.config.getoption("--fuzz-part")
    cases = request.config.getoption("--fuzz-cases") // (len(_POSTS) * len(_MODES))
    operation = schemathesis.openapi.from_dict(document)[path]["POST"]
    statuses: Counter[int] = Counter()

    @seed(f"{part} {path} {mode}")  # the same requests on every run of a part
    @hypothesis_settings(
        max_examples=cases, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def fuzz(case: Any) -> None:
        if mode is schemathesis.GenerationMode.POSITIVE:
            case.body = fitted(case.body)
            if path == "/tokenize":  # one of both
                case.body.pop("messages", None)
                case.body["prompt"] = case.body.get("prompt") or "a"
        response = case.call(base_url=url, timeout=_HANG_S)
        kind = response.headers.get("content-type", [""])[0]
        statuses[response.status_code] += 1
        check(path, response.status_code, kind, response.json() if response.status_code >= 400 else None)

    fuzz()
    print(f"part {part}, {path}, {mode}: {dict(sorted(statuses.items()))}")
    assert statuses.total() >= cases
    assert (200 if mode is schemathesis.GenerationMode.POSITIVE else 400) in statuses
    assert httpx.get(f"{url}/health", timeout=_HANG_S).status_code == 200


_SEEDS = (
    b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 31\r\n\r\n'
    b'{"prompt": "hi", "stream":true}',
    b'POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
    b'Transfer-Encoding: chunked\r\n\r\n2b\r\n{"messages":[{"role":"u","content":"\\ud83d"\r\n3\r\n}]}\r\n0\r\n\r\n',
    b"GET /health HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n\r\nGET /v1/models HTTP/1.0\r\n\r\n",
    b"GET /metrics?%ff=%00&a=\xff HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: [::1\r\nAuthorization: bearer \x80\r\nX-Request-Id: \xc3\xa9\r\n\r\n",
)


def broken(rng: random.Random) -> bytes:
    """A request with some of its bytes changed, left out, doubled or moved."""
    data = bytearray(rng.choice(_SEEDS))
    for _ in range(rng.randrange(6)):
        begin = rng.randrange(len(data) + 1)
        end = min(len(data), begin + rng.choice((1, 1, 2, 8, 40)))
        part = data[begin:end]
        data[begin:end] = rng.choice((b"", part * 2, rng.randbytes(end - begin), b"\r\n", b"\x00", b"9" * 20))
    return bytes(data)


@pytest.mark.timeout(3000)
def test_broken_bytes(server: tuple[str, Any], request: pytest.FixtureRequest) -> None:
    url, _ = server
    cases, part = request.config.getoption("--fuzz-cases"), request.config.getoption("--fuzz-part")
    address = ("127.0.0.1", int(url.rpartition(":")[2]))

    def send(number: int) -> None:
        sent, answer = broken(random.Random(number)), b""
        with socket.create_connection(address, _HANG_S) as client:
            try:
                client.sendall(sent)
                while piece := client.recv(65536):  # until the server closes, or this test fails for a hang
                    answer += piece
            except ConnectionError:
                pass
        if answer:
            assert answer.startswith(b"HTTP/1.1 "), sent
            status = int(answer[9:12])
            assert status < 500 or status == 503, sent

    with ThreadPoolExecutor(32) as pool:
        list(pool.map(send, range(cases * part, cases * (part + 1))))
    assert httpx.get(f"{url}/health", timeout=_HANG_S).status_code == 200
