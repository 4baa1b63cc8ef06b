"""`/v1/messages`: what is refused and how, what the model is shown, what the answer and its events are."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_api import EOS, FakeBackend, ask, named_events, post, template_of

from tiermoe.cluster.api import anthropic

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
_HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
_BODY: dict[str, Any] = {"max_tokens": 50, "messages": _HI}
_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}
_TOOLS = [{"name": "f", "input_schema": {"type": "object"}}]
_TEMPLATE = template_of('<tool_call>{"name": "{{ f.name }}", "arguments": {{ json }}}</tool_call>')


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*blocks]}]}


_CALL = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"x": 1}}
_CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def result(**more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1"} | more


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words} | more


def turns(*given: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in given]}


# what the body has, words of the message
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "'max_tokens'"), ({"max_tokens": 0}, "'max_tokens'"), ({"messages": []}, "'messages'"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "'messages.0.role'"),
    ({"messages": [{"role": "user"}]}, "'messages.0.content' is missing"),
    ({"messages": [{"role": "user", "content": 5}]}, "'messages.0.content'"),
    (user(_IMAGE), "'messages.0.content.0': images are not supported"),
    (user({"type": "tool_result", "tool_use_id": "t", "content": [_IMAGE]}), "images are not supported"),
    (user({"type": "document", "source": {}}), "files are not supported"), ({"system": [_IMAGE]}, "'system': images"),
    (user({"type": "text", "text": "x", "colour": 1}), "colour"), (user({"type": "server_tool_use"}), "'text'"),
    (user({"type": "tool_use", "id": "t", "name": "f", "input": 5}), "input"),
    ({"foo": 1}, "'foo' is not a parameter"), ({"temprature": 1}, "did you mean 'temperature'?"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305', are not supported"),
    ({"tools": [{"name": "x y", "input_schema": {}}]}, "'tools'"), ({"tools": [{"name": "x"}]}, "input_schema"),
    ({"tools": _TOOLS * 1025}, "'tools'"), ({"tools": _TOOLS, "tool_choice": {"type": "tool"}}, "'tool_choice'"),
    ({"tools": _TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "no tool 'g'"),
    ({"tool_choice": {"type": "any"}}, "there are no tools"),
    ({"tool_choice": {"type": "tool", "name": "f"}}, "no tool 'f'"),
    ({"tool_choice": {"type": "all"}}, "'tool_choice'"), ({"thinking": {"type": "on"}}, "'thinking'"),
    ({"stop_sequences": ["a"] * 17}, "17 stop strings"), ({"stop_sequences": ["a"], "stop": "b"}, "not both"),
    ({"output_config": {"format": {"type": "xml"}}}, "'output_config.format'"), ({"container": "c"}, "'container'"),
    ({"mcp_servers": [{"name": "m"}]}, "'mcp_servers'"), ({"n": 2}, "'n'"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "exceed the limit"),
    # what would be left out, or leaves nothing, which was a 500
    (user(), "have no content; give text"), ({"messages": [{"role": "assistant", "content": ""}]}, "have no content"),
    (user(text("x"), _CALL), "'messages': a block of type tool_use in a message of role user; put it into one of role"),
    (user({"type": "thinking", "thinking": "x"}), "a block of type thinking"),
    (turns(("assistant", [result(content="x")]), ("user", "y")), "a block of type tool_result"),
    (turns(("user", "x"), ("assistant", [text("y"), _CALL])), "give its result behind it"),
]  # fmt: skip


def failed(response: httpx.Response) -> tuple[int, str, str]:
    """The status, type and message of an error in Anthropic's form."""
    body = response.json()
    assert (set(body), body["type"], set(body["error"])) == ({"type", "error"}, "error", {"type", "message"})
    assert response.headers["request-id"] == response.headers["x-request-id"]
    return response.status_code, body["error"]["type"], body["error"]["message"]


@pytest.mark.parametrize(("body", "words"), REFUSED, ids=[str(body)[:50] for body, _ in REFUSED])
def test_refused(body: dict[str, Any], words: str) -> None:
    for stream in (False, True):
        backend = FakeBackend()
        status, kind, message = failed(post(MESSAGES, _BODY | body | {"stream": stream}, backend, template=_TEMPLATE))
        assert (status, kind, words in message) == (400, "invalid_request_error", True), message
        assert backend.requests == []


