"""What the candidates for running experts take and whether they compute the same, on slots that hold nothing yet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...kernels.expert_ffn import ExpertKernel, Group
from ...kernels.row_class import RowClass, row_class
from ...kernels.triton.timing import seconds_of
from .pool import SlotPool

_COLD_BYTES = 256 << 20  # of slots that calls go through in turn: several times a GPU's L2
_REPEATS = 10
_MANY_ROWS = 200  # of an expert that runs beside others: more than any block has
_TOLERANCE = 0.04  # of the largest value: two ways of rounding to bfloat16 on the way


@dataclass(frozen=True)
class KernelTime:
    """One candidate at one shape of a call.

    kernel: its name. rows: of each expert. experts: of the call. us: microseconds from an idle device until the result
    is there, launches included, which is what a decode step waits for. device_us: microseconds on the device, of calls
    queued behind each other. gbps: gigabytes (1e9) of weights per second of `device_us`.
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
    """Median times of each kernel at each row count; writes random weights to the slots that it goes through.

    Args:
        pool: holds nothing that is needed. kernels: of this pool, by name.
        rows: of one expert.
        experts: of one call, fewer where there are fewer slots. Calls go through the slots in turn, so that weights
            come from memory.
    """
    gate_up, neurons = pool.gate_up, pool.neurons
    slot_bytes = pool.bytes // len(gate_up)
    experts = min(experts, len(gate_up))
    slots = fill_slots(pool, max(experts, math.ceil(_COLD_BYTES / slot_bytes)))
    out = []
    for count in rows:
        hidden, pairs = _rows(pool, count, experts)
        y = torch.empty((count * experts, gate_up.shape[-1]), dtype=gate_up.dtype, device=gate_up.device)
        for name, kernel in kernels.items():

            def call(i: int, kernel: ExpertKernel = kernel) -> None:
                groups = _groups(count, [(i * experts + e) % slots for e in range(experts)], neurons)  # noqa: B023
                kernel.run(hidden, pairs, groups, experts, y)  # noqa: B023

            idle_s, queued_s = seconds_of(gate_up.device, call, repeats)
            gbps = experts * slot_bytes / queued_s / 1e9
            out.append(KernelTime(name, row_class(count), count, experts, idle_s * 1e6, queued_s * 1e6, gbps))
    return out


def problem_of(kernel: ExpertKernel, reference: ExpertKernel, pool: SlotPool, rows: int) -> str | None:
    """Why a kernel is not to be used for experts of this many rows; None: it computes what the reference does, and
    the same bits whatever runs beside an expert and whichever slot it lies in. Writes to the slots."""
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


def fill_slots(pool: SlotPool, count: int) -> int:
    """Random weights for the first slots, as many as there are up to `count`; how many.

    Scaled so that results are of about the size of their inputs.
    """
    count = min(count, len(pool.gate_up))
    generator = torch.Generator(device=pool.gate_up.device).manual_seed(0)
    for tensor, inputs in ((pool.gate_up, pool.gate_up.shape[-1]), (pool.down, pool.neurons)):
        tensor[:count].normal_(0.0, 1.5 / inputs**0.5, generator=generator)
    for bias in (pool.gate_up_bias, pool.down_bias):
        if bias is not None:
            bias[:count].zero_()
    return count


def _rows(pool: SlotPool, tokens: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random hidden states [T, H], and the pairs of tokens that all go to the same experts [T * experts]."""
    device = pool.gate_up.device
    generator = torch.Generator(device=device).manual_seed(1)
    hidden = torch.empty((tokens, pool.gate_up.shape[-1]), dtype=pool.gate_up.dtype, device=device)
    hidden.normal_(generator=generator)
    return hidden, torch.arange(tokens * experts, device=device).view(tokens, experts).t().flatten().contiguous()


def _groups(rows: int, slots: Sequence[int], neurons: int) -> list[Group]:
    return [(i * rows, (i + 1) * rows, slot * neurons, neurons, False) for i, slot in enumerate(slots)]
