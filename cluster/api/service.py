"""What answers requests: tokens and limits, and the choices of a request side by side."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from ...actors.requests import GenerationRequest, SamplingParams
from ...errors import RuntimeFailure, TierMoeError
from ..checkpoints.generation import NO_DEFAULTS, GenerationDefaults
from ..detokenizer import IncrementalText, TokenBytes
from ..report.steps import left_s
from .admission import Admission
from .backend import Backend
from .keys import ANYONE, Key
from .lead import LeadState
from .messages import Message, plain_of, written_bytes
from .metrics import ChoiceTimer, Metrics
from .offload import Offload
from .records import ChoiceTimes
from .refusals import ApiError, from_failure, refused
from .schema import Display, TemplateBody
from .settings import LimitSettings
from .templates import ChatTemplate
from .text import ChoiceText, Delta, longest_token
from .tools import calling

MESSAGE_BYTES = 64  # of text, whose tokens take as long as one message beside its text
_AGAIN_S = 2
_QUEUED_DELTAS = 64  # that a slow client may be behind, for each request


@dataclass(frozen=True)
class Choice:
    """One choice to generate.

    shown: False: a token is generated for its prompt's log-probabilities only.
    cache_salt: the request's own, for the prefix cache.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    display: Display
    shown: bool = True
    cache_salt: str | None = None


@dataclass(frozen=True)
class Echo:
    """A prompt, echoed before its continuation.

    starts: character at which each of its tokens begins.
    """

    text: str
    starts: tuple[int, ...] = ()


@dataclass(frozen=True)
class NotReady:
    """What the server waits for.

    left_s: seconds until it serves, by the runtime's first start; None: not known.
    """

    reason: str
    left_s: float | None = None

    def __str__(self) -> str:
        return self.reason + ("" if self.left_s is None else f", ready in about {max(1, round(self.left_s))} s")

    @property
    def retry_after_s(self) -> int:
        """When to ask again: once it should be ready, else in a moment."""
        return _AGAIN_S if self.left_s is None else min(60, max(1, math.ceil(self.left_s)))


_UNKNOWN = NotReady("the runtime has not answered yet")


class Run:
    """The choices of one request under way; `close` ends what still runs.

    Args:
        choices: the deltas of each.
        times: of each choice.
        ended: called as each choice ends, however it ends.
    """

    def __init__(
        self, choices: Sequence[AsyncGenerator[Delta]], times: Sequence[ChoiceTimes], ended: Callable[[], None]
    ) -> None:
        self.choices, self.times = len(choices), list(times)
        self._queue: asyncio.Queue[tuple[int, Delta | ApiError]] = asyncio.Queue(_QUEUED_DELTAS)
        self._tasks = []
        for index, deltas in enumerate(choices):
            # started here and not by the reader: a reader that never comes must not occupy the queue
            task = asyncio.create_task(self._forward(index, deltas))
            task.add_done_callback(lambda _: ended())
            self._tasks.append(task)

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """(choice, its new part), in the order of arrival, until all choices have ended.

        Raises:
            ApiError: a choice failed.
        """
        open_choices = self.choices
        while open_choices:
            index, item = await self._queue.get()
            if isinstance(item, ApiError):
                raise item
            open_choices -= item.finish is not None
            yield index, item

    def close(self) -> None:
        """Cancel what has not ended, here and in the runtime. Does not wait."""
        for task in self._tasks:
            task.cancel()

    async def _forward(self, index: int, deltas: AsyncGenerator[Delta]) -> None:
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    await self._queue.put((index, delta))
        except TierMoeError as error:
            await self._queue.put((index, from_failure(error)))
        except Exception as error:  # else the reader would wait for ever
            await self._queue.put((index, ApiError(500, f"the server failed: {type(error).__name__}: {error}")))


