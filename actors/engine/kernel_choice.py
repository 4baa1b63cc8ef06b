"""Which kernel runs the experts: on a GPU the fastest of a few for each class of row counts, measured at start.

On the CPU it is the C++ kernel where that supports the experts, else the loop. On a GPU the candidates are the loop
(one GEMM per expert and projection), the Triton kernels in a few shapes, and `torch.nn.functional.grouped_mm`. Each is
timed on the slot pool itself before that holds anything, and compared with the loop: what fails, computes something
else, or gives an expert other bits depending on what runs beside it, is no candidate and is said in the plan.

Kernels round differently, so two engines agree to the last bit only if they choose alike. What was chosen for a shape
is therefore kept for the life of the process, and Triton is preferred unless another is faster by more than
`_MARGIN`, so that processes agree too, except where two are nearly as fast; `expert_kernel` settles it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ...errors import ConfigError
from ...kernels.expert_ffn import ExpertKernel, Gate, Group, Operands, TorchKernel
from ...kernels.row_class import ROW_CLASSES, RowClass, row_class
from ..settings import ExpertKernelName
from .kernel_times import KernelTime
from .model import MoeBlock
from .pool import SlotPool

_MARGIN = 0.9  # another kernel than Triton is chosen where it takes less than this part of its time
_TRIALS: dict[RowClass, tuple[int, int]] = {"decode": (1, 4), "short": (32, 8), "prefill": (192, 8)}  # rows, experts


@dataclass(frozen=True)
class KernelPlan:
    """What runs the experts, for the plan.

    chosen: name of the kernel for each class of row counts. times: what was measured. notes: why a candidate is none.
    """

    chosen: dict[RowClass, str]
    times: tuple[KernelTime, ...] = ()
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"chosen": dict(self.chosen), "times": [asdict(time) for time in self.times], "notes": list(self.notes)}


class Kernels:
    """The kernels of one slot pool; make it before the pool holds anything, since measuring writes to the slots.

    Args:
        setting: `EngineSettings.expert_kernel`.

    Raises:
        ConfigError: a kernel is asked for that this pool or machine cannot run.
    """

    def __init__(self, pool: SlotPool, setting: ExpertKernelName, blocks: Sequence[MoeBlock]) -> None:
        self._operands = Operands(pool.gate_up, pool.down, pool.gate_up_bias, pool.down_bias)
        self._pool, self._setting = pool, setting
        self._made: dict[str, ExpertKernel] = {}
        self._plans: dict[str, KernelPlan] = {}
        for block in blocks:
            self.of(block)

    def of(self, block: MoeBlock) -> ExpertKernel:
        """The kernel of a layer; layers whose activation has a name share one."""
        name = block.activation
        if name is None:
            return self._make(block)
        if name not in self._made:
            self._made[name] = self._make(block)
        return self._made[name]

    @property
    def plan(self) -> KernelPlan:
        """Of the layers; where they differ, of the first."""
        return next(iter(self._plans.values()))

    def _make(self, block: MoeBlock) -> ExpertKernel:
        loop = TorchKernel(self._operands, block.gate)
        if self._pool.gate_up.device.type == "cpu":
            kernel, plan = self._on_cpu(loop, block.activation)
        else:
            kernel, plan = loop, KernelPlan(dict.fromkeys(ROW_CLASSES, "loop"))
        self._plans.setdefault(str(block.activation), plan)
        return kernel

    def _on_cpu(self, loop: TorchKernel, activation: str | None) -> tuple[ExpertKernel, KernelPlan]:
        from ...kernels.cpu_ffn import CpuKernel

        if self._setting in ("triton", "grouped"):
            raise ConfigError(f"expert_kernel '{self._setting}' needs a GPU", "use auto or loop")
        plain = KernelPlan(dict.fromkeys(ROW_CLASSES, "loop"))
        if self._setting == "loop" or activation is None or not CpuKernel.supports(self._operands, activation):
            return loop, plain
        return CpuKernel(self._operands, activation, loop), KernelPlan({**plain.chosen, "decode": "cpu"})


def kernel_for(pool: SlotPool, block: MoeBlock, setting: ExpertKernelName = "auto") -> ExpertKernel:
    """The kernel of one layer; see `Kernels`."""
    return Kernels(pool, setting, [block]).of(block)
