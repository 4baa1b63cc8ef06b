"""Weights of experts in Triton, decoded in registers from the bytes of their slots: published forms, packed replicas.

A weight is the float32 number of `MatrixForm.dequantize`, or of `Quantized.dequantized`, to the bit. Weights are loaded
in words of `Form.word` bytes, up to 16 bytes a load: of 4 but for GGUF's blocks of sizes that 4 does not divide. Scales
are loaded once a group.
"""

# mypy: allow-untyped-defs
# the types of a kernel's arguments are those of its launch
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ...errors import FormError
from ..form_slots import typed
from ..forms import BLOCKS, FLOATS, ExpertForm, MatrixForm
from ..pack import INPUTS, NEURONS, OUTPUTS, PackedShape, tiles
from .bits import above, bytes_of, e2m1, e4m3, in_turn, power
from .gguf_weights import GRIDS, HEADS, grid_words, large_block, small_blocks

_CODES = {"fp8_block": "e4m3", "fp8_channel": "e4m3", "fp8_tensor": "e4m3", "mxfp4": "e2m1", "nvfp4": "e2m1"}
_SCALES = {"U8": "power", "F8_E8M0": "power", "F8_E4M3": "e4m3"}


class Form(NamedTuple):
    """What a kernel is compiled for of a `MatrixForm` and of its slots.

    codes: how weights are written: "float", "e4m3", "e2m1", "int4", "int8", or a type of GGUF. scale: how scales are:
    "number", "power", "e4m3". outputs, inputs: of the matrix. group: inputs, and block: outputs that share a scale.
    groups: scales of a row. word: bytes of a loaded word of weights. row: words of a row of the matrix. head: bytes
    before the codes of GGUF's blocks of 32. large: words of its blocks of 256. first: added to a row's number, and
    step: what it is multiplied by before, so that gate and up are found in one matrix. strides: items between slots of
    the weights (in words), scales, zero points, global scales, biases and orders.
    """

    codes: str
    scale: str
    outputs: int
    inputs: int
    group: int
    block: int
    groups: int
    word: int
    row: int
    head: int
    large: int
    zeros: bool
    order: bool
    divides: bool
    bias: bool
    first: int
    step: int
    strides: tuple[int, ...]


class Packed(NamedTuple):
    """As `Form`, of a matrix of a packed replica (`kernels.pack`), whose words are of four inputs.

    wide: outputs of a block: of one tile or two. block: words from one to the next. tiles: of inputs that lie together;
    near: words from one to the next, far: from one such run to the next. scale_block, scale_group: as block and far, of
    scales. first, scale_first: where the matrix begins.
    """

    bits: int
    group: int
    outputs: int
    inputs: int
    groups: int
    wide: int
    block: int
    tiles: int
    near: int
    far: int
    scale_block: int
    scale_group: int
    first: int
    scale_first: int
    strides: tuple[int, ...]
    codes: str = "packed"
    order: bool = False
    bias: bool = False


class Matrix(NamedTuple):
    """What a kernel gets of a matrix.

    tensors: weights, scales (or a grid), zero points, global scales, biases, orders; those that there are not are the
    weights.
    """

    tensors: tuple[torch.Tensor, ...]
    form: Form | Packed


def matrix_of(
    matrix: MatrixForm, parts: Mapping[str, torch.Tensor], bias: str = "", first: int = 0, step: int = 1
) -> Matrix:
    """A matrix in its published form.

    Args:
        parts: uint8 [S, bytes] of each part, and of `bias`.
        bias: type of the biases; "": there are none.
        first, step: as of `Form`.

    Raises:
        FormError: weights are not aligned to the words of their blocks.
    """
    octets = parts["weight"]
    row_bytes = octets.shape[1] // matrix.outputs
    size, nbytes, _ = BLOCKS.get(matrix.kind, (0, 4, ()))
    if matrix.kind in FLOATS:
        codes, word, weight, row = "float", 1, typed(octets, FLOATS[matrix.kind]), matrix.inputs
    else:
        codes = f"int{matrix.bits}" if matrix.kind == "int" else _CODES.get(matrix.kind, matrix.kind)
        word = math.gcd(4, row_bytes, nbytes, octets.stride(0), octets.data_ptr())
        if size and word != math.gcd(4, nbytes):
            raise FormError(f"weights of {matrix.kind} do not begin at a multiple of {math.gcd(4, nbytes)} bytes",
                            "align the slots")  # fmt: skip
        weight, row = octets.view({4: torch.int32, 2: torch.int16, 1: torch.uint8}[word]), row_bytes // word
    types = {name: code for name, (code, _) in matrix.parts().items()} | ({"bias": bias} if bias else {})
    tensors, strides = [weight], [weight.stride(0)]
    for part in ("scale", "zero", "global_scale", "bias", "order"):
        tensors.append(typed(parts[part], types[part]) if part in types else weight)
        strides.append(tensors[-1].stride(0))
    if matrix.kind in GRIDS:
        tensors[1], strides[1] = grid_words(matrix.kind, weight.device), 0
    return Matrix(tuple(tensors), Form(
        codes, _SCALES.get(matrix.scale, "number"), matrix.outputs, matrix.inputs, matrix.group or matrix.inputs,
        {"fp8_block": matrix.block, "fp8_tensor": matrix.outputs}.get(matrix.kind, 1),
        matrix.parts().get("scale", ("", (1, 1)))[1][-1], word, row, HEADS.get(matrix.kind, 0),
        nbytes // word if size == 256 else 0, matrix.zeros, matrix.order, matrix.divides, bool(bias), first, step,
        tuple(strides),
    ))  # fmt: skip


