"""How many requests run and wait: more than that are refused at once, with 429.

The deployment behind the server, as the server sees it; `LeadBackend` is the one that runs on Ray.

One prompt's one choice: the runtime's events into text, up to a stop string, with log-probabilities beside it.

A request's way through the server: tokens, limits, its choices side by side, and their end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import ray
from tokenizers import Tokenizer

from ...actors.requests import GenerationRequest, SamplingParams, TokenEvent, TokenLogprob
from ...errors import DeadlinePassed, RuntimeFailure, TierMoeError
from ..attach import CONTROL
from ..prompt import IncrementalText
from ..ray_session import as_failure
from .metrics import Metrics, RuntimeReader
from .schema import ApiError, Message, busy, from_failure, refused
from .settings import LimitSettings
from .text import ChatTemplate, StopMatcher, TokenBytes


class Gate:
    """First come, first served; on one event loop.

    Args:
        running: requests that are with the runtime at a time.
        waiting: requests that may wait for that.
    """

    def __init__(self, running: int, waiting: int) -> None:
        self._limit = running + waiting
        self._slots = asyncio.Semaphore(running)
        self._admitted = 0
        self._inside = 0

    @property
    def waiting(self) -> int:
        """Requests that were admitted and are not with the runtime yet."""
        return self._admitted - self._inside

    @property
    def inside(self) -> int:
        """Requests that are with the runtime."""
        return self._inside

    def admit(self, count: int) -> None:
        """Admit all of `count` requests, each to be given back with `leave`.

        Raises:
            ApiError: 429, they do not fit; none is admitted.
        """
        if self._admitted + count > self._limit:
            raise busy(self.waiting)
        self._admitted += count

    def leave(self) -> None:
        """One admitted request is over, whether it ran or not."""
        self._admitted -= 1

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Inside the block, one admitted request is with the runtime."""
        async with self._slots:
            self._inside += 1
            try:
                yield
            finally:
                self._inside -= 1


_CALL_DEADLINE_S = 10.0
_REAP_TRIES = 30
_REAP_STEP_S = 1.0


class Backend(Protocol):
    """Requests in, events out; on one event loop.

    Attributes:
        plan: the runtime's effective plan.
        last_event_s: when the last event of any request came, or the first request after a rest; monotonic clock.
    """

    plan: dict[str, Any]
    last_event_s: float

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent]:
        """The events of one request; closing it early cancels the request.

        Raises:
            TierMoeError: the request was refused, or the runtime failed.
        """
        ...

    async def ask(self, method: str) -> Any:
        """What a control method of the worker returns; raises RuntimeFailure where it does not answer."""
        ...


class LeadBackend:
    """A lead actor.

    Args:
        handle: of the actor.
        plan: what its `plan` returned.
        deadline_s: seconds that one request may take.
    """

    def __init__(self, handle: Any, plan: dict[str, Any], deadline_s: float) -> None:
        self.plan = plan
        self.last_event_s = time.monotonic()
        self._handle, self._deadline_s = handle, deadline_s
        self._running = 0
        self._reapers: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent]:
        deadline_s = asyncio.get_running_loop().time() + self._deadline_s
        if not self._running:
            self.last_event_s = time.monotonic()
        stream = self._handle.generate.options(num_returns="streaming").remote(request)
        ended = False
        self._running += 1
        try:
            while not ended:
                event = await self._next(stream, deadline_s)
                self.last_event_s = time.monotonic()
                ended = event.finish is not None
                if event.finish == "error":
                    raise RuntimeFailure(
                        f"the request failed in the worker: {event.error}", "send it again; report it if it stays"
                    )
                yield event
        except DeadlinePassed:
            raise  # it still runs
        except TierMoeError:
            ended = True
            raise
        finally:
            self._running -= 1
            if not ended:
                self._reap(stream, request.request_id)

    async def ask(self, method: str) -> Any:
        try:
            async with asyncio.timeout(_CALL_DEADLINE_S):
                return await self._control(method)
        except TimeoutError as error:
            raise RuntimeFailure(f"the worker did not answer '{method}' in time", "look at its node") from error
        except ray.exceptions.RayError as error:
            raise as_failure(error, f"the worker did not answer '{method}'") from error

    async def _next(self, stream: Any, deadline_s: float) -> TokenEvent:
        try:
            async with asyncio.timeout_at(deadline_s):
                return await (await anext(stream))
        except TimeoutError:
            raise DeadlinePassed(
                f"the request passed its deadline of {self._deadline_s:g} s", "ask for fewer tokens"
            ) from None
        except StopAsyncIteration:
            raise RuntimeFailure("the worker ended a request without saying why", "send it again") from None
        except ray.exceptions.RayError as error:
            raise as_failure(error, "the worker failed during a request") from error

    def _reap(self, stream: Any, request_id: str) -> None:
        """Cancel a request that nobody waits for, from a task of its own: its consumer is being cancelled itself."""
        task = asyncio.get_running_loop().create_task(self._cancel(stream, request_id))
        self._reapers.add(task)
        task.add_done_callback(self._reapers.discard)

    async def _cancel(self, stream: Any, request_id: str) -> None:
        """Until the worker says that it has it no more. A request may not have reached it yet: then once more."""
        for _ in range(_REAP_TRIES):
            with contextlib.suppress(TierMoeError):
                if await self.ask_to_cancel(request_id):
                    return
            try:
                async with asyncio.timeout(_REAP_STEP_S):
                    event = await (await anext(stream))
                if event.finish is not None:
                    return
            except (StopAsyncIteration, ray.exceptions.RayError):
                return
            except TimeoutError:
                continue

    async def ask_to_cancel(self, request_id: str) -> bool:
        """End a request in the worker; False: it has none of this id."""
        try:
            async with asyncio.timeout(_CALL_DEADLINE_S):
                return bool(await self._control("cancel", request_id))
        except (TimeoutError, ray.exceptions.RayError) as error:
            raise RuntimeFailure("the worker did not take a cancellation", "look at its node") from error

    def _control(self, method: str, *args: Any) -> Any:
        return getattr(self._handle, method).options(concurrency_group=CONTROL).remote(*args)


