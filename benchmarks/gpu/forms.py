"""Part `forms`: the kernels of experts in each published form, beside torch's and the bandwidth of the device's memory.

A call runs one row through as many experts as a token has, as in decode, or a prompt's rows. Slots are several times a
GPU's cache, and calls go through them in turn, so that weights come from memory. All slots hold the same expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from tiermoe.actors.engine.cache.form_slots import FormPool
from tiermoe.actors.engine.cuda.tables import ring_of
from tiermoe.kernels.device import seconds_of
from tiermoe.kernels.expert_ffn import ExpertKernel, Group
from tiermoe.kernels.form_slots import CpuFormKernel, TorchFormKernel
from tiermoe.kernels.forms import ExpertForm

from ..random_forms import random_expert
from .decode import table
from .models import REAL, TOY, RealShape
from .run_parts import Context, Record
from .transfers import record_peaks

ROWS = {"decode": 1, "prefill": 64}  # of an expert, by class
COLD_BYTES, TOY_BYTES = 512 << 20, 1 << 20
TOLERANCE = 0.04  # of the largest value: two ways of rounding to bfloat16 on the way
_REPEATS = 20
_CASE_S = 8.0  # a case with less time left does not start
_TOY_SIZE = 256  # which the blocks of all forms divide


def run(context: Context, record: Record) -> None:
    """Decode of all forms, the most important first, then prompts."""
    peak = record_peaks(context, record).hbm
    for row_class in ROWS:
        for name, shape in shapes(context.toy).items():
            case = f"{name}, {row_class}"
            known = record.measured("form", form=name, row_class=row_class)
            if not known and record.has_time(context, _CASE_S, case):
                with record.trying(case, must_run=True):
                    measure(context, record, name, shape, row_class, peak)
    decode = {row["form"]: row for row in record.rows_of("form") if row["row_class"] == "decode"}
    plain = decode.get("bfloat16")
    for name, row in decode.items():
        if plain is not None and row["hidden"] == plain["hidden"]:
            record.goal(
                f"{name}: time of a decode call over bfloat16's", row["device_us"] / plain["device_us"], "<=", 1.0
            )


def shapes(toy: bool) -> dict[str, RealShape]:
    """The shape of each form's experts, by the form's name."""
    found = {}
    for name, form in table()["forms"].items():
        shape = (TOY if toy else REAL)["gpt-oss" if name.startswith("gpt-oss") else "qwen3"]
        sizes = {"hidden": _TOY_SIZE, "intermediate": _TOY_SIZE} if toy else {}
        found[name] = shape.model_copy(update={"form": form, **sizes})
    return found


def kernel_of(pool: FormPool, form: ExpertForm, activation: str) -> ExpertKernel:
    """The kernel that the product takes on the pool's device.

    Raises:
        FormError: there is none on a GPU.
    """
    parts = pool.parts(form)
    if pool.device.type == "cpu":
        return CpuFormKernel(parts, form, activation, torch.get_num_threads())
    from tiermoe.kernels.triton.forms import TritonFormKernel

    return TritonFormKernel(parts, form, activation, GATES[activation], pool.dtype, ring_of(pool.device))


def filled_pool(shape: RealShape, slots: int, dtype: torch.dtype, device: torch.device) -> FormPool:
    """Slots that all hold one random expert."""
    form = shape.expert_form
    made = shape.published(1)
    assert form is not None
    assert made is not None
    pool = FormPool.allocate(made, slots, dtype, device)
    for tensor, part in zip(pool.tensors, random_expert(form, np.random.default_rng(0)).values(), strict=True):
        tensor.copy_(torch.from_numpy(part.reshape(-1).view(np.uint8)).to(device))
    return pool


def measure(context: Context, record: Record, name: str, shape: RealShape, row_class: str, peak_gbps: float) -> None:
    form, activation = shape.expert_form, "gpt_oss" if shape.fused else "silu"
    assert form is not None
    rows, experts = ROWS[row_class], shape.top_k
    cold = TOY_BYTES if context.toy else COLD_BYTES
    pool = filled_pool(shape, max(experts, math.ceil(cold / form.nbytes())), context.dtype, context.device)
    kernel, torchs = kernel_of(pool, form, activation), TorchFormKernel(pool.parts(form), form, GATES[activation])
    generator = torch.Generator(context.device).manual_seed(1)
    hidden = torch.empty((rows, form.hidden), dtype=context.dtype, device=context.device).normal_(generator=generator)
    # [T * K] pairs that send all rows to the same experts, one expert after the other
    pairs = torch.arange(rows * experts, device=context.device).view(rows, experts).t().flatten().contiguous()
    y, wanted = (torch.empty((rows * experts, form.hidden), dtype=context.dtype, device=context.device) for _ in "ab")

    def call(i: int, kernel: ExpertKernel = kernel, y: torch.Tensor = y) -> None:
        groups: list[Group] = []
        for e in range(experts):
            first = (i * experts + e) % pool.slots * form.intermediate
            groups.append((e * rows, (e + 1) * rows, first, form.intermediate, False))
        kernel.run(hidden, pairs, groups, experts, y)

    call(0)
    call(0, torchs, wanted)
    error = float((y - wanted).abs().max() / wanted.abs().max())
    idle_s, queued_s = seconds_of(context.device, call, 2 if context.toy else _REPEATS)
    gbps = experts * form.nbytes() / queued_s / 1e9
    record.row(
        "form", form=name, row_class=row_class, hidden=form.hidden, intermediate=form.intermediate, rows=rows,
        experts=experts, expert_mb=form.nbytes() / 1e6, us=idle_s * 1e6, device_us=queued_s * 1e6, gbps=gbps,
        of_peak=gbps / peak_gbps, error=error,
    )  # fmt: skip
    record.check(f"{name}, {row_class}: error over the largest value", error, "<=", TOLERANCE, always=True)


def _silu(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.view(len(both), -1, 2).unbind(-1)
    return functional.silu(gate) * up


def _gpt_oss(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.view(len(both), -1, 2).unbind(-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


GATES: Mapping[str, Callable[[torch.Tensor], Any]] = {"silu": _silu, "gpt_oss": _gpt_oss}
