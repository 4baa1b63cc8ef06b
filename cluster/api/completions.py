"""`/v1/completions`: prompts into choices, and choices into answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from .answers import Gathered, Head, Json, completion_logprobs, echoed_scores, usage_of
from .choice import Delta
from .schema import CompletionBody
from .service import Run, Service, Wanted


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
