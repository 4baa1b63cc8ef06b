"""Messages and tools of chats as OpenAI's clients write them, and as templates expect them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from .refusals import refused

Text = Annotated[str, StringConstraints(min_length=1)]


class Body(BaseModel):
    """Base: no unknown keys, no silent conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ContentPart(Body):
    type: Literal["text"]
    text: str


class CalledFunction(Body):
    name: Text
    arguments: str


class Call(Body):
    """A call that an assistant's message made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def plain(self) -> dict[str, Any]:
        """As templates expect it: the arguments are an object."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise refused(f"'messages': the arguments of call '{self.id}' are no JSON: {error}", "messages") from error
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class Message(Body):
    """One message of a chat; a template decides which roles it knows. An assistant's comes back as it was answered."""

    role: Text
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = Field(default=None, max_length=0)

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs content")
        return self

    @property
    def plain(self) -> dict[str, Any]:
        """As templates expect it."""
        content = self.content if not isinstance(self.content, list) else "".join(part.text for part in self.content)
        calls = None if not self.tool_calls else [call.plain for call in self.tool_calls]
        rest = {
            "name": self.name, "tool_calls": calls, "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content,
        }  # fmt: skip
        plain = {"role": self.role, "content": content or ""}
        return plain | {name: value for name, value in rest.items() if value is not None}


class Function(Body):
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function

    @property
    def plain(self) -> dict[str, Any]:
        """As templates expect it."""
        given = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": {"description": "", "parameters": {"type": "object"}} | given}


class NamedFunction(Body):
    name: Text


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction
