"""Experts in published forms on slots: the torch and C++ kernels, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from form_cases import FORMS, OF_INTEGERS, expert_form, form, fused_form, random_parts, reference
from kernel_cases import gate_for, gpt_oss_gate, slots_of

from tiermoe.errors import FormError
from tiermoe.kernels.form_slots import CpuFormKernel, TorchFormKernel, dequantize, slot_parts
from tiermoe.kernels.forms import ExpertForm

RNG = np.random.default_rng(0)
gate = gate_for("silu")


@pytest.mark.parametrize("name", FORMS)
def test_torch_dequantizes_to_the_same_bits(name: str) -> None:
    of = form(name, 24, 512)
    parts = random_parts(of, RNG)
    if of.scale in ("U8", "F8_E8M0"):
        parts["scale"].flat[:2] = [0, 1]
    expert = ExpertForm(down=form("float32", 512, 12), gate_up=of)
    given = [torch.from_numpy(array.reshape(-1).view(np.uint8)) for array in parts.values()]
    found = slot_parts(expert, [*given, torch.zeros(512 * 12 * 4, dtype=torch.uint8)])
    own = {part: found[f"gate_up.{part}"] for part in of.parts()}
    np.testing.assert_array_equal(dequantize(of, own).numpy(), of.dequantize(parts))


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("name", ["fp8_block", "mxfp4", "int, 4 bits, order", "q5_k"])
def test_experts_on_slots(name: str, strided: bool) -> None:
    of = expert_form(name, 256, 256)
    slots, experts = slots_of(of, 3, strided=strided)
    hidden = torch.from_numpy(RNG.standard_normal((5, 256), dtype=np.float32))
    pairs = torch.tensor([3, 8, 0, 5, 9, 1, 2, 4, 6, 7])
    groups = [(0, 2, 512, 256, False), (2, 5, 0, 256, False), (7, 7, 256, 256, False)]
    of_cpu = 1e-5 if name == "fp8_block" else OF_INTEGERS
    for kernel, worst in ((TorchFormKernel(slots, of, gate), 1e-5), (CpuFormKernel(slots, of, "silu"), of_cpu)):
        y = torch.full((10, 256), 7.0)
        kernel.run(hidden, pairs, groups, 2, y)
        for start, stop, first, _, _ in groups:
            for pair in pairs[start:stop].tolist():
                wanted = reference(hidden[pair // 2 : pair // 2 + 1].numpy(), of.dequantize(experts[first // 256]))[0]
                np.testing.assert_allclose(y[pair], wanted, rtol=0, atol=worst * np.abs(wanted).max())
        assert (y[pairs[5:]] == 7).all()
        weights = torch.rand(5, 2)
        wanted = (y.view(5, 2, 256) * weights[:, :, None]).sum(1)
        torch.testing.assert_close(kernel.combine(y, weights), wanted)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gpt_oss(interleaved: bool) -> None:
    of = fused_form("mxfp4", 64, 96, interleaved=interleaved, bias="BF16")
    slots, experts = slots_of(of, 2)
    hidden = torch.from_numpy(RNG.standard_normal((3, 64), dtype=np.float32))
    call = hidden, torch.arange(3), [(0, 3, 96, 96, False)], 1
    ys = [torch.zeros(3, 64) for _ in range(2)]
    TorchFormKernel(slots, of, gpt_oss_gate).run(*call, ys[0])
    CpuFormKernel(slots, of, "gpt_oss").run(*call, ys[1])
    wanted = reference(hidden.numpy(), of.dequantize(experts[1]), "gpt_oss")
    for y, worst in zip(ys, (1e-5, OF_INTEGERS), strict=True):
        np.testing.assert_allclose(y, wanted, rtol=0, atol=worst * np.abs(wanted).max())


def test_gpt_oss_gate_is_that_of_transformers() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    both = torch.from_numpy(RNG.standard_normal((3, 64), dtype=np.float32)) * 8
    holder = type("Experts", (), {"alpha": 1.702, "limit": 7.0})()
    torch.testing.assert_close(GptOssExperts._apply_gate(holder, both), gpt_oss_gate(both))


def test_bfloat16_rows() -> None:
    """Weights and rows of the reference are rounded to the rows' type; the CPU's products stay float32."""
    of = expert_form("fp8_block", 256, 128)
    slots, experts = slots_of(of, 1)
    hidden = torch.from_numpy(RNG.standard_normal((2, 256), dtype=np.float32)).bfloat16()
    wanted = reference(hidden.float().numpy(), of.dequantize(experts[0]))
    for kernel, worst in ((TorchFormKernel(slots, of, gate), 0.03), (CpuFormKernel(slots, of, "silu"), 0.004)):
        y = torch.zeros((2, 256), dtype=torch.bfloat16)
        kernel.run(hidden, torch.arange(2), [(0, 2, 0, 128, False)], 1, y)
        np.testing.assert_allclose(y.float(), wanted, rtol=0, atol=worst * np.abs(wanted).max())


def test_what_is_refused() -> None:
    of = expert_form("mxfp4", 64, 96)
    slots, _ = slots_of(of, 2)
    with pytest.raises(FormError, match="6 parts, not 5"):
        CpuFormKernel(slots[:-1], of, "silu")
    with pytest.raises(FormError, match=r"gate.weight is torch.uint8 \(2, 100\)"):
        TorchFormKernel([slots[0][:, :100], *slots[1:]], of, gate)
    with pytest.raises(ValueError, match="no activation"):
        CpuFormKernel(slots, of, "swish")
    hidden, pairs, y = torch.zeros(2, 64), torch.arange(2), torch.zeros(2, 64)
    for kernel in (TorchFormKernel(slots, of, gate), CpuFormKernel(slots, of, "silu")):
        for group, says in (
            ((0, 1, 0, 48, False), "whole experts"), ((0, 1, 48, 96, False), "whole experts"),
            ((0, 1, 0, 96, True), "whole experts"), ((0, 3, 0, 96, False), "2 pairs"),
            ((0, 1, 192, 96, False), "2 slots"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=says):
                kernel.run(hidden, pairs, [group], 1, y)
        with pytest.raises(ValueError, match="hidden is"):
            kernel.run(hidden, pairs, [], 2, y)
        with pytest.raises(ValueError, match="y must be"):
            kernel.run(hidden, pairs, [], 1, y[:1])
