"""One lead as the server sees it: its requests, and a watch that asks for its health once a second.

`LeadClient.state` is the last known state: it waits for nothing, whatever the lead does.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import ray

from ...actors.requests import GenerationRequest, TokenEvent
from ...errors import DeadlinePassed, LoopDied, NotServing, RequestError, RuntimeFailure, TierMoeError
from ..attach import CONTROL, EVENTS
from ..ray_session import as_failure

T = TypeVar("T")
_CALL_DEADLINE_S = 10.0
_TAKE_S = 1.0
_REAP_TRIES = 30
_REAP_STEP_S = 1.0
_LOOK_S = 1.0
_RETRY_S = 0.5  # while it does not serve
_HUNG_S = 3.0  # without an answer
_GONE_S = 5.0  # Ray takes less to say that a dead lead is made again


@dataclass(frozen=True)
class LeadState:
    """What was last known of a lead.

    Attributes:
        serves: whether requests are sent to it.
        age_s: seconds since it last answered; None: no answer yet.
        health, load: its last answers.
        problem: why it does not serve; None: it serves, or has not been asked yet.
        damaged: whether that is a file that it serves from.
    """

    serves: bool
    age_s: float | None
    health: dict[str, Any]
    load: dict[str, float]
    problem: str | None = None
    damaged: bool = False

    def as_dict(self) -> dict[str, Any]:
        """For `/health`: only what an unauthenticated client may know."""
        age_s = None if self.age_s is None else round(self.age_s, 1)
        return {"state": "serving" if self.serves and self.age_s is not None else "not serving", "age_s": age_s}


class _Inbox:
    """Events of one request that its consumer has not read; they are one, so that a slow consumer gets fewer.

    Attributes:
        life: of the process that has the request; None: not known yet.
    """

    def __init__(self) -> None:
        self.life: str | None = None
        self._event: TokenEvent | None = None
        self._failure: BaseException | None = None
        self._came = asyncio.Event()

    def put(self, event: TokenEvent) -> None:
        self._event = event if self._event is None else self._event.joined(event)
        self._came.set()

    def fail(self, failure: BaseException) -> None:
        self._failure = failure
        self._came.set()

    async def take(self) -> TokenEvent:
        """What has come since the last call; raises the failure behind it."""
        await self._came.wait()
        event, self._event = self._event, None
        if event is not None:
            if self._failure is None:
                self._came.clear()
            return event
        assert self._failure is not None
        raise self._failure


def _as_answer(failure: TierMoeError) -> TierMoeError:
    """What ended a request: its own fault, or a lead that does not serve, as it is; all else is a failed runtime."""
    known = isinstance(failure, RequestError | NotServing)
    return failure if known else RuntimeFailure(failure.what, failure.remedy)


def _detached_task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task outside the request that starts it: Ray cancels a request's calls with it."""
    return asyncio.get_running_loop().create_task(work, context=contextvars.Context())


