"""Experts in their published forms on the CPU, from NumPy arrays (`kernels/cpu/forms.hpp`).

    out[row] += weight * FFN_expert(hidden[row])       FFN(x) = down(act(gate x) * up x)

Without torch, so that the NDP worker starts in a second. The arrays may be mapped files; nothing is copied. Floats and
FP8 are decoded to float32 in registers, and activations stay float32: a result differs from that of
`ExpertForm.dequantize` in the order of additions alone. All other weights are small integers times a scale: 32
activations at a time are rounded to sixteen bits, by at most 2^-15 of the largest, and integers are multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FormError
from . import _cpu
from .forms import BLOCKS, FLOATS, ExpertForm, MatrixForm, Parts
from .packed_ffn import ACTIVATIONS, HostLayer, Threads

# `gpt_oss`: x * sigmoid(1.702 x) * (up + 1) with x = min(gate, 7), and up within -7 to 7
FORM_ACTIVATIONS = {**ACTIVATIONS, "gpt_oss": 4}
# FormKind in forms.hpp
_KINDS = {
    "float32": 0, "float16": 1, "bfloat16": 2, "fp8_block": 3, "fp8_channel": 3, "fp8_tensor": 3, "mxfp4": 4,
    "nvfp4": 5, **{kind: 8 + place for place, kind in enumerate(BLOCKS)},
}  # fmt: skip
_INT_KINDS = {4: 6, 8: 7}  # by bits
_SCALES = {"": 0, "F32": 1, "F16": 2, "BF16": 3, "U8": 4, "F8_E8M0": 4, "F8_E4M3": 5}  # ScaleType there
_ELEMENTS = {"": 0, "F32": 0, "F16": 1, "BF16": 2}  # Element in neuron_ffn.hpp
_Numbers = tuple[int, ...]
_PARTS = ("weight", "scale", "zero", "global_scale", "order")


class FormLayer(HostLayer):
    """Experts of one layer, of one form or of several.

    Values are not checked here (`ExpertForm.verify`); an `order` that is no permutation is refused in each call.

    Args:
        experts: the parts of each expert, C-contiguous and aligned.
        forms: of each expert; hidden size and neurons are those of the first.
        activation: a key of `FORM_ACTIVATIONS`.

    Raises:
        FormError: parts are not those of their form, not contiguous or not aligned; sizes differ.
        ValueError: the activation is unknown.
    """

    def __init__(
        self, experts: Sequence[Parts], forms: Sequence[ExpertForm], activation: str, threads: Threads
    ) -> None:
        if not experts or len(experts) != len(forms):
            raise FormError(f"{len(experts)} experts with {len(forms)} forms", "give each expert its form")
        hidden, intermediate = forms[0].hidden, forms[0].intermediate
        for form in forms:
            if (form.hidden, form.intermediate) != (hidden, intermediate):
                raise FormError(f"experts of {form.hidden} x {form.intermediate} and {hidden} x {intermediate}",
                                "a layer has experts of one size")  # fmt: skip
        self._arrays = [dict(parts) for parts in experts]  # kept alive
        described = [_expert(parts, form) for parts, form in zip(self._arrays, forms, strict=True)]
        layer = (*threads.handle, form_activation(activation), _cpu.form_layer(hidden, intermediate, described))
        super().__init__(_cpu.form_ffn, layer, len(experts), hidden, intermediate, _cpu.form_experts)


def form_linear(form: MatrixForm, parts: Parts, x: NDArray[np.float32], threads: Threads) -> NDArray[np.float32]:
    """x [n, inputs] times the transposed matrix: [n, outputs].

    Raises:
        FormError: the parts are not those of the form, not contiguous or not aligned.
        ValueError: x is not contiguous float32 [n, inputs], or `order` is out of range.
    """
    out = np.empty((len(x), form.outputs), np.float32)
    _cpu.form_linear(*threads.handle, matrix_numbers(parts, form), x, out)
    return out


def form_activation(activation: str) -> int:
    """The number of an activation. Raises ValueError: it is unknown."""
    if activation not in FORM_ACTIVATIONS:
        raise ValueError(f"there is no activation {activation}: choose one of {', '.join(FORM_ACTIVATIONS)}")
    return FORM_ACTIVATIONS[activation]


def _expert(parts: Parts, form: ExpertForm) -> tuple[_Numbers, _Numbers, _Numbers, _Numbers]:
    """An `Expert` of neuron_module.cpp."""
    form.check(parts)
    matrices = {name: matrix_numbers(form.of(name, parts), matrix) for name, matrix in form.matrices.items()}
    down = matrices["down"]
    if form.gate_up is None:
        return matrices["gate"], matrices["up"], down, (0, 1, 0, 1, 0, 0, 0)
    both = matrices["gate_up"]
    rows = (0, 2, 1, 2) if form.interleaved else (0, 1, form.intermediate, 1)
    biases = [_address(parts, f"{name}.bias") for name in ("gate_up", "down")]
    return both, both, down, (*rows, _ELEMENTS[form.bias], *biases)


def matrix_numbers(parts: Parts, form: MatrixForm) -> _Numbers:
    """A `MatrixNumbers` of bindings.hpp: sizes, and the addresses of parts, which the caller keeps alive.

    Raises:
        FormError: the parts are not those of the form, not contiguous or not aligned.
    """
    form.check(parts)
    kind = _INT_KINDS[form.bits] if form.kind == "int" else _KINDS[form.kind]
    block = {"fp8_block": form.block, "fp8_tensor": form.outputs}.get(form.kind, 1)
    scale = "" if form.kind in FLOATS else form.scale
    return (
        kind, _SCALES[scale], int(form.divides), form.outputs, form.inputs, form.group or form.inputs, block,
        *(_address(parts, name) for name in _PARTS),
    )  # fmt: skip


def _address(parts: Parts, name: str) -> int:
    """0 where there is no such part."""
    if name not in parts:
        return 0
    array: NDArray[Any] = parts[name]
    if not array.flags.c_contiguous or not array.flags.aligned:
        raise FormError(f"{name} is not contiguous and aligned: strides {array.strides}", "copy it once")
    address: int = array.__array_interface__["data"][0]
    return address
