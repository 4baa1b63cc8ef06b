"""Expert FFN on slots: the interface, and the torch and C++ kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from . import _cpu, _launch
from .packed_ffn import ACTIVATIONS

if TYPE_CHECKING:
    from typing_extensions import CapsuleType

CPU_MAX_ROWS = 8  # rows of one expert above which blocked GEMMs beat the C++ kernel

# Classes of experts by their own row count, which alone selects a kernel: were it the rows of the whole call, a result
# would depend on the other experts in it.
RowClass = Literal["decode", "short", "prefill"]
ROW_CLASSES: tuple[RowClass, ...] = get_args(RowClass)
DECODE_ROWS = 16  # at most: one tensor-core tile, bound by the bytes of weights
SHORT_ROWS = 64
MOST_ROWS: dict[RowClass, int] = {"decode": DECODE_ROWS, "short": SHORT_ROWS, "prefill": 1 << 62}

Gate = Callable[[torch.Tensor], torch.Tensor]
# (start, stop, first, neurons, add): pairs start to stop of the sorted pair list go through these neurons of the pool,
# counted over all slots; add: y holds the rows of the expert's other segment, to which these are added.
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
    def biased(self) -> bool:
        return self.gate_up_bias is not None or self.down_bias is not None

    @property
    def gated(self) -> bool:
        """Whether experts have gate and up, in contiguous arrays of fitting shapes, one type and one device."""
        gate_up, down = self.gate_up, self.down
        slots, neurons, rows, width = gate_up.shape
        arrays = [a for a in (gate_up, down, self.gate_up_bias, self.down_bias) if a is not None]
        alike = all(a.dtype == down.dtype and a.device == down.device and a.is_contiguous() for a in arrays)
        return alike and rows == 2 and down.shape == (slots, neurons, width)


class ExpertKernel(Protocol):
    """Runs experts on slots."""

    def run(self, hidden: torch.Tensor, pairs: torch.Tensor, groups: list[Group], top_k: int, y: torch.Tensor) -> None:
        """y[pair] = FFN(hidden[pair // top_k]) over the group's neurons, for the pairs of each group.

        Other rows of y stay. Of an expert's two segments one is written and the other added: in either order the same
        bits.

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


def row_class(rows: int) -> RowClass:
    """The class of an expert with this many rows."""
    if rows <= DECODE_ROWS:
        return "decode"
    return "short" if rows <= SHORT_ROWS else "prefill"


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


class CpuKernel:
    """The C++ kernel (`kernels/cpu`) for decode shapes: one pass over an expert's bytes for its few rows.

    Args:
        operands: fp32 pool on the CPU, contiguous, G = 2, no biases.
        activation: a key of `packed_ffn.ACTIVATIONS`.
        large: runs the experts that have more than `CPU_MAX_ROWS` rows.

    Raises:
        ValueError: unsupported operands or activation (see `supports`).
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
        return activation in ACTIVATIONS and here and operands.gated and not operands.biased

    def run(self, hidden: torch.Tensor, pairs: torch.Tensor, groups: list[Group], top_k: int, y: torch.Tensor) -> None:
        few = pairs.numel() <= CPU_MAX_ROWS and hidden.dtype == torch.float32
        large = [] if few else [g for g in groups if g[1] - g[0] > CPU_MAX_ROWS or hidden.dtype != torch.float32]
        if large:
            self._large.run(hidden, pairs, large, top_k, y)
            if len(large) == len(groups):
                return
            groups = [g for g in groups if g[1] - g[0] <= CPU_MAX_ROWS]
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

    @cached_property
    def experts(self) -> CapsuleType:
        """For the core's executor, which holds this object."""
        neurons = self._gate_up.shape[1]
        return _cpu.slot_experts(*self._addresses, neurons, self._width, self._activation, CPU_MAX_ROWS)

    @property
    def width(self) -> int:
        """Of rows: H."""
        return self._width


class Tables(_launch.Ring):
    """Brings small tables to the device; see `engine.cuda.tables.TableRing`."""

    def put(self, table: Sequence[int] | NDArray[Any]) -> torch.Tensor:
        """On the device, for later work on the current stream; a list is int32."""
        raise NotImplementedError


class PlainTables(Tables):
    """`Tables` by plain copies, which wait: for the CPU, and for tests."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._buffer = device, np.empty(0, np.uint8)
        super().__init__([self.grown(0, 1 << 12)], 1 << 12, 1, None, 0, None)

    def put(self, table: Sequence[int] | NDArray[Any]) -> torch.Tensor:
        dtype = torch.int32 if isinstance(table, list) else None
        return torch.tensor(table, dtype=dtype, device=self._device)

    # what `layer_launches.hpp` calls

    def turned(self, left: int, entered: int) -> None: ...

    def read_by_this_stream(self, section: int) -> None: ...

    def grown(self, at: int, nbytes: int) -> int:
        self._buffer = np.empty(nbytes, np.uint8)
        return self._buffer.ctypes.data

    def copied(self, at: int, nbytes: int, target: torch.Tensor) -> None:
        source = torch.from_numpy(self._buffer[:nbytes]).view(target.dtype)
        target.view(-1)[: len(source)].copy_(source)


class Launches(NamedTuple):
    """How native code runs a layer's experts on a GPU.

    experts: the capsule of `kernels/triton/experts.hpp`. most_rows: of an expert.
    """

    experts: CapsuleType
    device: torch.device
    most_rows: int

