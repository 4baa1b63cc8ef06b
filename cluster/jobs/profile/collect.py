"""Runs calibration text through the full-precision model and keeps sums only: routing, and products of outputs.

In place of each MoE layer's experts stands a `LayerProfiler`. It answers in full precision, one expert at a time from
the store's mapped file, as `prepare/capture.py` does; nothing of the activations outlives a forward. On a sample of
the tokens it runs all experts and takes their products, in blocks of at most `BLOCK_BYTES` of outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ....actors.engine.model import MoeBlock
from ....actors.engine.operator import attach, detach
from ....actors.engine.pool import LayerWeights
from ....actors.policies.buddies import renormalised, warmup_weights
from ....actors.policies.expert_profile import ExpertProfile, Outputs, RoutingCounts
from ....kernels.expert_ffn import Operands, TorchKernel
from ..prepare.calibration import Windows
from .options import ProfileOptions

BLOCK_BYTES = 256 << 20
_ROWS_PER_FORWARD = 2048
State = dict[str, NDArray[np.float64]]


class Experts:
    """One layer's experts in float32, made one at a time from the mapped weights."""

    def __init__(self, block: MoeBlock, weights: LayerWeights) -> None:
        self._block, self._weights = block, weights
        self.count, self.neurons = weights.tensors[0].shape[:2]

    def kernel(self, expert: int) -> TorchKernel:
        """Runs that expert, as slot 0."""
        gate_up, down, *biases = (t[expert : expert + 1].float() for t in self._weights.tensors)
        gate_up_bias, down_bias = biases if biases else (None, None)
        return TorchKernel(Operands(gate_up, down, gate_up_bias, down_bias), self._block.gate)

    def post(self, y: torch.Tensor) -> torch.Tensor:
        """What the module does to each expert's output."""
        out: torch.Tensor = y if self._block.post is None else self._block.post(y)
        return out


