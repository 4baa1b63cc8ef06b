"""Requests that the server refuses, by the parameter's name, and what it says when the runtime fails."""

from __future__ import annotations

from typing import Any

import pytest
from api_calls import ask, chat, complete, error, events, post
from fake_backend import FakeBackend


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
    response = post("/v1/chat/completions", {"messages": [{"role": "x", "content": ""}]}, template=template)
    status, param, message = error(response)
    assert (status, param) == (400, "messages")
    assert words in message


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [257]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "x" * 64}, "prompt"),
        ({"prompt": "x" * 60}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"best_of": 2}, "best_of"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"suffix": "x"}, "suffix"),
        ({"temprature": 1}, "temprature"),
    ],
    ids=str,
)
def test_refused_with_the_parameters_name(change: dict[str, Any], param: str) -> None:
    backend = FakeBackend()
    status, found, message = error(post("/v1/completions", {"prompt": "p"} | change, backend))
    assert (status, found) == (400, param), message
    assert backend.requests == []


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"echo": True}, "echo"),
    ],
    ids=str,
)
def test_chats_refused_with_the_parameters_name(change: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]} | change
    assert error(post("/v1/chat/completions", body))[:2] == (400, param)


def test_values_that_mean_nothing_are_no_reason_to_refuse() -> None:
    body = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "best_of": 1, "suffix": None}
    assert complete({"prompt": "hi"} | body)["choices"][0]["text"] == "HI"
    assert chat({"tools": [], "response_format": {"type": "text"}, "parallel_tool_calls": True})["choices"]


def test_other_refusals() -> None:
    assert error(post("/v1/completions", {"prompt": "p", "model": "other"}))[:2] == (404, "model")
    assert error(ask(FakeBackend(), lambda http: http.get("/v1/nothing")))[0] == 404
    assert error(ask(FakeBackend(), lambda http: http.get("/v1/completions")))[0] == 405
    broken = ask(FakeBackend(), lambda http: http.post("/v1/completions", content=b'{"prompt": ', headers={
        "content-type": "application/json"}))  # fmt: skip
    assert error(broken)[0] == 400
    assert "JSON" in error(broken)[2]


def test_the_runtimes_failure_is_503_and_in_a_stream_an_event() -> None:
    backend = FakeBackend()
    backend.failure = "the worker died"
    assert error(post("/v1/completions", {"prompt": "hi"}, backend))[0] == 503
    *_, last = events(post("/v1/completions", {"prompt": "hi", "stream": True}, backend))
    assert "the worker died" in last["error"]["message"]
