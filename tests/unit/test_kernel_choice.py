"""Which kernel runs the experts: rules of the choice, and a choice among real kernels, interpreted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu
from form_cases import expert_form
from kernel_cases import assert_near, exact, gate_for, gpt_oss_gate, groups_of, rows_for
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from tiermoe.actors.engine.cache.form_slots import FormPool
from tiermoe.actors.engine.cache.slots import SlotPool
from tiermoe.actors.engine.cuda import tables
from tiermoe.actors.engine.model import kernels as kernel_choice
from tiermoe.actors.engine.model import kernels as kernel_times
from tiermoe.actors.engine.model.form_kernels import FormKernels
from tiermoe.actors.engine.model.kernels import (
    Kernels,
    expert_seconds,
    fill_slots,
    problem_of,
)
from tiermoe.actors.engine.model.model import MoeBlock
from tiermoe.actors.store.format import ExpertShape, Published
from tiermoe.errors import ConfigError
from tiermoe.kernels.expert_ffn import CpuKernel, Group, Operands, TorchKernel

NEURONS, WIDTH = 24, 32
CPU = torch.device("cpu")


def pool_in(dtype: torch.dtype, slots: int = 3) -> SlotPool:
    shape = ExpertShape(num_experts=4, hidden=WIDTH, intermediate=NEURONS, gates=2, has_bias=False)
    return SlotPool.allocate(shape, slots, dtype, torch.device("cpu"))


def block(activation: str | None = "silu") -> MoeBlock:
    return MoeBlock(nn.Module(), gate_for("silu"), activation, None, None)


def operands(pool: SlotPool) -> Operands:
    return Operands(pool.gate_up, pool.down, None, None)


def kernel_for(pool: SlotPool, block: MoeBlock, setting: Any = "auto") -> Any:
    return Kernels(pool, setting, [block]).of(block)


def test_on_the_cpu_it_is_as_it_was() -> None:
    pool = pool_in(torch.float32)
    assert isinstance(kernel_for(pool, block()), CpuKernel)
    assert isinstance(kernel_for(pool, block(None)), TorchKernel)
    assert isinstance(kernel_for(pool_in(torch.bfloat16), block()), TorchKernel)
    assert isinstance(kernel_for(pool, block(), "loop"), TorchKernel)
    kernels = Kernels(pool, "auto", [block(), block()])
    assert kernels.of(block()) is kernels.of(block())
    assert kernels.plan.as_dict() == {
        "chosen": {"decode": "cpu", "short": "cpu", "prefill": "cpu"}, "times": [], "notes": [],
    }  # fmt: skip
    with pytest.raises(ConfigError, match="needs a GPU"):
        kernel_for(pool, block(), "triton")


class Wrong:
    """Computes something else in one way or another."""

    def __init__(self, right: TorchKernel, how: str) -> None:
        self._right, self._how = right, how

    def run(self, hidden: torch.Tensor, pairs: torch.Tensor, groups: list[Group], top_k: int, y: torch.Tensor) -> None:
        self._right.run(hidden, pairs, groups, top_k, y)
        if self._how == "nothing":
            y.zero_()
        elif self._how == "nan":
            y[0, 0] = float("nan")
        elif self._how == "neighbours" and len(groups) > 1:
            y.mul_(1.0001)
        elif self._how == "raises":
            raise RuntimeError("out of resource: shared memory\nmore lines")

    def combine(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self._right.combine(y, weights)


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_what_computes_something_else_is_found_out(slots: int) -> None:
    pool = pool_in(torch.float32, slots)
    loop = TorchKernel(operands(pool), gate_for("silu"))
    assert problem_of(Wrong(loop, "not"), loop, pool, 3) is None
    for how in ("nothing", "nan"):
        assert "differs from the loop" in str(problem_of(Wrong(loop, how), loop, pool, 3))
    beside = problem_of(Wrong(loop, "neighbours"), loop, pool, 3)
    assert beside is None if slots == 1 else "runs beside it" in str(beside)


def eager_gpu() -> FakeGpu:
    gpu = FakeGpu()
    gpu.eager = True
    return gpu


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small trials, and no choice that an earlier test has made."""
    monkeypatch.setattr(kernel_choice, "_TRIALS", {"decode": (1, 2), "short": (17, 1), "prefill": (65, 1)})
    monkeypatch.setattr(kernel_choice, "_chosen", {})
    gpu = eager_gpu()
    monkeypatch.setattr(tables, "ring_of", lambda device: tables.TableRing(gpu))
    monkeypatch.setattr(kernel_times, "_MANY_ROWS", 65)
    times = kernel_times.expert_kernel_times
    monkeypatch.setattr(kernel_choice, "expert_kernel_times", lambda *a: times(*a, repeats=1))


