"""Experts in the packed replica format on a GPU, in Triton: dequantise and multiply (docs/store-format.md).

    act[p, j] = act(gate_j . x) * (up_j . x)       y[pair p] = sum over neurons j of act[p, j] * down_j

Unlike the C++ kernel (`packed_ffn`), which rounds activations to eight bits, a GPU multiplies codes as numbers of the
activations' type, in which every code (at most 255) is exact. A group of inputs gives

    scale * (codes . x) + offset * sum(x)

in float32, so only the rounding of sums, and of the neurons' values between the projections, differs from
`dequantized()` weights in full precision.

Two launches for each expert: neurons in blocks of 32, then outputs in blocks of 32. A row's result depends only on its
own values, the expert and the expert's row class in the call (up to 16 rows or more).

With TRITON_INTERPRET=1 in the environment before triton is imported it runs on tensors of the CPU, except for bfloat16.
Codes become floats by way of float32, which the interpreter supports.
"""

# mypy: allow-untyped-defs
# the types of a kernel's arguments are those of its launch
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..device import on_device
from ..expert_ffn import DECODE_ROWS
from ..pack import INPUTS, NEURONS, OUTPUTS, PackedShape, PackError, tiles
from ..packed_ffn import ACTIVATIONS
from ..packed_slots import PackedGroup, check_call, check_slots
from .expert_ffn import activate
from .launch import Launch

PREFILL_ROWS = 64  # of a block; decode has DECODE_ROWS
# Values such as 1 and multiples of 16 would compile apart; top_k, too, changes where pairs are dropped.
_UNSPECIALISED = ["start", "stop", "slot"]


