"""What stands between a client's bytes and the service: bodies, and work beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fake_api import FakeBackend, ask, byte_tokenizer, error, events, post, serving
from pydantic import BaseModel, ValidationError
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from tiermoe.cluster.api import bodies
from tiermoe.cluster.api.bodies import parse
from tiermoe.cluster.api.model import ServedModel
from tiermoe.cluster.api.offload import Offload
from tiermoe.cluster.api.refusals import ApiError
from tiermoe.cluster.api.responses import ResponsesBody
from tiermoe.cluster.api.schema import ChatBody, CompletionBody
from tiermoe.cluster.api.settings import LimitSettings
from tiermoe.cluster.api.text import longest_token

_JSON = {"Content-Type": "application/json"}
_BIG = 3_900_000


def send(content: bytes, headers: dict[str, str] | None = None, path: str = "/v1/completions") -> httpx.Response:
    announced = _JSON if headers is None else headers
    return ask(FakeBackend(), lambda http: http.post(path, content=content, headers=announced))


def error_of(response: httpx.Response) -> tuple[int, str | None, str]:
    """As `error`, also in Anthropic's form."""
    body = response.json()["error"]
    return response.status_code, body.get("param"), body["message"]


@pytest.mark.parametrize(
    "content",
    [rb'{"model": "\ud800"}', rb'{"prompt": "\udfff"}', rb'{"\ud800": 1}', rb'{"prompt": ["a\ud83dz"]}', b'{"a": NaN}',
     b"{", b"\xff\xfe", b'{"prompt": "\xed\xa0\x80"}', b"[" * 10_000, b'{"seed": ' + b"9" * 100_000 + b"}"],
    ids=lambda content: repr(content[:24]),
)  # fmt: skip
def test_what_is_no_json_text_is_refused_in_words(content: bytes) -> None:
    status, param, message = error(send(content))
    assert (status, param) == (400, None)
    assert message.startswith("the body is not valid JSON: ")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hi", "tools": [{"type": "function", "name": "f", "parameters": {"x": "?"}}]}),
        ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "tools": ["?"]}),
        ("/v1/completions", {"prompt": "p", "guided_json": {"maximum": "?"}}),
        ("/v1/completions", {"prompt": ["?"]}),
    ],
    ids=lambda value: str(value)[:30],
)
@pytest.mark.parametrize("number", ["1e999", "-1E+400", "9" * 400 + ".5"], ids=lambda number: number[:8])
def test_a_number_beyond_all_floats_is_refused(path: str, body: dict[str, Any], number: str) -> None:
    """It was read as infinity, which no JSON can say again: a schema with it came back as a 500 after the answer."""
    status, _, message = error_of(send(json.dumps(body).replace('"?"', number).encode(), path=path))
    assert (status, message) == (400, "a number in the body is beyond all floats; give a smaller one")


def test_what_is_json_and_no_body() -> None:
    assert error(send(b"")) == (400, None, "the body is missing")
    assert error(send(b"[1]"))[2].startswith("the body: input should be")
    assert error(send(b'{"prompt": "p", "x\\u0000": 1}'))[1] == "x\x00"


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded; charset=utf-8"])
def test_another_content_type_is_named(kind: str | None) -> None:
    status, _, message = error(send(b'{"prompt": "p"}', {} if kind is None else {"Content-Type": kind}))
    assert status == 415
    assert ("no content type" if kind is None else f"'{kind.split(';')[0]}'") in message
    for known in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"):
        assert send(b'{"prompt": "p"}', {"Content-Type": known}).status_code == 200


def test_a_failure_of_ours_is_json_too() -> None:
    backend = FakeBackend()
    backend.plan["max_prompt_tokens"] = 64

    async def call() -> httpx.Response:
        runs, client = serving(backend)
        runs.submit = None  # type: ignore[assignment,method-assign]
        async with client() as http:
            http._transport.raise_app_exceptions = False  # type: ignore[attr-defined]
            return await http.post("/v1/completions", json={"prompt": "p"})

    status, _, message = error(asyncio.run(call()))
    assert (status, message) == (500, "the server failed: TypeError; report it")


