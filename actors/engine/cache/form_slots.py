"""Experts in their published form: in host memory, in slots, and the kernels that run them there.

A slot holds the bytes of an expert's parts. Where all layers have one form, each part is one tensor [S, bytes]; where
layers differ, a slot is one run of bytes, as long as the longest form needs, with the parts of its layer's form in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ....errors import ConfigError
from ....kernels.expert_ffn import ROW_CLASSES, ExpertKernel
from ....kernels.form_slots import CpuFormKernel, TorchFormKernel
from ....kernels.forms import ExpertForm
from ...settings import EngineSettings, ExpertKernelName
from ...store.format import Published, part_bytes
from ..model.kernels import KernelPlan, Kernels
from ..model.model import MoeBlock
from .device import Tensors
from .slots import SlotMemory, SlotPool


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


class FormKernels:
    """The kernels of a pool of published forms, by layer: as `Kernels`.

    Raises:
        ConfigError: a kernel is asked for that cannot run these forms.
    """

    def __init__(self, pool: FormPool, setting: ExpertKernelName, blocks: Sequence[MoeBlock]) -> None:
        if setting not in ("auto", "loop", "triton"):
            raise ConfigError(
                f"expert_kernel '{setting}' does not run experts in the form {pool.published.label()}", "use auto"
            )
        if setting == "triton":
            _check_triton(pool)
        self._of: dict[int, ExpertKernel] = {}
        made: dict[tuple[ExpertForm, str], CpuFormKernel] = {}
        name = ""
        for layer, block in enumerate(blocks):
            form, activation = pool.published.of(layer), _activation(block)
            kernel: TorchFormKernel | CpuFormKernel
            if setting == "triton":
                from ....kernels.triton.forms import TritonFormKernel

                kernel = TritonFormKernel(pool.parts(form), form, block.gate)
            elif activation is None or setting == "loop" or pool.device.type != "cpu":
                kernel = TorchFormKernel(pool.parts(form), form, block.gate)
            elif (form, activation) in made:
                kernel = made[form, activation]
            else:
                kernel = CpuFormKernel(pool.parts(form), form, activation, torch.get_num_threads())
                made[form, activation] = kernel
            self._of[id(block.experts)] = kernel
            name = name or kernel.name
        self.plan = KernelPlan(dict.fromkeys(ROW_CLASSES, name))

    def of(self, block: MoeBlock) -> ExpertKernel:
        """The kernel of a layer."""
        return self._of[id(block.experts)]


def _check_triton(pool: FormPool) -> None:
    """Raise ConfigError unless Triton's kernels run these forms here. `auto` does not choose them: none was timed."""
    if pool.device.type == "cpu":
        raise ConfigError("expert_kernel 'triton' needs a GPU", "use auto or loop")
    try:
        from ....kernels.triton.forms import TritonFormKernel
    except ImportError as error:
        raise ConfigError("expert_kernel 'triton' needs triton", "pip install 'tiermoe[gpu]', or use auto") from error
    if not all(TritonFormKernel.supports(form) for form in pool.published.forms):
        raise ConfigError(
            f"expert_kernel 'triton' does not run experts in the form {pool.published.label()}", "use auto"
        )


def _activation(block: MoeBlock) -> str | None:
    """The activation among those that kernels of published forms build in."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    experts = block.experts
    if block.activation is None and getattr(type(experts), "_apply_gate", None) is GptOssExperts._apply_gate:
        return "gpt_oss" if (experts.alpha, experts.limit) == (1.702, 7.0) else None
    return block.activation


def kernels_of(
    pool: SlotPool | FormPool, settings: EngineSettings, blocks: Sequence[MoeBlock]
) -> Kernels | FormKernels:
    """The kernels of an empty pool. Raises ConfigError: the one that is asked for cannot run these experts."""
    if isinstance(pool, SlotPool):
        return Kernels(pool, settings.expert_kernel, blocks)
    return FormKernels(pool, settings.expert_kernel, blocks)