@triton.jit
def _codes(base, outputs, inputs, known, step, BITS: tl.constexpr):
    """Codes of packed tiles [C, O], as int32.

    base: of the first tile. outputs: [1, O], each within its tile (0..15). inputs: [C, 1], within their tiles (0..31).
    known: [C, O], where to read; elsewhere 0. step: [C, O], bytes from base to each tile.
    """
    vector = inputs // 4  # of the tile's eight
    byte = 4 * outputs + inputs % 4  # [C, O]
    if BITS == 3:
        split = vector >= 6
        home = tl.where(split, vector - 6, vector // 2)
        shift = tl.where(split, 6, 3 * (vector % 2))
        mask = tl.where(split, 3, 7)
        first = tl.load(base + step + home * 64 + byte, mask=known, other=0).to(tl.int32)
        rest = tl.load(base + step + 2 * 64 + byte, mask=known & split, other=0).to(tl.int32)
        codes = ((first >> shift) & mask) | (((rest >> vector) & 1) << 2)
    else:
        FIELDS: tl.constexpr = 8 // BITS
        word = tl.load(base + step + (vector // FIELDS) * 64 + byte, mask=known, other=0).to(tl.int32)
        codes = (word >> ((vector % FIELDS) * BITS)) & ((1 << BITS) - 1)
    return codes


@triton.jit(do_not_specialize=[*_UNSPECIALISED, "top_k"])
def _gate_up_kernel(
    hidden, pairs, codes, scales, act, start, stop, slot, top_k, H, N, codes_slot, scales_slot,
    BITS: tl.constexpr, GROUP: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """act[p, j] for rows `start` to `stop` of the pairs and the block of 32 neurons of program 0."""
    block = tl.program_id(0)
    row = start + tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # [R]
    there = row < stop
    token = tl.load(pairs + row, mask=there, other=0) // top_k
    neuron = tl.arange(0, 32)[None, :]  # [1, 32], within the block
    within = tl.arange(0, GROUP)[:, None]  # [G, 1]
    columns = (H + 31) // 32  # input tiles
    groups = (H + GROUP - 1) // GROUP
    # [tile, gate or up, half, 64 b] and [group, gate or up, half, scale or offset, 16] of this block
    codes += slot.to(tl.int64) * codes_slot + block.to(tl.int64) * columns * (4 * 64 * BITS)
    scales += slot.to(tl.int64) * scales_slot + block.to(tl.int64) * groups * 128
    lane = neuron % 16
    half = neuron // 16
    affine = tl.arange(0, 32) // 16 * 32 + tl.arange(0, 32) % 16  # [32]
    gate = tl.zeros([ROWS, 32], tl.float32)
    up = tl.zeros([ROWS, 32], tl.float32)
    for group in range(groups):
        column = group * GROUP + tl.arange(0, GROUP)  # [G]
        x = tl.load(
            hidden + token[:, None] * H + column[None, :], mask=there[:, None] & (column[None, :] < H), other=0.0
        )  # [R, G]
        total = tl.sum(x.to(tl.float32), axis=1)[:, None]  # [R, 1]
        tile = group * (GROUP // 32) + within // 32  # [G, 1]
        known = (tile < columns) & (neuron < 32)
        step = tile * (4 * 64 * BITS) + half * (64 * BITS)
        of_gate = _codes(codes, lane, within % 32, known, step, BITS).to(tl.float32).to(x.dtype)
        of_up = _codes(codes, lane, within % 32, known, step + 2 * 64 * BITS, BITS).to(tl.float32).to(x.dtype)
        table = scales + group * 128 + affine
        gate += tl.dot(x, of_gate, input_precision="ieee") * tl.load(table).to(tl.float32)[None, :]
        gate += total * tl.load(table + 16).to(tl.float32)[None, :]
        up += tl.dot(x, of_up, input_precision="ieee") * tl.load(table + 64).to(tl.float32)[None, :]
        up += total * tl.load(table + 80).to(tl.float32)[None, :]
    out = activate(gate, ACTIVATION) * up
    column = block * 32 + tl.arange(0, 32)
    place = act + (row - start).to(tl.int64)[:, None] * N + column[None, :]
    tl.store(place, out.to(act.dtype.element_ty), mask=there[:, None] & (column[None, :] < N))


@triton.jit(do_not_specialize=_UNSPECIALISED)
def _down_kernel(
    act, pairs, codes, scales, y, start, stop, slot, H, N, codes_slot, scales_slot,
    BITS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """y[pair] for rows `start` to `stop` and the block of 32 outputs of program 0."""
    block = tl.program_id(0)
    row = start + tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # [R]
    there = row < stop
    output = block * 32 + tl.arange(0, 32)[None, :]  # [1, 32]
    within = tl.arange(0, GROUP)[:, None]  # [G, 1]
    columns = (H + 15) // 16  # output tiles
    # [group, output tile, input tile of the group, 64 b] and [group, output tile, scale or offset, 16]
    codes += slot.to(tl.int64) * codes_slot
    scales += slot.to(tl.int64) * scales_slot
    tile = output // 16
    known = (tile < columns) & (within < GROUP)
    flat = block * 32 + tl.arange(0, 32)  # [32]
    affine = flat // 16 * 32 + flat % 16
    sums = tl.zeros([ROWS, 32], tl.float32)
    for group in range((N + GROUP - 1) // GROUP):
        neuron = group * GROUP + tl.arange(0, GROUP)  # [G]
        place = act + (row - start).to(tl.int64)[:, None] * N + neuron[None, :]
        h = tl.load(place, mask=there[:, None] & (neuron[None, :] < N), other=0.0)  # [R, G]
        total = tl.sum(h.to(tl.float32), axis=1)[:, None]
        step = (tile * (GROUP // 32) + within // 32) * (64 * BITS)
        base = codes + group * columns * (GROUP // 32 * 64 * BITS)
        of_down = _codes(base, output % 16, within % 32, known, step, BITS).to(tl.float32).to(h.dtype)
        table = scales + group * columns * 32 + affine
        real = flat // 16 < columns
        scale = tl.load(table, mask=real, other=0.0).to(tl.float32)[None, :]
        sums += tl.dot(h, of_down, input_precision="ieee") * scale
        sums += total * tl.load(table + 16, mask=real, other=0.0).to(tl.float32)[None, :]
    pair = tl.load(pairs + row, mask=there, other=0)
    tl.store(y + pair[:, None] * H + output, sums.to(y.dtype.element_ty), mask=there[:, None] & (output < H))


class TritonPackedKernel:
    """`PackedKernel` on tensors of a GPU.

    Args:
        slots: the tensors of `PackedShape.tensors()`, slots in front; contiguous, on one device.
        shape: of one packed expert.
        activation: a key of `packed_ffn.ACTIVATIONS`.

    Raises:
        PackError: the tensors are not those of `shape`.
        ValueError: the activation is unknown.
    """

    name = "triton"

    def __init__(self, slots: Sequence[torch.Tensor], shape: PackedShape, activation: str) -> None:
        if activation not in ACTIVATIONS:
            raise ValueError(f"there is no activation {activation}: choose one of {', '.join(ACTIVATIONS)}")
        check_slots(slots, shape)
        if (INPUTS, NEURONS, OUTPUTS) != (32, 32, 16):
            raise PackError("the Triton kernel is written for tiles of 16 outputs by 32 inputs in blocks of 32 neurons")
        self._gate_up, self._gate_up_scales, self._down, self._down_scales = slots
        self._shape, self._activation = shape, ACTIVATIONS[activation]
        self._sizes = [tensor[0].numel() for tensor in slots]  # items of a slot
        self._launches = {rows: self._launches_of(rows) for rows in (DECODE_ROWS, PREFILL_ROWS)}

    def run(
        self, hidden: torch.Tensor, pairs: torch.Tensor, groups: Sequence[PackedGroup], top_k: int, y: torch.Tensor
    ) -> None:
        shape, slots = self._shape, len(self._gate_up)
        check_call(shape, slots, hidden, pairs, groups, top_k, y)
        hidden, pairs = hidden.contiguous(), pairs.contiguous()
        most = max((stop - start for start, stop, _ in groups), default=0)
        act = hidden.new_empty((most, shape.intermediate))  # reused: the stream runs expert after expert
        sizes = self._sizes
        with on_device(self._gate_up.device):
            for start, stop, slot in groups:
                if start == stop:
                    continue
                rows = DECODE_ROWS if stop - start <= DECODE_ROWS else PREFILL_ROWS
                blocks = tiles(stop - start, rows)
                gate_up, down = self._launches[rows]
                gate_up(
                    (tiles(shape.intermediate, 32), blocks, 1),
                    hidden, pairs, self._gate_up, self._gate_up_scales, act, start, stop, slot, top_k,
                    shape.hidden, shape.intermediate, sizes[0], sizes[1],
                )  # fmt: skip
                down(
                    (tiles(shape.hidden, 32), blocks, 1),
                    act, pairs, self._down, self._down_scales, y, start, stop, slot,
                    shape.hidden, shape.intermediate, sizes[2], sizes[3],
                )  # fmt: skip

    def _launches_of(self, rows: int) -> tuple[Launch, Launch]:
        """Of gate_up and down."""
        bits, group = self._shape.bits, self._shape.group
        return (
            Launch(_gate_up_kernel, BITS=bits, GROUP=group, ACTIVATION=self._activation, ROWS=rows, num_warps=4),
            Launch(_down_kernel, BITS=bits, GROUP=group, ROWS=rows, num_warps=4),
        )
