"""The HTTP server over canned events: completions and chats, refusals, and what surrounds requests."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fake_api import EOS, WAIT_S, FakeBackend, ask, chat, complete, error, events, post, serving

from tiermoe.actors.requests import GenerationRequest, SamplingParams, TokenEvent
from tiermoe.cluster.api import routes
from tiermoe.cluster.api.refusals import ApiError
from tiermoe.cluster.api.schema import finite
from tiermoe.cluster.api.settings import LimitSettings
from tiermoe.errors import RequestError


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
    for prompt in ("hi", ids, ["hi"], [ids]):
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


def test_what_the_runtime_is_asked() -> None:
    backend = FakeBackend()
    body = {"prompt": "p", "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "seed": -1, "n": 2,
            "min_tokens": 3, "ignore_eos": True, "logprobs": 4, "user": "me"}  # fmt: skip
    complete(body, backend)
    first, second = (request.sampling for request in backend.requests)
    assert (first.max_tokens, first.temperature, first.top_p, first.top_k) == (7, 0.5, 0.9, 0)
    assert (first.min_tokens, first.ignore_eos, first.logprobs, first.prompt_logprobs) == (3, True, 4, None)
    assert (first.seed, second.seed) == (2**64 - 1, 0)  # each choice draws for itself
    assert len({request.request_id for request in backend.requests}) == 2
    backend = FakeBackend()
    complete({"prompt": "p", "temperature": None}, backend)
    assert backend.requests[0].sampling == SamplingParams(16, temperature=1.0)
    backend = FakeBackend()
    shaped = {"min_p": 0.1, "presence_penalty": -2, "frequency_penalty": 0.5, "repetition_penalty": 1.2,
              "stop_token_ids": [7]}  # fmt: skip
    complete({"prompt": "p", "logit_bias": {"5": -100, "6": 2.5}} | shaped, backend)
    asked = backend.requests[0].sampling
    assert {name: getattr(asked, name) for name in shaped} == shaped | {"stop_token_ids": (7,)}
    assert asked.logit_bias == ((5, -100.0), (6, 2.5))


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


def test_usage_in_a_stream() -> None:
    body = {"prompt": "hi", "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(post("/v1/completions", body))
    assert all(chunk["usage"] is None for chunk in chunks)
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert (last["choices"], last["usage"]) == ([], usage | {"prompt_tokens_details": {"cached_tokens": 0}})


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


def test_scores_are_written_a_choice_at_a_time_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: the scores of 128 prompts were written in one piece on the event loop, which answered nobody meanwhile.
    """
    written: list[tuple[int, bool]] = []

    def dumps(value: Any, **options: Any) -> str:
        text = json.dumps(value, **options)
        on_loop = threading.current_thread() is threading.main_thread()
        written.append((text.count('"token_logprobs"'), on_loop))
        return text

    monkeypatch.setattr(routes, "json", SimpleNamespace(dumps=dumps))
    body = {"prompt": ["ab", "é"], "n": 2, "max_tokens": 2, "logprobs": 1, "echo": True}
    answer = complete(body)
    scored = [on_loop for count, on_loop in written if count]
    assert (len(answer["choices"]), scored, max(written)[0]) == (4, [False] * 4, 1)
    monkeypatch.undo()
    again = complete(body)
    assert (again["choices"], again["usage"]) == (answer["choices"], answer["usage"])


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


def test_the_template_makes_the_prompt() -> None:
    template = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}{{ eos_token }}{% endfor %}a:"
    backend = FakeBackend({"": b""})
    body = {"messages": [{"role": "user", "content": "hi"}]}
    found = ask(FakeBackend(), lambda http: http.post("/tokenize", json=body), template=template).json()
    assert found["tokens"] == [*b"u:hi", EOS, *b"a:"]
    assert backend.requests == []


