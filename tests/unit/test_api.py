"""The HTTP server over canned events: completions and chats, refusals, and what surrounds requests."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_api import WAIT_S, FakeBackend, ask, chat, complete, error, events, post, serving

from tiermoe.actors.requests import GenerationRequest, TokenEvent
from tiermoe.cluster.api import checks
from tiermoe.cluster.api.records import RequestRecord
from tiermoe.cluster.api.schema import finite
from tiermoe.cluster.api.settings import LimitSettings
from tiermoe.errors import RequestError

_ROUTES = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]
_CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def test_a_completion() -> None:
    answer = complete({"prompt": "hi", "model": "fake"})
    assert answer["object"] == "text_completion"
    assert answer["model"] == "fake"
    assert answer["choices"] == [{"index": 0, "text": "HI", "logprobs": None, "finish_reason": "stop"}]
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert answer["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}
    short = complete({"prompt": "hello", "max_tokens": 3})
    assert short["choices"][0] == {"index": 0, "text": "HEL", "logprobs": None, "finish_reason": "length"}


def test_prompts_as_text_and_as_ids_alone_and_in_lists() -> None:
    ids = list(b"hi")
    for prompt in ("hi", ids, ["hi"], [ids], [104.0, 105], [[104.0, 105]]):
        assert complete({"prompt": prompt})["choices"][0]["text"] == "HI"
    answer = complete({"prompt": ["a", "b"], "n": 2})
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "A"), (1, "A"), (2, "B"), (3, "B")]
    usage = {"prompt_tokens": 2, "completion_tokens": 8, "total_tokens": 10}
    assert answer["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}


def test_cached_tokens_of_each_prompt_count_once() -> None:
    backend = FakeBackend(cached=2)
    answer = complete({"prompt": ["abc", "abcd"], "n": 2}, backend)
    assert answer["usage"]["prompt_tokens"] == 7
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    *_, last = events(
        post("/v1/completions", {"prompt": "abc", "stream": True, "stream_options": {"include_usage": True}}, backend)
    )
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_a_stop_string_ends_the_request_in_the_runtime() -> None:
    backend = FakeBackend({"p": b"one two three"}, step=3)
    answer = complete({"prompt": "p", "stop": ["zzz", " tw"]}, backend)
    assert answer["choices"][0] == {"index": 0, "text": "one", "logprobs": None, "finish_reason": "stop"}
    assert answer["usage"]["completion_tokens"] == 6
    assert backend.cancelled == [backend.requests[0].request_id]


@pytest.mark.parametrize("step", [1, 2, 64])
@pytest.mark.parametrize("body", [{}, {"stop": "ü"}, {"n": 3, "max_tokens": 5}, {"logprobs": 2, "echo": True}], ids=str)
def test_a_stream_gives_what_the_whole_answer_gives(step: int, body: dict[str, Any]) -> None:
    table = {"p": "grüße 🙂!".encode()}
    whole = complete({"prompt": "p"} | body, FakeBackend(table, step=step))
    response = post("/v1/completions", {"prompt": "p", "temperature": 0, "stream": True} | body,
                    FakeBackend(table, step=step))  # fmt: skip
    chunks = events(response)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert "usage" not in chunks[0]
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        if choice["logprobs"] is not None:
            for key, values in choice["logprobs"].items():
                assert [value for part in parts for value in part["logprobs"][key]] == values, key


def test_echo_with_logprobs_scores_the_prompt() -> None:
    """As lm-evaluation-harness asks: one token, echo, and the log-probability of each prompt token."""
    backend = FakeBackend()
    answer = complete({"prompt": [list(b"ab"), list(b"xyz")], "max_tokens": 1, "logprobs": 1, "echo": True}, backend)
    first, second = answer["choices"]
    assert (first["text"], second["text"]) == ("abA", "xyzX")
    assert second["logprobs"] == {
        "tokens": ["x", "y", "z", "X"],
        "token_logprobs": [None, -1.21, -1.22, -0.88],
        "top_logprobs": [None, {"\x00": 0, "y": -1.21}, {"\x00": 0, "z": -1.22}, {"\x00": 0, "X": -0.88}],
        "text_offset": [0, 1, 2, 3],
    }
    assert first["logprobs"]["token_logprobs"] == [None, -0.98, -0.65]
    assert backend.requests[0].sampling.prompt_logprobs == 1
    answer = complete({"prompt": "ab", "max_tokens": 0, "logprobs": 0, "echo": True})  # no token at all
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.98]
    assert answer["usage"]["completion_tokens"] == 0
    assert (finite(-math.inf), finite(-2.5)) == (-9999.0, -2.5)  # JSON has no infinity


@pytest.mark.parametrize(("n", "count", "refused"), [(4, 2, False), (4, 3, True), (5, 2, True)])
def test_scores_of_prompts_are_bounded(n: int, count: int, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come at once: 7 KB of a request, with n, echo and logprobs, took gigabytes of the server."""
    monkeypatch.setattr(checks, "_MANY_SCORES", 4 * 8 * (1 + 2))
    backend = FakeBackend()
    body = {"prompt": ["abcd"] * count, "n": n, "echo": True, "logprobs": 2, "max_tokens": 0}
    response = post("/v1/completions", body, backend)
    assert response.status_code == (400 if refused else 200)
    if refused:
        assert error(response)[1:] == (
            "logprobs", f"{4 * count * n * 3} log-probabilities of prompts; ask for at most 96 at a time")  # fmt: skip
        assert backend.requests == []
        assert complete(body | {"echo": False, "max_tokens": 1})["choices"]  # of generated tokens there are few