class OutputSums:
    """Products of one layer's expert outputs; see `Outputs`.

    Attributes:
        dots, norms: float64 [E, E].
    """

    def __init__(self, experts: int, hidden: int) -> None:
        self.dots = torch.zeros(experts, experts, dtype=torch.float64)
        self.norms = torch.zeros(experts, experts, dtype=torch.float64)
        self.rows = max(1, BLOCK_BYTES // (4 * experts * hidden))

    def add(self, y: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """y [n, E, H] of all experts; ids [n, K] and routing weights [n, K] of the picked ones."""
        picked = y.gather(1, ids.unsqueeze(2).expand(-1, -1, y.shape[2]))  # [n, K, H]
        squares = weights.double().square().unsqueeze(2)  # [n, K, 1]
        dots = torch.bmm(picked, y.transpose(1, 2)).double() * squares  # [n, K, E]
        norms = y.square().sum(2).double().unsqueeze(1) * squares
        self.dots.index_add_(0, ids.reshape(-1), dots.reshape(-1, y.shape[1]))
        self.norms.index_add_(0, ids.reshape(-1), norms.reshape(-1, y.shape[1]))


class LayerProfiler:
    """In place of one MoE layer's experts.

    Args:
        sampled: rows of the running forward on which all experts are run; set before each.
        token_weights: how much each row of the running forward counts.
    """

    def __init__(self, experts: Experts, hidden: int) -> None:
        self._experts = experts
        self.routing = RoutingCounts(experts.count)
        self.outputs = OutputSums(experts.count, hidden)
        self.sampled: torch.Tensor = torch.zeros(0, dtype=torch.int64)
        self.token_weights: NDArray[np.float64] = np.zeros(0)

    @torch.no_grad()
    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [T, H], ids [T, K], weights [T, K] -> [T, H]."""
        shares = renormalised(weights.float().numpy())
        self.routing.add(ids.numpy(), shares, self.token_weights)
        for rows in self.sampled.split(self.outputs.rows):
            self.outputs.add(self._all(hidden[rows]), ids[rows], weights[rows])
        return self._picked(hidden, ids, weights)

    def sums(self) -> State:
        """What it has summed so far, in place: whoever writes to the arrays changes the sums."""
        pairs, outputs = self.routing.pairs, self.outputs
        return {
            "activations": pairs.activations,
            "binary": pairs.binary,
            "weighted": pairs.weighted,
            "entropies": self.routing.entropies,
            "dots": outputs.dots.numpy(),
            "norms": outputs.norms.numpy(),
        }

    def _all(self, hidden: torch.Tensor) -> torch.Tensor:
        """Outputs of every expert [n, E, H]."""
        count, width = hidden.shape
        y = torch.empty(count, self._experts.count, width)
        rows, out = torch.arange(count), torch.empty(count, width)
        for expert in range(self._experts.count):
            group = (0, count, 0, self._experts.neurons, False)
            self._experts.kernel(expert).run(hidden.float(), rows, [group], 1, out)
            y[:, expert] = self._experts.post(out)
        return y

    def _picked(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        pairs = ids.reshape(-1).argsort(stable=True)
        y = torch.empty(len(pairs), hidden.shape[1])
        start = 0
        for expert, count in enumerate(ids.reshape(-1).bincount(minlength=self._experts.count).tolist()):
            if count:
                group = (start, start + count, 0, self._experts.neurons, False)  # all neurons of slot 0
                self._experts.kernel(expert).run(hidden.float(), pairs, [group], ids.shape[1], y)
            start += count
        y = self._experts.post(y)
        return (y.view(*ids.shape, -1) * weights.unsqueeze(2)).sum(dim=1).to(hidden.dtype)


class Collector:
    """All layers of a model, and how far the text has been run.

    Args:
        model, blocks, weights: the model with its dense part in float32, its MoE layers and their mapped experts.
        windows: the text.
    """

    def __init__(
        self,
        model: Any,
        blocks: Sequence[MoeBlock],
        weights: Sequence[LayerWeights],
        windows: Windows,
        options: ProfileOptions,
    ) -> None:
        self._model, self._blocks, self._windows, self._options = model, blocks, windows, options
        hidden = model.config.get_text_config().hidden_size
        layers = [Experts(block, held) for block, held in zip(blocks, weights, strict=True)]
        self._profilers = [LayerProfiler(experts, hidden) for experts in layers]
        self.output_tokens = min(options.output_tokens, windows.tokens)

    def run(self, done: int, advanced: Callable[[int], None]) -> Iterator[int]:
        """Run the windows from `done` on; yields how many are done after each forward.

        Args:
            advanced: called with the tokens just run.
        """
        ids, step = self._windows.ids, max(1, _ROWS_PER_FORWARD // self._windows.ids.shape[1])
        with self._attached():
            for start in range(done, len(ids), step):
                part = ids[start : start + step]
                self._announce(start * ids.shape[1], part)
                with torch.no_grad():
                    self._model.base_model(input_ids=torch.from_numpy(part), use_cache=False)
                advanced(part.size)
                yield start + len(part)

    def state(self) -> State:
        """Every sum so far, over all layers."""
        layers = [profiler.sums() for profiler in self._profilers]
        return {name: np.stack([sums[name] for sums in layers]) for name in layers[0]}

    def resume(self, state: State) -> None:
        """Go on from sums that `state` gave, of the same shapes."""
        for layer, profiler in enumerate(self._profilers):
            for name, into in profiler.sums().items():
                into[...] = state[name][layer]

    def profile(self) -> ExpertProfile:
        """What was found."""
        state = self.state()
        dots, norms = state.pop("dots"), state.pop("norms")
        return ExpertProfile(**state, outputs=Outputs(dots, norms))

    def _announce(self, first: int, part: NDArray[np.int64]) -> None:
        """Tell every layer which rows of the next forward are sampled, and how much each counts."""
        total, wanted = self._windows.tokens, self.output_tokens
        numbers = np.arange(first, first + part.size)
        # exactly `wanted` of all tokens, evenly: where the rounded share moves on
        sampled = torch.from_numpy(np.flatnonzero((numbers + 1) * wanted // total != numbers * wanted // total))
        steps = numbers % part.shape[1]
        counts = warmup_weights(steps, self._options.warmup_steps, self._options.warmup_weight)
        for profiler in self._profilers:
            profiler.sampled, profiler.token_weights = sampled, counts

    @contextmanager
    def _attached(self) -> Iterator[None]:
        handles = [
            attach(block.experts, profiler) for block, profiler in zip(self._blocks, self._profilers, strict=True)
        ]
        try:
            yield
        finally:
            for handle in handles:
                detach(handle)
