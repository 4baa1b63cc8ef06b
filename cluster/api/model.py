"""The model that a server answers for: its name, text into its tokens and back, and what it cannot take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tokenizers import Tokenizer

from ..checkpoints.generation import NO_DEFAULTS, GenerationDefaults
from ..detokenizer import IncrementalText, TokenBytes
from .keys import ANYONE, Key
from .messages import Message, plain_of, written_bytes
from .offload import Offload
from .reasoning import marks_of
from .refusals import ApiError, refused
from .schema import GenerationBody, SamplingBody, TemplateBody
from .settings import LimitSettings
from .templates import ChatTemplate
from .text import longest_token
from .tools import calling

B = TypeVar("B", bound=GenerationBody)
MESSAGE_BYTES = 64  # of text, whose tokens take as long as one message beside its text
_PLACE_BYTES = 16  # the same, of one token whose place in a text is looked for


@dataclass(frozen=True)
class Echo:
    """A prompt, echoed before its continuation.

    starts: character at which each of its tokens begins.
    """

    text: str
    starts: tuple[int, ...] = ()


class ServedModel:
    """A model by its tokenizer, its chat template and the runtime's plan.

    Args:
        name: what clients call it.
        plan: the runtime's effective plan.
        template: of chats; None: the model has none and none was given.
        limits: on requests.
        tool_format: how the model writes tool calls; None: as its template shows.
        defaults: of what a request leaves out.

    Attributes:
        special_calls: whether the parser of calls needs the names of special tokens in the text.
        reasoning: the marks around the model's reasoning; None: it writes none.
        special_reasoning: whether these are special tokens.
    """

    def __init__(
        self, name: str, plan: Mapping[str, Any], tokenizer: Tokenizer, template: ChatTemplate | None,
        limits: LimitSettings, tool_format: str | None = None, defaults: GenerationDefaults = NO_DEFAULTS,
    ) -> None:  # fmt: skip
        self.name, self.plan, self.template, self._tokenizer = name, plan, template, tokenizer
        self._limits, self._defaults = limits, defaults
        self.calling = calling(template, tool_format)
        special = [item.content for item in tokenizer.get_added_tokens_decoder().values() if item.special]
        found = self.calling.format
        self.special_calls = found is not None and (
            found.special or any(name in self.calling.written for name in special)
        )
        self.reasoning = None if found is not None and found.reasons else marks_of(template)
        self.special_reasoning = any(name in mark for mark in self.reasoning or () for name in special)
        self.token_bytes = TokenBytes(tokenizer)
        self.offload = Offload()
        self._longest_token = longest_token(tokenizer)
        places = tokenizer.get_vocab(with_added_tokens=True).values()
        self._known_tokens = int(plan.get("vocabulary") or 1 + max(places, default=-1))  # ids have gaps

    @property
    def limit_tokens(self) -> int:
        """Prompt and generated tokens that one choice may take."""
        return int(self.plan["max_prompt_tokens"])

    def check(self, body: GenerationBody) -> None:
        """Refuse another model's name, tokens that this one does not have, and too many choices.

        Raises:
            ApiError: 400 or 404.
        """
        self.check_name(body.model)
        for parameter, tokens in body.named_tokens.items():
            self.check_tokens(tokens, parameter)
        if body.min_tokens and len(set(body.stop_token_ids or ())) >= self._known_tokens:
            message = "'stop_token_ids' names every token, and none may come before min_tokens; leave one of both out"
            raise refused(message, "stop_token_ids")
        choices, parameter = body.prompt_count * body.choices, "prompt" if body.prompt_count > 1 else "n"
        if choices > self._limits.choices:
            raise refused(f"{choices} choices; this server gives at most {self._limits.choices}", parameter)

    def check_name(self, name: str | None) -> None:
        """Refuse another model's name.

        Raises:
            ApiError: 404.
        """
        if name is not None and name != self.name:
            raise ApiError(404, f"no model '{name}'; this server has '{self.name}'", "model", "model_not_found")

    def check_tokens(self, tokens: Iterable[int], parameter: str) -> None:
        """Refuse tokens that the model does not have.

        Raises:
            ApiError: 400 with the parameter's name.
        """
        known = self._known_tokens
        if (unknown := next((token for token in tokens if not 0 <= token < known), None)) is not None:
            message = f"'{parameter}': the model has no token {unknown}; give ids from 0 to {known - 1}"
            raise refused(message, parameter)

    def with_defaults(self, body: B) -> B:
        """A body with the model's own defaults in place of what it leaves out, as vLLM has it."""
        names = SamplingBody.model_fields.keys()
        left = {name: value for name, value in self._defaults.values.items() if name in names}
        return body.model_copy(update={name: value for name, value in left.items() if getattr(body, name) is None})

    def tokens_for(self, body: GenerationBody, prompt_tokens: int) -> int:
        """How many tokens to generate: the request's number, the model's own, OpenAI's, or as many as fit."""
        room = max(1, self.limit_tokens - prompt_tokens)
        if body.wanted_tokens is not None:
            return min(room, body.wanted_tokens) if body.fits_tokens else body.wanted_tokens
        if self._defaults.max_new_tokens is None and body.usual_tokens is not None:
            return body.usual_tokens
        return min(room, self._defaults.max_new_tokens or room)

    def check_length(self, prompt_tokens: int, max_tokens: int, prompt: str) -> None:
        """Refuse what the model or the KV cache cannot hold.

        Args:
            prompt: parameter to name if the prompt alone is too long.

        Raises:
            ApiError: 400.
        """
        if prompt_tokens + max_tokens > self.limit_tokens:
            raise refused(
                f"{prompt_tokens} prompt tokens and {max_tokens} to generate exceed the limit of {self.limit_tokens}; "
                "shorten the prompt or ask for fewer",
                "max_tokens" if prompt_tokens < self.limit_tokens else prompt,
                "context_length_exceeded",
            )

    async def prompt_ids(
        self, prompt: str | Sequence[int], *, special: bool = True, parameter: str = "prompt"
    ) -> tuple[int, ...]:
        """Token ids of text, or the given ids checked.

        Args:
            special: whether the tokenizer adds its special tokens (a beginning-of-text token).
            parameter: to name if the text is too long.

        Raises:
            ApiError: 400, the prompt has no token, more than the limit, or one that the model does not have.
        """
        if isinstance(prompt, str):
            size = len(prompt.encode())
            if self._longest_token is not None and size > self.limit_tokens * self._longest_token:
                raise self._too_long(f"the text's {size} bytes", parameter)
            ids = await self.offload.run(size, lambda: self._encode(prompt, special, parameter))
        else:
            ids = tuple(prompt)
            if len(ids) > self.limit_tokens:
                raise self._too_long(f"{len(ids)} tokens", parameter)
            self.check_tokens(ids, parameter)
        if not ids:
            raise refused(f"'{parameter}' is empty; give at least one token", parameter)
        return ids

    async def count(self, text: str, *, special: bool = True) -> int:
        """Tokens of a text, also of one that is longer than the model takes. special: as of `prompt_ids`."""

        return await self.offload.run(len(text.encode()), lambda: len(self._encoding(text, special)))

    def _encoding(self, text: str, special: bool) -> Any:
        # not `encode`, which holds the interpreter's lock
        (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return found

    def _encode(self, text: str, special: bool, parameter: str) -> tuple[int, ...]:
        found = self._encoding(text, special)  # the ids are a list of Python's only where they are few
        if len(found) > self.limit_tokens:
            raise self._too_long(f"{len(found)} tokens", parameter)
        return tuple(found.ids)

    def _too_long(self, what: str, parameter: str) -> ApiError:
        message = f"{what} exceed the limit of {self.limit_tokens} tokens; shorten the prompt"
        return refused(message, parameter, "context_length_exceeded")

    async def text_of(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens with their names."""
        given = list(ids)
        return await self.offload.run(len(given), lambda: self._tokenizer.decode(given, skip_special_tokens=False))

    async def echo_of(self, prompt: str | Sequence[int], ids: Sequence[int]) -> Echo:
        """A prompt as its answer echoes it: given text unchanged, token ids with the names of special tokens."""
        text = prompt if isinstance(prompt, str) else await self.text_of(ids)
        return await self.offload.run(_PLACE_BYTES * len(ids), lambda: Echo(text, self._starts(ids, text)))

    def _starts(self, ids: Sequence[int], text: str) -> tuple[int, ...]:
        """Places of tokens in their text, which may leave out the special tokens that were added to it."""
        for skip_special in (False, True):
            decoded = IncrementalText(self._tokenizer, skip_special=skip_special)
            if decoded.add(ids) + decoded.finish() == text:
                break
        return tuple(min(start, len(text)) for start in decoded.starts)

    async def chat_text(
        self, body: TemplateBody, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (),
        key: Key | None = ANYONE,
    ) -> str:  # fmt: skip
        """A chat by the template.

        Args:
            body: further arguments of the template.
            tools: that are shown to the model.
            key: whose request it is.

        Raises:
            ApiError: 400, there is no template, it refuses the messages or is not done in time; 429, too many of the
                key wait; 503, the process that renders ended.
        """
        template = self.template
        if template is None:
            raise refused(
                f"model '{self.name}' has no chat template; start the server with --chat-template FILE, "
                "or use /v1/completions",
                "messages",
            )
        if body.all_documents and not template.takes_documents:
            raise refused("the model's chat template takes no documents; leave 'documents' out", "documents")
        called = written_bytes(messages)
        plain = await self.offload.run(MESSAGE_BYTES * len(messages) + called, lambda: plain_of(messages))
        size = called + sum(len(message["content"]) + len(message["role"]) + MESSAGE_BYTES for message in plain)
        options = body.variables(template)
        size += sum(len(str(given)) for given in (options, body.documents, tools) if given)
        return await self.offload.chat(
            key.name if key is not None else "",
            size,
            lambda: template.render(
                plain, tools=tools, documents=body.all_documents, add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message, options=options,
            ),
        )  # fmt: skip
