"""Products with a matrix in its published form, and rows of it, on a GPU: the dense part in the checkpoint's bytes.

    y[row] = matrix . x[row]                      weights are decoded in registers (`form_weights`), sums are float32

Of many rows the product is torch's, on pieces of the matrix that are decoded into memory first, since every tile of
rows would decode all weights once more. A weight is rounded to the type of the rows, as a dequantized matrix has it.

With TRITON_INTERPRET=1 in the environment before triton is imported it runs on tensors of the CPU.
"""

# mypy: allow-untyped-defs
# the types of a kernel's arguments are those of its launch
from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import triton
import triton.language as tl

from ..device import on_device
from ..expert_ffn import DECODE_ROWS, SHORT_ROWS
from ..forms import MatrixForm
from .form_weights import Form, matrix_of, published, weights
from .forms import decoding_of, launch_of, rows_of, times
from .launch import Launch, ceil_div

_ROWS = 16  # that a program decodes
_PIECE = 16 << 20  # bytes of a matrix that are decoded at a time


@triton.jit(do_not_specialize=["rows"])
def _form_linear(
    x, weight, scale, zero, whole, order, y, rows,
    FORM: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * M + tl.arange(0, M)
    used = m < rows
    m = m.to(tl.int64)
    n = tl.program_id(1) * N
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, FORM.inputs, K):
        some = rows_of(x + m * FORM.inputs, order, used, start, FORM, K)
        total = times(some, weights(weight, scale, zero, whole, n, start, FORM, N, K), total, WIDEN)
    o = n + tl.arange(0, N)
    at = y + m[:, None] * FORM.outputs + o[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=used[:, None] & (o < FORM.outputs)[None, :])


@triton.jit(do_not_specialize=["first", "count"])
def _form_rows(
    ids, weight, scale, zero, whole, order, y, first, count,
    FORM: tl.constexpr, LISTED: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The rows `ids` of the matrix, or those from `first` on."""
    i = tl.program_id(0) * N + tl.arange(0, N)
    there = i < count
    row = tl.load(ids + i, mask=there, other=0) if LISTED else first + i
    start = tl.program_id(1) * K
    values = published(weight, scale, zero, whole, tl.maximum(row, 0), start, FORM, N, K)
    column = start + tl.arange(0, K)
    inside = column < FORM.inputs
    if FORM.order:
        column = tl.load(order + column, mask=inside, other=0)
    at = y + i.to(tl.int64)[:, None] * FORM.inputs + column[None, :]
    tl.store(at, values.to(y.dtype.element_ty), mask=there[:, None] & inside[None, :])


@cache
def launches_of(form: MatrixForm, compiled: Form, on_cpu: bool) -> tuple[Launch, Launch, Launch, Launch]:
    """Of few rows, of more, of rows by number, and of rows in turn; matrices of one form and shape share them."""
    blocks = decoding_of(form)
    few, more = blocks.decode, blocks.prefill
    fixed = {"FORM": compiled, "K": blocks.K, "WIDEN": on_cpu}
    return (
        launch_of(_form_linear, few, N=few.gate_up, **fixed), launch_of(_form_linear, more, N=more.down, **fixed),
        launch_of(_form_rows, few, LISTED=True, N=_ROWS, **fixed),
        launch_of(_form_rows, few, LISTED=False, N=_ROWS, **fixed),
    )  # fmt: skip


class TritonMatrix:
    """A matrix in its published form, on a device.

    Args:
        parts: of `MatrixForm.parts`, each contiguous; types of eight bits are uint8.

    Attributes:
        operands: what the launches get of it. launches: as `launches_of` has them.

    Raises:
        FormError: weights are not aligned to the words of their blocks.
    """

    def __init__(self, form: MatrixForm, parts: Mapping[str, torch.Tensor]) -> None:
        self.form, self._device = form, parts["weight"].device
        slots = {name: part.contiguous().view(torch.uint8).view(1, -1) for name, part in parts.items()}
        *tensors, _, order = (made := matrix_of(form, slots)).tensors
        assert isinstance(made.form, Form)
        self.operands = (*tensors, order)
        self.launches = launches_of(form, made.form, self._device.type == "cpu")

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., inputs] times the transposed matrix: [..., outputs], in the type of x."""
        o, i = self.form.outputs, self.form.inputs
        rows = x.detach().reshape(-1, i).contiguous()
        y, count = rows.new_empty((len(rows), o)), len(rows)
        with on_device(self._device):
            if count > SHORT_ROWS:
                step = max(_ROWS, _PIECE // (i * x.element_size()) // _ROWS * _ROWS)
                for first in range(0, o, step):
                    piece = self._rows(None, first, min(step, o - first), x.dtype)
                    y[:, first : first + len(piece)] = rows @ piece.t()
            elif count:
                launch = self.launches[0 if count <= DECODE_ROWS else 1]
                fixed = launch.fixed
                grid = ceil_div(count, fixed["M"]), ceil_div(o, fixed["N"]), 1
                launch(grid, rows, *self.operands, y, count)
        return y.view(*x.shape[:-1], o)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The rows of these numbers [...], which are there: [..., inputs]."""
        with on_device(self._device):
            found = self._rows(ids.reshape(-1).contiguous(), 0, ids.numel(), dtype)
        return found.view(*ids.shape, self.form.inputs)

    def _rows(self, ids: torch.Tensor | None, first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        i = self.form.inputs
        y = torch.empty((count, i), dtype=dtype, device=self._device)
        launch, numbers = (self.launches[3], self.operands[0]) if ids is None else (self.launches[2], ids)
        if count:
            grid = ceil_div(count, _ROWS), ceil_div(i, launch.fixed["K"]), 1
            launch(grid, numbers, *self.operands, y, first, count)
        return y
