"""Answers in OpenAI's JSON, whole and in chunks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...actors.requests import TokenLogprob
from .choice import Delta, ScoredToken
from .schema import finite
from .token_bytes import TokenBytes

Json = dict[str, Any]
Kind = Literal["text_completion", "chat.completion", "chat.completion.chunk"]


@dataclass
class Gathered:
    """All of one choice."""

    text: str = ""
    scores: list[ScoredToken] = field(default_factory=list)
    prompt_scores: tuple[TokenLogprob, ...] = ()
    tokens: int = 0
    finish: str | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.scores += delta.scores
        self.prompt_scores = self.prompt_scores or delta.prompt_scores
        self.tokens, self.finish = delta.tokens, delta.finish


@dataclass(frozen=True)
class Head:
    """What all chunks of an answer begin with."""

    id: str
    object: Kind
    created: int
    model: str

    @classmethod
    def make(cls, kind: Kind, request_id: str, model: str) -> Head:
        """Of an answer that begins now."""
        prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
        return cls(f"{prefix}-{request_id}", kind, int(time.time()), model)

    def with_choices(self, choices: Sequence[Json], usage: Json | None = None) -> Json:
        found: Json = {"id": self.id, "object": self.object, "created": self.created, "model": self.model}
        found["choices"] = list(choices)
        return found if usage is None else found | {"usage": usage}


def usage_of(prompt_tokens: int, completion_tokens: int) -> Json:
    """OpenAI's `usage`."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def echoed_scores(ids: Sequence[int], found: Sequence[TokenLogprob]) -> list[tuple[int, TokenLogprob | None]]:
    """A prompt's tokens with their log-probabilities; the first has none, for nothing stands before it."""
    return [(ids[0], None), *((entry.token_id, entry) for entry in found)]


def completion_logprobs(
    names: TokenBytes, prompt: Sequence[tuple[int, TokenLogprob | None]], scores: Sequence[ScoredToken], offset: int
) -> Json:
    """The `logprobs` of a completion's choice.

    Args:
        prompt: echoed tokens, with offsets of their own.
        scores: generated tokens.
        offset: characters before the generated text.
    """
    entries: list[tuple[int, TokenLogprob | None, int]] = []
    before = b""
    for token, found in prompt:
        entries.append((token, found, len(before.decode(errors="ignore"))))
        before += names.of(token)
    entries += [(score.found.token_id, score.found, offset + score.offset) for score in scores]
    return {
        "tokens": [names.shown(token) for token, _, _ in entries],
        "token_logprobs": [None if found is None else finite(found.logprob) for _, found, _ in entries],
        "top_logprobs": [None if found is None else _top(names, found) for _, found, _ in entries],
        "text_offset": [place for _, _, place in entries],
    }


def chat_logprobs(names: TokenBytes, scores: Sequence[ScoredToken]) -> Json:
    """The `logprobs` of a chat's choice."""

    def entry(token: int, logprob: float) -> Json:
        return {"token": names.shown(token), "logprob": finite(logprob), "bytes": list(names.of(token))}

    return {
        "content": [
            entry(score.found.token_id, score.found.logprob)
            | {"top_logprobs": [entry(token, value) for token, value in score.found.top]}
            for score in scores
        ],
        "refusal": None,
    }


def _top(names: TokenBytes, found: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens by their text, and the token itself; of two that look alike the likelier counts."""
    listed: dict[str, float] = {}
    for token, value in (*found.top, (found.token_id, found.logprob)):
        listed.setdefault(names.shown(token), finite(value))
    return listed
