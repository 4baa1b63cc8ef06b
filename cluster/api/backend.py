"""The deployment behind the server, as the server sees it; `LeadBackend` is the one that runs on Ray."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

import ray

from ...actors.requests import GenerationRequest, TokenEvent
from ...errors import DeadlinePassed, NotServing, RuntimeFailure, TierMoeError
from ..attach import CONTROL
from ..ray_session import NAMESPACE, as_failure

_CALL_DEADLINE_S = 10.0
_REAP_TRIES = 30
_REAP_STEP_S = 1.0
_RETRY_S = 0.5
_GONE_S = 5.0  # Ray takes less to say that a dead lead is made again
_LOSSES = 3  # of the lead during one request, without a token between them


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

    async def ask(self, method: str, role: str | None = None) -> Any:
        """What a control method of the lead returns, or a method of another actor; raises RuntimeFailure where it does
        not answer.

        Args:
            role: of the other actor, such as "shard/1".
        """
        ...


class LeadBackend:
    """A lead actor.

    A request outlives the lead's process. Its prompt, its seed and the tokens that came are kept here; once the lead
    serves again it gets them, and goes on behind the last token (`GenerationRequest.generated`).

    Args:
        handle: of the actor.
        plan: what its `plan` returned.
        deadline_s: seconds that one request may take.
        runtime: the deployment's id, by which its other actors are found.
    """

    def __init__(self, handle: Any, plan: dict[str, Any], deadline_s: float, runtime: str = "") -> None:
        self._runtime = runtime
        self.plan = plan
        self.last_event_s = time.monotonic()
        self._handle, self._deadline_s = handle, deadline_s
        self._running = 0
        self._return: asyncio.Task[None] | None = None  # waits for a lead that was lost
        self._reapers: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent]:
        deadline_s = asyncio.get_running_loop().time() + self._deadline_s
        if not self._running:
            self.last_event_s = time.monotonic()
        if request.sampling.seed is None:  # else another lead would draw by another seed
            request = replace(request, sampling=replace(request.sampling, seed=secrets.randbits(63)))
        came: list[int] = []
        tries = losses = 0
        self._running += 1
        try:
            while True:
                known = len(came)
                name = f"{request.request_id}.{tries}" if tries else request.request_id
                part = replace(request, request_id=name, generated=tuple(came))
                try:
                    async with aclosing(self._generate(part, deadline_s)) as events:
                        async for event in events:
                            came += event.token_ids
                            yield replace(event, request_id=request.request_id)
                            if event.finish is not None:
                                return
                except NotServing:
                    losses = losses + 1 if len(came) == known else 1
                    if losses > _LOSSES:
                        raise
                    tries += 1
                    await self._until_it_serves(deadline_s)
        finally:
            self._running -= 1

    async def _generate(self, request: GenerationRequest, deadline_s: float) -> AsyncGenerator[TokenEvent]:
        """The events of a request while the lead's process lives. Raises NotServing: it does not, or does not yet."""
        stream = self._handle.generate.options(num_returns="streaming").remote(request)
        ended = False
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
        except (DeadlinePassed, NotServing):
            raise  # it still runs, or a lead that Ray could not reach for a moment may run it
        except TierMoeError:
            ended = True
            raise
        finally:
            if not ended:
                self._reap(stream, request.request_id)

    async def ask(self, method: str, role: str | None = None) -> Any:
        try:
            async with asyncio.timeout(_CALL_DEADLINE_S):
                if role is None:
                    return await self._control(method)
                name = f"{self._runtime}/{role}"
                peer = await asyncio.to_thread(ray.get_actor, name, namespace=NAMESPACE)  # asks Ray's head
                return await getattr(peer, method).remote()
        except TimeoutError as error:
            raise RuntimeFailure(f"the worker did not answer '{method}' in time", "look at its node") from error
        except (ray.exceptions.RayError, ValueError) as error:  # ValueError: no actor has this name now
            raise as_failure(error, f"the worker did not answer '{method}'") from error

    async def _next(self, stream: Any, deadline_s: float) -> TokenEvent:
        try:
            async with asyncio.timeout_at(deadline_s):
                return await (await anext(stream))
        except TimeoutError:
            raise self._too_late() from None
        except StopAsyncIteration:
            raise RuntimeFailure("the worker ended a request without saying why", "send it again") from None
        except ray.exceptions.RayError as error:
            failure = as_failure(error, "the worker failed during a request")
            if isinstance(error, ray.exceptions.RayActorError):
                raise NotServing(failure.what, failure.remedy) from error
            raise failure from error

    def _too_late(self) -> DeadlinePassed:
        return DeadlinePassed(f"the request passed its deadline of {self._deadline_s:g} s", "ask for fewer tokens")

    async def _until_it_serves(self, deadline_s: float) -> None:
        """Wait until the lead serves; one task asks for all requests.

        Raises:
            RuntimeFailure: it has ended for good. DeadlinePassed: of the request.
        """
        if self._return is None or self._return.done():
            self._return = asyncio.get_running_loop().create_task(self._ask_until_it_serves())
        try:
            async with asyncio.timeout_at(deadline_s):
                await asyncio.shield(self._return)
        except TimeoutError:
            raise self._too_late() from None

    async def _ask_until_it_serves(self) -> None:
        gone_s = None  # since when Ray says that it is dead
        while True:
            try:
                async with asyncio.timeout(_CALL_DEADLINE_S):
                    if (await self._control("health"))["state"] == "serving":
                        return
                gone_s = None
            except (TimeoutError, ray.exceptions.ActorUnavailableError):
                gone_s = None
            except ray.exceptions.RayError as error:
                now_s = time.monotonic()
                gone_s = now_s if gone_s is None else gone_s
                if not isinstance(error, ray.exceptions.RayActorError) or now_s - gone_s > _GONE_S:
                    raise as_failure(error, "the worker failed during a request") from error
            await asyncio.sleep(_RETRY_S)

    def _reap(self, stream: Any, request_id: str) -> None:
        """Cancel a request whose consumer has left, from a task of its own: its consumer is being cancelled itself."""
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