class Service:
    """The server without its routes.

    Args:
        backend: the runtime.
        tokenizer: the model's.
        template: of chats; None: the model has none and none was given.
        model_name: what clients call the model.
        limits: on requests.
        tool_format: how the model writes tool calls; None: as its template shows.
        share_prefix_cache: whether requests of different keys share KV pages.
        defaults: of what a request leaves out.
    """

    def __init__(
        self, backend: Backend, tokenizer: Tokenizer, template: ChatTemplate | None, model_name: str,
        limits: LimitSettings, tool_format: str | None = None, share_prefix_cache: bool = False,
        defaults: GenerationDefaults = NO_DEFAULTS,
    ) -> None:  # fmt: skip
        self._share_prefix_cache = share_prefix_cache
        self.calling = calling(template, tool_format)
        special = [item.content for item in tokenizer.get_added_tokens_decoder().values() if item.special]
        found = self.calling.format
        # whether the parser of calls needs the names of special tokens in the text
        self.special_calls = found is not None and (
            found.special or any(name in self.calling.written for name in special)
        )
        self.backend, self.tokenizer, self.template = backend, tokenizer, template
        self.model_name, self.limits, self.defaults = model_name, limits, defaults
        self.token_bytes = TokenBytes(tokenizer)
        self.offload = Offload()
        self._longest_token = longest_token(tokenizer)
        places = tokenizer.get_vocab(with_added_tokens=True).values()
        self.known_tokens = int(backend.plan.get("vocabulary") or 1 + max(places, default=-1))  # ids have gaps
        held = int(backend.plan.get("kv_tokens") or 0) * max(1, len(backend.states()))
        self.admission = Admission(int(backend.plan["max_requests"]), limits.waiting, held or None)
        sharded = bool(backend.plan.get("shards"))
        self.metrics = Metrics(backend.ask, sharded=sharded)
        self.started_s, self.begun_s = int(time.time()), time.monotonic()  # the date, and what durations are from

    @property
    def limit_tokens(self) -> int:
        """Prompt and generated tokens that one choice may take."""
        return int(self.backend.plan["max_prompt_tokens"])

    def check_model(self, name: str | None) -> None:
        """Refuse another model's name.

        Raises:
            ApiError: 404.
        """
        if name is not None and name != self.model_name:
            raise ApiError(404, f"no model '{name}'; this server has '{self.model_name}'", "model", "model_not_found")

    def check_choices(self, choices: int, parameter: str = "n") -> None:
        """Refuse more choices than one request may have.

        Raises:
            ApiError: 400.
        """
        if choices > self.limits.choices:
            raise refused(f"{choices} choices; this server gives at most {self.limits.choices}", parameter)

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
            ids, known = tuple(prompt), self.known_tokens
            if len(ids) > self.limit_tokens:
                raise self._too_long(f"{len(ids)} tokens", parameter)
            if unknown := [token for token in ids if not 0 <= token < known]:
                raise refused(f"the model has no token {unknown[0]}; give ids from 0 to {known - 1}", parameter)
        if not ids:
            raise refused("the prompt is empty; give at least one token", parameter)
        return ids

    def _encode(self, text: str, special: bool, parameter: str) -> tuple[int, ...]:
        # not `encode`, which holds the interpreter's lock; the ids are a list of Python's only where they are few
        (found,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=special)
        if len(found) > self.limit_tokens:
            raise self._too_long(f"{len(found)} tokens", parameter)
        return tuple(found.ids)

    def _too_long(self, what: str, parameter: str) -> ApiError:
        message = f"{what} exceed the limit of {self.limit_tokens} tokens; shorten the prompt"
        return refused(message, parameter, "context_length_exceeded")

    async def text_of(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens with their names."""
        given = list(ids)
        return await self.offload.run(len(given), lambda: self.tokenizer.decode(given, skip_special_tokens=False))

    async def echo_of(self, prompt: str | Sequence[int], ids: Sequence[int]) -> Echo:
        """A prompt as its answer echoes it: given text unchanged, token ids with the names of special tokens."""
        text = prompt if isinstance(prompt, str) else await self.text_of(ids)
        return await self.offload.run(len(ids), lambda: Echo(text, self._starts(ids, text)))

    def _starts(self, ids: Sequence[int], text: str) -> tuple[int, ...]:
        """Places of tokens in their text, which may leave out the special tokens that were added to it."""
        for skip_special in (False, True):
            decoded = IncrementalText(self.tokenizer, skip_special=skip_special)
            if decoded.add(ids) + decoded.finish() == text:
                break
        return tuple(min(start, len(text)) for start in decoded.starts)

    async def chat_ids(
        self, body: TemplateBody, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (),
        special: bool = False,
    ) -> tuple[int, ...]:  # fmt: skip
        """Token ids of a chat by the template.

        Args:
            body: further arguments of the template.
            tools: that are shown to the model.

        Raises:
            ApiError: 400, there is no template, it refuses the messages or is not done in time, or they are too long;
                503, the process that renders ended.
        """
        template = self.template
        if template is None:
            raise refused(
                f"model '{self.model_name}' has no chat template; start the server with --chat-template FILE, "
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
        text = await self.offload.run(
            size,
            lambda: template.render(
                plain, tools=tools, documents=body.all_documents, add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message, options=options,
            ),
            waits=True,
        )  # fmt: skip
        return await self.prompt_ids(text, special=special, parameter="messages")

    def submit(self, choices: Sequence[Choice], request_id: str, key: Key = ANYONE) -> Run:
        """Start all choices of a request.

        Args:
            key: whose it is.

        Raises:
            ApiError: 429, the queue is full, or what the key may have in it.
        """
        self.admission.admit(key, [len(choice.prompt_ids) for choice in choices])
        # the runtime's own id: a client may send the same request id again while the first is under way
        name = f"{request_id}-{uuid.uuid4().hex[:12]}"
        timers = [self.metrics.choice(len(choice.prompt_ids)) for choice in choices]
        each = enumerate(zip(choices, timers, strict=True))
        streams = [self._generate(choice, f"{name}-{i}", timer, key) for i, (choice, timer) in each]
        return Run(streams, timers, lambda: self.admission.leave(key))

    def not_ready(self) -> NotReady | None:
        """Why requests would not be answered now; None: they would. Waits for nothing."""
        states = self.backend.states()
        if not any(state.serves and state.age_s is not None for state in states):
            return next((self._waits_for(state) for state in states if state.problem), _UNKNOWN)
        running = sum(state.load.get("running", 0) for state in states if state.serves)
        silent_s = time.monotonic() - self.backend.last_event_s
        if running and self.admission.inside and silent_s > self.limits.stalled_s:
            return NotReady(f"{running:g} requests run and no token has come for {silent_s:.0f} s")
        return None

    def _waits_for(self, state: LeadState) -> NotReady:
        since_s = state.health.get("since_s", 0.0) + (state.age_s or 0.0)
        steps = self.backend.plan.get("start_s", {})
        return NotReady(str(state.problem), left_s(steps, str(state.health.get("state")), since_s))

    async def _generate(self, choice: Choice, name: str, timer: ChoiceTimer, key: Key) -> AsyncGenerator[Delta]:
        """Wait for a slot, then generate under the id `name`; closing it early cancels the choice."""
        salt = (ANYONE if self._share_prefix_cache else key).cache_salt(choice.cache_salt)
        request = GenerationRequest(name, choice.prompt_ids, choice.sampling, cache_salt=salt)
        text = ChoiceText(self.tokenizer, choice.display, choice.sampling.min_tokens)
        async with self.admission.slot(key, len(choice.prompt_ids)) as begun:
            timer.started_s = time.perf_counter()
            try:
                async with aclosing(self.backend.generate(request)) as events:
                    async for event in events:
                        begun()
                        timer.event_arrived(event)
                        self.admission.charge(key, len(event.token_ids))
                        if event.finish in ("cancelled", "error"):
                            raise RuntimeFailure("the request was cancelled in the runtime", "send it again")
                        delta, timer.tokens = text.delta(event), text.tokens  # none behind a stop string
                        if delta is None:
                            continue
                        timer.finish = delta.finish
                        if not choice.shown:
                            delta = replace(delta, text="", scores=(), tokens=0, finish=delta.finish and "length")
                        yield delta
                        if delta.finish is not None:
                            return
            except TierMoeError:
                timer.finish = "error"
                raise
            finally:
                timer.ended()
