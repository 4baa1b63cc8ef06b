"""Experts in published forms on a GPU, straight from slots, as `expert_ffn` runs those of the compute's type.

A call is the same table of tiles and the same two launches. A program decodes the weights that it multiplies, in
registers: a dequantized matrix is never in memory.

    a[row, j] = act(gate[j] . x[row] + bias, up[j] . x[row] + bias)                  j < I
    y[pair]   = down . a[row] + bias

A weight is the float32 number of `MatrixForm.dequantize` to the bit, rounded to the type of the rows as the torch
reference rounds it. Sums are float32, and `a` is rounded to the rows' type between the launches. A row's result depends
only on its own values, the expert and the expert's row class.

Weights are loaded in words of `Form.word` bytes, up to 16 bytes a load: 4 for all forms but GGUF's of 34, 18 and 210
bytes a block, which are aligned to 2, and of 17, aligned to 1. Scales are loaded once a group.

With TRITON_INTERPRET=1 in the environment before triton is imported it runs on tensors of the CPU.
"""

# mypy: allow-untyped-defs
# the types of a kernel's arguments are those of its launch
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ...errors import FormError
from ..expert_ffn import MOST_ROWS, Gate, Group, RowClass, Tables
from ..form_ffn import FORM_ACTIVATIONS
from ..form_slots import TorchFormKernel, check_slots, typed
from ..forms import BLOCKS, FLOATS, ExpertForm, MatrixForm, ceil_div
from ..host_experts import whole_groups
from .expert_ffn import _COLUMNS, PAD, LaunchedKernel, activate
from .launch import Launch

_FP8, _E2M1, _INT4, _INT8, _FLOAT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
_Q8_0, _Q4_0, _MXFP4_GGUF = tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
_Q4_K, _Q5_K, _Q6_K = tl.constexpr(8), tl.constexpr(9), tl.constexpr(10)
_CODES = {
    "fp8_block": _FP8, "fp8_channel": _FP8, "fp8_tensor": _FP8, "mxfp4": _E2M1, "nvfp4": _E2M1,
    **dict.fromkeys(FLOATS, _FLOAT),
    "q8_0": _Q8_0, "q4_0": _Q4_0, "mxfp4_gguf": _MXFP4_GGUF, "q4_k": _Q4_K, "q5_k": _Q5_K, "q6_k": _Q6_K,
}  # fmt: skip
_INT_CODES = {4: _INT4, 8: _INT8}  # by bits
_NUMBER, _POWER, _E4M3 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_SCALES = {"U8": _POWER, "F8_E8M0": _POWER, "F8_E4M3": _E4M3}
_GPT_OSS = tl.constexpr(FORM_ACTIVATIONS["gpt_oss"])


class Form(NamedTuple):
    """What a kernel is compiled for of a `MatrixForm` and of its slots.

    codes, scale: numbers of how weights and scales are written. outputs, inputs: of the matrix. group: inputs, and
    block: outputs that share a scale. groups: scales of a row. word: bytes of a loaded word of weights. row: words of a
    row of the matrix. first: added to a row's number, and step: what it is multiplied by before, so that gate and up
    are found in one matrix. strides: items between slots of the weights (in words), scales, zero points, global scales,
    orders and biases.
    """

    codes: int
    scale: int
    outputs: int
    inputs: int
    group: int
    block: int
    groups: int
    word: int
    row: int
    zeros: bool
    order: bool
    divides: bool
    bias: bool
    first: int
    step: int
    strides: tuple[int, int, int, int, int, int]


# -- decoding: int32 codes to float32 numbers, exactly -------------------------------------------------------------
# Bits are placed as a float32 of a small exponent and multiplied by a power of two: right for subnormal codes, too.


