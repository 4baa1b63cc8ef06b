"""OpenAI's `/v1/responses` over the chat: text in, text out, and the stream of its events. No state is kept."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import FailFast, Field
from typing_extensions import TypeAliasType

from .answers import CheckedRequest, Json
from .messages import ContentParts, Sent, Text
from .refusals import refused
from .runs import Run
from .schema import ChatBody, ReasoningBody, RequestBody, SamplingBody


class InputMessage(Sent):
    """A message, also as an earlier answer had it."""

    type: Literal["message"] = "message"
    role: Text
    content: str | ContentParts
    phase: None = None


InputMessages = TypeAliasType("InputMessages", Annotated[list[InputMessage], FailFast()])


class TextOptions(RequestBody):
    format: dict[str, Any] | None = None  # `verbosity` is a hint, and ignored


class ResponsesBody(SamplingBody, ReasoningBody):
    """`POST /v1/responses`."""

    input: str | InputMessages
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    text: TextOptions | None = None

    @property
    def ignored(self) -> tuple[str, ...]:
        return super().ignored + (() if self.text is None else tuple(f"text.{name}" for name in self.text.ignored))

    @property
    def chat(self) -> ChatBody:
        """The same as a chat.

        Raises:
            ApiError: 400, an unknown form of text.
        """
        if not self.input:
            raise refused("'input' is empty; give text or messages", "input")
        given = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else [
            {"role": message.role, "content": message.content if isinstance(message.content, str)
             else "".join(part.text for part in message.content)}
            for message in self.input
        ]  # fmt: skip
        if self.instructions is not None:
            given.insert(0, {"role": "system", "content": self.instructions})
        form = self.text.format if self.text is not None else None
        if form is not None and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}
        wanted: Json = {"messages": given, "max_completion_tokens": self.max_output_tokens, "response_format": form}
        shared = {name: getattr(self, name) for name in (*SamplingBody.model_fields, *ReasoningBody.model_fields)}
        chat = ChatBody.model_validate(wanted | shared)
        chat._ignored = self.ignored
        return chat


class ResponsesAnswer:
    """As `Answer`, of one choice of a chat, in the form of `/v1/responses`."""

    names_events = True
    ending = "data: [DONE]\n\n"

    def __init__(self, checked: CheckedRequest, run: Run, request_id: str) -> None:
        self._checked, self._run = checked, run
        self._id, self._item, self._created_s = f"resp_{request_id}", f"msg_{request_id}", int(time.time())
        self._texts: list[str] = []
        self._tokens, self._cached, self._finish = 0, 0, "stop"

    async def whole(self) -> Json:
        """The whole answer. Raises ApiError."""
        async for _ in self._deltas():
            pass
        return self._response(self._status)

    async def chunks(self) -> AsyncIterator[Json]:
        """Its events as they come. Raises ApiError."""
        number = 0

        def event(kind: str, **rest: Any) -> Json:
            nonlocal number
            number += 1
            return {"type": f"response.{kind}", "sequence_number": number - 1} | rest

        item = {"output_index": 0, "item_id": self._item}
        part = item | {"content_index": 0}
        yield event("created", response=self._response("in_progress"))
        yield event("in_progress", response=self._response("in_progress"))
        yield event("output_item.added", output_index=0, item=self._message("in_progress") | {"content": []})
        yield event("content_part.added", **part, part=self._part())
        async for text in self._deltas():
            if text:
                yield event("output_text.delta", **part, delta=text, logprobs=[])
        yield event("output_text.done", **part, text=self._text, logprobs=[])
        yield event("content_part.done", **part, part=self._part())
        yield event("output_item.done", output_index=0, item=self._message(self._status))
        yield event(self._status, response=self._response(self._status))

    async def _deltas(self) -> AsyncIterator[str]:
        async for index, delta in self._run.deltas():
            choice = self._checked.form.choice(index, delta, first=False, streamed=True)
            text = choice["delta"].get("content", "")
            self._texts.append(text)
            self._tokens = delta.tokens
            self._cached += delta.cached_tokens
            self._finish = delta.finish or self._finish
            yield text

    @property
    def _text(self) -> str:
        """So far."""
        return "".join(self._texts)

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _part(self) -> Json:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _message(self, status: str) -> Json:
        return {"type": "message", "id": self._item, "status": status, "role": "assistant", "content": [self._part()]}

    def _response(self, status: str) -> Json:
        ended, prompt, body = status != "in_progress", self._checked.prompt_tokens, self._checked.body
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self._cached, "cache_write_tokens": 0},
            "output_tokens": self._tokens, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + self._tokens,
        }  # fmt: skip
        return {
            "id": self._id, "object": "response", "created_at": self._created_s, "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._checked.model, "output": [self._message(status)] if ended else [],
            "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "store": False,
            "temperature": body.temperature, "top_p": body.top_p, "usage": usage if ended else None,
        }  # fmt: skip