def expert_matrix(
    expert: ExpertForm, parts: Mapping[str, torch.Tensor], name: str, first: int = 0, step: int = 1
) -> Matrix:
    """A matrix of an expert. parts: uint8 [S, bytes] by the names of `ExpertForm.parts`. Else as `matrix_of`."""
    own = {part.removeprefix(f"{name}."): slots for part, slots in parts.items() if part.startswith(f"{name}.")}
    return matrix_of(expert.matrices[name], own, expert.bias, first, step)


def packed_of(shape: PackedShape, slots: Sequence[torch.Tensor], name: str) -> Matrix:
    """A matrix of packed replicas: "gate", "up" or "down". slots: the tensors of `PackedShape.tensors()` [S, ...]."""
    codes, scales = (slots[2], slots[3]) if name == "down" else (slots[0], slots[1])
    weight, tile = codes.view(torch.int32), OUTPUTS * shape.bits  # words of a tile
    strides = (weight[0].numel(), scales[0].numel(), 0, 0, 0, 0)
    if name == "down":
        columns, together, affine = tiles(shape.hidden, OUTPUTS), shape.group // INPUTS, 2 * OUTPUTS
        form = Packed(
            shape.bits, shape.group, shape.hidden, shape.intermediate, tiles(shape.intermediate, shape.group), OUTPUTS,
            together * tile, together, tile, columns * together * tile, affine, columns * affine, 0, 0, strides,
        )  # fmt: skip
    else:
        halves, behind = NEURONS // OUTPUTS, int(name == "up")
        groups, affine = tiles(shape.hidden, shape.group), 2 * halves * 2 * OUTPUTS
        form = Packed(
            shape.bits, shape.group, shape.intermediate, shape.hidden, groups, NEURONS,
            tiles(shape.hidden, INPUTS) * 2 * halves * tile, 1, 0, 2 * halves * tile, groups * affine, affine,
            behind * halves * tile, behind * affine // 2, strides,
        )  # fmt: skip
    return Matrix((weight, scales, weight, weight, weight, weight), form)


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
    if FORM.scale == "power":
        factor = power(factor.to(tl.int32))
    elif FORM.scale == "e4m3":
        of_all = tl.load(whole)
        small = e4m3(factor.to(tl.int32))
        factor = tl.div_rn(small, of_all) if FORM.divides else small * of_all
    else:
        factor = factor.to(tl.float32)
    codes = tl.reshape(codes, (N, GROUPS, K // GROUPS))
    if FORM.codes == "e4m3":
        value = e4m3(codes)
    elif FORM.codes == "e2m1":
        value = e2m1(codes)
    elif FORM.zeros:
        least = tl.load(zero + place, mask=there, other=0).to(tl.int32)
        value = above(codes, 0) - above(least, 0)[:, :, None]
    else:
        value = above(codes, 8 if FORM.codes == "int4" else 128)
    return tl.reshape(value * factor[:, :, None], (N, K))


@triton.jit
def _packed(weight, scale, n, start, FORM: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """As `weights`, of a packed replica. A word has codes of four inputs in each of its bytes' fields."""
    BITS: tl.constexpr = FORM.bits
    TILES: tl.constexpr = K // 32
    GROUPS: tl.constexpr = K // FORM.group
    # [N / 16, 16 outputs of a tile, inputs]: what fills a tile up is there
    of = tl.minimum(n // 16 + tl.arange(0, N // 16), (FORM.outputs - 1) // 16)
    block, half_of = of // (FORM.wide // 16), of % (FORM.wide // 16)
    lane = tl.arange(0, 16)[None, :, None]
    tile = start // 32 + tl.arange(0, TILES)
    place = tile // FORM.tiles * FORM.far + tile % FORM.tiles * FORM.near
    inside = (tile * 32 < FORM.inputs)[None, None, :]
    begin = (block * FORM.block + half_of * (16 * BITS) + FORM.first).to(tl.int64)
    begin = weight + begin[:, None, None] + place[None, None, :] + lane
    octet = (tl.arange(0, 4) * 8)[None, None, None, :]
    if BITS == 3:  # vectors 0 to 5 lie in pairs, of 6 and 7 two bits beside them and one in the third word
        first = tl.reshape(tl.load(begin, mask=inside, other=0), (N, TILES, 1, 1))
        second = tl.reshape(tl.load(begin + 16, mask=inside, other=0), (N, TILES, 1, 1))
        third = tl.reshape(tl.load(begin + 32, mask=inside, other=0), (N, TILES, 1, 1))
        v = tl.arange(0, 8)[None, None, :, None]
        word = tl.where(v < 6, tl.where(v < 2, first, tl.where(v < 4, second, third)), tl.where(v == 6, first, second))
        low = word >> (tl.where(v < 6, v % 2 * 3, 6) + octet)
        codes = tl.where(v < 6, low & 7, low & 3 | (third >> (v + octet) & 1) << 2)  # [N, TILES, 8, 4]
    else:
        q = tl.arange(0, 32 // BITS)
        shift = (q // 4 * BITS + q % 4 * 8)[None, None, None, :]
        vector = (tl.arange(0, BITS) * 16)[None, None, None, :]
        words = tl.load(begin[:, :, :, None] + vector, mask=inside[:, :, :, None], other=0)
        codes = tl.reshape(words, (N, TILES, BITS, 1)) >> shift & ((1 << BITS) - 1)
    group = start // FORM.group + tl.arange(0, GROUPS)
    table = scale + (block * FORM.scale_block + half_of * 32 + FORM.scale_first)[:, None, None]
    table += (group * FORM.scale_group)[None, None, :] + lane
    there = (group < FORM.groups)[None, None, :]
    factor = tl.reshape(tl.load(table, mask=there, other=0.0), (N, GROUPS, 1)).to(tl.float32)
    offset = tl.reshape(tl.load(table + 16, mask=there, other=0.0), (N, GROUPS, 1)).to(tl.float32)
    value = factor * above(tl.reshape(codes, (N, GROUPS, FORM.group)), 0) + offset
    return tl.reshape(value, (N, K))


@triton.jit
def weights(
    weight, scale, zero, whole, n, start, FORM: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """float32 [N, K]: weights of a slot from output n and input `start` on. Behind the matrix they are finite."""
    if FORM.codes == "packed":
        return _packed(weight, scale, n, start, FORM, N, K)
    else:
        return published(weight, scale, zero, whole, n + tl.arange(0, N), start, FORM, N, K)


@triton.jit
def published(
    weight, scale, zero, whole, output, start, FORM: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """As `weights`, of a `Form`, for outputs [N]."""
    row = tl.minimum(output * FORM.step + FORM.first, FORM.outputs - 1)
    at = row.to(tl.int64) * FORM.row
    if FORM.large > 0:
        return large_block(weight, scale, at + start // 256 * FORM.large, FORM.codes)
    elif FORM.head > 0:
        return small_blocks(weight, at, start, FORM, N, K)
    elif FORM.codes == "float":
        column = start + tl.arange(0, K)
        return tl.load(weight + at[:, None] + column[None, :], mask=(column < FORM.inputs)[None, :], other=0.0)
    else:
        HALVES: tl.constexpr = FORM.codes == "e2m1" or FORM.codes == "int4"
        COUNT: tl.constexpr = K // 2 if HALVES else K  # bytes
        word = start // (2 if HALVES else 1) // FORM.word + tl.arange(0, COUNT // FORM.word)
        there = (word < FORM.row)[None, :]
        codes = bytes_of(weight + at[:, None] + word[None, :], there, FORM.inputs % K != 0, FORM.word, N, COUNT)
        if HALVES:
            codes = in_turn(codes, N, K)
        return _scaled(codes, scale, zero, whole, row, start, FORM, N, K)