def test_a_failure_of_ours_ends_a_stream_as_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(answer: Any) -> AsyncIterator[Any]:
        yield {"choices": []}
        raise KeyError("ours")

    monkeypatch.setattr("tiermoe.cluster.api.answers.Answer.chunks", fails)
    response = send(b'{"prompt": "p", "stream": true}')
    _, failure = events(response)
    assert failure["error"]["message"] == "the server failed: KeyError; report it"


def test_bodies_of_too_many_values_are_refused_and_lists_of_ids_are_not() -> None:
    ids = {"prompt": [[1] * 4096] * 128}
    assert parse(json.dumps(ids).encode(), 4096) == ids
    text = {"prompt": 'a,\\"' * 600_000}
    assert parse(json.dumps(text).encode(), 4096) == text
    with pytest.raises(ApiError, match="more than 544288 values"):
        parse(b"[" + b"1," * 600_000 + b"1", 4096)
    with pytest.raises(ApiError, match="30000 token ids exceed the limit of 4096"):
        parse(json.dumps({"prompt": [1] * 30_000}).encode(), 4096)
    for many in ([True] * 30_000, [[1]] * 30_000, {str(i): 0 for i in range(30_000)}, [[[0.5] * 100] * 100] * 3):
        with pytest.raises(ApiError, match="more than 20000 values"):
            parse(json.dumps({"messages": many}).encode(), 4096)


