"""Selects the kernel that runs the experts, and measures its costs for planners.

On the CPU it is the C++ kernel where that supports the experts, on a GPU Triton's, else the loop (one GEMM per expert
and projection). Triton has a few shapes for each class of row counts. Each is timed at start on the empty slot pool and
compared with the loop. One that fails, differs, or gives an expert other bits depending on what runs beside it is
dropped, and the plan says so. The fastest of each class is chosen; all shapes of a class agree to the last bit, so what
a machine measures changes no token. The setting `expert_kernel` fixes the choice.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ....errors import ConfigError
from ....kernels.device import seconds_of
from ....kernels.expert_ffn import ROW_CLASSES, ExpertKernel, Group, Operands, RowClass, TorchKernel, row_class
from ...core import _core
from ...policies.cost import Link, load_s
from ...settings import ExpertKernelName, LinkSettings
from ..cache.form_slots import FormPool
from ..cache.slots import SlotPool
from .model import MoeBlock

_COLD_BYTES = 256 << 20  # of slots that calls go through in turn: several times a GPU's L2
_REPEATS = 10
_MANY_ROWS = 200  # of an expert that runs beside others: more than any block has
_TOLERANCE = 0.04  # of the largest value: two ways of rounding to bfloat16 on the way


@dataclass(frozen=True)
class KernelTime:
    """One candidate at one shape of a call.

    kernel: its name. rows: of each expert. experts: of the call. us: microseconds from an idle device to the result,
    launches included: a decode step's wait. device_us: microseconds on the device, of queued calls. gbps: gigabytes
    (1e9) of weights per second of `device_us`.
    """

    kernel: str
    row_class: RowClass
    rows: int
    experts: int
    us: float
    device_us: float
    gbps: float


def expert_kernel_times(
    pool: SlotPool, kernels: Mapping[str, ExpertKernel], rows: Sequence[int], experts: int = 4, repeats: int = _REPEATS
) -> list[KernelTime]:
    """Median times of each kernel at each row count; overwrites slots with random weights.

    Args:
        kernels: of this pool, by name.
        rows: of one expert.
        experts: of one call, fewer where there are fewer slots. Calls rotate over the slots, so that weights come from
            memory.
    """
    gate_up, neurons = pool.gate_up, pool.neurons
    slot_bytes = pool.bytes // len(gate_up)
    experts = min(experts, _slots(pool))
    slots = fill_slots(pool, max(experts, math.ceil(_COLD_BYTES / slot_bytes)))
    out = []
    for count in rows:
        hidden, pairs = _rows(pool, count, experts)
        y = torch.empty((count * experts, gate_up.shape[-1]), dtype=gate_up.dtype, device=gate_up.device)
        for name, kernel in kernels.items():

            def call(i: int, kernel: ExpertKernel = kernel) -> None:
                groups: list[Group] = []
                for e in range(experts):
                    slot = (i * experts + e) % slots
                    groups.append((e * count, (e + 1) * count, slot * neurons, neurons, False))  # noqa: B023
                kernel.run(hidden, pairs, groups, experts, y)  # noqa: B023

            idle_s, queued_s = seconds_of(gate_up.device, call, repeats)
            gbps = experts * slot_bytes / queued_s / 1e9
            out.append(KernelTime(name, row_class(count), count, experts, idle_s * 1e6, queued_s * 1e6, gbps))
    return out


def problem_of(kernel: ExpertKernel, reference: ExpertKernel, pool: SlotPool, rows: int) -> str | None:
    """Why a kernel cannot run experts of this many rows; None: it agrees with the reference.

    Its result must not depend on what runs beside an expert, or on the slot. Overwrites slots.
    """
    neurons = pool.neurons
    slots = fill_slots(pool, 3)
    for tensor in pool.tensors:
        tensor[slots - 1] = tensor[0]
    beside = [rows, _MANY_ROWS, 2][:slots]  # an expert of many rows and one of few, as far as there are slots
    starts = [sum(beside[:i]) for i in range(slots)]
    hidden, pairs = _rows(pool, sum(beside), 1)
    groups = [
        (start, start + n, slot * neurons, neurons, False)
        for slot, (start, n) in enumerate(zip(starts, beside, strict=True))
    ]
    expected, found, alone = (torch.zeros_like(hidden) for _ in range(3))
    reference.run(hidden, pairs, groups[:1], 1, expected)
    kernel.run(hidden, pairs, groups, 1, found)
    kernel.run(hidden, pairs, [(0, rows, (slots - 1) * neurons, neurons, False)], 1, alone)
    wanted, same, lone = (t[:rows].float() for t in (expected, found, alone))
    worst = float((same - wanted).abs().max() / wanted.abs().max())
    if not worst <= _TOLERANCE:  # NaN is no agreement
        return f"differs from the loop by {worst:.2g} of its largest value"
    if not torch.equal(same, lone):
        return "an expert's result depends on what runs beside it or on its slot"
    return None


def _slots(pool: SlotPool | FormPool) -> int:
    """The slots that measurements may use."""
    always = pool.always if isinstance(pool, SlotPool) else None
    return len(pool.tensors[0]) if always is None else always


def fill_slots(pool: SlotPool, count: int) -> int:
    """Fill up to `count` slots with random weights, which keep the scale of inputs; returns how many."""
    count = min(count, _slots(pool))
    generator = torch.Generator(device=pool.gate_up.device).manual_seed(0)
    for tensor, inputs in ((pool.gate_up, pool.gate_up.shape[-1]), (pool.down, pool.neurons)):
        tensor[:count].normal_(0.0, 1.5 / inputs**0.5, generator=generator)
    for bias in (pool.gate_up_bias, pool.down_bias):
        if bias is not None:
            bias[:count].normal_(generator=generator)
    return count


def _rows(pool: SlotPool, tokens: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random hidden states [T, H], and pairs [T * experts] that send all tokens to the same experts."""
    device = pool.gate_up.device
    generator = torch.Generator(device=device).manual_seed(1)
    hidden = torch.empty((tokens, pool.gate_up.shape[-1]), dtype=pool.gate_up.dtype, device=device)
    hidden.normal_(generator=generator)
    return hidden, torch.arange(tokens * experts, device=device).view(tokens, experts).t().flatten().contiguous()


