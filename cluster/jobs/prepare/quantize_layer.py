"""Quantizes the experts of one MoE layer to the inputs that the router sends them, and measures what that costs.

Gate and up share the Hessian of the expert's input rows, all rows alike: the loss table is about the expert's output,
not about what the router makes of it. Down is fitted after them, to the activations of the *quantized* gate and up, and
to weights that make up for their error: with A those activations and A* the full-precision ones, the down projection D
is replaced by D* = D + (A^T A + damping)^-1 A^T (A* - A) D before GPTQ, the least squares fit of A D* to A* D. On
held-out text this is better at every width than the Hessian of A* alone (docs/store-format.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from ....kernels.gptq import damped, damping_for, gptq
from ....kernels.pack import PackedShape, unpack_expert
from ....kernels.quantize import QuantizedBatch, round_to_nearest
from .capture import LayerInputs

MIN_ROWS = 32  # an expert with fewer calibration rows is rounded to nearest (docs/store-format.md has the figures)
LEAST_CAP = 4096  # rows of an expert that are used at most, unless its matrices are larger than that
_ROWS_AT_ONCE = 4096  # whose pre-activations are in memory together
_BATCH_BYTES = 256 << 20  # of one Hessian for each expert that is quantized at once
_CORRECTION_DAMPING = 0.3  # of the mean diagonal, for D*

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


@dataclass(frozen=True)
class Matrices:
    """B experts as float32 matrices, outputs before inputs.

    Attributes:
        gate_up: [B, 2I, H], gate before up.
        down: [B, H, I].
    """

    gate_up: torch.Tensor
    down: torch.Tensor

    @staticmethod
    def of(gate_up: torch.Tensor, down: torch.Tensor) -> Matrices:
        """From the store's neuron-major arrays [B, I, 2, H] and [B, I, H] of any type."""
        return Matrices(
            gate_up.float().transpose(1, 2).flatten(1, 2).contiguous(), down.float().transpose(1, 2).contiguous()
        )


@dataclass(frozen=True)
class QuantizedExperts:
    """B experts of one layer at one width.

    Attributes:
        gate_up: outputs 0..I-1 are gate, I..2I-1 up; inputs H.
        down: outputs H, inputs I.
    """

    gate_up: QuantizedBatch
    down: QuantizedBatch

    def dequantized(self) -> Matrices:
        return Matrices(self.gate_up.dequantized(), self.down.dequantized())


@dataclass(frozen=True)
class WidthResult:
    """A chunk of experts at one width, and what it was measured at.

    Attributes:
        losses, rtn_losses: float32 [B], as in `ReplicaTables`.
        fallback: bool [B], rounded to nearest for want of rows.
    """

    bits: int
    experts: QuantizedExperts
    losses: np.ndarray
    rtn_losses: np.ndarray
    fallback: np.ndarray


@dataclass(frozen=True)
class _Chunk:
    """Some experts in full precision with their calibration rows.

    Per expert rows [n, H], activations [n, I] and outputs [n, H]; hessians
    [B, H, H]; few [B].
    """

    full: Matrices
    rows: list[torch.Tensor]
    activations: list[torch.Tensor]
    outputs: list[torch.Tensor]
    hessians: torch.Tensor
    few: torch.Tensor


