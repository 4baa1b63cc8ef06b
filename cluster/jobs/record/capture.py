"""What a running model's routers see and say, one forward pass at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ....actors.engine.layer import MoeLayer
from ....actors.engine.model import RouterProbe
from ...simulate.trace_writer import Rows, TraceWriter
from .costs import CostMeter


class Capture:
    """Writes every forward of a model that serves one request at a time. Runs on the forward's thread.

    Probabilities are those of the router's linear part on the input of the layer's experts, softmaxed: what next-gate
    prefetch uses too. Where an architecture scores experts otherwise (sigmoids, groups, biases), `ids` are its choice
    all the same, and need not be the most probable ones.

    Use as a context manager while no request is in flight; the layers are as before when it ends.

    Attributes:
        rows: forward rows written of the request that began last.
        error: what was raised on the forward's thread; the request that it struck has failed.
    """

    def __init__(
        self, model: Any, layers: Sequence[MoeLayer], routers: Sequence[RouterProbe], top_k: int, writer: TraceWriter
    ) -> None:
        self._layers, self._routers, self._top_k, self._writer = layers, routers, top_k, writer
        self._distances = writer.header.distances
        self._embedding = model.get_input_embeddings()
        self._parts: list[tuple[NDArray[Any], ...]] = []
        self._tokens = np.empty(0, np.int32)
        self._prompt_tokens = 0
        self.rows = 0
        self.error: BaseException | None = None
        self.costs = CostMeter(len(layers))

    def begin(self, prompt: Sequence[int]) -> None:
        """The next request, before it is submitted."""
        self._prompt_tokens, self.rows = len(prompt), 0
        self._writer.begin(prompt)

    def __enter__(self) -> Capture:
        self._hook = self._embedding.register_forward_pre_hook(self._see_tokens)
        for layer in self._layers:
            layer.forward = self._watched(layer, layer.forward)  # type: ignore[method-assign]
        return self

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()
        for layer in self._layers:
            del layer.forward  # the class's own again

    def _see_tokens(self, module: Any, args: tuple[Any, ...]) -> None:
        self._tokens, self._parts = args[0].detach().cpu().numpy().ravel().astype(np.int32), []

    def _watched(self, layer: MoeLayer, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            stats = layer.stats
            blocked_s, start_s = stats.blocked_io_s, time.perf_counter()
            out = forward(hidden, ids, weights)
            end_s = time.perf_counter()
            spent_s = end_s - start_s - (stats.blocked_io_s - blocked_s)
            try:
                experts = self._record(layer.index, hidden, ids, weights)
            except BaseException as error:
                self.error = error
                raise
            self.costs.layer(layer.index, hidden.shape[0], experts, ids.numel(), start_s, spent_s)
            return out

        return run

    @torch.no_grad()
    def _record(self, index: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> int:
        """Gather one layer, and write the forward after the last; the number of distinct experts."""
        rows, experts = hidden.shape[0], self._writer.header.experts
        next_ids = np.zeros((rows, self._distances, self._top_k), np.int64)
        next_probabilities = np.zeros((rows, self._distances, self._top_k), np.float32)
        for d in range(1, self._distances + 1):
            later = self._probabilities((index + d) % len(self._layers), hidden)  # past the last: of the next forward
            picked = np.argsort(-later, axis=1, kind="stable")[:, : self._top_k]
            next_ids[:, d - 1], next_probabilities[:, d - 1] = picked, np.take_along_axis(later, picked, axis=1)
        chosen = ids.cpu().numpy()
        self._parts.append(
            (self._probabilities(index, hidden), chosen, weights.float().cpu().numpy(), next_ids, next_probabilities)
        )
        if index == len(self._layers) - 1:
            self._write()
        return int(np.count_nonzero(np.bincount(chosen.ravel(), minlength=experts)))

    def _write(self) -> None:
        if any(len(part[0]) != len(self._tokens) for part in self._parts) or len(self._parts) != len(self._layers):
            raise RuntimeError(f"a forward of {len(self._tokens)} tokens had other rows in a layer")
        stacked = [np.stack(arrays, axis=1) for arrays in zip(*self._parts, strict=True)]
        self._writer.add(Rows(self._tokens, *stacked), decode=self.rows >= self._prompt_tokens)
        self.rows += len(self._tokens)

    def _probabilities(self, layer: int, hidden: torch.Tensor) -> NDArray[np.float32]:
        found: NDArray[np.float32] = torch.softmax(self._routers[layer](hidden).float(), dim=-1).cpu().numpy()
        return found