def test_choices_share_what_is_large() -> None:
    """128 choices with a long `logit_bias` each checked it anew, on the event loop, for seconds."""
    for path, prompt in (("/v1/completions", {"prompt": ["p", "q"]}), ("/v1/chat/completions", _CHAT)):
        backend = FakeBackend()
        post(path, prompt | {"n": 3, "seed": 2**64 - 2, "logit_bias": {"5": 1}, "max_tokens": 1}, backend)
        samplings = [request.sampling for request in backend.requests]
        assert len({id(one.logit_bias) for one in samplings}) == 1
        seeds = [one.seed for one in samplings]
        assert seeds == [2**64 - 2, 2**64 - 1, 0] * (len(seeds) // 3)


def test_a_chat() -> None:
    answer = chat({"logprobs": True, "top_logprobs": 2, "max_completion_tokens": 9})
    (choice,) = answer["choices"]
    assert answer["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": "HI", "refusal": None}
    assert choice["finish_reason"] == "stop"
    entry = choice["logprobs"]["content"][0]
    assert (entry["token"], entry["bytes"], entry["logprob"]) == ("H", [72], -0.72)
    assert [top["bytes"] for top in entry["top_logprobs"]] == [[0], [1]]
    assert answer["usage"]["prompt_tokens"] == 2
    backend = FakeBackend()
    chat({}, backend)
    assert backend.requests[0].sampling.max_tokens == 62  # fills the context unless told otherwise


def test_a_chat_stream_begins_with_the_role() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "stream": True, "n": 2}
    chunks = events(post("/v1/chat/completions", body))
    deltas: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        for part in chunk["choices"]:
            deltas[part["index"]].append(part["delta"])
    for found in deltas.values():
        assert found[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in found) == "HI"


class _Refusing(FakeBackend):
    """As a lead that refuses a request, before its first token or after."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent]:
        for _ in range(self.after):
            yield TokenEvent(request.request_id, (65,))
        raise RequestError("the grammar is too complex", "change it")


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_what_the_lead_refuses_is_the_clients_error(path: str, after: int) -> None:
    """Guards: a grammar that the lead refused was 503, at which clients try again."""
    body = {"/v1/completions": {"prompt": "p"}, "/v1/responses": {"input": "p"}}.get(path, _CHAT)
    assert error(post(path, body, _Refusing(after))) == (400, None, "the grammar is too complex; change it")
    response = post(path, body | {"stream": True}, _Refusing(after))
    *_, last = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n") if '"error"' in line]
    assert last["error"]["type"] == "invalid_request_error"


_FOREIGN = {
    "verbosity": "low", "provider": {"order": ["a"]}, "models": ["a", "b"], "transforms": ["middle-out"],
    "mm_processor_kwargs": {"a": 1}, "num_ctx": 8192, "drop_params": True, "prompt_cache_retention": "24h", "ttl": 300,
    "user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "flex", "priority": 5, "keep_alive": "5m",
    "cache_prompt": True, "id_slot": 0, "safety_identifier": "x",
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_parameters_of_other_servers_are_ignored_named_and_counted(path: str, stream: bool) -> None:
    async def call(http: httpx.AsyncClient) -> tuple[httpx.Response, str]:
        body = (_CHAT if "chat" in path else {"prompt": "p"}) | {"stream": stream} | _FOREIGN
        return await http.post(path, json=body), (await http.get("/metrics")).text

    response, page = ask(FakeBackend(), call)
    assert response.status_code == 200
    assert response.headers["warning"] == f'299 tiermoe "ignored parameters: {", ".join(_FOREIGN)}"'
    for name in _FOREIGN:
        assert f'tiermoe_ignored_parameters_total{{name="{name}"}} 1.0' in page
    assert "warning" not in post("/v1/completions", {"prompt": "p"}).headers


@pytest.mark.parametrize("usage", [True, {"include": True}])
def test_openrouters_usage_is_that_of_a_stream(usage: Any) -> None:
    *chunks, last = events(post("/v1/completions", {"prompt": "hi", "stream": True, "usage": usage}))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 5)
    assert "warning" not in post("/v1/completions", {"prompt": "hi", "usage": usage}).headers
    off = events(post("/v1/completions", {"prompt": "hi", "stream": True, "usage": {"include": False}}))
    assert all("usage" not in chunk for chunk in off)


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models", "/version"])
def test_head_is_answered_where_get_is(path: str) -> None:
    """aiperf and health checks ask so."""
    head, whole = (ask(FakeBackend(), lambda http, method=method: http.request(method, path))
                   for method in ("HEAD", "GET"))  # fmt: skip
    assert (head.status_code, head.headers["content-type"]) == (200, whole.headers["content-type"])


def test_the_request_of_guidellm() -> None:
    """It was refused: every chunk's usage was unknown to the server."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "hello", "max_tokens": 3, "stream": True, "stream_options": options}
    *chunks, last = events(post("/v1/completions", body))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]
    assert all(chunk["usage"]["prompt_tokens"] == 5 for chunk in chunks)
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 8)


