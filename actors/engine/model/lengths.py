"""Rotary embeddings whose numbers depend on a sequence's length: each row has those of its own sequence.

transformers takes the length from the forward: the largest position of the batch, plus one. With `longrope` it chooses
between two sets of frequencies (and Phi-MoE's scales), with `dynamic` it computes frequencies and keeps them for later
forwards. In a batch, the rows of one request would get the numbers of another's length.

A request that runs alone feeds its prompt in one forward and then a token at a time. So the length that the row at
position p of a request with a prompt of P tokens belongs to is

    s = max(P, p + 1)

whatever else the forward carries, and also where the prompt comes in chunks, or with tokens that were generated before.
Rows are grouped by what s makes of the numbers (the regime), and the model's own module runs once a group, with a
position s - 1 added. It begins each time as it was made, so that no call leaves anything to the next.

Some models feed the whole sequence again when a length is passed (`prepare_inputs_for_generation` of Phi-MoE drops the
cache there): from then on P is that length.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from .state import State

_KEPT = "tiermoe_lengths"  # attribute of a model


class SequenceLengths:
    """The modules of one model that depend on a sequence's length.

    Attributes:
        any: whether there is such a module; without one nothing here does anything.
        positions: that the model was made for; `dynamic` embeddings go on by their factor. None: no limit.
    """

    def __init__(self, model: Any) -> None:
        self._borders: list[int] = []  # a length above one of them is of another regime, in order
        self._grows_from: int | None = None  # each length above is a regime of its own
        self._stretch = 1.0
        self._prompts: np.ndarray[Any, Any] | None = None  # P of each row of the forward
        self._several = False
        self._vocabulary = 0
        modules = [module for module in model.modules() if self._take(module)]
        self.any = bool(modules)
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.positions = int(positions * self._stretch) if isinstance(positions, int) and positions > 0 else None
        self._anew = self._find_anew(model) if modules else None
        if modules:
            self._vocabulary = int(model.get_input_embeddings().weight.shape[0])
        for module in modules:
            self._replace(module)

    def _take(self, module: nn.Module) -> bool:
        """Note the regimes of a rotary embedding; False: its numbers do not depend on the length, or it is none."""
        kinds, found = getattr(module, "rope_type", None), False
        if "position_ids" not in inspect.signature(type(module).forward).parameters:
            return False
        for layer_type, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            if not isinstance(kind, str):
                continue
            if kind != "longrope" and "dynamic" not in kind:
                continue
            options: Any = module.config.rope_parameters
            options = options if layer_type is None else options[layer_type]
            if kind == "longrope":
                self._borders = sorted({*self._borders, int(options["original_max_position_embeddings"])})
            else:
                limit = int(module.original_max_seq_len)
                self._grows_from = min(limit, self._grows_from or limit)
                self._stretch = max(self._stretch, float(options.get("factor") or 1.0))
            found = True
        return found

    def _find_anew(self, model: Any) -> int | None:
        """The length with which `generate` drops its cache and feeds the whole sequence again; None: it never does."""
        from transformers import DynamicCache, GenerationMixin

        if type(model).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation:
            return None
        for border in self._borders:
            cache = DynamicCache()
            cache.update(torch.zeros(1, 1, border, 1), torch.zeros(1, 1, border, 1), 0)
            ids = torch.zeros(1, border + 1, dtype=torch.long, device=model.device)
            made = model.prepare_inputs_for_generation(
                ids, past_key_values=cache, attention_mask=torch.ones_like(ids), next_sequence_length=1, use_cache=True
            )
            if made["input_ids"].shape[1] > 1:
                return border + 1
        return None

    def prompt_of(self, prompt: int, tokens: int) -> int:
        """P of a request whose prompt has `prompt` tokens, in a forward that ends with its token number `tokens`."""
        return prompt if self._anew is None or tokens < self._anew else max(prompt, self._anew)

    def anew_in(self, prompt: int, tokens: int) -> int | None:
        """The number of the token after the prompt that changes P, so that all tokens are fed again, or None."""
        return self._anew if self._anew is not None and prompt < self._anew <= tokens else None

    def keys(self, tokens: Sequence[int], prompt: int) -> list[int]:
        """For the prefix cache: the tokens of a request from its first on, each with the regime of its row.

        Those of a `dynamic` regime are left out, with all that follow: hardly two requests have one in common.
        """
        if not self.any:
            return list(tokens)
        regimes = [self._regime(max(prompt, at + 1)) for at in range(len(tokens))]
        ends = next((at for at, regime in enumerate(regimes) if regime > len(self._borders)), len(tokens))
        return [token + self._vocabulary * regime for token, regime in zip(tokens[:ends], regimes, strict=False)]

    def _regime(self, length: int) -> int:
        """A number for each set of rotary embeddings: of borders passed, or, above all of those, of a length."""
        if self._grows_from is not None and length > self._grows_from:
            return len(self._borders) + length
        return bisect_left(self._borders, length)

    @contextmanager
    def of(self, sequences: Sequence[tuple[int, int]]) -> Iterator[None]:
        """The forwards in this context carry these sequences side by side: (rows, P)."""
        if self.any:
            self.expect(sequences)
        try:
            yield
        finally:
            self._prompts = None

    def expect(self, sequences: Sequence[tuple[int, int]]) -> None:
        """The next forwards carry these sequences; in a context of `of`."""
        if self.any:
            rows, prompts = zip(*sequences, strict=True)
            self._prompts, self._several = np.repeat(prompts, rows), len(rows) > 1

    def _replace(self, module: nn.Module) -> None:
        """Have a module run once for each regime of a forward."""
        plain = module.forward

        def alone(x: torch.Tensor, positions: torch.Tensor, length: int, *args: Any, **kwargs: Any) -> Any:
            """The rotary embeddings of these positions in a sequence of `length` tokens."""
            last = positions.new_full((*positions.shape[:-1], 1), length - 1)
            try:
                found = plain(x, torch.cat([positions, last], -1), *args, **kwargs)
            finally:
                state.reset()
            return _rows_of(found, slice(0, positions.shape[-1]))

        def forward(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            prompts = self._prompts
            ends = position_ids.reshape(-1, position_ids.shape[-1])[0].cpu().numpy() + 1
            if prompts is None or ends.shape != prompts.shape:  # of one sequence; or not of its rows
                if prompts is not None and self._several:
                    raise ValueError("its rotary embeddings are of other positions than its rows'")
                try:
                    return plain(x, position_ids, *args, **kwargs)
                finally:
                    state.reset()
            lengths = np.maximum(prompts, ends)
            regimes = {int(length): self._regime(int(length)) for length in np.unique(lengths)}
            longest = {regime: length for length, regime in regimes.items()}  # any length of a regime will do
            if len(longest) == 1:
                return alone(x, position_ids, *longest.values(), *args, **kwargs)
            order, parts = [], []
            for regime, length in longest.items():
                rows = [at for at, own in enumerate(lengths.tolist()) if regimes[own] == regime]
                at = torch.tensor(rows, device=position_ids.device)
                parts.append(alone(x, position_ids.index_select(-1, at), length, *args, **kwargs))
                order += rows
            back = torch.from_numpy(np.argsort(order)).to(position_ids.device)
            return _joined(parts, back)

        module.forward = forward
        state = State(module, shared=False)


def lengths_of(model: Any) -> SequenceLengths:
    """Those of a model, found once."""
    found = vars(model).get(_KEPT)
    if found is None:
        found = vars(model)[_KEPT] = SequenceLengths(model)
    return found


def _rows_of(embeddings: Any, rows: Any) -> Any:
    """Some rows of rotary embeddings: tensors [..., rows, D], or a tuple of such."""
    if isinstance(embeddings, torch.Tensor):
        return embeddings[..., rows, :]
    return type(embeddings)(_rows_of(part, rows) for part in embeddings)


def _joined(parts: Sequence[Any], order: torch.Tensor) -> Any:
    """Rotary embeddings of groups of rows, in this order of all."""
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(list(parts), -2).index_select(-2, order)
    return type(parts[0])(_joined(each, order) for each in zip(*parts, strict=True))
