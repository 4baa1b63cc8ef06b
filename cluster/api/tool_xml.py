"""Tool calls whose arguments are elements: XML, with each value in the type of the function's schema.

Text is shown as it comes, other values once they are whole.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .scanning import Put, Scan, Steps, rewritten, written

MANY_ARGUMENTS = 10_000  # that Python's parser reads, which takes microseconds for each under the interpreter's lock
_DEEP = 30  # elements in elements
_MANY_FORMS = 64  # of one value, that are looked at in its schema
Functions = Mapping[str, Any]  # the JSON schema of each one's arguments
Read = Callable[[Scan], Steps[bool]]  # a call, or several; False: what is read is none, or from here on


def is_name(text: str | None) -> bool:
    return re.fullmatch(r"[\w.-]+", text or "") is not None


def is_word(text: str | None) -> bool:
    return text is not None and text.split() == [text] and "<" not in text


class Fields:
    """The arguments of a call whose values are plain text, as they come; their types are those of the schema."""

    def __init__(self, scan: Scan, name: str, functions: Functions) -> None:
        schema = functions.get(name)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        self._known = properties if isinstance(properties, dict) else {}
        self._scan, self._put, self._separator = scan, scan.call(name), ""
        self._put("{")
        self._put("")
        scan.keep()

    def schema(self, key: str) -> Any:
        return self._known.get(key)

    def put(self, key: str, value: str) -> None:
        """A value that is JSON, or its beginning."""
        self._put(f"{self._separator}{written(key)}: {value}")
        self._separator = ", "
        self._scan.keep()

    def read(self, key: str, end: str, schema: Any, *, lines: bool = False) -> Steps[bool]:
        """Read a value up to its end mark, and the mark. False: the text ends before.

        Args:
            lines: the value is on lines of its own.
        """
        types = _types(schema)
        if "string" in types and "null" not in types:
            self.put(key, '"')
            self._scan.forget()
            inner = _Text(self._put, lines)
            if not (yield from self._scan.until((end,), inner.add, begun_too=False)):
                return False
            self._put('"')
        else:
            parts: list[str] = []
            if not (yield from self._scan.until((end,), parts.append)):
                return False
            text = "".join(parts)
            self.put(key, _typed(text.removeprefix("\n").removesuffix("\n") if lines else text, schema))
        yield from self._scan.next(end)
        self._scan.keep()
        return True

    def close(self) -> None:
        self._put("}")
        self._scan.keep()


class _Text:
    """The inside of a JSON string, as it comes.

    Args:
        lines: a line break at its begin and at its end are left out.
    """

    def __init__(self, put: Put, lines: bool) -> None:
        self._put, self._lines = put, lines
        self._begun, self._held = not lines, ""

    def add(self, text: str) -> None:
        if not self._begun:
            self._begun, text = True, text.removeprefix("\n")
        text = self._held + text
        self._held = "\n" if self._lines and text.endswith("\n") else ""
        self._put(written(text.removesuffix(self._held))[1:-1])


def xml_call(functions: Functions) -> Read:
    """`<function=NAME>`, then `<parameter=KEY>` VALUE `</parameter>` for each argument (Qwen 3 Coder, Nemotron 3)."""

    def read(scan: Scan) -> Steps[bool]:
        named = yield from scan.next("<function=")
        name = (yield from scan.name(">")) if named else None
        if name is None or not is_word(name):
            return False
        yield from scan.next(">")
        fields = Fields(scan, name, functions)
        while (yield from scan.next("<parameter=")):
            key = yield from scan.name(">")
            if key is None or not is_word(key):
                return False
            yield from scan.next(">")
            if not (yield from fields.read(key, "</parameter>", fields.schema(key), lines=True)):
                return False
        ended = yield from scan.at("</tool_call>", "</seed:tool_call>")  # some leave the function's end mark out
        if not ended and not (yield from scan.close("</function>")):
            return False
        fields.close()
        return True

    return read


def glm_call(functions: Functions, mark: str = "") -> Read:
    """NAME, then `<arg_key>KEY</arg_key>` and `<arg_value>VALUE</arg_value>` for each argument (GLM 4.5 and later);
    with a mark in each tag, and `<tool_sep>` behind the name (Hunyuan 3)."""
    key_ends, value_ends, end = f"</arg_key{mark}>", f"</arg_value{mark}>", f"</tool_call{mark}>"

    def read(scan: Scan) -> Steps[bool]:
        name = ((yield from scan.name(f"<tool_sep{mark}>", f"<arg_key{mark}>", end)) or "").strip()
        if not is_name(name):
            return False
        yield from scan.next(f"<tool_sep{mark}>")
        fields = Fields(scan, name, functions)
        while (yield from scan.next(f"<arg_key{mark}>")):
            key = yield from scan.name(key_ends)
            yield from scan.next(key_ends)
            if key is None or not (yield from scan.next(f"<arg_value{mark}>")):
                return False
            if not (yield from fields.read(key.strip(), value_ends, fields.schema(key.strip()))):
                return False
        if not (yield from scan.at(end)) and not (yield from scan.close(end)):
            return False
        fields.close()
        return True

    return read


def invoke_calls(functions: Functions, mark: str = "") -> Read:
    """`<invoke name="NAME">`, `<parameter name="KEY">` VALUE `</parameter>` for each argument, `</invoke>`, several one
    after the other (MiniMax M2); with DeepSeek's mark before each word, and `string="true"` of values that are text
    (DeepSeek V3.2, V4)."""
    invoke, end = f"<{mark}invoke name=", f"</{mark}invoke>"
    parameter, ends = f"<{mark}parameter name=", f"</{mark}parameter>"

    def read(scan: Scan) -> Steps[bool]:
        called = False
        while (yield from scan.next(invoke)):
            name = ((yield from scan.name(">")) or "").strip().strip('"')
            if not is_word(name):
                return False
            yield from scan.next(">")
            fields = Fields(scan, name, functions)
            while (yield from scan.next(parameter)):
                head = ((yield from scan.name(">")) or "").strip()
                key, _, kind = head.removeprefix('"').partition('"')
                if not key:
                    return False
                yield from scan.next(">")
                if not (yield from fields.read(key, ends, _STRING.get(kind.strip(), fields.schema(key)))):
                    return False
            if not (yield from scan.next(end)):
                return False
            fields.close()
            called = True
        return called

    return read


_STRING: dict[str, Any] = {'string="true"': {"type": "string"}, 'string="false"': {}}


def element_calls(functions: Functions) -> Read:
    """`<invoke name="NAME">`, then `<KEY>` VALUE `</KEY>` for each argument, where objects and lists are elements of
    such elements; a mark is before each (MiniMax M3)."""

    def read(scan: Scan) -> Steps[bool]:
        called = False
        while (yield from scan.next(f"{ELEMENT}<invoke name=")):
            name = ((yield from scan.name(">")) or "").strip().strip('"')
            if not is_word(name):
                return False
            yield from scan.next(">")
            fields = Fields(scan, name, functions)
            while not (yield from scan.next(f"{ELEMENT}</invoke>")):
                if not (yield from scan.next(f"{ELEMENT}<")):
                    return False
                key = yield from scan.name(">")
                value = None if key is None else (yield from _element(scan, key, fields.schema(key), _DEEP))
                if key is None or value is None:
                    return False
                fields.put(key, value)
            fields.close()
            called = True
        return called

    return read


ELEMENT = "]<]minimax[>["


def _element(scan: Scan, tag: str, schema: Any, deep: int) -> Steps[str | None]:
    """Read the rest of an element: its value as JSON. None: it does not end, or contains another."""
    parts: list[str] = []
    inner: list[tuple[str, str]] = []
    yield from scan.next(">")
    while deep and (yield from scan.until((ELEMENT,), parts.append)):
        if (yield from scan.next(f"{ELEMENT}</{tag}>")):
            return _value_of("".join(parts), inner, schema)
        key = (yield from scan.name(">")) if (yield from scan.next(f"{ELEMENT}<")) else None
        if key is None or not is_word(key):
            return None
        of_key = _part(schema, "items") if key == "item" else _part(_part(schema, "properties"), key)
        value = yield from _element(scan, key, of_key, deep - 1)
        if value is None:
            return None
        inner.append((key, value))
    return None


def _value_of(text: str, inner: Sequence[tuple[str, str]], schema: Any) -> str:
    """JSON of an element with this text, or with these elements in it."""
    types = _types(schema)
    is_list = "array" in types or ("object" not in types and all(key == "item" for key, _ in inner))
    if inner and is_list:
        return f"[{', '.join(value for _, value in inner)}]"
    if inner:
        return "{" + ", ".join(f"{written(key)}: {value}" for key, value in inner) + "}"
    if not text.strip() and types & {"array", "object"}:
        return "[]" if "array" in types else "{}"
    return _typed(text, schema)


def _part(schema: Any, name: str) -> Any:
    return schema.get(name) if isinstance(schema, dict) else None


def _typed(text: str, schema: Any) -> str:
    """JSON of a value of a schema: a string is the text itself; others are JSON, or Python's literals."""
    types = _types(schema)
    if "string" in types and not ("null" in types and text.strip() in ("null", "None")):
        return written(text)
    if (found := rewritten(text)) is not None:
        return found
    if text.count(",") <= MANY_ARGUMENTS:
        try:
            return written(ast.literal_eval(text.strip()))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            pass
    return written(text)


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema names, whatever it is: clients write it. Asked for each value of an answer."""
    found, schemas = set[str](), [schema]
    for _ in range(_MANY_FORMS):
        if not schemas:
            break
        one = schemas.pop()
        if not isinstance(one, dict):
            continue
        named = one.get("type")
        found |= {name for name in (named, *_list(named)) if isinstance(name, str)}
        if any(isinstance(value, str) for value in _list(one.get("enum"))):
            found.add("string")
        schemas += _list(one.get("anyOf")) + _list(one.get("oneOf"))
    return found


def _list(found: Any) -> list[Any]:
    return found[:_MANY_FORMS] if isinstance(found, list) else []