class LeadClient:
    """Requests to a lead actor, and its reported state. Constructed on a running event loop.

    Args:
        handle: of the actor.
        changed: called whenever it was looked at.

    Attributes:
        serves: whether requests may be sent; taken for granted before the first look.
        hung: whether its process lives and does not answer.
        failure: why it never serves again; None: it may.
        damage: what happened to a file that it serves from, until it is restored; None: nothing.
    """

    def __init__(self, handle: Any, changed: Callable[[], None]) -> None:
        self._handle, self._changed = handle, changed
        self.serves, self.hung = True, False
        self.failure: RuntimeFailure | None = None
        self.damage: RuntimeFailure | None = None
        self._health: dict[str, Any] = {}
        self._load: dict[str, float] = {}
        self._answered_s: float | None = None
        self._problem: str | None = None
        self._gone_s: float | None = None  # since when Ray says that it is dead
        self._client = secrets.token_hex(8)
        self._inboxes: dict[str, _Inbox] = {}  # by request
        self._reader: asyncio.Task[None] | None = None  # of the events of all requests
        self._waits: set[asyncio.Timeout] = set()  # of requests
        self._reapers: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._watch = asyncio.get_running_loop().create_task(self._watch_lead())

    @property
    def state(self) -> LeadState:
        """What is known of it."""
        age_s = None if self._answered_s is None else time.monotonic() - self._answered_s
        return LeadState(self.serves, age_s, self._health, self._load, self._problem, self.damage is not None)

    async def generate(self, request: GenerationRequest, deadline_s: float) -> AsyncGenerator[TokenEvent]:
        """The events of a request while the lead's process lives and answers; those that arrived together as one.

        Args:
            deadline_s: on the event loop's clock.

        Raises:
            NotServing: it does not, or does not yet. LoopDied: its generation loop died of a step with the request.
            DeadlinePassed: of the request. RequestError: it was refused. RuntimeFailure: it failed.
        """
        name, inbox, ended = request.request_id, _Inbox(), False
        self._inboxes[name] = inbox
        begun = self._begin(request)
        try:
            inbox.life = await self._within(deadline_s, begun)
            while not ended:
                event = await self._within(deadline_s, inbox.take())
                ended = event.finish is not None
                if (failure := event.failure) is not None:
                    raise _as_answer(failure)
                yield event
        except (DeadlinePassed, NotServing):
            raise  # it still runs, or a lead that Ray could not reach for a moment may run it
        except TierMoeError:
            ended = True
            raise
        finally:
            del self._inboxes[name]
            if not ended:
                self._reap(name, begun)

    @property
    def running(self) -> int:
        """Requests under way."""
        return len(self._inboxes)

    async def ask(self, method: str) -> Any:
        """What a control method returns; raises RuntimeFailure where it does not answer."""
        try:
            async with asyncio.timeout(_CALL_DEADLINE_S):
                return await self._control(method)
        except TimeoutError as error:
            raise RuntimeFailure(f"the worker did not answer '{method}' in time", "look at its node") from error
        except ray.exceptions.RayError as error:
            raise as_failure(error, f"the worker did not answer '{method}'") from error

    def lost(self) -> None:
        """A request found out that it does not serve: look now, and send nothing until it does."""
        self.serves = False
        self._wake.set()

    def give_up_requests(self) -> None:
        """Their `generate` raises NotServing: another lead takes them."""
        now_s = asyncio.get_running_loop().time()
        for wait in self._waits:
            with contextlib.suppress(RuntimeError):  # it expires already
                wait.reschedule(now_s)

    def end(self, failure: RuntimeFailure) -> None:
        """It serves never again, because of `failure`; requests that wait for it find out."""
        self._watch.cancel()
        self.serves, self.failure = False, failure
        self.give_up_requests()

    async def _watch_lead(self) -> None:
        while True:
            self._wake.clear()
            await self._look()
            self._changed()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S if self.serves else _RETRY_S):
                    await self._wake.wait()

    async def _look(self) -> None:
        serves = hung = False
        try:
            async with asyncio.timeout(_HUNG_S):
                health, load = await self._control("health"), await self._control("load")
            self._health, self._load, self._answered_s = health, load, time.monotonic()
            serves, self._gone_s, self.failure = health["state"] == "serving", None, None
            self._problem = None if serves else f"the runtime is {health['state']}"
            self.damage = None
            if (problem := health.get("problem")) is not None:
                self.damage = RuntimeFailure(str(problem), str(health["remedy"]))
                self._problem = f"the runtime stopped serving: {problem}"
        except TimeoutError:
            hung = True
            self._problem = f"the lead does not answer within {_HUNG_S:g} s"
        except ray.exceptions.ActorUnavailableError:
            self._gone_s, self._problem = None, "the lead's process ended; it is started again"
        except ray.exceptions.RayError as error:
            now_s = time.monotonic()
            self._gone_s = now_s if self._gone_s is None else self._gone_s
            failure = as_failure(error, "the worker failed during a request")
            self._problem = str(failure)
            if isinstance(failure, LoopDied):
                self._gone_s, self._problem = None, f"{failure.what}; its process is started again"
            elif not isinstance(error, ray.exceptions.RayActorError) or now_s - self._gone_s > _GONE_S:
                self.failure = RuntimeFailure(failure.what, failure.remedy)
        self.serves, self.hung = serves, hung

    def _begin(self, request: GenerationRequest) -> Awaitable[str]:
        if self._reader is None or self._reader.done():
            self._reader = _detached_task(self._read())
        return self._handle.begin.remote(self._client, request)

    async def _read(self) -> None:
        """Give each request its events, while there are requests."""
        while self._inboxes:
            try:
                take = self._handle.take.options(concurrency_group=EVENTS)
                life, events = await take.remote(self._client, _TAKE_S)
            except Exception as error:  # it is unknown which events are lost, and no caller may wait for them
                if not isinstance(error, ray.exceptions.RayActorError):
                    error = NotServing(f"the lead's answer was lost ({error})", "send the request again")
                for inbox in self._inboxes.values():
                    inbox.fail(error)
                return
            for inbox in self._inboxes.values():
                if inbox.life not in (None, life):
                    inbox.fail(NotServing("the lead's process ended", "send the request again"))
            for event in events:
                if event.request_id in self._inboxes:  # else its consumer has left
                    self._inboxes[event.request_id].put(event)

    async def _within(self, deadline_s: float, answer: Awaitable[T]) -> T:
        """An answer of the lead to a request; raises as `generate`."""
        try:
            async with asyncio.timeout_at(deadline_s) as wait:
                self._waits.add(wait)
                try:
                    return await answer
                finally:
                    self._waits.discard(wait)
        except TimeoutError:
            if asyncio.get_running_loop().time() < deadline_s:
                raise NotServing("the lead does not answer", "send the request again") from None
            raise DeadlinePassed("the request passed its deadline", "ask for fewer tokens") from None
        except ray.exceptions.RayError as error:
            failure = as_failure(error, "the worker failed during a request")
            if isinstance(error, ray.exceptions.RayActorError):
                raise NotServing(failure.what, failure.remedy) from error
            raise _as_answer(failure) from error

    def _reap(self, request_id: str, begun: Awaitable[str]) -> None:
        """Cancel a request whose consumer has left, in a separate task: its consumer is itself being cancelled."""
        task = _detached_task(self._cancel(request_id, begun))
        self._reapers.add(task)
        task.add_done_callback(self._reapers.discard)

    async def _cancel(self, request_id: str, begun: Awaitable[str]) -> None:
        """Until the worker says that it has it no more."""
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
            async with asyncio.timeout(_CALL_DEADLINE_S):
                await begun  # before that the worker may get it after its cancellation
        for _ in range(_REAP_TRIES):
            with contextlib.suppress(TierMoeError):
                return await self._ask_to_cancel(request_id)
            await asyncio.sleep(_REAP_STEP_S)

    async def _ask_to_cancel(self, request_id: str) -> None:
        """End a request in the worker, if it has it. Raises RuntimeFailure: no answer."""
        try:
            async with asyncio.timeout(_CALL_DEADLINE_S):
                await self._control("cancel", request_id)
        except (TimeoutError, ray.exceptions.RayError) as error:
            raise RuntimeFailure("the worker did not confirm a cancellation", "look at its node") from error

    def _control(self, method: str, *args: Any) -> Any:
        return getattr(self._handle, method).options(concurrency_group=CONTROL).remote(*args)