def chunks(experts: int, hidden: int, intermediate: int) -> list[range]:
    """The experts in runs that bounded memory can hold at once."""
    size = max(1, _BATCH_BYTES // (4 * max(hidden, intermediate) ** 2))
    return [range(start, min(start + size, experts)) for start in range(0, experts, size)]


def expert_rows(inputs: LayerInputs, expert: int, cap: int) -> torch.Tensor:
    """float32 [n, H]: the rows that the router sent to the expert, at most `cap`, evenly spaced; all where none."""
    rows = np.flatnonzero((inputs.ids == expert).any(axis=1))
    if not len(rows):
        rows = np.arange(len(inputs.ids))
    if len(rows) > cap:
        rows = rows[np.linspace(0, len(rows) - 1, cap).astype(np.int64)]
    return torch.from_numpy(inputs.hidden[rows])


def load_chunk(
    gate_up: torch.Tensor, down: torch.Tensor, inputs: LayerInputs, experts: range, activation: str
) -> _Chunk:
    """Experts of a layer in float32 with everything that no width changes.

    Args:
        gate_up: [E, I, 2, H] of any type, as stored.
        down: [E, I, H].
    """
    part = slice(experts.start, experts.stop)
    full = Matrices.of(gate_up[part], down[part])
    sizes = full.down.shape[1:]  # H, I
    cap = max(LEAST_CAP, 2 * max(sizes))
    counts = np.bincount(inputs.ids.reshape(-1), minlength=len(gate_up))[part]
    rows = [expert_rows(inputs, expert, cap) for expert in experts]
    activations = [_activate(x, w, activation) for x, w in zip(rows, full.gate_up, strict=True)]
    return _Chunk(
        full=full,
        rows=rows,
        activations=activations,
        outputs=[a @ d.T for a, d in zip(activations, full.down, strict=True)],
        hessians=torch.stack([x.T @ x for x in rows]),
        few=torch.from_numpy(counts < MIN_ROWS),
    )


def quantize_chunk(chunk: _Chunk, bits: int, group: int, act_order: bool, activation: str) -> WidthResult:
    """All experts of a chunk at one width, with their losses over the rows.

    Raises:
        ValueError: a weight or an input is not finite.
    """
    full = chunk.full
    nearest = QuantizedExperts(round_to_nearest(full.gate_up, bits, group), round_to_nearest(full.down, bits, group))
    rtn_losses = output_losses(nearest.dequantized(), chunk.rows, chunk.outputs, activation)
    few = chunk.few.numpy()
    if few.all():
        return WidthResult(bits, nearest, rtn_losses, rtn_losses, few)
    counts = torch.tensor([len(x) for x in chunk.rows])
    hidden, size = full.down.shape[1:]
    gate_up = gptq(
        full.gate_up, chunk.hessians, bits, group, act_order=act_order, damping=damping_for(counts, hidden)
    )
    seen = [_activate(x, w, activation) for x, w in zip(chunk.rows, gate_up.dequantized(), strict=True)]
    hessians = torch.stack([a.T @ a for a in seen])
    damping = damping_for(counts, size)
    down = gptq(_corrected(chunk, seen, hessians, damping), hessians, bits, group, act_order=act_order, damping=damping)
    fitted = QuantizedExperts(gate_up.replaced(chunk.few, nearest.gate_up), down.replaced(chunk.few, nearest.down))
    losses = output_losses(fitted.dequantized(), chunk.rows, chunk.outputs, activation)
    return WidthResult(bits, fitted, losses, rtn_losses, few)


def expert_outputs(experts: Matrices, rows: list[torch.Tensor], activation: str) -> list[torch.Tensor]:
    """What each expert makes of its rows [n, H] -> [n, H]."""
    return [
        _activate(x, gate_up, activation) @ down.T
        for x, gate_up, down in zip(rows, experts.gate_up, experts.down, strict=True)
    ]


def output_losses(
    experts: Matrices, rows: list[torch.Tensor], outputs: list[torch.Tensor], activation: str
) -> np.ndarray:
    """float32 [B]: mean squared difference of the experts' outputs [n, H] on their rows [n, H] from `outputs`."""
    made = expert_outputs(experts, rows, activation)
    return np.array([float((y - out).square().mean()) for y, out in zip(outputs, made, strict=True)], dtype=np.float32)


def unpacked(arrays: Mapping[str, NDArray[Any]], shape: PackedShape) -> Matrices:
    """A layer's packed experts [E, ...] as matrices again.

    Raises:
        PackError: the arrays are not those of `shape`.
    """
    experts = len(arrays["down"])
    parts = [unpack_expert({name: array[e] for name, array in arrays.items()}, shape) for e in range(experts)]
    gate_up = [np.concatenate([gate.dequantized(), up.dequantized()]) for gate, up, _ in parts]
    down = [matrix.dequantized() for _, _, matrix in parts]
    return Matrices(torch.from_numpy(np.stack(gate_up)), torch.from_numpy(np.stack(down)))


def _activate(rows: torch.Tensor, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(x gate^T) * (x up^T): rows [n, H], gate_up [2I, H] -> [n, I]."""
    act = ACTIVATIONS[activation]
    pairs = ((part @ gate_up.T).chunk(2, dim=1) for part in rows.split(_ROWS_AT_ONCE))
    return torch.cat([act(gate) * up for gate, up in pairs])


def _corrected(
    chunk: _Chunk, seen: list[torch.Tensor], hessians: torch.Tensor, damping: torch.Tensor
) -> torch.Tensor:
    """D* [B, H, I]; see the top of this file."""
    missing = torch.stack([a.T @ (full - a) for a, full in zip(seen, chunk.activations, strict=True)])  # [B, I, I]
    share = damping.clamp(min=_CORRECTION_DAMPING)
    return chunk.full.down + chunk.full.down @ torch.linalg.solve(damped(hessians, share), missing).transpose(1, 2)


def widths_of(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    inputs: LayerInputs,
    activation: str,
    widths: tuple[int, ...],
    group: int,
    act_order: bool,
) -> Iterator[WidthResult]:
    """Every chunk of a layer's experts, in order, at every width."""
    for experts in chunks(gate_up.shape[0], gate_up.shape[3], gate_up.shape[1]):
        chunk = load_chunk(gate_up, down, inputs, experts, activation)
        for bits in widths:
            yield quantize_chunk(chunk, bits, group, act_order, activation)
