"""Experts in their published form, in host memory and in slots (`model.form_kernels` has what runs them).

A slot holds the bytes of an expert's parts. Where all layers have one form, each part is one tensor [S, bytes]; where
layers differ, a slot is one run of bytes, as long as the longest form needs, with the parts of its layer's form in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from ....kernels.forms import ExpertForm
from ...store.format import Published, part_bytes
from .device import Tensors
from .slots import SlotMemory


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


@dataclass(frozen=True)
class FormPool:
    """Slots for experts in published forms; as `SlotPool`, in bytes.

    published: the forms of all layers. dtype: of the compute. tensors: uint8 [S, bytes] for each part, or one for all.
    """

    published: Published
    dtype: torch.dtype
    tensors: Tensors

    @staticmethod
    def allocate(
        published: Published, slots: int, dtype: torch.dtype, device: torch.device, memory: SlotMemory | None = None
    ) -> FormPool:
        """memory: as of `SlotPool.allocate`."""
        alike = len(published.forms) == 1
        sizes = list(part_bytes(published.forms[0]).values()) if alike else [published.slot_bytes]

        def empty(nbytes: int) -> torch.Tensor:
            if memory is not None:
                return memory.tensor((nbytes,), torch.uint8)
            return torch.empty((slots, nbytes), dtype=torch.uint8, device=device)

        return FormPool(published, dtype, tuple(empty(n) for n in sizes))

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
