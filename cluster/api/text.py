"""A choice's tokens into the text that is shown: whole characters, stop strings, scores; and the longest token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

from tokenizers import Tokenizer

from ...actors.requests import TokenEvent, TokenLogprob
from ..detokenizer import IncrementalText
from .schema import Display


class StopMatcher:
    """Gives out text that can no longer be part of a stop string, and ends at the first one.

    The earliest place wins, and of several there the one that is listed first. An end that may become a
    stop string is pending until it is known not to. Each letter is compared about twice with each string, whatever
    they are (Knuth, Morris and Pratt 1977).

    Args:
        stops: the strings, none of them empty.
        include: whether the stop string itself is shown.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops, self._include = tuple(stops), include
        self._pending = ""
        self._shorter = [_borders(stop) for stop in self._stops]
        self._begun = [0] * len(self._stops)  # letters of each that the text ends with
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """What may be shown once `text` has come; up to the stop string that it completes."""
        if self.matched is not None:
            return ""
        before = len(self._pending)
        self._pending += text
        found = []
        for i, stop in enumerate(self._stops):
            self._begun[i], end = _advance(stop, self._shorter[i], self._begun[i], text)
            if end is not None:
                found.append((before + end - len(stop), i))
        if found:
            place, i = min(found)
            self.matched = self._stops[i]
            end = place + len(self.matched) if self._include else place
            shown, self._pending = self._pending[:end], ""
            return shown
        safe = len(self._pending) - max(self._begun, default=0)
        shown, self._pending = self._pending[:safe], self._pending[safe:]
        return shown

    def completed_by(self, text: str) -> bool:
        """Whether text that waits for more completes one of them; an incomplete character does not."""
        return (
            bool(text) and bool(self._stops) and "\ufffd" not in text
            and any(_advance(*known, text)[1] is not None
                    for known in zip(self._stops, self._shorter, self._begun, strict=True))
        )  # fmt: skip

    def finish(self) -> str:
        """What is pending, when no more text comes."""
        rest, self._pending = self._pending, ""
        self._begun = [0] * len(self._stops)
        return rest


def _advance(stop: str, shorter: Sequence[int], begun: int, text: str) -> tuple[int, int | None]:
    """(Letters of `stop` that the text ends with, where in `text` the first whole one ends), after `begun` of them."""
    place = 0
    if not begun:  # the same, at the speed of the library
        found = text.find(stop)
        if found >= 0:
            return 0, found + len(stop)
        place = max(0, len(text) - len(stop) + 1)
    for i in range(place, len(text)):
        while begun and stop[begun] != text[i]:
            begun = shorter[begun - 1]
        begun += stop[begun] == text[i]
        if begun == len(stop):
            return 0, i + 1
    return begun, None


@lru_cache(64)
def _borders(text: str) -> tuple[int, ...]:
    """For each beginning of a text the longest shorter beginning that it ends with."""
    found = [0]
    for letter in text[1:]:
        length = found[-1]
        while length and text[length] != letter:
            length = found[length - 1]
        found.append(length + (text[length] == letter))
    return tuple(found)


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, and is longer than."""
    return _advance(stop, _borders(stop), 0, text[len(text) - len(stop) + 1 :] if len(text) >= len(stop) else text)[0]


_LAST = 64  # letters by which the end of a part is found
_LONG_RUN = 64  # tokens without text; a character has four at most
_SHRINKING = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Lowercase": 4}  # by so much at most: "𝐚" becomes "a"
_KEEPING = {"ByteLevel", "Digits", "Metaspace", "Prepend", "Punctuation", "Split"}


def longest_token(tokenizer: Tokenizer) -> int | None:
    """Bytes of text that one token can stand for at most; None: there is no bound, since some text leaves no token.

    With it a text is refused by its length before it is tokenized.
    """
    parts = json.loads(tokenizer.to_str())
    model, factor = parts["model"], 1
    steps = [*_steps(parts.get("normalizer")), *_steps(parts.get("pre_tokenizer"))]
    for step in steps:
        if step["type"] in _SHRINKING:
            factor *= _SHRINKING[step["type"]]
        elif step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or len(pattern.encode()) > len(step["content"].encode()):
                return None
        elif step["type"] not in _KEEPING or step.get("behavior") == "Removed":
            return None
    known = any(step["type"] == "ByteLevel" for step in steps) or model.get("byte_fallback")
    added = tokenizer.get_added_tokens_decoder().values()
    if model["type"] != "BPE" or not known or any(token.lstrip or token.rstrip for token in added):
        return None
    return factor * max(len(name.encode()) for name in tokenizer.get_vocab(with_added_tokens=True))


def _steps(part: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The members of a normalizer or pre-tokenizer, which may be a sequence of others."""
    if part is None or part["type"] != "Sequence":
        return [] if part is None else [part]
    return [step for inner in part.get("normalizers") or part.get("pretokenizers") or () for step in _steps(inner)]


@dataclass(frozen=True)
class ScoredToken:
    """A token's log-probability and where its text begins, in characters of the choice."""

    found: TokenLogprob
    offset: int


