"""Tool calls: each model's way to write them into OpenAI's form, streamed and whole, and requests that bring tools."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any, get_args

import pytest
from fake_api import CALLS_TEMPLATE, FakeBackend, byte_tokenizer, error, events, post, template_of
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from tiermoe.cluster.api.model import ServedModel
from tiermoe.cluster.api.scanning import Parsed, ToolCall
from tiermoe.cluster.api.settings import LimitSettings, ToolFormatName
from tiermoe.cluster.api.templates import ChatTemplate
from tiermoe.cluster.api.tools import _PROBES, _SCHEMA, TOOL_FORMATS, _round_trips, calling

FUNCTIONS = {"weather": {"type": "object", "properties": {
    "city": {"type": "string"}, "days": {"type": "integer"}, "note": {"type": ["string", "null"]},
    "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "kind": {"enum": ["1", "2"]}}}}  # fmt: skip
ROME = ToolCall("weather", '{"city": "Rom 🙂", "days": 2}')
TIME = ToolCall("time", "{}")
_CALLED = '{"name": "weather", "arguments": {"city": "Rom 🙂", "days": 2}}'
_LLAMA = _CALLED.replace("arguments", "parameters")

_XML = "<function=weather>\n<parameter=city>\nRom 🙂\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>"
_DEEP = "<｜tool▁call▁begin｜>"
_CALLS, _D, _N = "<｜tool▁calls▁begin｜>", "｜DSML｜", "]<]minimax[>["
_PAIRS = "<arg_key>city</arg_key>\n<arg_value>Rom 🙂</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>"

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
    ("qwen-xml",
     f"Let me.\n<tool_call>\n{_XML}\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>",
     Parsed("Let me.", calls=(ROME, TIME))),
    ("qwen-xml", f"<tool_call>\n{_XML}", Parsed(calls=(ROME,))),
    ("qwen-xml", "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=note>\nnull\n"
     "</parameter>\n<parameter=either>\n7\n</parameter><parameter=kind>2</parameter>\n<parameter=x>\n{'a': True}\n"
     "</parameter></function></tool_call>",
     Parsed(calls=(ToolCall(
         "weather", '{"city": "12", "note": null, "either": "7", "kind": "2", "x": {"a": true}}'),))),
    ("qwen-xml", f"<tool_call>{_CALLED}</tool_call>", Parsed(f"<tool_call>{_CALLED}</tool_call>")),
    ("glm-xml", f"<tool_call>weather\n{_PAIRS}\n</tool_call>\n<tool_call>time\n</tool_call>",
     Parsed(calls=(ROME, TIME))),
    ("glm-xml", f"a<tool_call>weather{_PAIRS}</tool_call>", Parsed("a", calls=(ROME,))),
    ("glm-xml", f"<tool_call>{_CALLED}</tool_call>", Parsed(f"<tool_call>{_CALLED}</tool_call>")),
    ("mistral", f"[TOOL_CALLS] [{_CALLED}, {{\"name\": \"time\", \"arguments\": {{}}, \"id\": \"abcdefghi\"}}]",
     Parsed(calls=(ROME, TIME))),
    ("mistral", f"ok[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{ROME.arguments}[TOOL_CALLS]time[ARGS]{{}}",
     Parsed("ok", calls=(ROME, TIME))),
    ("mistral", f"[TOOL_CALLS]weather{ROME.arguments}", Parsed(calls=(ROME,))),
    ("mistral", "[TOOL_CALLS] weather, then", Parsed("[TOOL_CALLS] weather, then")),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n" + ROME.arguments
     + "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
     Parsed(calls=(ROME, TIME))),
    ("deepseek", f"{_CALLS}none<｜tool▁calls▁end｜>", Parsed(f"{_CALLS}none<｜tool▁calls▁end｜>")),
    ("deepseek-dsml", f"Look.\n\n<{_D}function_calls>\n<{_D}invoke name=\"weather\">\n<{_D}parameter name=\"city\" "
     f'string="true">Rom 🙂</{_D}parameter>\n<{_D}parameter name="days" string="false">2</{_D}parameter>\n'
     f'</{_D}invoke>\n<{_D}invoke name="time">\n</{_D}invoke>\n</{_D}function_calls>',
     Parsed("Look.", calls=(ROME, TIME))),
    ("deepseek-dsml", f'<{_D}function_calls><{_D}invoke name="f"><{_D}parameter name="x" string="true">2'
     f"</{_D}parameter></{_D}invoke></{_D}function_calls>", Parsed(calls=(ToolCall("f", '{"x": "2"}'),))),
    ("deepseek-dsml", f"<{_D}function_calls>no</{_D}function_calls>",
     Parsed(f"<{_D}function_calls>no</{_D}function_calls>")),
    ("minimax", '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Rom 🙂</parameter>\n'
     '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="time">\n</invoke>\n</minimax:tool_call>',
     Parsed(calls=(ROME, TIME))),
    ("minimax", '<minimax:tool_call><invoke name="a b"></invoke></minimax:tool_call>',
     Parsed('<minimax:tool_call><invoke name="a b"></invoke></minimax:tool_call>')),
    ("gemma", '<|tool_call>call:weather{city:<|"|>Rom 🙂<|"|>,days:2}<tool_call|><|tool_call>call:time{}<tool_call|>',
     Parsed(calls=(ROME, TIME))),
    ("gemma", '<|tool_call>call:f{a:[{b:<|"|>x:{<|"|>},None,1.5],c:true}<tool_call|>',
     Parsed(calls=(ToolCall("f", '{"a": [{"b": "x:{"}, null, 1.5], "c": true}'),))),
    ("gemma", '<|tool_call>call:f{a:<|"|>x}<tool_call|>', Parsed('<|tool_call>call:f{a:<|"|>x}<tool_call|>')),
    ("kimi", "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
     + ROME.arguments + "<|tool_call_end|><|tool_calls_section_end|>", Parsed(calls=(ROME,))),
    ("lfm", "Look: <|tool_call_start|>[weather(city='Rom 🙂', days=2), time()]<|tool_call_end|>",
     Parsed("Look:", calls=(ROME, TIME))),
    ("lfm", "<|tool_call_start|>[note(text='a\nb')]<|tool_call_end|>",
     Parsed(calls=(ToolCall("note", '{"text": "a\\nb"}'),))),
    ("llama-json", _LLAMA, Parsed(calls=(ROME,))),
    ("llama-json", f'<|python_tag|>{_LLAMA}; {{"name": "time", "parameters": {{}}}}', Parsed(calls=(ROME, TIME))),
    ("llama-json", "It is { warm }.", Parsed("It is { warm }.")),
    ("llama-json", '{"answer": 5}', Parsed('{"answer": 5}')),
    ("llama-json", f"{_LLAMA} and {{", Parsed(" and {", calls=(ROME,))),
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
    ("deepseek-v4", f'<{_D}tool_calls>\n<{_D}invoke name="time">\n\n</{_D}invoke>\n</{_D}tool_calls>',
     Parsed(calls=(TIME,))),
    ("seed-xml", f"<seed:tool_call>{_XML}</seed:tool_call>", Parsed(calls=(ROME,))),
    ("minimax-m3", f'ok{_N}<tool_call>\n{_N}<invoke name="weather">{_N}<city>Rom 🙂{_N}</city>{_N}<days>2{_N}</days>'
     f'{_N}</invoke>\n{_N}<invoke name="f">{_N}<a>{_N}<item>1{_N}</item>{_N}<item>{_N}<b>x{_N}</b>{_N}</item>{_N}</a>'
     f'{_N}</invoke>\n{_N}</tool_call>',
     Parsed("ok", calls=(ROME, ToolCall("f", '{"a": [1, {"b": "x"}]}')))),
    ("minimax-m3", f'{_N}<tool_call>{_N}<invoke name="f">{_N}<a>{_N}<b>1{_N}</a>',
     Parsed(f"{_N}<a>{_N}<b>1{_N}</a>", calls=(ToolCall("f", "{"),))),
    ("kimi-k3", "<|open|>response<|sep|>Look. <|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool=\"weather\""
     " index=\"1\"<|sep|><|open|>argument key=\"city\" type=\"string\"<|sep|>Rom 🙂<|close|>argument<|sep|>"
     "<|open|>argument key=\"days\" type=\"number\"<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|>"
     "<|open|>call tool=\"time\" index=\"2\"<|sep|><|open|>json type=\"object\"<|sep|>{}<|close|>json<|sep|>"
     "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>",
     Parsed("Look.", calls=(ROME, TIME))),
    ("kimi-k3", "<|open|>response<|sep|>Hi.<|close|>response<|sep|><|close|>message<|sep|>", Parsed("Hi.")),
    # breaks off, or breaks: the call has no end, what follows is content
    ("hermes", 'a <tool_call>{"name": "f", "arguments": {"x": [1, "two',
     Parsed("a", calls=(ToolCall("f", '{"x": [1, "two'),))),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1, }}</tool_call> b',
     Parsed("}}</tool_call> b", calls=(ToolCall("f", '{"x": 1, '),))),
    ("hermes", '<tool_call>{"name": "f", "arguments": {no}}</tool_call>',
     Parsed('<tool_call>{"name": "f", "arguments": {no}}</tool_call>')),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 12',
     Parsed("12", calls=(ToolCall("f", '{"x": '),))),
    # what models write and JSON or the form does not have
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "a\nb</tool_call>"}</tool_call>{"x": 1}',
     Parsed('{"x": 1}', calls=(ToolCall("f", '{"x": "a\\nb</tool_call>"}'),))),
    ("hermes", '<tool_call>{"arguments": "{\\"x\\": 1}", "id": [{}], "name": "f"}</tool_call>',
     Parsed(calls=(ToolCall("f", '{"x": 1}'),))),
    ("hermes", f"<tool_call>{{no <tool_call>{_CALLED}</tool_call>", Parsed("<tool_call>{no", calls=(ROME,))),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>{no<|call|>", Parsed("{no")),
    ("harmony", "Plain text <|end|>", Parsed("Plain text ")),
]  # fmt: skip


def parsed(form: str, pieces: list[str]) -> Parsed:
    parser, out = TOOL_FORMATS[form].parser(FUNCTIONS), Parsed()
    for piece in pieces:
        out = out.then(parser.feed(piece))
    return out.then(parser.finish())


@pytest.mark.parametrize(("form", "text", "expected"), CASES, ids=lambda value: str(value)[:40])
def test_whole_and_letter_by_letter(form: str, text: str, expected: Parsed) -> None:
    assert parsed(form, [text]) == expected
    assert parsed(form, list(text)) == expected


_HALF, _HUGE = "\\ud83d", "1e999"  # an escape of half a surrogate pair; a number beyond all floats


def _written(form: str, value: str) -> str:
    """A call of `f` with `x` that is so much text of JSON or Python."""
    of_json = f'{{"name": "f", "arguments": {{"x": {value}}}}}'
    return {
        "hermes": f"<tool_call>{of_json}</tool_call>", "llama-json": of_json, "mistral": f"[TOOL_CALLS][{of_json}]",
        "qwen-xml": f"<tool_call><function=f><parameter=x>{value}</parameter></function></tool_call>",
        "glm-xml": f"<tool_call>f<arg_key>x</arg_key><arg_value>{value}</arg_value></tool_call>",
        "deepseek": f"{_CALLS}{_DEEP}f<｜tool▁sep｜>{{\"x\": {value}}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
                f'{{"x": {value}}}<|tool_call_end|><|tool_calls_section_end|>',
        "deepseek-dsml": f'<{_D}function_calls><{_D}invoke name="f"><{_D}parameter name="x" string="false">{value}'
                         f"</{_D}parameter></{_D}invoke></{_D}function_calls>",
        "deepseek-v4": f'<{_D}tool_calls><{_D}invoke name="f"><{_D}parameter name="x" string="false">{value}'
                       f"</{_D}parameter></{_D}invoke></{_D}tool_calls>",
        "minimax-m3": f'{_N}<tool_call>{_N}<invoke name="f">{_N}<x>{value}{_N}</x>{_N}</invoke>{_N}</tool_call>',
        "seed-xml": f"<seed:tool_call><function=f><parameter=x>{value}</parameter></function></seed:tool_call>",
        "kimi-k3": '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="x" type="number"'
                   f"<|sep|>{value}<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
        "hunyuan": "<tool_calls:opensource><tool_call:opensource>f<tool_sep:opensource><arg_key:opensource>x"
                   f"</arg_key:opensource><arg_value:opensource>{value}</arg_value:opensource></tool_call:opensource>"
                   "</tool_calls:opensource>",
        "json-list": f"<tool_calls>[{of_json}]</tool_calls>",
        "minimax": f'<minimax:tool_call><invoke name="f"><parameter name="x">{value}</parameter></invoke>'
                   "</minimax:tool_call>",
        "gemma": f"<|tool_call>call:f{{x:{value}}}<tool_call|>",
        "lfm": f"<|tool_call_start|>[f(x={value})]<|tool_call_end|>", "pythonic": f"[f(x={value})]",
        "harmony": f'<|channel|>commentary to=functions.f<|message|>{{"x": {value}}}<|call|>',
    }[form]  # fmt: skip


@pytest.mark.parametrize("form", sorted(TOOL_FORMATS))
@pytest.mark.parametrize("value", [f'"{_HALF}"', _HUGE, "NaN", "-Infinity", "0x" + "f" * 5000, "[" * 500 + "]" * 500])
def test_arguments_are_json_that_can_be_sent(form: str, value: str) -> None:
    """Guards: half a surrogate pair in arguments was a 500, and ended a stream; NaN came out as NaN, which no JSON is;
    Anthropic's clients read no half of a pair, and 200 brackets at most."""
    found = parsed(form, [_written(form, value)])
    found.content.encode()
    for call in found.calls:
        assert call.name == "f"
        assert from_json(call.arguments.encode(), allow_partial=True, allow_inf_nan=False).keys() <= {"x"}
    if value == f'"{_HALF}"':
        (call,) = found.calls
        assert json.loads(call.arguments)["x"] in ("\ufffd", value)  # XML has no escapes of JSON in strings


