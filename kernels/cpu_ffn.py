"""Expert FFN on fp32 slots in C++ (`kernels/cpu`): one pass over an expert's bytes for its few rows."""

from __future__ import annotations

import torch

from . import _cpu
from .expert_ffn import ExpertKernel, Group, Operands
from .packed_ffn import ACTIVATIONS

MAX_ROWS = 8  # rows of one expert above which blocked GEMMs win


class CpuKernel:
    """The C++ kernel for decode shapes, and another kernel for larger ones.

    Args:
        operands: fp32 pool on the CPU, contiguous, G = 2, no biases.
        activation: a key of `packed_ffn.ACTIVATIONS`.
        large: runs the experts that have more than `MAX_ROWS` rows. Each expert's own rows decide, so that
            its result does not depend on which others happen to run in the same call.

    Raises:
        ValueError: the operands or the activation are none that the kernel supports (see `supports`).
    """

    def __init__(self, operands: Operands, activation: str, large: ExpertKernel) -> None:
        if not self.supports(operands, activation):
            raise ValueError(f"the CPU kernel does not support activation {activation} on these operands")
        self._gate_up, self._down, self._large = operands.gate_up, operands.down, large
        self._addresses = operands.gate_up.data_ptr(), operands.down.data_ptr()
        slots, neurons, _, self._width = operands.gate_up.shape
        self._neurons = slots * neurons
        self._activation = ACTIVATIONS[activation]

    @staticmethod
    def supports(operands: Operands, activation: str | None) -> bool:
        """Whether the kernel can run these operands."""
        gate_up = operands.gate_up
        here = gate_up.device.type == "cpu" and gate_up.dtype == torch.float32
        return activation in ACTIVATIONS and here and operands.plain_gated

    def run(self, hidden: torch.Tensor, pairs: torch.Tensor, groups: list[Group], top_k: int, y: torch.Tensor) -> None:
        large = [g for g in groups if g[1] - g[0] > MAX_ROWS] if hidden.dtype == torch.float32 else groups
        if large:
            self._large.run(hidden, pairs, large, top_k, y)
            if len(large) == len(groups):
                return
            groups = [g for g in groups if g[1] - g[0] <= MAX_ROWS]
        count, width = pairs.numel(), self._width
        if hidden.shape != (count // top_k, width):
            raise ValueError(f"hidden is {tuple(hidden.shape)} for {count} pairs, top-{top_k} and width {width}")
        if pairs.dtype != torch.int64 or not pairs.is_contiguous():
            raise ValueError(f"pairs must be contiguous int64, not {pairs.dtype} with strides {pairs.stride()}")
        if y.dtype != torch.float32 or not y.is_contiguous() or y.shape != (count, width):
            raise ValueError(f"y must be contiguous float32 [{count}, {width}], not {y.dtype} {tuple(y.shape)}")
        hidden = hidden.contiguous()
        gate_up, down = self._addresses
        _cpu.expert_ffn(
            hidden.data_ptr(), gate_up, down, pairs.data_ptr(), count, groups,
            top_k, self._neurons, width, self._activation, y.data_ptr(),
        )  # fmt: skip

    def combine(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if weights.dtype != torch.float32 or y.dtype != torch.float32:
            return self._large.combine(y, weights)
        tokens, top_k = weights.shape
        if y.shape != (tokens * top_k, self._width):
            raise ValueError(f"y is {tuple(y.shape)} for {tokens} tokens, top-{top_k} and width {self._width}")
        y, weights = y.contiguous(), weights.contiguous()
        out = torch.empty((tokens, self._width), dtype=torch.float32)
        _cpu.combine(y.data_ptr(), weights.data_ptr(), tokens, top_k, self._width, out.data_ptr())
        return out