def test_variables_for_the_template() -> None:
    template = "{% if enable_thinking %}think{% else %}do{% endif %}"
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"enable_thinking": True}}
    backend = FakeBackend()
    post("/v1/chat/completions", body, backend, template=template)
    assert bytes(backend.requests[0].prompt_ids) == b"think"
    body["chat_template_kwargs"] = {"messages": []}
    assert error(post("/v1/chat/completions", body, template=template))[:2] == (400, "chat_template_kwargs")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "--chat-template"),
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ messages.__class__.__mro__ }}", "messages"),
        ("{% for i in range(10**9) %}{% endfor %}", "messages"),
    ],
)
def test_chats_that_have_no_prompt(template: str | None, words: str) -> None:
    body = {"messages": [{"role": "x", "content": ""}]}
    status, param, message = error(post("/v1/chat/completions", body, template=template))
    assert (status, param, words in message) == (400, "messages", True), message


# parameter -> values that a completion, or a chat, refuses
_BAD_COMPLETIONS: dict[str, list[Any]] = {
    "prompt": ["", [], [[]], [257], [-1], 5, None, "x" * 64, ["a"] * 129, [True], [["5"]], [[5], [True]]],
    "max_tokens": [-1, "5"],
    "temperature": [-0.1, 2.1], "top_p": [0], "top_k": [-2], "n": [0, 129, True], "logprobs": [21], "min_tokens": [17],
    "seed": [2**64], "stop": [[""], ["a"] * 17], "stream_options": [{"include_usage": True}], "best_of": [2],
    "frequency_penalty": [2.5], "presence_penalty": [-3], "repetition_penalty": [0, 1e-39, 1e39],
    "min_p": [1.1], "cache_salt": ["", 5, "s" * 1025],
    "logit_bias": [{"5": 101}, {"x": 1}, {"-1": 1}, {"257": 1}, [1], {"9" * 30: 1}, {"5": 1, "05": 1}],
    "stop_token_ids": [[257], 5, [-1], [2**70], [1] * 1025], "typical_p": [0.5],
    "mirostat": [2], "use_beam_search": [True], "bad_words": [["x"]], "suffix": ["x"], "temprature": [1],
}  # fmt: skip
_BAD_CHATS: dict[str, list[Any]] = {
    "messages": [[], [{"role": "user"}], [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]],
    "top_logprobs": [2], "max_tokens": [0], "tools": [[{"type": "function"}]], "echo": [True],
    "response_format": [{"type": "xml"}],
}  # fmt: skip
_CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        *(("/v1/completions", {name: value}, name) for name, values in _BAD_COMPLETIONS.items() for value in values),
        ("/v1/completions", {"prompt": "x" * 60}, "max_tokens"),
        ("/v1/completions", {"min_tokens": 1, "stop_token_ids": list(range(257))}, "stop_token_ids"),
        ("/v1/completions", {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        *(("/v1/chat/completions", {name: value}, name) for name, values in _BAD_CHATS.items() for value in values),
        ("/v1/chat/completions", {"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    ],
    ids=str,
)
def test_refused_with_the_parameters_name(path: str, change: dict[str, Any], param: str) -> None:
    backend, body = FakeBackend(), _CHAT if "chat" in path else {"prompt": "p"}
    status, found, message = error(post(path, body | change, backend))
    assert (status, found) == (400, param), message
    assert backend.requests == []


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


def test_values_that_mean_nothing_are_no_reason_to_refuse() -> None:
    body = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "best_of": 1, "suffix": None}
    assert complete({"prompt": "hi"} | body)["choices"][0]["text"] == "HI"
    assert chat({"tools": [], "response_format": {"type": "text"}, "parallel_tool_calls": True})["choices"]
    assert chat({"logprobs": False, "top_logprobs": 0})["choices"]


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


def test_parameters_within_others_are_as_if_they_were_not() -> None:
    """Ollama's `options`, and `extra_body` where a client sends it as it is; what is beside them wins."""
    for name in ("options", "extra_body"):
        backend, body = FakeBackend(), {"prompt": "p", "seed": 3, name: {"seed": 4, "top_k": 5, "num_ctx": 4096}}
        response = post("/v1/completions", body, backend)
        assert (backend.requests[0].sampling.seed, backend.requests[0].sampling.top_k) == (3, 5)
        assert response.headers["warning"] == '299 tiermoe "ignored parameters: num_ctx"'
        assert error(post("/v1/completions", {"prompt": "p", name: {"mirostat": 2}}))[:2] == (400, "mirostat")
        assert error(post("/v1/completions", {"prompt": "p", name: {"tempratur": 1}}))[1] == "tempratur"
        assert post("/v1/completions", {"prompt": "p", name: None}).status_code == 200


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("n_predict", 5, "use 'max_tokens'"), ("repeat_penalty", 1.1, "use 'repetition_penalty'"),
     ("functions", [{"name": "f"}], "use 'tools'"), ("web_search_options", {}, "leave it out"),
     ("plugins", [{"id": "web"}], "leave it out"), ("modalities", ["text", "audio"], "leave it out"),
     ("mirostat", 1, "leave it out"), ("return_token_ids", True, "leave it out")],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_with_what_to_use(name: str, value: Any, words: str) -> None:
    status, param, message = error(post("/v1/chat/completions", _CHAT | {name: value}))
    assert (status, param) == (400, name)
    assert message.endswith(words)


@pytest.mark.parametrize("usage", [True, {"include": True}])
def test_openrouters_usage_is_that_of_a_stream(usage: Any) -> None:
    *_, last = events(post("/v1/completions", {"prompt": "hi", "stream": True, "usage": usage}))
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 5)
    assert "warning" not in post("/v1/completions", {"prompt": "hi", "usage": usage}).headers
    off = events(post("/v1/completions", {"prompt": "hi", "stream": True, "usage": {"include": False}}))
    assert all("usage" not in chunk for chunk in off)


