"""A model's reasoning apart from its answer: which marks it writes around it, and the parser that takes it out.

    <think>          Qwen3, DeepSeek, GLM, Kimi, MiniMax, Step, Hunyuan, Nemotron        [THINK]    Mistral
    <|channel>       Gemma 4        <seed:think>    Seed-OSS        <|START_THINKING|>   Command A
    <mm:think>       MiniMax M3     <|open|>think<|sep|>   Kimi K3

Which marks are a model's, its chat template shows: some chats are rendered with it, at the start. A prompt may end
with the mark that opens reasoning; the answer then begins inside. gpt-oss's channels are a form of the whole answer
(`tool_parsers.harmony`).
"""

from __future__ import annotations

from typing import NamedTuple

from .scanning import Parsed, Parser, Trimmer, begun
from .templates import ChatTemplate


class Marks(NamedTuple):
    """What stands before and behind reasoning."""

    begin: str
    end: str


MARKS = (
    Marks("<think>", "</think>"), Marks("[THINK]", "[/THINK]"), Marks("<seed:think>", "</seed:think>"),
    Marks("<|channel>thought\n", "<channel|>"), Marks("<|START_THINKING|>", "<|END_THINKING|>"),
    Marks("◁think▷", "◁/think▷"), Marks("<mm:think>", "</mm:think>"),
    Marks("<think:opensource>", "</think:opensource>"),
    Marks("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
)  # fmt: skip


def marks_of(template: ChatTemplate | None) -> Marks | None:
    """The marks that a template writes, or takes out of an earlier answer; None: it knows none."""
    if template is None:
        return None
    texts = template.reasoned()
    for marks in MARKS:
        if any(marks.begin in text or marks.end in text for text in texts):
            return marks
    return next((marks for marks in MARKS if template.takes_out(*marks)), None)


class ReasoningParser:
    """Reasoning at the beginning of an answer; all behind it goes to the parser of calls.

    A call that comes before the end of reasoning is held. If the end comes, it was a draft, and is reasoning; if the
    answer ends first, the model has left the mark out, and the call is one.

    Args:
        marks: around reasoning.
        calls: the parser of what follows.
        opened: whether the prompt has the first mark.
    """

    def __init__(self, marks: Marks, calls: Parser, opened: bool) -> None:
        self._marks, self._calls, self._opened = marks, calls, opened
        self.begin = calls.begin
        self._text = ""  # may become a mark
        self._state = "before"
        self._space: list[str] = []  # before everything
        self._held: list[str] = []  # from a call on, inside reasoning
        self._reasoning = Trimmer()

    def feed(self, text: str) -> Parsed:
        out = Parsed()
        if self._state == "before":
            text = self._started(text)
        if self._state == "opened":
            text = text.lstrip()
            self._state = "inside" if text else "opened"
        if self._state == "inside":
            text, reasoning = self._inside(text)
            out = Parsed(reasoning=reasoning)
        if self._state == "held":
            text, reasoning = self._until_end(text)
            out = out.then(Parsed(reasoning=reasoning))
        if self._state == "behind":
            text = text.lstrip()
            self._state = "after" if text else "behind"
        return out.then(self._calls.feed(text)) if self._state == "after" and text else out

    def finish(self) -> Parsed:
        text, self._text = self._text, ""
        if self._state == "before":
            out = self._calls.feed("".join(self._space) + text) if text or self._space else Parsed()
        elif self._state == "inside":
            out = Parsed(reasoning=self._reasoning.add(text))
        elif self._state == "held":
            out = self._calls.feed("".join(self._held) + text)
        else:
            out = Parsed()
        out = out.then(self._calls.finish())
        if self._state == "held" or (self._state == "before" and self._opened):
            out = Parsed("", out.reasoning + self._reasoning.add(out.content), out.calls)
        return out

    def _started(self, text: str) -> str:
        """What follows the first mark, or is no mark; empty while that is not known."""
        if not self._text:
            bare = text.lstrip()
            self._space.append(text[: len(text) - len(bare)])
            text = bare
        text = self._text + text
        for mark, state in ((self._marks.begin, "opened"), (self._marks.end, "behind")):
            if text.startswith(mark):  # MiniMax M3 writes the last mark where it does not think
                self._text, self._state = "", state
                return text[len(mark) :]
        if any(mark.startswith(text) for mark in self._marks):
            self._text = text
            return ""
        self._text = ""
        if self._opened:
            self._state = "inside"
            return text
        self._state = "after"
        return "".join(self._space) + text

    def _inside(self, text: str) -> tuple[str, str]:
        """(What is left behind the mark that ends this, the reasoning before it)."""
        text = self._text + text
        wanted = [self._marks.end] + ([self._calls.begin] if self._calls.begin else [])
        at, mark = min(((place, mark) for mark in wanted if (place := text.find(mark)) >= 0), default=(-1, ""))
        if at < 0:
            end = len(text) - begun(text, 0, wanted)
            self._text = text[end:]
            return "", self._reasoning.add(text[:end])
        self._text = ""
        reasoning = self._reasoning.add(text[:at])
        if mark == self._marks.end:
            self._state = "behind"
            return text[at + len(mark) :], reasoning
        self._state = "held"
        return text[at:], reasoning

    def _until_end(self, text: str) -> tuple[str, str]:
        """As `_inside`, of what a call in it began."""
        text = self._text + text
        at = text.find(self._marks.end)
        end = at if at >= 0 else len(text) - begun(text, 0, (self._marks.end,))
        self._held.append(text[:end])
        if at < 0:
            self._text = text[end:]
            return "", ""
        self._text, self._state = "", "behind"
        return text[at + len(self._marks.end) :], self._reasoning.add("".join(self._held))
