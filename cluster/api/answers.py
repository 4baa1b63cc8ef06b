"""OpenAI's two kinds of completions: deltas into their JSON."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from ...actors.requests import TokenLogprob
from ..detokenizer import TokenBytes
from .model import Echo
from .runs import Choice, Run
from .scanning import Parser, ToolCall
from .schema import GenerationBody, finite
from .text import Delta, ScoredToken

Json = dict[str, Any]
_MANY_SCORES = 256  # tokens, each with up to twenty others
_LONG_TEXT = 16_384  # letters, of which parsers read about one in two microseconds


class Form(Protocol):
    """How one kind of answer is written.

    Attributes:
        id_prefix: of the answer's id.
        whole, chunk: `object` of a whole answer and of a chunk.
    """

    id_prefix: str
    whole: str
    chunk: str

    @property
    def reasoned(self) -> Sequence[int]:
        """Of each choice so far, how many tokens its reasoning took."""

    def opening(self, index: int) -> Json | None:
        """What a choice's stream begins with, before anything is generated."""

    def choice(self, index: int, delta: Delta, *, first: bool, streamed: bool) -> Json:
        """What is new of a choice, or all of it."""


@dataclass(frozen=True)
class CheckedRequest:
    """A checked request: what to generate and how to write it.

    model: what clients call it. prompts: each has equally many choices, one after the other. prompt_tokens: of all.
    """

    model: str
    choices: tuple[Choice, ...]
    prompt_tokens: int
    form: Form
    body: GenerationBody
    prompts: int = 1


class Written(Protocol):
    """The answer to a request under way, in the form of its route.

    Attributes:
        names_events: whether an event of its stream is named by its type.
        ending: what its stream ends with.
    """

    names_events: bool
    ending: str

    async def whole(self) -> Json:
        """The whole answer. Raises ApiError."""

    def chunks(self) -> AsyncIterator[Json]:
        """The answer as it comes. Raises ApiError."""


class Answer:
    """As OpenAI's completions have it: whole or in chunks."""

    names_events = False
    ending = "data: [DONE]\n\n"

    def __init__(self, checked: CheckedRequest, run: Run, request_id: str) -> None:
        self._checked, self._run, self._form = checked, run, checked.form
        self._id, self._created_s = f"{self._form.id_prefix}-{request_id}", int(time.time())

    async def whole(self) -> Json:
        """The whole answer. Raises ApiError."""
        parts: list[list[Delta]] = [[] for _ in range(self._run.choices)]
        async for index, delta in self._run.deltas():
            parts[index].append(delta)
        gathered = [Delta.joined(deltas) for deltas in parts]
        choices = [await self._choice(i, all_of, first=True, streamed=False) for i, all_of in enumerate(gathered)]
        usage = self._usage([one.tokens for one in gathered], [one.cached_tokens for one in gathered])
        return self._json(self._form.whole, choices) | {"usage": usage}

    async def chunks(self) -> AsyncIterator[Json]:
        """The answer as it comes. Raises ApiError."""
        tokens, cached = ([0] * self._run.choices for _ in range(2))
        begun: set[int] = set()
        body = self._checked.body

        def usage() -> Json:
            if body.running_usage:
                return {"usage": self._usage(tokens, cached)}
            return {"usage": None} if body.include_usage else {}

        for index in range(self._run.choices):
            if (opening := self._form.opening(index)) is not None:
                yield self._json(self._form.chunk, [opening]) | usage()
        async for index, delta in self._run.deltas():
            tokens[index] = delta.tokens
            cached[index] += delta.cached_tokens
            choice = await self._choice(index, delta, first=index not in begun, streamed=True)
            begun.add(index)
            yield self._json(self._form.chunk, [choice]) | usage()
        if body.include_usage:
            yield self._json(self._form.chunk, []) | {"usage": self._usage(tokens, cached)}

    async def _choice(self, index: int, delta: Delta, *, first: bool, streamed: bool) -> Json:
        """As `Form.choice`; beside the event loop where it has the scores, or the text, of a long prompt or answer."""
        make = partial(self._form.choice, index, delta, first=first, streamed=streamed)
        many = len(delta.scores) + len(delta.prompt_scores) > _MANY_SCORES or len(delta.text) > _LONG_TEXT
        return await asyncio.to_thread(make) if many else make()

    def _json(self, kind: str, choices: list[Json]) -> Json:
        head = {"id": self._id, "object": kind, "created": self._created_s, "model": self._checked.model}
        return head | {"choices": choices}

    def _usage(self, tokens: Sequence[int], cached: Sequence[int]) -> Json:
        """Of the tokens generated of each choice, and the cached ones of its prompt; a prompt counts once."""
        prompt, generated = self._checked.prompt_tokens, sum(tokens)
        each, reasoned = len(cached) // self._checked.prompts, sum(self._form.reasoned)
        return {
            "prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(cached[::each])},
        } | ({"completion_tokens_details": {"reasoning_tokens": reasoned}} if reasoned else {})  # fmt: skip


