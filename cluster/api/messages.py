"""Messages and tools of chats as OpenAI's clients write them, and as templates expect them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json
from typing_extensions import TypeAliasType

from .bodies import exceeded
from .refusals import refused

_MANY_ARGUMENTS = 20_000
MANY_TOOLS = 1024  # agents' servers of tools bring hundreds
Text = Annotated[str, StringConstraints(min_length=1)]


class Body(BaseModel):
    """Base: no unknown keys, no silent conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _first_unknown(cls, given: Any) -> Any:
        """Without the unknown names behind the first one: each would be a finding, and one refuses the body."""
        if not isinstance(given, dict):
            return given
        known = _names(cls)
        late = frozenset([name for name in given if name not in known][1:])
        return {name: value for name, value in given.items() if name not in late} if late else given


@cache
def _names(body: type[BaseModel]) -> frozenset[str]:
    """Of its fields, as requests write them."""
    return frozenset(field.alias or name for name, field in body.model_fields.items())


# what clients send along with messages, and what no template reads: hints to caches, and what an answer had besides
_HARMLESS = frozenset({
    "cache_control", "prompt_cache_key", "prompt_cache_breakpoint", "index", "id", "status", "annotations", "citations",
    "logprobs", "metadata", "created", "created_at", "createdAt", "timestamp", "provider_specific_fields",
    "provider_options", "providerOptions", "provider_metadata", "providerMetadata", "extra_content", "thinking_blocks",
    "reasoning_details", "parsed", "parsed_arguments",
})  # fmt: skip


class Sent(Body):
    """Base of what messages and tools consist of: fields that change no prompt are accepted."""

    harmless: ClassVar[frozenset[str]] = _HARMLESS
    _ignored: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _sift(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(given, dict):
            return handler(given)
        ignored = tuple(name for name in given if name in cls.harmless and name not in cls.model_fields)
        kept = {name: value for name, value in given.items() if name not in ignored}
        body = handler(kept)
        body._ignored = tuple(name for name in ignored if given[name])
        return body

    @property
    def ignored(self) -> set[str]:
        """Names that were accepted without effect, here and below."""
        found = set(self._ignored)
        for value in self.__dict__.values():
            for part in value if isinstance(value, list) else (value,):
                if isinstance(part, Sent):
                    found |= part.ignored
        return found


UNSUPPORTED = "unsupported_content"  # type of a finding
_KINDS = {  # of content parts that are no text: what clients call them
    "images": ("image_url", "input_image", "image", "image_file"),
    "audio": ("input_audio", "audio", "audio_url"),
    "videos": ("video_url", "input_video", "video"),
    "files": ("file", "input_file", "file_url", "document"),
}
_NOT_TEXT = {name: kind for kind, names in _KINDS.items() for name in names}


def refuse_other_than_text(given: Any) -> Any:
    """A part of a message's content as it is. Raises PydanticCustomError: it is an image, a sound or a file."""
    name = given.get("type") if isinstance(given, dict) else None
    if isinstance(name, str) and name in _NOT_TEXT:
        kind = _NOT_TEXT[name]
        raise PydanticCustomError(UNSUPPORTED, f"{kind} are not supported; this server takes text alone")
    return given


class ContentPart(Sent):
    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, given: Any) -> Any:
        given = refuse_other_than_text(given)
        if isinstance(given, dict) and given.get("type") == "refusal" and "text" not in given:  # of an earlier answer
            return {"text" if key == "refusal" else key: value for key, value in given.items()}
        return given


# of a list that does not fit, findings end at its first member
ContentParts = TypeAliasType("ContentParts", Annotated[list[ContentPart], FailFast()])


class CalledFunction(Sent):
    name: Text
    arguments: str | dict[str, Any]


def _read(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return from_json(arguments, allow_partial=True)


class Call(Sent):
    """A call that an assistant's message made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def plain(self) -> dict[str, Any]:
        """As templates expect it: the arguments are an object. Of those that broke off it is what is whole."""
        given = self.function.arguments
        try:
            arguments = given if isinstance(given, dict) else _read(given or "{}")
        except (ValueError, RecursionError) as error:
            raise refused(f"'messages': the arguments of call '{self.id}' are not JSON: {error}", "messages") from error
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


Calls = TypeAliasType("Calls", Annotated[list[Call], FailFast()])


class Message(Sent):
    """One message of a chat; a template decides which roles it knows. Fields of an answer are accepted."""

    role: Text
    content: str | ContentParts | None = None
    name: str | None = None
    tool_calls: Calls | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        # an answer may have had none: its tokens went into reasoning, or it was nothing
        spoke = self.role == "assistant" and self.model_fields_set - {"role", "name"}
        if self.content is None and not self.tool_calls and not spoke:
            raise ValueError("a message needs content")
        return self

    @property
    def plain(self) -> dict[str, Any]:
        """As templates expect it."""
        content = self.content if not isinstance(self.content, list) else "".join(part.text for part in self.content)
        calls = None if not self.tool_calls else [call.plain for call in self.tool_calls]
        rest = {
            "name": self.name, "tool_calls": calls, "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content, "reasoning": self.reasoning, "thinking": self.thinking,
        }  # fmt: skip
        plain = {"role": self.role, "content": content or self.refusal or ""}
        return plain | {name: value for name, value in rest.items() if value is not None}


FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class Function(Sent):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return self.parameters or {"type": "object"}


class Tool(Sent):
    type: Literal["function"]
    function: Function

    @property
    def plain(self) -> dict[str, Any]:
        """As templates expect it."""
        given = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": {"description": "", "parameters": {"type": "object"}} | given}


Messages = TypeAliasType("Messages", Annotated[list[Message], FailFast()])
Tools = TypeAliasType("Tools", Annotated[list[Tool], FailFast(), Field(max_length=MANY_TOOLS)])


class NamedFunction(Body):
    name: Text


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


def written_bytes(messages: Sequence[Message]) -> int:
    """About the size of their calls."""
    return sum(
        len(call.function.arguments) if isinstance(call.function.arguments, str) else len(str(call.function.arguments))
        for message in messages for call in message.tool_calls or ()
    )  # fmt: skip


def _closed(arguments: str) -> bytes:
    """Arguments that may have broken off within a string: what follows them is not inside of it."""
    text = arguments.encode("utf-8", "surrogatepass").replace(rb"\\", b"").replace(rb"\"", b"").replace(b"\\", b"")
    return text + b'"' * (text.count(b'"') % 2)


def plain_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As templates expect them.

    Raises:
        ApiError: 400, arguments that are not JSON, or have too many values.
    """
    texts = [
        call.function.arguments for message in messages for call in message.tool_calls or ()
        if isinstance(call.function.arguments, str)
    ]  # fmt: skip
    if exceeded(b",".join(map(_closed, texts)), _MANY_ARGUMENTS):
        message = f"'messages': the arguments of calls hold more than {_MANY_ARGUMENTS} values; send less at a time"
        raise refused(message, "messages")
    return [message.plain for message in messages]