_NO_SCHEMAS: list[Any] = [
    {"type": 5}, {"type": True}, {"type": {"a": 1}}, {"type": [5, None]}, {"anyOf": 5}, {"oneOf": {"a": 1}},
    {"enum": 5}, {"anyOf": [5, None, []]}, 5, [], None, "string",
]  # fmt: skip


@pytest.mark.parametrize("schema", _NO_SCHEMAS, ids=str)
@pytest.mark.parametrize("form", sorted(TOOL_FORMATS))
def test_a_schema_may_be_anything(form: str, schema: Any) -> None:
    """Guards: a type that is a number was a 500 in the middle of the answer, once the model called the tool."""
    for functions in ({"f": {"properties": {"x": schema}}}, {"f": {"properties": schema}}, {"f": schema}):
        parser = TOOL_FORMATS[form].parser(functions)
        found = parser.feed(_written(form, "7")).then(parser.finish())
        assert [(call.name, json.loads(call.arguments)["x"] in (7, "7")) for call in found.calls] == [("f", True)]


def test_of_a_long_schema_the_first_forms_are_looked_at() -> None:
    """9,000 forms took 15 ms for each value of an answer, on the event loop."""
    read: list[int] = []

    class Forms(dict[str, Any]):
        def get(self, *given: Any) -> Any:
            read.append(1)
            return super().get(*given)

    schema = {"anyOf": [Forms(type="string")] * 9000}
    parser = TOOL_FORMATS["qwen-xml"].parser({"f": {"properties": {"x": schema}}})
    found = parser.feed(_written("qwen-xml", "7")).then(parser.finish())
    assert found.calls == (ToolCall("f", '{"x": "7"}'),)
    assert 0 < len(read) < 1000


