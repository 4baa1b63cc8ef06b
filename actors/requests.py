"""Requests to a worker and its answers: frozen records, picklable, without tensors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Literal

from ..errors import RequestError, RuntimeFailure, TierMoeError, rebuilt

FinishReason = Literal["stop", "length", "cancelled", "error"]
MAX_LOGPROBS = 20  # likeliest tokens that one position may report
MAX_SEED = 2**64 - 1
MAX_STOP_TOKENS = 1024  # they are masked in each step before `min_tokens`
MAX_CACHE_SALT = 1024  # characters
# what a parameter may be: (least, most). Within these bounds the arithmetic of a step stays finite for finite scores.
BIAS = (-100, 100)
REPETITION = (0.01, 100)
PENALTY = (-2, 2)
MAX_TEMPERATURE = 100


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request.

    temperature 0 is greedy. With a seed, the draws of a request do not depend on what else is in the batch.
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

    def check(self, vocabulary: int | None = None, eos: Collection[int] = ()) -> None:
        """Refuse what would fail in a step, which carries other requests too. Every request passes here.

        Args:
            vocabulary: number of tokens that the model has; None: not known yet.
            eos: the model's own stop tokens.

        Raises:
            RequestError: a value is of another type or out of range; the message begins with the parameter's name.
        """
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            if not isinstance(value := getattr(self, name), Real) or isinstance(value, bool):
                raise RequestError(f"{name} is {value!r}", "give a number")
        optional = ("seed", "logprobs", "prompt_logprobs")
        for name in ("max_tokens", "top_k", "min_tokens", *optional):
            value = getattr(self, name)
            whole = isinstance(value, Integral) and not isinstance(value, bool)
            if not whole and not (value is None and name in optional):
                raise RequestError(f"{name} is {value!r}", "give a whole number")
        self._check_ranges()
        self._check_tokens(vocabulary, eos)

    def _check_ranges(self) -> None:
        least, most = REPETITION
        checks = [
            ("max_tokens", self.max_tokens >= 1, "ask for at least one token"),
            ("temperature", 0.0 <= self.temperature <= MAX_TEMPERATURE, f"give 0 (greedy) to {MAX_TEMPERATURE:g}"),
            ("top_p", 0.0 < self.top_p <= 1.0, "give a number above 0 and up to 1"),
            ("top_k", self.top_k >= 0, "give 0 for no limit or a positive number"),
            ("seed", self.seed is None or 0 <= self.seed <= MAX_SEED, "give a number from 0 to 2**64 - 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "give a number from 0 to max_tokens"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "give a number from 0 to 1"),
            ("repetition_penalty", least <= self.repetition_penalty <= most, f"give {least:g} to {most:g}, 1 for none"),
        ]
        for name in ("presence_penalty", "frequency_penalty"):
            fits = PENALTY[0] <= getattr(self, name) <= PENALTY[1]
            checks.append((name, fits, f"give {PENALTY[0]:g} to {PENALTY[1]:g}, 0 for none"))
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            checks.append((name, count is None or 0 <= count <= MAX_LOGPROBS, f"give 0 to {MAX_LOGPROBS}"))
        for name, fits, remedy in checks:
            if not fits:
                raise RequestError(f"{name} is {getattr(self, name)}", remedy)
        if self.grammar is not None and (self.ignore_eos or self.min_tokens):
            raise RequestError("a grammar says when the text ends", "leave ignore_eos and min_tokens out")

    def _check_tokens(self, vocabulary: int | None, eos: Collection[int]) -> None:
        least, most = BIAS
        if not all(isinstance(value, Real) and least <= value <= most for _, value in self.logit_bias):
            raise RequestError("logit_bias has a value out of range", f"give numbers from {least} to {most}")
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise RequestError(f"stop_token_ids are {len(self.stop_token_ids)}", f"give at most {MAX_STOP_TOKENS}")
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise RequestError("logit_bias names a token twice", "give one number for each token")
        if vocabulary is None:
            return
        for name, tokens in (("logit_bias", [token for token, _ in self.logit_bias]),
                             ("stop_token_ids", self.stop_token_ids)):  # fmt: skip
            if unknown := [token for token in tokens if not (isinstance(token, Integral) and 0 <= token < vocabulary)]:
                raise RequestError(
                    f"{name}: the model has no token {unknown[0]}", f"give ids from 0 to {vocabulary - 1}"
                )
        if self.min_tokens and len({*self.stop_token_ids, *eos}) >= vocabulary:
            raise RequestError("stop_token_ids name every token, and none may come before min_tokens",
                               "leave one of both out")  # fmt: skip


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt as token ids.

    generated: tokens that an earlier lead made of this request before it died. The request continues after them: they
    count as generated (in `max_tokens`, `min_tokens` and the draws of a seed) and are not sent again.
    read_prefix_cache: False: every token of the prompt runs, whatever the KV cache holds of earlier requests.
    cache_salt: the request shares KV cache pages with requests of the same salt only.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    generated: tuple[int, ...] = ()
    read_prefix_cache: bool = True
    cache_salt: str = ""

    def check(self, vocabulary: int | None = None, eos: Collection[int] = ()) -> None:
        """As `SamplingParams.check`, with the salt."""
        self.sampling.check(vocabulary, eos)
        if not isinstance(self.cache_salt, str) or len(self.cache_salt) > MAX_CACHE_SALT:
            raise RequestError("cache_salt is no text, or too long", f"give at most {MAX_CACHE_SALT} characters")

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
