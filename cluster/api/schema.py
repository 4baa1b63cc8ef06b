"""Requests as OpenAI's clients write them, checked. A field is honoured; `parameters` says what else is accepted; any
other name is refused, with the nearest known one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    FailFast,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    Strict,
    model_validator,
)
from typing_extensions import TypeAliasType

from ...actors.requests import (
    BIAS,
    MAX_CACHE_SALT,
    MAX_LOGPROBS,
    MAX_STOP_TOKENS,
    PENALTY,
    REPETITION,
    SamplingParams,
)
from ...errors import RequestError
from .messages import UNSUPPORTED, Body, Messages, NamedTool, Text, Tools
from .parameters import instead, integral, nearest, sift
from .refusals import ApiError, refused
from .thinking import Budget, Effort, Reasoning, Thinking, variables

if TYPE_CHECKING:
    from .templates import ChatTemplate

_MAX_STOPS = 16
_MAX_STOP_CHARS = 1024
_CHATS = frozenset({"messages", "input"})  # parameters that are chats
_OBJECTS = frozenset({"reasoning", "thinking", "usage"})  # parameters that may be objects
_FORMS = frozenset({"Reasoning", "Thinking", "UsageOptions"})  # and the names of these
# of a union's lists those that do not fit end at their first member, not after a finding for each
# a name that is used twice is checked by its own rules, not by those of the body: "5" and true are no ids
TokenIds = TypeAliasType("TokenIds", Annotated[list[Annotated[int, Strict()]], FailFast()])
Texts = TypeAliasType("Texts", Annotated[list[str], FailFast()])
Documents = TypeAliasType("Documents", Annotated[list[dict[str, Any]], FailFast()])
TokenIdLists = TypeAliasType("TokenIdLists", Annotated[list[TokenIds], FailFast()])


class RequestBody(Body):
    """Base of bodies with parameters: those of other servers go through `parameters.sift`."""

    _ignored: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _sift(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(given, dict):
            return handler(given)
        kept, ignored, off = sift(given, cls.model_fields)
        kept |= {name: integral(kept[name]) for name in _integers(cls) & kept.keys()}
        if off is not None:
            raise refused(f"'{off}' is not supported; {instead(off)}", off, "unsupported_parameter")
        body = handler(kept)
        body._ignored = ignored
        return body

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names that were accepted without effect."""
        return self._ignored

    def ignore(self, *names: str) -> None:
        """These have none either."""
        self._ignored += names


@cache
def _integers(body: type[BaseModel]) -> frozenset[str]:
    """Names of the fields that are whole numbers, or lists of them."""

    def kinds(form: Any) -> set[type]:
        form = getattr(form, "__value__", form)  # of an alias
        return ({form} if isinstance(form, type) else set()).union(*map(kinds, get_args(form)))

    each = {name: kinds(field.annotation) for name, field in body.model_fields.items()}
    return frozenset(name for name, found in each.items() if int in found and float not in found)


def _first_wrong(given: Any) -> Any:
    """A map without the entries behind the first one that is no number: each would be a finding."""
    if not isinstance(given, dict):
        return given
    wrong = next((name for name, value in given.items() if not isinstance(value, (int, float))), None)
    return given if wrong is None else {wrong: given[wrong]}


def _field_names(body: type[BaseModel]) -> set[str]:
    """Of a body and of those that inherit it."""
    return set(body.model_fields).union(*map(_field_names, body.__subclasses__()))