def test_a_name_that_cannot_be_sent_is_no_call() -> None:
    text = f'<tool_call>{{"name": "{_HALF}"}}</tool_call>'
    assert parsed("hermes", [text]) == Parsed(text)


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


def test_a_header_that_does_not_end_is_text() -> None:
    text = "assistant" + " to=x" * 1000
    assert parsed("harmony", [text]) == parsed("harmony", list(text)) == Parsed(text)


def test_text_that_cannot_be_a_call_comes_at_once() -> None:
    parser = TOOL_FORMATS["hermes"].parser({})
    assert [parser.feed(part).content for part in ("I ", "think <", "b> ", "<tool_")] == ["I", " think", " <b>", ""]


def test_calls_come_back_under_the_ids_that_a_template_wants() -> None:
    """Guards: answers have ids of OpenAI's form, which Mistral's templates refuse and Kimi's show as names."""
    calls = [{"id": f"call_{i}", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
             for i in range(2)]  # fmt: skip
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": calls},
                *({"role": "tool", "tool_call_id": call["id"], "content": "warm"} for call in calls)]  # fmt: skip
    template = ChatTemplate(
        "{% for m in messages %}{{ m.tool_call_id }} {% for c in m.tool_calls or [] %}{{ c.id }} {% endfor %}"
        "{% endfor %}", {},
    )  # fmt: skip
    for ids, names in (
        ("given", ["call_0", "call_1"]), ("functions", ["functions.weather:0", "functions.weather:1"]),
        ("short", [hashlib.sha256(f"call_{i}".encode()).hexdigest()[:9] for i in range(2)]),
    ):  # fmt: skip
        template.call_ids = ids
        assert template.render(messages, add_generation_prompt=False).split() == names * 2


