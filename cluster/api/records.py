"""What is known of one request: its `ChoiceTimes` as they come, and the `RequestRecord` that its end hands on.

    `Guard` makes the record -> routes and error handlers fill it -> at the request's end each sink gets it
    sinks: counters (`metrics`), a line of the request log (`request_log`)

A record holds no text of a prompt or an answer, and no key.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ...actors.requests import TokenEvent
from .refusals import ApiError

CLIENT_GONE = 499  # nginx's code: the client left before it had an answer
PROBES = frozenset({"/health", "/ready", "/metrics"})  # asked again and again by programs
_REASONS = {
    400: "invalid_request", 401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed", 408: "timeout",
    413: "body_too_large", 429: "rate_limit_exceeded", 503: "unavailable",
}  # fmt: skip


@dataclass
class ChoiceTimes:
    """The tokens and times of one choice; times are of `time.perf_counter`.

    Attributes:
        prompt_tokens, cached_tokens: of its prompt, and those that the KV cache had of earlier requests.
        tokens: generated so far.
        submitted_s: when its request was checked and tokenized.
        started_s: when the server gave it to the runtime; None: it waits in the server.
        queue_s: seconds from `started_s` to its first forward, known at its end.
        first_s, last_s: times of its first and last tokens.
        finish: stop, length, abort (the client left) or error; None: still running.
        ended_s: when it ended.
    """

    prompt_tokens: int
    submitted_s: float
    cached_tokens: int = 0
    tokens: int = 0
    started_s: float | None = None
    queue_s: float = 0.0
    first_s: float | None = None
    last_s: float | None = None
    finish: str | None = None
    ended_s: float | None = None

    def event(self, event: TokenEvent, now_s: float) -> None:
        """Tokens arrived, or the runtime's counters at the end."""
        self.queue_s = event.queue_s or self.queue_s
        if event.token_ids:
            self.first_s = now_s if self.first_s is None else self.first_s
            self.last_s = now_s
            self.tokens += len(event.token_ids)
            self.cached_tokens += event.cached_tokens

    @property
    def waited_s(self) -> float:
        """Seconds from submission to its first forward."""
        begun_s = self.started_s if self.started_s is not None else self.ended_s or self.submitted_s
        return max(0.0, begun_s - self.submitted_s + self.queue_s)

    @property
    def ttft_s(self) -> float | None:
        """Seconds from submission to the first token."""
        return None if self.first_s is None else self.first_s - self.submitted_s

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds between tokens; None with fewer than two."""
        if self.first_s is None or self.last_s is None or self.tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)


@dataclass
class RequestRecord:
    """One HTTP request.

    Attributes:
        request_id: taken from the client, or made.
        key: the name of its key, or the beginning of the SHA-256 of one that is not known; None: it sent none.
        begun_s, ended_s: of `time.perf_counter`. begun_ns: of the wall clock.
        status: of the answer; `CLIENT_GONE` without one.
        reason: a word for why it was refused or failed, from a fixed set; None: it was not.
        message: of the error that the client received.
        choices: of a request that generates. prompts: its prompts, each of which has equally many choices.
    """

    request_id: str
    method: str
    path: str
    begun_s: float = field(default_factory=time.perf_counter)
    begun_ns: int = field(default_factory=time.time_ns)
    ended_s: float = 0.0
    key: str | None = None
    status: int = CLIENT_GONE
    reason: str | None = None
    message: str | None = None
    prompts: int = 1
    choices: list[ChoiceTimes] = field(default_factory=list)

    def refuse(self, error: ApiError) -> None:
        """The client receives an error, as its answer or at the end of its stream."""
        self.reason = error.code or _REASONS.get(error.status, "server_error" if error.status >= 500 else "refused")
        self.message = error.message

    def prompt_tokens(self) -> tuple[int, int]:
        """Tokens of its prompts, and those of them that were cached; a prompt of several choices counts once."""
        firsts = self.choices[:: max(1, len(self.choices) // self.prompts)]
        return sum(one.prompt_tokens for one in firsts), sum(one.cached_tokens for one in firsts)

    @property
    def finish(self) -> list[str]:
        """Why its choices ended; one that had not when its client left is an abort."""
        return sorted({one.finish or "abort" for one in self.choices})

    @property
    def ttft_s(self) -> float | None:
        """Of the choice with the earliest first token."""
        return min((one.ttft_s for one in self.choices if one.ttft_s is not None), default=None)

    @property
    def tpot_s(self) -> float | None:
        """The mean over its choices."""
        found = [one.tpot_s for one in self.choices if one.tpot_s is not None]
        return sum(found) / len(found) if found else None


Sink = Callable[[RequestRecord], None]
