"""What models write, into content, reasoning and calls: a parser for each way to write tool calls.

A parser is fed the shown text of one choice as it comes. Text that may still become a call is pending; a call is given
out once it is whole. The work is linear in the text, however it is cut and whatever it is: places are found from left
to right, and what ends a search ends it for all of the text.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .text import overlap

_MANY_ARGUMENTS = 10_000  # that Python's parser reads, which takes microseconds for each under the interpreter's lock
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
    """One choice's text into content and calls.

    Attributes:
        begin: what calls begin with wherever they are; None: a place shows them, or they have their own channel.
    """

    begin: str | None

    def feed(self, text: str) -> Parsed: ...

    def finish(self) -> Parsed:
        """What is pending, when no more text comes."""
        ...


class Trimmer:
    """Text as it comes; space at its end is pending until text follows."""

    def __init__(self) -> None:
        self._space: list[str] = []

    def add(self, text: str) -> str:
        """What may be shown."""
        shown = text.rstrip()
        if not shown:
            self._space.append(text)
            return ""
        before, self._space = "".join(self._space), [text[len(shown) :]]
        return before + shown

    def rest(self) -> str:
        """The space that is pending."""
        return "".join(self._space)


class PlainParser:
    """All of it is content."""

    begin: str | None = None

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
        self.begin: str | None = begin
        self._text = ""  # may become a mark
        self._call: list[str] = []
        self._shown = Trimmer()  # space before and between calls is not content
        self._inside = self._called = False

    def feed(self, text: str) -> Parsed:
        text, place = self._text + text, 0
        content: list[str] = []
        calls: list[ToolCall] = []
        while True:
            wanted = self._marks[self._inside]
            at = -1 if wanted is None else text.find(wanted, place)
            end = at if at >= 0 else len(text) - begun(text, place, (wanted,) if wanted else ())
            if self._inside:
                self._call.append(text[place:end])
            else:
                content.append(self._shown.add(text[place:end]))
            if at < 0 or wanted is None:
                self._text = text[end:]
                return Parsed("".join(content), calls=tuple(calls))
            if self._inside:
                closed = self._close(wanted)
                content.append(closed.content)
                calls += closed.calls
            place, self._inside = at + len(wanted), not self._inside

    def finish(self) -> Parsed:
        if self._inside:
            self._call.append(self._text)  # some models stop before the mark
            self._inside = False
            return self._close("")
        shown = self._shown.add(self._text)
        return Parsed(shown if self._called else shown + self._shown.rest())

    def _close(self, mark: str) -> Parsed:
        text, self._call = "".join(self._call), []
        calls = self._read(text)
        if not calls:
            return Parsed(self._shown.add(f"{self._marks[0]}{text}{mark}"))
        self._called = True
        return Parsed(calls=tuple(calls))


def begun(text: str, place: int, marks: Sequence[str]) -> int:
    """Characters at the end of a text, from a place on, with which one of the marks begins."""
    longest = max(map(len, marks), default=1)
    tail = text[max(place, len(text) - longest + 1) :]
    return max((overlap(tail, mark) for mark in marks), default=0)


def _enclosed(text: str, *marks: tuple[str, str]) -> list[tuple[str, ...]] | None:
    """The texts between pairs of marks that follow each other, any number of times; None: other text than space is
    outside of them."""
    found, place = [], 0
    while text.find(marks[0][0], place) >= 0:
        row = []
        for begin, end in marks:
            start = text.find(begin, place)
            stop = -1 if start < 0 else text.find(end, start + len(begin))
            if stop < 0 or text[place:start].strip():
                return None
            row.append(text[start + len(begin) : stop])
            place = stop + len(end)
        found.append(tuple(row))
    return None if text[place:].strip() else found


def _is_name(text: str) -> bool:
    return re.fullmatch(r"[\w.-]+", text) is not None


def hermes_call(text: str) -> Sequence[ToolCall] | None:
    """`{"name": ..., "arguments": {...}}` (Hermes 2, Qwen 2.5, Qwen 3)."""
    call = call_of(_json(text))
    return None if call is None else (call,)


def xml_call(functions: Functions) -> Callable[[str], Sequence[ToolCall] | None]:
    """`<function=NAME>`, then `<parameter=KEY>` VALUE `</parameter>` for each argument (Qwen 3 Coder, Nemotron 3)."""

    def read(text: str) -> Sequence[ToolCall] | None:
        head, mark, body = text.strip().removesuffix("</function>").partition(">")
        name, rows = head.removeprefix("<function="), _enclosed(body, ("<parameter=", "</parameter>"))
        if name == head or not mark or not _is_word(name) or rows is None:
            return None
        pairs = []
        for (inside,) in rows:
            key, mark, value = inside.partition(">")
            if not mark or not _is_word(key):
                return None
            pairs.append((key, value.removeprefix("\n").removesuffix("\n")))
        return (_typed_call(name, pairs, functions),)

    return read


def _is_word(text: str) -> bool:
    return text.split() == [text] and "<" not in text


def glm_call(functions: Functions) -> Callable[[str], Sequence[ToolCall] | None]:
    """NAME, then `<arg_key>KEY</arg_key>` and `<arg_value>VALUE</arg_value>` for each argument (GLM 4.5 and later)."""

    def read(text: str) -> Sequence[ToolCall] | None:
        name, mark, rest = text.partition("<arg_key>")
        rows = _enclosed(mark + rest, ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"))
        if rows is None or not _is_name(name.strip()):
            return None
        return (_typed_call(name.strip(), [(key.strip(), value) for key, value in rows], functions),)

    return read


def invoke_calls(functions: Functions, mark: str = "") -> Callable[[str], Sequence[ToolCall] | None]:
    """`<invoke name="NAME">`, `<parameter name="KEY">` VALUE `</parameter>` for each argument, `</invoke>`, several one
    after the other (MiniMax M2); with DeepSeek's mark before each word, and `string="true"` of values that are text
    (DeepSeek V3.2)."""

    def read(text: str) -> Sequence[ToolCall] | None:
        rows = _enclosed(text, (f"<{mark}invoke name=", f"</{mark}invoke>"))
        calls = [_invoked(inside, mark, functions) for (inside,) in rows or ()]
        return None if rows is None or None in calls else [call for call in calls if call is not None]

    return read


def _invoked(text: str, mark: str, functions: Functions) -> ToolCall | None:
    head, end, body = text.partition(">")
    name, rows = head.strip().strip('"'), _enclosed(body, (f"<{mark}parameter name=", f"</{mark}parameter>"))
    if not end or not _is_word(name) or rows is None:
        return None
    pairs, said = [], {}
    for (inside,) in rows:
        head, end, value = inside.partition(">")
        key, _, kind = head.strip().removeprefix('"').partition('"')
        if not end or not key:
            return None
        if kind.strip() in _STRING:
            said[key] = _STRING[kind.strip()]
        pairs.append((key, value))
    return _typed_call(name, pairs, {name: {"properties": said}} if said else functions)


_STRING: dict[str, Any] = {'string="true"': {"type": "string"}, 'string="false"': {}}


def gemma_call(text: str) -> Sequence[ToolCall] | None:
    """`call:NAME{KEY:VALUE, ...}`, where `<|"|>` is before and behind text and keys have no marks (Gemma 4)."""
    head, mark, rest = text.strip().partition("{")
    name, parts = head.removeprefix("call:"), (mark + rest).split('<|"|>')
    if name == head or not _is_name(name) or len(parts) % 2 == 0:
        return None
    parts[0::2] = [_KEY.sub(r'\1"\2":', part).replace("None", "null") for part in parts[0::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    call = call_of({"name": name, "arguments": _json("".join(parts))})
    return None if call is None else (call,)


_KEY = re.compile(r"([{,]\s*)([\w.$-]+)\s*:")


def _typed_call(name: str, pairs: Sequence[tuple[str, str]], functions: Functions) -> ToolCall:
    """A call whose arguments are plain text: their types are those of the function's schema."""
    schema = functions.get(name)
    properties = schema.get("properties") if isinstance(schema, dict) else None
    known = properties if isinstance(properties, dict) else {}
    arguments = {key: _typed(value, known.get(key)) for key, value in pairs}
    return ToolCall(name, _written(arguments))


