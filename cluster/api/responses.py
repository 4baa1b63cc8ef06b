"""OpenAI's `/v1/responses` over the chat: messages, reasoning, calls of tools and their outputs in, such items out, and
the stream of their events. No state is kept.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, FailFast, Field, Tag, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from .answers import CheckedRequest, Json
from .messages import MANY_TOOLS, UNSUPPORTED, ContentParts, FunctionName, Sent, Text
from .model import MESSAGE_BYTES
from .refusals import refused
from .runs import Run
from .schema import ChatBody, ReasoningBody, RequestBody, SamplingBody, Texts

_SCORES = "message.output_text.logprobs"


class InputMessage(Sent):
    """A message, also as an earlier answer had it."""

    harmless: ClassVar[frozenset[str]] = Sent.harmless | {"phase"}
    type: Literal["message"] = "message"
    role: Text
    content: str | ContentParts


class ReasoningText(Sent):
    type: Literal["reasoning_text", "summary_text"]
    text: str


ReasoningTexts = TypeAliasType("ReasoningTexts", Annotated[list[ReasoningText], FailFast()])


class ReasoningItem(Sent):
    """The model's reasoning as an earlier answer had it."""

    harmless: ClassVar[frozenset[str]] = Sent.harmless | {"encrypted_content"}
    type: Literal["reasoning"]
    summary: ReasoningTexts | None = None
    content: ReasoningTexts | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary or ())


class FunctionCall(Sent):
    """A call that an earlier answer made."""

    harmless: ClassVar[frozenset[str]] = Sent.harmless | {"async", "caller", "namespace"}
    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: str


class FunctionOutput(Sent):
    """What a call gave."""

    harmless: ClassVar[frozenset[str]] = Sent.harmless | {"caller", "name", "namespace"}
    type: Literal["function_call_output"]
    call_id: Text
    output: str | ContentParts


def _kind(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionOutput, Tag("function_call_output")],
    Discriminator(
        _kind,
        custom_error_type="input_item",
        custom_error_message="give items of type message, reasoning, function_call or function_call_output",
    ),
]
InputItems = TypeAliasType("InputItems", Annotated[list[InputItem], FailFast()])


