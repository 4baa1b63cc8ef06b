"""One prompt's one choice: the runtime's events into text, up to a stop string, with log-probabilities beside it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from tokenizers import Tokenizer

from ...actors.requests import GenerationRequest, TokenEvent, TokenLogprob
from ...errors import RuntimeFailure, TierMoeError
from ..prompt import IncrementalText
from .backend import Backend
from .metrics import Metrics
from .stops import StopMatcher


@dataclass(frozen=True)
class ScoredToken:
    """A token's log-probability and where its text begins, in characters of the choice."""

    found: TokenLogprob
    offset: int


@dataclass(frozen=True)
class Delta:
    """What is new of a choice.

    Attributes:
        text: may be empty.
        scores: of the tokens whose text has been shown.
        prompt_scores: of the prompt's tokens from the second on; on the first delta.
        tokens: generated so far.
        finish: stop or length, on the last delta and only there.
    """

    text: str
    scores: tuple[ScoredToken, ...] = ()
    prompt_scores: tuple[TokenLogprob, ...] = ()
    tokens: int = 0
    finish: str | None = None


class ChoiceText:
    """Tokens into shown text: whole characters only, no part of a stop string, scores with the text they belong to."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], min_tokens: int = 0) -> None:
        self._text = IncrementalText(tokenizer)
        self._stops = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._decoded = self._shown = 0  # characters
        self._scores: list[ScoredToken] = []
        self.tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come."""
        return self._stops.matched is not None

    def add(self, event: TokenEvent) -> str:
        """The text that an event lets be shown; ends at a stop string."""
        shown = []
        for i, token in enumerate(event.token_ids):
            if event.logprobs:
                self._scores.append(ScoredToken(event.logprobs[i], self._decoded))
            self.tokens += 1
            shown.append(self._feed(self._text.add((token,))))
            if self.stopped:
                break
        return "".join(shown)

    def finish(self) -> str:
        """What is left when no more tokens come."""
        last = self._feed(self._text.finish())
        if self.stopped:
            return last
        rest = self._stops.finish()
        self._shown += len(rest)
        return last + rest

    def take_scores(self, *, last: bool) -> tuple[ScoredToken, ...]:
        """Those whose text has begun to be shown; all that are left where the choice ends by itself."""
        ready = [s for s in self._scores if (last and not self.stopped) or s.offset < self._shown]
        self._scores = self._scores[len(ready) :]
        return tuple(ready)

    def _feed(self, text: str) -> str:
        self._decoded += len(text)
        # below the minimal length a stop string is text like any other
        shown = self._stops.feed(text) if self.tokens >= self._min_tokens else self._stops.finish() + text
        self._shown += len(shown)
        return shown


async def run_choice(
    backend: Backend, request: GenerationRequest, text: ChoiceText, metrics: Metrics, arrived_s: float
) -> AsyncGenerator[Delta]:
    """Generate; closing it early cancels the request.

    Args:
        arrived_s: when the request came, on `time.perf_counter`.

    Raises:
        TierMoeError: the runtime refused or failed.
    """
    submitted_s = last_s = time.perf_counter()
    outcome = "abort"
    queue_s = 0.0
    try:
        async with aclosing(backend.generate(request)) as events:
            async for event in events:
                last_s = _measure(metrics, event, text.tokens, last_s, arrived_s)
                queue_s = event.queue_s or queue_s
                shown, finish = text.add(event), event.finish
                if finish in ("cancelled", "error"):
                    raise RuntimeFailure("the request was cancelled in the runtime", "send it again")
                if text.stopped:
                    finish = "stop"
                elif finish is not None:
                    shown += text.finish()
                    finish = "stop" if text.stopped else finish
                scores = text.take_scores(last=finish is not None)
                if shown or scores or event.prompt_logprobs or finish is not None:
                    yield Delta(shown, scores, event.prompt_logprobs, text.tokens, finish)
                if finish is not None:
                    outcome = finish
                    return
    except TierMoeError:
        outcome = "error"
        raise
    finally:
        queued_s = submitted_s - arrived_s + queue_s
        metrics.ended(outcome, time.perf_counter() - arrived_s, queued_s, len(request.prompt_ids), text.tokens)


def _measure(metrics: Metrics, event: TokenEvent, before: int, last_s: float, arrived_s: float) -> float:
    """Time to first token, and between tokens; when the last token came."""
    if not event.token_ids:
        return last_s
    now_s = time.perf_counter()
    if before == 0:
        metrics.first_token(now_s - arrived_s)
    else:
        metrics.next_tokens(now_s - last_s, len(event.token_ids))
    return now_s
