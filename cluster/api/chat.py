"""`/v1/chat/completions`: messages into one prompt, its choices into the assistant's messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from .answers import Gathered, Head, Json, chat_logprobs, usage_of
from .choice import Delta
from .schema import ChatBody
from .service import Run, Service, Wanted


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
