"""Anthropic's `/v1/messages` over the chat: its messages into OpenAI's, and the answer into blocks and their events.

    MessagesBody  ->  ChatBody  ->  as every chat (`checks`, `runs`)  ->  MessagesAnswer

Text, thinking, calls of tools and their results are translated; no state is kept. `max_tokens` is a limit: what does
not fit the context is not asked for, and an answer that ends there says so, as Anthropic's current models do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json
from typing_extensions import TypeAliasType

from .answers import CheckedRequest, Json
from .messages import MANY_TOOLS, UNSUPPORTED, FunctionName, Sent, Text, refuse_other_than_text
from .model import MESSAGE_BYTES
from .refusals import refused
from .runs import Run
from .schema import ChatBody, ReasoningBody, RequestBody, SamplingBody, Texts, from_findings
from .thinking import Effort

_PING_S = 15.0  # without an event; clients close a connection that is silent for minutes
# Claude Code begins its instructions with one that differs from request to request: no prefix would be cached
_NO_INSTRUCTION = "x-anthropic-billing-header:"


class TextBlock(Sent):
    type: Literal["text"]
    text: str


class ThinkingBlock(Sent):
    """The model's reasoning as an earlier answer had it; its signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedBlock(Sent):
    """Of another server: what it holds cannot be read."""

    type: Literal["redacted_thinking"]
    data: str | None = None


class ToolUseBlock(Sent):
    harmless: ClassVar[frozenset[str]] = Sent.harmless | {"caller", "toolset_name"}
    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]


TextBlocks = TypeAliasType(
    "TextBlocks", Annotated[list[Annotated[TextBlock, BeforeValidator(refuse_other_than_text)]], FailFast()]
)


class ToolResultBlock(Sent):
    # a result that is an error says so in its text: templates know no such mark
    harmless: ClassVar[frozenset[str]] = Sent.harmless | {"is_error", "toolset_name"}
    type: Literal["tool_result"]
    tool_use_id: Text
    content: str | TextBlocks | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]
Blocks = TypeAliasType("Blocks", Annotated[list[Annotated[Block, BeforeValidator(refuse_other_than_text)]], FailFast()])


class Turn(Sent):
    """One message. Neighbours of the same role are one turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


Turns = TypeAliasType("Turns", Annotated[list[Turn], FailFast()])


class ClientTool(Sent):
    """A tool that the client carries out."""

    harmless: ClassVar[frozenset[str]] = Sent.harmless | {
        "eager_input_streaming", "defer_loading", "input_examples", "allowed_callers",
    }  # fmt: skip
    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_clients(cls, given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind != "custom":
            message = f"tools of the service, such as '{kind[:64]}', are not supported; give tools with an input_schema"
            raise PydanticCustomError(UNSUPPORTED, message.replace("{", "{{").replace("}", "}}"))
        return given

    @property
    def openai(self) -> Json:
        """The same in OpenAI's form."""
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function}


ClientTools = TypeAliasType(
    "ClientTools", Annotated[list[ClientTool], FailFast(), Field(max_length=MANY_TOOLS)]
)  # fmt: skip


