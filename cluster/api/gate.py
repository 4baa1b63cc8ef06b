"""How many requests run and wait: more than that are refused at once, with 429."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from .errors import busy


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
