"""Which choices run and which wait: limits of the server and of each key, and fair turns between keys.

Turns follow the virtual token counter of Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), algorithm
2: each key has a counter of the tokens that it was served; when a slot is free, the key with the smallest counter among
those that wait is next. A key that comes back from a rest is lifted to the smallest counter of those that wait, so that
a rest saves up nothing. Within a key, and where there are no keys, the first to come is the first served.

The runtime serves in the order of arrival. So it gets no more prompts than its KV cache holds before it has begun
them: behind a key's long prompts another would wait there, where keys have no turns.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from .keys import Key
from .refusals import ApiError

_PROMPT_WEIGHT, _GENERATED_WEIGHT = 1, 2  # section 3.2's w_p and w_q


@dataclass
class _Share:
    """One key's part.

    Attributes:
        admitted: choices that wait or run.
        waiting_tokens: prompt tokens of those that wait.
        counter: tokens served, weighted; section 4's c_i.
    """

    admitted: int = 0
    waiting_tokens: int = 0
    counter: float = 0.0
    queue: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)


class Admission:
    """On one event loop.

    Args:
        running: choices that are with the runtime at a time.
        waiting: choices that may wait for that.
        prompt_tokens: of choices that are with the runtime and have no token yet; one choice may have more. None: any.
    """

    def __init__(self, running: int, waiting: int, prompt_tokens: int | None = None) -> None:
        self._limit, self._running = running + waiting, running
        self._granted = 0  # slots
        self._most_unbegun, self._unbegun = prompt_tokens, 0  # prompt tokens of those that have a slot and no token
        self._shares: dict[str, _Share] = {}
        self._last = 0.0  # counter of the key that was served last
        self._admitted = 0
        self.inside = 0  # choices that are with the runtime

    @property
    def waiting(self) -> int:
        """Choices that were admitted and are not with the runtime yet."""
        return self._admitted - self.inside

    def admit(self, key: Key, tokens: Sequence[int]) -> None:
        """Admit all choices of a request, each to be given back with `leave`.

        Args:
            tokens: of each choice's prompt.

        Raises:
            ApiError: 429, they do not fit. None is admitted.
        """
        share = self._shares.setdefault(key.name, _Share())
        if self._admitted + len(tokens) > self._limit:
            raise _full(f"{self.waiting} requests wait already")
        if key.requests is not None and share.admitted + len(tokens) > key.requests:
            raise _full(f"key '{key.name}' has {share.admitted} of {key.requests} requests under way")
        # a prompt above the limit is admitted alone: else it would never be
        if key.tokens is not None and share.waiting_tokens and share.waiting_tokens + sum(tokens) > key.tokens:
            raise _full(f"{share.waiting_tokens} of {key.tokens} prompt tokens wait for key '{key.name}'")
        self._admitted += len(tokens)
        share.admitted += len(tokens)

    def leave(self, key: Key) -> None:
        """One admitted choice is over, whether it ran or not."""
        self._admitted -= 1
        self._shares[key.name].admitted -= 1

    def charge(self, key: Key, generated: int) -> None:
        """Tokens were generated for a key."""
        self._shares[key.name].counter += _GENERATED_WEIGHT * generated

    @asynccontextmanager
    async def slot(self, key: Key, tokens: int) -> AsyncIterator[Callable[[], None]]:
        """Inside the block, one admitted choice of so many prompt tokens is with the runtime. Its value is to be
        called when the choice's first token has come, and may be called again."""
        await self._turn(self._shares[key.name], tokens)
        self.inside += 1
        unbegun = tokens

        def begun() -> None:
            nonlocal unbegun
            if unbegun:
                self._unbegun -= unbegun
                unbegun = 0
                self._serve()

        try:
            yield begun
        finally:
            self.inside -= 1
            self._granted -= 1
            self._unbegun -= unbegun
            self._serve()

    async def _turn(self, share: _Share, tokens: int) -> None:
        if not share.queue:  # lift: lines 8 to 14
            share.counter = max(share.counter, min((other.counter for other in self._queued()), default=self._last))
        turn = asyncio.get_running_loop().create_future()
        share.queue.append((tokens, turn))
        share.waiting_tokens += tokens
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had its turn
                self._granted -= 1
                self._unbegun -= tokens
                self._serve()
            elif (tokens, turn) in share.queue:
                share.queue.remove((tokens, turn))
                share.waiting_tokens -= tokens
            raise

    def _queued(self) -> Iterator[_Share]:
        return (share for share in self._shares.values() if share.queue)

    def _serve(self) -> None:
        while self._granted < self._running and (
            share := min(self._queued(), key=lambda found: found.counter, default=None)
        ):
            tokens, turn = share.queue[0]
            full = self._most_unbegun is not None and self._unbegun + tokens > self._most_unbegun
            if full and self._unbegun and not turn.cancelled():
                break
            share.queue.popleft()
            share.waiting_tokens -= tokens
            if turn.cancelled():
                continue
            self._last = share.counter
            self._unbegun += tokens
            share.counter += _PROMPT_WEIGHT * tokens
            self._granted += 1
            turn.set_result(None)


def _full(why: str) -> ApiError:
    # "1" is a hint: the queue moves with every request that ends
    return ApiError(
        429, f"{why}; try again in a moment", code="rate_limit_exceeded", headers={"Retry-After": "1"}
    )