_ONE = "{% if calls | length > 1 %}{{ raise_exception('one call only') }}{% endif %}"
_FENCED = (
    "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + f.name + '\\n```json\\n' + f.arguments + '\\n```' }}"
    "<｜tool▁call▁end｜>"
)
_END = "{{ '<｜tool▁calls▁end｜>' if loop.last }}"
_VALUE = "{{ v if v is string else v | tojson }}"
# what of a template writes calls, and before all of them -> the format
WRITTEN: list[tuple[str, str, str | None]] = [
    ("<tool_call>\n{\"name\": {{ f.name | tojson }}, \"arguments\": {{ json }}}\n</tool_call>\n", "", "hermes"),
    ("<tool_call>\n{\"name\": {{ f.name | tojson }}, \"arguments\": {{ f.arguments }}}\n</tool_call>", "", "hermes"),
    ("<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>" + _VALUE
     + "</arg_value>\n{% endfor %}</tool_call>", "", "glm-xml"),
    ("<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n" + _VALUE
     + "\n</parameter>\n{% endfor %}</function>\n</tool_call>", "", "qwen-xml"),
    ("<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n{{ v }}"
     "\n</parameter>\n{% endfor %}</function>\n</tool_call>", "", "qwen-xml"),  # Python's words
    ("{{ '[TOOL_CALLS]' + f.name + '[ARGS]' + json }}", "", "mistral"),
    ("{{ ', ' if not loop.first }}{\"name\": \"{{ f.name }}\", \"arguments\": {{ json }}, \"id\": \"{{ c.id }}\"}"
     "{{ ']' if loop.last }}", "{{ '[TOOL_CALLS] [' if calls }}", "mistral"),
    (_FENCED + _END, "{{ '<｜tool▁calls▁begin｜>' if calls }}", "deepseek"),
    ("<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ json }}<｜tool▁call▁end｜>" + _END,
     "{{ '<｜tool▁calls▁begin｜>' if calls }}", "deepseek"),
    (f'<{_D}invoke name="{{{{ f.name }}}}">\n{{% for k, v in f.arguments.items() %}}<{_D}parameter name='
     f"\"{{{{ k }}}}\" string=\"{{{{ 'true' if v is string else 'false' }}}}\">{_VALUE}</{_D}parameter>\n{{% endfor %}}"
     f"</{_D}invoke>\n"
     f"{{{{ '</{_D}function_calls>' if loop.last }}}}", f"{{{{ '<{_D}function_calls>\n' if calls }}}}",
     "deepseek-dsml"),
    ("<invoke name=\"{{ f.name }}\">\n{% for k, v in f.arguments.items() %}<parameter name=\"{{ k }}\">" + _VALUE
     + "</parameter>\n{% endfor %}</invoke>\n{{ '</minimax:tool_call>' if loop.last }}",
     "{{ '<minimax:tool_call>\n' if calls }}", "minimax"),
    ("{{ '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' + json + '<|tool_call_end|>' }}"
     "{{ '<|tool_calls_section_end|>' if loop.last }}", "{{ '<|tool_calls_section_begin|>' if calls }}", "kimi"),
    ("{% if c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
     "{{ '[TOOL_CALLS]' + f.name + '[CALL_ID]' + c.id + '[ARGS]' + json }}", "", "mistral"),
    ("{\"name\": \"{{ f.name }}\", \"parameters\": {{ json }}}", _ONE, "llama-json"),
    ("{{ '<|tool_call_start|>[' if loop.first else ', ' }}{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}="
     "{{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}){{ ']<|tool_call_end|>' if loop.last }}", "", "lfm"),
    ("{{ '[' if loop.first else ', ' }}{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}="
     "{{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}){{ ']' if loop.last }}", "", "pythonic"),
    ("<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>{{ json }}<|call|>", "", "harmony"),
    ("<function={{ f.name }}>{{ json }}</function>", "", None), ("", "", None), ("{{ c.nothing.at_all }}", "", None),
    ("<tool_call>{{ f.name }}</tool_call>", "", None),  # loses the arguments
    ("<tool_call>\n{\"name\": \"{{ f.name }}\", \"arguments\": {\"text\": \"{{ f.arguments.text }}\"}}\n"
     "</tool_call>", "", None),
]  # fmt: skip