def test_other_errors_have_its_form(tmp_path: Path) -> None:
    assert failed(post(MESSAGES, _BODY | {"model": "claude"}))[:2] == (404, "not_found_error")
    assert failed(ask(FakeBackend(), lambda http: http.get(MESSAGES)))[0] == 405
    assert failed(post(f"{MESSAGES}/batches", _BODY))[:2] == (404, "not_found_error")
    assert failed(ask(FakeBackend(), lambda http: http.post(MESSAGES, content=b"x" * 2**23)))[1] == "request_too_large"
    backend = FakeBackend()
    backend.failure = "a rank is gone"
    assert failed(post(MESSAGES, _BODY, backend))[:2] == (503, "overloaded_error")
    last = named_events(post(MESSAGES, _BODY | {"stream": True}, backend))[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")


def test_keys(tmp_path: Path) -> None:
    """Anthropic's clients send a key of their own header, a bearer token, or both."""
    file = tmp_path / "keys"
    file.write_text("right\n")
    file.chmod(0o600)
    for headers, status in (
        ({"x-api-key": "right"}, 200), ({"x-api-key": "wrong"}, 401), ({}, 401),
        ({"authorization": "Bearer right"}, 200), ({"authorization": "Bearer wrong", "x-api-key": "right"}, 200),
        ({"authorization": "Bearer right", "x-api-key": "wrong"}, 200), ({"x-api-key": "Bearer right"}, 401),
    ):  # fmt: skip
        response = post(MESSAGES, _BODY, headers={"anthropic-version": "2023-06-01"} | headers, keys=file)
        assert response.status_code == status, headers
        if status == 401:
            assert failed(response)[1] == "authentication_error"


_NAMED = (
    "{% for t in tools or [] %}{{ t.function.name }}({{ t.function.description }});{% endfor %}{% for m in messages %}"
    "<{{ m.role }}{{ ' ' + m.name if m.name }}>{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{\"name\": \"{{ c.function.name }}\", \"arguments\": "
    "{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ '-' if enable_thinking is false }}"
)
_F = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
# what the body has, what the model is shown, parameters that are ignored by name
SHOWN: list[tuple[dict[str, Any], str, str]] = [
    ({}, "<user>hi<assistant>", ""), ({"system": "s"}, "<system>s<user>hi<assistant>", ""),
    ({"system": [text("a", **_CACHED), text("b")]}, "<system>a\nb<user>hi<assistant>", "messages.cache_control"),
    ({"system": [text("x-anthropic-billing-header: cc_version=2; cch=1a;"), text("b")]},
     "<system>b<user>hi<assistant>", ""),
    ({"system": [], "tools": []}, "<user>hi<assistant>", ""),
    (user(text("a"), text("b", **_CACHED)), "<user>a\nb<assistant>", "messages.cache_control"),
    (turns(("user", "a"), ("user", [text("b")])), "<user>a\nb<assistant>", ""),
    (turns(("user", "a"), ("system", "s"), ("user", "b")), "<user>a<system>s<user>b<assistant>", ""),
    ({"tools": [_TOOLS[0] | {"description": "d", "strict": True, "eager_input_streaming": True} | _CACHED]},
     "f(d);<user>hi<assistant>", "messages.cache_control, messages.eager_input_streaming"),
    ({"tools": _TOOLS, "tool_choice": {"type": "none"}}, "<user>hi<assistant>", ""),
    # servers of tools bring hundreds
    ({"tools": _TOOLS * 300, "tool_choice": {"type": "none"}}, "<user>hi<assistant>", ""),
    ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "<user>hi<assistant>",
     "output_config.task_budget"),
    (turns(("user", "a"), ("assistant", [{"type": "thinking", "thinking": "hm", "signature": "s"}, text("so"), _CALL]),
           ("user", [result(content=[text("b"), text("c")]), text("d")])),
     f"<user>a<assistant>[hm]so{_F}<tool f>b\nc<user>d<assistant>", ""),
    (turns(("user", "a"), ("assistant", [_CALL | {"caller": {"type": "direct"}}]), ("user", [result(is_error=True)])),
     f"<user>a<assistant>{_F}<tool f><assistant>", "messages.caller, messages.is_error"),
    (turns(("user", "a"), ("assistant", [{"type": "redacted_thinking", "data": "x"}, text("b")]), ("user", "c")),
     "<user>a<assistant>b<user>c<assistant>", ""),
    (turns(("user", "a"), ("assistant", "So")), "<user>a<assistant>So", ""),  # to be gone on with
    *((turns(("user", "a"), ("assistant", nothing)), "<user>a<assistant>", "")
      for nothing in ("", [], [text("")], [{"type": "redacted_thinking", "data": "x"}])),
    ({"thinking": {"type": "disabled"}}, "<user>hi<assistant>-", ""),
    ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "none"}}, "<user>hi<assistant>-", ""),
    ({"metadata": {"user_id": "u"}, "service_tier": "auto", "speed": "fast", "context_management": {"edits": [1]}},
     "<user>hi<assistant>", "metadata, service_tier, speed, context_management"),
    ({"stop_sequences": [], "mcp_servers": [], "container": None, "context_management": None},
     "<user>hi<assistant>", ""),
]  # fmt: skip


