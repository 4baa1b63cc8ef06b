"""An answer's text, read as it comes by a program that waits for more: what the parsers of `tool_parsers` are made of.

A program is a generator over a `Scan`. It reads the text from left to right by the verbs of `Scan`, and yields where it
needs text that has not come. What it shows is the same however the text is cut. Unread text is never longer than a mark
or a number, and each letter is read once: the work is linear in the text, whatever it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeVar

from .text import overlap

T = TypeVar("T")
Steps = Generator[None, None, T]
Put = Callable[[str], object]

_LONG_NAME = 1024  # letters of a name, a key, a header
_LONG_NUMBER = 4096  # letters; Python reads 4,300 digits
_DEEP = 100  # brackets in brackets; clients' readers end at 200
_SPACE, _WORD, _ALL = re.compile(r"\s*"), re.compile(r"[-+.\w]*"), re.compile(r"[\s\S]*")
_HALVES = re.compile(r"[\ud800-\udfff]")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # what a JSON string is written with as it is
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_ESCAPED = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


@dataclass(frozen=True)
class ToolCall:
    """A call, or more of one.

    name: None: the arguments continue those of the call before.
    arguments: the text of a JSON object, or a part of it. A model that breaks off leaves it without its end.
    """

    name: str | None
    arguments: str


@dataclass(frozen=True)
class Parsed:
    """What is new of a choice. A call that continues comes first, and before the content."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    def then(self, later: Parsed) -> Parsed:
        """Both as one."""
        calls, more = self.calls, later.calls
        if calls and more and more[0].name is None:
            calls, more = (*calls[:-1], ToolCall(calls[-1].name, calls[-1].arguments + more[0].arguments)), more[1:]
        return Parsed(self.content + later.content, self.reasoning + later.reasoning, calls + more)


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


