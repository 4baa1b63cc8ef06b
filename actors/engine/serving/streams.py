"""Open requests, their events, and the rows of each forward; for both batchers."""

from __future__ import annotations

import itertools
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ....errors import RequestError, RuntimeFailure, TierMoeError
from ...policies.routing import SequenceRows
from ...requests import FinishReason, GenerationRequest, TokenEvent, TokenLogprob

_NO_MEMORY = ("can't allocate memory", "not enough memory", "bad_alloc")  # of torch's allocator for CPUs, of C++


class Outbox:
    """Events of all requests of one client, until it takes them: one message for all tokens of a step.

    Attributes:
        open: ids of the requests that have not ended.
    """

    def __init__(self) -> None:
        self.open: set[str] = set()
        self._seen_s = time.monotonic()
        self._events: list[TokenEvent] = []
        self._change = threading.Condition()

    @property
    def silent_s(self) -> float:
        """Seconds since the client last began a request or took events."""
        return time.monotonic() - self._seen_s

    def begin(self, request_id: str) -> None:
        """The client sends a request."""
        self._seen_s = time.monotonic()
        self.open.add(request_id)

    def put(self, event: TokenEvent) -> None:
        """Add the next event of a request."""
        with self._change:
            if event.finish is not None:
                self.open.discard(event.request_id)
            self._events.append(event)
            self._change.notify()

    def take(self, wait_s: float) -> list[TokenEvent]:
        """The events since the last call, in order; waits up to `wait_s` for one."""
        with self._change:
            self._change.wait_for(lambda: self._events, wait_s)
            events, self._events = self._events, []
            self._seen_s = time.monotonic()
        return events


class SequenceWatcher(Protocol):
    """Follows sequences; the expert engine is one."""

    def begin_forward(self, sequences: Sequence[SequenceRows]) -> None:
        """The next forward carries these rows; on the forward's thread."""
        ...

    def end_sequence(self, name: str) -> None:
        """A sequence is over; from any thread, also for one that no forward carried."""
        ...


@dataclass(eq=False)
class Stream:
    """One request that has not ended.

    `name` is unique for good; a request's id may be used again, and late events of the earlier request must not reach
    the later one.
    """

    request: GenerationRequest
    name: str
    submitted_s: float
    seed: int  # of the draws: the request's, or a fresh one
    events: queue.SimpleQueue[TokenEvent] | Outbox = field(default_factory=queue.SimpleQueue)
    stops: frozenset[int] = frozenset()  # tokens that end it
    processor: Any = None  # of its scores: a `LogitsProcessor`, or None
    generated: list[int] = field(default_factory=list)  # tokens sent, those of an earlier lead too
    first_s: float | None = None
    begun_s: float | None = None  # when a forward carried it for the first time
    cached_tokens: int = 0  # of its prompt, that the KV cache held then
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by place among the generated tokens
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by place in the prompt

    @property
    def stopped(self) -> bool:
        """Whether its last token ended it."""
        return bool(self.generated) and self.generated[-1] in self.stops

    def __iter__(self) -> Iterator[TokenEvent]:
        """Events as they come, until the one with `finish`; of a stream without an `Outbox`."""
        assert isinstance(self.events, queue.SimpleQueue)
        while True:
            event = self.events.get()
            yield event
            if event.finish is not None:
                return