@pytest.mark.parametrize(("body", "shown", "ignored"), SHOWN, ids=[str(body)[:50] for body, *_ in SHOWN])
def test_what_the_model_is_shown(body: dict[str, Any], shown: str, ignored: str) -> None:
    backend = FakeBackend()
    backend.plan["max_prompt_tokens"] = 400
    response = post(f"{MESSAGES}?beta=true", _BODY | body, backend, template=_NAMED)
    assert response.status_code == 200, response.text
    assert bytes(token for token in backend.requests[0].prompt_ids if token < EOS).decode() == shown
    warning = f'299 tiermoe "ignored parameters: {ignored}"' if ignored else None
    assert response.headers.get("warning") == warning
    counted = post(COUNT, {"messages": _HI} | body, backend, template=_NAMED)
    assert counted.json() == {"input_tokens": len(backend.requests[0].prompt_ids)}
    assert len(backend.requests) == 1


def test_tokens_are_counted_beyond_the_models_limit() -> None:
    """A client that asks wants to know by how much."""
    long = [{"role": "user", "content": "x" * 20_000}]
    response = post(COUNT, {"messages": long}, FakeBackend(), template=_NAMED)
    assert response.status_code == 200
    assert response.json()["input_tokens"] > 20_000
    assert post(MESSAGES, {"messages": long, "max_tokens": 1}, FakeBackend(), template=_NAMED).status_code == 400



def answered(body: dict[str, Any], answer: str, cached: int = 0) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole answer, and the events of the same request."""
    found = []
    for stream in (False, True):
        backend = FakeBackend({"f;<|user|>hi<|end|><|assistant|>": answer.encode(), "<|user|>hi<|end|><|assistant|>":
                               answer.encode()}, step=3, cached=cached)  # fmt: skip
        backend.plan["max_prompt_tokens"] = 300
        found.append(post(MESSAGES, _BODY | {"max_tokens": 200, "stream": stream} | body, backend, template=_TEMPLATE))
    return found[0].json(), named_events(found[1])


_SAID = "so " + _F
# what the body has, the answer's text, its blocks, why it ended, which sequence ended it
ANSWERED: list[tuple[dict[str, Any], str, list[dict[str, Any]], str, str | None]] = [
    ({}, "Hello", [text("Hello")], "end_turn", None), ({}, "", [], "end_turn", None),
    ({"max_tokens": 3}, "Hello", [text("Hel")], "max_tokens", None),
    ({"max_tokens": 32_000}, "x" * 400, [text("x" * 270)], "model_context_window_exceeded", None),
    ({"stop_sequences": ["q", "lo", ""]}, "Hello", [text("Hel")], "stop_sequence", "lo"),
    ({"tools": _TOOLS}, _SAID, [text("so"), {"type": "tool_use", "name": "f", "input": {"x": 1}}], "tool_use", None),
    ({"tools": _TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, _F * 2,
     [{"type": "tool_use", "name": "f", "input": {"x": 1}}], "tool_use", None),
    ({"tools": _TOOLS}, _F * 2, [{"type": "tool_use", "name": "f", "input": {"x": 1}}] * 2, "tool_use", None),
    ({"tools": _TOOLS}, "<tool_call>{no</tool_call>", [text("<tool_call>{no</tool_call>")], "end_turn", None),
]  # fmt: skip


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of events, whose order is checked: each block begins, grows and ends."""
    first, *rest = (event for event in events if event["type"] != "ping")
    message, grown, is_open = first["message"], "", False
    assert (first["type"], message["content"], message["stop_reason"]) == ("message_start", [], None)
    for event in rest[:-2]:
        kind = event["type"].removeprefix("content_block_")
        assert is_open == (kind != "start")
        assert event["index"] == len(message["content"]) - is_open
        if kind == "start":
            message["content"].append(event["content_block"])
            grown, is_open = "", True
        elif kind == "delta":
            (name,) = event["delta"].keys() - {"type"}
            block = message["content"][-1]
            if name == "partial_json":
                grown += event["delta"][name]
            else:
                block[name] += event["delta"][name]
        else:
            is_open = False
            if block["type"] == "tool_use":
                block["input"] = json.loads(grown)
    assert [event["type"] for event in rest[-2:]] == ["message_delta", "message_stop"]
    return message | rest[-2]["delta"] | {"usage": rest[-2]["usage"]}


