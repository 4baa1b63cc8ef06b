"""Triton's kernels of experts in published forms, interpreted where there is no GPU; and what they compile to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from form_cases import FORMS, expert_form, form, fused_form
from kernel_cases import Forbidden, gate_for, gpt_oss_gate, slots_of

from tiermoe.errors import FormError
from tiermoe.kernels.expert_ffn import DECODE_ROWS
from tiermoe.kernels.form_slots import TorchFormKernel
from tiermoe.kernels.forms import BLOCKS, ExpertForm

pytest.importorskip("triton")
import triton
import triton.language as tl

from tiermoe.kernels.triton import expert_ffn
from tiermoe.kernels.triton.form_weights import Matrix, expert_matrix, weights
from tiermoe.kernels.triton.forms import TritonFormKernel, decoding_of
from tiermoe.kernels.triton.launch import Launch

RNG = np.random.default_rng(0)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
gate = gate_for("silu")
LARGE = [kind for kind, (weights, *_) in BLOCKS.items() if weights == 256]


@triton.jit
def _decode(
    weight, scale, zero, whole, out, FORM: tl.constexpr, OUTPUTS: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """All weights of slot 1, as the kernels decode them."""
    weight += FORM.strides[0]
    scale += FORM.strides[1]
    zero += FORM.strides[2]
    whole += FORM.strides[3]
    for first in range(0, OUTPUTS, N):
        output = first + tl.arange(0, N)
        for start in range(0, FORM.inputs, K):
            column = start + tl.arange(0, K)
            values = weights(weight, scale, zero, whole, first, start, FORM, N, K).to(tl.float32)
            there = (output < OUTPUTS)[:, None] & (column < FORM.inputs)[None, :]
            tl.store(out + output[:, None] * FORM.inputs + column[None, :], values, mask=there)


def decoded(matrix: Matrix, outputs: int, inputs: int, k: int) -> torch.Tensor:
    found = torch.empty((outputs, inputs), device=DEVICE)
    _decode[(1,)](*matrix.tensors[:4], found, FORM=matrix.form, OUTPUTS=outputs, N=16, K=k)
    return found


@pytest.mark.parametrize("name", FORMS)
def test_every_weight_has_the_bits_of_the_reference(name: str) -> None:
    outputs, inputs = 40, 512 if name in LARGE else 288
    own = form(name, outputs, inputs)
    of = ExpertForm(down=form("float32", inputs, outputs), gate=own, up=own)
    slots, experts = slots_of(of, 2)
    parts = dict(zip(of.parts(), (slot.to(DEVICE) for slot in slots), strict=True))
    found = decoded(expert_matrix(of, parts, "gate"), outputs, inputs, decoding_of(own).K)
    wanted = of.dequantize(experts[1]).gate
    if own.order:
        wanted = wanted[:, experts[1]["gate.order"]]  # the kernels gather the rows
    np.testing.assert_array_equal(found.cpu().numpy(), wanted)


def poisoned(slots: list[torch.Tensor], used: int) -> list[torch.Tensor]:
    """Slots with bytes around them, and other slots, that decode to numbers which are none."""
    found = []
    for part in slots:
        stride = -(-part.shape[1] // 64) * 64 + 64
        whole = torch.full((len(part), stride), 255, dtype=torch.uint8, device=DEVICE)
        whole[used, : part.shape[1]] = part[used].to(DEVICE)
        found.append(whole[:, : part.shape[1]])
    return found


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for activations and results that begins as NaN."""
    scratch = expert_ffn._scratch

    def made(*given: Any) -> tuple[torch.Tensor, ...]:
        found = scratch(*given)
        found[0].fill_(float("nan")), found[4].fill_(float("nan"))
        return found

    monkeypatch.setattr(expert_ffn, "_scratch", made)