def on_gpu(pool: SlotPool, setting: str, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """As on a GPU, with the kernels interpreted."""
    pytest.importorskip("triton")
    monkeypatch.setattr(
        Kernels, "_on_cpu", lambda self, loop, activation: self._on_gpu(loop, block(activation))
    )  # fmt: skip
    return Kernels(pool, setting, [block()])  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted where there is a GPU")
@pytest.mark.parametrize("setting", ["auto", "triton"])
def test_candidates_are_tried_measured_and_joined(setting: str, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_in(torch.float32)
    kernels = on_gpu(pool, setting, monkeypatch)
    plan = kernels.plan
    assert {label.split()[0] for label in plan.chosen.values()} == {"triton"}
    assert not plan.notes

    fill_slots(pool, 3)
    sizes = [2, 20, 70]
    hidden, pairs = rows_for(sizes, 2, WIDTH, torch.float32)
    groups = groups_of(sizes, [2, 0, 1], NEURONS)
    y = torch.empty(len(pairs), WIDTH)
    kernels.of(block()).run(hidden, pairs, groups, 2, y)
    assert_near(y, exact(operands(pool), "silu", hidden, pairs, groups, 2))
    again = on_gpu(pool_in(torch.float32), setting, monkeypatch)
    assert again.plan is plan  # engines of one process agree


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted where there is a GPU")
def test_gpt_oss_in_full_precision_has_a_kernel(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its biases and its activation, by transformers' own class; with other constants the loop runs it."""

    class Experts(nn.Module):
        _apply_gate, alpha, limit = GptOssExperts._apply_gate, 1.702, 7.0

    on_gpu(pool_in(torch.float32), "auto", monkeypatch)
    shape = ExpertShape(num_experts=4, hidden=WIDTH, intermediate=NEURONS, gates=2, has_bias=True)
    pool = SlotPool.allocate(shape, 3, torch.float32, CPU)
    for limit, kernel in ((7.0, "triton"), (6.0, "loop")):
        experts = Experts()
        experts.limit = limit
        oss = MoeBlock(experts, gpt_oss_gate, None, None, None)
        plan = Kernels(pool, "auto", [oss]).plan
        assert {label.split()[0] for label in plan.chosen.values()} == {kernel}
        assert all("no kernel" in note for note in plan.notes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted where there is a GPU")
def test_a_candidate_that_fails_is_left_out_and_said(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiermoe.kernels.triton.expert_ffn import TritonKernel

    pool = pool_in(torch.float32)
    broken = Wrong(TorchKernel(operands(pool), gate_for("silu")), "raises")
    monkeypatch.setattr(TritonKernel, "run", lambda self, *a: broken.run(*a))
    plan = on_gpu(pool, "auto", monkeypatch).plan
    assert set(plan.chosen.values()) == {"loop"}
    assert sum("RuntimeError: out of resource: shared memory" in note for note in plan.notes) == 1
    with pytest.raises(ConfigError, match=r"expert_kernel 'triton' cannot run these experts; triton .*out of resource"):
        on_gpu(pool, "triton", monkeypatch)


def test_kernels_of_published_forms() -> None:
    """On the CPU: C++ for the activations that it knows, else torch; each form of a mixed pool has its own."""
    forms = tuple(expert_form(name, 64, 32) for name in ("mxfp4", "bfloat16"))
    published = Published(forms=forms, layers=(0, 1, 0), checkpoint=None)
    pool = FormPool.allocate(published, 2, torch.float32, torch.device("cpu"))
    blocks = [block(), block(), block(None)]
    found = [FormKernels(pool, "auto", blocks).of(b) for b in blocks]
    assert [kernel.name for kernel in found] == ["cpu", "cpu", "torch"]
    assert found[0] is not found[1]
    assert expert_seconds(found[0], pool, together=4)[0] > 0  # of two slots
    assert FormKernels(pool, "loop", blocks).plan.chosen["decode"] == "torch"
    with pytest.raises(ConfigError, match="needs a GPU"):
        FormKernels(pool, "triton", blocks)


def test_published_forms_run_by_triton_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default; layers of one form share a kernel. What has none is said, or refused where Triton is asked for."""
    pytest.importorskip("triton")
    from tiermoe.kernels.triton.forms import TritonFormKernel

    forms = tuple(expert_form(name, 64, 32) for name in ("mxfp4", "fp8_block"))
    pool = FormPool.allocate(Published(forms=forms, layers=(0, 1, 0), checkpoint=None), 2, torch.float32, CPU)
    monkeypatch.setattr(FormPool, "device", torch.device("cuda"))
    monkeypatch.setattr(tables, "ring_of", lambda device: tables.TableRing(eager_gpu()))
    blocks = [block(), block(), block()]
    kernels = FormKernels(pool, "auto", blocks)
    found = [kernels.of(b) for b in blocks]
    assert [type(kernel) for kernel in found] == [TritonFormKernel] * 3
    assert found[0] is found[2]
    assert found[0] is not found[1]
    assert kernels.plan.as_dict()["chosen"]["prefill"] == "triton"
    assert FormKernels(pool, "loop", blocks).plan.chosen["decode"] == "torch"

    own = [block(), block(None), block()]
    kernels = FormKernels(pool, "auto", own)
    assert kernels.of(own[1]).name == "torch"  # type: ignore[attr-defined]
    assert kernels.plan.notes == ("Triton has no kernel for the gate of these experts, which run one after another",)
    with pytest.raises(ConfigError, match="no kernel for the gate"):
        FormKernels(pool, "triton", own)


def test_a_form_whose_kernel_does_not_compile_runs_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the plan says so, at the start and not in a request."""
    pytest.importorskip("triton")
    from tiermoe.kernels.triton.forms import TritonFormKernel

    published = Published(forms=(expert_form("mxfp4", 64, 32),), layers=(0,), checkpoint=None)
    pool = FormPool.allocate(published, 2, torch.float32, CPU)
    monkeypatch.setattr(FormPool, "device", torch.device("cuda"))
    monkeypatch.setattr(tables, "ring_of", lambda device: tables.TableRing(eager_gpu()))

    def fails(*_: Any) -> None:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(TritonFormKernel, "run", fails)
    kernels = FormKernels(pool, "auto", [block()])
    assert set(kernels.plan.chosen.values()) == {"torch"}
    assert "RuntimeError: out of resource" in kernels.plan.notes[0]
