"""Experts in host memory as a layer runs them on the CPU, in slots or where a store maps them, without a copy.

Slot s of a pool is the layer's expert s - first: `first` is 0 for slots that all layers share, and the number of the
layer's first expert where each expert has a slot of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from .expert_ffn import CPU_MAX_ROWS, ExpertKernel, Gate, Group, Operands, TorchKernel
from .forms import DTYPES, ExpertForm
from .packed_ffn import HostLayer
from .packed_slots import run_pairs

if TYPE_CHECKING:
    from typing_extensions import CapsuleType

ANY_ROWS = 1 << 62
_BITS: Mapping[torch.dtype, tuple[str, Any]] = {
    torch.float32: ("float32", np.float32),
    torch.float16: ("float16", np.float16),
    torch.bfloat16: ("bfloat16", np.uint16),  # which NumPy lacks
}


def host_array(tensor: torch.Tensor) -> tuple[NDArray[Any], str]:
    """A tensor of this host as `packed_ffn.FullLayer` takes it, on the same memory; and the name of its type."""
    name, bits = _BITS[tensor.dtype]
    whole = {2: torch.int16, 4: torch.int32}[tensor.itemsize]
    return tensor.view(whole).numpy().view(bits), name


def form_parts(form: ExpertForm, tensors: Sequence[torch.Tensor]) -> dict[str, NDArray[Any]]:
    """The bytes of one expert's parts, in the order of `ExpertForm.parts`; a part that lies unaligned is copied."""
    return {
        name: np.require(np.frombuffer(part.numpy(), DTYPES[code]).reshape(shape), requirements=["A", "C"])
        for part, (name, (code, shape)) in zip(tensors, form.parts().items(), strict=True)
    }


def whole_groups(
    width: int, neurons: int, slots: range, hidden: torch.Tensor, pairs: torch.Tensor, groups: Sequence[Group],
    top_k: int, y: torch.Tensor,
) -> list[tuple[int, int, int]]:  # fmt: skip
    """(start, stop, expert) of groups with rows: the expert's place in `slots`.

    Raises ValueError unless `ExpertKernel.run` takes these arguments for whole experts of these slots.
    """
    count = pairs.numel()
    if top_k < 1 or count % top_k or hidden.shape != (count // top_k, width):
        raise ValueError(f"hidden is {tuple(hidden.shape)} for {count} pairs, top-{top_k} and width {width}")
    if pairs.dtype != torch.int64 or pairs.dim() != 1:
        raise ValueError(f"pairs must be int64 [N], not {pairs.dtype} {tuple(pairs.shape)}")
    if y.shape != (count, width):
        raise ValueError(f"y must be [{count}, {width}], not {tuple(y.shape)}")
    found = []
    for start, stop, first, some, add in groups:
        slot, rest = divmod(first, neurons)
        if some != neurons or rest or add:
            raise ValueError(f"neurons {first} to {first + some}: whole experts run here")
        if not 0 <= start <= stop <= count or slot not in slots:
            raise ValueError(f"group {(start, stop, slot)}: there are {count} pairs and {len(slots)} slots")
        if start < stop:
            found.append((start, stop, slot - slots.start))
    return found


def combined(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """sum_k weights[t, k] * y[t * K + k] -> [T, H], in the type of y."""
    tokens, top_k = weights.shape
    return (y.view(tokens, top_k, y.shape[1]) * weights.unsqueeze(-1)).sum(dim=1).to(y.dtype)


class HostKernel:
    """The C++ kernels of published forms (`form_ffn`) and of full precision: weights decoded in registers.

    Args:
        layer: the experts. first: see the module.
        large: runs experts that have more than `CPU_MAX_ROWS` rows; None: the C++ kernels take any number.
    """

    name = "cpu"

    def __init__(self, layer: HostLayer, first: int = 0, large: ExpertKernel | None = None) -> None:
        self._layer, self._slots, self._large = layer, range(first, first + layer.experts), large
        self.width, self.max_rows = layer.hidden, ANY_ROWS if large is None else CPU_MAX_ROWS

    def run(self, hidden: torch.Tensor, pairs: torch.Tensor, groups: list[Group], top_k: int, y: torch.Tensor) -> None:
        many = [] if self._large is None else [group for group in groups if group[1] - group[0] > self.max_rows]
        if self._large is not None and many:
            self._large.run(hidden, pairs, many, top_k, y)
            groups = [group for group in groups if group[1] - group[0] <= self.max_rows]
        layer = self._layer
        whole = whole_groups(layer.hidden, layer.neurons, self._slots, hidden, pairs, groups, top_k, y)
        if whole:
            run_pairs(layer, hidden, pairs, whole, top_k, y)

    def combine(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return combined(y, weights)

    @cached_property
    def experts(self) -> CapsuleType:
        """For the core's executor."""
        return self._layer.native(self._slots.start, self.max_rows)


class StoredKernel:
    """Plain torch on experts as a store has them, one at a time in the type of the rows: for biases, activations and
    shapes that the C++ kernels lack, and for many rows, whose products are faster.

    Args:
        tensors: [E, ...] each, in the order of `Operands`, without those that are missing.
        gate: as of `TorchKernel`. first: see the module.
    """

    name = "loop"

    def __init__(self, tensors: Sequence[torch.Tensor], gate: Gate, first: int = 0) -> None:
        self._tensors, self._gate = tuple(tensors), gate
        experts, self._neurons, _, self._width = tensors[0].shape
        self._slots = range(first, first + experts)

    def run(self, hidden: torch.Tensor, pairs: torch.Tensor, groups: list[Group], top_k: int, y: torch.Tensor) -> None:
        neurons = self._neurons
        found = whole_groups(self._width, neurons, self._slots, hidden, pairs, groups, top_k, y)
        for start, stop, expert in found:
            one = [tensor[expert : expert + 1].to(hidden.dtype) for tensor in self._tensors]
            kernel = TorchKernel(Operands(*one, *[None] * (4 - len(one))), self._gate)
            kernel.run(hidden, pairs, [(start, stop, 0, neurons, False)], top_k, y)

    def combine(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return combined(y, weights)
