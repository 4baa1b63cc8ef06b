"""Prefetch by trained gates on the hidden state, one per layer (Pre-gated MoE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from .next_gate import NextGatePrefetch


@dataclass(frozen=True, eq=False)
class PreGate:
    """Layer l's input -> scores of layer l + 1's experts: a linear map. Shapes: weight [E, H], bias [E]."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]

    def __call__(self, hidden: NDArray[np.floating]) -> NDArray[np.float32]:
        """Scores [T, E] of hidden states [T, H]."""
        scores: NDArray[np.float32] = np.asarray(hidden, np.float32) @ self.weight.T + self.bias
        return scores


class PreGatedPrefetch(NextGatePrefetch):
    """Pre-gated MoE's predictor (ISCA 2024, arXiv 2308.12066, section 4) in front of an unchanged model.

    State: the gates, fixed; the executor holds them, on the device of the hidden state. Rule: when layer l's router has
    run, layer l's gate, a trained linear map on layer l's input, scores layer l + 1's experts, and those that a top-k
    of these scores picks are asked for (`predicted_experts`). The first layer has no gate before it: its experts are
    loaded on demand. Cost: T * H * E multiply-adds per layer; (L - 1) * E * (H + 1) * 4 bytes.

    Different: in Pre-gated MoE the gate's choice is what layer l + 1 runs, after the whole model was fine-tuned for it.
    Here it is a guess, the model's own router decides, and tokens are exact. The gates alone are trained, by
    `tiermoe prepare --gates` to give what layer l + 1's router gives its own input, beginning with its weights.
    """

    name: ClassVar[str] = "pre-gated"
    needs_gates: ClassVar[bool] = True

    def __init__(self, layers: int, experts: int, top: int, synchronous: bool = False) -> None:
        super().__init__(layers, experts, top, 1, synchronous)
