"""The kernels that run a pool's experts: those of experts in their published form, and which of the two a pool has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....errors import ConfigError
from ....kernels.expert_ffn import ROW_CLASSES, ExpertKernel
from ....kernels.form_slots import CpuFormKernel, TorchFormKernel
from ....kernels.forms import ExpertForm
from ...settings import EngineSettings, ExpertKernelName
from ..cache.form_slots import FormPool
from ..cache.slots import SlotPool
from .kernels import KernelPlan, Kernels
from .model import MoeBlock


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
