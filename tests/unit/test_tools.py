"""Tool calls: each model's way to write them into OpenAI's form, streamed and whole, and requests that bring tools."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
from fake_api import FakeBackend, error, events, post
from hypothesis import given
from hypothesis import strategies as st

from tiermoe.cluster.api.settings import ToolFormatName
from tiermoe.cluster.api.tools import TOOL_FORMATS, Parsed, ToolCall, tool_format

ROME = ToolCall("weather", '{"city": "Rom 🙂", "days": 2}')
TIME = ToolCall("time", "{}")
_CALLED = '{"name": "weather", "arguments": {"city": "Rom 🙂", "days": 2}}'
_LLAMA = _CALLED.replace("arguments", "parameters")

# (format, text) -> what it means
CASES: list[tuple[str, str, Parsed]] = [
    ("hermes", "no calls\n at all \n", Parsed("no calls\n at all \n")),
    ("hermes", f"<tool_call>\n{_CALLED}\n</tool_call>", Parsed(calls=(ROME,))),
    ("hermes", f'Let me.\n<tool_call>{_CALLED}</tool_call>\n<tool_call>{{"name": "time"}}</tool_call>\n',
     Parsed("Let me.", calls=(ROME, TIME))),
    ("hermes", f"<tool_call>\n{_CALLED}", Parsed(calls=(ROME,))),  # stopped before the mark
    ("hermes", "a <tool_call>{no json</tool_call> b", Parsed("a <tool_call>{no json</tool_call> b")),
    ("hermes", 'x <tool_call>["name"]</tool_call>', Parsed('x <tool_call>["name"]</tool_call>')),
    ("hermes", "1 < 2 <tool", Parsed("1 < 2 <tool")),
    ("llama-json", _LLAMA, Parsed(calls=(ROME,))),
    ("llama-json", f'<|python_tag|>{_LLAMA}; {{"name": "time", "parameters": {{}}}}', Parsed(calls=(ROME, TIME))),
    ("llama-json", "It is { warm }.", Parsed("It is { warm }.")),
    ("llama-json", '{"answer": 5}', Parsed('{"answer": 5}')),
    ("llama-json", f"{_LLAMA} and {{", Parsed(f"{_LLAMA} and {{")),
    ("pythonic", '[weather(city="Rom 🙂", days=2), time()]', Parsed(calls=(ROME, TIME))),
    ("pythonic", "[f(x=true, y=[{'a': None}])]", Parsed(calls=(ToolCall("f", '{"x": true, "y": [{"a": null}]}'),))),
    ("pythonic", "[1, 2]", Parsed("[1, 2]")),
    ("pythonic", "[f(x=open('/etc/passwd'))]", Parsed("[f(x=open('/etc/passwd'))]")),
    ("pythonic", "[" * 3000, Parsed("[" * 3000)),
    ("pythonic", "Rome.", Parsed("Rome.")),
    ("harmony", "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>final"
     "<|message|>Hi < you<|return|>",
     Parsed("Hi < you", "think")),
    ("harmony", "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + ROME.arguments + "<|call|>",
     Parsed(calls=(ROME,))),
    ("harmony", "<|channel|>analysis<|message|>t<|end|><|start|>assistant to=functions.weather<|channel|>commentary "
     "json<|message|>" + ROME.arguments, Parsed(reasoning="t", calls=(ROME,))),
    ("harmony", "<|channel|>commentary<|message|>I look.<|end|>", Parsed("I look.")),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>{no<|call|>", Parsed("{no")),
    ("harmony", "Plain text <|end|>", Parsed("Plain text ")),
]  # fmt: skip


def parsed(form: str, pieces: list[str]) -> Parsed:
    parser, out = TOOL_FORMATS[form].parser(), Parsed()
    for piece in pieces:
        out = out.then(parser.feed(piece))
    return out.then(parser.finish())


@pytest.mark.parametrize(("form", "text", "expected"), CASES, ids=lambda value: str(value)[:40])
def test_whole_and_letter_by_letter(form: str, text: str, expected: Parsed) -> None:
    assert parsed(form, [text]) == expected
    assert parsed(form, list(text)) == expected


@given(st.sampled_from(CASES), st.lists(st.integers(0, 120), max_size=6))
def test_wherever_the_text_is_cut(case: tuple[str, str, Parsed], cuts: list[int]) -> None:
    form, text, expected = case
    places = [0, *sorted(min(place, len(text)) for place in cuts), len(text)]
    assert parsed(form, [text[a:b] for a, b in itertools.pairwise(places)]) == expected


@given(st.sampled_from(sorted(TOOL_FORMATS)), st.text('<>tool_call|/{}[]"(): an', max_size=60))
def test_no_text_breaks_a_parser(form: str, text: str) -> None:
    found = parsed(form, list(text))
    if form != "harmony" and not found.calls:
        assert found == Parsed(text)


def test_text_that_cannot_be_a_call_comes_at_once() -> None:
    parser = TOOL_FORMATS["hermes"].parser()
    assert [parser.feed(part).content for part in ("I ", "think <", "b> ", "<tool_")] == ["I", " think", " <b>", ""]


@pytest.mark.parametrize(
    ("template", "name", "form"),
    [
        ("... <tool_call>\n{...}", None, "hermes"), ("<|start|>assistant<|channel|>", None, "harmony"),
        ("<tool_call><function=f>", None, None), ('{"name": n, "parameters": dictionary of', None, "llama-json"),
        ("[func_name1(params_name1=v)]", None, "pythonic"), ("{{ messages }}", None, None),
        ("{{ messages }}", "hermes", "hermes"),
    ],
)  # fmt: skip
def test_the_format_of_a_template(template: str, name: str | None, form: str | None) -> None:
    assert tool_format(template, name) is (None if form is None else TOOL_FORMATS[form])
    assert set(get_args(ToolFormatName)) == set(TOOL_FORMATS)


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]  # fmt: skip
_TEMPLATE = "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}{{ m.content }}" \
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}{% endfor %}{# <tool_call> #}"
_ANSWER = f'Look:\n<tool_call>{_CALLED}</tool_call><tool_call>{{"name": "time"}}</tool_call>'


def tooled(body: dict[str, Any], answer: str = _ANSWER, template: str = _TEMPLATE) -> tuple[Any, FakeBackend]:
    backend = FakeBackend({"weather;hi": answer.encode(), "hi": answer.encode()}, step=3)
    backend.plan["max_prompt_tokens"] = 4000
    chat = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS} | body
    return post("/v1/chat/completions", chat, backend, template=template), backend


def test_a_chat_with_tools() -> None:
    response, backend = tooled({})
    (choice,) = response.json()["choices"]
    assert bytes(backend.requests[0].prompt_ids) == b"weather;hi"
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Look:")
    first, second = choice["message"]["tool_calls"]
    assert first["id"] != second["id"]
    assert (first["type"], first["function"]) == ("function", {"name": "weather", "arguments": ROME.arguments})
    assert "index" not in first
    (choice,) = tooled({"parallel_tool_calls": False})[0].json()["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
    response, backend = tooled({"tool_choice": "none"})
    assert bytes(backend.requests[0].prompt_ids) == b"hi"
    assert (response.json()["choices"][0]["message"]["content"], "tool_calls" in response.text) == (_ANSWER, False)


def test_a_streamed_chat_with_tools() -> None:
    chunks = events(tooled({"stream": True, "n": 2})[0])
    for index in range(2):
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
        calls = [call for part in parts for call in part["delta"].get("tool_calls", [])]
        assert [(c["index"], c["function"]["name"]) for c in calls] == [(0, "weather"), (1, "time")]
        assert "".join(part["delta"].get("content", "") for part in parts) == "Look:"
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["tool_calls"]


def test_the_answer_and_its_result_come_back() -> None:
    """An assistant's message as it was answered, and what the tool said."""
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "tool_call_id": "call_1", "content": "warm"},
    ]
    _, backend = tooled({"messages": messages})
    assert bytes(backend.requests[0].prompt_ids) == b"weather;Romewarm"
    call["function"]["arguments"] = "{"  # type: ignore[index]
    assert error(tooled({"messages": messages})[0])[:2] == (400, "messages")