class Streams:
    """The table of open requests; thread-safe.

    Args:
        capacity_tokens: prompt and generated tokens of one request that the KV cache holds.
        eos: token ids that end a request.
        vocabulary: number of token ids that the model can embed.
        positions: positions that the model was made for; None: no limit.
        ended: called with the name of each ended stream, on the thread that ended it.
        processor_of: makes a request's processor of scores; None: it needs none.

    Attributes:
        out_of_memory: called with the error before a request is ended by one of an allocation; None: nobody.
        steps, step_s: forwards so far, with their tokens' way to the requests, and their seconds.
    """

    def __init__(
        self, capacity_tokens: int, eos: Sequence[int], vocabulary: int, positions: int | None = None,
        ended: Callable[[str], None] | None = None, processor_of: Callable[[GenerationRequest], Any] | None = None,
    ) -> None:  # fmt: skip
        self.capacity_tokens, self.vocabulary, self.positions = capacity_tokens, vocabulary, positions
        self.eos = list(eos)
        self._ended, self._processor_of = ended, processor_of
        self._open: dict[str, Stream] = {}  # by name
        self._names: dict[str, str] = {}  # request id -> name, of open streams
        self._numbers = itertools.count()
        self._closed = False
        self._lock = threading.Lock()
        self.out_of_memory: Callable[[BaseException], None] | None = None
        self.reset_steps()

    def __len__(self) -> int:
        return len(self._open)

    def reset_steps(self) -> None:
        """Count steps from here on."""
        self.steps, self.step_s = 0, 0.0

    def stepped(self, began_s: float) -> None:
        """A step has ended that began then, by `time.perf_counter`; on the loop's thread."""
        self.steps, self.step_s = self.steps + 1, self.step_s + time.perf_counter() - began_s

    @property
    def closed(self) -> bool:
        """Whether requests are refused."""
        return self._closed

    @property
    def limit_tokens(self) -> int:
        """Prompt and generated tokens that one request may take."""
        return self.capacity_tokens if self.positions is None else min(self.capacity_tokens, self.positions)

    def open(self, request: GenerationRequest, events: Outbox | None = None) -> Stream:
        """Admit a request. One whose last token was generated before ends at once.

        Args:
            events: where its events go; None: to the stream, which iterates over them.

        Raises:
            RequestError: empty prompt, unknown tokens, more tokens than fit, a sampling value out of range, or an id in
                use.
            RuntimeFailure: closed.
        """
        request.check(self.vocabulary, self.eos)
        total = len(request.prompt_ids) + request.sampling.max_tokens
        if not request.prompt_ids:
            raise RequestError("the prompt is empty", "give at least one token")
        if self.positions is not None and total > self.positions:
            raise RequestError(
                f"prompt and max_tokens are {total} tokens, the model was made for {self.positions} positions",
                "shorten the prompt or lower max_tokens",
            )
        if total > self.capacity_tokens:
            raise RequestError(
                f"prompt and max_tokens are {total} tokens, the KV cache holds {self.capacity_tokens} of a request",
                "shorten the prompt, lower max_tokens, or raise kv.tokens, and kv.max_model_len where it is set",
            )
        unknown = [t for t in request.fed_ids if not 0 <= t < self.vocabulary]
        if unknown:
            raise RequestError(f"the model has no token {unknown[0]}", f"give ids from 0 to {self.vocabulary - 1}")
        processor = None if self._processor_of is None else self._processor_of(request)
        with self._lock:
            if self._closed:
                raise RuntimeFailure("generation was stopped", "start a new worker")
            if request.request_id in self._names:
                raise RequestError(f"request id {request.request_id} is in use", "choose another")
            seed = secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed
            stream = Stream(request, f"{request.request_id}#{next(self._numbers)}", time.perf_counter(), seed)
            stream.stops = frozenset(() if request.sampling.ignore_eos else self.eos).union(
                request.sampling.stop_token_ids
            )
            stream.processor, stream.generated = processor, list(request.generated)
            if events is not None:
                stream.events = events
            self._open[stream.name] = stream
            self._names[request.request_id] = stream.name
        if len(stream.generated) >= request.sampling.max_tokens or stream.stopped:
            self.finish(stream.name)
        return stream

    def is_open(self, name: str) -> bool:
        return name in self._open

    def get(self, name: str) -> Stream | None:
        """The open stream of this name; None if it has ended."""
        return self._open.get(name)

    def begin(self, name: str, cached_tokens: int = 0) -> None:
        """A forward is about to carry the request's prompt after `cached_tokens`; only the first call counts."""
        stream = self._open.get(name)
        if stream is not None and stream.begun_s is None:
            stream.begun_s, stream.cached_tokens = time.perf_counter(), cached_tokens

    def reads_prefix(self, name: str) -> bool:
        """Whether the request may leave out rows of its prompt; not one that reports their log-probabilities."""
        stream = self._open.get(name)
        if stream is None:
            return True
        return stream.request.read_prefix_cache and stream.request.scored_prompt is None

    @property
    def waiting(self) -> int:
        """Open requests that no forward has carried yet."""
        return sum(stream.begun_s is None for stream in list(self._open.values()))

    def note(self, name: str, place: int, found: TokenLogprob) -> None:
        """Store the log-probability of the token generated next at `place`; it goes out with the token."""
        if (stream := self._open.get(name)) is not None:
            stream.logprobs[place] = found

    def note_prompt(self, name: str, place: int, found: TokenLogprob) -> None:
        """Store that of the prompt's token at `place`; all go out with the first generated token."""
        if (stream := self._open.get(name)) is not None:
            stream.prompt_logprobs[place] = found

    def deliver(self, name: str, tokens: Sequence[int]) -> None:
        """Send tokens that were generated."""
        if (stream := self._open.get(name)) is not None:
            stream.events.put(self._event(stream, tokens))

    def finish(self, name: str, tokens: Sequence[int] = ()) -> None:
        """Send the last tokens: the request ended by a stop token or by length."""
        stream = self._close(name)
        if stream is None:
            return
        event = self._event(stream, tokens)
        if stream.processor is not None and (error := stream.processor.error) is not None:
            stream.events.put(replace(event, token_ids=(), finish="error", error=error, error_type="RequestError"))
            return
        now_s = time.perf_counter()
        first_s = stream.first_s if stream.first_s is not None else now_s
        made = len(stream.generated) - len(stream.request.generated)
        stream.events.put(
            replace(
                event,
                finish="stop" if stream.stopped else "length",
                ttft_s=first_s - stream.submitted_s,
                tpot_s=(now_s - first_s) / (made - 1) if made > 1 else None,
                queue_s=None if stream.begun_s is None else stream.begun_s - stream.submitted_s,
            )
        )

    def abort(
        self, name: str, reason: FinishReason, error: str | None = None, cause: BaseException | None = None
    ) -> bool:
        """End a request without further tokens; False if it had ended.

        Args:
            cause: the exception; one of ours reaches the client with its type.
        """
        if cause is not None and self.out_of_memory is not None and _of_memory(cause):
            self.out_of_memory(cause)
        stream = self._close(name)
        if stream is None:
            return False
        typed = type(cause).__name__ if isinstance(cause, TierMoeError) else None
        text = str(cause) if typed is not None else error
        stream.events.put(TokenEvent(stream.request.request_id, (), finish=reason, error=text, error_type=typed))
        return True

    def find(self, request_id: str) -> Stream | None:
        """The open stream of this id; None if it has ended."""
        with self._lock:
            name = self._names.get(request_id)
            return None if name is None else self._open[name]

    def close(self) -> None:
        """End every open request with `cancelled` and refuse later ones."""
        with self._lock:
            self._closed = True
        for name in list(self._open):
            self.abort(name, "cancelled")

    def _close(self, name: str) -> Stream | None:
        with self._lock:
            stream = self._open.pop(name, None)
            if stream is not None:
                del self._names[stream.request.request_id]
        if stream is not None and self._ended is not None:
            self._ended(name)
        return stream

    @staticmethod
    def _event(stream: Stream, tokens: Sequence[int]) -> TokenEvent:
        """New tokens with the requested log-probabilities."""
        begin = len(stream.generated)
        stream.generated += tokens
        if tokens and stream.first_s is None:
            stream.first_s = time.perf_counter()
        found, prompt, end = stream.logprobs, stream.prompt_logprobs, len(stream.generated)
        return TokenEvent(
            stream.request.request_id,
            tuple(tokens),
            logprobs=tuple(found.pop(place) for place in range(begin, end) if place in found) if found else (),
            prompt_logprobs=tuple(prompt[place] for place in sorted(prompt)) if begin == 0 else (),
            cached_tokens=stream.cached_tokens if begin == 0 and tokens else 0,
        )


def _of_memory(error: BaseException) -> bool:
    """Whether it is, or comes from, an allocation that failed: of Python, torch on a CPU, torch on a GPU, or C++."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, MemoryError) or type(found).__name__ == "OutOfMemoryError":
            return True
        if isinstance(found, RuntimeError) and any(words in str(found) for words in _NO_MEMORY):
            return True
        found = found.__cause__
    return False