@dataclass(frozen=True)
class Delta:
    """What is new of a choice.

    Attributes:
        text: may be empty.
        scores: of the tokens whose text has been shown.
        prompt_scores: of the prompt's tokens from the second on; on the first delta.
        tokens: generated so far.
        cached_tokens: of the prompt, that the KV cache had; on the first delta.
        finish: stop or length, on the last delta and only there.
        stop: the stop string that ended it, on the last delta.
        parts: of several joined to one, after how many letters of the text each number of tokens had come.
    """

    text: str
    scores: tuple[ScoredToken, ...] = ()
    prompt_scores: tuple[TokenLogprob, ...] = ()
    tokens: int = 0
    finish: str | None = None
    cached_tokens: int = 0
    stop: str | None = None
    parts: tuple[tuple[int, int], ...] = ()

    def tokens_until(self, text: str) -> int:
        """How many tokens had been generated when the last letters of a part of the text were there; the part may
        repeat itself, and is not longer than what is before its end."""
        last = text[-_LAST:]
        end = self.text.find(last, len(text) - len(last)) + len(last)
        return next((tokens for letters, tokens in self.parts if letters >= end), self.tokens)

    @staticmethod
    def joined(parts: Sequence[Delta]) -> Delta:
        """All of a choice's as one."""
        return Delta(
            "".join(part.text for part in parts),
            tuple(score for part in parts for score in part.scores),
            next((part.prompt_scores for part in parts if part.prompt_scores), ()),
            parts[-1].tokens if parts else 0,
            parts[-1].finish if parts else None,
            sum(part.cached_tokens for part in parts),
            parts[-1].stop if parts else None,
            tuple(zip(accumulate(len(part.text) for part in parts), (part.tokens for part in parts), strict=True)),
        )


class ChoiceText:
    """Tokens into shown text: whole characters only, no part of a stop string, scores with the text they belong to."""

    def __init__(self, tokenizer: Tokenizer, display: Display, min_tokens: int = 0) -> None:
        self._text = IncrementalText(tokenizer, skip_special=display.skip_special)
        self._stops = StopMatcher(display.stops, display.include_stop)
        self._display, self._min_tokens = display, min_tokens
        self._decoded = self._shown = 0  # characters
        self._cached = 0  # prompt tokens; not told yet
        self._scores: list[tuple[int, TokenLogprob]] = []  # with the token's place among the generated ones
        self.tokens = 0

    def delta(self, event: TokenEvent) -> Delta | None:
        """What an event lets be shown; None: nothing yet. The last one has a finish."""
        shown, finish = self.add(event), event.finish
        self._cached += event.cached_tokens
        if self.stopped:
            finish = "stop"
        elif finish is not None:
            shown += self.finish()
            finish = "stop" if self.stopped else finish
        scores = self.take_scores(last=finish is not None)
        if not (shown or scores or event.prompt_logprobs or finish is not None):
            return None
        cached, self._cached = self._cached, 0
        return Delta(shown, scores, event.prompt_logprobs, self.tokens, finish, cached, self._stops.matched)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._stops.matched is not None

    def add(self, event: TokenEvent) -> str:
        """The text of an event's tokens that may be shown; ends at a stop string."""
        shown = []
        # the last token of a request that a token stopped is that token
        hidden = len(event.token_ids) - 1 if event.finish == "stop" and not self._display.include_stop else None
        for i, token in enumerate(event.token_ids):
            if event.logprobs:
                self._scores.append((self.tokens, event.logprobs[i]))
            self.tokens += 1
            if i == hidden:
                break
            shown.append(self._feed(self._text.add((token,))))
            if self._look_ahead and self._stops.completed_by(self._text.pending()):
                shown.append(self._feed(self._text.finish()))  # nothing comes that could change it
            if self.stopped:
                break
        return "".join(shown)

    def finish(self) -> str:
        """What is left when no more tokens come."""
        last = self._feed(self._text.finish())
        if self.stopped:
            return last
        rest = self._stops.finish()
        self._shown += len(rest)
        return last + rest

    def take_scores(self, *, last: bool) -> tuple[ScoredToken, ...]:
        """Those whose text has begun to be shown; all remaining ones if the choice ends by itself."""
        starts, ready = self._text.starts, []
        for place, found in self._scores:
            start = starts[place] if place < len(starts) else None
            if last and not self.stopped:
                start = self._shown if start is None else start  # a stop token that is not shown
            elif start is None or start >= self._shown:
                break
            ready.append(ScoredToken(found, start))
        del self._scores[: len(ready)]
        return tuple(ready)

    def _feed(self, text: str) -> str:
        begin, least = self._decoded, self._min_tokens
        self._decoded += len(text)
        # of tokens below the minimal length a stop string is text like any other
        free = 0 if not least else len(text) if not self._may_stop else self._text.starts[least - 1] - begin
        shown = self._stops.finish() + text[:free] if free > 0 else ""
        shown += self._stops.feed(text[max(0, free) :])
        self._shown += len(shown)
        return shown

    @property
    def _look_ahead(self) -> bool:
        """Whether to look for stop strings in text that waits for more: of long runs with each 64th part of them."""
        waiting = self._text.waiting
        due = waiting < _LONG_RUN or waiting % (waiting // _LONG_RUN) == 0
        return bool(self._display.stops) and due and self._may_stop

    @property
    def _may_stop(self) -> bool:
        """Whether the beginning of the text in which stop strings count is known."""
        return len(self._text.starts) >= self._min_tokens
