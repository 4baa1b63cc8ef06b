"""Experts in published forms on slots: a plain torch kernel for any device and activation, and the CPU's.

Slots are the parts of `ExpertForm.parts()` as bytes: for each part uint8 [S, bytes], where a slot's bytes are
contiguous and aligned to the part's type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional

from ..errors import FormError
from .expert_ffn import Gate, Group
from .form_blocks import dequantize_blocks
from .form_ffn import FormLayer
from .forms import BLOCKS, E2M1, FLOATS, ExpertForm, MatrixForm, layout_bytes
from .host_experts import HostKernel, combined, form_parts, whole_groups
from .packed_ffn import Threads

TorchParts = Mapping[str, torch.Tensor]

# float8 stays bytes until `_floats`
_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32}


def check_slots(slots: Sequence[torch.Tensor] | Sequence[Sequence[torch.Tensor]], form: ExpertForm) -> None:
    """Raise FormError unless these are the bytes of experts of this form, on one device."""
    layout = form.parts()
    if len(slots) != len(layout):
        raise FormError(f"experts of this form have {len(layout)} parts, not {len(slots)}", "give them in its order")
    first = slots[0]
    for tensor, (name, what) in zip(slots, layout.items(), strict=True):
        expected = len(first), layout_bytes({name: what})
        if not isinstance(tensor, torch.Tensor) or not isinstance(first, torch.Tensor):
            continue  # as a store maps them, which has checked them
        fits = tensor.dtype == torch.uint8 and tuple(tensor.shape) == expected and tensor.stride(1) == 1
        if not fits or tensor.device != first.device:
            raise FormError(f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, not uint8 {expected}",
                            "give the bytes of each slot")  # fmt: skip


class TorchFormKernel:
    """Reference for any device: dequantizes an expert into the type of the rows, then plain GEMMs.

    Args:
        slots: see the module; or, of experts that lie apart, for each part the bytes of each expert.
        gate: maps interleaved pre-activations [n, I*2] (column 2j is neuron j's gate) to activations [n, I].
        first: number of the first slot.

    Raises:
        FormError: the slots are not of this form.
    """

    name = "torch"

    def __init__(
        self, slots: Sequence[torch.Tensor] | Sequence[Sequence[torch.Tensor]], form: ExpertForm, gate: Gate,
        first: int = 0,
    ) -> None:  # fmt: skip
        check_slots(slots, form)
        self._slots, self._form, self._gate = tuple(slots), form, gate
        self._numbers = range(first, first + len(slots[0]))

    def run(self, hidden: torch.Tensor, pairs: torch.Tensor, groups: list[Group], top_k: int, y: torch.Tensor) -> None:
        form = self._form
        for start, stop, slot in whole_groups(
            form.hidden, form.intermediate, self._numbers, hidden, pairs, groups, top_k, y
        ):
            rows = pairs[start:stop]
            y[rows] = self._expert(slot, hidden[rows // top_k])

    def combine(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return combined(y, weights)

    def _expert(self, slot: int, x: torch.Tensor) -> torch.Tensor:
        form = self._form
        if form.gate_up is None:
            both = torch.stack([self._product(slot, name, x) for name in ("gate", "up")], dim=-1).flatten(1)  # [n, I*2]
        else:
            both = self._product(slot, "gate_up", x)
            if not form.interleaved:
                both = both.view(len(x), 2, -1).transpose(1, 2).reshape(len(x), -1)
        return self._product(slot, "down", self._gate(both))

    def _product(self, slot: int, name: str, x: torch.Tensor) -> torch.Tensor:
        """x [n, inputs] times a transposed matrix of an expert, plus its bias: [n, outputs]."""
        form, parts = self._form, slot_parts(self._form, [part[slot] for part in self._slots])
        own = {part: parts[f"{name}.{part}"] for part in form.matrices[name].parts()}
        bias = parts[f"{name}.bias"].to(x.dtype) if form.bias else None
        return functional.linear(x, dequantize(form.matrices[name], own).to(x.dtype), bias)


class CpuFormKernel(HostKernel):
    """The C++ kernel on slot memory of the CPU.

    Args:
        slots: see the module.
        activation: a key of `form_ffn.FORM_ACTIVATIONS`.
        threads: compute threads.

    Raises:
        FormError: the slots are not of this form, or not aligned.
        ValueError: the activation is unknown.
    """

    def __init__(self, slots: Sequence[torch.Tensor], form: ExpertForm, activation: str, threads: int = 1) -> None:
        check_slots(slots, form)
        each = [[tensor[slot] for tensor in slots] for slot in range(len(slots[0]))]
        experts = [form_parts(form, parts) for parts in each]
        for parts, arrays in zip(each, experts, strict=True):
            if [part.data_ptr() for part in parts] != [array.ctypes.data for array in arrays.values()]:
                raise FormError("slots lie unaligned, and would be copied", "align each part to its type")
        super().__init__(FormLayer(experts, [form] * len(experts), activation, Threads(threads)))


# --- dequantization ----------------------------------------------------------------------------------------------


def slot_parts(form: ExpertForm, slots: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The bytes of one slot as the parts of an expert; types of eight bits stay uint8."""
    return {
        name: typed(part, code).view(shape)
        for part, (name, (code, shape)) in zip(slots, form.parts().items(), strict=True)
    }


def typed(part: torch.Tensor, code: str) -> torch.Tensor:
    """Bytes as numbers of this type; types of eight bits stay uint8."""
    return part.view(_TYPES[code]) if code in _TYPES else part


def dequantize(form: MatrixForm, parts: TorchParts) -> torch.Tensor:
    """As `MatrixForm.dequantize`, on the device of the parts: float32 [outputs, inputs], the same bits."""
    o, i = form.outputs, form.inputs
    weight = parts["weight"]
    if form.kind in FLOATS:
        return weight.float()
    if form.kind in BLOCKS:
        return dequantize_blocks(form.kind, weight.view(-1, BLOCKS[form.kind][1])).view(o, i)
    scales = _floats(parts["scale"], form.scale)
    if form.kind.startswith("fp8"):
        if form.kind == "fp8_block":
            scales = scales.repeat_interleave(form.block, 0)[:o].repeat_interleave(form.group, 1)[:, :i]
        return _floats(weight, "F8_E4M3") * scales
    if form.kind == "nvfp4":
        scales = scales / parts["global_scale"] if form.divides else scales * parts["global_scale"]
    scales = scales.repeat_interleave(form.group or i, 1)[:, :i]
    codes = weight if form.bits == 8 else torch.stack([weight & 15, weight >> 4], -1).flatten(1)[:, :i]
    if form.kind != "int":
        return _e2m1(codes) * scales
    zeros: torch.Tensor | float = float(1 << (form.bits - 1))
    if form.zeros:
        zeros = parts["zero"].float().repeat_interleave(form.group or i, 1)[:, :i]
    values = (codes.float() - zeros) * scales
    if not form.order:
        return values
    whole = torch.empty_like(values)
    whole[:, parts["order"].long()] = values
    return whole


def _floats(part: torch.Tensor, code: str) -> torch.Tensor:
    if code == "F8_E4M3":
        return part.view(torch.float8_e4m3fn).float()
    if code not in ("U8", "F8_E8M0"):
        return part.float()
    bits = part.int() << 23  # an exponent; 2**-127 is subnormal
    return torch.where(part == 0, 0x00400000, bits).view(torch.float32)


def _e2m1(codes: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(E2M1).to(codes.device)[codes.int()]
