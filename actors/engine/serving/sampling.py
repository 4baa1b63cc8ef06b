"""Per-request sampling inside transformers' continuous batching, and log-probabilities.

Sampling is greedy, or by temperature, top-k, top-p and seed. The manager takes the argmax of the processed scores, so a
sampled row becomes a one-hot row, and greedy and sampled requests share a batch. A seeded request's n-th draw depends
on (seed, n) alone.

The sampler reads the log-probabilities of generated tokens from the logits [V] before it changes them. The model
computes only the logits of rows that predict a next token; for a prompt's log-probabilities it is asked for the
prompt's rows too, which are removed from its answer. The logits are the model's own.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.logits_process import LogitsProcessorList

from ...requests import SamplingParams, TokenLogprob
from .streams import SequenceRows

Watch = Callable[[list[SequenceRows]], None]
Note = Callable[[str, int, TokenLogprob], None]  # (stream, place in the prompt or among the generated tokens, value)


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of the next forward whose predictions are wanted: row `start + i` predicts `tokens[i]`.

    place: of `tokens[0]` in the prompt. top: how many of the likeliest tokens to report.
    """

    name: str
    start: int
    tokens: tuple[int, ...]
    place: int
    top: int


def prompt_rows(
    name: str, prompt: Sequence[int], top: int | None, start: int, length: int, offset: int
) -> PromptRows | None:
    """The wanted rows of a chunk: forward rows [start, start + length) carry the prompt from `offset` on.

    None where no log-probabilities are wanted, or no prompt token follows a row.
    """
    tokens = tuple(prompt[offset + 1 : offset + length + 1])
    return PromptRows(name, start, tokens, offset + 1, top) if top is not None and tokens else None


def token_logprob(logits: torch.Tensor, token: int, top: int) -> TokenLogprob:
    """Of `token` at logits [V]; equal log-probabilities are listed by token id."""
    return token_logprobs(logits[None], [token], top)[0]


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Of one token for each row of logits [N, V], computed in fp32."""
    found = torch.log_softmax(logits.float(), -1)
    chosen = found[torch.arange(len(tokens)), torch.tensor(list(tokens), device=found.device)].tolist()
    if not top:
        return [TokenLogprob(token, value) for token, value in zip(tokens, chosen, strict=True)]
    values, ids = (part.tolist() for part in found.topk(min(top, found.shape[-1]), dim=-1))
    listed = [
        tuple(sorted(zip(row_ids, row_values, strict=True), key=lambda pair: (-pair[1], pair[0])))
        for row_ids, row_values in zip(ids, values, strict=True)
    ]
    return [TokenLogprob(*found) for found in zip(tokens, chosen, listed, strict=True)]


class PromptScorer:
    """Hooks on a causal language model that read the log-probabilities of prompts from its forward passes.

    Args:
        note: called with each value, on the forward's thread.
    """

    def __init__(self, model: Any, note: Note) -> None:
        self._note = note
        self._wanted: Sequence[PromptRows] = ()
        self._asked: int | None = None  # logits that the caller asked for, where the model computes no others
        self._hooks = (
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after),
        )

    def expect(self, wanted: Sequence[PromptRows]) -> None:
        """Set the wanted rows of the next forward."""
        self._wanted = wanted

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        keep = kwargs.get("logits_to_keep")
        if not self._wanted or keep is None or (isinstance(keep, int) and keep == 0):
            self._asked = None
            return None
        ids = kwargs["input_ids"]
        if isinstance(keep, int):
            keep = torch.arange(ids.shape[1] - keep, ids.shape[1], device=ids.device)
        self._asked = len(keep)
        return args, kwargs | {"logits_to_keep": torch.cat([keep, self._rows(keep)])}

    def _after(self, model: Any, args: tuple[Any, ...], out: Any) -> Any:
        if not self._wanted:
            return None
        logits = out.logits[0]  # [asked + wanted, V], or [T, V] where the model computes all
        extra = logits[self._asked :] if self._asked is not None else logits[self._rows(torch.empty(0).long())]
        for rows in self._wanted:
            part, extra = extra[: len(rows.tokens)], extra[len(rows.tokens) :]
            for i, found in enumerate(token_logprobs(part, rows.tokens, rows.top)):
                self._note(rows.name, rows.place + i, found)
        self._wanted = ()
        if self._asked is not None:
            out.logits = out.logits[:, : self._asked]
        return out

    def _rows(self, like: torch.Tensor) -> torch.Tensor:
        ranges = [torch.arange(rows.start, rows.start + len(rows.tokens)) for rows in self._wanted]
        return torch.cat(ranges).to(like)


Expect = Callable[[Sequence[PromptRows]], None]


def _ignore(*unused: object) -> None:
    return None


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


@dataclass(frozen=True, slots=True)
class Pick:
    """The `step`-th token (from 0) of stream `name`, to be picked by its request's parameters."""

    params: SamplingParams
    seed: int
    step: int
    name: str = ""

    @property
    def plain(self) -> bool:
        """Whether the argmax of the unchanged scores suffices."""
        params = self.params
        return params.temperature == 0 and params.logprobs is None and self.step >= params.min_tokens

    def force(self, scores: torch.Tensor, eos: Sequence[int], note: Note) -> None:
        """Pick from scores [V] and put all mass on the token, in place.

        Args:
            eos: tokens that may not come before `min_tokens`.
            note: called with the token's log-probability by the original scores, where the request wants it.
        """
        before = scores.clone() if self.params.logprobs is not None else scores
        if self.step < self.params.min_tokens and eos:
            scores[list(eos)] = float("-inf")
        greedy = self.params.temperature == 0
        token = int(scores.argmax()) if greedy else draw(scores, self.params, self.seed, self.step)
        if self.params.logprobs is not None:
            note(self.name, self.step, token_logprob(before, token, self.params.logprobs))
        scores.fill_(float("-inf"))
        scores[token] = 0.0


