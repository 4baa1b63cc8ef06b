"""Products with matrices in published forms on a GPU, in Triton: a tile of weights is decoded where it is multiplied.

For `fp8_block`, `fp8_channel`, `fp8_tensor`, `mxfp4`, `nvfp4` and `int`. A weight is the float32 number of
`MatrixForm.dequantize`, rounded to the type of the rows, as the torch reference rounds it; sums are float32. A row's
result depends only on its own values, the expert and the expert's row class in the call (up to 16 rows or more).

With TRITON_INTERPRET=1 in the environment before triton is imported it runs on tensors of the CPU, except for bfloat16.
"""

# mypy: allow-untyped-defs
# the types of a kernel's arguments are those of its launch
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ...errors import FormError
from ..device import on_device
from ..expert_ffn import DECODE_ROWS, Gate
from ..form_slots import TorchFormKernel, typed
from ..forms import SCALES, ExpertForm, ceil_div
from .launch import Launch

PREFILL_ROWS = 64  # of a block; decode has DECODE_ROWS
_OUTPUTS, _INPUTS = 32, 64  # of a tile
_FP8, _E2M1, _INT4, _INT8 = 0, 1, 2, 3  # CODES
_NUMBER, _POWER, _E4M3 = 0, 1, 2  # SCALE


@triton.jit
def _e4m3(byte):
    """float8 e4m3fn as float32, from int32; NaN is not kept."""
    exponent = (byte >> 3) & 15
    fraction = byte & 7
    normal = (((exponent + 120) << 23) | (fraction << 20)).to(tl.float32, bitcast=True)
    size = tl.where(exponent == 0, fraction.to(tl.float32) * 0.001953125, normal)  # 2**-9
    return tl.where((byte & 128) != 0, -size, size)


@triton.jit
def _e2m1(code):
    exponent = (code >> 1) & 3
    normal = (((exponent + 126) << 23) | ((code & 1) << 22)).to(tl.float32, bitcast=True)
    size = tl.where(exponent == 0, (code & 1).to(tl.float32) * 0.5, normal)
    return tl.where((code & 8) != 0, -size, size)


