"""The next token of each request, by its own parameters, and log-probabilities.

Sampling is greedy, or by temperature, min-p, top-k, top-p and seed; greedy and sampled requests share a batch. A seeded
request's n-th draw depends on (seed, n) alone. What a request changes in its scores before that is in `logits`.

The sampler reads the log-probabilities of generated tokens from the logits [V] before it changes them. The model
computes only the logits of rows that predict a next token; for a prompt's log-probabilities it is asked for the
prompt's rows too, which are removed from its answer. The logits are the model's own.

A row whose token cannot be picked, or whose prompt cannot be scored, fails alone: the step's other rows get theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ....errors import CheckpointError, RequestError
from ....kernels import _cpu
from ...requests import SamplingParams, TokenLogprob
from .streams import Stream

Read = Callable[[Sequence[torch.Tensor]], Sequence[NDArray[Any]]]
Note = Callable[[str, int, TokenLogprob], None]  # (stream, place in the prompt or among the generated tokens, value)
_SCORED = 256  # rows of a prompt whose log-probabilities [rows, V] are in memory together, in float32
_MOST_TOP_K = 1 << 31  # no vocabulary has as many
_LEAST_TEMPERATURE = 1e-30  # a lower one gives the same tokens, and may be rounded to 0


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
    """Reads the log-probabilities of prompts from the forward passes of a causal language model.

    The model has hooks during a forward with wanted rows, and none during others, which they would slow down.

    Args:
        note: called with each value, on the forward's thread.

    Attributes:
        failed: called with a stream whose prompt could not be scored, and why; None: the forward fails.
    """

    def __init__(self, model: Any, note: Note) -> None:
        self._model, self._note = model, note
        self.failed: Callable[[str, BaseException], None] | None = None
        self._wanted: Sequence[PromptRows] = ()
        self._asked: int | None = None  # logits that the caller asked for, where the model computes no others
        self._hooks: list[Any] = []

    def expect(self, wanted: Sequence[PromptRows]) -> None:
        """Set the wanted rows of the next forward."""
        self.close()  # those of a forward that failed
        self._wanted = wanted
        if wanted:
            self._hooks = [
                self._model.register_forward_pre_hook(self._before, with_kwargs=True),
                self._model.register_forward_hook(self._after),
            ]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        keep = kwargs.get("logits_to_keep")
        if keep is None or (isinstance(keep, int) and keep == 0):
            self._asked = None
            return None
        ids = kwargs["input_ids"]
        if isinstance(keep, int):
            keep = torch.arange(ids.shape[1] - keep, ids.shape[1], device=ids.device)
        self._asked = len(keep)
        return args, kwargs | {"logits_to_keep": torch.cat([keep, self._rows(keep)])}

    def _after(self, model: Any, args: tuple[Any, ...], out: Any) -> Any:
        logits = out.logits[0]  # [asked + wanted, V], or [T, V] where the model computes all
        extra = logits[self._asked :] if self._asked is not None else logits[self._rows(torch.empty(0).long())]
        for rows in self._wanted:
            part, extra = extra[: len(rows.tokens)], extra[len(rows.tokens) :]
            try:
                for at in range(0, len(rows.tokens), _SCORED):
                    some = slice(at, at + _SCORED)
                    for i, found in enumerate(token_logprobs(part[some], rows.tokens[some], rows.top), at):
                        self._note(rows.name, rows.place + i, found)
            except BaseException as error:
                if self.failed is None:
                    raise
                self.failed(rows.name, error)
        self.close()
        if self._asked is not None:
            out.logits = out.logits[:, : self._asked]
        return out

    def _rows(self, like: torch.Tensor) -> torch.Tensor:
        ranges = [torch.arange(rows.start, rows.start + len(rows.tokens)) for rows in self._wanted]
        return torch.cat(ranges).to(like)


def to_host(tensors: Sequence[torch.Tensor]) -> list[NDArray[Any]]:
    """Their numbers, each with a copy of its own."""
    return [tensor.cpu().numpy() for tensor in tensors]


def draw(logits: torch.Tensor, params: SamplingParams, seed: int, step: int) -> int | None:
    """One token of logits [V]: temperature, then min-p, top-k and top-p, then inverse transform sampling.

    Tokens stand in the order of their numbers. The uniform variate is 1 - Philox(key=seed, counter=step), in (0, 1].
    None: the largest logit is not finite, or one is not a number, so that the mass of the tokens is not a number. The
    host reads the token and the mass in one copy.
    """
    if logits.device.type == "cpu":
        (token,) = _draw_rows(logits[None], [_asked(0, params, seed, step)])
        return None if token < 0 else token
    uniform = 1.0 - np.random.Generator(np.random.Philox(key=seed, counter=step)).random()
    # the largest score becomes 0: no temperature overflows it
    weights = torch.exp((logits.double() - logits.max()) / max(params.temperature, _LEAST_TEMPERATURE))
    if params.min_p > 0.0 or params.top_k or params.top_p < 1.0:
        cut(weights, params)
    mass = weights.cumsum(0)
    found, whole = torch.stack((torch.searchsorted(mass, uniform * mass[-1]).double(), mass[-1])).tolist()
    return int(found) if math.isfinite(whole) else None


_Asked = tuple[int, float, float, int, float, int, int]  # as `_cpu.draw_rows` takes it


def _asked(row: int, params: SamplingParams, seed: int, step: int) -> _Asked:
    temperature = max(params.temperature, _LEAST_TEMPERATURE)
    return row, temperature, params.min_p, min(params.top_k or 0, _MOST_TOP_K), params.top_p, seed, step


def _draw_rows(logits: torch.Tensor, asked: list[_Asked]) -> list[int]:
    """Tokens of rows of logits [N, V] on the host, as `draw`; -1: none."""
    rows = logits.detach().float().contiguous()
    return _cpu.draw_rows(rows.data_ptr(), len(rows), rows.shape[1], asked)


def largest(logits: torch.Tensor) -> int | None:
    """The first of the largest of logits [V]; None: it is not finite, or one is not a number. One copy to the host."""
    if logits.device.type == "cpu":
        (found,), (score,) = _argmax(logits[None, None], 1, to_host)
    else:
        found, score = torch.stack((logits.argmax().double(), logits.max().double())).tolist()
    return int(found) if math.isfinite(score) else None


def cut(weights: torch.Tensor, params: SamplingParams) -> None:
    """Set the weights [V] of tokens that may not come to 0, in place; the largest is 1. Of equal ones the first stay.

    Only tokens that may stay are sorted: sorting a vocabulary of 150,000 takes longer than a layer.
    """
    head = weights[weights >= params.min_p]
    if not len(head):  # they are no numbers
        return
    if params.top_k:
        head = head.topk(min(params.top_k, len(head))).values
    if params.top_p < 1.0:
        # the smallest head whose mass reaches top_p of what is left; all below `least` together have less than the rest
        total = head.sum()
        least = (1.0 - params.top_p) * total / len(head)
        head = head[head >= least].sort(descending=True).values
        head = head[: int(torch.searchsorted(head.cumsum(0), params.top_p * total)) + 1]
    last = head.min()
    surplus = (weights == last).nonzero()[int((head == last).sum()) :, 0]
    weights[weights < last] = 0.0
    weights[surplus] = 0.0


@dataclass(frozen=True, slots=True)
class Pick:
    """The `step`-th token (from 0) of stream `name`, to be picked by its request's parameters.

    process: changes its scores [V], not in place.
    """

    params: SamplingParams
    seed: int
    step: int
    name: str
    process: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def is_drawn(self) -> bool:
        """Whether it is drawn from the scores as they are, and nothing else is wanted of them."""
        params = self.params
        return (
            self.process is None
            and params.logprobs is None
            and params.temperature > 0
            and self.step >= params.min_tokens
        )

    def token(self, scores: torch.Tensor, eos: Sequence[int], note: Note) -> int:
        """Pick from scores [V].

        Args:
            eos: tokens that may not come before `min_tokens`.
            note: called with the token's log-probability by `scores`, where the request wants it.

        Raises:
            RequestError: no token has a finite score once the request's parameters have changed them.
            CheckpointError: none had one before, either.
        """
        open_ = scores if self.process is None else self.process(scores)
        stops = [*eos, *self.params.stop_token_ids]
        if self.step < self.params.min_tokens and stops:
            open_ = open_.clone()
            open_[stops] = float("-inf")
        greedy = self.params.temperature == 0
        token = largest(open_) if greedy else draw(open_, self.params, self.seed, self.step)
        if token is None:
            refuse_unbounded(scores)
            raise RequestError("the request's parameters leave no token that may come next", "change or leave them out")
        if self.params.logprobs is not None:
            note(self.name, self.step, token_logprob(scores, token, self.params.logprobs))
        return token


def pick_of(stream: Stream | None, accepted: Sequence[int] = ()) -> Pick | None:
    """How the next token of a stream is picked; None: by the argmax of the scores, as for one that has ended.

    accepted: tokens of this step before it.
    """
    if stream is None:
        return None
    params, processor, step = stream.request.sampling, stream.processor, len(stream.generated) + len(accepted)
    if processor is None:
        if params.temperature == 0 and params.logprobs is None and step >= params.min_tokens:
            return None
        return Pick(params, stream.seed, step, stream.name)
    generated = [*stream.generated, *accepted] if accepted else stream.generated
    return Pick(params, stream.seed, step, stream.name, lambda scores: processor(scores, generated))


def refuse_unbounded(scores: torch.Tensor) -> None:
    """Refuse scores [V] of a model without a finite largest one.

    Raises:
        CheckpointError: they are not numbers, or infinite.
    """
    if not math.isfinite(float(scores.max())):
        raise _unbounded()


def _unbounded() -> CheckpointError:
    return CheckpointError(
        "the model gives no finite score for the next token", "check its weights, or run it with dtype: float32"
    )


def verified_tokens(
    logits: torch.Tensor, streams: Sequence[Stream | None], drafts: Sequence[Sequence[int]], eos: Sequence[int],
    note: Note, failed: Callable[[int, BaseException], None], read: Read = to_host,
) -> tuple[list[int], list[int]]:  # fmt: skip
    """The next token of each request behind the drafts that it accepts, and how many these are; see `Pick.token`.

    A draft is accepted if it is the token that the request's parameters pick there, so the tokens are those of a run
    without drafts, also where they are sampled: a draw depends on the seed and on the token's number.

    Args:
        logits: [1, N, V]; of each request the row of its last token, and one for each of its drafts; then others.
        drafts: of each request; they may be none, of one or of all.
        failed: called with a request that gets no token, and why; its place in the result means nothing.
        read: brings tensors of a GPU to the host.
    """
    rows, firsts = len(drafts) + sum(map(len, drafts)), [pick_of(stream) for stream in streams]
    drawn = _drawn(logits, firsts) if rows == len(drafts) and logits.device.type == "cpu" else {}
    best, scores = _argmax(logits, rows, read) if len(drawn) < rows else ([], [])
    tokens, lengths, row = list[int](), list[int](), 0
    for i, (stream, draft) in enumerate(zip(streams, drafts, strict=True)):
        accepted, token = list[int](), 0
        for place in range(len(draft) + 1):
            at = row + place
            pick = pick_of(stream, accepted) if accepted else firsts[i]
            try:
                if at in drawn:
                    token = drawn[at]
                elif pick is not None:
                    token = pick.token(logits[0, at].float(), eos, note)
                elif math.isfinite(scores[at]):
                    token = best[at]
                else:
                    raise _unbounded()
            except BaseException as error:  # a grammar's library may panic, which is no `Exception`
                if not accepted:
                    failed(i, error)
                else:  # the tokens before it came; the next step fails
                    token = accepted.pop()
                break
            if place == len(draft) or token != draft[place] or (stream is not None and token in stream.stops):
                break
            accepted.append(token)
        tokens.append(token)
        lengths.append(len(accepted))
        row += len(draft) + 1
    return tokens, lengths


def _drawn(logits: torch.Tensor, picks: Sequence[Pick | None]) -> dict[int, int]:
    """Tokens of the rows of logits [1, N, V] on the host that are drawn as they are, by row, in one call. A row without
    a token is left out, and so are all where one fails: by itself each is drawn again, so that it fails alone.
    """
    try:
        asked = [
            _asked(row, pick.params, pick.seed, pick.step)
            for row, pick in enumerate(picks)
            if pick is not None and pick.is_drawn
        ]
        found = _draw_rows(logits[0], asked) if asked else []
    except Exception:
        return {}
    return {of[0]: token for of, token in zip(asked, found, strict=True) if token >= 0}


def _argmax(logits: torch.Tensor, rows: int, read: Read) -> tuple[list[int], list[float]]:
    """Of each of the first rows of logits [1, N, V]: the first of the largest, as torch's, and its score.

    The score is infinite or not a number where the row has no finite largest one.
    """
    if logits.device.type != "cpu":
        return _argmax_in_one_read(logits[0, :rows], read)
    logits = logits.detach().float().contiguous()
    tokens = _cpu.argmax_rows(logits.data_ptr(), rows, logits.shape[-1])  # torch's own is slower on a CPU
    scores = logits.numpy()
    return tokens, [float(scores[0, i, token]) for i, token in enumerate(tokens)]


def _argmax_in_one_read(logits: torch.Tensor, read: Read) -> tuple[list[int], list[float]]:
    """`_argmax` of logits [N, V]."""
    found = logits.float().max(-1)
    tokens, scores = read((found.indices, found.values))
    return tokens.tolist(), scores.tolist()