@triton.jit
def _e4m3(byte):
    """float8 e4m3fn; NaN is not kept."""
    bits = ((byte & 128) << 24) | ((byte & 127) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120


@triton.jit
def _e2m1(code):
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126


@triton.jit
def _power(byte):
    """2**(byte - 127)."""
    return tl.where(byte == 0, 0x00400000, byte << 23).to(tl.float32, bitcast=True)


@triton.jit
def _above(code, LESS: tl.constexpr):
    """code - LESS, of codes from 0 to 2**22: without the slow conversion of integers."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + LESS)


@triton.jit
def _half(word):
    """The float16 in the low bits of an int32."""
    return (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _bytes(at, there, MASKED: tl.constexpr, WORD: tl.constexpr, N: tl.constexpr, COUNT: tl.constexpr):
    """[N, COUNT] bytes as int32, from pointers to words [N, COUNT / WORD]; those that are not `there` are 0."""
    word = tl.load(at, mask=there, other=0) if MASKED else tl.load(at)
    word = word.to(tl.int32)
    if WORD == 4:
        even, odd = tl.join(word & 255, (word >> 16) & 255), tl.join((word >> 8) & 255, (word >> 24) & 255)
        word = tl.join(even, odd)
    elif WORD == 2:
        word = tl.join(word & 255, (word >> 8) & 255)
    else:
        word = word & 255
    return tl.reshape(word, (N, COUNT))


@triton.jit
def _in_turn(byte, N: tl.constexpr, COUNT: tl.constexpr):
    """[N, COUNT] codes of four bits from [N, COUNT / 2] bytes: of each the low, then the high one."""
    return tl.reshape(tl.join(byte & 15, byte >> 4), (N, COUNT))


@triton.jit
def _low_then_high(byte, N: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """[N, 2 PARTS, SIZE] codes of four bits: of each run of SIZE bytes all low, then all high ones."""
    both = tl.reshape(byte, (N, PARTS, SIZE))
    both = tl.permute(tl.join(both & 15, both >> 4), (0, 1, 3, 2))
    return tl.reshape(both, (N, 2 * PARTS, SIZE))


@triton.jit
def _k_quants(weight, at, Q5: tl.constexpr, N: tl.constexpr):
    """[N, 256] weights of one block of Q4_K or Q5_K a row, from the words `at` [N] on."""
    scales = tl.load(weight + at)
    first, second, rest = tl.load(weight + at + 1), tl.load(weight + at + 2), tl.load(weight + at + 3)
    j = tl.arange(0, 8)[None, :]
    shift = (j & 3) * 8
    first, second, rest = first[:, None] >> shift & 255, second[:, None] >> shift & 255, rest[:, None] >> shift & 255
    factor = tl.where(j < 4, first & 63, rest & 15 | first >> 6 << 4)  # [N, 8]
    least = tl.where(j < 4, second & 63, rest >> 4 | second >> 6 << 4)
    factor = _half(scales)[:, None] * _above(factor, 0)
    least = _half(scales >> 16)[:, None] * _above(least, 0)
    start = at[:, None] + (12 if Q5 else 4)
    codes = _low_then_high(_bytes(weight + start + tl.arange(0, 32)[None, :], True, False, 4, N, 128), N, 4, 32)
    if Q5:
        high = _bytes(weight + at[:, None] + 4 + tl.arange(0, 8)[None, :], True, False, 4, N, 32)
        codes |= ((high[:, None, :] >> j[:, :, None]) & 1) << 4
    return tl.reshape(factor[:, :, None] * _above(codes, 0) - least[:, :, None], (N, 256))


@triton.jit
def _q6_k(weight, at, N: tl.constexpr):
    """[N, 256] weights of one block of Q6_K a row, from the words `at` [N] on."""
    start = weight + at[:, None]
    low = _low_then_high(_bytes(start + tl.arange(0, 64)[None, :], True, False, 2, N, 128), N, 2, 64)
    high = tl.reshape(_bytes(start + 64 + tl.arange(0, 32)[None, :], True, False, 2, N, 64), (N, 2, 1, 32))
    high = (high >> (2 * tl.arange(0, 4))[None, None, :, None]) & 3
    codes = tl.reshape(tl.reshape(low, (N, 2, 4, 32)) | high << 4, (N, 16, 16))
    scale = _bytes(start + 96 + tl.arange(0, 8)[None, :], True, False, 2, N, 16)
    factor = _half(tl.load(weight + at + 104).to(tl.int32))[:, None] * _above(scale ^ 128, 128)  # signed
    return tl.reshape(factor[:, :, None] * _above(codes, 32), (N, 256))


@triton.jit
def _small_blocks(weight, at, start, FORM: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """[N, K] weights of GGUF's blocks of 32 inputs, of rows whose first words are `at` [N]."""
    EVEN: tl.constexpr = FORM.inputs % K == 0
    PER: tl.constexpr = (32 if FORM.codes == _Q8_0 else 16) // FORM.word  # words of the codes of a block
    HEAD: tl.constexpr = (1 if FORM.codes == _MXFP4_GGUF else 2) // FORM.word
    first = start // 32
    block = first + tl.arange(0, K // 32)
    scale = tl.load(
        weight + at[:, None] + (block * (PER + HEAD))[None, :], mask=(block * 32 < FORM.inputs)[None, :], other=0
    ).to(tl.int32)  # [N, K / 32]
    c = tl.arange(0, PER * (K // 32))
    word = (first + c // PER) * (PER + HEAD) + HEAD + c % PER
    there = (first + c // PER)[None, :] * 32 < FORM.inputs
    codes = _bytes(weight + at[:, None] + word[None, :], there, not EVEN, FORM.word, N, PER * FORM.word * (K // 32))
    if FORM.codes == _Q8_0:
        value = tl.reshape(_above(codes ^ 128, 128), (N, K // 32, 32)) * _half(scale)[:, :, None]
    else:
        codes = tl.reshape(_low_then_high(codes, N, K // 32, 16), (N, K // 32, 32))
        if FORM.codes == _Q4_0:
            value = _above(codes, 8) * _half(scale)[:, :, None]
        else:
            value = _e2m1(codes) * _power(scale & 255)[:, :, None]
    return tl.reshape(value, (N, K))


@triton.jit
def _scaled(codes, scale, zero, whole, row, start, FORM: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """[N, K] weights from codes, by scales that are arrays of their own, of these rows [N]."""
    # a scale for all K inputs, for each of several groups, or where groups and tiles do not fit, for each weight
    ONE: tl.constexpr = FORM.groups == 1 or FORM.group % K == 0
    MANY: tl.constexpr = not ONE and K % FORM.group == 0
    GROUPS: tl.constexpr = 1 if ONE else (K // FORM.group if MANY else K)
    if ONE or MANY:  # noqa: SIM108
        group = start // FORM.group + tl.arange(0, GROUPS)
    else:
        group = (start + tl.arange(0, K)) // FORM.group
    place = (row // FORM.block)[:, None] * FORM.groups + group[None, :]  # [N, GROUPS]
    there = (group < FORM.groups)[None, :]
    factor = tl.load(scale + place, mask=there, other=0)
    if FORM.scale == _POWER:
        factor = _power(factor.to(tl.int32))
    elif FORM.scale == _E4M3:
        of_all = tl.load(whole)
        small = _e4m3(factor.to(tl.int32))
        factor = tl.div_rn(small, of_all) if FORM.divides else small * of_all
    else:
        factor = factor.to(tl.float32)
    codes = tl.reshape(codes, (N, GROUPS, K // GROUPS))
    if FORM.codes == _FP8:
        value = _e4m3(codes)
    elif FORM.codes == _E2M1:
        value = _e2m1(codes)
    elif FORM.zeros:
        least = tl.load(zero + place, mask=there, other=0).to(tl.int32)
        value = _above(codes, 0) - _above(least, 0)[:, :, None]
    else:
        value = _above(codes, 8 if FORM.codes == _INT4 else 128)
    return tl.reshape(value * factor[:, :, None], (N, K))


@triton.jit
def _weights(
    weight, scale, zero, whole, output, start, FORM: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """float32 [N, K]: weights of a slot from input `start` on, for outputs [N]. Behind the matrix they are finite."""
    row = tl.minimum(output * FORM.step + FORM.first, FORM.outputs - 1)
    at = row.to(tl.int64) * FORM.row
    if FORM.codes == _Q4_K or FORM.codes == _Q5_K:
        return _k_quants(weight, at + start // 256 * (FORM.row * 256 // FORM.inputs), FORM.codes == _Q5_K, N)
    elif FORM.codes == _Q6_K:
        return _q6_k(weight, at + start // 256 * 105, N)
    elif FORM.codes == _Q8_0 or FORM.codes == _Q4_0 or FORM.codes == _MXFP4_GGUF:
        return _small_blocks(weight, at, start, FORM, N, K)
    elif FORM.codes == _FLOAT:
        column = start + tl.arange(0, K)
        return tl.load(weight + at[:, None] + column[None, :], mask=(column < FORM.inputs)[None, :], other=0.0)
    else:
        HALVES: tl.constexpr = FORM.codes == _E2M1 or FORM.codes == _INT4
        COUNT: tl.constexpr = K // 2 if HALVES else K  # bytes
        word = start // (2 if HALVES else 1) // FORM.word + tl.arange(0, COUNT // FORM.word)
        there = (word < FORM.row)[None, :]
        codes = _bytes(weight + at[:, None] + word[None, :], there, FORM.inputs % K != 0, FORM.word, N, COUNT)
        if HALVES:
            codes = _in_turn(codes, N, K)
        return _scaled(codes, scale, zero, whole, row, start, FORM, N, K)


@triton.jit
def _rows(x, order, used, start, FORM: tl.constexpr, K: tl.constexpr):
    """[M, K] inputs of rows, whose pointers are x [M], in the order of a matrix's columns."""
    column = start + tl.arange(0, K)
    there = column < FORM.inputs
    if FORM.order:
        column = tl.load(order + column, mask=there, other=0)
    if FORM.inputs % K == 0:
        return tl.load(x[:, None] + column[None, :], mask=used[:, None], other=0.0)
    return tl.load(x[:, None] + column[None, :], mask=used[:, None] & there[None, :], other=0.0)


@triton.jit
def _times(rows, weights, total, WIDEN: tl.constexpr):
    weights = weights.to(rows.dtype)
    if WIDEN:  # the interpreter does not multiply bfloat16
        rows, weights = rows.to(tl.float32), weights.to(tl.float32)
    return tl.dot(rows, tl.trans(weights), total, input_precision="ieee")


@triton.jit
def _biased(total, bias, output, FORM: tl.constexpr):
    if FORM.bias:
        row = tl.minimum(output * FORM.step + FORM.first, FORM.outputs - 1)
        total += tl.load(bias + row).to(tl.float32)[None, :]
    return total


@triton.jit(do_not_specialize=["first_tile", "top_k"])
def _form_gate_up(
    hidden, pairs,
    gate, gate_scale, gate_zero, gate_whole, gate_order, gate_bias, up, up_scale, up_zero, up_whole, up_order, up_bias,
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
    gate_order += slot * GATE.strides[4]
    gate_bias += slot * GATE.strides[5]
    up += slot * UP.strides[0]
    up_scale += slot * UP.strides[1]
    up_zero += slot * UP.strides[2]
    up_whole += slot * UP.strides[3]
    up_order += slot * UP.strides[4]
    up_bias += slot * UP.strides[5]
    gates = tl.zeros((M, N), dtype=tl.float32)
    ups = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, tl.where(n < NEURONS, GATE.inputs, 0), K):
        rows = _rows(x, gate_order, used, start, GATE, K)
        gates = _times(rows, _weights(gate, gate_scale, gate_zero, gate_whole, j, start, GATE, N, K), gates, WIDEN)
        if UP.order:
            rows = _rows(x, up_order, used, start, UP, K)
        ups = _times(rows, _weights(up, up_scale, up_zero, up_whole, j, start, UP, N, K), ups, WIDEN)
    gates, ups = _biased(gates, gate_bias, j, GATE), _biased(ups, up_bias, j, UP)
    if ACTIVATION == _GPT_OSS:
        gates = tl.where(gates > 7.0, 7.0, gates)  # NaN stays
        ups = tl.where(ups > 7.0, 7.0, tl.where(ups < -7.0, -7.0, ups))
        values = gates / (1.0 + tl.exp(-1.702 * gates)) * (ups + 1.0)
    else:
        values = activate(gates, ACTIVATION) * ups
    values = tl.where((j < NEURONS)[None, :], values, 0.0)
    out = activations + (tl.load(tile + 4) + m).to(tl.int64) * STRIDE
    tl.store(out[:, None] + j[None, :], values.to(activations.dtype.element_ty), mask=used[:, None])


@triton.jit(do_not_specialize=["first_tile"])
def _form_down(
    activations, pairs, down, scale, zero, whole, order, bias, y, table, first_tile, H, STRIDE,
    DOWN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    tile = table + (first_tile + tl.program_id(0)) * _COLUMNS
    m = tl.arange(0, M)
    used = m < tl.load(tile + 1)
    pair = tl.load(pairs + tl.load(tile) + m, mask=used, other=0)
    slot = (tl.load(tile + 2) // DOWN.inputs).to(tl.int64)
    h = tl.program_id(1) * N + tl.arange(0, N)
    x = activations + (tl.load(tile + 4) + m).to(tl.int64) * STRIDE
    down += slot * DOWN.strides[0]
    scale += slot * DOWN.strides[1]
    zero += slot * DOWN.strides[2]
    whole += slot * DOWN.strides[3]
    order += slot * DOWN.strides[4]
    bias += slot * DOWN.strides[5]
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, DOWN.inputs, K):
        rows = _rows(x, order, used, start, DOWN, K)
        total = _times(rows, _weights(down, scale, zero, whole, h, start, DOWN, N, K), total, WIDEN)
    total = _biased(total, bias, h, DOWN)
    at = y + pair.to(tl.int64)[:, None] * H + h[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=used[:, None] & (h < H)[None, :])


# -- the kernel ----------------------------------------------------------------------------------------------------


class FormBlocks(NamedTuple):
    """M rows of a tile, N outputs of a program of gate and up, and of down, and its warps."""

    M: int
    gate_up: int
    down: int
    warps: int
    stages: int


# By K, the inputs that a program decodes at a time, and by class of rows: two are enough, since decoding bounds
# prompts, not the product. Shared memory is below 99 KiB on every GPU.
BLOCKS_OF: dict[int, dict[RowClass, FormBlocks]] = {
    128: {"decode": FormBlocks(16, 16, 32, 4, 3), "prefill": FormBlocks(64, 16, 64, 4, 2)},
    256: {"decode": FormBlocks(16, 16, 32, 8, 3), "prefill": FormBlocks(64, 16, 32, 8, 2)},
}


def inputs_of_tile(*matrices: MatrixForm) -> int:
    """K for these matrices, a multiple of their blocks."""
    return 256 if any(BLOCKS.get(matrix.kind, (0,))[0] == 256 for matrix in matrices) else 128


class _Matrix(NamedTuple):
    tensors: tuple[torch.Tensor, ...]  # weights, scales, zero points, global scales, orders, biases
    form: Form


def _matrix(expert: ExpertForm, parts: dict[str, torch.Tensor], name: str, first: int = 0, step: int = 1) -> _Matrix:
    """What a kernel gets of a matrix. parts: uint8 [S, bytes] by name.

    Raises:
        FormError: weights are not aligned to the words of their blocks.
    """
    matrix = expert.matrices[name]
    bytes_of = parts[f"{name}.weight"]
    codes = _INT_CODES[matrix.bits] if matrix.kind == "int" else _CODES[matrix.kind]
    if codes == _FLOAT:
        weight, word, row = typed(bytes_of, FLOATS[matrix.kind]), 1, matrix.inputs
    else:
        row_bytes = bytes_of.shape[1] // matrix.outputs
        block = BLOCKS.get(matrix.kind, (0, 4))[1]
        word = math.gcd(4, row_bytes, block, bytes_of.stride(0), bytes_of.data_ptr())
        if matrix.kind in BLOCKS and word != math.gcd(4, block):
            raise FormError(f"weights of {matrix.kind} do not begin at a multiple of {math.gcd(4, block)} bytes",
                            "align the slots")  # fmt: skip
        weight, row = bytes_of.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[word]), row_bytes // word
    tensors, layout = [weight], expert.parts()
    for part in ("scale", "zero", "global_scale", "order", "bias"):
        whole = f"{name}.{part}"
        tensors.append(typed(parts[whole], layout[whole][0]) if whole in layout else weight)
    shape = matrix.parts().get("scale", ("", (1, 1)))[1]
    strides = tuple(tensor.stride(0) for tensor in tensors)
    return _Matrix(tuple(tensors), Form(
        codes.value, _SCALES.get(matrix.scale, _NUMBER).value, matrix.outputs, matrix.inputs,
        matrix.group or matrix.inputs,
        {"fp8_block": matrix.block, "fp8_tensor": matrix.outputs}.get(matrix.kind, 1), shape[-1], word, row,
        matrix.zeros, matrix.order, matrix.divides, bool(expert.bias), first, step,
        strides,
    ))  # fmt: skip


def _launch_of(kernel: Any, blocks: FormBlocks, **fixed: Any) -> Launch:
    """No sums are fused into products: weights have the reference's bits."""
    given = {**fixed, "M": blocks.M}
    constants = {name: given[name] for name in kernel.arg_names if name in given}
    return Launch(
        kernel, **constants, num_warps=blocks.warps, num_stages=blocks.stages, enable_fp_fusion=False
    )  # fmt: skip


class TritonFormKernel(LaunchedKernel):
    """Experts in a published form, on slots, by Triton.

    Args:
        slots: as of `TorchFormKernel`.
        activation: a key of `form_ffn.FORM_ACTIVATIONS`.
        gate: as of `TorchFormKernel`, which runs calls in other types.
        dtype: of rows.
        tables: as of `TritonKernel`.

    Attributes:
        products: the launches of gate and up, and of down. operands: tensors of the slots that each gets.

    Raises:
        FormError: the slots are not of this form, or there is no kernel for it (`supports`).
    """

    def __init__(
        self, slots: Sequence[torch.Tensor], form: ExpertForm, activation: str, gate: Gate, dtype: torch.dtype,
        tables: Tables | None = None,
    ) -> None:  # fmt: skip
        if not self.supports(form, activation):
            raise FormError("there is no Triton kernel for this form", "use the torch kernel")
        check_slots(slots, form)
        parts = dict(zip(form.parts(), slots, strict=True))
        if form.gate_up is None:
            gates, ups = _matrix(form, parts, "gate"), _matrix(form, parts, "up")
            k = inputs_of_tile(form.matrices["gate"], form.matrices["up"])
        else:
            step, behind = (2, 1) if form.interleaved else (1, form.intermediate)
            gates, ups = (_matrix(form, parts, "gate_up", first, step) for first in (0, behind))
            k = inputs_of_tile(form.gate_up)
        down = _matrix(form, parts, "down")
        self._form, self._slots = form, len(slots[0])
        widen = slots[0].device.type == "cpu" and dtype == torch.bfloat16
        fixed = {"GATE": gates.form, "UP": ups.form, "ACTIVATION": FORM_ACTIVATIONS[activation]}
        low_k = inputs_of_tile(form.down)
        self.operands = (*gates.tensors, *ups.tensors), down.tensors
        self.products: dict[RowClass, tuple[Launch, Launch]] = {}
        classes = []
        for name, up_blocks in BLOCKS_OF[k].items():
            low_blocks = BLOCKS_OF[low_k][name]
            first = _launch_of(
                _form_gate_up, up_blocks, N=up_blocks.gate_up, K=k, WIDEN=widen, **fixed, NEURONS=form.intermediate
            )  # fmt: skip
            second = _launch_of(_form_down, low_blocks, N=low_blocks.down, K=low_k, WIDEN=widen, DOWN=down.form)
            self.products[name] = first, second
            classes.append((MOST_ROWS[name], up_blocks.M, first, up_blocks.gate_up, second, low_blocks.down))
        super().__init__(
            *self.operands, classes,
            (self._slots * form.intermediate, form.intermediate, form.hidden, ceil_div(form.intermediate, PAD) * PAD),
            dtype, slots[0].device, TorchFormKernel(slots, form, gate), tables,
        )  # fmt: skip

    @staticmethod
    def supports(form: ExpertForm, activation: str | None) -> bool:
        """Whether there is a kernel for all matrices of this form."""
        known = {*_CODES, "int"}
        return activation in FORM_ACTIVATIONS and all(matrix.kind in known for matrix in form.matrices.values())

    def run(self, hidden: torch.Tensor, pairs: torch.Tensor, groups: list[Group], top_k: int, y: torch.Tensor) -> None:
        """See `ExpertKernel.run`; asynchronous.

        Raises:
            ValueError: shapes do not fit together, a group is no whole expert, or lies outside the pairs or the pool.
        """
        form = self._form
        whole_groups(form.hidden, form.intermediate, range(self._slots), hidden, pairs, groups, top_k, y)
        super().run(hidden, pairs, groups, top_k, y)