class ChatForm:
    """The assistant's messages.

    Args:
        parsers: of each choice's text.
        several: whether a message may have more than one tool call.
        reasoning: whether it shows the model's.
    """

    id_prefix = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def __init__(
        self, names: TokenBytes, logprobs: bool, parsers: Sequence[Parser], several: bool = True,
        reasoning: bool = True,
    ) -> None:  # fmt: skip
        self._names, self._logprobs, self._parsers, self._several = names, logprobs, parsers, several
        self._reasoning = reasoning
        self._calls = [0] * len(parsers)  # so far
        self.reasoned = [0] * len(parsers)

    def opening(self, index: int) -> Json:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def choice(self, index: int, delta: Delta, *, first: bool, streamed: bool) -> Json:
        parsed, finish = self._parsers[index].feed(delta.text), delta.finish
        if finish is not None:
            parsed = parsed.then(self._parsers[index].finish())
        if parsed.reasoning:
            self.reasoned[index] = delta.tokens_until(parsed.reasoning)
        calls = self._numbered(index, parsed.calls)
        if finish == "stop" and self._calls[index]:
            finish = "tool_calls"
        reasoning = {"reasoning_content": parsed.reasoning} if parsed.reasoning and self._reasoning else {}
        if streamed:
            content: Json = reasoning | ({"content": parsed.content} if parsed.content else {})
            content = {"delta": content | ({"tool_calls": calls} if calls else {})}
        else:
            text = None if calls and not parsed.content else parsed.content
            made = [{name: value for name, value in call.items() if name != "index"} for call in calls]
            message = {"role": "assistant", "content": text, "refusal": None} | reasoning
            content = {"message": message | ({"tool_calls": made} if made else {})}
        scores = chat_logprobs(self._names, delta.scores) if self._logprobs else None
        return {"index": index} | content | {"logprobs": scores, "finish_reason": finish}

    def _numbered(self, index: int, calls: Sequence[ToolCall]) -> list[Json]:
        found: list[Json] = []
        for call in calls:
            self._calls[index] += call.name is not None
            place = self._calls[index] - 1
            if place and not self._several:
                break
            function = {"arguments": call.arguments}
            if call.name is None:
                found.append({"index": place, "function": function})
                continue
            head = {"index": place, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
            found.append(head | {"function": {"name": call.name} | function})
        return found


@dataclass(frozen=True)
class CompletionForm:
    """Text that continues a prompt.

    Attributes:
        echoes: what each prompt's choices begin with; None: none was asked for.
        each: choices for each prompt.
    """

    names: TokenBytes
    prompts: tuple[tuple[int, ...], ...]
    echoes: tuple[Echo, ...] | None
    each: int
    logprobs: bool
    id_prefix = "cmpl"
    whole = chunk = "text_completion"
    reasoned = ()

    def opening(self, index: int) -> None:
        return None

    def choice(self, index: int, delta: Delta, *, first: bool, streamed: bool) -> Json:
        prompt = index // self.each
        echo, scores = Echo("") if self.echoes is None else self.echoes[prompt], None
        if self.logprobs:
            before: list[tuple[int, TokenLogprob | None]] = []
            if first and self.echoes is not None:  # the first token has none, for nothing stands before it
                before = [(self.prompts[prompt][0], None), *((found.token_id, found) for found in delta.prompt_scores)]
            scores = completion_logprobs(self.names, before, delta.scores, echo)
        text = echo.text + delta.text if first else delta.text
        return {"index": index, "text": text, "logprobs": scores, "finish_reason": delta.finish}


def completion_logprobs(
    names: TokenBytes, prompt: Sequence[tuple[int, TokenLogprob | None]], scores: Sequence[ScoredToken], echo: Echo
) -> Json:
    """The `logprobs` of a completion's choice.

    Args:
        prompt: echoed tokens.
        scores: generated tokens.
        echo: the text before the generated one.
    """
    entries = [(token, found, start) for (token, found), start in zip(prompt, echo.starts, strict=False)]
    entries += [(score.found.token_id, score.found, len(echo.text) + score.offset) for score in scores]
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