class Scan:
    """The text of one answer, and what a program makes of it.

    Text that may become a call is kept (`keep`) until the call is certain. What turns out to be none is content
    (`spill`).

    Attributes:
        called: whether a call was certain.
        unread: letters that have come and are not read.
    """

    def __init__(self) -> None:
        self._text, self._place, self._ended = "", 0, False
        self._kept: list[str] | None = None
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str | None, list[str]]] = []
        self._trimmer = Trimmer()  # space before and between calls is no content
        self.called = False

    @property
    def unread(self) -> int:
        return len(self._text) - self._place

    def add(self, text: str) -> None:
        self._text, self._place = self._text[self._place :] + text, 0

    def end(self) -> None:
        """No more text comes."""
        self._ended = True

    def taken(self) -> Parsed:
        """What has been made since the last time."""
        calls = tuple(ToolCall(name, "".join(parts)) for name, parts in self._calls)
        found = Parsed("".join(self._content), "".join(self._reasoning), calls)
        self._content, self._reasoning, self._calls = [], [], []
        return found

    # what a program makes

    def content(self, text: str) -> None:
        """Show text; what space it ends with, once text follows."""
        self._content.append(self._trimmer.add(text))

    def show(self, text: str) -> None:
        """Show text as it is."""
        self._content.append(text)

    def reasoning(self, text: str) -> None:
        self._reasoning.append(text)

    def space(self) -> None:
        """Show the space that was left at the end."""
        self._content.append(self._trimmer.rest())

    def call(self, name: str) -> Put:
        """Where the arguments of a new call go. It is certain, and begins, with what follows the first bracket."""
        held = [""]

        def put(text: str) -> None:
            if held == [""]:
                held[0] = text
            elif held:
                self._calls.append((name, [held.pop() + text]))
                self._kept, self.called = None, True
            elif self._calls:
                self._calls[-1][1].append(text)
            else:
                self._calls.append((None, [text]))

        return put

    def whole_call(self, name: str, arguments: str) -> None:
        put = self.call(name)
        put(arguments[:1])
        put(arguments[1:])
        self.keep()

    def keep(self) -> None:
        """Forget what is kept, and keep what is read from now on."""
        self._kept = []

    def spill(self) -> None:
        """Show what is kept, and keep no more."""
        kept, self._kept = self._kept, None
        self.content("".join(kept or ()))

    def forget(self) -> None:
        """Show nothing of what is kept, and keep no more."""
        self._kept = None

    # what it reads

    def rest(self, put: Put) -> Steps[None]:
        """Read all."""
        return self._run(_ALL, put)

    def until(self, marks: Sequence[str], put: Put, *, begun_too: bool = True) -> Steps[bool]:
        """Read up to the first of some marks, which is not read. False: the text ends before; all of it is read.

        Args:
            put: gets what is before the mark, as it comes.
            begun_too: also the beginning of a mark with which the text ends.
        """
        wanted = _any_of(tuple(marks))
        while True:
            found = wanted.search(self._text, self._place)
            end = found.start() if found else len(self._text)
            if found is None and not (self._ended and begun_too):
                end -= begun(self._text, self._place, marks)
            if end > self._place:
                put(self._read(end))
            if found is not None:
                return True
            if self._ended:
                self._read(len(self._text))
                return False
            yield

    def name(self, *ends: str) -> Steps[str | None]:
        """Read up to the first of some marks, which is not read. None: it does not come, or after too much."""
        parts: list[str] = []
        left, wanted, longest = _LONG_NAME, _any_of(ends), max(map(len, ends))
        while True:
            found = wanted.search(self._text, self._place, self._place + left - 1 + longest)
            end = found.start() if found else len(self._text) - begun(self._text, self._place, ends)
            text = self._read(min(end, self._place + left))
            parts.append(text)
            left -= len(text)
            if found is not None and left:
                return "".join(parts)
            if self._ended or not left:
                return None
            yield

    def at(self, *marks: str) -> Steps[str]:
        """Read space, and tell which of some marks comes then, which is not read. Empty: none of them."""
        yield from self._run(_SPACE)
        while True:
            rest = self._text[self._place : self._place + max(map(len, marks))]
            mark = next((mark for mark in marks if rest.startswith(mark) or mark.startswith(rest)), "")
            if rest.startswith(mark):
                return mark
            if self._ended:
                return next((mark for mark in marks if rest.startswith(mark)), "")
            yield

    def next(self, *marks: str) -> Steps[str]:
        """As `at`, and read the mark."""
        mark = yield from self.at(*marks)
        self._read(self._place + len(mark))
        return mark

    def close(self, mark: str) -> Steps[bool]:
        """Read space and a mark, or as much of it as there is where the text ends: some models stop before it."""
        if (yield from self.next(mark)):
            return True
        if self._ended and mark.startswith(self._text[self._place :]):
            self._read(len(self._text))
            return True
        return False

    def peek(self) -> Steps[str]:
        """The next letter that is no space, which is not read. Empty: the text ends."""
        yield from self._run(_SPACE)
        return self._text[self._place : self._place + 1]

    def string(self, put: Put) -> Steps[bool]:
        """Read a JSON string, and put it as `json.dumps` writes it, as it comes. False: it is none from here on.

        Control letters in it, which JSON wants as escapes and models write as they are, become escapes. Half a
        surrogate pair, which is no text, becomes U+FFFD.
        """
        if not (yield from self.next('"')):
            return False
        put('"')
        while True:
            yield from self._run(_PLAIN, put)
            letter = self._text[self._place : self._place + 1]
            if letter == '"':
                put(self._read(self._place + 1))
                return True
            if letter == "\\":
                escaped = yield from self._escape()
                if escaped is None:
                    return False
                put(_quoted(escaped))
            elif letter:
                put(_quoted(self._read(self._place + 1)))
            else:
                return False

    def value(self, put: Put) -> Steps[bool]:
        """Read a JSON value, and put it as `json.dumps` writes it, as it comes. False: it is none from here on; what
        was put is its beginning."""
        open_: list[str] = []  # what closes each bracket
        wanted = "value"  # or: first (of a bracket), key, next
        while True:
            letter = self._text[self._place : self._place + 1]
            if letter <= " ":  # space, or nothing yet
                letter = yield from self.peek()
            if letter == "":
                return False
            if wanted in ("first", "next") and letter == open_[-1]:
                put(self._read(self._place + 1))
                open_.pop()
            elif wanted == "next":
                if letter != ",":
                    return False
                self._read(self._place + 1)
                put(", ")
                wanted = "key" if open_[-1] == "}" else "value"
                continue
            elif wanted == "key" or (wanted == "first" and open_[-1] == "}"):
                if not (yield from self.string(put)) or not (yield from self.next(":")):
                    return False
                put(": ")
                wanted = "value"
                continue
            elif letter in "[{":
                if len(open_) == _DEEP:
                    return False
                put(self._read(self._place + 1))
                open_.append("]" if letter == "[" else "}")
                wanted = "first"
                continue
            elif letter == '"':
                if not (yield from self.string(put)):
                    return False
            elif not (yield from self._word(put)):
                return False
            if not open_:
                return True
            wanted = "next"

    def object(self, put: Put) -> Steps[bool]:
        """As `value`, of an object."""
        return (yield from self.peek()) == "{" and (yield from self.value(put))

    def text(self) -> Steps[str | None]:
        """Read a JSON string; None: it is none from here on."""
        parts: list[str] = []
        return str(json.loads("".join(parts))) if (yield from self.string(parts.append)) else None

    def _word(self, put: Put) -> Steps[bool]:
        """A number, true, false or null."""
        kept, self._kept = self._kept, None
        parts: list[str] = []
        yield from self._run(_WORD, parts.append, _LONG_NUMBER)
        word, self._kept = "".join(parts), kept
        cut = self.unread == 0  # a number of which more may have come
        written = None if cut or len(word) > _LONG_NUMBER else written_json(word)
        if written is None:
            self._text, self._place = word + self._text[self._place :], 0
            return False
        if kept is not None:
            kept.append(word)
        put(written)
        return True

    def _escape(self) -> Steps[str | None]:
        """Read what is behind a backslash; None: it is none, and not read."""
        while self.unread < 2 and not self._ended:
            yield
        kind = self._text[self._place + 1 : self._place + 2]
        if kind != "u":
            if kind not in _ESCAPED:
                return None
            self._read(self._place + 2)
            return _ESCAPED[kind]
        while self.unread < 6 and not self._ended:
            yield
        code = _HEX.fullmatch(self._text, self._place + 2, self._place + 6)
        if code is None:
            return None
        first = int(code[0], 16)
        if not 0xD800 <= first < 0xE000:
            self._read(self._place + 6)
            return chr(first)
        while self.unread < 12 and r"\u".startswith(self._text[self._place + 6 : self._place + 8]):
            if self._ended:
                return None  # the other half is cut off
            yield
        low = _HEX.fullmatch(self._text, self._place + 8, self._place + 12)
        second = int(low[0], 16) if low and self._text.startswith(r"\u", self._place + 6) else 0
        paired = first < 0xDC00 <= second < 0xE000
        self._read(self._place + (12 if paired else 6))
        return chr(0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00)) if paired else "\ufffd"

    def _run(self, pattern: re.Pattern[str], put: Put | None = None, most: int | None = None) -> Steps[None]:
        """Read as many letters as fit a pattern; no more pieces behind `most` letters."""
        count = 0
        while True:
            found = pattern.match(self._text, self._place)
            end = found.end() if found else self._place
            count += end - self._place
            if end > self._place:
                text = self._read(end)
                if put is not None:
                    put(text)
            if self._place < len(self._text) or self._ended or (most is not None and count > most):
                return
            yield

    def _read(self, end: int) -> str:
        text, self._place = self._text[self._place : end], end
        if self._kept is not None:
            self._kept.append(text)
        return text


