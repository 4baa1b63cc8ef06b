"""Answers in OpenAI's JSON, whole and in chunks.

`/v1/completions`: prompts into choices, and choices into answers.

`/v1/chat/completions`: messages into one prompt, its choices into the assistant's messages.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ...actors.requests import TokenLogprob
from .schema import ChatBody, CompletionBody, finite
from .service import Delta, Run, ScoredToken, Service, Wanted
from .text import TokenBytes

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


@dataclass(frozen=True)
class Completion:
    """A checked completion request under way.

    Attributes:
        echoes: the text that each prompt's choices begin with; empty unless asked for.
    """

    service: Service
    body: CompletionBody
    prompts: tuple[tuple[int, ...], ...]
    echoes: tuple[str, ...]
    run: Run

    @classmethod
    def start(cls, service: Service, body: CompletionBody, request_id: str) -> Completion:
        """Check everything, then generate.

        Raises:
            ApiError: 400, 404 or 429.
        """
        body.check()
        service.check_model(body.model)
        given = body.prompts
        service.check_choices(len(given) * body.choices, "prompt" if len(given) > 1 else "n")
        prompts = tuple(service.prompt_ids(prompt) for prompt in given)
        if not prompts:
            service.prompt_ids("")  # says what is wrong
        tokens = max(1, body.wanted_tokens)
        keep = body.wanted_tokens > 0
        wanted = []
        for ids in prompts:
            service.check_length(len(ids), tokens, "max_tokens" if len(ids) < service.limit_tokens else "prompt")
            for index in range(body.choices):
                sampling = body.sampling(tokens, index, body.logprobs, body.logprobs if body.echo else None)
                wanted.append(Wanted(ids, sampling, body.stops, keep))
        echoes = [
            prompt if isinstance(prompt, str) else service.tokenizer.decode(prompt, skip_special_tokens=False)
            for prompt in given
        ]
        shown = tuple(echo if body.echo else "" for echo in echoes)
        return cls(service, body, prompts, shown, service.run(wanted, request_id))

    async def answer(self, request_id: str) -> Json:
        """The whole answer. Raises ApiError."""
        gathered = [Gathered() for _ in self.run.wanted]
        async for index, delta in self.run.deltas():
            gathered[index].add(delta)
        choices = [
            self._choice(i, Delta(one.text, tuple(one.scores), one.prompt_scores, one.tokens, one.finish), first=True)
            for i, one in enumerate(gathered)
        ]
        return self._head(request_id).with_choices(choices, self._usage(sum(one.tokens for one in gathered)))

    async def chunks(self, request_id: str) -> AsyncIterator[Json]:
        """The answer as it comes. Raises ApiError."""
        head, tokens = self._head(request_id), [0] * len(self.run.wanted)
        begun: set[int] = set()
        extra: Json = {"usage": None} if self.body.include_usage else {}
        async for index, delta in self.run.deltas():
            tokens[index] = delta.tokens
            choice = self._choice(index, delta, first=index not in begun)
            begun.add(index)
            yield head.with_choices([choice]) | extra
        if self.body.include_usage:
            yield head.with_choices([], self._usage(sum(tokens)))

    def _choice(self, index: int, delta: Delta, *, first: bool) -> Json:
        prompt = index // self.body.choices
        echo = self.echoes[prompt] if first else ""
        logprobs = None
        if self.body.logprobs is not None:
            ids, echoing = self.prompts[prompt], first and bool(self.body.echo)
            before = echoed_scores(ids, delta.prompt_scores) if echoing else []
            offset = len(self.echoes[prompt])
            logprobs = completion_logprobs(self.service.token_bytes, before, delta.scores, offset)
        return {"index": index, "text": echo + delta.text, "logprobs": logprobs, "finish_reason": delta.finish}

    def _head(self, request_id: str) -> Head:
        return Head.make("text_completion", request_id, self.service.model_name)

    def _usage(self, tokens: int) -> Json:
        return usage_of(sum(len(ids) for ids in self.prompts), tokens)


@dataclass(frozen=True)
class Chat:
    """A checked chat request under way."""

    service: Service
    body: ChatBody
    prompt_tokens: int
    run: Run

    @classmethod
    def start(cls, service: Service, body: ChatBody, request_id: str) -> Chat:
        """Check everything, then generate.

        Raises:
            ApiError: 400, 404 or 429.
        """
        body.check()
        service.check_model(body.model)
        service.check_choices(body.choices)
        ids = service.chat_ids(body.messages)
        tokens = body.wanted_tokens
        if tokens is None:
            tokens = max(1, service.limit_tokens - len(ids))
        service.check_length(len(ids), tokens, "max_tokens" if len(ids) < service.limit_tokens else "messages")
        wanted = [
            Wanted(ids, body.sampling(tokens, index, body.wanted_logprobs), body.stops)
            for index in range(body.choices)
        ]
        return cls(service, body, len(ids), service.run(wanted, request_id))

    async def answer(self, request_id: str) -> Json:
        """The whole answer. Raises ApiError."""
        gathered = [Gathered() for _ in self.run.wanted]
        async for index, delta in self.run.deltas():
            gathered[index].add(delta)
        names = self.service.token_bytes
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": one.text, "refusal": None},
                "logprobs": chat_logprobs(names, one.scores) if self.body.logprobs else None,
                "finish_reason": one.finish,
            }
            for i, one in enumerate(gathered)
        ]
        usage = usage_of(self.prompt_tokens, sum(one.tokens for one in gathered))
        return Head.make("chat.completion", request_id, self.service.model_name).with_choices(choices, usage)

    async def chunks(self, request_id: str) -> AsyncIterator[Json]:
        """The answer as it comes; each choice begins with its role. Raises ApiError."""
        head = Head.make("chat.completion.chunk", request_id, self.service.model_name)
        tokens = [0] * len(self.run.wanted)
        extra: Json = {"usage": None} if self.body.include_usage else {}
        for index in range(len(tokens)):
            role = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            yield head.with_choices([role | {"finish_reason": None}]) | extra
        async for index, delta in self.run.deltas():
            tokens[index] = delta.tokens
            yield head.with_choices([self._choice(index, delta)]) | extra
        if self.body.include_usage:
            yield head.with_choices([], usage_of(self.prompt_tokens, sum(tokens)))

    def _choice(self, index: int, delta: Delta) -> Json:
        logprobs = chat_logprobs(self.service.token_bytes, delta.scores) if self.body.logprobs else None
        content = {"content": delta.text} if delta.text else {}
        return {"index": index, "delta": content, "logprobs": logprobs, "finish_reason": delta.finish}
