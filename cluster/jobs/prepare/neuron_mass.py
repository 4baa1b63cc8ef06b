"""How much each neuron of each expert contributes on calibration text.

Neuron j of an expert adds act_j * down_j to the expert's output, so on a token the vector that it adds has length
|act_j| * ||down_j||. Its mass is the sum of that over the tokens that the router sent to the expert, not weighted by
the routing weights. Within an expert this ranks neurons as the mean over those tokens does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ....actors.engine.model import MoeBlock
from ....actors.engine.operator import attach, detach
from ....actors.engine.pool import LayerWeights
from ....actors.store_format import ExpertShape
from ....errors import UnsupportedModelError
from .calibration import Windows

_ROWS_PER_FORWARD = 2048


def neuron_mass(
    model: Any,
    blocks: Sequence[MoeBlock],
    experts: Sequence[LayerWeights],
    windows: Windows,
    advance: Callable[[int], None],
) -> NDArray[np.float64]:
    """Sum of |activation| * ||down row|| of each neuron: float64 [L, E, I]; zeros for experts that got no token.

    Dense layers are in memory in float32; experts are read one at a time, so there is no second copy.

    Args:
        model: in float32, its experts on meta. experts: of each layer, in the store's type.
        advance: called with the tokens just run.
    """
    meters = [_Meter(block, weights) for block, weights in zip(blocks, experts, strict=True)]
    handles = [attach(block.experts, meter) for block, meter in zip(blocks, meters, strict=True)]
    step = max(1, _ROWS_PER_FORWARD // windows.ids.shape[1])
    try:
        with torch.no_grad():
            for start in range(0, len(windows.ids), step):
                ids = torch.from_numpy(windows.ids[start : start + step])
                model.base_model(input_ids=ids, use_cache=False)
                advance(ids.numel())
            return np.stack([meter.mass() for meter in meters])
    finally:
        for handle in handles:
            detach(handle)


def refuse_mixing(blocks: Sequence[MoeBlock], shape: ExpertShape) -> None:
    """Tried out on random pre-activations: may an expert's neurons change places?

    Raises:
        UnsupportedModelError: an activation depends on the place of a neuron, or on other neurons.
    """
    size, gates = shape.intermediate, shape.gates
    pre = torch.randn(4, size, gates, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for layer, block in enumerate(blocks):
            straight, flipped = block.gate(pre.flatten(1)), block.gate(pre.flip(1).flatten(1))
            if not torch.allclose(straight.flip(1), flipped, rtol=1e-4, atol=1e-5):
                raise UnsupportedModelError(
                    f"the experts of MoE layer {layer} treat a neuron by its place", "leave out --neuron-order"
                )


class _Meter:
    """In place of an MoE layer's experts: sums activations, answers in full precision."""

    def __init__(self, block: MoeBlock, weights: LayerWeights) -> None:
        self._gate, self._post = block.gate, block.post
        self._gate_up, self._down, *self._biases = weights.tensors
        self._sums = torch.zeros(self._down.shape[:2], dtype=torch.float64)  # of |activation| [E, I]

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [T, H], ids [T, K], weights [T, K] -> [T, H]."""
        top_k, flat = ids.shape[1], ids.reshape(-1)
        pairs = flat.argsort(stable=True)
        counts = flat.bincount(minlength=len(self._down)).tolist()
        y = torch.empty(len(flat), hidden.shape[1])  # [T * K, H]
        start = 0
        for expert, count in enumerate(counts):
            if count:
                rows = pairs[start : start + count]
                y[rows] = self._expert(hidden[rows // top_k].float(), expert)
            start += count
        if self._post is not None:
            y = self._post(y)
        return (y.view(*ids.shape, -1) * weights.unsqueeze(2)).sum(dim=1).to(hidden.dtype)

    def mass(self) -> NDArray[np.float64]:
        """float64 [E, I]."""
        norms = torch.stack([down.float().norm(dim=1) for down in self._down])
        return (self._sums * norms).numpy()

    def _expert(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        pre = x @ self._gate_up[expert].float().flatten(0, 1).t()  # [n, I * G]
        if self._biases:
            pre = pre + self._biases[0][expert].float().flatten()
        activations = self._gate(pre)  # [n, I]
        self._sums[expert] += activations.abs().sum(dim=0, dtype=torch.float64)
        out = activations @ self._down[expert].float()
        return out + self._biases[1][expert].float() if self._biases else out
