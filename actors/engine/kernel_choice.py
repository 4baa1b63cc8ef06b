"""Which kernel runs the experts: on a GPU the fastest of a few for each class of row counts, measured at start.

On the CPU it is the C++ kernel where that supports the experts, else the loop. On a GPU the candidates are the loop
(one GEMM per expert and projection), the Triton kernels in a few shapes, and `torch.nn.functional.grouped_mm`. Each is
timed on the slot pool itself before that holds anything, and compared with the loop: what fails, computes something
else, or gives an expert other bits depending on what runs beside it, is no candidate, and the plan says so.

Kernels round differently, so two engines agree to the last bit only if they choose alike. What was chosen for a shape
is therefore kept for the life of the process, and Triton, all of whose shapes of a class agree, is preferred unless
another takes less than `_MARGIN` of its time, so that processes agree too unless two are nearly as fast as that;
the setting `expert_kernel` settles it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...errors import ConfigError
from ...kernels.by_rows import ByRows
from ...kernels.expert_ffn import ExpertKernel, Operands, TorchKernel
from ...kernels.row_class import ROW_CLASSES, RowClass
from ..settings import ExpertKernelName
from .kernel_times import KernelTime, expert_kernel_times, problem_of
from .model import MoeBlock
from .pool import SlotPool

_MARGIN = 0.9
_TRIALS: dict[RowClass, tuple[int, int]] = {"decode": (1, 4), "short": (32, 8), "prefill": (192, 8)}  # rows, experts

Candidates = dict[RowClass, dict[str, ExpertKernel]]


@dataclass(frozen=True)
class KernelPlan:
    """What runs the experts, for the plan.

    chosen: name of the kernel for each class of row counts. times: what was measured. notes: what is no candidate, and
    what a user would not expect.
    """

    chosen: Mapping[RowClass, str]
    times: tuple[KernelTime, ...] = ()
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"chosen": dict(self.chosen), "times": [asdict(time) for time in self.times], "notes": list(self.notes)}


_chosen: dict[tuple[Any, ...], KernelPlan] = {}  # of this process, so that its engines agree


class Kernels:
    """The kernels of one slot pool; made before the pool holds anything, since measuring writes to the slots.

    Args:
        setting: `EngineSettings.expert_kernel`.
        blocks: the layers that are going to ask.

    Raises:
        ConfigError: a kernel is asked for that this pool or machine cannot run.
    """

    def __init__(self, pool: SlotPool, setting: ExpertKernelName, blocks: Sequence[MoeBlock]) -> None:
        self._operands = Operands(pool.gate_up, pool.down, pool.gate_up_bias, pool.down_bias)
        self._pool, self._setting = pool, setting
        self._shared: dict[str, ExpertKernel] = {}
        self._plans: list[KernelPlan] = []
        for block in blocks:
            self.of(block)

    def of(self, block: MoeBlock) -> ExpertKernel:
        """The kernel of a layer; layers whose activation has a name share one."""
        name = block.activation
        if name is None:
            return self._make(block)
        if name not in self._shared:
            self._shared[name] = self._make(block)
        return self._shared[name]

    @property
    def plan(self) -> KernelPlan:
        """Of the layers; where they differ, of the first."""
        return self._plans[0]

    def _make(self, block: MoeBlock) -> ExpertKernel:
        loop = TorchKernel(self._operands, block.gate)
        if self._pool.gate_up.device.type == "cpu":
            kernel, plan = self._on_cpu(loop, block.activation)
        else:
            kernel, plan = self._on_gpu(loop, block)
        self._plans.append(plan)
        return kernel

    def _on_cpu(self, loop: TorchKernel, activation: str | None) -> tuple[ExpertKernel, KernelPlan]:
        from ...kernels.cpu_ffn import CpuKernel

        if self._setting in ("triton", "grouped"):
            raise ConfigError(f"expert_kernel '{self._setting}' needs a GPU", "use auto or loop")
        looped = KernelPlan(dict.fromkeys(ROW_CLASSES, "loop"))
        if self._setting == "loop" or activation is None or not CpuKernel.supports(self._operands, activation):
            return loop, looped
        return CpuKernel(self._operands, activation, loop), KernelPlan(dict.fromkeys(ROW_CLASSES, "cpu"))

    def _on_gpu(self, loop: TorchKernel, block: MoeBlock) -> tuple[ExpertKernel, KernelPlan]:
        if self._setting == "loop":
            return loop, KernelPlan(dict.fromkeys(ROW_CLASSES, "loop"))
        candidates, notes = self._candidates(loop, block)
        from ...kernels.triton.timing import device_name

        gate_up = self._pool.gate_up
        size, kind = tuple(gate_up.shape[1:]), device_name(gate_up.device)
        key = (kind, size, gate_up.dtype, block.activation, self._setting, tuple(candidates["decode"]))
        plan = _chosen.get(key)
        if plan is None:
            plan = _chosen[key] = self._choose(candidates, loop, notes)
        return self._join(plan.chosen, candidates, loop, block.activation), plan

    def _candidates(self, loop: TorchKernel, block: MoeBlock) -> tuple[Candidates, list[str]]:
        """By class and name, those that the setting allows; and why there are not more."""
        operands, activation = self._operands, block.activation
        found: Candidates = {name: {} for name in ROW_CLASSES}
        if self._setting == "auto":
            for some in found.values():
                some["loop"] = loop
        try:
            from ...kernels.triton.expert_ffn import TritonKernel
            from ...kernels.triton.shapes import shapes_for
            from ...kernels.triton.tables import TableRing
        except ImportError:
            return found, ["triton is not installed: experts run one after another"]
        notes = []
        device = operands.gate_up.device
        if self._setting in ("auto", "triton") and activation is not None and TritonKernel.supports(
            operands, activation
        ):  # fmt: skip
            ring = TableRing(device)
            if not ring.mapped:
                notes.append("kernels cannot read host memory: tables of experts are copied")
            for name, shapes in shapes_for(operands.gate_up.dtype).items():
                for shape in shapes:
                    kernel = TritonKernel(operands, activation, loop, ring, {name: shape})
                    found[name][f"triton {shape}"] = kernel
        if self._setting in ("auto", "grouped"):
            from ...kernels.grouped_mm import GroupedMmKernel

            if GroupedMmKernel.supports(operands):
                grouped = GroupedMmKernel(operands, block.gate, loop, TableRing(device))
                for some in found.values():
                    some["grouped"] = grouped
        return found, notes

    def _choose(self, candidates: Candidates, loop: TorchKernel, notes: list[str]) -> KernelPlan:
        """Try, measure and choose for each class.

        Raises:
            ConfigError: of the kernel that the setting names nothing works.
        """
        chosen: dict[RowClass, str] = {}
        times: list[KernelTime] = []
        for name in ROW_CLASSES:
            rows, experts = _TRIALS[name]
            working = {}
            for label, kernel in candidates[name].items():
                problem = None if kernel is loop else self._tried(kernel, loop, rows)
                if problem is None:
                    working[label] = kernel
                else:
                    notes.append(f"{label} is not used for {name} rows: {problem}")
            if not working:
                raise ConfigError(
                    f"expert_kernel '{self._setting}' cannot run these experts"
                    + "".join(f"; {note}" for note in notes),
                    "use expert_kernel auto",
                )
            measured = expert_kernel_times(self._pool, working, [rows], experts) if len(working) > 1 else []
            times += measured
            chosen[name] = fastest(measured) if measured else next(iter(working))
        return KernelPlan(chosen, tuple(times), tuple(notes))

    def _tried(self, kernel: ExpertKernel, loop: TorchKernel, rows: int) -> str | None:
        """Why the kernel is no candidate; None: it works."""
        try:
            return problem_of(kernel, loop, self._pool, rows)
        except Exception as error:  # whatever a compiler, a driver or torch says against it
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"

    def _join(
        self, chosen: Mapping[RowClass, str], candidates: Candidates, loop: TorchKernel, activation: str | None
    ) -> ExpertKernel:
        """One kernel of those that were chosen; sums are Triton's where it is a candidate."""
        kernels = {name: candidates[name][label] for name, label in chosen.items()}
        shapes = {name: kernel.shapes[name] for name, kernel in kernels.items() if hasattr(kernel, "shapes")}
        if not shapes:
            first = kernels["decode"]
            return first if all(kernel is first for kernel in kernels.values()) else ByRows(kernels, loop)
        from ...kernels.triton.expert_ffn import TritonKernel

        assert activation is not None  # Triton is a candidate
        ring = next(kernel.ring for kernel in kernels.values() if hasattr(kernel, "ring"))
        joined = TritonKernel(self._operands, activation, loop, ring, shapes)
        if len(shapes) == len(kernels):
            return joined
        return ByRows({name: joined if name in shapes else kernel for name, kernel in kernels.items()}, joined)


def fastest(times: Sequence[KernelTime]) -> str:
    """The kernel to choose: the fastest Triton shape, unless another kernel takes less than `_MARGIN` of its time."""
    ours = [time for time in times if time.kernel.startswith("triton ")]
    best = min(times, key=lambda time: time.us)
    if not ours:
        return best.kernel
    mine = min(ours, key=lambda time: time.us)
    return best.kernel if best.us < _MARGIN * mine.us else mine.kernel


def kernel_for(pool: SlotPool, block: MoeBlock, setting: ExpertKernelName = "auto") -> ExpertKernel:
    """The kernel of one layer; see `Kernels`."""
    return Kernels(pool, setting, [block]).of(block)