class ResponseTool(Sent):
    """A tool that the client carries out."""

    harmless: ClassVar[frozenset[str]] = Sent.harmless | {"defer_loading", "allowed_callers", "output_schema", "async"}
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_clients(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind != "function":
            message = "tools of other types than function are not supported; leave them out"
            raise PydanticCustomError(UNSUPPORTED, message)
        return given

    @property
    def openai(self) -> Json:
        """The same in the form of chats."""
        given = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": given}


ResponseTools = TypeAliasType(
    "ResponseTools", Annotated[list[ResponseTool], FailFast(), Field(max_length=MANY_TOOLS)]
)  # fmt: skip


class NamedChoice(RequestBody):
    type: Literal["function"]
    name: Text


class TextOptions(RequestBody):
    format: dict[str, Any] | None = None  # `verbosity` is a hint, and ignored


class EventOptions(RequestBody):
    """Of a stream. OpenAI's one, `include_obfuscation`, is ignored."""


class ResponsesBody(SamplingBody, ReasoningBody):
    """`POST /v1/responses`."""

    input: str | InputItems
    include: Texts | None = None  # of tools that are not there, and of reasoning, which is not encrypted
    stream_options: EventOptions | None = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    text: TextOptions | None = None
    tools: ResponseTools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def size(self) -> int:
        """About the bytes of text that the translation takes as long as."""
        return MESSAGE_BYTES * (len(self.input) * isinstance(self.input, list) + 16 * len(self.tools or ()))

    @property
    def ignored(self) -> tuple[str, ...]:
        options = {"text": self.text, "stream_options": self.stream_options}
        found = super().ignored + (("include",) if self.include else ())
        found += tuple(f"{name}.{inner}" for name, given in options.items() if given for inner in given.ignored)
        parts = [*(self.input if isinstance(self.input, list) else ()), *(self.tools or ())]
        return found + tuple(f"input.{name}" for name in sorted(set[str]().union(*(part.ignored for part in parts))))

    @property
    def chat(self) -> ChatBody:
        """The same as a chat.

        Raises:
            ApiError: 400, an unknown form of text.
        """
        if not self.input:
            raise refused("'input' is empty; give text or messages", "input")
        if _SCORES in (self.include or ()):
            message = f"'include': this route gives no '{_SCORES}'; ask /v1/chat/completions for logprobs"
            raise refused(message, "include")
        items = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        given = _messages(items)
        if self.instructions is not None:
            given.insert(0, {"role": "system", "content": self.instructions})
        form = self.text.format if self.text is not None else None
        if form is not None and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}
        choice: Any = self.tool_choice
        if isinstance(choice, NamedChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
        wanted: Json = {
            "messages": given, "max_completion_tokens": self.max_output_tokens, "response_format": form,
            "tools": [tool.openai for tool in self.tools] if self.tools else None,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
        }  # fmt: skip
        shared = {name: getattr(self, name) for name in (*SamplingBody.model_fields, *ReasoningBody.model_fields)}
        chat = ChatBody.model_validate(wanted | shared)
        chat._ignored = self.ignored
        return chat


def _messages(items: Sequence[Any]) -> list[Json]:
    """Items as messages of a chat: what an answer consisted of is one. An output has the tool's name, which some
    templates show."""
    found: list[Json] = []
    tools: dict[str, str] = {}  # of earlier calls, by their ids
    answer: Json = {}  # that the items before belong to

    def part(name: str, value: Any) -> None:
        """Of the assistant's message: what comes behind it begins another."""
        nonlocal answer
        order = ("reasoning_content", "content", "tool_calls")
        if not answer or found[-1] is not answer or any(answer.get(later) for later in order[order.index(name) :]):
            answer = {"role": "assistant", "content": ""}
            found.append(answer)
        answer[name] = value

    for item in items:
        if isinstance(item, ReasoningItem):
            part("reasoning_content", item.text)
        elif isinstance(item, FunctionCall):
            tools[item.call_id] = item.name
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            if answer.get("tool_calls") and found[-1] is answer:
                answer["tool_calls"].append(call)
            else:
                part("tool_calls", [call])
        elif isinstance(item, FunctionOutput):
            name = {"name": tools[item.call_id]} if item.call_id in tools else {}
            found.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)} | name)
        elif item.role == "assistant":
            part("content", _text(item.content))
        else:
            found.append({"role": item.role, "content": _text(item.content)})
    return found


def _text(content: str | ContentParts) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class _Items:
    """The items of an answer so far, and the events that make them: (type, fields). At most the last one is open."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self.done: list[Json] = []
        self._open: Json | None = None
        self._parts: list[str] = []  # of the open one

    @property
    def begun(self) -> bool:
        """Whether there is any."""
        return bool(self.done) or self._open is not None

    def add(self, new: Json) -> Iterator[tuple[str, Json]]:
        """What is new of a chat's choice."""
        calls = new.get("tool_calls", ())
        if calls and "id" not in calls[0]:  # the open one goes on
            yield self._grow(calls[0]["function"]["arguments"])
        for kind, text in (("reasoning", new.get("reasoning_content")), ("message", new.get("content"))):
            if text:
                yield from self.begin(kind)
                yield self._grow(text)
        for call in calls:
            if "id" in call:
                function = call["function"]
                yield from self.close("completed")
                yield from self.begin("function_call", call_id=call["id"], name=function["name"], arguments="")
                yield self._grow(function["arguments"])

    def begin(self, kind: str, **more: Any) -> Iterator[tuple[str, Json]]:
        """The events of a new item, unless the open one is of this kind."""
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self.close("completed")
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        name = f"{prefix}_{self._request_id}" + (f"_{len(self.done)}" if self.done else "")
        self._open = {"type": kind, "id": name, "status": "in_progress"} | more
        self._open |= {"role": "assistant", "content": []} if kind == "message" else {}
        self._open |= {"summary": [], "content": []} if kind == "reasoning" else {}
        yield "output_item.added", {"output_index": len(self.done), "item": dict(self._open)}
        if kind != "function_call":
            yield "content_part.added", self._place() | {"part": self._part("")}

    def close(self, status: str) -> Iterator[tuple[str, Json]]:
        """The end of the open one."""
        if self._open is None:
            return
        text, self._parts = "".join(self._parts), []
        kind, item = _GROWS[self._open["type"]], self._open | {"status": status}
        if item["type"] == "function_call":
            item["arguments"] = text
            yield f"{kind}.done", self._place() | {"name": item["name"], "arguments": text}
        else:
            item["content"] = [self._part(text)]
            yield f"{kind}.done", self._place() | {"text": text} | self._scores()
            yield "content_part.done", self._place() | {"part": self._part(text)}
        yield "output_item.done", {"output_index": len(self.done), "item": item}
        self.done.append(item)
        self._open = None

    def _grow(self, text: str) -> tuple[str, Json]:
        self._parts.append(text)
        assert self._open is not None
        return f"{_GROWS[self._open['type']]}.delta", self._place() | {"delta": text} | self._scores()

    def _place(self) -> Json:
        assert self._open is not None
        place = {"output_index": len(self.done), "item_id": self._open["id"]}
        return place if self._open["type"] == "function_call" else place | {"content_index": 0}

    def _scores(self) -> Json:
        return {"logprobs": []} if self._open is not None and self._open["type"] == "message" else {}

    def _part(self, text: str) -> Json:
        if self._open is not None and self._open["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


_GROWS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}


