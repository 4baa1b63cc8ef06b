"""One sequence on one model, token by token, through transformers' own forward and key-value cache."""

from __future__ import annotations

import time
from typing import Any

import torch

from .....actors.engine.serving.streams import SequenceRows
from .options import Context
from .replay import Replay


class Session:
    """Batch 1, greedy; each token is read by the host, as a server does that streams it.

    Args:
        engine: told of each forward; None for a model that runs its experts itself.
    """

    def __init__(self, model: Any, replay: Replay, context: Context, name: str, engine: Any = None) -> None:
        self._model, self._replay, self._context = model, replay, context
        self._name, self._engine = name, engine
        self._cache: Any = None
        self._next = 0
        self.position = 0

    def prefill(self, prompt: list[int]) -> None:
        """Run the prompt."""
        self._next = self._forward(torch.tensor([prompt], device=self._context.device), decode=False)

    def decode(self, tokens: int) -> float:
        """Run so many tokens; seconds for each."""
        self._context.synchronize()
        begin_s = time.perf_counter()
        for _ in range(tokens):
            self._next = self._forward(torch.tensor([[self._next]], device=self._context.device), decode=True)
        self._context.synchronize()
        return (time.perf_counter() - begin_s) / tokens

    def end(self) -> None:
        """The sequence is over."""
        self._cache = None
        if self._engine is not None:
            self._engine.end_sequence(self._name)

    @torch.no_grad()
    def _forward(self, ids: torch.Tensor, decode: bool) -> int:
        rows = ids.shape[1]
        self._replay.begin(self.position, rows)
        if self._engine is not None:
            self._engine.begin_forward([SequenceRows(self._name, 0, rows, decode)])
        out = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True)
        self._cache = out.past_key_values
        self.position += rows
        return int(out.logits[0, -1].argmax())