def test_bodies_are_bounded_whether_their_length_is_announced_or_not() -> None:
    async def stream() -> AsyncIterator[bytes]:
        for _ in range(8):
            yield b" " * 512

    async def call(http: httpx.AsyncClient) -> list[int]:
        said = await http.post("/v1/completions", content=b" " * 2000)
        headers = {"Content-Type": "application/json"}
        unsaid = await http.post("/v1/completions", content=stream(), headers=headers)
        return [said.status_code, unsaid.status_code]

    assert ask(FakeBackend(), call, limits=LimitSettings(body_bytes=1024)) == [413, 413]


@pytest.mark.parametrize(("keyed", "other"), [(False, 429), (True, 429), (True, 200)])
def test_bodies_together_are_bounded(keyed: bool, other: int, tmp_path: Path) -> None:
    """Where there are keys, one leaves half to others."""
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n")
    file.chmod(0o600)
    keys = [{"Authorization": f"Bearer {name}"} for name in ("one", "two" if other == 200 else "one")]

    async def call(http: httpx.AsyncClient) -> list[int]:
        begun, over = asyncio.Event(), asyncio.Event()

        async def half() -> AsyncIterator[bytes]:
            yield b" " * (1900 if keyed else 3900)
            begun.set()
            await over.wait()
            yield b'{"prompt": "p"}'

        headers = {"Content-Type": "application/json"}
        task = asyncio.create_task(http.post("/v1/completions", content=half(), headers=headers | keys[0]))
        await begun.wait()
        content = b'{"prompt": "p"}' + b" " * 200
        second = await http.post("/v1/completions", content=content, headers=headers | keys[1])
        over.set()
        again = await http.post("/v1/completions", json={"prompt": "p"}, headers=keys[1])
        return [second.status_code, (await task).status_code, again.status_code]

    limits = LimitSettings(held_bytes=4096, body_bytes=2000 if keyed else 4096)
    assert ask(FakeBackend(), call, limits=limits, keys=file if keyed else None) == [other, 200, 200]


def test_a_full_queue_is_429_and_moves_on() -> None:
    async def call(http: httpx.AsyncClient) -> tuple[httpx.Response, list[int]]:
        backend.hold = asyncio.Event()
        body = {"prompt": "hello"}
        running = [asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(2)]
        while len(backend.requests) < 1:
            await asyncio.sleep(0)
        refused = await http.post("/v1/completions", json=body)
        backend.hold.set()
        return refused, [(await task).status_code for task in running]

    backend = FakeBackend(max_requests=1)
    refused, others = ask(backend, call, limits=LimitSettings(waiting=1))
    assert (error(refused)[0], "1 requests wait already" in error(refused)[2]) == (429, True)
    assert int(refused.headers["retry-after"]) >= 1
    assert others == [200, 200]
    assert error(post("/v1/completions", {"prompt": "p", "n": 3}, FakeBackend(max_requests=1),
                      limits=LimitSettings(waiting=1)))[0] == 429  # all choices or none  # fmt: skip


