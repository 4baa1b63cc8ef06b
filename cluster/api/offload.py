"""CPU work of requests beside the event loop: parsing, templates, tokenizers.

The loop answers /health and moves every stream, so a request's text is worked on in threads. The tokenizer gives the
interpreter lock free while it works (`Tokenizer.encode` does not, `encode_batch_fast` does); templates are rendered in
another process (`rendering.py`), and threads of their own wait for it. Long texts have a thread of their own, so that
they delay short ones by nothing.
"""

from __future__ import annotations

import asyncio
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


class Offload:
    """Threads for the text of requests, bounded in number and in what waits for them."""

    def __init__(self) -> None:
        # the library's own threads would be one pool for short and long texts; this is its only switch
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._short = ThreadPoolExecutor(_SHORT_THREADS, "text")
        self._long = ThreadPoolExecutor(1, "long-text")
        self._short_chats = ThreadPoolExecutor(1, "chat")
        self._long_chats = ThreadPoolExecutor(1, "long-chat")
        self._long_waiting = 0

    async def run(self, size: int, work: Callable[[], T], *, waits: bool = False) -> T:
        """What `work` returns or raises. A caller that is cancelled takes its work out of the queue.

        Args:
            size: bytes that the work is about.
            waits: it waits for another process, for seconds if a template does not end.

        Raises:
            ApiError: 429, too many long texts wait.
        """
        if size <= _INLINE_BYTES and not waits:
            return work()
        loop = asyncio.get_running_loop()
        if size <= _LONG_BYTES:
            return await loop.run_in_executor(self._short_chats if waits else self._short, work)
        if self._long_waiting >= _LONG_WAITING:
            raise ApiError(
                429, f"{self._long_waiting} long texts wait already; try again in a moment", code="rate_limit_exceeded",
                headers={"Retry-After": "1"},
            )  # fmt: skip
        self._long_waiting += 1
        try:
            return await loop.run_in_executor(self._long_chats if waits else self._long, work)
        finally:
            self._long_waiting -= 1

    def close(self) -> None:
        """End the threads once their work is done; what waits is dropped."""
        for pool in (self._short, self._long, self._short_chats, self._long_chats):
            pool.shutdown(wait=False, cancel_futures=True)