_WHOLE = {"max_tokens": 7.0, "n": 2.0, "top_k": 5.0, "seed": -1.0, "min_tokens": 3.0, "stop_token_ids": [7.0, 8]}


def test_whole_numbers_may_be_written_as_floats() -> None:
    """JSON has one kind of number: JavaScript, Lua and R write 64 as 64.0 or 1e2. They were refused."""
    backend = FakeBackend()
    complete({"prompt": [104.0, 105], "logprobs": 1.0} | _WHOLE, backend)
    first, second = (request.sampling for request in backend.requests)
    assert (first.max_tokens, first.top_k, first.min_tokens, first.logprobs) == (7, 5, 3, 1)
    assert (first.stop_token_ids, backend.requests[0].prompt_ids) == ((7, 8), (104, 105))
    assert (first.seed, second.seed) == (2**64 - 1, 0)
    assert all(type(value) is int for value in (first.max_tokens, first.top_k, first.seed, *first.stop_token_ids))
    assert complete({"prompt": [[104.0], [105.0, 104]]})["usage"]["prompt_tokens"] == 3
    assert chat({"max_completion_tokens": 9.0, "logprobs": True, "top_logprobs": 2.0})["choices"]
    assert post("/v1/responses", {"input": "hi", "max_output_tokens": 2.0}).json()["usage"]["output_tokens"] == 2
    assert post("/detokenize", {"tokens": [104.0]}).json() == {"prompt": "h"}
    written = b'{"prompt": "hi", "max_tokens": 1e1}'
    kind = {"Content-Type": "application/json"}
    response = ask(FakeBackend(), lambda http: http.post("/v1/completions", content=written, headers=kind))
    assert response.status_code == 200


@pytest.mark.parametrize("value", [64.5, 1e300, 2.0**60, -0.5, "64", True, [64]])
@pytest.mark.parametrize("name", ["max_tokens", "n", "seed", "top_k"])
def test_what_is_no_whole_number_is_refused(name: str, value: Any) -> None:
    status, param, message = error(post("/v1/completions", {"prompt": "p", name: value}))
    assert (status, param) == (400, name)
    assert "valid integer" in message


