"""Experts in their published form: in host memory, in slots, and the kernels that run them there.

A slot holds the bytes of an expert's parts. Where all layers have one form, each part is one tensor [S, bytes]; where
layers differ, a slot is one run of bytes, as long as the longest form needs, with the parts of its layer's form in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from ....errors import ConfigError
from ....kernels.expert_ffn import ROW_CLASSES, ExpertKernel, Gate, Group
from ....kernels.forms import ExpertForm
from ...settings import EngineSettings, ExpertKernelName
from ...store.files import FormArrays
from ...store.format import Published, part_bytes
from ...store.published import typed_parts
from ..model.kernels import KernelPlan, Kernels
from ..model.model import MoeBlock
from .device import Tensors
from .slots import SlotPool


@dataclass(frozen=True)
class FormWeights:
    """One MoE layer's experts in host memory, read-only: of each expert the bytes of its parts, in slot order."""

    experts: tuple[Tensors, ...]

    @property
    def tensors(self) -> Tensors:
        """All of them, for pinning."""
        return tuple(part for expert in self.experts for part in expert)

    def expert(self, index: int) -> Tensors:
        return self.experts[index]

    def moved(self, tensors: Tensors) -> FormWeights:
        """The same experts in other memory, given as `tensors` are."""
        parts = len(self.experts[0])
        return FormWeights(tuple(tensors[i : i + parts] for i in range(0, len(tensors), parts)))


def form_weights(layer: FormArrays) -> FormWeights:
    """Mapped experts as tensors on the same memory."""
    from .sources import host_tensor

    experts = range(len(next(iter(layer.parts.values()))))
    return FormWeights(tuple(tuple(host_tensor(part, torch.uint8) for part in layer.expert(e)) for e in experts))


@dataclass(frozen=True)
class FormPool:
    """Slots for experts in published forms; as `SlotPool`, in bytes.

    published: the forms of all layers. dtype: of the compute. tensors: uint8 [S, bytes] for each part, or one for all.
    """

    published: Published
    dtype: torch.dtype
    tensors: Tensors

    @staticmethod
    def allocate(published: Published, slots: int, dtype: torch.dtype, device: torch.device) -> FormPool:
        alike = len(published.forms) == 1
        sizes = list(part_bytes(published.forms[0]).values()) if alike else [published.slot_bytes]
        return FormPool(
            published, dtype, tuple(torch.empty((slots, n), dtype=torch.uint8, device=device) for n in sizes)
        )

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def hidden(self) -> int:
        """Width of rows: H."""
        return self.published.forms[0].hidden

    @property
    def slots(self) -> int:
        return len(self.tensors[0])

    @property
    def neurons(self) -> int:
        """Of one slot: I."""
        return self.published.forms[0].intermediate

    @property
    def total_neurons(self) -> int:
        """Of all slots: S*I."""
        return self.slots * self.neurons

    def parts(self, form: ExpertForm) -> Tensors:
        """The parts of this form in all slots, uint8 [S, bytes]; not contiguous where forms differ."""
        return self._parts[form]

    def slot(self, index: int, layer: int) -> Tensors:
        """The parts of an expert of this layer in one slot."""
        return tuple([part[index] for part in self._parts[self.published.of(layer)]])

    @cached_property
    def _parts(self) -> dict[ExpertForm, Tensors]:
        if len(self.published.forms) == 1:
            return {self.published.forms[0]: self.tensors}
        return {
            form: tuple(self.tensors[0][:, first : first + nbytes] for first, nbytes in self.published.places(form))
            for form in self.published.forms
        }


class ReferenceKernel:
    """Dequantizes an expert, then plain products: for any form, activation and device, and slow.

    Args:
        gate: as of `TorchKernel`.
    """

    name = "reference"

    def __init__(self, pool: FormPool, form: ExpertForm, gate: Gate) -> None:
        self._parts, self._form, self._gate, self._neurons = pool.parts(form), form, gate, pool.neurons

    def run(self, hidden: torch.Tensor, pairs: torch.Tensor, groups: list[Group], top_k: int, y: torch.Tensor) -> None:
        for start, stop, first, _, _ in groups:
            gate_up, down, gate_up_bias, down_bias = self._weights(first // self._neurons, hidden)
            rows = pairs[start:stop]
            up = hidden[rows // top_k] @ gate_up.t()  # [n, I*2], gate and up in turn
            out = self._gate(up if gate_up_bias is None else up + gate_up_bias) @ down.t()
            y[rows] = out if down_bias is None else out + down_bias

    def combine(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens, top_k = weights.shape
        return (y.view(tokens, top_k, y.shape[1]) * weights.unsqueeze(-1)).sum(dim=1).to(y.dtype)

    def _weights(
        self, slot: int, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """gate_up [I*2, H] and down [H, I] of the expert in a slot, and their biases, in the type of `like`."""
        parts = [np.ascontiguousarray(part[slot].cpu().numpy()) for part in self._parts]
        e = self._form.dequantize(typed_parts(self._form, parts))

        def here(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device=like.device, dtype=like.dtype)

        gate_up = here(np.stack([e.gate, e.up], axis=1).reshape(-1, e.gate.shape[1]))
        if e.gate_bias is None or e.up_bias is None or e.down_bias is None:
            return gate_up, here(e.down), None, None
        return gate_up, here(e.down), here(np.stack([e.gate_bias, e.up_bias], axis=1).reshape(-1)), here(e.down_bias)


class FormKernels:
    """The kernels of a pool of published forms, by layer: as `Kernels`.

    Raises:
        ConfigError: a kernel is asked for that cannot run these forms.
    """

    def __init__(self, pool: FormPool, setting: ExpertKernelName, blocks: Sequence[MoeBlock]) -> None:
        if setting not in ("auto", "loop"):
            raise ConfigError(
                f"expert_kernel '{setting}' does not run experts in the form {pool.published.label()}", "use auto"
            )
        self._of: dict[int, ExpertKernel] = {}
        made: dict[tuple[ExpertForm, str | None], ExpertKernel] = {}
        for layer, block in enumerate(blocks):
            key = pool.published.of(layer), block.activation
            if block.activation is None or key not in made:
                made[key] = ReferenceKernel(pool, key[0], block.gate)
            self._of[id(block.experts)] = made[key]
        name = next(iter(made.values())).name
        self.plan = KernelPlan(dict.fromkeys(ROW_CLASSES, name))

    def of(self, block: MoeBlock) -> ExpertKernel:
        """The kernel of a layer."""
        return self._of[id(block.experts)]


def kernels_of(
    pool: SlotPool | FormPool, settings: EngineSettings, blocks: Sequence[MoeBlock]
) -> Kernels | FormKernels:
    """The kernels of an empty pool. Raises ConfigError: the one that is asked for cannot run these experts."""
    if isinstance(pool, SlotPool):
        return Kernels(pool, settings.expert_kernel, blocks)
    return FormKernels(pool, settings.expert_kernel, blocks)
