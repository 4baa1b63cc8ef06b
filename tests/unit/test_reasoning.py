"""A model's reasoning apart from its answer: the marks that a template shows, how a text is split, what routes say."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from fake_api import FakeBackend, byte_tokenizer, events, named_events, post
from hypothesis import given
from hypothesis import strategies as st

from tiermoe.cluster.api.model import ServedModel
from tiermoe.cluster.api.reasoning import MARKS, Marks, ReasoningParser, marks_of
from tiermoe.cluster.api.scanning import Parsed, ToolCall, plain_parser
from tiermoe.cluster.api.settings import LimitSettings
from tiermoe.cluster.api.templates import ChatTemplate
from tiermoe.cluster.api.tools import TOOL_FORMATS

THINK = MARKS[0]
_SAID = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
_PAST = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
_SWITCHED = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
_CUT = (
    "{% for m in messages %}{% set c = m.content.split('</think>')[-1] if '</think>' in m.content else m.content %}"
    "{{ m.role }}:{{ c }};{% endfor %}"
)

# what a template writes -> the marks
TEMPLATES: list[tuple[str, Marks | None]] = [
    (_SAID, None), (_SAID + "a:<think>\n", THINK),  # Qwen3-Thinking, DeepSeek-R1, MiniMax-M2
    (_SAID + "{% if add_generation_prompt %}a:" + _SWITCHED + "{% endif %}", THINK),  # Qwen3
    (_SAID + "a:{{ '<think>' if thinking else '</think>' }}", THINK),  # DeepSeek-V3.1
    ("{% for m in messages %}{{ m.role }}:" + _PAST + "{{ m.content }}{% endfor %}", THINK),  # GLM-4.5, Kimi-K2
    (_CUT, THINK),  # a distilled R1
    ("[SYSTEM]think in [THINK]...[/THINK][/SYSTEM]" + _SAID, MARKS[1]),
    (_SAID + "{% if thinking_budget == 0 %}<seed:think></seed:think>{% endif %}", None),  # it is given no budget
    (_SAID + "{{ '<|channel>thought\n<channel|>' if not enable_thinking | default(false) }}", MARKS[3]),  # Gemma 4
    ("{{ raise_exception('no') }}", None), ("{% for %}", None),
]  # fmt: skip


@pytest.mark.parametrize(("template", "marks"), TEMPLATES, ids=lambda value: str(value)[:40])
def test_the_marks_are_those_that_the_template_shows(template: str, marks: Marks | None) -> None:
    assert marks_of(ChatTemplate(template, {})) == marks


_F = '<tool_call>{"name": "f"}</tool_call>'
_CALL = ToolCall("f", "{}")
# opened by the prompt, text -> what it means
CASES: list[tuple[bool, str, Parsed]] = [
    (False, "Hello", Parsed("Hello")), (False, " \n Hello ", Parsed(" \n Hello ")), (False, "", Parsed()),
    (False, "<think>\nhm\n</think>\n\nHello", Parsed("Hello", "hm")),
    (False, "\n<think>hm</think>Hello", Parsed("Hello", "hm")), (False, "<think></think>\n\nHi", Parsed("Hi")),
    (False, "<think>hm", Parsed("", "hm")), (False, "<thin", Parsed("<thin")), (False, "<this>", Parsed("<this>")),
    (False, "It is <think>x</think>.", Parsed("It is <think>x</think>.")),  # text, not at the beginning
    (True, "hm\n</think>\n\nHello ", Parsed("Hello ", "hm")), (True, "hm </thin", Parsed("", "hm </thin")),
    (True, "<think>hm</think>Hi", Parsed("Hi", "hm")), (True, "</think>Hi", Parsed("Hi")),
    (True, "<th", Parsed("", "<th")), (False, "</think>\n\nHi", Parsed("Hi")), (False, "</thin", Parsed("</thin")),
    (True, "a </think> b </think> c", Parsed("b </think> c", "a")),
    (True, f"hm</think>\n\nso {_F}", Parsed("so", "hm", (_CALL,))),
    (True, f"hm {_F}", Parsed("", "hm", (_CALL,))),  # the end is left out: the call is not lost
    (True, f"hm {_F} or\n</think>\nno", Parsed("no", f"hm {_F} or")),  # a draft
    (True, f"a {_F} b</think>{_F}", Parsed("", f"a {_F} b", (_CALL,))),
    (True, "a <tool_call>{no", Parsed("", "a <tool_call>{no")), (False, f"{_F}", Parsed(calls=(_CALL,))),
]  # fmt: skip


def split(opened: bool, pieces: list[str]) -> Parsed:
    parser, out = ReasoningParser(THINK, TOOL_FORMATS["hermes"].parser({}), opened), Parsed()
    for piece in pieces:
        out = out.then(parser.feed(piece))
    return out.then(parser.finish())


@pytest.mark.parametrize(("opened", "text", "expected"), CASES, ids=lambda value: str(value)[:40])
def test_whole_and_letter_by_letter(opened: bool, text: str, expected: Parsed) -> None:
    assert split(opened, [text]) == expected
    assert split(opened, list(text)) == expected


@given(st.sampled_from(CASES), st.lists(st.integers(0, 60), max_size=6))
def test_wherever_the_text_is_cut(case: tuple[bool, str, Parsed], cuts: list[int]) -> None:
    opened, text, expected = case
    places = [0, *sorted(min(place, len(text)) for place in cuts), len(text)]
    assert split(opened, [text[a:b] for a, b in itertools.pairwise(places)]) == expected


@given(st.booleans(), st.text('<>think/tool_call{}":\n a', max_size=60))
def test_no_text_is_lost(opened: bool, text: str) -> None:
    """But for marks and the space around them."""
    found = split(opened, list(text))
    kept = "".join((found.reasoning + found.content).replace("<think>", "").replace("</think>", "").split())
    if not found.calls:
        assert kept == "".join(text.replace("<think>", "").replace("</think>", "").split())


def test_reasoning_comes_at_once() -> None:
    parser = ReasoningParser(THINK, plain_parser(), True)
    fed = [parser.feed(part) for part in ("I ", "see <", "b> </", "think>\n", "\nHi")]
    assert [part.reasoning for part in fed] == ["I", " see", " <b>", "", ""]
    assert [part.content for part in fed] == ["", "", "", "", "Hi"]


def test_marks_that_are_special_tokens_are_shown_to_the_parser() -> None:
    tokenizer, template = byte_tokenizer(), ChatTemplate(_SAID + "a:<think>\n", {})
    assert not ServedModel("fake", {}, tokenizer, template, LimitSettings()).special_reasoning
    tokenizer.add_special_tokens(["<think>"])
    assert ServedModel("fake", {}, tokenizer, template, LimitSettings()).special_reasoning


_OPENED = "{{ messages[0].content }}{{ '<think>\n' if enable_thinking | default(true) }}"
_ANSWER = b"hm\n</think>\n\nyes"
_USER = {"messages": [{"role": "user", "content": "hi"}]}


def said(path: str, body: dict[str, Any], answer: bytes = _ANSWER) -> tuple[str, str]:
    """(Reasoning, content) of an answer; the same whole and streamed."""
    found = []
    for stream in (False, True):
        backend = FakeBackend({"hi<think>\n": answer, "hi": answer}, step=3)
        backend.plan["max_prompt_tokens"] = 200
        response = post(path, _USER | body | {"stream": stream}, backend, template=_OPENED)
        assert response.status_code == 200, response.text
        if path == "/v1/messages":
            blocks = [event["delta"] for event in named_events(response) if "index" in event and "delta" in event] if (
                stream
            ) else response.json()["content"]  # fmt: skip
            parts = [(part.get("thinking", ""), part.get("text", "")) for part in blocks]
            assert any(part.get("signature") for part in blocks) == any(thought for thought, _ in parts)
        else:
            choices = [chunk["choices"][0]["delta"] for chunk in events(response)] if stream else [
                response.json()["choices"][0]["message"]
            ]  # fmt: skip
            parts = [(part.get("reasoning_content", ""), part.get("content") or "") for part in choices]
        found.append(("".join(thought for thought, _ in parts), "".join(text for _, text in parts)))
    assert found[0] == found[1]
    return found[0]


CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (CHAT, {}, ("hm", "yes")), (MESSAGES, {"max_tokens": 99}, ("hm", "yes")),
        (CHAT, {"max_tokens": 2}, ("hm", "")), (MESSAGES, {"max_tokens": 2}, ("hm", "")),
        (CHAT, {"include_reasoning": False}, ("", "yes")), (CHAT, {"reasoning_format": "hidden"}, ("", "yes")),
        (CHAT, {"reasoning_format": "parsed"}, ("hm", "yes")), (CHAT, {"separate_reasoning": True}, ("hm", "yes")),
        (CHAT, {"reasoning_format": "none"}, ("", _ANSWER.decode())),
        (CHAT, {"separate_reasoning": False}, ("", _ANSWER.decode())),
        # without thinking the prompt opens nothing
        (CHAT, {"enable_thinking": False}, ("", _ANSWER.decode())),
        (MESSAGES, {"max_tokens": 99, "thinking": {"type": "enabled", "budget_tokens": 1024}}, ("hm", "yes")),
        # a grammar is of the whole answer
        (CHAT, {"guided_regex": "[a-z]*"}, ("", _ANSWER.decode())),
    ],
    ids=str,
)  # fmt: skip
def test_each_route_has_it_apart(path: str, body: dict[str, Any], expected: tuple[str, str]) -> None:
    assert said(path, body) == expected


def test_a_model_that_thinks_unasked_is_not_heard_where_thinking_is_off() -> None:
    body = {"max_tokens": 99, "thinking": {"type": "disabled"}}
    assert said(MESSAGES, body, b"<think>hm</think>yes") == ("", "yes")


def test_responses_have_it_as_an_item() -> None:
    for body, kinds in (({}, ["reasoning", "message"]), ({"include_reasoning": False}, ["message"])):
        backend = FakeBackend({"hi<think>\n": _ANSWER})
        backend.plan["max_prompt_tokens"] = 200
        output = post("/v1/responses", {"input": "hi"} | body, backend, template=_OPENED).json()["output"]
        assert [item["type"] for item in output] == kinds
        assert [item["content"][0]["text"] for item in output] == ["hm", "yes"][-len(kinds) :]


@pytest.mark.parametrize(
    ("body", "answer", "expected"),
    [
        ({}, _ANSWER, 2), ({"n": 2}, _ANSWER, 4), ({"include_reasoning": False}, _ANSWER, 2),
        ({"reasoning_format": "none"}, _ANSWER, None), ({}, b"</think>\n\nyes", None),
        ({}, b"hm\nso and so, hm\n</think>hm", 16), ({}, b"ha" * 50 + b"\n</think>yes", 100),
    ],
)  # fmt: skip
def test_usage_counts_its_tokens(body: dict[str, Any], answer: bytes, expected: int | None) -> None:
    """Those that had come with its last letter; the same whole, streamed, and of responses."""
    details = None if expected is None else {"reasoning_tokens": expected}
    for stream in (False, True):
        asked = _USER | body | {"stream": stream, "n": body.get("n", 1)}
        backend = FakeBackend({"hi<think>\n": answer, "hi": answer})
        backend.plan["max_prompt_tokens"] = 200
        asked |= {"stream_options": {"include_usage": True}} if stream else {}
        response = post(CHAT, asked, backend, template=_OPENED)
        usage = events(response)[-1]["usage"] if stream else response.json()["usage"]
        assert usage.get("completion_tokens_details") == details
    if "n" not in body:
        backend = FakeBackend({"hi<think>\n": answer, "hi": answer})
        backend.plan["max_prompt_tokens"] = 200
        usage = post("/v1/responses", {"input": "hi"} | body, backend, template=_OPENED).json()["usage"]
        assert usage["output_tokens_details"] == {"reasoning_tokens": expected or 0}
