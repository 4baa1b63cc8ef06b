"""The deployment behind the server, as the server sees it; `LeadBackend` is the one that runs on Ray."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import fields, is_dataclass, replace
from functools import reduce
from typing import Any, Protocol

import ray

from ...actors.requests import GenerationRequest, TokenEvent
from ...errors import DeadlinePassed, LoopDied, NotServing, RuntimeFailure
from ..attach import Sample, samples
from ..deployed_actors import family
from .lead import LeadClient, LeadState

SAMPLES = "samples"
_SAMPLES_S = 5.0
_SUMMED = ("stats", "load", "shard_stats")  # over all leads; else one of them answers for itself
_LOSSES = 3  # of a lead during one request, without a token between them
_ALONE = 2  # of those, after which a request is on trial; deaths of a loop, the last on trial, after which it fails
_DEATHS = 4  # of a generation loop in steps that carried one request, however many tokens came between them


class Backend(Protocol):
    """Requests in, events out; on one event loop.

    Attributes:
        plan: the runtime's effective plan.
        last_event_s: time of the last event of any request, or of the first request after idleness; monotonic clock.
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
        """What a control method of the lead returns; raises RuntimeFailure where it does not answer."""
        ...

    def states(self) -> list[LeadState]:
        """What was last known of each lead; waits for nothing."""
        ...


class LeadBackend:
    """Lead actors, one or more. Constructed on a running event loop.

    A request goes to the serving lead with the fewest requests. It outlives that lead's process: its prompt, its seed
    and the tokens received so far are kept here. A serving lead gets them at once (another one or, if there is no
    other, the same one when it is back) and continues after the last token (`GenerationRequest.generated`). The
    requests of a lead that hangs move as well, but only to another lead.

    One request may be what the leads die of. Those that were in the last step of a loop that died, and those that have
    lost their lead twice without a token, are sent one at a time, each until its first new token (a trial), and so are
    requests that come meanwhile. One whose loop dies for the second time, on trial, fails; the others resume.

    Args:
        handles: of the actors, by the id of the replica group that each belongs to.
        plan: what the first one's `plan` returned.
        deadline_s: seconds that one request may take.
    """

    def __init__(self, handles: Mapping[str, Any], plan: dict[str, Any], deadline_s: float) -> None:
        self.plan = plan | {"max_requests": plan.get("max_requests", 0) * len(handles)}
        self.last_event_s = time.monotonic()
        self._deadline_s = deadline_s
        self._change = asyncio.Event()
        self._answers: dict[tuple[str, int], Any] = {}  # last of each method and lead
        self._trial = asyncio.Lock()
        self._deployment = family(next(iter(handles)))
        self._sampling: asyncio.Task[list[Sample]] | None = None  # the call under way
        self.leads = [LeadClient(handle, self._changed) for handle in handles.values()]

    async def first_look(self) -> None:
        """Return once each lead has reported its state or missed its deadline: `/ready` no longer says "unknown"."""
        while any(lead.state.age_s is None and lead.state.problem is None for lead in self.leads):
            await self._change.wait()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent]:
        deadline_s = asyncio.get_running_loop().time() + self._deadline_s
        if not any(lead.running for lead in self.leads):
            self.last_event_s = time.monotonic()
        if request.sampling.seed is None:  # else another lead would draw by another seed
            request = replace(request, sampling=replace(request.sampling, seed=secrets.randbits(63)))
        came: list[int] = []
        tries = losses = deaths = 0
        suspect = False
        while True:
            known = len(came)
            name = f"{request.request_id}.{tries}" if tries else request.request_id
            part = replace(request, request_id=name, generated=tuple(came))
            trial = _Trial(self._trial)
            try:
                if suspect or self._trial.locked():
                    await trial.begin(deadline_s)
                lead = await self._choose(deadline_s)
                async with aclosing(lead.generate(part, deadline_s)) as events:
                    async for event in events:
                        if event.token_ids:
                            trial.end()
                        self.last_event_s = time.monotonic()
                        came += event.token_ids
                        yield replace(event, request_id=request.request_id)
                        if event.finish is not None:
                            return
            except (DeadlinePassed, TimeoutError):
                raise self._too_late() from None
            except NotServing as error:
                lead.lost()
                died = isinstance(error, LoopDied)
                losses, deaths = losses + 1 if len(came) == known else 1, deaths + died
                if died and deaths >= (_ALONE if trial.under_way else _DEATHS):
                    raise _poisonous(error, deaths) from error
                if losses > _LOSSES:
                    raise
                suspect = died or losses >= _ALONE
                tries += 1
            finally:
                trial.end()

    async def ask(self, method: str) -> Any:
        """With several leads: counters are sums, lists are joined; a lead that is away counts with its last answer.

        "samples" are of all processes, not of a lead alone.
        """
        if method == SAMPLES:
            return await self._samples()
        if method not in _SUMMED:
            return await next((lead for lead in self.leads if lead.serves), self.leads[0]).ask(method)
        serving = [i for i, lead in enumerate(self.leads) if lead.serves] or list(range(len(self.leads)))
        found = await asyncio.gather(*(self.leads[i].ask(method) for i in serving), return_exceptions=True)
        answers = {(method, i): answer for i, answer in zip(serving, found, strict=True)}
        if len(self.leads) == 1 and isinstance(found[0], BaseException):
            raise found[0]
        self._answers |= {key: answer for key, answer in answers.items() if not isinstance(answer, BaseException)}
        known = [self._answers[method, i] for i in range(len(self.leads)) if (method, i) in self._answers]
        if not known:
            raise RuntimeFailure(f"no lead answered '{method}'", "look at `tiermoe status`")
        total = reduce(_sum, known)
        return total | {"kv_usage": total["kv_usage"] / len(known)} if method == "load" else total

    async def _samples(self) -> list[Sample]:
        """`attach.samples` on a thread, one call at a time: it blocks while Ray's head node does."""
        if self._sampling is None or self._sampling.done():
            self._sampling = asyncio.create_task(asyncio.to_thread(samples, self._deployment))
        try:
            async with asyncio.timeout(_SAMPLES_S):
                return await asyncio.shield(self._sampling)
        except (TimeoutError, ray.exceptions.RayError) as error:
            raise RuntimeFailure("Ray does not say which actors there are", "look at `ray status`") from error

    def states(self) -> list[LeadState]:
        return [lead.state for lead in self.leads]

    def end(self, failure: RuntimeFailure) -> None:
        """Requests fail with it from now on, those under way too."""
        for lead in self.leads:
            lead.end(failure)
        self._changed()

    async def _choose(self, deadline_s: float) -> LeadClient:
        """The lead that serves and has the fewest requests, once there is one.

        Raises:
            RuntimeFailure: all have ended for good, or a file that they serve from changed. DeadlinePassed: of the
                request.
        """
        while True:
            if serving := [lead for lead in self.leads if lead.serves]:
                return min(serving, key=lambda lead: lead.running)
            failures = [why for lead in self.leads if (why := lead.failure or lead.damage) is not None]
            if len(failures) == len(self.leads):
                raise RuntimeFailure(failures[0].what, failures[0].remedy)
            try:
                async with asyncio.timeout_at(deadline_s):
                    await self._change.wait()
            except TimeoutError:
                raise self._too_late() from None

    def _changed(self) -> None:
        """A lead was looked at."""
        change, self._change = self._change, asyncio.Event()
        change.set()
        if any(lead.serves for lead in self.leads):
            for lead in self.leads:
                if lead.hung:
                    lead.give_up_requests()

    def _too_late(self) -> DeadlinePassed:
        return DeadlinePassed(f"the request passed its deadline of {self._deadline_s:g} s", "ask for fewer tokens")


