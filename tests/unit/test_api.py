"""The server over a backend that answers from a table: completions, chats and their streams."""

from __future__ import annotations

import math
from typing import Any

import pytest
from api_calls import ask, chat, complete, events, post
from fake_backend import EOS, FakeBackend

from tiermoe.cluster.api.schema import finite


def test_a_completion() -> None:
    answer = complete({"prompt": "hi", "model": "fake"})
    assert answer["object"] == "text_completion"
    assert answer["model"] == "fake"
    assert answer["choices"] == [{"index": 0, "text": "HI", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def test_prompts_as_text_and_as_ids_alone_and_in_lists() -> None:
    ids = list(b"hi")
    for prompt in ("hi", ids, ["hi"], [ids]):
        assert complete({"prompt": prompt})["choices"][0]["text"] == "HI"
    answer = complete({"prompt": ["a", "b"], "n": 2})
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "A"), (1, "A"), (2, "B"), (3, "B")]
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 8, "total_tokens": 10}


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
    defaults = backend.requests[0].sampling
    assert (defaults.max_tokens, defaults.temperature, defaults.seed) == (16, 1.0, None)


def test_a_stop_string_ends_the_request_in_the_runtime() -> None:
    backend = FakeBackend({"p": b"one two three"}, step=3)
    answer = complete({"prompt": "p", "stop": ["zzz", " tw"]}, backend)
    assert answer["choices"][0] == {"index": 0, "text": "one", "logprobs": None, "finish_reason": "stop"}
    assert answer["usage"]["completion_tokens"] == 6
    assert backend.cancelled == [backend.requests[0].request_id]


def test_length_is_said() -> None:
    answer = complete({"prompt": "hello", "max_tokens": 3})
    assert answer["choices"][0] == {"index": 0, "text": "HEL", "logprobs": None, "finish_reason": "length"}


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
    chunks = events(post("/v1/completions", body))
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


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


def test_no_token_at_all_but_the_prompts_scores() -> None:
    answer = complete({"prompt": "ab", "max_tokens": 0, "logprobs": 0, "echo": True})
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.98]
    assert answer["usage"]["completion_tokens"] == 0


def test_a_token_that_cannot_come_is_json() -> None:
    assert (finite(-math.inf), finite(-2.5)) == (-9999.0, -2.5)


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


def test_a_chat_fills_the_context_unless_told() -> None:
    backend = FakeBackend()
    chat({}, backend)
    assert backend.requests[0].sampling.max_tokens == 62


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