Program = Callable[[Scan], Steps[object]]


class Parser(Protocol):
    """One choice's text into content, reasoning and calls.

    Attributes:
        begin: what calls begin with wherever they are; None: a place shows them, or they have their own channel.
    """

    begin: str | None

    def feed(self, text: str) -> Parsed: ...

    def finish(self) -> Parsed:
        """What is pending, when no more text comes."""
        ...


class ProgramParser:
    """As `Parser`, by a program."""

    def __init__(self, program: Program, begin: str | None = None) -> None:
        self.begin, self.scan = begin, Scan()
        self._steps = program(self.scan)

    def feed(self, text: str) -> Parsed:
        self.scan.add(text)
        next(self._steps, None)
        return self.scan.taken()

    def finish(self) -> Parsed:
        self.scan.end()
        return self.feed("")


def plain_parser() -> Parser:
    """All of the text is content."""
    return ProgramParser(lambda scan: scan.rest(scan.show))


def rewritten(text: str) -> str | None:
    """A JSON value as `Scan.value` puts it; None: the text is none."""
    scan, found = Scan(), list[str]()

    def read() -> Steps[bool]:
        return (yield from scan.value(found.append)) and (yield from scan.peek()) == ""

    scan.add(text + " ")  # a number has an end
    scan.end()
    try:
        next(read())
    except StopIteration as done:
        return "".join(found) if done.value else None
    raise AssertionError("it waits for text behind the end")


def begun(text: str, place: int, marks: Sequence[str]) -> int:
    """Characters at the end of a text, from a place on, with which one of the marks begins."""
    longest = max(map(len, marks), default=1)
    tail = text[max(place, len(text) - longest + 1) :]
    return max((overlap(tail, mark) for mark in marks if mark[0] in tail), default=0)


@lru_cache(64)
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))


def _quoted(text: str) -> str:
    """As within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def written(value: Any) -> str:
    """JSON of what a model wrote. Raises ValueError: it has a number beyond all floats (1e999)."""
    return _HALVES.sub("\ufffd", json.dumps(value, ensure_ascii=False, allow_nan=False))


def written_json(text: str) -> str | None:
    """Any JSON as `json.dumps` writes it; None: it is none."""

    def refuse(name: str) -> None:
        raise ValueError(f"JSON has no {name}")

    try:
        return written(json.loads(text, parse_constant=refuse))
    except (ValueError, RecursionError):
        return None