@pytest.mark.parametrize(("calls", "several", "form"), WRITTEN, ids=lambda value: str(value)[:30])
def test_the_format_is_what_reads_what_the_template_writes(calls: str, several: str, form: str | None) -> None:
    found = calling(ChatTemplate(template_of(calls, several), {}))
    assert found.format is (None if form is None else TOOL_FORMATS[form])
    assert (found.unknown is None) == (form is not None)
    assert found.refusal is None
    assert found.several == (several != _ONE)
    chat = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    response = post("/v1/chat/completions", chat, FakeBackend(step=9), template=template_of(calls, several))
    assert response.status_code == 200
    assert ("they stay text" in response.headers.get("warning", "")) == (form is None)


_PUBLISHED = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "sessions" / "published-calls.jsonl").read_text("utf-8").splitlines()
]


@pytest.mark.parametrize("case", _PUBLISHED, ids=lambda case: case["templates"][0])
def test_calls_as_published_templates_write_them(case: dict[str, Any]) -> None:
    """What `ChatTemplate.call_text` makes of the probes with the templates that llama.cpp keeps of published models
    (`models/templates`, revision of llama-cpp-python 0.3.36): the first format that reads it, in pieces too."""
    count = 1 if "get_other_value" not in case["text"] else 2
    found = [name for name, form in TOOL_FORMATS.items() if _round_trips(form, case["text"], count)]
    assert found[0] == case["format"]
    functions = dict.fromkeys(_PROBES, _SCHEMA)
    parser, out = TOOL_FORMATS[case["format"]].parser(functions), Parsed()
    for letter in case["text"]:
        out = out.then(parser.feed(letter))
    assert [call.name for call in out.then(parser.finish()).calls] == [*_PROBES][:count]


