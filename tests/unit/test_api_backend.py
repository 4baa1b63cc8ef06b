"""The lead as the server reaches it: events, failures, deadlines, and requests that nobody waits for any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from tiermoe.actors.requests import GenerationRequest, TokenEvent
from tiermoe.cluster.api.backend import LeadBackend
from tiermoe.errors import DeadlinePassed, RequestError, RuntimeFailure

_REQUEST = GenerationRequest("r", (1, 2))
_WAIT_S = 20.0


class _Method:
    """An actor's method: `.options(...).remote(...)`."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def options(self, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(remote=self._call)


class FakeLead:
    """Streams what it is given, each as an awaitable; the end is held until the request is cancelled."""

    def __init__(self, items: Sequence[TokenEvent | Exception], *, known_after: int = 0) -> None:
        self._known_after = known_after  # cancellations that find nothing, as before the request has begun
        self.cancelled: list[str] = []
        self.over = asyncio.Event()
        self.generate, self.cancel = _Method(lambda request: _Stream(self, items)), _Method(self._cancel)
        self.health = _Method(lambda: _answer({"state": "serving"}))

    async def _cancel(self, request_id: str) -> bool:
        self.cancelled.append(request_id)
        if len(self.cancelled) > self._known_after:
            self.over.set()
            return True
        return False


class _Stream:
    """As Ray's: a wait that is given up leaves it as it was."""

    def __init__(self, lead: FakeLead, items: Sequence[TokenEvent | Exception]) -> None:
        self._lead, self._items = lead, list(items)

    async def __anext__(self) -> Any:
        if self._items:
            return _answer(self._items.pop(0))
        await self._lead.over.wait()
        return _answer(TokenEvent("r", (), "cancelled"))


async def _answer(item: Any) -> Any:
    if isinstance(item, Exception):
        raise item
    return item


def run(call: Callable[[], Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(call(), _WAIT_S)

    return asyncio.run(bounded())


async def _reaped(backend: LeadBackend) -> None:
    while backend._reapers:
        await asyncio.wait(backend._reapers)


def test_events_come_in_order_and_an_ended_request_is_not_cancelled() -> None:
    async def call() -> None:
        events = [TokenEvent("r", (5,)), TokenEvent("r", (6,)), TokenEvent("r", (), "length")]
        lead = FakeLead(events)
        backend = LeadBackend(lead, {}, 60.0)
        assert [event async for event in backend.generate(_REQUEST)] == events
        assert not backend._reapers
        assert lead.cancelled == []
        assert await backend.ask("health") == {"state": "serving"}

    run(call)


@pytest.mark.parametrize("known_after", [0, 2])
def test_a_consumer_that_leaves_has_its_request_cancelled(known_after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that the worker has not begun when the first cancellation comes."""
    monkeypatch.setattr("tiermoe.cluster.api.backend._REAP_STEP_S", 0.01)

    async def call() -> None:
        lead = FakeLead([TokenEvent("r", (5,))], known_after=known_after)
        backend = LeadBackend(lead, {}, 60.0)
        events = backend.generate(_REQUEST)
        assert (await anext(events)).token_ids == (5,)
        await events.aclose()
        await _reaped(backend)
        assert lead.cancelled == ["r"] * (known_after + 1)

    run(call)


def test_a_request_past_its_deadline_is_cancelled() -> None:
    async def call() -> None:
        lead = FakeLead([])
        backend = LeadBackend(lead, {}, 0.01)
        with pytest.raises(DeadlinePassed, match="passed its deadline"):
            await anext(backend.generate(_REQUEST))
        await _reaped(backend)
        assert lead.cancelled == ["r"]

    run(call)


@pytest.mark.parametrize(
    ("item", "kind"),
    [
        (TokenEvent("r", (), "error", error="out of memory"), RuntimeFailure),
        (ActorDiedError(), RuntimeFailure),
        (RayTaskError("generate", "traceback", RequestError("the prompt is empty", "give one")), RequestError),
    ],
    ids=["event", "death", "refusal"],
)
def test_failures_are_typed_and_need_no_cancellation(item: Any, kind: type[Exception]) -> None:
    async def call() -> None:
        lead = FakeLead([item])
        backend = LeadBackend(lead, {}, 60.0)
        with pytest.raises(kind):
            await anext(backend.generate(_REQUEST))
        assert not backend._reapers
        assert lead.cancelled == []

    run(call)
