"""A request's way through the server: tokens, limits, its choices side by side, and their end."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from ...actors.requests import GenerationRequest, SamplingParams
from ...errors import TierMoeError
from .backend import Backend
from .chat_template import ChatTemplate
from .choice import ChoiceText, Delta, run_choice
from .errors import ApiError, from_failure, refused
from .gate import Gate
from .metrics import Metrics, RuntimeReader
from .schema import Message
from .settings import LimitSettings
from .token_bytes import TokenBytes

_QUEUED_DELTAS = 64  # that a slow client may be behind, for each request


@dataclass(frozen=True)
class Wanted:
    """One choice to generate.

    keep: False: a token is generated for its prompt's log-probabilities only, and not shown.
    """

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    stops: tuple[str, ...]
    keep: bool = True


class Run:
    """The choices of one request under way; `close` ends what still runs."""

    def __init__(self, service: Service, wanted: Sequence[Wanted], request_id: str, arrived_s: float) -> None:
        self.wanted = wanted
        self._queue: asyncio.Queue[tuple[int, Delta | ApiError]] = asyncio.Queue(_QUEUED_DELTAS)
        self._tasks = []
        for i, one in enumerate(wanted):
            # begun here and not by whoever reads: a reader that never comes must not keep its place
            task = asyncio.create_task(self._pump(service, i, one, f"{request_id}-{i}", arrived_s))
            task.add_done_callback(lambda _: service.gate.leave())
            self._tasks.append(task)

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """(choice, what is new of it), in the order in which it comes, until all choices have ended.

        Raises:
            ApiError: a choice failed.
        """
        open_choices = len(self._tasks)
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

    async def _pump(self, service: Service, index: int, wanted: Wanted, name: str, arrived_s: float) -> None:
        text = ChoiceText(service.tokenizer, wanted.stops, wanted.sampling.min_tokens)
        request = GenerationRequest(name, wanted.prompt_ids, wanted.sampling)
        try:
            async with (
                service.gate.slot(),
                aclosing(run_choice(service.backend, request, text, service.metrics, arrived_s)) as deltas,
            ):
                async for delta in deltas:
                    if not wanted.keep:
                        delta = replace(delta, text="", scores=(), tokens=0, finish=delta.finish and "length")
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
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        model_name: str,
        limits: LimitSettings,
    ) -> None:
        self.backend, self.tokenizer, self.template = backend, tokenizer, template
        self.model_name, self.limits = model_name, limits
        self.token_bytes = TokenBytes(tokenizer)
        self.gate = Gate(int(backend.plan["max_requests"]), limits.waiting)
        self.metrics = Metrics()
        self.reader = RuntimeReader(backend.ask, bool(backend.plan.get("shards")), self.metrics.runtime)
        self.started_s = int(time.time())

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

    def prompt_ids(self, prompt: str | Sequence[int], *, special: bool = True) -> tuple[int, ...]:
        """Token ids of text, or the given ids checked.

        Args:
            special: whether the tokenizer adds what it adds to a text (a beginning-of-text token).

        Raises:
            ApiError: 400, there is none, or one that the model does not have.
        """
        if isinstance(prompt, str):
            try:
                ids = tuple(self.tokenizer.encode(prompt, add_special_tokens=special).ids)
            except Exception as error:  # the library raises bare Exception; lone surrogates, for one
                raise refused(f"the prompt cannot be encoded: {error}", "prompt") from error
        else:
            ids, known = tuple(prompt), self.tokenizer.get_vocab_size()
            if unknown := [token for token in ids if not 0 <= token < known]:
                raise refused(f"the model has no token {unknown[0]}; give ids from 0 to {known - 1}", "prompt")
        if not ids:
            raise refused("the prompt is empty; give at least one token", "prompt")
        return ids

    def chat_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a chat by the template.

        Raises:
            ApiError: 400, there is no template, or it refuses the messages.
        """
        if self.template is None:
            raise refused(
                f"model '{self.model_name}' has no chat template; start the server with --chat-template FILE, "
                "or use /v1/completions",
                "messages",
            )
        return self.prompt_ids(self.template.render([message.plain for message in messages]), special=False)

    def check_length(self, prompt_tokens: int, max_tokens: int, parameter: str) -> None:
        """Refuse what the model or the KV cache cannot hold.

        Raises:
            ApiError: 400.
        """
        if prompt_tokens + max_tokens > self.limit_tokens:
            raise refused(
                f"{prompt_tokens} prompt tokens and {max_tokens} to generate exceed the limit of {self.limit_tokens}; "
                "shorten the prompt or ask for fewer",
                parameter,
                "context_length_exceeded",
            )

    def check_choices(self, choices: int, parameter: str = "n") -> None:
        """Refuse more choices than one request may have.

        Raises:
            ApiError: 400.
        """
        if choices > self.limits.choices:
            raise refused(f"{choices} choices; this server gives at most {self.limits.choices}", parameter)

    def run(self, wanted: Sequence[Wanted], request_id: str) -> Run:
        """Start all choices of a request.

        Raises:
            ApiError: 429, the queue is full.
        """
        arrived_s = time.perf_counter()
        self.gate.admit(len(wanted))
        # the runtime's own id: a client may send the same request id again while the first is under way
        return Run(self, wanted, f"{request_id}-{uuid.uuid4().hex[:12]}", arrived_s)

    async def not_ready(self) -> str | None:
        """Why requests would not be answered now; None: they would."""
        try:
            health = await self.backend.ask("health")
            running = (await self.backend.ask("load"))["running"]
        except TierMoeError as error:
            return str(error)
        if health.get("state") != "serving":
            return f"the runtime is {health.get('state')}"
        silent_s = time.monotonic() - self.backend.last_event_s
        if running and self.gate.inside and silent_s > self.limits.stalled_s:
            return f"{running:g} requests run and no token has come for {silent_s:.0f} s"
        return None


def model_name_of(plan: dict[str, object], given: str | None) -> str:
    """What clients call the model: the given name, else that of its checkpoint's folder."""
    return given or Path(str(plan["model"])).name