@triton.jit(do_not_specialize=["rows", "slot"])
def _linear_kernel(
    x, weight, scale, zero, whole, order, y, rows, slot, WIDTH, DEPTH, G,
    weight_slot, scale_slot, zero_slot, whole_slot, order_slot,
    CODES: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, ZEROS: tl.constexpr,
    ORDER: tl.constexpr, DIVIDES: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """y [rows, WIDTH] = x [rows, DEPTH] times a slot's transposed matrix; G scales a row, shared by BLOCK outputs."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]  # [1, O]
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # [R]
    there = row < rows
    slot = slot.to(tl.int64)
    weight += slot * weight_slot
    scale += slot * scale_slot
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, DEPTH, INPUTS):
        column = start + tl.arange(0, INPUTS)  # [C]
        source = column
        if ORDER:
            source = tl.load(order + slot * order_slot + column, mask=column < DEPTH, other=0)
        given = there[:, None] & (column[None, :] < DEPTH)
        values = tl.load(x + row.to(tl.int64)[:, None] * DEPTH + source[None, :], mask=given, other=0.0)  # [R, C]
        inner = column[:, None]
        known = (inner < DEPTH) & (output < WIDTH)  # [C, O]
        if CODES == 1 or CODES == 2:
            bytes_of_row = (DEPTH + 1) // 2
            byte = tl.load(weight + output.to(tl.int64) * bytes_of_row + inner // 2, mask=known, other=0).to(tl.int32)
            code = (byte >> ((inner % 2) * 4)) & 15
        else:
            code = tl.load(weight + output.to(tl.int64) * DEPTH + inner, mask=known, other=0).to(tl.int32)
        place = (output // BLOCK).to(tl.int64) * G + inner // GROUP
        factor = tl.load(scale + place, mask=known, other=0)
        if SCALE == 1:
            power = factor.to(tl.int32)
            factor = tl.where(power == 0, 0x00400000, power << 23).to(tl.float32, bitcast=True)
        elif SCALE == 2:
            of_all = tl.load(whole + slot * whole_slot)
            small = _e4m3(factor.to(tl.int32))
            factor = tl.div_rn(small, of_all) if DIVIDES else small * of_all
        else:
            factor = factor.to(tl.float32)
        if CODES == 0:
            plain = _e4m3(code)
        elif CODES == 1:
            plain = _e2m1(code)
        else:
            half = 8.0 if CODES == 2 else 128.0
            plain = code.to(tl.float32)
            if ZEROS:
                plain -= tl.load(zero + slot * zero_slot + place, mask=known, other=0).to(tl.float32)
            else:
                plain -= half
        sums += tl.dot(values, (plain * factor).to(values.dtype), input_precision="ieee")
    target = y + row.to(tl.int64)[:, None] * WIDTH + output
    tl.store(target, sums.to(y.dtype.element_ty), mask=there[:, None] & (output < WIDTH))


class TritonFormKernel(TorchFormKernel):
    """`TorchFormKernel` whose products decode weights in tiles: a dequantized matrix is never in memory.

    Args: as `TorchFormKernel`.

    Raises:
        FormError: the slots are not of this form, or there is no kernel for it (`supports`).
    """

    name = "triton"

    def __init__(self, slots: Sequence[torch.Tensor], form: ExpertForm, gate: Gate) -> None:
        if not self.supports(form):
            raise FormError("there is no Triton kernel for this form", "use the torch kernel")
        super().__init__(slots, form, gate)
        self._parts = {
            name: typed(tensor, code) for tensor, (name, (code, _)) in zip(slots, form.parts().items(), strict=True)
        }  # [S, n] each
        self._launches = {
            (name, rows): self._launch(name, rows) for name in form.matrices for rows in (DECODE_ROWS, PREFILL_ROWS)
        }

    @staticmethod
    def supports(form: ExpertForm) -> bool:
        """Whether there is a kernel for all matrices of this form."""
        return all(matrix.kind in SCALES for matrix in form.matrices.values())

    def _product(self, slot: int, name: str, x: torch.Tensor) -> torch.Tensor:
        matrix = self._form.matrices[name]
        x = x.contiguous()
        y = x.new_empty((len(x), matrix.outputs))
        rows = DECODE_ROWS if len(x) <= DECODE_ROWS else PREFILL_ROWS
        weight = self._parts[f"{name}.weight"]
        own = [self._parts.get(f"{name}.{part}", weight) for part in ("scale", "zero", "global_scale", "order")]
        groups = 1 if matrix.kind == "fp8_tensor" else matrix.parts()["scale"][1][1]
        with on_device(x.device):
            self._launches[name, rows](
                (ceil_div(matrix.outputs, _OUTPUTS), ceil_div(len(x), rows), 1),
                x, weight, *own, y, len(x), slot, matrix.outputs, matrix.inputs, groups,
                weight.stride(0), *(part.stride(0) for part in own),
            )  # fmt: skip
        if self._form.bias:
            y += self._parts[f"{name}.bias"][slot].to(y.dtype)
        return y

    def _launch(self, name: str, rows: int) -> Launch:
        matrix = self._form.matrices[name]
        codes = {"mxfp4": _E2M1, "nvfp4": _E2M1, "int": _INT4 if matrix.bits == 4 else _INT8}.get(matrix.kind, _FP8)
        scale = {"U8": _POWER, "F8_E8M0": _POWER, "F8_E4M3": _E4M3}.get(matrix.scale, _NUMBER)
        block = {"fp8_block": matrix.block, "fp8_tensor": matrix.outputs}.get(matrix.kind, 1)
        return Launch(
            _linear_kernel, CODES=codes, SCALE=scale, GROUP=matrix.group or matrix.inputs, BLOCK=block,
            ZEROS=matrix.zeros, ORDER=matrix.order, DIVIDES=matrix.divides, ROWS=rows, OUTPUTS=_OUTPUTS,
            INPUTS=_INPUTS, num_warps=4,
        )  # fmt: skip
