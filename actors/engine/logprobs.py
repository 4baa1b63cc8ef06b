"""Log-probabilities of what is generated, and of a prompt while it is prefilled.

Generated tokens: the sampler sees the logits [V] of each, before it changes them. Prompts: the model computes logits of
the rows that predict a next token only, so for a request that wants its prompt's, it is asked for those rows too, and
they are taken off its answer before anyone else sees it. The logits are the model's own, with whatever it does to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..requests import TokenLogprob

NotePrompt = Callable[[str, int, TokenLogprob], None]  # (stream, place in the prompt, what was found)


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

    None where nothing is asked for, or the chunk holds no token that another prompt token follows.
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
    """Hooks on a model that take the log-probabilities of prompts out of its forward passes.

    Args:
        model: a transformers causal language model.
        note: told each value found, on the forward's thread.
    """

    def __init__(self, model: Any, note: NotePrompt) -> None:
        self._note = note
        self._wanted: Sequence[PromptRows] = ()
        self._kept: int | None = None  # logits that the caller asked for, where the model computes no others
        self._hooks = (
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after),
        )

    def expect(self, wanted: Sequence[PromptRows]) -> None:
        """The next forward carries these rows."""
        self._wanted = wanted

    def close(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        keep = kwargs.get("logits_to_keep")
        if not self._wanted or keep is None or (isinstance(keep, int) and keep == 0):
            self._kept = None
            return None
        ids = kwargs["input_ids"]
        if isinstance(keep, int):
            keep = torch.arange(ids.shape[1] - keep, ids.shape[1], device=ids.device)
        self._kept = len(keep)
        return args, kwargs | {"logits_to_keep": torch.cat([keep, self._rows(keep)])}

    def _after(self, model: Any, args: tuple[Any, ...], out: Any) -> Any:
        if not self._wanted:
            return None
        logits = out.logits[0]  # [kept + wanted, V], or [T, V] where the model computes all
        extra = logits[self._kept :] if self._kept is not None else logits[self._rows(torch.empty(0).long())]
        for rows in self._wanted:
            part, extra = extra[: len(rows.tokens)], extra[len(rows.tokens) :]
            for i, found in enumerate(token_logprobs(part, rows.tokens, rows.top)):
                self._note(rows.name, rows.place + i, found)
        self._wanted = ()
        if self._kept is not None:
            out.logits = out.logits[:, : self._kept]
        return out

    def _rows(self, like: torch.Tensor) -> torch.Tensor:
        ranges = [torch.arange(rows.start, rows.start + len(rows.tokens)) for rows in self._wanted]
        return torch.cat(ranges).to(like)