_MEASURED = 5
_ROWS = 16
_COPY_GBPS = 10.0  # of an emulated link without throttle: what a copy within memory takes


def expert_seconds(kernel: ExpertKernel, pool: SlotPool | FormPool, together: int = 1) -> tuple[float, float]:
    """Median seconds of one expert at one row, and of each further row; zeroes slots, so call it on an empty pool.

    Args:
        together: so many experts run side by side, as far as there are slots; the first number is one's share. A GPU
            launches them together, and one expert alone may stay in a processor's cache from time to time.
    """
    count = max(1, min(together, _slots(pool)))
    for i in range(count):
        for tensor in pool.slot(i, 0):
            tensor.zero_()
    one, many = _seconds(kernel, pool, 1), _seconds(kernel, pool, _ROWS)
    share = one if count == 1 else _seconds(kernel, pool, 1, count) / count
    return share, max(0.0, (many - one) / (_ROWS - 1))


def run_seconds(kernel: ExpertKernel, pool: SlotPool | FormPool, together: int) -> float:
    """Seconds of a run of so many experts at one row, at most one a slot, after another one; on an empty pool."""
    return _seconds(kernel, pool, 1, max(1, min(together, _slots(pool))), 1)


def link_seconds(link: LinkSettings, slot_bytes: int, emulated: bool, device_gbps: float) -> float:
    """Seconds to load one expert. device_gbps: of the real link, where it is not emulated."""
    if not emulated:
        return load_s(slot_bytes, Link(device_gbps))
    return load_s(slot_bytes, Link(link.gbps or _COPY_GBPS, link.latency_us))