@pytest.mark.parametrize(
    ("part", "kind"),
    [({"type": "image_url", "image_url": {"url": "data:"}}, "images"), ({"type": "input_image"}, "images"),
     ({"type": "input_audio", "input_audio": {}}, "audio"), ({"type": "video_url"}, "videos"),
     ({"type": "file", "file": {}}, "files"), ({"type": "input_file"}, "files")],
)  # fmt: skip
def test_content_that_is_no_text_is_named(part: dict[str, Any], kind: str) -> None:
    content = [{"type": "text", "text": "what is this?"}, part]
    body = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": content}]}
    for path, given, param in (("/v1/chat/completions", body, "messages"), ("/tokenize", body, "messages"),
                               ("/v1/responses", {"input": body["messages"]}, "input")):  # fmt: skip
        status, found, message = error(post(path, given))
        assert (status, found) == (400, param)
        assert f"{kind} are not supported; this server takes text alone" in message


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"content": None, "reasoning_content": "hm"}, ""), ({"content": None}, ""), ({"refusal": "no"}, "no"),
        ({"content": None, "refusal": "no"}, "no"), ({"content": "x", "refusal": None, "function_call": None}, "x"),
        ({"content": None, "tool_calls": None, "audio": None, "reasoning": "hm"}, ""), ({"content": []}, ""),
        ({"content": None, "tool_calls": []}, ""), ({"content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
        ({"tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}, ""),
    ],
)  # fmt: skip
def test_an_answer_without_text_comes_back(message: dict[str, Any], shown: str) -> None:
    backend = FakeBackend()
    messages = [{"role": "user", "content": "u"}, {"role": "assistant"} | message, {"role": "user", "content": "v"}]
    response = post("/v1/chat/completions", {"messages": messages}, backend)
    assert response.status_code == 200, response.text
    assert bytes(backend.requests[0].prompt_ids).decode() == f"u{shown}v"


def test_messages_that_say_nothing_are_refused() -> None:
    for message in ({"role": "user", "content": None}, {"role": "assistant"}, {"role": "tool", "content": None}):
        assert error(post("/v1/chat/completions", {"messages": [message]}))[:2] == (400, "messages")


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}", "developer:be brief;user:hi;"),
        ("{% for m in messages %}{% if m.role in ('system', 'user') %}{{ m.role }}:{{ m.content }};{% endif %}"
         "{% endfor %}", "system:be brief;user:hi;"),
        ("{% for m in messages %}{% if m.role == 'developer' %}{{ raise_exception('no such role') }}{% endif %}"
         "{{ m.role }}:{{ m.content }};{% endfor %}", "system:be brief;user:hi;"),
    ],
)  # fmt: skip
def test_a_developers_message_is_shown_by_every_template(template: str, shown: str) -> None:
    """Templates that do not know the role left it out of the prompt, or refused the chat."""
    backend = FakeBackend()
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}]
    post("/v1/chat/completions", {"messages": messages}, backend, template=template)
    assert bytes(backend.requests[0].prompt_ids).decode() == shown


@pytest.mark.parametrize(
    ("written", "meant"),
    [("temprature", "temperature"), ("modell", "model"), ("strem", "stream"),
     ("max_token", "max_tokens"), ("Top_P", "top_p"), ("qqq", None)],
)  # fmt: skip
def test_a_misspelt_parameter_is_refused_with_the_one_that_was_meant(written: str, meant: str | None) -> None:
    status, param, message = error(post("/v1/completions", {"prompt": "p", written: 1}))
    assert (status, param) == (400, written)
    assert message.endswith(f"did you mean '{meant}'?" if meant else "leave it out")


def test_a_parameter_of_another_route_is_no_misspelling() -> None:
    status, param, message = error(post("/v1/completions", {"prompt": "p", "max_completion_tokens": 1}))
    assert (status, param) == (400, "max_completion_tokens")
    assert message.endswith("not a parameter of this request; leave it out")


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/status", "/v1/models", "/version"])
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


