"""What goes into a worker and what comes out: plain frozen records, picklable, without tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]
MAX_LOGPROBS = 20  # likeliest tokens that one place may report


@dataclass(frozen=True)
class SamplingParams:
    """How one request picks its tokens.

    temperature 0 is greedy. With a seed, the tokens of a request do not depend on what else is in the batch.
    min_tokens: as many are generated before a stop token may be. logprobs: report each token's log-probability, and
    those of so many likeliest tokens at its place; prompt_logprobs: the same for the prompt's tokens but the first.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    seed: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None  # None: none are reported
    prompt_logprobs: int | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt as token ids."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """What the model thought of one token before temperature, top-k and top-p.

    logprob: natural logarithm of its probability. top: (token id, logprob) of the likeliest at its place, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class TokenEvent:
    """New tokens of one request; `finish` is set on the last event and only there."""

    request_id: str
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    error: str | None = None
    error_type: str | None = None  # name of its class in `tiermoe.errors`, where it is one of those
    ttft_s: float | None = None  # seconds from submit to the first token; on the last event
    tpot_s: float | None = None  # mean seconds between later tokens; on the last event, when there are two or more
    queue_s: float | None = None  # seconds from submit to the first forward that carried it; on the last event
    logprobs: tuple[TokenLogprob, ...] = ()  # of `token_ids`, where asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt's tokens from the second on; on the first event


@dataclass
class Generation:
    """All events of one request, gathered."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None

    def add(self, event: TokenEvent) -> None:
        self.token_ids.extend(event.token_ids)
        if event.finish is not None:
            self.finish, self.error = event.finish, event.error
            self.ttft_s, self.tpot_s = event.ttft_s, event.tpot_s