@dataclass(frozen=True)
class ScoredToken:
    """A token's log-probability and where its text begins, in characters of the choice."""

    found: TokenLogprob
    offset: int


@dataclass(frozen=True)
class Delta:
    """What is new of a choice.

    Attributes:
        text: may be empty.
        scores: of the tokens whose text has been shown.
        prompt_scores: of the prompt's tokens from the second on; on the first delta.
        tokens: generated so far.
        finish: stop or length, on the last delta and only there.
    """

    text: str
    scores: tuple[ScoredToken, ...] = ()
    prompt_scores: tuple[TokenLogprob, ...] = ()
    tokens: int = 0
    finish: str | None = None


class ChoiceText:
    """Tokens into shown text: whole characters only, no part of a stop string, scores with the text they belong to."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], min_tokens: int = 0) -> None:
        self._text = IncrementalText(tokenizer)
        self._stops = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._decoded = self._shown = 0  # characters
        self._scores: list[ScoredToken] = []
        self.tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._stops.matched is not None

    def add(self, event: TokenEvent) -> str:
        """The text that an event lets be shown; ends at a stop string."""
        shown = []
        for i, token in enumerate(event.token_ids):
            if event.logprobs:
                self._scores.append(ScoredToken(event.logprobs[i], self._decoded))
            self.tokens += 1
            shown.append(self._feed(self._text.add((token,))))
            if self.stopped:
                break
        return "".join(shown)

    def finish(self) -> str:
        """What is left when no more tokens come."""
        last = self._feed(self._text.finish())
        if self.stopped:
            return last
        rest = self._stops.finish()
        self._shown += len(rest)
        return last + rest

    def take_scores(self, *, last: bool) -> tuple[ScoredToken, ...]:
        """Those whose text has begun to be shown; all that are left where the choice ends by itself."""
        ready = [s for s in self._scores if (last and not self.stopped) or s.offset < self._shown]
        self._scores = self._scores[len(ready) :]
        return tuple(ready)

    def _feed(self, text: str) -> str:
        self._decoded += len(text)
        # below the minimal length a stop string is text like any other
        shown = self._stops.feed(text) if self.tokens >= self._min_tokens else self._stops.finish() + text
        self._shown += len(shown)
        return shown


async def run_choice(
    backend: Backend, request: GenerationRequest, text: ChoiceText, metrics: Metrics, arrived_s: float
) -> AsyncGenerator[Delta]:
    """Generate; closing it early cancels the request.

    Args:
        arrived_s: when the request came, on `time.perf_counter`.

    Raises:
        TierMoeError: the runtime refused or failed.
    """
    submitted_s = last_s = time.perf_counter()
    outcome = "abort"
    queue_s = 0.0
    try:
        async with aclosing(backend.generate(request)) as events:
            async for event in events:
                last_s = _measure(metrics, event, text.tokens, last_s, arrived_s)
                queue_s = event.queue_s or queue_s
                shown, finish = text.add(event), event.finish
                if finish in ("cancelled", "error"):
                    raise RuntimeFailure("the request was cancelled in the runtime", "send it again")
                if text.stopped:
                    finish = "stop"
                elif finish is not None:
                    shown += text.finish()
                    finish = "stop" if text.stopped else finish
                scores = text.take_scores(last=finish is not None)
                if shown or scores or event.prompt_logprobs or finish is not None:
                    yield Delta(shown, scores, event.prompt_logprobs, text.tokens, finish)
                if finish is not None:
                    outcome = finish
                    return
    except TierMoeError:
        outcome = "error"
        raise
    finally:
        queued_s = submitted_s - arrived_s + queue_s
        metrics.ended(outcome, time.perf_counter() - arrived_s, queued_s, len(request.prompt_ids), text.tokens)


def _measure(metrics: Metrics, event: TokenEvent, before: int, last_s: float, arrived_s: float) -> float:
    """Time to first token, and between tokens; when the last token came."""
    if not event.token_ids:
        return last_s
    now_s = time.perf_counter()
    if before == 0:
        metrics.first_token(now_s - arrived_s)
    else:
        metrics.next_tokens(now_s - last_s, len(event.token_ids))
    return now_s


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
