"""Experts on a GPU, straight from slots: gate_up with the activation, down, and the weighted sum per token.

A call is a table of tiles, up to M rows of one expert each, and two launches: a program of the first takes a tile and N
neurons, a program of the second a tile and N columns of down. The table names a tile's neurons of the pool, so segments
of split experts are tiles too: the first is stored, the second rounded and then added.

    a[row, j] = act(x[row] . gate_up[first + j, 0] + bias, x[row] . gate_up[first + j, 1] + bias)     j < neurons
    y[pair]   = sum_j a[row, j] * down[first + j] + bias     (+ y[pair])

Sums are in float32; `a` is rounded to the slots' dtype between the launches.

Decode is bound by the bytes of weights, each read once: 3 * I * H * bytes per expert. Floor of an H100 (3.35 TB/s),
bfloat16, in microseconds per call, and at 80% of the bandwidth:

    Qwen1.5-MoE-A2.7B  H 2048  I  1408  4 experts    69 MB   21 -> 26
    DeepSeek-V2-Lite   H 2048  I  1408  6 experts   104 MB   31 -> 39
    Mixtral-8x7B       H 4096  I 14336  2 experts   705 MB  210 -> 263

Numbers that change from call to call are in the table or not specialised, so that only a new shape compiles; H is
specialised by divisibility by 16, so that models share kernels.

With TRITON_INTERPRET=1 in the environment before triton is imported it runs on tensors of the CPU.
"""

# mypy: allow-untyped-defs
# the types of a kernel's arguments are those of its launch
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from .. import _launch
from ..device import on_device, stream_of
from ..expert_ffn import MOST_ROWS, ExpertKernel, Group, Launches, Operands, PlainTables, RowClass, Tables
from ..form_ffn import FORM_ACTIVATIONS, form_activation
from ..host_experts import combined
from .launch import Launch, ceil_div

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_COLUMNS = tl.constexpr(8)  # of the table: start in pairs, rows, first neuron, neurons, row of `a`, added; 2 unused
_GPT_OSS = tl.constexpr(FORM_ACTIVATIONS["gpt_oss"])
_COMBINE_BLOCK = 1024
_KEPT_BYTES = 2 << 20  # of activations that are kept between calls, for each stream: decode's
DECODE_PAIRS = 64  # of a decode step, whose order and rows of y are kept, too: `kDecodePairs` of layer_launches.hpp
_COMBINE_MOST = 8  # top-k of the narrowest combining kernel: rules that drop experts make no other
PAD = 128  # neurons: activations are zero up to a multiple of it, which every K of down and N of gate_up divides


# Block shapes: a few for each row class, one of which is chosen at start. All of a class accumulate over the same index
# in the same order on the same tensor-core instructions (below M = 64 the warp-level ones, from 64 on Hopper's warp
# groups), so the choice changes no bit. Shared memory is stages * (M*K + K*N') * element bytes, N' being 2N for
# gate_up: at most 96 KiB, so that two programs fit on an SM of Hopper.


@dataclass(frozen=True)
class Blocks:
    """Blocks of one product: N columns (neurons of gate_up, hidden of down), K summed over, warps, pipeline stages."""

    N: int
    K: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Shape:
    """M rows of an expert for each program, and the blocks of its two products."""

    M: int
    gate_up: Blocks
    down: Blocks

    def __str__(self) -> str:
        (g, d) = (self.gate_up, self.down)
        return f"{self.M}/{g.N}x{g.K}w{g.warps}s{g.stages}/{d.N}x{d.K}w{d.warps}s{d.stages}"


_HALF: Mapping[RowClass, tuple[Shape, ...]] = {
    "decode": (
        Shape(16, Blocks(32, 128, 4, 4), Blocks(64, 64, 4, 5)),
        Shape(16, Blocks(16, 256, 4, 4), Blocks(32, 128, 4, 5)),
        Shape(16, Blocks(16, 128, 2, 5), Blocks(64, 128, 4, 4)),
    ),
    "short": (
        Shape(64, Blocks(32, 64, 4, 4), Blocks(64, 64, 4, 4)),
        Shape(64, Blocks(64, 64, 4, 4), Blocks(128, 64, 4, 4)),
    ),
    "prefill": (
        Shape(128, Blocks(64, 64, 8, 3), Blocks(128, 64, 8, 3)),
        Shape(64, Blocks(64, 64, 4, 4), Blocks(128, 64, 4, 4)),
    ),
}
# On CUDA cores, for tests: tensor cores do not multiply float32 exactly.
_FLOAT32: Mapping[RowClass, tuple[Shape, ...]] = {
    "decode": (Shape(16, Blocks(16, 64, 4, 3), Blocks(32, 64, 4, 3)),),
    "short": (Shape(32, Blocks(16, 32, 4, 3), Blocks(32, 32, 4, 3)),),
    "prefill": (Shape(64, Blocks(32, 32, 8, 3), Blocks(64, 32, 8, 3)),),
}


