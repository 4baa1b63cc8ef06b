"""Tool calls in pieces: for every format, however its text is cut and wherever it ends, the pieces are the whole
answer's arguments; the work is linear in the text."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from tiermoe.cluster.api.reasoning import MARKS, ReasoningParser
from tiermoe.cluster.api.scanning import Parsed, Parser, ToolCall, plain_parser
from tiermoe.cluster.api.tools import TOOL_FORMATS

_D, _N = "｜DSML｜", "]<]minimax[>["
_STRINGS, _OTHERS = ("city", "note"), ("days", "listed")
_SCHEMA = {"type": "object", "properties": {name: {"type": "string"} for name in _STRINGS} | {
    "days": {"type": "integer"}, "listed": {"type": "array"}}}  # fmt: skip
_FUNCTIONS = {"weather": _SCHEMA, "time": _SCHEMA}
Called = tuple[str, dict[str, Any]]
Dumps = Callable[[Any], str]

_DUMPS: list[Dumps] = [
    json.dumps, lambda value: json.dumps(value, ensure_ascii=False), lambda value: json.dumps(value, indent=2),
    lambda value: json.dumps(value, separators=(",", ":")),
    lambda value: json.dumps(value, ensure_ascii=False).replace("/", r"\/"),
]  # fmt: skip


def _value(value: Any, dumps: Dumps) -> str:
    return value if isinstance(value, str) else dumps(value)


def _function(name: str, given: dict[str, Any], dumps: Dumps) -> str:
    rows = (f"<parameter={key}>\n{_value(value, dumps)}\n</parameter>\n" for key, value in given.items())
    return f"<function={name}>\n{''.join(rows)}</function>"


def _invoke(name: str, given: dict[str, Any], dumps: Dumps, mark: str = "") -> str:
    rows = "".join(
        f'<{mark}parameter name="{key}"' + (f' string="{str(isinstance(value, str)).lower()}"' if mark else "")
        + f">{_value(value, dumps)}</{mark}parameter>\n" for key, value in given.items()
    )  # fmt: skip
    return f'<{mark}invoke name="{name}">\n{rows}</{mark}invoke>\n'


def _element(value: Any, dumps: Dumps) -> str:
    if isinstance(value, list) and value:
        return "".join(f"{_N}<item>{_element(item, dumps)}{_N}</item>" for item in value)
    return _value(value, dumps)


def _call(name: str, given: dict[str, Any], dumps: Dumps, key: str = "arguments") -> str:
    return dumps({"name": name, key: given})


def _k3(index: int, name: str, given: dict[str, Any], dumps: Dumps) -> str:
    rows = "".join(
        f'<|open|>argument key="{key}" type="{"string" if isinstance(value, str) else "number"}"<|sep|>'
        f"{_value(value, dumps)}<|close|>argument<|sep|>" for key, value in given.items()
    )  # fmt: skip
    return f'<|open|>call tool="{name}" index="{index}"<|sep|>{rows}<|close|>call<|sep|>'


# by format, how calls are written
_WRITE: dict[str, Callable[[Sequence[Called], Dumps], str]] = {
    "hermes": lambda calls, d: "\n".join(f"<tool_call>\n{_call(*call, d)}\n</tool_call>" for call in calls),
    "qwen-xml": lambda calls, d: "\n".join(f"<tool_call>\n{_function(*call, d)}\n</tool_call>" for call in calls),
    "seed-xml": lambda calls, d: "\n".join(f"<seed:tool_call>{_function(*call, d)}</seed:tool_call>" for call in calls),
    "glm-xml": lambda calls, d: "".join(
        f"<tool_call>{name}\n" + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_value(value, d)}</arg_value>\n" for key, value in given.items()
        ) + "</tool_call>" for name, given in calls
    ),
    "hunyuan": lambda calls, d: "<tool_calls:opensource>\n" + "".join(
        f"<tool_call:opensource>{name}<tool_sep:opensource>\n" + "".join(
            f"<arg_key:opensource>{key}</arg_key:opensource>\n<arg_value:opensource>{_value(value, d)}"
            "</arg_value:opensource>\n" for key, value in given.items()
        ) + "</tool_call:opensource>\n" for name, given in calls
    ) + "</tool_calls:opensource>",
    "json-list": lambda calls, d: f"<tool_calls>[{', '.join(_call(*call, d) for call in calls)}]</tool_calls>",
    "mistral": lambda calls, d: "".join(f"[TOOL_CALLS]{name}[ARGS]{d(given)}" for name, given in calls),
    "deepseek": lambda calls, d: "<｜tool▁calls▁begin｜>" + "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{d(given)}<｜tool▁call▁end｜>" for name, given in calls
    ) + "<｜tool▁calls▁end｜>",
    "deepseek-dsml": lambda calls, d: f"<{_D}function_calls>\n" + "".join(
        _invoke(*call, d, _D) for call in calls) + f"</{_D}function_calls>",
    "deepseek-v4": lambda calls, d: f"<{_D}tool_calls>\n" + "".join(
        _invoke(*call, d, _D) for call in calls) + f"</{_D}tool_calls>",
    "minimax": lambda calls, d: "<minimax:tool_call>\n" + "".join(_invoke(*call, d) for call in calls)
    + "</minimax:tool_call>",
    "minimax-m3": lambda calls, d: f"{_N}<tool_call>\n" + "".join(
        f'{_N}<invoke name="{name}">' + "".join(
            f"{_N}<{key}>{_element(value, d)}{_N}</{key}>" for key, value in given.items()
        ) + f"{_N}</invoke>\n" for name, given in calls
    ) + f"{_N}</tool_call>",
    "kimi": lambda calls, d: "<|tool_calls_section_begin|>" + "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{d(given)}<|tool_call_end|>"
        for i, (name, given) in enumerate(calls)
    ) + "<|tool_calls_section_end|>",
    "kimi-k3": lambda calls, d: "<|open|>tools<|sep|>" + "".join(
        _k3(i, *call, d) for i, call in enumerate(calls)) + "<|close|>tools<|sep|>",
    "llama-json": lambda calls, d: "; ".join(_call(*call, d, "parameters") for call in calls),
    "harmony": lambda calls, d: "".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{d(given)}<|call|>"
        for name, given in calls
    ),
}  # fmt: skip
_AT_ONCE = {"gemma", "lfm", "pythonic"}  # not as they come
_NO_TEXT_AROUND = {"llama-json", "harmony"}

_texts = st.text(st.characters(codec="utf-8"), max_size=20) | st.sampled_from([
    'say "hi" {[,:]}', "a\\b\n\tc\x01", "🙂é \u2028", "}}</tool_call", "<", "null", "", "\n", "{'x': 1}",
])  # fmt: skip
_leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _texts
_nested = st.recursive(_leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3))
_PLAIN = st.text("ab é\n{}[]\"\\,:/", max_size=12)  # values of formats without escapes contain no marks


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, list[Called], str]:
    """(A format, calls, an answer with them.)"""
    form = draw(st.sampled_from(sorted(_WRITE)))
    of_text = form in ("hermes", "json-list", "mistral", "deepseek", "kimi", "llama-json", "harmony")
    values: dict[str, Any] = dict.fromkeys(_STRINGS, _texts if of_text else _PLAIN)
    deep = st.lists(_nested, max_size=3) if of_text else st.lists(st.integers(), max_size=3)
    values |= {"days": st.integers(), "listed": deep}
    given = st.fixed_dictionaries({}, optional=values)
    calls = draw(st.lists(st.tuples(st.sampled_from(sorted(_FUNCTIONS)), given), min_size=1, max_size=3))
    text = _WRITE[form](calls, draw(st.sampled_from(_DUMPS)))
    if form not in _NO_TEXT_AROUND:
        text = draw(st.sampled_from(["", "Look. ", "1 < 2 "])) + text + draw(st.sampled_from(["", "\n", " done"]))
    return form, calls, text


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    places = [0, *sorted(min(place, len(text)) for place in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(places)]


def fed(form: str, pieces: Sequence[str]) -> Parsed:
    """All of an answer, whose pieces are as a stream shows them: a call continues before other things come."""
    parser, out = TOOL_FORMATS[form].parser(_FUNCTIONS), Parsed()
    for found in (*map(parser.feed, pieces), parser.finish()):
        assert all(call.name is not None for call in found.calls[1:])
        assert out.calls or all(call.name is not None for call in found.calls)
        out = out.then(found)
    return out


@settings(max_examples=60, deadline=None)
@given(answers(), st.lists(st.integers(0, 400), max_size=8))
def test_the_pieces_are_the_arguments(case: tuple[str, list[Called], str], cuts: list[int]) -> None:
    form, calls, text = case
    whole = fed(form, [text])
    assert whole.calls == tuple(ToolCall(name, json.dumps(given, ensure_ascii=False)) for name, given in calls)
    assert fed(form, pieces_of(text, cuts)) == fed(form, list(text)) == whole


@settings(max_examples=60, deadline=None)
@given(answers(), st.integers(0, 400), st.lists(st.integers(0, 400), max_size=4))
def test_an_answer_that_is_cut_short(case: tuple[str, list[Called], str], length: int, cuts: list[int]) -> None:
    """By `max_tokens`: the last call has the beginning of its arguments, which clients read as far as it goes."""
    form, calls, text = case
    text = text[:length]
    whole = fed(form, [text])
    assert fed(form, pieces_of(text, cuts)) == whole
    assert len(whole.calls) <= len(calls)
    for made, (name, arguments) in zip(whole.calls, calls, strict=False):
        full = json.dumps(arguments, ensure_ascii=False)
        assert made.name == name
        closed = made.arguments[:-1]  # of XML, between two values
        assert full.startswith(made.arguments) or (made.arguments.endswith("}") and full.startswith(closed))
        assert from_json(made.arguments, allow_partial=True).keys() <= arguments.keys()
    for made, (_, arguments) in zip(whole.calls[:-1], calls, strict=False):
        assert json.loads(made.arguments) == arguments


@settings(max_examples=60, deadline=None)
@given(answers(), st.integers(0, 400), st.text('{}[]":,<>/\\u tool_call}ab1', max_size=6), st.integers(0, 3),
       st.lists(st.integers(0, 400), max_size=4))  # fmt: skip
def test_an_answer_that_is_malformed(
    case: tuple[str, list[Called], str], place: int, put: str, left_out: int, cuts: list[int]
) -> None:
    """It is the same however it is cut, and what there is of arguments can be read."""
    form, _, text = case
    text = text[:place] + put + text[place + left_out :]
    whole = fed(form, [text])
    assert fed(form, pieces_of(text, cuts)) == whole
    for made in whole.calls:
        assert isinstance(from_json(made.arguments, allow_partial=True), dict)


@pytest.mark.parametrize("form", sorted(TOOL_FORMATS.keys() - _AT_ONCE))
def test_arguments_come_as_they_are_written(form: str) -> None:
    given: dict[str, Any] = {"city": "x" * 40, "days": 12, "note": "y" * 40}
    text, parser = _WRITE[form]([("weather", given)], json.dumps), TOOL_FORMATS[form].parser(_FUNCTIONS)
    grown, before = "", 0
    for place, letter in enumerate(text, 1):
        for call in parser.feed(letter).calls:
            grown += call.arguments
        # a text is at most a mark behind; MiniMax M3's values, which may have parts, come once they are whole
        if form != "minimax-m3" and "x" in text[:place] and grown:
            shown, come = grown.count("x"), text[:place].count("x" * 5)
            before += shown >= come
    assert grown + "".join(call.arguments for call in parser.finish().calls) == json.dumps(given)
    assert before > 40 or form == "minimax-m3"


# (format, what is before, what is written again and again)
_OPEN = '<tool_call>{"name": "f", "arguments": {"x": '
HOSTILE: list[tuple[str, str, str]] = [
    ("hermes", _OPEN, "["), ("hermes", _OPEN, '{"a": '), ("hermes", _OPEN + '"', "\\ud83d"),
    ("hermes", _OPEN + '"', "\\"), ("hermes", _OPEN, "1"), ("hermes", _OPEN, " "),
    ("hermes", _OPEN + '"', "</tool_call"),
    ("hermes", _OPEN + "[", "1, "), ("hermes", "", "<"), ("hermes", "", "<tool_call"), ("hermes", "", "<tool_call>"),
    ("hermes", "", "<tool_call>{"), ("hermes", '<tool_call>{"', "a"), ("hermes", "<tool_call>", '{"name": "f"}'),
    ("hermes", '<tool_call>{"name": "f"', ', "a": 1'), ("hermes", "", " "), ("hermes", "", "</tool_call>"),
    ("hermes", "", f"{_OPEN}1, }}}}</tool_call>"), ("hermes", "", '<tool_call>{"name": "f"}</tool_call>'),
    ("qwen-xml", "<tool_call><function=", "f"), ("qwen-xml", "<tool_call><function=f>", "<parameter=a>"),
    ("qwen-xml", "<tool_call><function=f>", "<parameter=a>\n1</parameter>"),
    ("qwen-xml", "<tool_call><function=f><parameter=", "a"), ("qwen-xml", "<tool_call><function=f>", " "),
    ("qwen-xml", "<tool_call><function=weather><parameter=city>", "</parameter"),
    ("qwen-xml", "<tool_call><function=weather><parameter=city>", "\n"), ("seed-xml", "", "<seed:tool_call>"),
    ("glm-xml", "<tool_call>f", "<arg_key>"), ("glm-xml", "<tool_call>f", "<arg_key>a</arg_key>"),
    ("glm-xml", "<tool_call>", "f"), ("glm-xml", "<tool_call>f", "<arg_key>a</arg_key><arg_value>"),
    ("mistral", "", "[TOOL_CALLS]"), ("mistral", "", "[TOOL_CALLS]a[CALL_ID]"), ("mistral", "[TOOL_CALLS]", "a"),
    ("mistral", "[TOOL_CALLS]a{", "} "), ("mistral", "[TOOL_CALLS]", "["),
    ("mistral", "[TOOL_CALLS][", '{"name": "f"}, '),
    ("deepseek", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    ("deepseek", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>"),
    ("deepseek", "", "<｜tool▁calls▁begin｜>"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n"),
    ("deepseek", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
    ("kimi", "<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.a:0"),
    ("kimi", "<|tool_calls_section_begin|>", "<|tool_call_begin|>a:0<|tool_call_argument_begin|>"),
    ("kimi-k3", "<|open|>tools<|sep|>", '<|open|>call tool="f"<|sep|>'), ("kimi-k3", "", "<|open|>"),
    ("kimi-k3", "<|open|>tools<|sep|><|open|>call ", 'tool="f" '), ("kimi-k3", "", "<|open|>tools<|sep|>"),
    ("minimax", "<minimax:tool_call>", '<invoke name="f">'), ("minimax", "", "<minimax:tool_call>"),
    ("minimax", '<minimax:tool_call><invoke name="f">', "<parameter name="),
    ("minimax", '<minimax:tool_call><invoke name="f">', '<parameter name="a">1</parameter>'),
    ("minimax-m3", f'{_N}<tool_call>{_N}<invoke name="f">', f"{_N}<a>"), ("minimax-m3", "", _N),
    ("minimax-m3", f'{_N}<tool_call>{_N}<invoke name="f">{_N}<a>', f"{_N}<item>1{_N}</item>"),
    ("minimax-m3", f'{_N}<tool_call>{_N}<invoke name="f">{_N}<a>', "]"),
    ("deepseek-dsml", f"<{_D}function_calls>", f"<{_D}invoke name="), ("deepseek-v4", "", f"<{_D}tool_calls>"),
    ("gemma", "<|tool_call>call:f{", ",a"), ("gemma", "<|tool_call>call:f{", '<|"|>'), ("gemma", "<|tool_call>", " "),
    ("gemma", "<|tool_call>call:f", "{"), ("gemma", "<|tool_call>call:f{", "a:1,"),
    ("lfm", "<|tool_call_start|>[", "f(a=1),"), ("lfm", "", "<|tool_call_start|>"), ("pythonic", "[", "f(a=1),"),
    ("pythonic", "", " "), ("pythonic", "[", "'a'\n"), ("llama-json", "", '{"name":"a"};'), ("llama-json", "", " "),
    ("llama-json", "{", "{"), ("llama-json", '{"name": "f"}', ";"), ("harmony", "", "<|end|>"),
    ("harmony", "", "<|start|>assistant"), ("harmony", "", "<|channel|>"), ("harmony", "assistant", " "),
    ("harmony", "", "<|channel|>final<|message|>"), ("harmony", "<|channel|>a to=functions.f<|message|>", "{"),
    ("harmony", "", "x<|"), ("harmony", "", "<|channel|>a to=functions.f<|message|>{}<|call|>"),
    *[("plain", begin, unit) for begin in ("", "<think>") for unit in (
        " ", "<think>", "</think>", "<tool_call>", "<", "a ", "</thin", "\n<think",
        '<tool_call>{"name": "f"}</tool_call>',
    )],
]  # fmt: skip


def _parser(form: str) -> Parser:
    calls = plain_parser() if form == "plain" else TOOL_FORMATS[form].parser(_FUNCTIONS)
    return ReasoningParser(MARKS[0], calls, opened=False)


def _steps(parser: Parser, pieces: Sequence[str]) -> int:
    """Lines that run. Guards that no more than a mark, a name or a number of text is copied with each piece."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    calls = parser._calls
    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        for piece in pieces:
            parser.feed(piece)
            assert calls.scan.unread <= max(5000, len(piece))
        parser.finish()
    finally:
        sys.settrace(earlier)
    return lines


@pytest.mark.parametrize(("form", "begin", "unit"), HOSTILE, ids=lambda value: str(value)[:40])
def test_the_work_is_linear_in_what_a_model_writes(form: str, begin: str, unit: str) -> None:
    """Arguments without an end, of 26 to 38 KB, took 0.7 s on the event loop."""
    text = begin + unit * (6_000 // len(unit))
    for step in (4, len(text)):
        assert _steps(_parser(form), [text[i : i + step] for i in range(0, len(text), step)]) < 100 * len(text)