def _typed(text: str, schema: Any) -> Any:
    """A value of a schema: a string is the text itself; others are JSON, or Python's literals."""
    types = _types(schema)
    if "string" in types and not ("null" in types and text.strip() in ("null", "None")):
        return text
    for read in (json.loads, ast.literal_eval) if text.count(",") <= _MANY_ARGUMENTS else (json.loads,):
        try:
            found = read(text.strip())
            _written(found)
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


def mistral_calls(text: str) -> Sequence[ToolCall] | None:
    """A JSON list of calls, or `NAME[CALL_ID]ID[ARGS]{...}` or `NAME{...}`, several, each after its own mark."""
    listed = _json(text)
    if isinstance(listed, list):
        calls = [call_of(value) for value in listed]
    else:
        calls = [_mistral_call(part) for part in text.split("[TOOL_CALLS]")]
    return None if None in calls else [call for call in calls if call is not None]


def _mistral_call(text: str) -> ToolCall | None:
    head, mark, rest = text.partition("{")
    head, _, call_id = head.strip().removesuffix("[ARGS]").partition("[CALL_ID]")
    known = _is_name(head) and (not _ or re.fullmatch(r"\w+", call_id))
    return call_of({"name": head, "arguments": _json(mark + rest)}) if known else None


def deepseek_calls(text: str) -> Sequence[ToolCall] | None:
    """`function` SEP NAME and JSON in a fence (DeepSeek V3, R1), or NAME SEP JSON (V3.1), each between marks."""
    rows = _enclosed(text, ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"))
    calls: list[ToolCall] = []
    for (inside,) in rows or ():
        name, mark, arguments = inside.partition("<｜tool▁sep｜>")
        if name == "function":
            named, _, fenced = arguments.partition("\n")
            bare = fenced.removeprefix("```json\n").removesuffix("\n```")
            if named and len(bare) == len(fenced) - len("```json\n\n```"):
                name, arguments = named, bare
        call = call_of({"name": name.strip(), "arguments": _json(arguments)}) if mark else None
        if call is None:
            return None
        calls.append(call)
    return None if rows is None else calls


def kimi_calls(text: str) -> Sequence[ToolCall] | None:
    """`functions.NAME:INDEX` ARGUMENT JSON, each between marks (Kimi K2)."""
    rows = _enclosed(text, ("<|tool_call_begin|>", "<|tool_call_end|>"))
    calls: list[ToolCall] = []
    for (inside,) in rows or ():
        head, mark, arguments = inside.partition("<|tool_call_argument_begin|>")
        name, _, number = head.strip().removeprefix("functions.").rpartition(":")
        known = mark and number.isdecimal() and _is_name(name)
        call = call_of({"name": name, "arguments": _json(arguments)}) if known else None
        if call is None:
            return None
        calls.append(call)
    return None if rows is None else calls


class WholeParser:
    """An answer that is calls as a whole, or text as its beginning shows.

    Args:
        begins: what calls may begin with, after space.
        read: parses the answer into calls; None: it is text.
    """

    begin: str | None = None

    def __init__(self, begins: tuple[str, ...], read: Callable[[str], Sequence[ToolCall] | None]) -> None:
        self._begins, self._read = begins, read
        self._parts: list[str] = []
        self._begin = ""  # of the answer, until it is known what it is
        self._content: bool | None = None

    def feed(self, text: str) -> Parsed:
        if self._content:
            return Parsed(text)
        self._parts.append(text)
        if self._content is None:
            self._begin += text if self._begin else text.lstrip()
            if self._begin.startswith(self._begins):
                self._content = False
            elif not any(begin.startswith(self._begin) for begin in self._begins):
                self._content = True
                return Parsed("".join(self._parts))
        return Parsed()

    def finish(self) -> Parsed:
        if self._content:
            return Parsed()
        text = "".join(self._parts)
        calls = self._read(text)
        return Parsed(calls=tuple(calls)) if calls else Parsed(text)


PYTHON_TAG = "<|python_tag|>"


def llama_calls(text: str) -> Sequence[ToolCall] | None:
    """`{"name": ..., "parameters": {...}}`, several with `;` between (Llama 3)."""
    text, place = text.strip().removeprefix(PYTHON_TAG), 0
    calls: list[ToolCall] = []
    decoder = json.JSONDecoder()
    while True:
        while place < len(text) and (text[place] in ";," or text[place].isspace()):
            place += 1
        if place == len(text):
            return calls
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            return None
        call = call_of(value)
        if call is None:
            return None
        calls.append(call)


def python_calls(text: str) -> Sequence[ToolCall] | None:
    """A list of Python calls with literal keyword arguments: `[get_weather(city="Rome"), get_time()]` (Llama 4, Llama
    3.2); None: the text is something else."""
    if text.count(",") > _MANY_ARGUMENTS:
        return None
    text = text.strip()
    for source in (text, text.replace("\n", "\\n")) if "\n" in text else (text,):  # some write lines as they are
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
    return ToolCall(ast.unparse(node.func), _written(arguments))


class HarmonyParser:
    """gpt-oss's messages: a header with channel and recipient, `<|message|>`, a body, an end mark.

    The final channel, and commentary to nobody, is content; analysis is reasoning; a body to `functions.NAME` is a
    call's arguments.
    """

    begin: str | None = None
    _ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
    _MESSAGE = "<|message|>"
    _LONG_HEADER = 1024

    def __init__(self) -> None:
        self._text = ""  # a header so far, or what may become a mark
        self._header = True
        self._kind, self._name = "final", ""
        self._body: list[str] = []

    def feed(self, text: str) -> Parsed:
        text, place = self._text + text, 0
        shown: dict[str, list[str]] = {"content": [], "reasoning": []}
        calls: list[ToolCall] = []
        while True:
            if self._header:
                mark: str | None = self._MESSAGE
                at = text.find(self._MESSAGE, place, place + self._LONG_HEADER + len(self._MESSAGE))
                end = at if at >= 0 else len(text) - begun(text, place, (self._MESSAGE,))
                if end - place > self._LONG_HEADER or not _header_like(text[place:end]):
                    self._header, self._kind = False, "final"  # the model does not keep to its form
                    continue
                if at >= 0:
                    self._begin(text[place:end])
            else:
                at, mark = _first(text, place, self._ENDS)
                end = at if at >= 0 else len(text) - begun(text, place, self._ENDS)
                self._take(text[place:end], shown)
                if at >= 0:
                    self._end(shown, calls)
            if at < 0 or mark is None:
                self._text = text[place if self._header else end :]
                return Parsed("".join(shown["content"]), "".join(shown["reasoning"]), tuple(calls))
            place = at + len(mark)

    def finish(self) -> Parsed:
        shown: dict[str, list[str]] = {"content": [], "reasoning": []}
        calls: list[ToolCall] = []
        if not self._header:
            self._take(self._text, shown)
            self._end(shown, calls)
        self._text = ""
        return Parsed("".join(shown["content"]), "".join(shown["reasoning"]), tuple(calls))

    def _begin(self, header: str) -> None:
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        to = re.search(r"to=functions\.([^\s<]+)", header)
        self._kind = "call" if to is not None else "final" if channel is None else channel[1]
        self._name, self._header, self._body = "" if to is None else to[1], False, []

    def _take(self, text: str, shown: Mapping[str, list[str]]) -> None:
        if self._kind == "call":
            self._body.append(text)
        else:
            shown["reasoning" if self._kind == "analysis" else "content"].append(text)

    def _end(self, shown: Mapping[str, list[str]], calls: list[ToolCall]) -> None:
        body, kind = "".join(self._body).strip(), self._kind
        self._header, self._body = True, []
        if kind == "call" and isinstance(_json(body or "{}"), dict):
            calls.append(ToolCall(self._name, body or "{}"))
        elif kind == "call":
            shown["content"].append(body)


def _first(text: str, place: int, marks: Sequence[str]) -> tuple[int, str | None]:
    """Where the first of some marks is, from a place on, and which; all begin with `<|`."""
    while (place := text.find("<|", place)) >= 0:
        for mark in marks:
            if text.startswith(mark, place):
                return place, mark
        place += 1
    return -1, None


def _header_like(text: str) -> bool:
    begin = text.lstrip()
    marks = ("<|start|>", "<|channel|>", "<|constrain|>", "assistant", "to=")
    return not begin or any(begin.startswith(mark) or mark.startswith(begin) for mark in marks)


def call_of(value: Any) -> ToolCall | None:
    """The call of an object with a name and arguments (or parameters); None: it is not one."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not _encodable(name):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if not isinstance(arguments, dict):
        return None
    try:
        return ToolCall(name, _written(arguments))
    except (ValueError, RecursionError):
        return None


def _json(text: str) -> Any:
    """None: it is not JSON, which has no NaN and no infinity."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return None


def _no_number(name: str) -> None:
    raise ValueError(f"JSON has no {name}")


def _written(value: Any) -> str:
    """JSON of what a model wrote. Raises ValueError: it has a number beyond all floats (1e999)."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # half of a surrogate pair cannot be sent but as its escape
    return text if _encodable(text) else json.dumps(value, allow_nan=False)


def _encodable(text: str) -> bool:
    """Whether it can be sent: without halves of surrogate pairs, which only escapes write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
