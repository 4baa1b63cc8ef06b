"""Tool calls as models write them, into OpenAI's form.

`TOOL_FORMATS` has a parser for each way. Which one a model's is, its chat template shows: calls are rendered with it,
and the parser that gives them back is the right one (`calling`). A parser is fed the shown text of one choice as it
comes. Text that may still become a call is pending; a call is given out once it is whole.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .refusals import ApiError
from .templates import ChatTemplate
from .text import overlap

Functions = Mapping[str, Any]  # the JSON schema of each one's arguments


@dataclass(frozen=True)
class ToolCall:
    """arguments: the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Parsed:
    """What is new of a choice."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    def then(self, later: Parsed) -> Parsed:
        """Both as one."""
        return Parsed(self.content + later.content, self.reasoning + later.reasoning, self.calls + later.calls)


class Parser(Protocol):
    """One choice's text into content and calls."""

    def feed(self, text: str) -> Parsed: ...

    def finish(self) -> Parsed:
        """What is pending, when no more text comes."""
        ...


@dataclass(frozen=True)
class ToolFormat:
    """A way to write calls.

    Attributes:
        special: it is written with special tokens, which are to be shown to the parser.
        parser: makes one for a choice, by the JSON schemas of the functions' arguments.
        always: it gives every answer its form, also without tools.
        grammar: Lark, of one or more calls, by the schemas; None: calls cannot be forced.
    """

    special: bool
    parser: Callable[[Functions], Parser]
    always: bool = False
    grammar: Callable[[dict[str, Any], bool], str] | None = None


class PlainParser:
    """All of it is content."""

    def feed(self, text: str) -> Parsed:
        return Parsed(text)

    def finish(self) -> Parsed:
        return Parsed()


class MarkedParser:
    """Calls between two marks, any number of times, after text.

    Args:
        begin, end: the marks; without an end mark calls extend to the end of the text.
        read: parses the text between them into calls; None: it is not a call, and stays text.
    """

    def __init__(self, begin: str, end: str | None, read: Callable[[str], Sequence[ToolCall] | None]) -> None:
        self._marks, self._read = (begin, end), read
        self._text = self._call = self._space = ""
        self._inside = self._called = False

    def feed(self, text: str) -> Parsed:
        self._text += text
        out = Parsed()
        while True:
            wanted = self._marks[self._inside]
            ready, mark, self._text = (
                (self._text, None, "") if wanted is None else split_at_marker(self._text, (wanted,))
            )
            if self._inside:
                self._call += ready
            else:
                out = out.then(Parsed(self._shown(ready)))
            if mark is None:
                return out
            if self._inside:
                out = out.then(self._close(mark))
            self._inside = not self._inside

    def finish(self) -> Parsed:
        if self._inside:
            self._call += self._text  # some models stop before the mark
            self._inside = False
            return self._close("")
        shown = self._shown(self._text)
        return Parsed(shown if self._called else shown + self._space)

    def _close(self, mark: str) -> Parsed:
        text, self._call = self._call, ""
        calls = self._read(text)
        if not calls:
            return Parsed(self._shown(f"{self._marks[0]}{text}{mark}"))
        self._called = True
        return Parsed(calls=tuple(calls))

    def _shown(self, text: str) -> str:
        """Space before and between calls is not content."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if self._called and not shown.strip():
            return ""
        return shown


def _hermes_call(text: str) -> Sequence[ToolCall] | None:
    """`{"name": ..., "arguments": {...}}` (Hermes 2, Qwen 2.5, Qwen 3)."""
    call = call_of(_json(text))
    return None if call is None else (call,)


def _xml_call(functions: Functions) -> Callable[[str], Sequence[ToolCall] | None]:
    """`<function=NAME>`, then `<parameter=KEY>` VALUE `</parameter>` for each argument (Qwen 3 Coder, Nemotron 3)."""

    def read(text: str) -> Sequence[ToolCall] | None:
        found = re.fullmatch(r"\s*<function=([^<>\s]+)>(.*?)(?:</function>)?\s*", text, re.DOTALL)
        if found is None:
            return None
        name, body = found.groups()
        pairs = re.findall(r"<parameter=([^<>\s]+)>\n?(.*?)\n?</parameter>", body, re.DOTALL)
        rest = re.sub(r"<parameter=[^<>\s]+>.*?</parameter>", "", body, flags=re.DOTALL)
        return None if rest.strip() else (_typed_call(name, pairs, functions),)

    return read


def _glm_call(functions: Functions) -> Callable[[str], Sequence[ToolCall] | None]:
    """NAME, then `<arg_key>KEY</arg_key>` and `<arg_value>VALUE</arg_value>` for each argument (GLM 4.5 and later)."""

    def read(text: str) -> Sequence[ToolCall] | None:
        pair = r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"
        name, _, rest = text.partition("<arg_key>")
        rest = "<arg_key>" + rest if _ else ""
        known = re.fullmatch(r"[\w.-]+", name.strip())
        if known is None or re.sub(pair, "", rest, flags=re.DOTALL).strip():
            return None
        pairs = [(key.strip(), value) for key, value in re.findall(pair, rest, re.DOTALL)]
        return (_typed_call(known[0], pairs, functions),)

    return read


def _typed_call(name: str, pairs: Sequence[tuple[str, str]], functions: Functions) -> ToolCall:
    """A call whose arguments are plain text: their types are those of the function's schema."""
    schema = functions.get(name)
    properties = schema.get("properties") if isinstance(schema, dict) else None
    known = properties if isinstance(properties, dict) else {}
    arguments = {key: _typed(value, known.get(key)) for key, value in pairs}
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _typed(text: str, schema: Any) -> Any:
    """A value of a schema: a string is the text itself; others are JSON, or Python's literals."""
    types = _types(schema)
    if "string" in types and not ("null" in types and text.strip() in ("null", "None")):
        return text
    for read in (json.loads, ast.literal_eval):
        try:
            found = read(text.strip())
            json.dumps(found)
            return found
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return text


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema names."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    found = {named} if isinstance(named, str) else {name for name in named or () if isinstance(name, str)}
    for inner in (*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))):
        found |= _types(inner)
    if any(isinstance(value, str) for value in _list(schema.get("enum"))):
        found.add("string")
    return found