def from_findings(findings: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first finding of pydantic, with the parameter's name."""
    finding = next((found for found in findings if found["type"] == UNSUPPORTED), findings[0])
    chat = not _CHATS.isdisjoint(map(str, finding["loc"][:2]))
    objects = _OBJECTS.intersection(map(str, finding["loc"]))
    if (chat or objects) and finding["type"] != UNSUPPORTED:  # of a value's forms the one with parts says more
        finding = max(findings, key=lambda found: len(found["loc"]))
    places = [str(part) for part in finding["loc"] if part != "body"]
    if chat:  # pydantic names the forms, too
        last = [] if (places[-1], finding["type"]) == ("str", "string_type") else places[-1:]
        places = [part for part in places[:-1] if not part.startswith("list[")] + last
    places = [part for part in places if part not in _FORMS]
    # a union's members are named after the field: they mean nothing to a client
    field = places[0] if places else None
    if finding["type"] == "extra_forbidden":
        name = ".".join(places)
        near = nearest(places[-1], _field_names(RequestBody))
        # a name that another request takes is not a misspelling
        remedy = "leave it out" if near in (None, places[-1]) else f"did you mean '{near}'?"
        message = f"'{name}' is not a parameter of this request; {remedy}"
        return refused(message, name, "unsupported_parameter")
    if finding["type"] == "missing":
        return refused(f"'{'.'.join(places)}' is missing" if places else "the body is missing", field)
    message = str(finding["msg"])
    place = "the body" if field is None else repr(".".join(places) if field in _CHATS else field)
    return refused(f"{place}: {message[:1].lower()}{message[1:]}", field)


@dataclass(frozen=True)
class Display:
    """How a choice's tokens become the text that is shown.

    Attributes:
        stops: strings that end it.
        include_stop: whether the stop string, or the text of a stop token, is shown.
        skip_special: whether special tokens are not.
    """

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True


class UsageOptions(RequestBody):
    """OpenRouter's form of `include_usage`."""

    include: bool = False


class StreamOptions(RequestBody):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # in every chunk


Grammar = tuple[str, str | None]  # llguidance's name for the kind, and the text


class StructuredOutputs(RequestBody):
    """vLLM's form of a grammar."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: Text | None = None
    choice: Texts | None = Field(default=None, min_length=1)
    grammar: Text | None = None
    json_object: bool | None = None

    @property
    def given(self) -> dict[str, Grammar]:
        return {
            "structured_outputs.json": _schema_text(self.json_), "structured_outputs.regex": ("regex", self.regex),
            "structured_outputs.choice": _choice_text(self.choice),
            "structured_outputs.grammar": ("grammar", self.grammar),
            "structured_outputs.json_object": _schema_text(_ANY_OBJECT if self.json_object else None),
        }  # fmt: skip


_ANY_OBJECT = {"type": "object"}


def _schema_text(schema: str | dict[str, Any] | None) -> Grammar:
    return "json_schema", json.dumps(schema) if isinstance(schema, dict) else schema


def _choice_text(choices: list[str] | None) -> Grammar:
    return "choice", None if choices is None else json.dumps(choices)


def _response_schema(given: dict[str, Any] | None) -> Grammar:
    """Of OpenAI's `response_format`. Raises ApiError: 400, an unknown form."""
    kind = None if given is None else given.get("type")
    if given is None or kind == "text":
        return "json_schema", None
    if kind == "json_object":
        return _schema_text(given.get("schema", _ANY_OBJECT))  # llama.cpp gives a schema with it
    wrapped = given.get("json_schema")
    schema = wrapped.get("schema") if kind == "json_schema" and isinstance(wrapped, dict) else None
    if not isinstance(schema, dict):
        message = "'response_format' is not known; give type text, json_object, or json_schema with json_schema.schema"
        raise refused(message, "response_format")
    return _schema_text(schema)


class SamplingBody(RequestBody):
    """What every request for text takes."""

    model: str | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, description="0 or -1: no limit")
    stop: str | Texts | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    min_tokens: int | None = Field(default=None, ge=0)
    ignore_eos: bool | None = None
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=PENALTY[0], le=PENALTY[1])
    frequency_penalty: float | None = Field(default=None, ge=PENALTY[0], le=PENALTY[1])
    repetition_penalty: float | None = Field(default=None, ge=REPETITION[0], le=REPETITION[1])
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_first_wrong)] = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=MAX_STOP_TOKENS)
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: Text | None = None
    guided_choice: Texts | None = Field(default=None, min_length=1)
    guided_grammar: Text | None = None
    structured_outputs: StructuredOutputs | None = None
    grammar: Text | None = None
    json_schema: dict[str, Any] | None = None
    stream: bool | None = None
    cache_salt: str | None = Field(
        default=None, min_length=1, max_length=MAX_CACHE_SALT, description="shares KV pages with the same salt only"
    )


