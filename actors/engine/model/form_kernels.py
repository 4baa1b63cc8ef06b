"""The kernels that run experts: in slots, where a store maps them, and low-bit replicas."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Union

import torch

from ....errors import ConfigError
from ....kernels.expert_ffn import ROW_CLASSES, ExpertKernel
from ....kernels.form_ffn import FormLayer
from ....kernels.form_slots import CpuFormKernel, TorchFormKernel
from ....kernels.forms import ExpertForm
from ....kernels.host_experts import HostKernel, StoredKernel, form_parts, host_array
from ....kernels.packed_ffn import ACTIVATIONS, FullLayer, Threads
from ....kernels.packed_slots import CpuPackedKernel, PackedKernel, TorchPackedKernel, try_out
from ...policy_settings import PolicySettings
from ...settings import EngineSettings, ExpertKernelName
from ...store.format import ExpertShape
from ..cache.device import Tensors
from ..cache.form_slots import FormPool, FormWeights
from ..cache.low_bits import ReplicaPool
from ..cache.slots import MappedPool, SlotPool
from .kernels import KernelPlan, Kernels, built_in
from .model import MoeBlock

if TYPE_CHECKING:
    from ....kernels.triton.forms import TritonFormKernel


_FormKernel = Union["TritonFormKernel", TorchFormKernel, CpuFormKernel]


class FormKernels:
    """The kernels of a pool of published forms, by layer: as `Kernels`.

    C++ on the CPU and Triton's on a GPU; torch, one expert after another, for other gates than theirs, and where it is
    asked for. Layers of one form and activation share a kernel.

    Raises:
        ConfigError: a kernel is asked for that cannot run these forms.
    """

    def __init__(self, pool: FormPool, setting: ExpertKernelName, blocks: Sequence[MoeBlock]) -> None:
        self._pool, self._setting = pool, setting
        self._notes: list[str] = []
        self._made: dict[tuple[ExpertForm, str], _FormKernel] = {}
        self._of = {id(block.experts): self._kernel(layer, block) for layer, block in enumerate(blocks)}
        if setting == "triton" and self._notes:
            raise ConfigError(f"expert_kernel 'triton' cannot run these experts: {self._notes[0]}", "use auto or loop")
        name = next(iter(self._of.values())).name
        self.plan = KernelPlan(dict.fromkeys(ROW_CLASSES, name), notes=tuple(dict.fromkeys(self._notes)))

    def of(self, block: MoeBlock) -> ExpertKernel:
        """The kernel of a layer."""
        return self._of[id(block.experts)]

    def _kernel(self, layer: int, block: MoeBlock) -> _FormKernel:
        pool = self._pool
        form, activation = pool.published.of(layer), built_in(block)
        key = (form, activation or "")
        if key in self._made:
            return self._made[key]
        on_cpu = pool.device.type == "cpu"
        if on_cpu and self._setting == "triton":
            raise ConfigError("expert_kernel 'triton' needs a GPU", "use auto or loop")
        kernel: _FormKernel | None = None
        if activation is not None and self._setting != "loop":
            if on_cpu:
                kernel = CpuFormKernel(pool.parts(form), form, activation, torch.get_num_threads())
            else:
                kernel = self._triton(form, activation, block)
        elif not on_cpu and self._setting != "loop":
            self._notes.append("Triton has no kernel for the gate of these experts, which run one after another")
        if kernel is None:  # its gate is the layer's own
            return TorchFormKernel(pool.parts(form), form, block.gate)
        self._made[key] = kernel
        return kernel

    def _triton(self, form: ExpertForm, activation: str, block: MoeBlock) -> TritonFormKernel | None:
        """None: it cannot run these experts, as a note says."""
        if find_spec("triton") is None:
            self._notes.append("triton is not installed: experts run one after another")
            return None
        from ....kernels.triton.forms import TritonFormKernel
        from ..cuda.tables import ring_of

        pool = self._pool
        try:  # compiled now, not in a request
            kernel = TritonFormKernel(
                pool.parts(form), form, activation, block.gate, pool.dtype, ring_of(pool.device)
            )  # fmt: skip
            try_out(kernel, form.hidden, pool.dtype, pool.tensors[0].device, (0, form.intermediate, 0))
        except Exception as error:  # whatever a compiler or driver raises: torch can do it
            said = f"the Triton kernel failed ({type(error).__name__}: {error})"
            self._notes.append(f"{said[:250]}: experts run one after another")
            return None
        return kernel


class StoredKernels:
    """The kernels of experts as they are stored, by layer: as `Kernels`. Their threads are one pool.

    pool: the experts where a store maps them, or slots of neurons in the store's type.

    Raises:
        ConfigError: a kernel is asked for that needs a GPU.
    """

    def __init__(self, pool: MappedPool | SlotPool, setting: ExpertKernelName, blocks: Sequence[MoeBlock]) -> None:
        if setting == "triton":
            raise ConfigError("expert_kernel 'triton' needs a GPU", "use auto or loop")
        self._pool, self._loops, self._threads = pool, setting == "loop", Threads(torch.get_num_threads())
        self._of = {id(block.experts): self._make(layer, block) for layer, block in enumerate(blocks)}
        name = next(iter(self._of.values())).name
        self.plan = KernelPlan(dict.fromkeys(ROW_CLASSES, name))

    def of(self, block: MoeBlock) -> ExpertKernel:
        """The kernel of a layer."""
        return self._of[id(block.experts)]

    def _make(self, layer: int, block: MoeBlock) -> HostKernel | StoredKernel | TorchFormKernel:
        pool = self._pool
        if isinstance(pool, SlotPool):
            return self._of_neurons(pool.tensors, 0, block)
        weights, first = pool.weights[layer], layer * pool.shape.num_experts
        if isinstance(weights, FormWeights) and pool.published is not None:
            form, form_activation = pool.published.of(layer), built_in(block)
            if self._loops or form_activation is None:
                parts = list(zip(*weights.experts, strict=True))
                return TorchFormKernel(parts, form, block.gate, first)
            experts = [form_parts(form, expert) for expert in weights.experts]
            return HostKernel(FormLayer(experts, [form] * len(experts), form_activation, self._threads), first)
        return self._of_neurons(weights.tensors, first, block)

    def _of_neurons(self, tensors: Tensors, first: int, block: MoeBlock) -> HostKernel | StoredKernel:
        stored, activation = StoredKernel(tensors, block.gate, first), block.activation
        plain = len(tensors) == 2 and tensors[0].shape[2] == 2 and activation in ACTIVATIONS
        if self._loops or not plain or activation is None:
            return stored
        (gate_up, dtype), (down, _) = map(host_array, tensors)
        return HostKernel(FullLayer(gate_up, down, dtype, activation, self._threads), first, stored)


def kernels_of(
    pool: SlotPool | FormPool | MappedPool, settings: EngineSettings, blocks: Sequence[MoeBlock]
) -> Kernels | FormKernels | StoredKernels:
    """The kernels of an empty pool. Raises ConfigError: the one that is asked for cannot run these experts."""
    if isinstance(pool, MappedPool) or (isinstance(pool, SlotPool) and pool.computes is not None):
        return StoredKernels(pool, settings.expert_kernel, blocks)
    if isinstance(pool, SlotPool):
        return Kernels(pool, settings.expert_kernel, blocks)
    return FormKernels(pool, settings.expert_kernel, blocks)


def make_packed_kernel(
    policy: PolicySettings, pool: ReplicaPool, shape: ExpertShape, blocks: Sequence[MoeBlock], dtype: torch.dtype,
    threads: int, notes: list[str],
) -> PackedKernel:  # fmt: skip
    """The kernel for replicas on the pool's device: C++ on the CPU, Triton on a GPU, compiled now.

    Where Triton is missing or fails, torch runs them, slower and equal up to rounding; `notes` gets a line.

    Raises:
        ConfigError: the experts have biases, no gate, or an activation that the kernels do not build in.
    """
    activations = {block.activation for block in blocks}
    activation = next(iter(activations)) if len(activations) == 1 else None
    if activation is None or shape.gates != 2 or shape.has_bias:
        raise ConfigError(
            f"policy '{policy.name}' runs packed experts, which are plain gated ones without biases",
            "choose a policy without on_miss low-bit, such as next-gate",
        )
    device = pool.tensors[0].device
    if device.type == "cpu":
        return CpuPackedKernel(pool.tensors, pool.shape, activation, threads)
    try:
        from ....kernels.triton.forms import TritonPackedKernel
        from ..cuda.tables import ring_of

        kernel = TritonPackedKernel(pool.tensors, pool.shape, activation, dtype, ring_of(device))
        try_out(kernel, shape.hidden, dtype, device)
    except Exception as error:  # whatever a compiler or driver raises: torch can do it
        notes.append(f"replicas run by torch, slowly: the Triton kernel failed ({type(error).__name__}: {error})"[:300])
        return TorchPackedKernel(pool.tensors, pool.shape, activation)
    return kernel
