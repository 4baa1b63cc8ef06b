"""CPU work of requests beside the event loop: parsing, templates, tokenizers.

The loop answers /health and moves every stream, so a request's text is worked on in threads. The tokenizer gives the
interpreter lock free while it works (`Tokenizer.encode` does not, `encode_batch_fast` does); templates are rendered in
another process (`rendering.py`), grammars are checked in one (`grammar.py`), and threads of their own wait for them, of
each key one at a time (`Turns`). Long texts have threads of their own, so that they delay short ones by nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from .refusals import ApiError

T = TypeVar("T")
_INLINE_BYTES = 2048  # worked on at once: a thread would cost more
_LONG_BYTES = 64 * 1024
_SHORT_THREADS = 2
_LONG_WAITING = 64
LARGE_BYTES = _LONG_BYTES  # a body whose memory is worth giving back
_TRIM_AFTER_S = 1.0
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # malloc.h
_AT_ONCE = 2  # grammars, short chats and long ones that other processes work on


def trim() -> None:
    """Give freed memory back to the system; it holds no lock of the interpreter meanwhile. glibc only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_memory_small() -> None:
    """For a process whose requests bring large texts: those have pages of their own, which go with them, and threads
    share two arenas. By itself glibc raises the size of what has pages of its own to 32 MiB. glibc only."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        library.mallopt(_M_ARENA_MAX, 2)


class _Turn:
    """Of one key. waiting: those that have it, or wait for it."""

    def __init__(self) -> None:
        self.lock, self.waiting = asyncio.Lock(), 0


class Turns:
    """Threads that wait for other processes, which a template or a grammar may hold for seconds. Of one key there is
    one at a time, so that it delays its own only.

    Args:
        name: of what is worked on, in the plural.
        most: of one key that may wait.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name, self._most = name, most
        self._threads = ThreadPoolExecutor(_AT_ONCE, name)
        self._turns: dict[str, _Turn] = {}

    async def run(self, key: str, work: Callable[[], T]) -> T:
        """What `work` returns or raises. It holds its turn until it has ended, also where the caller is cancelled: the
        others have theirs.

        Raises:
            ApiError: 429, too many of this key wait.
        """
        turn = self._turns.setdefault(key, _Turn())
        if turn.waiting >= self._most:
            raise _busy(f"{turn.waiting} {self._name} wait already")
        turn.waiting += 1
        try:
            await turn.lock.acquire()
        except BaseException:
            self._leave(key, turn)
            raise
        doing = asyncio.get_running_loop().run_in_executor(self._threads, work)

        def ended(done: asyncio.Future[T]) -> None:
            turn.lock.release()
            self._leave(key, turn)
            if not done.cancelled():
                done.exception()  # whoever waited may have left

        doing.add_done_callback(ended)
        return await asyncio.shield(doing)

    @property
    def keys(self) -> int:
        """How many have work here."""
        return len(self._turns)

    def close(self) -> None:
        """As `Offload.close`."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _leave(self, key: str, turn: _Turn) -> None:
        turn.waiting -= 1
        if not turn.waiting:
            del self._turns[key]


class Offload:
    """Threads for the text of requests, bounded in number and in what waits for them.

    Attributes:
        grammars: what checks them.
    """

    def __init__(self) -> None:
        # the library's own threads would be one pool for short and long texts; this is its only switch
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._short = ThreadPoolExecutor(_SHORT_THREADS, "text")
        self._long = ThreadPoolExecutor(1, "long-text")
        self._short_chats, self._long_chats = Turns("chats", 1024), Turns("long chats", 64)
        self.grammars = Turns("grammars", 32)
        self._long_waiting = 0
        self._trimming: asyncio.TimerHandle | None = None

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """What `work` returns or raises. A caller that is cancelled takes its work out of the queue.

        Args:
            size: bytes that the work is about.

        Raises:
            ApiError: 429, too many long texts wait.
        """
        if size <= _INLINE_BYTES:
            await asyncio.sleep(0)  # a request may have a series of these
            return work()
        loop = asyncio.get_running_loop()
        if size <= _LONG_BYTES:
            return await loop.run_in_executor(self._short, work)
        if self._long_waiting >= _LONG_WAITING:
            raise _busy(f"{self._long_waiting} long texts wait already")
        self._long_waiting += 1
        try:
            return await loop.run_in_executor(self._long, work)
        finally:
            self._long_waiting -= 1

    async def chat(self, key: str, size: int, work: Callable[[], T]) -> T:
        """As `Turns.run`, of a chat of so many bytes."""
        return await (self._short_chats if size <= _LONG_BYTES else self._long_chats).run(key, work)

    def trim_soon(self) -> None:
        """Give the memory back that large bodies have left: the C library keeps it, tens of megabytes a thread."""
        if self._trimming is None:
            self._trimming = asyncio.get_running_loop().call_later(_TRIM_AFTER_S, self._trim)

    def _trim(self) -> None:
        self._trimming = None
        with contextlib.suppress(RuntimeError):  # closed
            self._long.submit(trim)

    def close(self) -> None:
        """End the threads once their work is done; what waits is dropped."""
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)
        for turns in (self._short_chats, self._long_chats, self.grammars):
            turns.close()


def _busy(what: str) -> ApiError:
    return ApiError(429, f"{what}; try again in a moment", code="rate_limit_exceeded", headers={"Retry-After": "1"})
