"""Expert FFN on slots: what an implementation offers, and the plain torch reference for any device and activation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

Gate = Callable[[torch.Tensor], torch.Tensor]
# Pairs `start` to `stop` of the sorted pair list go through neurons of the pool, counted over all slots: the first and
# how many. The last says whether y holds the rows of the expert's other segment, to which these are added.
Group = tuple[int, int, int, int, bool]


@dataclass(frozen=True)
class Operands:
    """Slots as GEMM operands, neuron-major: S slots, I neurons, G rows per neuron (1 or 2), H hidden.

    gate_up [S, I, G, H], down [S, I, H], gate_up_bias [S, I, G] or None, down_bias [S, H] or None.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None

    @property
    def plain(self) -> bool:
        """Whether there are no biases, and the arrays are contiguous."""
        biased = self.gate_up_bias is not None or self.down_bias is not None
        return not biased and self.gate_up.is_contiguous() and self.down.is_contiguous()

    @property
    def plain_gated(self) -> bool:
        """`plain`, with a gate, in arrays that fit together and are of one type on one device."""
        gate_up, down = self.gate_up, self.down
        slots, neurons, rows, width = gate_up.shape
        alike = gate_up.dtype == down.dtype and gate_up.device == down.device
        return self.plain and alike and rows == 2 and down.shape == (slots, neurons, width)


class ExpertKernel(Protocol):
    """One way to run experts on slots."""

    def run(self, hidden: torch.Tensor, pairs: torch.Tensor, groups: list[Group], top_k: int, y: torch.Tensor) -> None:
        """y[pair] = FFN(hidden[pair // top_k]) over the group's neurons, for the pairs of each group; other rows of y
        are left alone. Of an expert's two segments one is written and the other, summed apart, is added: in either
        order the same bits.

        Args:
            hidden: [T, H].
            pairs: numbers t * top_k + k, sorted by expert [T * top_k], int64.
            groups: ranges of `pairs` and their neurons.
            y: [T * top_k, H].
        """
        ...

    def combine(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """sum_k weights[t, k] * y[t * K + k] -> [T, H], in the dtype of y."""
        ...


class TorchKernel:
    """Reference: one GEMM per expert and projection.

    Args:
        operands: the slot pool; with biases, groups are whole slots.
        gate: maps interleaved pre-activations [n, I*G] (row j*G is neuron j's gate) to activations [n, I].
    """

    def __init__(self, operands: Operands, gate: Gate) -> None:
        slots, i, g, h = operands.gate_up.shape
        bias = operands.gate_up_bias
        self._neurons, self._rows = i, g
        self._gate_up_t = operands.gate_up.view(slots * i * g, h).t()  # [H, S*I*G]
        self._down = operands.down.view(slots * i, h)
        self._gate_up_bias = bias.view(slots * i * g) if bias is not None else None
        self._down_bias = operands.down_bias
        self._gate = gate

    def run(self, hidden: torch.Tensor, pairs: torch.Tensor, groups: list[Group], top_k: int, y: torch.Tensor) -> None:
        g = self._rows
        for start, stop, first, neurons, add in groups:
            rows = pairs[start:stop]
            up = hidden[rows // top_k] @ self._gate_up_t.narrow(1, first * g, neurons * g)  # [n, neurons*G]
            if self._gate_up_bias is not None:
                up += self._gate_up_bias.narrow(0, first * g, neurons * g)
            out = self._gate(up) @ self._down.narrow(0, first, neurons)  # [n, H]
            if self._down_bias is not None:
                out += self._down_bias[first // self._neurons]
            if add:
                y.index_add_(0, rows, out)
            else:
                y[rows] = out

    def combine(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens, top_k = weights.shape
        return (y.view(tokens, top_k, y.shape[1]) * weights.unsqueeze(-1)).sum(dim=1).to(y.dtype)