def _seconds(
    kernel: ExpertKernel, pool: SlotPool | FormPool, rows: int, experts: int = 1, repeats: int = _MEASURED
) -> float:
    """Of a run of the first experts, all with the same rows."""
    hidden = torch.zeros((rows, pool.hidden), dtype=pool.dtype, device=pool.device)
    pairs = torch.arange(rows * experts, device=pool.device).view(rows, experts).t().flatten().contiguous()
    y = torch.empty((rows * experts, pool.hidden), dtype=pool.dtype, device=pool.device)
    groups = [(e * rows, (e + 1) * rows, e * pool.neurons, pool.neurons, False) for e in range(experts)]
    times = []
    for _ in range(repeats + 1):
        start_s = time.perf_counter()
        kernel.run(hidden, pairs, groups, experts, y)
        if pool.device.type == "cuda":
            torch.cuda.synchronize(pool.device)  # before serving: the forward path never waits so
        times.append(time.perf_counter() - start_s)
    return statistics.median(times[1:])


_TRIALS: dict[RowClass, tuple[int, int]] = {"decode": (1, 4), "short": (32, 8), "prefill": (192, 8)}  # rows, experts

Candidates = dict[RowClass, dict[str, ExpertKernel]]


@dataclass(frozen=True)
class KernelPlan:
    """The kernels in use, for the plan.

    chosen: name of the kernel for each class of row counts. times: what was measured. notes: dropped candidates, and
    surprises.
    """

    chosen: Mapping[RowClass, str]
    times: tuple[KernelTime, ...] = ()
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {"chosen": dict(self.chosen), "times": [asdict(time) for time in self.times], "notes": list(self.notes)}


_chosen: dict[tuple[Any, ...], KernelPlan] = {}  # of this process: its engines measure once