def test_results_have_the_ids_that_a_form_writes_itself() -> None:
    """Kimi K2's template numbers calls, whatever their ids are, and shows the ids of results as they are given."""
    written = (
        "{{ '<|tool_calls_section_begin|>' if loop.first }}<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}"
        "<|tool_call_argument_begin|>{{ json }}<|tool_call_end|>{{ '<|tool_calls_section_end|>' if loop.last }}"
    )
    template = ChatTemplate(template_of(written), {})
    assert calling(template).format is TOOL_FORMATS["kimi"]
    assert template.call_ids == "functions"


def test_marks_that_are_special_tokens_are_shown_to_the_parser() -> None:
    """GLM's and others' `<tool_call>` is a special token in some tokenizers, and text in others."""
    tokenizer, template = byte_tokenizer(), ChatTemplate(CALLS_TEMPLATE, {"eos_token": "<end>"})
    assert not ServedModel("fake", {}, tokenizer, template, LimitSettings()).special_calls
    tokenizer.add_special_tokens(["<tool_call>"])
    assert ServedModel("fake", {}, tokenizer, template, LimitSettings()).special_calls


def test_a_format_may_be_named() -> None:
    template = ChatTemplate(template_of(""), {})
    assert calling(template, "hermes").format is TOOL_FORMATS["hermes"]
    assert calling(template, "hermes").refusal is None
    assert set(get_args(ToolFormatName)) == set(TOOL_FORMATS)


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]  # fmt: skip
_HARMONY = template_of("<|channel|>commentary to=functions.{{ f.name }} <|message|>{{ json }}<|call|>")
_ANSWER = f'Look:\n<tool_call>{_CALLED}</tool_call><tool_call>{{"name": "time"}}</tool_call>'