class _Trial:
    """The turn of one request among those that a lead may have died of.

    Args:
        turn: of all of them.
    """

    def __init__(self, turn: asyncio.Lock) -> None:
        self._turn, self.under_way = turn, False

    async def begin(self, deadline_s: float) -> None:
        """Wait for the turn. Raises TimeoutError: not before `deadline_s`, on the event loop's clock."""
        async with asyncio.timeout_at(deadline_s):
            await self._turn.acquire()
        self.under_way = True

    def end(self) -> None:
        """The request is cleared, or has ended. Idempotent."""
        if self.under_way:
            self.under_way = False
            self._turn.release()


def _poisonous(error: NotServing, deaths: int) -> RuntimeFailure:
    return RuntimeFailure(
        f"{error.what}, {deaths} times in steps that carried this request; it is not run again",
        "report it, with the request",
    )


def _sum(a: Any, b: Any) -> Any:
    """Numbers added, lists joined, the parts of dicts and data classes alike; of all else the first."""
    if is_dataclass(a) and not isinstance(a, type):
        return replace(a, **{part.name: _sum(getattr(a, part.name), getattr(b, part.name)) for part in fields(a)})
    if isinstance(a, dict):
        return {key: _sum(value, b[key]) if key in b else value for key, value in a.items()}
    if isinstance(a, list) or (isinstance(a, (int, float)) and not isinstance(a, bool)):
        return a + b
    return a