def built_in(block: MoeBlock) -> str | None:
    """The activation of a layer's experts among those that kernels may build in (`form_ffn.FORM_ACTIVATIONS`)."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    experts = block.experts
    if block.activation is None and getattr(type(experts), "_apply_gate", None) is GptOssExperts._apply_gate:
        return "gpt_oss" if (experts.alpha, experts.limit) == (1.702, 7.0) else None
    return block.activation


class Kernels:
    """The kernels of one empty slot pool; measuring writes to the slots.

    Args:
        setting: `EngineSettings.expert_kernel`.
        blocks: the layers to be served.

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
        """The kernel of a layer; layers with the same named activation share one."""
        name = built_in(block)
        if name is None:
            return self._make(block)
        if name not in self._shared:
            self._shared[name] = self._make(block)
        return self._shared[name]

    @property
    def plan(self) -> KernelPlan:
        """Of the first layer."""
        return self._plans[0]

    def _make(self, block: MoeBlock) -> ExpertKernel:
        loop = TorchKernel(self._operands, block.gate)
        if self._pool.gate_up.device.type == "cpu":
            kernel, plan = self._on_cpu(loop, built_in(block))
        else:
            kernel, plan = self._on_gpu(loop, block)
        self._plans.append(plan)
        return kernel

    def _on_cpu(self, loop: TorchKernel, activation: str | None) -> tuple[ExpertKernel, KernelPlan]:
        from ....kernels.expert_ffn import CpuKernel

        if self._setting == "triton":
            raise ConfigError("expert_kernel 'triton' needs a GPU", "use auto or loop")
        if self._setting == "loop" or activation is None or not CpuKernel.supports(self._operands, activation):
            return loop, KernelPlan(dict.fromkeys(ROW_CLASSES, "loop"))
        return CpuKernel(self._operands, activation, loop), KernelPlan(dict.fromkeys(ROW_CLASSES, "cpu"))

    def _on_gpu(self, loop: TorchKernel, block: MoeBlock) -> tuple[ExpertKernel, KernelPlan]:
        """Triton in the fastest shapes; the loop where it is asked for, or Triton cannot run these experts.

        Raises ConfigError: Triton is asked for, and cannot.
        """
        if self._setting == "loop":
            return loop, KernelPlan(dict.fromkeys(ROW_CLASSES, "loop"))
        from ....kernels.device import device_name

        gate_up = self._pool.gate_up
        size, kind, activation = tuple(gate_up.shape[1:]), device_name(gate_up.device), built_in(block)
        key = (kind, size, gate_up.dtype, activation, self._setting)
        known = _chosen.get(key)
        kernel, plan = self._triton(loop, activation, known)
        if kernel is None and self._setting == "triton":
            said = "".join(f"; {note}" for note in plan.notes)
            raise ConfigError(f"expert_kernel 'triton' cannot run these experts{said}", "use expert_kernel auto")
        _chosen[key] = plan
        return loop if kernel is None else kernel, plan

    def _triton(
        self, loop: TorchKernel, activation: str | None, known: KernelPlan | None
    ) -> tuple[ExpertKernel | None, KernelPlan]:
        """Triton's kernel, in the shapes of a plan of this process, else in those that measurements choose.

        None: it cannot run these experts, and the plan's notes say why.
        """
        nothing = dict.fromkeys(ROW_CLASSES, "loop")
        try:
            from ....kernels.triton.expert_ffn import TritonKernel, shapes_for
        except ImportError:
            return None, KernelPlan(nothing, notes=("triton is not installed: experts run one after another",))
        from ..cuda.tables import ring_of

        operands = self._operands
        if activation is None or not TritonKernel.supports(operands, activation):
            return None, known or KernelPlan(nothing, notes=("Triton has no kernel for these experts",))
        ring = ring_of(operands.gate_up.device)
        named = {name: {f"triton {s}": s for s in some} for name, some in shapes_for(operands.gate_up.dtype).items()}
        if known is None:
            found: Candidates = {
                name: {label: TritonKernel(operands, activation, loop, ring, {name: s}) for label, s in some.items()}
                for name, some in named.items()
            }
            notes = [] if ring.mapped else ["kernels cannot read host memory: tables of experts are copied"]
            known = self._choose(found, loop, notes)
        if known.chosen == nothing:
            return None, known
        shapes = {name: named[name][label] for name, label in known.chosen.items()}
        return TritonKernel(operands, activation, loop, ring, shapes), known

    def _choose(self, candidates: Candidates, loop: TorchKernel, notes: list[str]) -> KernelPlan:
        """Try and measure the shapes of each class; the loop for all where none of a class works."""
        chosen: dict[RowClass, str] = {}
        times: list[KernelTime] = []
        for name in ROW_CLASSES:
            rows, experts = _TRIALS[name]
            working = {}
            for label, kernel in candidates[name].items():
                if (problem := self._tried(kernel, loop, rows)) is None:
                    working[label] = kernel
                else:
                    notes.append(f"{label} is not used for {name} rows: {problem}")
            if not working:
                return KernelPlan(dict.fromkeys(ROW_CLASSES, "loop"), tuple(times), tuple(notes))
            measured = expert_kernel_times(self._pool, working, [rows], experts) if len(working) > 1 else []
            times += measured
            chosen[name] = min(measured, key=lambda time: time.us).kernel if measured else next(iter(working))
        return KernelPlan(chosen, tuple(times), tuple(notes))

    def _tried(self, kernel: ExpertKernel, loop: TorchKernel, rows: int) -> str | None:
        """Why the kernel is no candidate; None: it works."""
        try:
            return problem_of(kernel, loop, self._pool, rows)
        except Exception as error:  # whatever a compiler, a driver or torch says against it
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


class SteppedKernel:
    """The kernel of a stepped link (`LinkSettings.layer_us`): it computes for real, and then advances the clock by
    `layer_s`, whatever the number of rows. So what has arrived when a layer runs is the same on every machine.
    """

    def __init__(self, kernel: ExpertKernel, clock: _core.Clock, layer_s: float) -> None:
        self.run, self._combine, self._clock, self._layer_s = kernel.run, kernel.combine, clock, layer_s

    def combine(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = self._combine(y, weights)
        self._clock.advance(self._layer_s)
        return out