def shapes_for(dtype: torch.dtype) -> Mapping[RowClass, tuple[Shape, ...]]:
    """The candidates for this dtype, by row class; the first is the default."""
    return _FLOAT32 if dtype == torch.float32 else _HALF


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == 0:
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == 1:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == 2:  # x/2 (1 + tanh u) = x / (1 + e^-2u)
        y = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        y = tl.where(x < 0, 0.0, x)  # NaN stays
    return y


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """act(gate) * up, or what gpt-oss has in its place."""
    if ACTIVATION == _GPT_OSS:
        gate = tl.where(gate > 7.0, 7.0, gate)  # NaN stays
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    else:
        return activate(gate, ACTIVATION) * up


@triton.jit
def up_tile(
    x, weights, bias, out, used, n, neurons, H,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """N activations from neuron n on of M rows. x, out: pointers to the rows [M]; weights, bias: to a segment."""
    row = 2 * n + tl.arange(0, 2 * N)  # of the segment: gate and up of a neuron alternate
    there = row < 2 * neurons
    k = tl.arange(0, K)
    x = x[:, None] + k[None, :]
    w = weights + row.to(tl.int64)[None, :] * H + k[:, None]
    total = tl.zeros((M, 2 * N), dtype=tl.float32)
    for done in range(0, tl.where(n < neurons, H, 0), K):
        if EVEN:
            a = tl.load(x, mask=used[:, None], other=0.0)
            b = tl.load(w, mask=there[None, :], other=0.0)
        else:
            left = H - done
            a = tl.load(x, mask=used[:, None] & (k < left)[None, :], other=0.0)
            b = tl.load(w, mask=there[None, :] & (k < left)[:, None], other=0.0)
        if WIDEN:  # the interpreter does not multiply bfloat16
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
        x += K
        w += K
    if BIAS:
        total += tl.load(bias + row, mask=there, other=0.0).to(tl.float32)[None, :]
    gate, up = tl.split(tl.reshape(total, (M, N, 2)))
    j = n + tl.arange(0, N)
    # zero in the padding, also where a row is not finite: zero times that row is not zero
    values = tl.where((j < neurons)[None, :], gated(gate, up, ACTIVATION), 0.0)
    tl.store(out[:, None] + j[None, :], values.to(out.dtype.element_ty), mask=used[:, None])


@triton.jit
def down_tile(
    activations, weights, used, h, neurons, H,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The sums of M rows over a segment's neurons for the columns h [N]. activations: pointers to the rows [M]."""
    k = tl.arange(0, K)
    a_at = activations[:, None] + k[None, :]
    b_at = weights + k.to(tl.int64)[:, None] * H + h[None, :]
    total = tl.zeros((M, N), dtype=tl.float32)
    for done in range(0, neurons, K):
        a = tl.load(a_at, mask=used[:, None], other=0.0)  # zero behind the neurons
        there = (k < neurons - done)[:, None]
        if EVEN:  # noqa: SIM108
            b = tl.load(b_at, mask=there, other=0.0)
        else:
            b = tl.load(b_at, mask=there & (h < H)[None, :], other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
        a_at += K
        b_at += K * H
    return total


@triton.jit(do_not_specialize=["first_tile", "top_k"])
def _gate_up(
    hidden, pairs, gate_up, bias, activations, table, first_tile, top_k, H, STRIDE,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr,
    PADDED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    tile = table + (first_tile + tl.program_id(0)) * _COLUMNS
    neurons = tl.load(tile + 3)
    n = tl.program_id(1) * N
    if n < tl.cdiv(neurons, PADDED) * PADDED:
        m = tl.arange(0, M)
        used = m < tl.load(tile + 1)
        pair = tl.load(pairs + tl.load(tile) + m, mask=used, other=0)
        first = 2 * tl.load(tile + 2).to(tl.int64)
        out = activations + (tl.load(tile + 4) + m).to(tl.int64) * STRIDE
        up_tile(
            hidden + (pair // top_k) * H, gate_up + first * H, bias + first, out, used, n, neurons, H,
            BIAS, ACTIVATION, M, N, K, EVEN, WIDEN,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first_tile"])
def _down(
    activations, pairs, down, bias, y, table, first_tile, H, STRIDE,
    BIASED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    tile = table + (first_tile + tl.program_id(0)) * _COLUMNS
    m = tl.arange(0, M)
    used = m < tl.load(tile + 1)
    pair = tl.load(pairs + tl.load(tile) + m, mask=used, other=0)
    h = tl.program_id(1) * N + tl.arange(0, N)
    rows = activations + (tl.load(tile + 4) + m).to(tl.int64) * STRIDE
    weights = down + tl.load(tile + 2).to(tl.int64) * H
    total = down_tile(rows, weights, used, h, tl.load(tile + 3), H, M, N, K, EVEN, WIDEN)
    if BIASED > 0:
        slot = (tl.load(tile + 2) // BIASED).to(tl.int64)
        total += tl.load(bias + slot * H + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
    at = y + pair.to(tl.int64)[:, None] * H + h[None, :]
    mask = used[:, None] & (h < H)[None, :]
    values = total.to(y.dtype.element_ty)
    if tl.load(tile + 5) != 0:
        values = (tl.load(at, mask=mask, other=0.0).to(tl.float32) + values.to(tl.float32)).to(y.dtype.element_ty)
    tl.store(at, values, mask=mask)


@triton.jit(do_not_specialize=["top_k"], do_not_specialize_on_alignment=["weights"])  # rerouting may change both
def _combine(y, weights, out, top_k, H, MOST: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = h < H
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in tl.static_range(MOST):
        pair = token * top_k + i
        there = top_k > i
        row = tl.load(y + pair * H + h, mask=h < tl.where(there, H, 0), other=0.0).to(tl.float32)
        total += tl.load(weights + pair, mask=there, other=0.0).to(tl.float32) * row
    tl.store(out + token * H + h, total.to(out.dtype.element_ty), mask=used)


class LaunchedKernel:
    """Experts on slots by two launches for each class of rows, from a table of tiles, and one that sums.

    Args:
        up, down: what the launches get of the slots, behind the pairs: tensors that never move.
        classes: as `_launch.Experts` takes them: the most rows, rows of a tile, gate_up and down with their columns.
        sizes: neurons of the pool and of a slot, H, items between rows of activations.
        dtype: of rows. reference: runs calls in another; None: they are refused.
        tables: brings the tables to the device; None: plain copies.
    """

    name = "triton"

    def __init__(
        self, up: tuple[torch.Tensor, ...], down: tuple[torch.Tensor, ...],
        classes: list[tuple[int, int, Launch, int, Launch, int]], sizes: tuple[int, int, int, int],
        dtype: torch.dtype, device: torch.device, reference: ExpertKernel | None, tables: Tables | None,
    ) -> None:  # fmt: skip
        self._device, self._reference = device, reference
        *_, width, stride = sizes
        self.tables: Tables = PlainTables(device) if tables is None else tables
        self._combines: dict[int, Launch] = {}  # by the most experts of a token
        self._native = _launch.Experts(
            up, down, dtype, classes, (*sizes, PAD), self.tables, partial(_scratch, stride, width, dtype, device),
            _KEPT_BYTES // (stride * dtype.itemsize), stream_of(device), DTYPES, torch.int64,
            partial(_combining, self._combines), _COMBINE_BLOCK,
        )  # fmt: skip

    def run(self, hidden: torch.Tensor, pairs: torch.Tensor, groups: list[Group], top_k: int, y: torch.Tensor) -> None:
        """See `ExpertKernel.run`; asynchronous.

        Raises:
            ValueError: shapes do not fit together, or a group lies outside the pairs or the pool.
        """
        with on_device(self._device):
            ran = self._native.run(hidden, pairs, groups, top_k, y)
        if not ran:  # another dtype
            if self._reference is None:
                raise ValueError(f"rows of {hidden.dtype}, and results of {y.dtype}, are not of the kernel's type")
            self._reference.run(hidden, pairs, groups, top_k, y)

    def combine(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        with on_device(self._device):
            out = self._native.combine(y, weights)
        if out is None:
            return combined(y, weights) if self._reference is None else self._reference.combine(y, weights)
        return out

    @property
    def launches(self) -> Launches:
        """For native code; valid as long as this kernel."""
        return Launches(self._native.launches, self._device, MOST_ROWS["prefill"])


class TritonKernel(LaunchedKernel):
    """Experts on slots by Triton; each expert's own row count selects its block shape.

    Args:
        operands: the slot pool: contiguous, G = 2; with biases, groups are whole slots.
        activation: a key of `form_ffn.FORM_ACTIVATIONS`.
        reference: runs calls in another dtype than the slots'.
        tables: brings the tables to the device; None: plain copies.
        shapes: of row classes that do not take the default.

    Raises:
        ValueError: unsupported operands or activation (see `supports`).
    """

    def __init__(
        self,
        operands: Operands,
        activation: str,
        reference: ExpertKernel,
        tables: Tables | None = None,
        shapes: Mapping[RowClass, Shape] | None = None,
    ) -> None:
        if not self.supports(operands, activation):
            raise ValueError(f"the Triton kernel does not support activation {activation} on these operands")
        slots, self._neurons, _, self._width = operands.gate_up.shape
        neurons = self._neurons
        dtype, device = operands.gate_up.dtype, operands.gate_up.device
        self._activation, self._biases = form_activation(activation), (operands.gate_up_bias, operands.down_bias)
        of_up, of_down = self._biases
        self._widen = device.type == "cpu" and dtype == torch.bfloat16
        defaults = {name: some[0] for name, some in shapes_for(dtype).items()}
        self.shapes: dict[RowClass, Shape] = {**defaults, **(shapes or {})}
        super().__init__(
            (operands.gate_up, operands.gate_up if of_up is None else of_up),
            (operands.down, operands.down if of_down is None else of_down),
            [self._class_of(name, shape) for name, shape in self.shapes.items()],
            (slots * neurons, neurons, self._width, ceil_div(neurons, PAD) * PAD), dtype, device, reference, tables,
        )  # fmt: skip

    @staticmethod
    def supports(operands: Operands, activation: str | None) -> bool:
        """Whether the kernel can run these operands."""
        slots, neurons = operands.gate_up.shape[:2]
        small = 2 * slots * neurons < 1 << 31
        return activation in FORM_ACTIVATIONS and operands.gate_up.dtype in DTYPES and operands.gated and small

    def _class_of(self, name: RowClass, shape: Shape) -> tuple[int, int, Launch, int, Launch, int]:
        """As `_launch.Experts` takes it: the most rows, rows of a tile, gate_up and down with their columns."""
        width, up, down = self._width, shape.gate_up, shape.down
        of_up, of_down = self._biases
        gate_up = Launch(
            _gate_up, BIAS=of_up is not None, ACTIVATION=self._activation, M=shape.M, N=up.N, K=up.K,
            EVEN=width % up.K == 0, PADDED=PAD, WIDEN=self._widen,
            num_warps=up.warps, num_stages=up.stages, enable_fp_fusion=True,
        )  # fmt: skip
        low = Launch(
            _down, BIASED=0 if of_down is None else self._neurons, M=shape.M, N=down.N, K=down.K,
            EVEN=width % down.N == 0, WIDEN=self._widen,
            num_warps=down.warps, num_stages=down.stages, enable_fp_fusion=True,
        )  # fmt: skip
        return MOST_ROWS[name], shape.M, gate_up, up.N, low, down.N


def _combining(made: dict[int, Launch], top_k: int) -> Launch:
    """The launch that sums so many rows a token. made: those there are, by the most rows."""
    most = _COMBINE_MOST if top_k <= _COMBINE_MOST else triton.next_power_of_2(top_k)
    if most not in made:
        made[most] = Launch(_combine, MOST=most, BLOCK=_COMBINE_BLOCK, num_warps=4, enable_fp_fusion=True)
    return made[most]


def _scratch(
    stride: int, width: int, dtype: torch.dtype, device: torch.device, rows: int, numbers: int, pairs: int
) -> tuple[torch.Tensor, ...]:
    """Activations; words for pairs, their weights and a table, the table, the pairs; rows of y."""
    with torch.inference_mode(False):  # a forward may make them, and others use them
        words = torch.empty(3 * pairs + numbers, dtype=torch.int32, device=device)
        activations = torch.empty((rows, stride), dtype=dtype, device=device)
        y = torch.empty((pairs, width), dtype=dtype, device=device)
    return activations, words, words[3 * pairs :], words[: 2 * pairs].view(torch.int64), y
