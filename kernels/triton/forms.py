"""Experts in published forms, and packed replicas, on a GPU, straight from slots.

As in `expert_ffn`, which runs those of the compute's type, a call is a table of tiles and two launches. A program
decodes the weights that it multiplies, in registers (`form_weights`): a dequantized matrix is never in memory.

    a[row, j] = act(gate[j] . x[row] + bias, up[j] . x[row] + bias)                  j < I
    y[pair]   = down . a[row] + bias

A weight is rounded to the type of the rows as the torch reference rounds it. Sums are float32, and `a` is rounded to
the rows' type between the launches. A row's result depends only on its own values, the expert and its row class.

With TRITON_INTERPRET=1 in the environment before triton is imported it runs on tensors of the CPU.
"""

# mypy: allow-untyped-defs
# the types of a kernel's arguments are those of its launch
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..expert_ffn import MOST_ROWS, Gate, Group, RowClass, Tables
from ..form_ffn import form_activation
from ..form_slots import TorchFormKernel, check_slots
from ..forms import BLOCKS, ExpertForm, MatrixForm, ceil_div
from ..host_experts import whole_groups
from ..pack import PackedShape
from ..packed_slots import PackedGroup, check_call
from ..packed_slots import check_slots as check_packed
from .expert_ffn import _COLUMNS, PAD, LaunchedKernel, gated
from .form_weights import Matrix, expert_matrix, packed_of, weights
from .gguf_weights import GRIDS
from .launch import Launch


@triton.jit
def rows_of(x, order, used, start, FORM: tl.constexpr, K: tl.constexpr):
    """[M, K] inputs of rows, whose pointers are x [M], in the order of a matrix's columns."""
    column = start + tl.arange(0, K)
    there = column < FORM.inputs
    if FORM.order:
        column = tl.load(order + column, mask=there, other=0)
    if FORM.inputs % K == 0:
        return tl.load(x[:, None] + column[None, :], mask=used[:, None], other=0.0)
    return tl.load(x[:, None] + column[None, :], mask=used[:, None] & there[None, :], other=0.0)


@triton.jit
def times(rows, matrix, total, WIDEN: tl.constexpr):
    matrix = matrix.to(rows.dtype)
    if WIDEN:  # the interpreter does not multiply bfloat16
        rows, matrix = rows.to(tl.float32), matrix.to(tl.float32)
    return tl.dot(rows, tl.trans(matrix), total, input_precision="ieee")


@triton.jit
def _biased(total, bias, output, FORM: tl.constexpr):
    if FORM.bias:
        row = tl.minimum(output * FORM.step + FORM.first, FORM.outputs - 1)
        total += tl.load(bias + row).to(tl.float32)[None, :]
    return total