@pytest.mark.parametrize(("body", "answer", "blocks", "reason", "stop"), ANSWERED, ids=lambda it: str(it)[:40])
def test_the_answer_and_its_events(
    body: dict[str, Any], answer: str, blocks: list[dict[str, Any]], reason: str, stop: str | None
) -> None:
    whole, events = answered(body, answer, cached=4)
    streamed = joined(events)
    for message in (whole, streamed):
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)
        ids = [block.pop("id") for block in message["content"] if block["type"] == "tool_use"]
        assert len(set(ids)) == len(ids)
        assert all(name.startswith("toolu_") for name in ids)
        assert message["content"] == blocks
    prompt = len(("f;" if "tools" in body else "") + "<|user|>hi<|end|><|assistant|>")
    assert whole["usage"] == streamed["usage"]
    cached = 4 if answer else 0
    assert (whole["usage"]["input_tokens"], whole["usage"]["cache_read_input_tokens"]) == (prompt - cached, cached)
    assert whole["usage"]["output_tokens"] > 0 or not answer


_SESSIONS = sorted((Path(__file__).parents[1] / "sessions").glob("claude-code-*.jsonl"))
_STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('it is not first') }}"
    "{% endif %}{% if m.role == 'user' and loop.index > 1 and messages[loop.index - 2].role == 'user' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + _NAMED
)


@pytest.mark.parametrize("session", _SESSIONS, ids=lambda path: path.stem)
@pytest.mark.parametrize("template", [_NAMED, _STRICT], ids=["any roles", "strict roles"])
def test_recorded_sessions(session: Path, template: str) -> None:
    """What Claude Code sent, texts cut short: a question, and the call of a tool with its result. Its instructions
    come behind the question too, where most templates take no system's message."""
    requests = [json.loads(line) for line in session.read_text(encoding="utf-8").splitlines()]
    prompts = []
    for sent in requests:
        backend = FakeBackend(step=50)
        backend.plan["max_prompt_tokens"] = 4000
        response = post(sent["path"], sent["body"], backend, headers=sent["headers"], template=template)
        assert response.status_code == 200, response.text
        assert joined(named_events(response))["stop_reason"] == "end_turn"
        assert "context_management" in response.headers["warning"]
        prompts.append(bytes(token for token in backend.requests[0].prompt_ids if token < EOS).decode())
    first, second = prompts
    assert "x-anthropic-billing-header" not in first
    assert "What does a.txt say?" in first
    assert "Available agent types" in first
    assert second.startswith(first)  # so its KV pages are reused
    assert '"name": "Read"' in second.removeprefix(first)
    assert second.endswith("<tool Read>1\thello\n2\t<assistant>")


def test_a_silent_stream_is_pinged(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a prompt is read, or a call of a tool is gathered."""
    monkeypatch.setattr(anthropic, "_PING_S", 0.001)
    backend = FakeBackend()
    backend.hold = asyncio.Event()

    async def call(http: httpx.AsyncClient) -> httpx.Response:
        asked = asyncio.ensure_future(http.post(MESSAGES, json=_BODY | {"stream": True}))
        while not backend.requests:
            await asyncio.sleep(0.001)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert backend.hold is not None
        backend.hold.set()
        return await asked

    kinds = [event["type"] for event in named_events(ask(backend, call))]
    assert kinds.count("ping") > 1
    assert [kind for kind in kinds if kind != "ping"][:2] == ["message_start", "content_block_start"]
    assert backend.cancelled == []