class GenerationBody(SamplingBody):
    """What both kinds of completions take."""

    max_tokens: int | None = Field(default=None, ge=0)
    n: int | None = Field(default=None, ge=1)
    response_format: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None
    usage: bool | UsageOptions | None = None
    usual_tokens: ClassVar[int | None] = None  # generated where neither request nor model says; None: as many as fit
    fits_tokens: ClassVar[bool] = False  # whether more tokens than fit are asked for as those that fit

    def check(self) -> None:
        """Refuse what would have no effect.

        Raises:
            ApiError: 400 with the parameter's name.
        """
        if self.stream_options is not None and not self.stream:
            raise refused("'stream_options' is for streams; set stream, or leave it out", "stream_options")
        if len(self.stops) > _MAX_STOPS:
            raise refused(f"{len(self.stops)} stop strings; give at most {_MAX_STOPS}", "stop")
        for stop in self.stops:
            if not 1 <= len(stop) <= _MAX_STOP_CHARS:
                raise refused(f"a stop string of {len(stop)} characters; give 1 to {_MAX_STOP_CHARS}", "stop")
        for name, value in (self.logit_bias or {}).items():
            if not (name.isascii() and name.isdigit() and len(name) <= 20 and BIAS[0] <= value <= BIAS[1]):
                raise refused("'logit_bias': give token ids with numbers from -100 to 100", "logit_bias")

    @property
    def named_tokens(self) -> dict[str, list[int]]:
        """Ids outside of prompts, by parameter."""
        return {"logit_bias": [int(token) for token in self.logit_bias or ()],
                "stop_token_ids": self.stop_token_ids or []}  # fmt: skip

    @property
    def stops(self) -> tuple[str, ...]:
        found = self.stop
        return () if found is None else (found,) if isinstance(found, str) else tuple(found)

    @property
    def constraint(self) -> tuple[str, str, str] | None:
        """(the parameter, llguidance's name for its kind, its text) of the grammar that the text must follow.

        Raises:
            ApiError: 400, there are several, or an unknown `response_format`.
        """
        structured = self.structured_outputs or StructuredOutputs()
        given = {
            "response_format": _response_schema(self.response_format),
            "guided_json": _schema_text(self.guided_json), "guided_regex": ("regex", self.guided_regex),
            "guided_choice": _choice_text(self.guided_choice),
            "guided_grammar": ("grammar", self.guided_grammar), "grammar": ("grammar", self.grammar),
            "json_schema": _schema_text(self.json_schema), **structured.given,
        }  # fmt: skip
        found = [(name, kind, text) for name, (kind, text) in given.items() if text is not None]
        if len(found) > 1:
            raise refused(f"'{found[0][0]}' and '{found[1][0]}' both give a grammar; leave one out", found[1][0])
        if found and (self.ignore_eos or self.min_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise refused(f"'{found[0][0]}' says when the text ends; leave '{name}' out", name)
        return found[0] if found else None

    @property
    def display(self) -> Display:
        """How tokens become text."""
        return Display(self.stops, bool(self.include_stop_str_in_output), self.skip_special_tokens is not False)

    @property
    def choices(self) -> int:
        """Choices for each prompt."""
        return self.n or 1

    @property
    def prompt_count(self) -> int:
        """Prompts that it has."""
        return 1

    @property
    def wanted_tokens(self) -> int | None:
        """To generate for each choice; None: it does not say."""
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        also = self.usage.include if isinstance(self.usage, UsageOptions) else bool(self.usage)
        return also or (self.stream_options is not None and self.stream_options.include_usage)

    @property
    def running_usage(self) -> bool:
        """Whether every chunk has the number of tokens so far."""
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def ignored(self) -> tuple[str, ...]:
        return self._ignored + (() if self.stream_options is None else self.stream_options.ignored)

    def sampling(
        self, max_tokens: int, logprobs: int | None = None, prompt_logprobs: int | None = None,
        grammar: str | None = None,
    ) -> list[SamplingParams]:  # fmt: skip
        """How each choice of a prompt picks its tokens.

        Choice 0 draws with the seed itself, choice i with seed + i: the same prompt gives the same choices, alone and
        in a list. All else is one object: it may be large.
        """
        if (self.min_tokens or 0) > max_tokens:
            raise refused(f"min_tokens {self.min_tokens} exceeds the limit of {max_tokens} tokens", "min_tokens")
        found = SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else float(self.temperature),
            top_p=1.0 if self.top_p is None else float(self.top_p),
            top_k=max(self.top_k or 0, 0),
            seed=None if self.seed is None else self.seed % 2**64,
            ignore_eos=bool(self.ignore_eos),
            min_tokens=self.min_tokens or 0,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            min_p=float(self.min_p or 0.0),
            presence_penalty=float(self.presence_penalty or 0.0),
            frequency_penalty=float(self.frequency_penalty or 0.0),
            repetition_penalty=1.0 if self.repetition_penalty is None else float(self.repetition_penalty),
            logit_bias=tuple((int(token), float(value)) for token, value in (self.logit_bias or {}).items()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            grammar=grammar,
        )
        try:
            found.check()
        except RequestError as error:
            name = error.what.partition(" ")[0]
            raise refused(str(error), name if name in type(self).model_fields else None) from error
        if found.seed is None:
            return [found] * self.choices
        return [replace(found, seed=(found.seed + index) % 2**64) for index in range(self.choices)]


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: str | Texts | TokenIds | TokenIdLists
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool | None = None
    add_special_tokens: bool = True
    usual_tokens: ClassVar[int | None] = 16  # as OpenAI

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry for each prompt: text or token ids."""
        found = self.prompt
        if isinstance(found, str):
            return [found]
        if found and isinstance(found[0], int):
            return [found]  # a list of numbers is one prompt
        return list(found)  # type: ignore[arg-type]

    @property
    def prompt_count(self) -> int:
        return len(self.prompts)


# parameters of transformers' `apply_chat_template`, and what it gives to a template itself
_TEMPLATE_NAMES = (
    "messages", "tools", "add_generation_prompt", "continue_final_message", "conversation",
    "chat_template", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
)  # fmt: skip


class ReasoningBody(RequestBody):
    """What is asked of the model's reasoning: see `thinking`."""

    reasoning_effort: Effort = None
    reasoning: Effort | Literal["on", "off"] | bool | Reasoning = None
    thinking: Effort | Literal["on", "off"] | bool | Thinking = None
    think: Effort | Literal["on", "off"] | bool = None
    enable_thinking: bool | None = None
    thinking_budget: Budget | None = None
    thinking_token_budget: Budget | None = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    reasoning_format: Literal["none", "raw", "auto", "deepseek", "deepseek-legacy", "parsed", "hidden"] | None = None


class TemplateBody(ReasoningBody):
    """What a chat template gets in addition to messages and tools."""

    documents: Documents | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    def variables(self, template: ChatTemplate) -> dict[str, Any]:
        """Further ones for this template; what it does not know is ignored from now on."""
        found, ignored = variables(self, template.variables, template.levels)
        self.ignore(*ignored)
        return found | (self.chat_template_kwargs or {})

    @property
    def all_documents(self) -> list[dict[str, Any]] | None:
        """Those of the field, else those that are given as a variable."""
        return self.documents or (self.chat_template_kwargs or {}).get("documents")

    def check_template(self) -> None:
        """Refuse variables of a template that the server sets itself, and two ends of a prompt.

        Raises:
            ApiError: 400.
        """
        if taken := [name for name in _TEMPLATE_NAMES if name in (self.chat_template_kwargs or {})]:
            message = f"'chat_template_kwargs': the server sets '{taken[0]}'; leave it out"
            raise refused(message, "chat_template_kwargs")
        if self.documents and (self.chat_template_kwargs or {}).get("documents"):
            raise refused("'documents' are given twice; leave those in chat_template_kwargs out", "documents")
        if self.continue_final_message and self.add_generation_prompt:
            message = "'continue_final_message' continues the last message; set add_generation_prompt to false"
            raise refused(message, "continue_final_message")


class ChatBody(GenerationBody, TemplateBody):
    """`POST /v1/chat/completions`."""

    messages: Messages = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool = False  # a template writes its own
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    def check(self) -> None:
        super().check()
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise refused("give max_tokens or max_completion_tokens, not both", "max_completion_tokens")
        if self.max_tokens == 0:
            raise refused("'max_tokens' is 0; ask for at least one token", "max_tokens")
        if self.top_logprobs and not self.logprobs:  # 0 asks for nothing
            raise refused("'top_logprobs' needs logprobs; set it, or leave this out", "top_logprobs")
        self.check_template()
        self._check_tools()
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in self.functions:
            raise refused(f"'tool_choice': no tool '{self.tool_choice.function.name}' in 'tools'", "tool_choice")
        if self.tool_choice == "required" and not self.tools:
            raise refused("'tool_choice' is required and there are no tools; give some", "tool_choice")

    def _check_tools(self) -> None:
        """Refuse what is no object's schema for arguments, and two tools of one name that differ."""
        functions = self.functions
        for tool in self.tools or ():
            name, schema = tool.function.name, tool.function.schema_of_arguments
            if schema != functions[name]:
                raise refused(f"'tools': two of them are named '{name}'; give each a name of its own", "tools")
            kinds, values = schema.get("type", "object"), schema.get("enum", [schema.get("const", {})])
            takes = "object" in (kinds if isinstance(kinds, list) else [kinds])
            if not takes or (isinstance(values, list) and not any(isinstance(value, dict) for value in values)):
                message = f"'tools': the parameters of '{name}' are no object's; give a schema of type object"
                raise refused(message, "tools")

    @property
    def functions(self) -> dict[str, Any]:
        """The JSON schema of each tool's arguments."""
        return {tool.function.name: tool.function.schema_of_arguments for tool in self.tools or ()}

    @property
    def ignored(self) -> tuple[str, ...]:
        inner = set().union(*(part.ignored for part in (*self.messages, *(self.tools or ()))))
        return super().ignored + tuple(f"messages.{name}" for name in sorted(inner))

    @property
    def forced_functions(self) -> dict[str, Any]:
        """Those of which one must be called; none: the model decides."""
        if isinstance(self.tool_choice, NamedTool):
            return {self.tool_choice.function.name: self.functions[self.tool_choice.function.name]}
        return self.functions if self.tool_choice == "required" else {}

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """What the template shows to the model."""
        return [] if self.tool_choice == "none" else [tool.plain for tool in self.tools or ()]

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeBody(TemplateBody):
    """`POST /tokenize`: text as a completion's prompt, or messages as a chat's."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool = True

    def check(self) -> None:
        self.check_template()
        if (self.prompt is None) == (self.messages is None):
            raise refused("give either prompt or messages", "prompt")


class DetokenizeBody(RequestBody):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds


def finite(logprob: float) -> float:
    """JSON has no infinity: an impossible token gets -9999, as in vLLM."""
    return logprob if math.isfinite(logprob) else -9999.0