@triton.jit(do_not_specialize=["first_tile", "top_k"])
def _form_gate_up(
    hidden, pairs,
    gate, gate_scale, gate_zero, gate_whole, gate_bias, gate_order, up, up_scale, up_zero, up_whole, up_bias, up_order,
    activations, table, first_tile, top_k, H, STRIDE,
    GATE: tl.constexpr, UP: tl.constexpr, ACTIVATION: tl.constexpr, NEURONS: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """N activations of a tile's rows; zeros behind the last neuron."""
    tile = table + (first_tile + tl.program_id(0)) * _COLUMNS
    n = tl.program_id(1) * N
    j = n + tl.arange(0, N)
    m = tl.arange(0, M)
    used = m < tl.load(tile + 1)
    pair = tl.load(pairs + tl.load(tile) + m, mask=used, other=0)
    slot = (tl.load(tile + 2) // NEURONS).to(tl.int64)
    x = hidden + (pair // top_k) * H
    gate += slot * GATE.strides[0]
    gate_scale += slot * GATE.strides[1]
    gate_zero += slot * GATE.strides[2]
    gate_whole += slot * GATE.strides[3]
    gate_bias += slot * GATE.strides[4]
    gate_order += slot * GATE.strides[5]
    up += slot * UP.strides[0]
    up_scale += slot * UP.strides[1]
    up_zero += slot * UP.strides[2]
    up_whole += slot * UP.strides[3]
    up_bias += slot * UP.strides[4]
    up_order += slot * UP.strides[5]
    gates = tl.zeros((M, N), dtype=tl.float32)
    ups = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, tl.where(n < NEURONS, GATE.inputs, 0), K):
        rows = rows_of(x, gate_order, used, start, GATE, K)
        gates = times(rows, weights(gate, gate_scale, gate_zero, gate_whole, n, start, GATE, N, K), gates, WIDEN)
        if UP.order:
            rows = rows_of(x, up_order, used, start, UP, K)
        ups = times(rows, weights(up, up_scale, up_zero, up_whole, n, start, UP, N, K), ups, WIDEN)
    gates, ups = _biased(gates, gate_bias, j, GATE), _biased(ups, up_bias, j, UP)
    values = gated(gates, ups, ACTIVATION)
    values = tl.where((j < NEURONS)[None, :], values, 0.0)
    out = activations + (tl.load(tile + 4) + m).to(tl.int64) * STRIDE
    tl.store(out[:, None] + j[None, :], values.to(activations.dtype.element_ty), mask=used[:, None])


@triton.jit(do_not_specialize=["first_tile"])
def _form_down(
    activations, pairs, down, scale, zero, whole, bias, y, table, first_tile, H, STRIDE,
    DOWN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    tile = table + (first_tile + tl.program_id(0)) * _COLUMNS
    m = tl.arange(0, M)
    used = m < tl.load(tile + 1)
    pair = tl.load(pairs + tl.load(tile) + m, mask=used, other=0)
    slot = (tl.load(tile + 2) // DOWN.inputs).to(tl.int64)
    n = tl.program_id(1) * N
    h = n + tl.arange(0, N)
    x = activations + (tl.load(tile + 4) + m).to(tl.int64) * STRIDE
    down += slot * DOWN.strides[0]
    scale += slot * DOWN.strides[1]
    zero += slot * DOWN.strides[2]
    whole += slot * DOWN.strides[3]
    bias += slot * DOWN.strides[4]
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, DOWN.inputs, K):
        rows = rows_of(x, x, used, start, DOWN, K)
        total = times(rows, weights(down, scale, zero, whole, n, start, DOWN, N, K), total, WIDEN)
    total = _biased(total, bias, h, DOWN)
    at = y + pair.to(tl.int64)[:, None] * H + h[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=used[:, None] & (h < H)[None, :])


# -- the kernel ----------------------------------------------------------------------------------------------------


class FormBlocks(NamedTuple):
    """M rows of a tile, N outputs of a program of gate and up, and of down, its warps and its pipeline's stages."""

    M: int
    gate_up: int
    down: int
    warps: int
    stages: int


class Decoding(NamedTuple):
    """K inputs that a program decodes at a time, and its blocks by class of rows: two are enough, since decoding bounds
    prompts, not the product. Shared memory is below 99 KiB on every GPU.
    """

    K: int
    decode: FormBlocks
    prefill: FormBlocks


SMALL = Decoding(128, FormBlocks(16, 16, 32, 4, 3), FormBlocks(64, 16, 64, 4, 2))
LARGE = Decoding(256, FormBlocks(16, 16, 32, 8, 3), FormBlocks(64, 16, 32, 8, 2))  # of blocks of 256 inputs
# fewer registers: of replicas and of IQ4_NL; of types with a grid, and of ternary ones
NARROW = Decoding(128, FormBlocks(16, 16, 32, 4, 3), FormBlocks(64, 16, 32, 4, 2))
GRID = Decoding(256, FormBlocks(16, 16, 32, 8, 3), FormBlocks(32, 16, 32, 8, 2))
_ROWS: tuple[RowClass, ...] = ("decode", "prefill")


def decoding_of(*matrices: MatrixForm) -> Decoding:
    """That all these matrices take."""
    kinds = {matrix.kind for matrix in matrices}
    if kinds & {*GRIDS, "tq1_0", "tq2_0"}:
        return GRID
    if any(BLOCKS.get(kind, (0,))[0] == 256 for kind in kinds):
        return LARGE
    return NARROW if "iq4_nl" in kinds else SMALL


def launch_of(kernel: Any, blocks: FormBlocks, **fixed: Any) -> Launch:
    """No sums are fused into products: weights have the reference's bits."""
    given = {**fixed, "M": blocks.M}
    constants = {name: given[name] for name in kernel.arg_names if name in given}
    return Launch(
        kernel, **constants, num_warps=blocks.warps, num_stages=blocks.stages, enable_fp_fusion=False
    )  # fmt: skip


class DecodingKernel(LaunchedKernel):
    """Experts on slots by the two kernels of this module, from matrices that they decode.

    Args:
        gate, up, down: see `form_weights`. blocks: of gate and up, and of down.
        activation: a key of `form_ffn.FORM_ACTIVATIONS`.
        reference: as of `LaunchedKernel`.
        dtype: of rows.
        tables: as of `TritonKernel`.

    Attributes:
        products: the launches of gate and up, and of down. operands: tensors of the slots that each gets.

    Raises:
        ValueError: the activation is unknown.
    """

    def __init__(
        self, gate: Matrix, up: Matrix, down: Matrix, blocks: tuple[Decoding, Decoding], activation: str,
        reference: TorchFormKernel | None, dtype: torch.dtype, tables: Tables | None,
    ) -> None:  # fmt: skip
        slots, device = len(gate.tensors[0]), gate.tensors[0].device
        hidden, neurons = down.form.outputs, down.form.inputs
        fixed = {
            "GATE": gate.form, "UP": up.form, "DOWN": down.form, "ACTIVATION": form_activation(activation),
            "NEURONS": neurons, "WIDEN": device.type == "cpu" and dtype == torch.bfloat16,
        }  # fmt: skip
        self.operands = (*gate.tensors, *up.tensors), down.tensors[:-1]  # whose inputs are in order
        self.products: dict[RowClass, tuple[Launch, Launch]] = {}
        classes = []
        for name in _ROWS:
            above, below = (getattr(of, name) for of in blocks)
            first = launch_of(_form_gate_up, above, N=above.gate_up, K=blocks[0].K, **fixed)
            second = launch_of(_form_down, below, N=below.down, K=blocks[1].K, **fixed)
            self.products[name] = first, second
            classes.append((MOST_ROWS[name], above.M, first, above.gate_up, second, below.down))
        super().__init__(
            *self.operands, classes, (slots * neurons, neurons, hidden, ceil_div(neurons, PAD) * PAD), dtype, device,
            reference, tables,
        )  # fmt: skip


class TritonFormKernel(DecodingKernel):
    """Experts in a published form, on slots, by Triton.

    Args:
        slots: as of `TorchFormKernel`.
        gate: as of `TorchFormKernel`, which runs calls in other types.
        activation, dtype, tables: as of `DecodingKernel`.

    Raises:
        FormError: the slots are not of this form, or not aligned.
        ValueError: the activation is unknown.
    """

    def __init__(
        self, slots: Sequence[torch.Tensor], form: ExpertForm, activation: str, gate: Gate, dtype: torch.dtype,
        tables: Tables | None = None,
    ) -> None:  # fmt: skip
        check_slots(slots, form)
        parts = dict(zip(form.parts(), slots, strict=True))
        if form.gate_up is None:
            gates, ups = expert_matrix(form, parts, "gate"), expert_matrix(form, parts, "up")
        else:
            step, behind = (2, 1) if form.interleaved else (1, form.intermediate)
            gates, ups = (expert_matrix(form, parts, "gate_up", first, step) for first in (0, behind))
        self._form, self._slots = form, len(slots[0])
        blocks = decoding_of(*(m for name, m in form.matrices.items() if name != "down")), decoding_of(form.down)
        reference = TorchFormKernel(slots, form, gate)
        super().__init__(gates, ups, expert_matrix(form, parts, "down"), blocks, activation, reference, dtype, tables)

    def run(self, hidden: torch.Tensor, pairs: torch.Tensor, groups: list[Group], top_k: int, y: torch.Tensor) -> None:
        """See `ExpertKernel.run`; asynchronous.

        Raises:
            ValueError: shapes do not fit together, a group is no whole expert, or lies outside the pairs or the pool.
        """
        form = self._form
        whole_groups(form.hidden, form.intermediate, range(self._slots), hidden, pairs, groups, top_k, y)
        super().run(hidden, pairs, groups, top_k, y)


class TritonPackedKernel(DecodingKernel):
    """Packed replicas on slots (`PackedKernel`). Weights are rounded to the type of the rows.

    Args:
        slots: the tensors of `PackedShape.tensors()`, slots in front; contiguous, on one device.
        shape: of one packed expert.
        activation, dtype, tables: as of `DecodingKernel`.

    Raises:
        PackError: the tensors are not those of `shape`.
        ValueError: the activation is unknown.
    """

    def __init__(
        self, slots: Sequence[torch.Tensor], shape: PackedShape, activation: str, dtype: torch.dtype,
        tables: Tables | None = None,
    ) -> None:  # fmt: skip
        check_packed(slots, shape)
        self._shape, self._slots = shape, len(slots[0])
        gate, up, down = (packed_of(shape, slots, name) for name in ("gate", "up", "down"))
        super().__init__(gate, up, down, (NARROW, NARROW), activation, None, dtype, tables)

    def run(  # type: ignore[override]  # groups name slots
        self, hidden: torch.Tensor, pairs: torch.Tensor, groups: Sequence[PackedGroup], top_k: int, y: torch.Tensor
    ) -> None:
        """See `PackedKernel.run`; asynchronous."""
        check_call(self._shape, self._slots, hidden, pairs, groups, top_k, y)
        neurons = self._shape.intermediate
        whole = [(start, stop, slot * neurons, neurons, False) for start, stop, slot in groups]
        super().run(hidden, pairs, whole, top_k, y)