@pytest.mark.parametrize(
    ("form", "item"),
    [('{"prompt": "%s', '\\"'), ('{"prompt": [%s1]}', "[" * 99 + "]" * 99 + ","), ('{"prompt": [%s1]}', "[],"),
     ('{"prompt": {%s"a": 1}}', '"a":1,'), ('{"prompt": [%s1]}', '"",')],
)  # fmt: skip
def test_what_a_body_holds_is_counted_before_it_is_parsed(
    form: str, item: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By no regular expression: 0.6 MB of escapes in a string without an end held the interpreter's lock for 17 s, and
    lists in lists, which have few commas, for 2 s."""
    monkeypatch.setattr(bodies, "from_json", lambda *_, **__: pytest.fail("parsed") if item != '\\"' else {})
    content = [(form % (item * (size // len(item)))).encode() for size in (_BIG // 4, _BIG)]
    took_s = []
    for data in content:
        begin_s = time.process_time()
        with contextlib.suppress(ApiError):
            parse(data, 4096)
        took_s.append(time.process_time() - begin_s)
    assert took_s[1] < max(0.3, 12 * took_s[0])


@pytest.mark.parametrize(
    "text",
    [b'["a\\\\", "b", [1, {"c:[{,": 2}]]', b'{"\\"": ["\\\\\\"[,", []]}', b'"\\u0022,"', b'[",", ",,", [[], {}]]'],
)
def test_signs_inside_strings_are_not_counted(text: bytes) -> None:
    """Whatever their escapes; of each kind of sign the text has as many as its values say."""

    def count(value: Any, sign: str) -> int:
        inner = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
        own = {",": max(0, len(inner) - 1), ":": len(inner) * isinstance(value, dict), "[": isinstance(value, list),
               "{": isinstance(value, dict)}[sign]  # fmt: skip
        return own + sum(count(member, sign) for member in inner)

    most = max(count(json.loads(text), sign) for sign in ":[{,")
    long = text + b" " * 100
    assert bodies.exceeded(long, most) is None or most == 0
    assert not most or bodies.exceeded(long, most - 1) == most - 1


@pytest.mark.parametrize(
    ("body", "more"),
    [
        (ChatBody, {"messages": [{"content": 3}] * 6000}), (ChatBody, {"messages": [3.5] * 9000}),
        (ChatBody, {"messages": [{"role": "user", "content": [{"type": "x"}] * 6000}]}),
        (ChatBody, {"messages": [{"role": "user", "content": "x"} | dict.fromkeys(map(str, range(9000)), 1)]}),
        (ChatBody, {"messages": [{"role": "a", "tool_calls": [{"i": 1}] * 6000}]}),
        (ChatBody, dict.fromkeys(map(str, range(9000)), 1)), (ChatBody, {"tools": [{"type": "f"}] * 100}),
        (ChatBody, {"documents": [1] * 9000}), (CompletionBody, {"stop": [True] * 9000}),
        (CompletionBody, {"stop_token_ids": [1.5] * 9000}), (CompletionBody, {"guided_choice": [1] * 9000}),
        (ChatBody, {"reasoning": dict.fromkeys(map(str, range(9000)), 1)}),
        (ChatBody, {"thinking": dict.fromkeys(map(str, range(9000)), 1)}),
        (ChatBody, {"tool_choice": dict.fromkeys(map(str, range(9000)), 1)}),
        (CompletionBody, {"logit_bias": dict.fromkeys(map(str, range(9000)), "x")}),
        (CompletionBody, {"structured_outputs": {"choice": [1] * 9000}}),
        (ResponsesBody, {"input": [{"role": 3}] * 6000}),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_one_finding_refuses_a_body(body: type[BaseModel], more: dict[str, Any]) -> None:
    """A finding for each of 19,000 names took a quarter of a second under the interpreter's lock."""
    first = {"messages": [{"role": "user", "content": "x"}]} if body is ChatBody else {"prompt": "p"}
    with pytest.raises(ValidationError) as caught:
        body.model_validate(({} if body is ResponsesBody else first) | more)
    assert caught.value.error_count() < 12


def test_arguments_of_calls_have_as_many_values_as_a_body() -> None:
    """They are JSON in a string of the body, where its own count does not see them."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [%s1]}' % ("[]," * 9000)}}
    messages = [{"role": "assistant", "tool_calls": [call]}] * 3
    # within a string that another call's arguments left open, they were not seen
    for opened in ("", '{"a": "', '{"a": "\\\\\\"', '{"\\'):
        broken = [{"role": "assistant", "tool_calls": [call | {"function": {"name": "f", "arguments": opened}}]}]
        status, param, message = error(post("/v1/chat/completions", {"messages": [*broken, *messages]}))
        assert (status, param) == (400, "messages")
        assert "arguments of calls hold more than 20000 values" in message


@pytest.mark.parametrize(
    ("form", "item"),
    [('{"prompt": "%s"}', "the quick brown "), ('{"prompt": "%s', '\\"'),
     ('{"prompt": [%s1]}', "1,"), ('{"prompt": [%strue]}', "true,"),
     ('{"prompt": [%s[]]}', "[],"), ('{"prompt": [%s{}]}', "{},"), ('{"messages": [%s0]}', '{"role": 0},'),
     ('{"%s": "p"}', "a"), ('{%s"prompt": "p"}', '"name": {"a": 0},')],
)  # fmt: skip
def test_no_body_holds_the_event_loop(form: str, item: str) -> None:
    """3.9 MB of `true` took 26 s of validation on the event loop, and a text of that size 22 s of its tokenizer."""
    path = "/v1/chat/completions" if "messages" in form else "/v1/completions"
    content = (form % (item * (_BIG // len(item)))).encode()

    async def call(http: httpx.AsyncClient) -> tuple[httpx.Response, float]:
        work = asyncio.ensure_future(http.post(path, content=content, headers=_JSON))
        longest_s, last_s = 0.0, time.thread_time()
        while not work.done():
            await asyncio.sleep(0.001)
            longest_s, last_s = max(longest_s, time.thread_time() - last_s), time.thread_time()
        return work.result(), longest_s

    response, longest_s = ask(FakeBackend(), call)
    assert response.status_code == 400
    assert longest_s < 0.25  # seconds of the loop's thread


def test_the_longest_token_bounds_a_text() -> None:
    assert longest_token(byte_tokenizer()) == len("<end>")
    for change in (normalizers.Strip(), normalizers.Replace("ab", "a")):
        tokenizer = byte_tokenizer()
        tokenizer.normalizer = change
        assert longest_token(tokenizer) is None
    tokenizer = byte_tokenizer()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])
    assert longest_token(tokenizer) == 4 * len("<end>")
    words = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    assert longest_token(words) is None


def test_a_long_text_is_refused_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("tokenized")

    async def call() -> None:
        model = ServedModel("fake", {"max_prompt_tokens": 64}, byte_tokenizer(), None, LimitSettings())
        monkeypatch.setattr(model, "_encode", refuse)
        with pytest.raises(ApiError) as caught:
            await model.prompt_ids("x" * (64 * 5 + 1))
        assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")

    asyncio.run(call())


def test_a_long_text_is_tokenized_without_the_interpreters_lock() -> None:
    async def call() -> int:
        model = ServedModel("fake", {"max_prompt_tokens": 10**7}, byte_tokenizer(), None, LimitSettings())
        work = asyncio.ensure_future(model.prompt_ids("the quick brown " * 30_000))
        turns = 0
        while not work.done():
            await asyncio.sleep(0)
            turns += 1
        assert len(work.result()) == 16 * 30_000
        return turns

    assert asyncio.run(asyncio.wait_for(call(), 60)) > 1000


def test_a_series_of_short_texts_lets_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 prompts of 2 KB each, with `echo`, held the event loop for over a second."""

    async def call() -> None:
        model = ServedModel("fake", {"max_prompt_tokens": 2**14}, byte_tokenizer(), None, LimitSettings())
        work = asyncio.ensure_future(model.prompt_ids("x"))
        await asyncio.sleep(0)
        assert not work.done()  # others have had a turn
        assert await work == (120,)
        threads: list[bool] = []

        def starts(*_: Any) -> tuple[int, ...]:
            threads.append(threading.current_thread() is threading.main_thread())
            return ()

        monkeypatch.setattr(model, "_starts", starts)
        for count in (10, 2000):
            await model.echo_of("x" * count, [120] * count)
        assert threads == [True, False]

    asyncio.run(asyncio.wait_for(call(), 60))


def test_short_texts_pass_long_ones_and_the_long_are_bounded() -> None:
    async def call() -> None:
        offload, over = Offload(), threading.Event()
        waiting = [asyncio.ensure_future(offload.run(_BIG, over.wait)) for _ in range(64)]
        await asyncio.sleep(0)
        assert await offload.run(1000, lambda: "inline") == "inline"
        assert await offload.run(60_000, lambda: "short") == "short"
        with pytest.raises(ApiError, match="64 long texts wait"):
            await offload.run(_BIG, over.wait)
        for task in waiting[1:]:  # their clients have left
            task.cancel()
        await asyncio.gather(*waiting[1:], return_exceptions=True)
        last = asyncio.ensure_future(offload.run(_BIG, lambda: "long"))
        over.set()
        assert await last == "long"
        offload.close()

    asyncio.run(asyncio.wait_for(call(), 60))


@pytest.mark.parametrize(
    ("coding", "status"), [("identity", 200), ("", 200), ("gzip", 415), ("deflate", 415), ("identity, gzip", 415)]
)
def test_a_compressed_body_is_refused(coding: str, status: int) -> None:
    headers = _JSON | {"Content-Encoding": coding}
    response = ask(
        FakeBackend(), lambda http: http.post("/v1/completions", content=b'{"prompt": "hi"}', headers=headers)
    )
    assert response.status_code == status
    assert ("accept-encoding" in response.headers) == (status == 415)


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/models"), ("GET", "/health"), ("GET", "/ready"), ("GET", "/metrics"),
                         ("GET", "/version"), ("GET", "/v1/models/fake"),
                         ("HEAD", "/health"), ("POST", "/v1/completions"), ("POST", "/tokenize")],
)  # fmt: skip
def test_a_slash_at_the_end_means_nothing(method: str, path: str) -> None:
    """`/v1/models/` was the model with an empty name, and others were redirects, which lose a body for some clients."""
    for slashes in ("/", "//"):
        response = ask(
            FakeBackend(),
            lambda http, s=slashes: http.request(method, path + s, json={"prompt": "p"} if method == "POST" else None),
        )
        assert response.status_code == 200, response.text
    assert error(ask(FakeBackend(), lambda http: http.request("GET", "/v1/model/")))[0] == 404