def test_other_refusals() -> None:
    assert error(post("/v1/completions", {"prompt": "p", "model": "other"}))[:2] == (404, "model")
    # guards: a value as long as a body came back whole, in the answer and in the request log
    status, param, message = error(post("/v1/completions", {"prompt": "p", "model": "m" * 60_000}))
    assert (status, param, message[:12], message[-2:]) == (404, "model", "no model 'mm", "e'")
    assert len(message) < 1000
    for path, status in (("/v1/nothing", 404), ("/v1/completions", 405)):
        assert error(ask(FakeBackend(), lambda http, path=path: http.get(path)))[0] == status
    kind = {"content-type": "application/json"}
    # guards: 431 had the type of a failure of the server, at which clients try again
    kinds = {status: ApiError(status, "no").body["error"]["type"] for status in (400, 401, 422, 431, 500, 501, 503)}
    assert kinds == {
        400: "invalid_request_error", 401: "authentication_error", 422: "invalid_request_error",
        431: "invalid_request_error", 500: "server_error", 501: "server_error", 503: "service_unavailable",
    }  # fmt: skip
    broken = ask(FakeBackend(), lambda http: http.post("/v1/completions", content=b'{"prompt": ', headers=kind))
    assert (error(broken)[0], "JSON" in error(broken)[2]) == (400, True)


def test_the_runtimes_failure_is_503_and_in_a_stream_an_event() -> None:
    backend = FakeBackend()
    backend.failure = "the worker died"
    assert error(post("/v1/completions", {"prompt": "hi"}, backend))[0] == 503
    *_, last = events(post("/v1/completions", {"prompt": "hi", "stream": True}, backend))
    assert "the worker died" in last["error"]["message"]


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


def test_request_ids_come_back() -> None:
    def answer(given: str) -> tuple[str, str]:
        body, headers = {"prompt": "p"}, {"X-Request-Id": given}
        response = ask(FakeBackend(), lambda http: http.post("/v1/completions", json=body, headers=headers))
        return response.headers["x-request-id"], response.json()["id"]

    assert answer("mine-1") == ("mine-1", "cmpl-mine-1")
    assert answer("not a word")[0] != "not a word"


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
    assert error(refused)[0] == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert others == [200, 200]
    assert error(post("/v1/completions", {"prompt": "p", "n": 3}, FakeBackend(max_requests=1),
                      limits=LimitSettings(waiting=1)))[0] == 429  # all choices or none  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(stream: bool) -> None:
    """Below HTTP: what the server sees is a disconnect while the answer is held."""

    async def run() -> None:
        backend = FakeBackend()
        backend.hold = asyncio.Event()
        service, client = serving(backend)
        body = json.dumps({"prompt": "hello", "stream": stream, "n": 2}).encode()
        inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        inbox.put_nowait({"type": "http.request", "body": body, "more_body": False})
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
            "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
            "scheme": "http", "server": ("test", 80), "client": ("test", 1),
            "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip

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

    asyncio.run(asyncio.wait_for(run(), WAIT_S))


def test_tokenize_and_back() -> None:
    found = post("/tokenize", {"prompt": "hé"}).json()
    assert found == {"tokens": [0x68, 0xC3, 0xA9], "count": 3, "max_model_len": 64}
    assert post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "hé"}
    assert error(post("/tokenize", {}))[0] == 400


def test_models_version_and_readiness() -> None:
    async def call(http: httpx.AsyncClient) -> list[Any]:
        models = (await http.get("/v1/models")).json()
        assert models["data"][0]["id"] == "fake"
        assert (await http.get("/v1/models/fake")).json() == models["data"][0]
        assert error(await http.get("/v1/models/org/other"))[0] == 404
        assert "tiermoe" in (await http.get("/version")).json()
        ready = await http.get("/ready")
        backend.failure = "the worker died"
        return [ready.status_code, (await http.get("/ready")).status_code, (await http.get("/health")).status_code]

    backend = FakeBackend()
    assert ask(backend, call) == [200, 503, 200]
