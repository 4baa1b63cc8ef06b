"""What a request changes in its scores before its next token is picked: biases, penalties, a grammar.

All of it is a function of the prompt and of the tokens generated so far, so a request that is fed again (after its KV
cache was taken, or by another lead) goes on as it would have.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...requests import GenerationRequest
from .grammar import Grammars, Matcher


def processor_of(request: GenerationRequest, grammars: Grammars | None = None) -> LogitsProcessor | None:
    """The request's processor; None: it changes no score.

    Raises:
        RequestError: its grammar is refused.
    """
    params = request.sampling
    if params.grammar is not None:
        assert grammars is not None
        return LogitsProcessor(request, grammars.matcher(params.grammar))
    changes = (
        params.logit_bias or params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    )
    return LogitsProcessor(request) if changes else None


class LogitsProcessor:
    """One request's changes, in vLLM's order: logit bias, then repetition, frequency and presence penalties.

    The repetition penalty is for tokens of the prompt and generated ones (Keskar et al. 2019, CTRL); the others are for
    generated ones (OpenAI's). State: how often each token was generated, brought up to date with each call.

    Args:
        request: its prompt and parameters.
        matcher: of its grammar, applied last.
    """

    def __init__(self, request: GenerationRequest, matcher: Matcher | None = None) -> None:
        self._params, self._prompt, self._matcher = request.sampling, request.prompt_ids, matcher
        self._taken = 0  # generated tokens that the counts know
        self._counts = self._seen = self._places = self._bias = torch.empty(0)

    def __call__(self, scores: torch.Tensor, generated: Sequence[int]) -> torch.Tensor:
        """The changed scores [V] fp32, not in place. generated: all of the request's tokens so far."""
        params = self._params
        if not self._counts.numel():
            self._begin(scores)
        if new := generated[self._taken :]:
            places = torch.tensor(new, device=scores.device)
            self._counts.index_add_(0, places, torch.ones(len(new), device=scores.device))
            self._seen[places] = True
            if self._matcher is not None:
                self._matcher.consume(new)
            self._taken = len(generated)
        if params.logit_bias:
            scores = scores.index_add(0, self._places, self._bias)
        if params.repetition_penalty != 1.0:
            penalty = params.repetition_penalty
            scores = torch.where(self._seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
        if params.frequency_penalty or params.presence_penalty:
            scores = scores - params.frequency_penalty * self._counts - params.presence_penalty * (self._counts > 0)
        return scores if self._matcher is None else self._matcher.mask(scores)

    @property
    def error(self) -> str | None:
        """Why the request cannot go on; None: it can."""
        return None if self._matcher is None else self._matcher.error

    def _begin(self, scores: torch.Tensor) -> None:
        device, bias = scores.device, self._params.logit_bias
        self._counts = torch.zeros(scores.shape[0], device=device)  # [V]
        self._seen = torch.zeros(scores.shape[0], dtype=torch.bool, device=device)  # [V]
        self._seen[torch.tensor(self._prompt, device=device)] = True
        self._places = torch.tensor([token for token, _ in bias], dtype=torch.long, device=device)
        self._bias = torch.tensor([value for _, value in bias], device=device)
