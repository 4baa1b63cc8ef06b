"""Lead actors in this process, as `LeadClient` calls them: no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from tiermoe.actors.engine.stats import EngineStats, LayerStats
from tiermoe.actors.requests import GenerationRequest, TokenEvent


class _Method:
    """An actor's method: `.options(...).remote(...)`."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def options(self, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(remote=self._call)


class FakeLead:
    """Streams what it is given, each as an awaitable; the end is held until the request is cancelled.

    later: what the requests after the first get. states: what it says of itself, one a call, the last for good; of
    "hangs" nothing.
    """

    def __init__(
        self, items: Sequence[TokenEvent | Exception], *, known_after: int = 0,
        later: Sequence[Sequence[TokenEvent | Exception]] = (), states: Sequence[str | Exception] = ("serving",),
    ) -> None:  # fmt: skip
        self._items, self._states = [items, *later], list(states)
        self.requests: list[GenerationRequest] = []
        self._known_after = known_after  # cancellations that find nothing, as before the request has begun
        self.cancelled: list[str] = []
        self.over = asyncio.Event()
        self.generate, self.cancel = _Method(self._generate), _Method(self._cancel)
        self.health, self.load = _Method(self._health), _Method(self._load)
        self.stats = _Method(self._stats)

    def _generate(self, request: GenerationRequest) -> _Stream:
        self.requests.append(request)
        return _Stream(self, self._items[len(self.requests) - 1])

    async def _health(self) -> dict[str, str]:
        state = self._states.pop(0) if len(self._states) > 1 else self._states[0]
        if state == "hangs":
            await self.over.wait()
        return await _answer(state if isinstance(state, Exception) else {"state": state})

    async def _load(self) -> dict[str, float]:
        return {"running": 0, "waiting": 0, "kv_usage": 0.0}

    async def _stats(self) -> EngineStats:
        return EngineStats(layers=[LayerStats(hits=3, blocked_io_s=0.5)])

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
