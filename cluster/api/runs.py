"""Checked choices into deltas: their places in the queue, the lead that generates them, their text and their times."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from ...actors.requests import GenerationRequest, SamplingParams
from ...errors import RuntimeFailure, TierMoeError
from ..report.steps import left_s
from .admission import Admission
from .backend import Backend
from .keys import ANYONE, Key
from .lead import LeadState
from .metrics import ChoiceTimer, Metrics
from .records import ChoiceTimes
from .refusals import ApiError, NotReady, from_failure
from .schema import Display
from .settings import LimitSettings
from .text import ChoiceText, Delta

_UNREAD_DELTAS = 64  # of one choice, which its client gets one by one; more are one
_UNKNOWN = NotReady("the runtime has not answered yet")


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


class Run:
    """The choices of one request under way; `close` ends what still runs.

    A choice gives its place in the runtime back once it has been generated, however slowly its client reads: what the
    client has not read waits here, and counts as under way until `close`.

    Args:
        choices: the deltas of each.
        times: of each choice.
        ended: called for each choice once it has ended, however it ends, and the run is closed.
    """

    def __init__(
        self, choices: Sequence[AsyncGenerator[Delta]], times: Sequence[ChoiceTimes], ended: Callable[[], None]
    ) -> None:
        self.choices, self.times, self._ended, self._closed = len(choices), list(times), ended, False
        self._unread: dict[int, list[Delta]] = {}  # of each choice, in the order of arrival of the first
        self._failure: ApiError | None = None
        self._came = asyncio.Event()
        # started here and not by the reader, who may never come
        self._tasks = [asyncio.create_task(self._forward(index, deltas)) for index, deltas in enumerate(choices)]

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """(choice, its new part), until all choices have ended. Many parts of one choice that wait are one.

        Raises:
            ApiError: a choice failed.
        """
        open_choices = self.choices
        while open_choices:
            await self._came.wait()
            self._came.clear()
            while self._unread:
                index = next(iter(self._unread))
                parts = self._unread.pop(index)
                for delta in parts if len(parts) <= _UNREAD_DELTAS else (Delta.joined(parts),):
                    open_choices -= delta.finish is not None
                    yield index, delta
            if self._failure is not None:
                raise self._failure

    def close(self) -> None:
        """Cancel what has not ended, here and in the runtime. Does not wait. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for task in self._tasks:
            task.cancel()
            task.add_done_callback(lambda _: self._ended())

    async def _forward(self, index: int, deltas: AsyncGenerator[Delta]) -> None:
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    self._unread.setdefault(index, []).append(delta)
                    self._came.set()
        except TierMoeError as error:
            self._fail(from_failure(error))
        except Exception as error:  # else the reader would wait for ever
            self._fail(ApiError(500, f"the server failed: {type(error).__name__}: {error}"))

    def _fail(self, error: ApiError) -> None:
        self._failure = error
        self._came.set()


class Runs:
    """Starts the choices of requests.

    Args:
        backend: the runtime.
        tokenizer: the model's.
        limits: on what waits and runs.
        share_prefix_cache: whether requests of different keys share KV pages.
    """

    def __init__(
        self, backend: Backend, tokenizer: Tokenizer, limits: LimitSettings, share_prefix_cache: bool = False
    ) -> None:
        self.backend, self.limits = backend, limits
        self._tokenizer, self._share_prefix_cache = tokenizer, share_prefix_cache
        held = int(backend.plan.get("kv_tokens") or 0) * max(1, len(backend.states()))
        self.admission = Admission(int(backend.plan["max_requests"]), limits.waiting, held or None)
        self.metrics = Metrics(backend.ask, sharded=bool(backend.plan.get("shards")))

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

    async def _generate(self, choice: Choice, name: str, timer: ChoiceTimer, key: Key) -> AsyncGenerator[Delta]:
        """Wait for a slot, then generate under the id `name`; closing it early cancels the choice."""
        salt = (ANYONE if self._share_prefix_cache else key).cache_salt(choice.cache_salt)
        request = GenerationRequest(name, choice.prompt_ids, choice.sampling, cache_salt=salt)
        text = ChoiceText(self._tokenizer, choice.display, choice.sampling.min_tokens)
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