def test_harmony_answers_are_read_without_tools_too() -> None:
    answer = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    response, _ = tooled({"tools": None}, answer, "{{ messages[0].content }}{# <|channel|> #}")
    message = response.json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Hi", "hm")


def test_calls_that_must_come_have_a_grammar() -> None:
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        _, backend = tooled({"tool_choice": choice})
        assert '"<tool_call>' in (backend.requests[0].sampling.grammar or "")


@pytest.mark.parametrize(
    ("body", "template", "param"),
    [
        ({}, "{{ messages }}{# <tool_call> #}", "tools"), ({}, "{{ tools }}", "tools"),
        ({"tools": [{"type": "x"}]}, _TEMPLATE, "tools"), ({"tool_choice": "maybe"}, _TEMPLATE, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, _TEMPLATE, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, _TEMPLATE, "tool_choice"),
        ({"tool_choice": "required"}, "{{ tools }}[func_name1(", "tool_choice"),
        ({"tool_choice": "required", "guided_choice": ["a"]}, _TEMPLATE, "guided_choice"),
    ],
)  # fmt: skip
def test_what_is_refused(body: dict[str, Any], template: str, param: str) -> None:
    response, backend = tooled(body, template=template)
    assert error(response)[:2] == (400, param)
    assert backend.requests == []
