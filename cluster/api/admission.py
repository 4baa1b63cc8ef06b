"""Which choices run and which wait: limits of the server and of each key, and fair turns between keys.

Turns follow the virtual token counter of Sheng et al., Fairness in Serving Large Language Models (OSDI 2024), algorithm
2: each key has a counter of the tokens that it was served; when a slot is free, the key with the smallest counter among
those that wait is next. A key that comes back from a rest is lifted to the smallest counter of those that wait, so that
a rest saves up nothing. Within a key, and where there are no keys, the first to come is the first served.

The runtime serves in the order of arrival. So it gets no more prompts than its KV cache holds before it has begun
them: behind a key's long prompts another would wait there, where keys have no turns.

With several replicas of the server, limits are of all of them. Slots are divided: each replica has an equal part, and
what the others have no use for. Turns are fair within a replica.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from .keys import Key
from .refusals import ApiError
from .shared import Admitted, Ledger

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
        ledger: of the other replicas; None: there are none.
        prompt_tokens: of choices that are with the runtime and have no token yet; one choice may have more. None: any.
    """

    def __init__(
        self, running: int, waiting: int, ledger: Ledger | None = None, prompt_tokens: int | None = None
    ) -> None:
        self._limit, self._running, self._ledger = running + waiting, running, ledger
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

    @property
    def waiting_anywhere(self) -> int:
        """The same, in all replicas."""
        return self.waiting + sum(other.choices - other.inside for other in self._others())

    def admit(self, key: Key, tokens: Sequence[int]) -> None:
        """Admit all choices of a request, each to be given back with `leave`.

        Args:
            tokens: of each choice's prompt.

        Raises:
            ApiError: 429, they do not fit; 503, the other replicas cannot be notified. None is admitted.
        """
        share = self._shares.setdefault(key.name, _Share())
        self._admitted += len(tokens)  # published before the check: no two replicas take the same last place
        share.admitted += len(tokens)
        try:
            if not self._notify():
                raise ApiError(503, "the disk that holds the server's counters is full", headers={"Retry-After": "5"})
            self._check(key, share, tokens)
        except ApiError:
            self._admitted -= len(tokens)
            share.admitted -= len(tokens)
            self._notify()
            raise

    def _check(self, key: Key, share: _Share, tokens: Sequence[int]) -> None:
        others = self._others()
        there = [other.of(key.name) for other in others]
        admitted = share.admitted + sum(choices for choices, _ in there)
        waiting_tokens = share.waiting_tokens + sum(waiting for _, waiting in there)
        if self._admitted + sum(other.choices for other in others) > self._limit:
            raise _full(f"{self.waiting_anywhere - len(tokens)} requests wait already")
        if key.requests is not None and admitted > key.requests:
            raise _full(f"key '{key.name}' has {admitted - len(tokens)} of {key.requests} requests under way")
        # a prompt above the limit is admitted alone: else it would never be
        if key.tokens is not None and waiting_tokens and waiting_tokens + sum(tokens) > key.tokens:
            raise _full(f"{waiting_tokens} of {key.tokens} prompt tokens wait for key '{key.name}'")

    def leave(self, key: Key) -> None:
        """One admitted choice is over, whether it ran or not."""
        self._admitted -= 1
        self._shares[key.name].admitted -= 1
        self._notify()

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
        free = self._slots() - self._granted
        while free > 0 and (share := min(self._queued(), key=lambda found: found.counter, default=None)):
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
            free -= 1
            turn.set_result(None)
        self._notify()

    def _slots(self) -> int:
        """Choices that this replica may have with the runtime now."""
        others = self._others()
        part = -(-self._running // (1 + len(others)))
        return max(part, self._running - sum(min(part, other.choices) for other in others))

    def _others(self) -> list[Admitted]:
        return [] if self._ledger is None else self._ledger.others()

    def _notify(self) -> bool:
        """Publish what this replica has admitted; False: the disk is full, and the former value stays."""
        if self._ledger is not None:
            counts = {name: (share.admitted, share.waiting_tokens) for name, share in self._shares.items()}
            try:
                self._ledger.write(Admitted(self.inside, {name: found for name, found in counts.items() if any(found)}))
            except OSError:
                return False
        return True


def _full(why: str) -> ApiError:
    # "1" is a hint: the queue moves with every request that ends
    return ApiError(
        429, f"{why}; try again in a moment", code="rate_limit_exceeded", headers={"Retry-After": "1"}
    )