def seed_of(params: SamplingParams) -> int:
    """The request's seed, or a fresh one."""
    return params.seed if params.seed is not None else secrets.randbits(63)


class RequestSampler(ContinuousBatchingLogitsProcessor):
    """Applies each request's own `SamplingParams`, given with the request as `sampling` and `seed`.

    Args:
        eos: the model's stop tokens.
        note: takes log-probabilities; see `Pick.force`.
    """

    supported_kwargs: dict[str, type] = {"sampling": SamplingParams, "seed": int}  # noqa: RUF012 (the base's form)
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, eos: Sequence[int] = (), note: Note = _ignore) -> None:
        self._eos, self._note = tuple(eos), note
        self._rows: list[Pick | None] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        self._rows = []
        for request in requests_with_new_token:
            kwargs = request.state.logit_processor_kwargs
            params = kwargs.get("sampling")
            pick = None
            if params is not None:
                pick = Pick(params, kwargs["seed"], _drawn(request.state), getattr(request.state, "request_id", ""))
            self._rows.append(pick if pick is not None and not pick.plain else None)
        return torch.zeros(len(self._rows), dtype=torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        if not any(self._rows):
            return scores
        scores = scores.clone()
        for i, row in enumerate(self._rows):
            if row is not None:
                row.force(scores[i], self._eos, self._note)
        return scores


def _drawn(state: Any) -> int:
    """Tokens generated so far. After a loss of its KV cache a request's prompt includes the earlier ones."""
    prompt = state._true_initial_tokens or len(state.initial_tokens)
    return len(state.initial_tokens) + len(state.generated_tokens) - prompt


class _Processors(ContinuousBatchingLogitsProcessorList):
    """The manager's processors, which see every batch just before the forward pass, and call `watch` and `expect`."""

    def __init__(self, watch: Watch, sampler: RequestSampler, expect: Expect) -> None:
        super().__init__(LogitsProcessorList([sampler]))
        self.tensors_required = 1
        self._watch, self._expect = watch, expect

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: torch.Tensor) -> torch.Tensor:
        rows = _rows_of(requests_in_batch)
        self._watch(rows)
        self._expect(_prompt_rows_of(requests_in_batch, rows))
        return super().prepare_tensor_args(requests_in_batch, arg_storage)


def _rows_of(requests: list[Any]) -> list[SequenceRows]:
    rows, start = [], 0
    for request in requests:
        stop = start + request.query_length
        # One that gave up its KV cache is fed again with what it had generated as part of its prompt.
        rows.append(SequenceRows(request.state.request_id, start, stop, decode=bool(request.state.generated_tokens)))
        start = stop
    return rows


def _prompt_rows_of(requests: list[Any], rows: Sequence[SequenceRows]) -> list[PromptRows]:
    """The rows of a forward that predict prompt tokens with wanted log-probabilities."""
    found = []
    for request, place in zip(requests, rows, strict=True):
        state = request.state
        params = state.logit_processor_kwargs.get("sampling")
        if params is None or params.prompt_logprobs is None:
            continue
        prompt = state.initial_tokens[: state._true_initial_tokens or len(state.initial_tokens)]
        offset = state.position_offset - request.query_length  # the manager has moved it on by now
        wanted = prompt_rows(place.name, prompt, params.prompt_logprobs, place.start, request.query_length, offset)
        found += [wanted] if wanted is not None else []
    return found


def request_sampling(
    watch: Watch, eos: Sequence[int] = (), note: Note = _ignore, expect: Expect = _ignore
) -> ContinuousBatchingLogitsProcessorList:
    """The processor list for a continuous batching manager.

    Args:
        watch: called before every forward pass with its rows.
        eos: the model's stop tokens.
        note: takes the log-probabilities of generated tokens.
        expect: called before every forward pass with the rows that predict wanted prompt tokens.
    """
    return _Processors(watch, RequestSampler(eos, note), expect)
