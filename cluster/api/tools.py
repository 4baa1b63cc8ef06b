"""Tool calls as models write them, into OpenAI's form.

A model's chat template says how it writes a call; `TOOL_FORMATS` has a parser for each way. A parser is fed the shown
text of one choice as it comes. Text that may still become a call is pending; a call is given out once it is whole.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .text import overlap


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
        marks: texts in a chat template that show it; one suffices.
        special: it is written with special tokens, which are to be shown to the parser.
        parser: makes one for a choice.
        always: it gives every answer its form, also without tools.
        grammar: Lark, of one or more calls, by the JSON schemas of the functions' arguments; None: calls cannot be
            forced.
    """

    marks: tuple[str, ...]
    special: bool
    parser: Callable[[], Parser]
    always: bool = False
    grammar: Callable[[dict[str, Any], bool], str] | None = None


class PlainParser:
    """All of it is content."""

    def feed(self, text: str) -> Parsed:
        return Parsed(text)

    def finish(self) -> Parsed:
        return Parsed()


class HermesParser:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, after text (Hermes 2, Qwen)."""

    def __init__(self) -> None:
        self._text = self._call = self._space = ""
        self._inside = self._called = False

    def feed(self, text: str) -> Parsed:
        self._text += text
        out = Parsed()
        while True:
            ready, mark, self._text = cut(self._text, ("</tool_call>" if self._inside else "<tool_call>",))
            if self._inside:
                self._call += ready
            else:
                out = out.then(Parsed(self._shown(ready)))
            if mark is None:
                return out
            if self._inside:
                out = out.then(self._close("</tool_call>"))
            self._inside = not self._inside

    def finish(self) -> Parsed:
        if self._inside:
            self._call += self._text  # some models stop before the mark
            self._inside = False
            return self._close("")
        shown = self._shown(self._text)
        return Parsed(shown if self._called else shown + self._space)

    def _close(self, mark: str) -> Parsed:
        call, text = call_of(_json(self._call)), self._call
        self._call = ""
        if call is None:
            return Parsed(self._shown(f"<tool_call>{text}{mark}"))
        self._called = True
        return Parsed(calls=(call,))

    def _shown(self, text: str) -> str:
        """Space before and between calls is no content."""
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if self._called and not shown.strip():
            return ""
        return shown


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
        try:
            found = ast.parse(self._text.strip(), mode="eval").body
            if isinstance(found, ast.List) and found.elts:
                return Parsed(calls=tuple(_python_call(part) for part in found.elts))
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            pass
        return Parsed(self._text)


def _python_call(node: ast.expr) -> ToolCall:
    """Raises ValueError: it is none, or its arguments are no literals."""
    if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
        raise ValueError("no call by keywords")
    words = {"true": True, "false": False, "null": None}
    arguments = {
        str(word.arg): words[word.value.id]
        if isinstance(word.value, ast.Name) and word.value.id in words
        else ast.literal_eval(word.value)
        for word in node.keywords
    }
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
            ready, mark, self._text = cut(self._text, marks)
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


def cut(text: str, marks: Sequence[str]) -> tuple[str, str | None, str]:
    """(text before the first mark, the mark, text after it), or (text that is no part of a mark, None, the rest)."""
    found = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
    if found:
        place, mark = min(found)
        return text[:place], mark, text[place + len(mark) :]
    ready = len(text) - max(overlap(text, mark) for mark in marks)
    return text[:ready], None, text[ready:]


def call_of(value: Any) -> ToolCall | None:
    """The call that an object with a name and arguments (or parameters) is; None: it is none."""
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
    """One call, in the channel of calls; special tokens are grammar symbols of their own."""
    names = [f"call_{i}" for i in range(len(functions))]
    rules = [
        f'{rule}: <|channel|> "commentary to=functions.{name} " <|constrain|> "json" <|message|> args_{i}\n'
        f"args_{i}: %json {json.dumps(schema)}\n"
        for i, (rule, (name, schema)) in enumerate(zip(names, functions.items(), strict=True))
    ]
    return f"start: {' | '.join(names)}\n" + "".join(rules)


# in the order in which they are looked for
TOOL_FORMATS: dict[str, ToolFormat] = {
    "harmony": ToolFormat(("<|channel|>",), True, HarmonyParser, always=True, grammar=_harmony_grammar),
    "pythonic": ToolFormat(("[func_name1(",), False, PythonicParser),
    "hermes": ToolFormat(("<tool_call>",), False, HermesParser, grammar=_hermes_grammar),
    "llama-json": ToolFormat(("<|python_tag|>", '"parameters": dictionary'), True, LlamaJsonParser,
                             grammar=_llama_grammar),
}  # fmt: skip


def tool_format(template: str, name: str | None = None) -> ToolFormat | None:
    """The format of a chat template, or the one that is named; None: the template shows none that is known."""
    if name is not None:
        return TOOL_FORMATS[name]
    if "<function=" in template:  # Qwen3-Coder's calls, which are no JSON
        return None
    found = [form for form in TOOL_FORMATS.values() if any(mark in template for mark in form.marks)]
    return found[0] if found else None
