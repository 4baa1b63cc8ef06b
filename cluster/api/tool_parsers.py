"""Each model's way to write tool calls, as programs that read an answer as it comes (`scanning`).

A call begins, and is shown, once its name and the opening of its arguments are there; until then its text is pending,
and what turns out to be no call is content. Arguments are shown as they come, JSON rewritten as `json.dumps` writes it;
those in elements are read by `tool_xml`. Where the model breaks off, or writes no JSON, the call stays, its arguments
have no end, and what follows is content.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from .scanning import Program, ProgramParser, Scan, Steps, ToolCall, rewritten, written
from .tool_xml import MANY_ARGUMENTS, Fields, Functions, Read, is_name, is_word


def marked(begin: str, end: str | None, read: Read) -> ProgramParser:
    """Calls between two marks, any number of times, after text.

    Args:
        begin, end: the marks. None: there is no end mark.
    """
    marks = (begin,) if end is None else (end, begin)

    def program(scan: Scan) -> Steps[None]:
        while (yield from scan.until((begin,), scan.content)):
            scan.keep()
            yield from scan.next(begin)
            closed = yield from read(scan)
            if closed and (end is None or (yield from scan.close(end))):
                scan.forget()
                continue
            scan.spill()
            if end is not None and (yield from scan.until(marks, scan.content)) and (yield from scan.at(end)):
                yield from scan.next(end)
                scan.content(end)
        if not scan.called:
            scan.space()

    return ProgramParser(program, begin)


def whole_answer(begins: Sequence[str], read: Read) -> ProgramParser:
    """An answer that is calls, as its beginning shows, and text behind them; else it is text."""

    def program(scan: Scan) -> Steps[None]:
        scan.keep()
        if (yield from scan.at(*begins)):
            yield from read(scan)
        scan.spill()
        yield from scan.rest(scan.content)
        if not scan.called:
            scan.space()

    return ProgramParser(program)


def several(begin: str, end: str, read: Read) -> Read:
    """Calls, each between marks of its own."""

    def reads(scan: Scan) -> Steps[bool]:
        called = False
        while (yield from scan.next(begin)):
            if not (yield from read(scan)) or not (yield from scan.close(end)):
                return False
            scan.keep()
            called = True
        return called

    return reads


def gathered(end: str | None, read: Callable[[str], Sequence[ToolCall] | None]) -> Read:
    """Calls that are read once their text is whole, up to a mark or the end of the answer."""

    def reads(scan: Scan) -> Steps[bool]:
        parts: list[str] = []
        yield from (scan.rest(parts.append) if end is None else scan.until((end,), parts.append))
        calls = read("".join(parts)) or ()
        for call in calls:
            scan.whole_call(call.name or "", call.arguments)
        return bool(calls)

    return reads


# JSON


def json_call(scan: Scan) -> Steps[bool]:
    """`{"name": ..., "arguments": {...}}`, or `parameters` (Hermes 2, Qwen 2.5, Qwen 3, Llama 3)."""
    name: str | None = None
    arguments: str | None = None
    called = False
    mark = yield from scan.next("{")
    while mark and mark != "}":
        key = yield from scan.text()
        if key is None or not (yield from scan.next(":")):
            break
        if key == "name" and name is None:
            name = yield from scan.text()
            if not name or "\ufffd" in name:
                return False
        elif key in ("arguments", "parameters") and not called and arguments is None:
            if name is not None and (yield from scan.at("{")):
                if not (yield from scan.object(scan.call(name))):
                    return False
                scan.keep()
                called = True
            else:  # before the name, or as text
                parts: list[str] = []
                if not (yield from scan.value(parts.append)):
                    return False
                arguments = "".join(parts)
                arguments = arguments if arguments[0] == "{" else _object(json.loads(arguments))
                if arguments is None:
                    return False
        elif not (yield from scan.value(lambda _: None)):
            break
        if not called and name is not None and arguments is not None:
            scan.whole_call(name, arguments)
            called = True
        mark = yield from scan.next(",", "}")
    if mark == "}" and name is not None and not called:
        scan.whole_call(name, "{}")
        called = True
    return called


def _object(text: Any) -> str | None:
    """The JSON object that is written in a text; None: it is none."""
    found = rewritten(text) if isinstance(text, str) else None
    return found if found is not None and found[0] == "{" else None


def llama_calls(scan: Scan) -> Steps[bool]:
    """Several with `;` between (Llama 3)."""
    yield from scan.next(PYTHON_TAG)
    while (yield from json_call(scan)):
        scan.keep()
        while (yield from scan.next(";", ",")):
            pass
    return True


PYTHON_TAG = "<|python_tag|>"


def json_calls(scan: Scan) -> Steps[bool]:
    """A JSON list of calls, or one behind the other (MiniMax M1, Apriel)."""
    if not (yield from scan.next("[")):
        called = False
        while (yield from scan.at("{")) and (yield from json_call(scan)):
            called = True
        return called
    while (yield from json_call(scan)):
        mark = yield from scan.next(",", "]")
        if mark != ",":
            return mark == "]" or (yield from scan.peek()) == ""
    return False


def mistral_calls(scan: Scan) -> Steps[bool]:
    """A JSON list of calls, or `NAME[CALL_ID]ID[ARGS]{...}` or `NAME{...}`, each after its own mark."""
    if (yield from scan.at("[")):
        return (yield from json_calls(scan))
    name = ((yield from scan.name("[CALL_ID]", "[ARGS]", "{")) or "").strip()
    if (yield from scan.next("[CALL_ID]")) and not re.fullmatch(r"\w+", (yield from scan.name("[ARGS]", "{")) or ""):
        return False
    yield from scan.next("[ARGS]")
    return is_name(name) and (yield from scan.object(scan.call(name)))


def deepseek_calls(scan: Scan) -> Steps[bool]:
    """`function` SEP NAME and JSON in a fence (DeepSeek V3, R1), or NAME SEP JSON (V3.1), each between marks."""
    called = False
    while (yield from scan.next("<｜tool▁call▁begin｜>")):
        name, fenced = (yield from scan.name(_SEP)), False
        yield from scan.next(_SEP)
        if name == "function" and (yield from scan.peek()) not in ("{", ""):
            name, fenced = (yield from scan.name("\n")), True
            if not (yield from scan.next("```json\n")):
                return False
        if not name or not (yield from scan.object(scan.call(name.strip()))):
            return False
        scan.keep()
        called = True
        if (fenced and not (yield from scan.close("```"))) or not (yield from scan.close("<｜tool▁call▁end｜>")):
            return False
    return called


_SEP = "<｜tool▁sep｜>"


def kimi_calls(scan: Scan) -> Steps[bool]:
    """`functions.NAME:INDEX` ARGUMENT JSON, each between marks (Kimi K2)."""
    called = False
    while (yield from scan.next("<|tool_call_begin|>")):
        head = (yield from scan.name(_ARGUMENT)) or ""
        yield from scan.next(_ARGUMENT)
        name, _, number = head.strip().removeprefix("functions.").rpartition(":")
        if not number.isdecimal() or not is_name(name) or not (yield from scan.object(scan.call(name))):
            return False
        scan.keep()
        called = True
        if not (yield from scan.close("<|tool_call_end|>")):
            return False
    return called


_ARGUMENT = "<|tool_call_argument_begin|>"


# others, read once they are whole


def gemma_call(text: str) -> Sequence[ToolCall] | None:
    """`call:NAME{KEY:VALUE, ...}`, where `<|"|>` is before and behind text and keys have no marks (Gemma 4)."""
    head, mark, rest = text.strip().partition("{")
    name, parts = head.removeprefix("call:"), (mark + rest).split('<|"|>')
    if name == head or not is_name(name) or len(parts) % 2 == 0:
        return None
    parts[0::2] = [_KEY.sub(r'\1"\2":', part).replace("None", "null") for part in parts[0::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    arguments = _object("".join(parts))
    return None if arguments is None else (ToolCall(name, arguments),)


_KEY = re.compile(r"([{,]\s*)([\w.$-]+)\s*:")


def python_calls(text: str) -> Sequence[ToolCall] | None:
    """A list of Python calls with literal keyword arguments: `[get_weather(city="Rome"), get_time()]` (Llama 4, Llama
    3.2); None: the text is something else."""
    if text.count(",") > MANY_ARGUMENTS:
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
    return ToolCall(ast.unparse(node.func), written(arguments))


# channels


def harmony(scan: Scan) -> Steps[None]:
    """gpt-oss's messages: a header with channel and recipient, `<|message|>`, a body, an end mark.

    The final channel, and commentary to nobody, is content; analysis is reasoning; a body to `functions.NAME` is a
    call's arguments.
    """
    while True:
        scan.keep()
        is_header = yield from scan.at(*_HEADERS)
        header = (yield from scan.name(_MESSAGE)) if is_header else None
        shown = scan.content
        if header is not None:
            yield from scan.next(_MESSAGE)
            channel = re.search(r"<\|channel\|>\s*(\w+)", header)
            to = re.search(r"to=functions\.([^\s<]+)", header)
            if to is not None:
                scan.keep()
                if not (yield from scan.at("{")):  # nothing is no arguments
                    if not (yield from scan.peek()) or (yield from scan.at(*_ENDS)):
                        scan.whole_call(to[1], "{}")
                elif (yield from scan.object(scan.call(to[1]))):
                    scan.keep()
                scan.spill()
            elif channel is not None and channel[1] == "analysis":
                shown = scan.reasoning
        elif is_header and not (yield from scan.peek()):
            break
        else:
            scan.spill()  # the model does not keep to its form
        if header is not None:
            scan.forget()
        if not (yield from scan.until(_ENDS, shown)):
            break
        yield from scan.next(*_ENDS)
    if not scan.called:
        scan.space()


_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_HEADERS = ("<|start|>", "<|channel|>", "<|constrain|>", _MESSAGE, "assistant", "to=")


def kimi_channels(functions: Functions) -> Program:
    """Kimi K3's answer behind its reasoning: elements `response` and `tools`, with a `call` for each call and an
    `argument` with key and type for each value, or one `json`. The response is content."""

    def program(scan: Scan) -> Steps[None]:
        while (yield from scan.until(_ELEMENTS, scan.content)):
            if not (yield from scan.next(TOOLS_BEGIN)):
                yield from scan.next(*_ELEMENTS)
                continue
            scan.keep()
            while (yield from _kimi_call(scan, functions)):
                scan.keep()
            scan.spill()
        if not scan.called:
            scan.space()

    return program


def _tag(name: str, opens: bool = True) -> str:
    return f"<|{'open' if opens else 'close'}|>{name}"


_END_TAG = "<|sep|>"
TOOLS_BEGIN = _tag("tools") + _END_TAG
_ELEMENTS = (
    TOOLS_BEGIN, _tag("response") + _END_TAG, "<|end_of_msg|>",
    *(_tag(name, opens=False) + _END_TAG for name in ("response", "tools", "message")),
)  # fmt: skip


def _kimi_call(scan: Scan, functions: Functions) -> Steps[bool]:
    attributes = yield from _attributes(scan, _tag("call "))
    name = attributes.get("tool", "")
    if not is_word(name):
        return False
    if (yield from scan.at(_tag("json"))):
        yield from _attributes(scan, _tag("json"))
        if not (yield from scan.object(scan.call(name))):
            return False
        scan.keep()
        yield from scan.next(_tag("json", opens=False) + _END_TAG)
    else:
        fields = Fields(scan, name, functions)
        while key := (attributes := (yield from _attributes(scan, _tag("argument ")))).get("key"):
            schema = {"type": attributes["type"]} if attributes.get("type") == "string" else {}
            if not (yield from fields.read(key, _tag("argument", opens=False) + _END_TAG, schema)):
                return False
        if not (yield from scan.at(_tag("call", opens=False))):
            return False
        fields.close()
    return bool((yield from scan.next(_tag("call", opens=False) + _END_TAG)))


def _attributes(scan: Scan, begin: str) -> Steps[dict[str, str]]:
    """Read a tag: its attributes. Empty: it is not there."""
    head = (yield from scan.name(_END_TAG)) if (yield from scan.next(begin)) else None
    if head is None:
        return {}
    yield from scan.next(_END_TAG)
    found = re.findall(r'(\w+)="([^"]*)"', head)
    return {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in found}