def asgi(path: str, body: dict[str, Any]) -> tuple[dict[str, Any], asyncio.Queue[dict[str, Any]]]:
    """A request below HTTP: its scope, and what the server receives."""
    inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    inbox.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http",
        "server": ("test", 80), "client": ("test", 1), "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    return scope, inbox


def streamed(path: str, prompt: str) -> dict[str, Any]:
    """The body of a stream's request."""
    said = {"prompt": prompt} if path == "/v1/completions" else {"messages": [{"role": "user", "content": prompt}]}
    body = {"input": prompt} if path == "/v1/responses" else said | {"max_tokens": 400}
    return body | {"stream": True}


@pytest.mark.parametrize("path", _ROUTES)
def test_no_letter_of_an_answer_ends_a_line_of_its_stream(path: str) -> None:
    """httpx's `iter_lines`, which clients read events by, splits at more letters than a stream of events does."""
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\r\nh\ni"
    backend = FakeBackend({"p": text.encode()}, step=64)
    backend.plan["max_prompt_tokens"] = 500
    response = post(path, streamed(path, "p"), backend)
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    found = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert any(text in value for event in found for value in strings(event))


def strings(value: Any) -> list[str]:
    """All in a JSON value."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in inner for text in strings(part)]


@pytest.mark.parametrize("path", _ROUTES)
def test_a_client_that_reads_slowly_holds_no_place_in_the_runtime(path: str) -> None:
    """Who read a long stream slowly enough kept others waiting for up to an hour. It still counts as under way."""

    async def run() -> None:
        text = "x" * 300
        backend = FakeBackend({"p": text.encode()}, max_requests=1)
        backend.plan["max_prompt_tokens"] = 500
        service, client = serving(backend, limits=LimitSettings(waiting=1))
        scope, inbox = asgi(path, streamed(path, "p"))
        reads, sent = asyncio.Event(), list[bytes]()

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))
            await reads.wait()

        async with client() as http:
            call = asyncio.create_task(http._transport.app(scope, inbox.get, send))
            while not sent:
                await asyncio.sleep(0)
            whole = await http.post("/v1/completions", json={"prompt": "hi"})
            assert whole.json()["choices"][0]["text"] == "HI"
            full = await http.post("/v1/completions", json={"prompt": "hi", "n": 2})
            assert full.status_code == 429
            assert (service.admission.inside, service.admission.waiting) == (0, 1)
            reads.set()
            await call
        assert (service.admission.inside, service.admission.waiting) == (0, 0)
        assert b"".join(sent).count(b"x") >= 300
        assert len(sent) < 100  # what waited came as one

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(stream: bool) -> None:
    """Below HTTP: what the server sees is a disconnect while the answer is held."""

    async def run() -> None:
        backend = FakeBackend()
        backend.hold = asyncio.Event()
        records: list[RequestRecord] = []
        service, client = serving(backend, sinks=[records.append])
        scope, inbox = asgi("/v1/completions", {"prompt": "hello", "stream": stream, "n": 2})

        async def send(message: Any) -> None:
            return None

        call = asyncio.create_task(client()._transport.app(scope, inbox.get, send))  # type: ignore[attr-defined]
        while backend.open < 2:
            await asyncio.sleep(0)
        inbox.put_nowait({"type": "http.disconnect"})
        await asyncio.wait_for(call, WAIT_S)
        while backend.open or service.admission.inside:
            await asyncio.sleep(0)
        assert len(backend.cancelled) == 2
        assert service.admission.waiting == 0
        assert 'finished_reason="abort"} 2.0' in service.metrics.page().decode()
        record = records[0]
        assert (record.status, record.finish[0], record.reason) == (200 if stream else 499, "abort", None)

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_tokenize_and_back() -> None:
    found = post("/tokenize", {"prompt": "hé"}).json()
    assert found == {"tokens": [0x68, 0xC3, 0xA9], "count": 3, "max_model_len": 64}
    assert post("/detokenize", {"tokens": [float(token) for token in found["tokens"]]}).json() == {"prompt": "hé"}


def test_models_version_and_readiness() -> None:
    async def call(http: httpx.AsyncClient) -> list[Any]:
        models = (await http.get("/v1/models")).json()
        assert models["data"][0]["id"] == "fake"
        assert (await http.get("/v1/models/fake")).json() == models["data"][0]
        assert "tiermoe" in (await http.get("/version")).json()
        ready = await http.get("/ready")
        backend.failure = "the worker died"
        return [ready.status_code, (await http.get("/ready")).status_code, (await http.get("/health")).status_code]

    backend = FakeBackend()
    assert ask(backend, call) == [200, 503, 200]
