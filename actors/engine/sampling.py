"""Per-request sampling inside transformers' continuous batching: greedy, temperature, top-k, top-p, seeds.

The manager takes the argmax of the processed scores. A sampled row is turned into a one-hot row
here, so greedy and sampled requests share a batch, and a seeded request draws the same tokens
whatever else is in the batch: its n-th draw depends on (seed, n) alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.logits_process import LogitsProcessorList

from ..requests import SamplingParams
from .sequences import SequenceRows

Watch = Callable[[list[SequenceRows]], None]


def draw(logits: torch.Tensor, params: SamplingParams, seed: int, step: int) -> int:
    """One token of logits [V]: temperature, then top-k, then top-p, then inverse transform sampling.

    Tokens are ordered by probability, ties by number. The uniform variate is Philox(key=seed, counter=step).
    """
    scaled = (logits.double() - logits.max()) / params.temperature  # the largest is 0: no temperature overflows it
    probabilities, tokens = torch.softmax(scaled, dim=-1).sort(descending=True, stable=True)
    keep = probabilities.shape[0] if params.top_k == 0 else min(params.top_k, probabilities.shape[0])
    cumulative = probabilities[:keep].cumsum(0)
    if params.top_p < 1.0:
        # the smallest head whose mass reaches top_p of what top-k left
        keep = int(torch.searchsorted(cumulative, params.top_p * cumulative[-1]).item()) + 1
        cumulative = cumulative[:keep]
    uniform = np.random.Generator(np.random.Philox(key=seed, counter=step)).random()
    index = int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True).item())
    return int(tokens[min(index, cumulative.shape[0] - 1)])


def force_drawn(scores: torch.Tensor, params: SamplingParams, seed: int, step: int) -> None:
    """Draw from scores [V] and put all mass on the drawn token, in place: whoever takes the argmax takes it."""
    token = draw(scores, params, seed, step)
    scores.fill_(float("-inf"))
    scores[token] = 0.0


def seed_of(params: SamplingParams) -> int:
    """The request's seed, or a fresh one where it has none."""
    return params.seed if params.seed is not None else secrets.randbits(63)


class RequestSampler(ContinuousBatchingLogitsProcessor):
    """Applies each request's own `SamplingParams`, which travel with the request as `sampling` and `seed`."""

    supported_kwargs: dict[str, type] = {"sampling": SamplingParams, "seed": int}  # noqa: RUF012 (the base's form)
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._rows: list[tuple[SamplingParams, int, int] | None] = []
        self._sampled = False

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        self._rows = []
        for request in requests_with_new_token:
            kwargs = request.state.logit_processor_kwargs
            params = kwargs.get("sampling")
            if params is None or params.temperature == 0:
                self._rows.append(None)
            else:
                self._rows.append((params, kwargs["seed"], _drawn(request.state)))
        self._sampled = any(row is not None for row in self._rows)
        return torch.zeros(len(self._rows), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        if not self._sampled:
            return scores
        scores = scores.clone()
        for i, row in enumerate(self._rows):
            if row is not None:
                force_drawn(scores[i], *row)
        return scores


def _drawn(state: Any) -> int:
    """Tokens generated so far. A request that had to give up its KV cache carries the earlier ones in its prompt."""
    prompt = state._true_initial_tokens or len(state.initial_tokens)
    return len(state.initial_tokens) + len(state.generated_tokens) - prompt


class _Processors(ContinuousBatchingLogitsProcessorList):
    """The manager's processors; it shows them every batch just before the forward pass, which is told on."""

    def __init__(self, watch: Watch) -> None:
        super().__init__(LogitsProcessorList([RequestSampler()]))
        self.tensors_required = 1
        self._watch = watch

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: torch.Tensor) -> torch.Tensor:
        self._watch(_rows_of(requests_in_batch))
        return super().prepare_tensor_args(requests_in_batch, arg_storage)


def _rows_of(requests: list[Any]) -> list[SequenceRows]:
    rows, start = [], 0
    for request in requests:
        stop = start + request.query_length
        # One that gave up its KV cache is fed again with what it had generated as part of its prompt.
        rows.append(SequenceRows(request.state.request_id, start, stop, decode=bool(request.state.generated_tokens)))
        start = stop
    return rows


def request_sampling(watch: Watch) -> ContinuousBatchingLogitsProcessorList:
    """The processor list to give to a continuous batching manager.

    Args:
        watch: called before every forward pass with the rows that it will carry.
    """
    return _Processors(watch)