class ToolChoice(RequestBody):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None

    @property
    def openai(self) -> Any:
        """The same in OpenAI's form."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name or "?"}}
        return "required" if self.type == "any" else self.type


class OutputConfig(RequestBody):
    effort: Effort = None
    format: dict[str, Any] | None = None


class _FittedChat(ChatBody):
    fits_tokens: ClassVar[bool] = True


class CountBody(ReasoningBody):
    """`POST /v1/messages/count_tokens`."""

    model: str | None = None
    messages: Turns = Field(min_length=1)
    system: str | TextBlocks | None = None
    tools: ClientTools | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # its older name
    context_management: Any = None

    @property
    def size(self) -> int:
        """About the bytes of text that the translation takes as long as."""
        blocks = sum(len(turn.content) if isinstance(turn.content, list) else 1 for turn in self.messages)
        return MESSAGE_BYTES * (blocks + 16 * len(self.tools or ()))

    @property
    def ignored(self) -> tuple[str, ...]:
        tools, system = self.tools or [], self.system if isinstance(self.system, list) else []
        inner = set[str]().union(*(part.ignored for part in (*self.messages, *tools, *system)))
        found = super().ignored + (("context_management",) if self.context_management else ())
        config = () if self.output_config is None else self.output_config.ignored
        found += tuple(f"output_config.{name}" for name in config)
        return found + tuple(f"messages.{name}" for name in sorted(inner))

    @property
    def chat(self) -> ChatBody:
        """The same as a chat.

        Raises:
            ApiError: 400, a part has no meaning in one.
        """
        choice, config = self.tool_choice or ToolChoice(type="auto"), self.output_config or OutputConfig()
        if choice.type == "tool" and choice.name is None:
            raise refused("'tool_choice' of type tool needs the tool's name", "tool_choice")
        messages = _openai(self.messages)
        if messages and messages[-1] == _EMPTY:  # the answer begins with nothing, as every one
            messages.pop()
        if not messages:
            raise refused("'messages' have no content; give text", "messages")
        if messages[-1].get("tool_calls"):
            raise refused("'messages' end with a call of a tool; give its result behind it", "messages")
        wanted: Json = {
            "model": self.model, "messages": [*self._instructions(), *messages],
            "tools": [tool.openai for tool in self.tools] if self.tools else None,
            "tool_choice": choice.openai,
            "parallel_tool_calls": False if choice.disable_parallel_tool_use else None,
            "response_format": _response_format(config.format or self.output_format),
        }  # fmt: skip
        if messages[-1]["role"] == "assistant":  # the answer goes on with it
            wanted |= {"add_generation_prompt": False, "continue_final_message": True}
        shared = {name: getattr(self, name) for name in ReasoningBody.model_fields} | self._sampling()
        shared["reasoning_effort"] = shared["reasoning_effort"] or config.effort
        try:
            chat = _FittedChat.model_validate(wanted | shared)
        except ValidationError as error:
            raise from_findings(error.errors()) from error
        chat._ignored = self.ignored
        return chat

    def _sampling(self) -> Json:
        return {}

    def _instructions(self) -> list[Json]:
        given = [self.system] if isinstance(self.system, str) else [block.text for block in self.system or ()]
        texts = [text for text in given if text and not text.startswith(_NO_INSTRUCTION)]
        return [{"role": "system", "content": "\n".join(texts)}] if texts else []


class MessagesBody(CountBody, SamplingBody):
    """`POST /v1/messages`."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Texts | None = None

    def _sampling(self) -> Json:
        if self.stop and self.stop_sequences:
            raise refused("give stop_sequences or stop, not both", "stop_sequences")
        shared = {name: getattr(self, name) for name in SamplingBody.model_fields}
        # a stop string of no letters would end every answer before its first one; Anthropic's clients send it
        stops = [stop for stop in self.stop_sequences or () if stop]
        return shared | {"max_completion_tokens": self.max_tokens, "stop": stops or self.stop}


def _response_format(given: Json | None) -> Json | None:
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {"schema": given.get("schema")}}


_EMPTY = {"role": "assistant", "content": ""}
_SPEAKERS = {"tool_use": "assistant", "thinking": "assistant", "redacted_thinking": "assistant", "tool_result": "user"}


def _openai(turns: Sequence[Turn]) -> list[Json]:
    """Messages in OpenAI's form. A tool's result has the tool's name, which some templates show.

    Raises:
        ApiError: 400, a block is in the message of another role, where it would be left out.
    """
    found: list[Json] = []
    tools: dict[str, str] = {}  # of earlier calls, by their ids
    for role, neighbours in groupby(turns, lambda turn: turn.role):
        blocks: list[Any] = []
        for turn in neighbours:
            content = turn.content
            blocks += [TextBlock(type="text", text=content)] if isinstance(content, str) else content
        for block in blocks:
            if (speaker := _SPEAKERS.get(block.type, role)) != role:
                message = f"'messages': a block of type {block.type} in a message of role {role}"
                raise refused(f"{message}; put it into one of role {speaker}", "messages")
        if role == "assistant":
            tools |= {block.id: block.name for block in blocks if isinstance(block, ToolUseBlock)}
            found.append(_assistant(blocks))
        else:
            found += _asked(role, blocks, tools)
    return found


def _assistant(blocks: Sequence[Any]) -> Json:
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in blocks if isinstance(block, ToolUseBlock)
    ]  # fmt: skip
    reasoning = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    text = "\n".join(block.text for block in blocks if isinstance(block, TextBlock))
    rest = {"tool_calls": calls or None, "reasoning_content": reasoning or None}
    return {"role": "assistant", "content": text} | {name: value for name, value in rest.items() if value}


def _asked(role: str, blocks: Sequence[Any], tools: dict[str, str]) -> list[Json]:
    """What the user says, and what tools gave, in this order of theirs."""
    found: list[Json] = []
    for is_result, part in groupby(blocks, lambda block: isinstance(block, ToolResultBlock)):
        if is_result:
            found += [
                {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content),
                 "name": tools.get(block.tool_use_id)}
                for block in part
            ]  # fmt: skip
        elif texts := [block.text for block in part if isinstance(block, TextBlock)]:
            found.append({"role": role, "content": "\n".join(texts)})
    return found


def _text(content: str | list[TextBlock] | None) -> str:
    return content or "" if not isinstance(content, list) else "\n".join(block.text for block in content)


def _json_delta(call: Json) -> Json:
    return {"type": "input_json_delta", "partial_json": call["function"]["arguments"]}