def assert_as_torch(of: ExpertForm, slots: list[torch.Tensor], used: int, rows: int, activation: str) -> None:
    """In float32, within the roundings of sums of so many products; rows of other pairs stay."""
    neurons, which = of.intermediate, gpt_oss_gate if activation == "gpt_oss" else gate
    hidden = torch.full((rows + 1, of.hidden), float("nan"), device=DEVICE)
    hidden[:rows] = torch.from_numpy(RNG.standard_normal((rows, of.hidden), dtype=np.float32))
    pairs = torch.arange(rows + 1, device=DEVICE)
    groups = [(0, rows, used * neurons, neurons, False)]
    ys = [torch.full_like(hidden, 7.0) for _ in range(2)]
    TorchFormKernel(slots, of, which).run(hidden, pairs, groups, 1, ys[0])
    kernel = TritonFormKernel(slots, of, activation, which, torch.float32)
    kernel._reference = Forbidden()
    kernel.run(hidden, pairs, groups, 1, ys[1])
    assert (ys[1][rows] == 7).all()
    assert float((ys[1] - ys[0]).abs().max()) <= 2e-6 * float(ys[0][:rows].abs().max())


@pytest.mark.parametrize("name", FORMS)
def test_experts_are_those_of_the_reference(name: str, poison: None) -> None:
    """Of a slot between others, with sizes that end within a tile."""
    of = expert_form(name, *((256, 256) if name in LARGE else (160, 96)))
    assert_as_torch(of, poisoned(slots_of(of, 3)[0], 1), 1, 2, "silu")


@pytest.mark.parametrize("name", ["fp8_block", "mxfp4", "q8_0", "q6_k", "int, 4 bits, order"])
def test_prompts(name: str, poison: None) -> None:
    of = expert_form(name, *((256, 256) if name in LARGE else (96, 64)))
    assert_as_torch(of, poisoned(slots_of(of, 2)[0], 0), 0, DECODE_ROWS + 51, "silu")


