"""Open requests and the events on their way to consumers; shared by both ways of batching."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ...errors import RequestError
from ..requests import FinishReason, GenerationRequest, TokenEvent


@dataclass(eq=False)
class Stream:
    """One request that has not ended."""

    request: GenerationRequest
    submitted_s: float
    events: queue.SimpleQueue[TokenEvent] = field(default_factory=queue.SimpleQueue)
    sent: int = 0
    first_s: float | None = None

    def __iter__(self) -> Iterator[TokenEvent]:
        """Events as they come, until the one with `finish`."""
        while True:
            event = self.events.get()
            yield event
            if event.finish is not None:
                return


class Streams:
    """The table of open requests; thread-safe.

    Args:
        capacity_tokens: prompt and generated tokens that one request may take.
        eos: token ids that end a request.
    """

    def __init__(self, capacity_tokens: int, eos: Sequence[int]) -> None:
        self.capacity_tokens = capacity_tokens
        self.eos = list(eos)
        self._open: dict[str, Stream] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request: GenerationRequest) -> Stream:
        """Admit a request.

        Raises:
            RequestError: empty prompt, more tokens than fit, or an id in use.
        """
        total = len(request.prompt_ids) + request.sampling.max_tokens
        if not request.prompt_ids:
            raise RequestError("the prompt is empty", "give at least one token")
        if request.sampling.max_tokens < 1:
            raise RequestError(f"max_tokens is {request.sampling.max_tokens}", "ask for at least one token")
        if total > self.capacity_tokens:
            raise RequestError(
                f"prompt and max_tokens are {total} tokens, the KV cache holds {self.capacity_tokens}",
                "shorten the prompt, lower max_tokens or raise kv.num_blocks",
            )
        with self._lock:
            if request.request_id in self._open:
                raise RequestError(f"request id {request.request_id} is in use", "choose another")
            stream = self._open[request.request_id] = Stream(request, time.perf_counter())
        return stream

    def is_open(self, request_id: str) -> bool:
        return request_id in self._open

    def deliver(self, request_id: str, generated: Sequence[int]) -> None:
        """`generated` is everything so far; what was not sent yet is."""
        with self._lock:
            stream = self._open.get(request_id)
        if stream is not None and (tokens := self._fresh(stream, generated)):
            stream.events.put(TokenEvent(request_id, tokens))

    def finish(self, request_id: str, generated: Sequence[int]) -> None:
        """The request ran to its end: by a stop token or by length."""
        stream = self._close(request_id)
        if stream is None:
            return
        tokens = self._fresh(stream, generated)
        now_s = time.perf_counter()
        first_s = stream.first_s if stream.first_s is not None else now_s
        ended = not stream.request.sampling.ignore_eos and bool(generated) and generated[-1] in self.eos
        stream.events.put(
            TokenEvent(
                request_id,
                tokens,
                finish="stop" if ended else "length",
                ttft_s=first_s - stream.submitted_s,
                tpot_s=(now_s - first_s) / (stream.sent - 1) if stream.sent > 1 else None,
            )
        )

    def abort(self, request_id: str, reason: FinishReason, error: str | None = None) -> bool:
        """End a request without further tokens; False if it had ended."""
        stream = self._close(request_id)
        if stream is None:
            return False
        stream.events.put(TokenEvent(request_id, (), finish=reason, error=error))
        return True

    def abort_all(self, reason: FinishReason, error: str | None = None) -> None:
        """End every open request."""
        for request_id in list(self._open):
            self.abort(request_id, reason, error)

    def _close(self, request_id: str) -> Stream | None:
        with self._lock:
            return self._open.pop(request_id, None)

    @staticmethod
    def _fresh(stream: Stream, generated: Sequence[int]) -> tuple[int, ...]:
        tokens = tuple(generated[stream.sent :])
        stream.sent += len(tokens)
        if tokens and stream.first_s is None:
            stream.first_s = time.perf_counter()
        return tokens
