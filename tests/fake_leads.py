"""Lead actors in this process, as `LeadClient` calls them: no Ray."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

from ray.exceptions import RayTaskError

from tiermoe.actors.engine.stats import EngineStats, LayerStats
from tiermoe.actors.requests import GenerationRequest, TokenEvent


class _Method:
    """An actor's method: `.remote(...)`, `.options(...).remote(...)`."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call

    def options(self, **options: Any) -> _Method:
        return self


Items = Sequence[TokenEvent | Exception]
REQUEST = contextvars.ContextVar("REQUEST", default="")  # as Ray knows which request makes a call


class _Ref:
    """As Ray's: whoever gives up waiting for it leaves it as it was."""

    def __init__(self, task: asyncio.Task[str]) -> None:
        self._task = task

    def __await__(self) -> Generator[Any, None, str]:
        return asyncio.shield(self._task).__await__()


class FakeLead:
    """Gives each request what it is given, an event a call; the end is held until a request is cancelled.

    An error of a task comes from `begin`, others from `take`. later: what the requests after the first get. states:
    what it says of itself, or its `state`, one a call, the last for good; of "hangs" nothing. begins: holds `begin`
    back until it is set. together: all events that there are in one call.
    """

    def __init__(
        self, items: Items, *, later: Sequence[Items] = (), begins: asyncio.Event | None = None,
        states: Sequence[str | Exception | dict[str, str]] = ("serving",), together: bool = False,
    ) -> None:  # fmt: skip
        self._items, self._states = [items, *later], list(states)
        self.requests: list[GenerationRequest] = []
        self.began_by: list[str] = []  # the `REQUEST` of each call
        self.taken_by: list[str] = []
        self.cancelled_by: list[str] = []
        self._begins, self._together, self.life = begins, together, "first"
        self._waiting: dict[str, list[TokenEvent | Exception]] = {}  # by request
        self.cancelled: list[str] = []
        self.over = asyncio.Event()
        self.begin, self.take, self.cancel = _Method(self._begin), _Method(self._take), _Method(self._cancel)
        self.health, self.load = _Method(self._health), _Method(self._load)
        self.stats = _Method(self._stats)

    def _begin(self, client: str, request: GenerationRequest) -> _Ref:
        self.requests.append(request)
        self.began_by.append(REQUEST.get())
        return _Ref(asyncio.get_running_loop().create_task(self._begun(request, len(self.requests) - 1)))

    async def _begun(self, request: GenerationRequest, number: int) -> str:
        items = list(self._items[number])
        if self._begins is not None:
            await self._begins.wait()
        if items and isinstance(items[0], RayTaskError):
            raise items[0]
        self._waiting[request.request_id] = items
        return self.life

    async def _take(self, client: str, wait_s: float) -> tuple[str, list[TokenEvent]]:
        self.taken_by.append(REQUEST.get())
        await asyncio.sleep(0.001)
        found: list[TokenEvent] = []
        for name, items in list(self._waiting.items()):
            while items and (self._together or not found):
                item = items.pop(0)
                if isinstance(item, Exception):
                    raise item
                found.append(replace(item, request_id=name))
        if self.over.is_set() and not found:
            found = [TokenEvent(name, (), "cancelled") for name in self._waiting]
        return self.life, found

    async def _health(self) -> dict[str, str]:
        state = self._states.pop(0) if len(self._states) > 1 else self._states[0]
        if state == "hangs":
            await self.over.wait()
        return await _answer({"state": state} if isinstance(state, str) else state)

    async def _load(self) -> dict[str, float]:
        return {"running": 0, "waiting": 0, "kv_usage": 0.0}

    async def _stats(self) -> EngineStats:
        return EngineStats(layers=[LayerStats(hits=3, blocked_io_s=0.5)])

    async def _cancel(self, request_id: str) -> bool:
        self.cancelled.append(request_id)
        self.cancelled_by.append(REQUEST.get())
        return self._waiting.pop(request_id, None) is not None


class RealLead:
    """A worker of this process as the actor that it would be: its methods run in threads and fail as Ray's tasks do."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def __getattr__(self, name: str) -> _Method:
        async def call(*args: Any) -> Any:
            try:
                return await asyncio.to_thread(getattr(self._worker, name), *args)
            except Exception as error:
                raise RayTaskError(name, str(error), error).as_instanceof_cause() from error

        # Ray's calls begin without an await
        return _Method(lambda *args: asyncio.ensure_future(call(*args)))


async def _answer(item: Any) -> Any:
    if isinstance(item, Exception):
        raise item
    return item