class _Blocks:
    """The blocks of an answer so far, and the events that make them. At most the last one is open."""

    def __init__(self, signature: str) -> None:
        self._signature = signature
        self._done: list[Json] = []
        self._open: Json | None = None
        self._parts: list[str] = []  # of the open one

    def add(self, new: Json) -> Iterator[Json]:
        """What is new of a chat's choice, in OpenAI's form."""
        calls = new.get("tool_calls", ())
        if calls and "id" not in calls[0]:  # the open one goes on
            yield self._grow(_json_delta(calls[0]), calls[0]["function"]["arguments"])
        for kind, text in (("thinking", new.get("reasoning_content")), ("text", new.get("content"))):
            if text:
                if self._open is None or self._open["type"] != kind:
                    yield from self._begin({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
                yield self._grow({"type": f"{kind}_delta", kind: text}, text)
        for call in calls:
            if "id" in call:
                name = f"toolu_{call['id'].removeprefix('call_')}"
                block = {"type": "tool_use", "id": name, "name": call["function"]["name"], "input": {}}
                yield from self._begin(block)
                yield self._grow(_json_delta(call), call["function"]["arguments"])

    def close(self) -> Iterator[Json]:
        """The end of the open one."""
        if self._open is None:
            return
        text, block, self._parts, self._open = "".join(self._parts), self._open, [], None
        index = len(self._done)
        if block["type"] == "thinking":
            delta = {"type": "signature_delta", "signature": self._signature}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
            block |= {"thinking": text, "signature": self._signature}
        elif block["type"] == "tool_use":
            block["input"] = from_json(text, allow_partial=True)  # as clients read what has no end
        else:
            block["text"] = text
        self._done.append(block)
        yield {"type": "content_block_stop", "index": index}

    @property
    def whole(self) -> list[Json]:
        """Those that have ended."""
        return self._done

    def _begin(self, block: Json) -> Iterator[Json]:
        yield from self.close()
        self._open = dict(block)
        yield {"type": "content_block_start", "index": len(self._done), "content_block": block}

    def _grow(self, delta: Json, text: str) -> Json:
        self._parts.append(text)
        return {"type": "content_block_delta", "index": len(self._done), "delta": delta}


class MessagesAnswer:
    """As `Answer`, of one choice of a chat, in the form of `/v1/messages`."""

    names_events = True
    ending = ""

    def __init__(self, checked: CheckedRequest, run: Run, request_id: str) -> None:
        self._checked, self._run = checked, run
        self._id = f"msg_{request_id}"
        self._blocks = _Blocks(self._id)
        self._tokens = self._cached = 0
        self._reason: str | None = None
        self._stop: str | None = None

    async def whole(self) -> Json:
        """The whole answer. Raises ApiError."""
        async for _ in self._events():
            pass
        return self._message()

    async def chunks(self) -> AsyncIterator[Json]:
        """Its events as they come. Raises ApiError."""
        yield {"type": "message_start", "message": self._message()}
        yield {"type": "ping"}
        async for event in _with_pings(self._events()):
            yield event
        delta = {"stop_reason": self._reason, "stop_sequence": self._stop}
        yield {"type": "message_delta", "delta": delta, "usage": self._usage()}
        yield {"type": "message_stop"}

    async def _events(self) -> AsyncIterator[Json]:
        async for index, delta in self._run.deltas():
            choice = self._checked.form.choice(index, delta, first=False, streamed=True)
            self._tokens = delta.tokens
            self._cached += delta.cached_tokens
            for event in self._blocks.add(choice["delta"]):
                yield event
            if choice["finish_reason"] is not None:
                self._stop = delta.stop
                self._reason = self._reason_of(choice["finish_reason"])
        for event in self._blocks.close():
            yield event

    def _reason_of(self, finish: str) -> str:
        if finish == "length":
            wanted = self._checked.body.wanted_tokens or 0
            fitted = self._checked.choices[0].sampling.max_tokens < wanted
            return "model_context_window_exceeded" if fitted else "max_tokens"
        if finish == "tool_calls":
            return "tool_use"
        return "end_turn" if self._stop is None else "stop_sequence"

    def _usage(self) -> Json:
        return {
            "input_tokens": self._checked.prompt_tokens - self._cached, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self._cached, "output_tokens": self._tokens,
        }  # fmt: skip

    def _message(self) -> Json:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self._checked.model,
            "content": list(self._blocks.whole), "stop_reason": self._reason, "stop_sequence": self._stop,
            "usage": self._usage(),
        }  # fmt: skip


async def _with_pings(events: AsyncIterator[Json]) -> AsyncIterator[Json]:
    """The events, and a ping where none has come for `_PING_S`."""
    upcoming = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            await asyncio.wait((upcoming,), timeout=_PING_S)
            if not upcoming.done():
                yield {"type": "ping"}
                continue
            if (event := upcoming.result()) is None:
                return
            yield event
            upcoming = asyncio.ensure_future(anext(events, None))
    finally:
        upcoming.cancel()