def _list(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


def _mistral_calls(text: str) -> Sequence[ToolCall] | None:
    """A JSON list of calls, or `NAME[CALL_ID]ID[ARGS]{...}` or `NAME{...}`, several, each after its own mark."""
    listed = _json(text)
    if isinstance(listed, list):
        calls = [call_of(value) for value in listed]
    else:
        parts = [re.fullmatch(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(\{.*\})\s*", part, re.DOTALL)
                 for part in text.split("[TOOL_CALLS]")]  # fmt: skip
        calls = [part and call_of({"name": part[1], "arguments": _json(part[2])}) for part in parts]
    return None if None in calls else [call for call in calls if call is not None]


def _deepseek_calls(text: str) -> Sequence[ToolCall] | None:
    """`function` SEP NAME and JSON in a fence (DeepSeek V3, R1), or NAME SEP JSON (V3.1), each between marks."""
    between = r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>"
    calls: list[ToolCall] = []
    for head, body in re.findall(between, text, re.DOTALL):
        fenced = re.fullmatch(r"([^\n]+)\n```json\n(.*)\n```", body, re.DOTALL) if head == "function" else None
        name, arguments = (head, body) if fenced is None else fenced.groups()
        call = call_of({"name": name.strip(), "arguments": _json(arguments)})
        if call is None:
            return None
        calls.append(call)
    return None if re.sub(between, "", text, flags=re.DOTALL).strip() else calls


def _kimi_calls(text: str) -> Sequence[ToolCall] | None:
    """`functions.NAME:INDEX` ARGUMENT JSON, each between marks (Kimi K2)."""
    head = r"<\|tool_call_begin\|>\s*(?:functions\.)?([\w.-]+):\d+\s*"
    between = head + r"<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>"
    calls = [call_of({"name": name, "arguments": _json(body)}) for name, body in re.findall(between, text, re.DOTALL)]
    if None in calls or re.sub(between, "", text, flags=re.DOTALL).strip():
        return None
    return [call for call in calls if call is not None]


class LlamaJsonParser:
    """An answer that is JSON: `{"name": ..., "parameters": {...}}`, several with `;` between (Llama 3)."""

    _TAG = "<|python_tag|>"

    def __init__(self) -> None:
        self._text = ""
        self._content = False  # the answer is text

    def feed(self, text: str) -> Parsed:
        if self._content:
            return Parsed(text)
        self._text += text
        begin = self._text.lstrip()
        if not begin or begin[0] == "{" or begin.startswith(self._TAG) or self._TAG.startswith(begin):
            return Parsed()
        self._content, text = True, self._text
        return Parsed(text)

    def finish(self) -> Parsed:
        if self._content:
            return Parsed()
        rest, calls = self._text.strip().removeprefix(self._TAG).strip(), []
        decoder = json.JSONDecoder()
        while rest:
            try:
                value, end = decoder.raw_decode(rest)
            except (ValueError, RecursionError):
                return Parsed(self._text)
            call = call_of(value)
            if call is None:
                return Parsed(self._text)
            calls.append(call)
            rest = rest[end:].lstrip(" \n;,")
        return Parsed(calls=tuple(calls)) if calls else Parsed(self._text)


class PythonicParser:
    """An answer that is a list of Python calls: `[get_weather(city="Rome"), get_time()]` (Llama 4, Llama 3.2)."""

    def __init__(self) -> None:
        self._text = ""
        self._content = False

    def feed(self, text: str) -> Parsed:
        if self._content:
            return Parsed(text)
        self._text += text
        begin = self._text.lstrip()
        if not begin or begin[0] == "[":
            return Parsed()
        self._content = True
        return Parsed(self._text)

    def finish(self) -> Parsed:
        if self._content:
            return Parsed()
        calls = _python_calls(self._text)
        return Parsed(self._text) if calls is None else Parsed(calls=tuple(calls))


def _python_calls(text: str) -> Sequence[ToolCall] | None:
    """A list of calls with literal keyword arguments; None: the text is something else."""
    for source in (text.strip(), text.strip().replace("\n", "\\n")):  # some templates write lines as they are
        try:
            found = ast.parse(source, mode="eval").body
            return [_python_call(part) for part in found.elts] if isinstance(found, ast.List) and found.elts else None
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            continue
    return None


_WORDS = {"true": True, "false": False, "null": None}  # of JSON, which some templates write


class _JsonWords(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_WORDS[node.id]) if node.id in _WORDS else node


def _python_call(node: ast.expr) -> ToolCall:
    """Raises ValueError: it is not a call, or its arguments are not literals."""
    if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
        raise ValueError("no call by keywords")
    arguments = {str(word.arg): ast.literal_eval(_JsonWords().visit(word.value)) for word in node.keywords}
    return ToolCall(ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False))


class HarmonyParser:
    """gpt-oss's messages: a header with channel and recipient, `<|message|>`, a body, an end mark.

    The final channel, and commentary to nobody, is content; analysis is reasoning; a body to `functions.NAME` is a
    call's arguments.
    """

    _ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")

    def __init__(self) -> None:
        self._text = self._body = ""
        self._header: str | None = ""  # None: in a body
        self._kind, self._name = "final", ""

    def feed(self, text: str) -> Parsed:
        self._text += text
        out = Parsed()
        while True:
            marks = self._ENDS if self._header is None else ("<|message|>",)
            ready, mark, self._text = split_at_marker(self._text, marks)
            if self._header is None:
                out = out.then(self._take(ready))
                if mark is not None:
                    out = out.then(self._end())
            else:
                self._header += ready
                if mark is not None:
                    self._begin(self._header)
                elif not _header_like(self._header):  # the model does not keep to its form
                    self._text, self._header, self._kind = self._header + self._text, None, "final"
                    continue
            if mark is None:
                return out

    def finish(self) -> Parsed:
        text, self._text = self._text, ""
        return self._take(text).then(self._end()) if self._header is None else Parsed()

    def _begin(self, header: str) -> None:
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        to = re.search(r"to=functions\.([^\s<]+)", header)
        self._kind = "call" if to is not None else "final" if channel is None else channel[1]
        self._name, self._header, self._body = "" if to is None else to[1], None, ""

    def _take(self, text: str) -> Parsed:
        if self._kind == "call":
            self._body += text
            return Parsed()
        return Parsed(reasoning=text) if self._kind == "analysis" else Parsed(text)

    def _end(self) -> Parsed:
        body, kind = self._body.strip(), self._kind
        self._header, self._body = "", ""
        if kind != "call":
            return Parsed()
        if not isinstance(_json(body or "{}"), dict):
            return Parsed(body)
        return Parsed(calls=(ToolCall(self._name, body or "{}"),))


def _header_like(text: str) -> bool:
    begin = text.lstrip()
    marks = ("<|start|>", "<|channel|>", "<|constrain|>", "assistant", "to=")
    return not begin or any(begin.startswith(mark) or mark.startswith(begin) for mark in marks)


def split_at_marker(text: str, marks: Sequence[str]) -> tuple[str, str | None, str]:
    """(text before the first mark, the mark, text after it), or (text that is not part of a mark, None, the rest)."""
    found = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
    if found:
        place, mark = min(found)
        return text[:place], mark, text[place + len(mark) :]
    ready = len(text) - max(overlap(text, mark) for mark in marks)
    return text[:ready], None, text[ready:]


def call_of(value: Any) -> ToolCall | None:
    """The call of an object with a name and arguments (or parameters); None: it is not one."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments)
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _objects(functions: dict[str, Any], key: str) -> str:
    """The JSON schema of a call of any of the functions."""
    calls = [
        {"type": "object", "properties": {"name": {"const": name}, key: schema}, "required": ["name", key],
         "additionalProperties": False}
        for name, schema in functions.items()
    ]  # fmt: skip
    spaces = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as models write them
    return json.dumps((calls[0] if len(calls) == 1 else {"anyOf": calls}) | {"x-guidance": spaces})


def _hermes_grammar(functions: dict[str, Any], several: bool) -> str:
    calls = 'call ("\\n" call)*' if several else "call"
    marks = '"<tool_call>\\n" object "\\n</tool_call>"'
    return f"start: {calls}\ncall: {marks}\nobject: %json {_objects(functions, 'arguments')}\n"


def _llama_grammar(functions: dict[str, Any], several: bool) -> str:
    calls = 'object ("; " object)*' if several else "object"
    return f"start: {calls}\nobject: %json {_objects(functions, 'parameters')}\n"


def _harmony_grammar(functions: dict[str, Any], several: bool) -> str:
    """One call, in the channel of calls; special tokens are separate grammar symbols."""
    names = [f"call_{i}" for i in range(len(functions))]
    rules = [
        f'{rule}: <|channel|> "commentary to=functions.{name} " <|constrain|> "json" <|message|> args_{i}\n'
        f"args_{i}: %json {json.dumps(schema)}\n"
        for i, (rule, (name, schema)) in enumerate(zip(names, functions.items(), strict=True))
    ]
    return f"start: {' | '.join(names)}\n" + "".join(rules)


_CALL = ("<tool_call>", "</tool_call>")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_LFM = ("<|tool_call_start|>", "<|tool_call_end|>")

# in the order in which they are tried
TOOL_FORMATS: dict[str, ToolFormat] = {
    "harmony": ToolFormat(True, lambda _: HarmonyParser(), always=True, grammar=_harmony_grammar),
    "hermes": ToolFormat(False, lambda _: MarkedParser(*_CALL, _hermes_call), grammar=_hermes_grammar),
    "qwen-xml": ToolFormat(False, lambda functions: MarkedParser(*_CALL, _xml_call(functions))),
    "glm-xml": ToolFormat(False, lambda functions: MarkedParser(*_CALL, _glm_call(functions))),
    "mistral": ToolFormat(True, lambda _: MarkedParser("[TOOL_CALLS]", None, _mistral_calls)),
    "deepseek": ToolFormat(True, lambda _: MarkedParser(*_DEEPSEEK, _deepseek_calls)),
    "kimi": ToolFormat(True, lambda _: MarkedParser(*_KIMI, _kimi_calls)),
    "lfm": ToolFormat(True, lambda _: MarkedParser(*_LFM, _python_calls)),
    "pythonic": ToolFormat(False, lambda _: PythonicParser()),
    "llama-json": ToolFormat(True, lambda _: LlamaJsonParser(), grammar=_llama_grammar),
}


_PROBES: dict[str, dict[str, Any]] = {
    "get_probe_value": {"text": 'a "b"\n<c> é', "count": 2, "exact": True, "listed": [1, {"key": "value"}]},
    "get_other_value": {"text": "last"},
}  # by name, the arguments of a call
_PROPERTIES = {
    name: {"type": kind, "description": f"the {name}"}
    for name, kind in (("text", "string"), ("count", "integer"), ("exact", "boolean"))
} | {"listed": {"type": "array", "description": "the listed", "items": {"type": "object"}}}
_SCHEMA = {"type": "object", "properties": _PROPERTIES, "required": ["text"]}


@dataclass(frozen=True)
class Calling:
    """How a model calls tools.

    Attributes:
        format: None: in no known way, or not at all.
        several: whether an answer may have more than one call.
        refusal: why requests with tools are refused; None: they are not.
        written: a call as the template writes it; empty: it writes none.
    """

    format: ToolFormat | None
    several: bool = True
    refusal: str | None = None
    written: str = ""


def calling(template: ChatTemplate | None, name: str | None = None) -> Calling:
    """How the model of a template calls tools: the format whose parser gives back the calls that it renders.

    Args:
        name: of the format; None: found from the template.
    """
    named = None if name is None else TOOL_FORMATS[name]
    if template is None:
        return Calling(named)
    tools = [
        {"type": "function", "function": {"name": tool, "description": f"Gives {tool}.", "parameters": _SCHEMA}}
        for tool in _PROBES
    ]
    if not template.takes(tools):
        return Calling(named, refusal=template.problem or "the model's chat template takes no tools; leave 'tools' out")
    seen = []
    for as_text in (False, True):
        try:
            one = template.call_text(tools, _probes(1), as_text=as_text)
        except ApiError as error:
            seen.append(error.message)
            continue
        for form in TOOL_FORMATS.values() if named is None else (named,):
            if _round_trips(form, one, 1):
                return Calling(form, _allows_two_calls(template, form, tools, as_text), written=one)
        seen.append(f"it writes {' '.join(one.split())[:60]!r}" if one.strip() else "it writes none")
    template.text_arguments = False
    if named is not None:
        return Calling(named)
    return Calling(None, refusal=(
        f"how the model writes tool calls is not known by its chat template ({seen[0]}); leave 'tools' out, or start "
        "the server with --tool-format"
    ))  # fmt: skip


def _allows_two_calls(
    template: ChatTemplate, form: ToolFormat, tools: Sequence[Mapping[str, Any]], as_text: bool
) -> bool:
    """Whether an answer may have two calls."""
    try:
        return _round_trips(form, template.call_text(tools, _probes(2), as_text=as_text), 2)
    except ApiError:
        return False


def _probes(count: int) -> list[dict[str, Any]]:
    """Calls of the first ones; ids as Mistral's templates want them."""
    return [
        {"id": f"call{i:05}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate([*_PROBES.items()][:count])
    ]


def _round_trips(form: ToolFormat, text: str, count: int) -> bool:
    """Whether a format's parser reads the rendered calls as they were."""
    parser = form.parser(dict.fromkeys(_PROBES, _SCHEMA))
    calls = parser.feed(text).then(parser.finish()).calls
    return [(call.name, json.loads(call.arguments)) for call in calls] == [*_PROBES.items()][:count]