@pytest.mark.parametrize("bias", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gpt_oss(interleaved: bool, bias: str, poison: None) -> None:
    """Scaled down: a width that 64 divides and 128 does not, and fused matrices with biases."""
    of = fused_form("mxfp4", 192, 96, interleaved=interleaved, bias=bias)
    assert_as_torch(of, poisoned(slots_of(of, 2)[0], 1), 1, 3, "gpt_oss")


def test_gguf_files_mix_forms() -> None:
    """As Q4_K_M does: Q4_K beside Q6_K and Q8_0 in one expert."""
    of = ExpertForm(gate=form("q4_k", 256, 256), up=form("q8_0", 256, 256), down=form("q6_k", 256, 256))
    assert_as_torch(of, [slot.to(DEVICE) for slot in slots_of(of, 1)[0]], 0, 2, "silu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_of_half_precision(dtype: torch.dtype) -> None:
    """A row is the same whatever runs beside it; the bound is a rounding of each activation and of the result."""
    of = expert_form("fp8_block", 256, 128)
    slots = [slot.to(DEVICE) for slot in slots_of(of, 2)[0]]
    hidden = torch.from_numpy(RNG.standard_normal((4, 256), dtype=np.float32)).to(DEVICE, dtype)
    pairs, ys = torch.arange(4, device=DEVICE), [torch.zeros_like(hidden) for _ in range(3)]
    kernel = TritonFormKernel(slots, of, "silu", gate, dtype)
    TorchFormKernel(slots, of, gate).run(hidden.float(), pairs, [(0, 4, 128, 128, False)], 1, wide := ys[0].float())
    kernel.run(hidden, pairs, [(0, 3, 128, 128, False), (3, 4, 0, 128, False)], 1, ys[1])
    unit = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-10
    assert float((ys[1][:3].float() - wide[:3]).abs().max()) <= 4 * unit * float(wide.abs().max())
    hidden[:2] = 0
    kernel.run(hidden, pairs, [(0, 3, 128, 128, False)], 1, ys[2])
    assert torch.equal(ys[2][2], ys[1][2])


@pytest.mark.parametrize("name", FORMS)
def test_a_decode_layer_takes_three_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any number of experts; a layer's reading and its table are two more, so five of at most six."""
    of = expert_form(name, 256, 256)
    found: list[str] = []

    def first(launch: Launch, *_: Any) -> Callable[..., None]:
        found.append(launch.name)
        return lambda *_: found.append(launch.name)

    slots = slots_of(of, 3)[0]
    kernel = TritonFormKernel(slots, of, "silu", gate, torch.bfloat16)
    monkeypatch.setattr(Launch, "first", first)
    hidden, y = torch.zeros(1, 256, dtype=torch.bfloat16), torch.zeros(3, 256, dtype=torch.bfloat16)
    groups = [(i, i + 1, 256 * i, 256, False) for i in range(3)]
    for _ in range(2):
        found.clear()
        kernel.run(hidden, torch.arange(3), groups, 3, y)
        kernel.combine(y, torch.ones(1, 3))
        assert found == ["_form_gate_up", "_form_down", "_combine"]


def test_what_is_refused() -> None:
    of = expert_form("mxfp4", 64, 96)
    slots, _ = slots_of(of, 2)
    with pytest.raises(ValueError, match="no activation swish"):
        TritonFormKernel(slots, of, "swish", gate, torch.float32)
    with pytest.raises(FormError, match="6 parts, not 5"):
        TritonFormKernel(slots[:-1], of, "silu", gate, torch.float32)
    q8 = expert_form("q8_0", 64, 96)
    odd = [torch.zeros((2, part.shape[1] + 1), dtype=torch.uint8)[:, 1:] for part in slots_of(q8, 2)[0]]
    with pytest.raises(FormError, match="multiple of 2 bytes"):
        TritonFormKernel(odd, q8, "silu", gate, torch.float32)
    kernel = TritonFormKernel(slots, of, "silu", gate, torch.float32)
    with pytest.raises(ValueError, match="whole experts"):
        kernel.run(torch.zeros(2, 64), torch.arange(2), [(0, 1, 0, 48, False)], 1, torch.zeros(2, 64))


# whose blocks are aligned to two bytes: all loads are of two
_NARROW = [kind for kind, (_, nbytes, _) in BLOCKS.items() if nbytes % 4 == 2]
_USUAL = ("fp8_block", "mxfp4", "nvfp4", "int4 zeros", "q8_0", "q4_k", "q6_k")
_COMPILED = [
    *[(case, sm) for case in _USUAL for sm in (80, 90, 120)],
    ("q5_k", 90), ("q2_k", 86), ("q5_1", 120), ("iq4_xs", 89), ("iq2_s", 86), ("iq3_s", 90), ("iq1_m", 120),
    ("tq1_0", 100), ("mxfp8", 86), ("replica, 3 bits", 86), ("replica, 1 bit", 90), ("linear q4_k", 86),
    ("linear fp8_channel", 120),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("case", "architecture"), _COMPILED)
def test_what_they_compile_to(case: str, architecture: int, tmp_path: Path) -> None:
    """For GPUs that it takes none to compile for: nothing spilled, at most 99 KiB of shared memory, tensor cores, and
    in a pass of the loop at most one load of one or two bytes for four weights, where blocks are aligned to more: of
    scales. Weights by themselves would take one for each, or for two.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    program = [sys.executable, str(Path(__file__).with_name("compile_forms.py")), str(architecture), case]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == (3 if case.startswith("linear") else 4)
    for kernel in kernels:
        assert kernel["shared"] <= 99 << 10, kernel
        assert kernel.get("spilled", 0) == 0, kernel
        assert not kernel["flushes"], kernel  # subnormal codes are numbers
        if kernel["kernel"] == "_form_rows":  # it only decodes
            continue
        assert {"mma.sync", "wgmma.mma_async", "tcgen05.mma"} & set(kernel["by"]), kernel
        loads, copies = ({int(n): count for n, count in kernel[of].items()} for of in ("loads", "copies"))
        if case in _NARROW:
            assert not loads.get(1), kernel
        else:  # scales and zero points
            assert loads.get(1, 0) + loads.get(2, 0) <= kernel["weights"] / 4, kernel
            assert sum(copies.values()) > 0, kernel