class ResponsesAnswer:
    """As `Answer`, of one choice of a chat, in the form of `/v1/responses`."""

    names_events = True
    ending = "data: [DONE]\n\n"

    def __init__(self, checked: CheckedRequest, run: Run, request_id: str) -> None:
        self._checked, self._run = checked, run
        self._id, self._created_s = f"resp_{request_id}", int(time.time())
        self._items = _Items(request_id)
        self._tokens, self._cached, self._finish = 0, 0, "stop"

    async def whole(self) -> Json:
        """The whole answer. Raises ApiError."""
        async for _ in self._events():
            pass
        return self._response(self._status)

    async def chunks(self) -> AsyncIterator[Json]:
        """Its events as they come. Raises ApiError."""
        number = 0

        def event(kind: str, rest: Json) -> Json:
            nonlocal number
            number += 1
            return {"type": f"response.{kind}", "sequence_number": number - 1} | rest

        for kind in ("created", "in_progress"):
            yield event(kind, {"response": self._response("in_progress")})
        async for kind, rest in self._events():
            yield event(kind, rest)
        yield event(self._status, {"response": self._response(self._status)})

    async def _events(self) -> AsyncIterator[tuple[str, Json]]:
        async for index, delta in self._run.deltas():
            choice = self._checked.form.choice(index, delta, first=False, streamed=True)
            self._tokens = delta.tokens
            self._cached += delta.cached_tokens
            self._finish = delta.finish or self._finish
            for event in self._items.add(choice["delta"]):
                yield event
        for event in () if self._items.begun else self._items.begin("message"):  # of an answer that is nothing
            yield event
        for event in self._items.close(self._status):
            yield event

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _response(self, status: str) -> Json:
        ended, prompt, body = status != "in_progress", self._checked.prompt_tokens, self._checked.body
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self._cached, "cache_write_tokens": 0},
            "output_tokens": self._tokens,
            "output_tokens_details": {"reasoning_tokens": sum(self._checked.form.reasoned)},
            "total_tokens": prompt + self._tokens,
        }  # fmt: skip
        return {
            "id": self._id, "object": "response", "created_at": self._created_s, "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._checked.model, "output": list(self._items.done) if ended else [],
            "store": False, "temperature": body.temperature, "top_p": body.top_p, "usage": usage if ended else None,
        } | self._tools()  # fmt: skip

    def _tools(self) -> Json:
        body = self._checked.body
        assert isinstance(body, ChatBody)
        choice = body.tool_choice or "auto"
        tools = [
            {"type": "function", "name": tool.function.name, "description": tool.function.description,
             "parameters": tool.function.parameters, "strict": bool(tool.function.strict)}
            for tool in body.tools or ()
        ]  # fmt: skip
        named = choice if isinstance(choice, str) else {"type": "function", "name": choice.function.name}
        parallel = body.parallel_tool_calls is not False
        return {"tools": tools, "tool_choice": named, "parallel_tool_calls": parallel}