def tooled(body: dict[str, Any], answer: str = _ANSWER, template: str = CALLS_TEMPLATE) -> tuple[Any, FakeBackend]:
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
        begun = [call for call in calls if "id" in call]
        assert [(call["index"], call["function"]["name"]) for call in begun] == [(0, "weather"), (1, "time")]
        assert len({call["id"] for call in begun}) == 2
        first = [call["function"]["arguments"] for call in calls if call["index"] == 0]
        assert len(first) > 3  # as it comes
        assert "".join(first) == ROME.arguments
        assert [call["function"]["arguments"] for call in calls if call["index"] == 1] == ["{}"]
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
    called = b'<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    assert bytes(backend.requests[0].prompt_ids) == b"weather;" + called + b"warm"
    call["function"]["arguments"] = f'{{"city": "{_HALF}"}}'  # type: ignore[index]
    response, backend = tooled({"messages": messages})  # guards: a 500
    assert (response.status_code, "\ufffd" in bytes(backend.requests[0].prompt_ids).decode()) == (200, True)
    call["function"]["arguments"] = '{"city": "Rome", "days": [1, "tw'  # type: ignore[index]  # it broke off
    _, backend = tooled({"messages": messages})
    assert b'"arguments": {"city": "Rome", "days": [1]}}' in bytes(backend.requests[0].prompt_ids)
    call["function"]["arguments"] = "{no"  # type: ignore[index]
    assert error(tooled({"messages": messages})[0])[:2] == (400, "messages")


_SENT_ALONG = {
    "cache_control": {"type": "ephemeral"}, "id": "x", "annotations": [{"type": "url_citation"}], "logprobs": None,
    "provider_specific_fields": {"a": 1}, "providerOptions": {}, "metadata": {"k": "v"}, "reasoning_details": [1],
}  # fmt: skip


def test_what_clients_send_along_with_messages_is_accepted_and_named() -> None:
    call = {"id": "c", "index": 0, "type": "function", "extra_content": {},
            "function": {"name": "weather", "arguments": {"city": "Rome"}}}  # fmt: skip
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "a"} | _SENT_ALONG, {"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None,
         "function_call": None, "reasoning": "r"} | _SENT_ALONG,
        {"role": "tool", "tool_call_id": "c", "name": "weather", "content": [{"type": "text", "text": "warm"}]},
    ]  # fmt: skip
    tools = [TOOLS[0] | {"cache_control": {"type": "ephemeral"}}]
    response, backend = tooled({"messages": messages, "tools": tools})
    assert response.status_code == 200, response.text
    assert b'ab<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>warm' in bytes(
        backend.requests[0].prompt_ids
    )
    names = ("annotations", "cache_control", "id", "metadata", "provider_specific_fields", "reasoning_details")
    assert response.headers["warning"].endswith(": " + ", ".join(f"messages.{name}" for name in names) + '"')


def test_harmony_answers_are_read_without_tools_too() -> None:
    answer = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi"
    body = {"tools": None, "messages": [{"role": "user", "content": "hi"}]}
    backend = FakeBackend({"<|user|>hi<|end|><|assistant|>": answer.encode()}, step=3)
    backend.plan["max_prompt_tokens"] = 4000
    response = post("/v1/chat/completions", body, backend, template=_HARMONY)
    message = response.json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Hi", "hm")
