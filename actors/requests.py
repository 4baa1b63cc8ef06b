"""Requests to a worker and its answers: frozen records, picklable, without tensors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from ..errors import RuntimeFailure, TierMoeError, rebuilt

FinishReason = Literal["stop", "length", "cancelled", "error"]
MAX_LOGPROBS = 20  # likeliest tokens that one position may report


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request.

    temperature 0 is greedy. With a seed, the tokens of a request do not depend on what else is in the batch.
    min_p: least probability of a token relative to the likeliest one's. Penalties, as vLLM's: the repetition penalty is
    for tokens of the prompt and generated ones, the others for generated ones. logit_bias: (token id, added to its
    logit). stop_token_ids: end the request as the model's own stop tokens do, even if those are ignored.
    min_tokens: before the first stop token. logprobs: report each token's log-probability, and those of so many
    likeliest tokens at its position; prompt_logprobs: the same for the prompt's tokens but the first.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    seed: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None  # None: not reported
    prompt_logprobs: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    grammar: str | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt as token ids.

    generated: tokens that an earlier lead made of this request before it died. The request continues after them: they
    count as generated (in `max_tokens`, `min_tokens` and the draws of a seed) and are not sent again.
    read_prefix_cache: False: every token of the prompt runs, whatever the KV cache holds of earlier requests.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    generated: tuple[int, ...] = ()
    read_prefix_cache: bool = True

    @property
    def fed_ids(self) -> tuple[int, ...]:
        """Tokens that the model reads before it makes a new one."""
        return self.prompt_ids + self.generated

    @property
    def scored_prompt(self) -> int | None:
        """`prompt_logprobs`, which are sent with the first generated token."""
        return None if self.generated else self.sampling.prompt_logprobs


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's log-probability (natural, before temperature, top-k and top-p), and its position's likeliest tokens.

    top: (token id, logprob) of the likeliest, best first.
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
    error_type: str | None = None  # class name, if it is in `tiermoe.errors`
    ttft_s: float | None = None  # seconds from submit to the first token; on the last event
    tpot_s: float | None = None  # mean seconds between later tokens; on the last event, when there are two or more
    queue_s: float | None = None  # seconds from submit to the first forward that carried it; on the last event
    logprobs: tuple[TokenLogprob, ...] = ()  # of `token_ids`, if requested
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt's tokens from the second on; on the first event
    cached_tokens: int = 0  # prompt tokens that the KV cache had of earlier requests; on the first event with tokens

    @property
    def failure(self) -> TierMoeError | None:
        """What ended the request in the worker: one of our errors as it was raised there, else a RuntimeFailure; None:
        it has not failed.
        """
        if self.finish != "error":
            return None
        if self.error is not None and self.error_type is not None:
            return rebuilt(self.error_type, self.error)
        return RuntimeFailure(f"the request failed in the worker: {self.error}", "run again, and report it if it stays")

    def joined(self, later: TokenEvent) -> TokenEvent:
        """This event and the request's next one as one."""
        return replace(
            later,
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
            prompt_logprobs=self.prompt_logprobs + later.prompt_logprobs,
            cached_tokens=self.cached_tokens + later.cached_tokens,
        )


@dataclass
class Generation:
    """All events of one request, merged."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    cached_tokens: int = 0
    failure: TierMoeError | None = None

    def add(self, event: TokenEvent) -> None:
        self.token_ids.extend(event.token_ids)
        self.cached_tokens += event.cached_tokens
        if event.finish is not None:
            self.finish, self.error, self.failure = event.finish, event.error, event.failure
            self.ttft_s, self.tpot_s = event.ttft_s, event.tpot_s
