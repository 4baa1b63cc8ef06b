"""Experts in published forms on slots: the torch and C++ kernels, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from form_cases import FORMS, expert_form, form, fused_form, random_expert, random_parts, reference
from kernel_cases import compiled
from quick import quick

from tiermoe.errors import FormError
from tiermoe.kernels.form_slots import CpuFormKernel, TorchFormKernel, dequantize, slot_parts
from tiermoe.kernels.forms import ExpertForm

RNG = np.random.default_rng(0)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # of Triton's kernels, interpreted without a GPU


def gate(both: torch.Tensor) -> torch.Tensor:
    pairs = both.view(len(both), -1, 2)
    return torch.nn.functional.silu(pairs[..., 0]) * pairs[..., 1]


def gpt_oss_gate(both: torch.Tensor) -> torch.Tensor:
    """As in transformers' GptOssExperts."""
    g, u = both[..., ::2].clamp(max=7), both[..., 1::2].clamp(-7, 7)
    return (u + 1) * g * torch.sigmoid(1.702 * g)


def slots_of(of: ExpertForm, count: int, *, strided: bool = False) -> tuple[list[torch.Tensor], list[dict]]:
    """Slots of random experts, and their parts; `strided`: parts side by side in one run of bytes per slot."""
    experts = [random_expert(of, RNG) for _ in range(count)]
    raw = [torch.from_numpy(np.stack([e[name].reshape(-1).view(np.uint8) for e in experts])) for name in of.parts()]
    if strided:
        ends = np.cumsum([0, *(-(-part.shape[1] // 64) * 64 for part in raw)]).tolist()
        whole = torch.zeros((count, ends[-1]), dtype=torch.uint8)
        views = [whole[:, first : first + part.shape[1]] for first, part in zip(ends, raw, strict=False)]
        for view, part in zip(views, raw, strict=True):
            view.copy_(part)
        raw = views
    return raw, experts


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
    for kernel in (TorchFormKernel(slots, of, gate), CpuFormKernel(slots, of, "silu")):
        y = torch.full((10, 256), 7.0)
        kernel.run(hidden, pairs, groups, 2, y)
        for start, stop, first, _, _ in groups:
            for pair in pairs[start:stop].tolist():
                wanted = reference(hidden[pair // 2 : pair // 2 + 1].numpy(), of.dequantize(experts[first // 256]))[0]
                np.testing.assert_allclose(y[pair], wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
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
    for y in ys:
        np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


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


TRITON = [name for name in FORMS if name.startswith(("fp8", "mxfp4", "nvfp4", "int")) and name != "mxfp4_gguf"]


@pytest.mark.parametrize("name", TRITON)
def test_triton_decodes_every_weight_to_the_bit(name: str) -> None:
    """Rows with a single 1 read the columns of gate."""
    pytest.importorskip("triton")
    from tiermoe.kernels.triton.forms import TritonFormKernel

    of = ExpertForm(down=form("mxfp4", 288, 32), gate=form(name, 32, 288), up=form(name, 32, 288))
    slots, experts = slots_of(of, 2)
    kernel = TritonFormKernel([slot.to(DEVICE) for slot in slots], of, gate)
    found = kernel._product(1, "gate", torch.eye(288, device=DEVICE))
    np.testing.assert_array_equal(found.cpu().numpy(), of.dequantize(experts[1]).gate.T)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("name", ["fp8_block", "mxfp4", "nvfp4", "int, 4 bits, order"])
def test_triton_experts(name: str, strided: bool) -> None:
    """Against the torch reference, at few rows and at many; a row does not depend on the others of its class."""
    pytest.importorskip("triton")
    from tiermoe.kernels.triton.forms import TritonFormKernel

    of = fused_form(name, 256, 128, interleaved=strided, bias="F32" if strided else "")
    slots = [slot.to(DEVICE) for slot in slots_of(of, 2, strided=strided)[0]]
    hidden = torch.from_numpy(RNG.standard_normal((40, 256), dtype=np.float32)).to(DEVICE)
    pairs = torch.arange(40, device=DEVICE)
    neurons = of.intermediate
    groups = [(0, 3, neurons, neurons, False), (3, 40, 0, neurons, False)]
    ys = [torch.zeros_like(hidden) for _ in range(2)]
    for y, make in zip(ys, (TorchFormKernel, TritonFormKernel), strict=True):
        make(slots, of, gate).run(hidden, pairs, groups, 1, y)
    torch.testing.assert_close(ys[1], ys[0], rtol=1e-4, atol=1e-5 * float(ys[0].abs().max()))
    beside, hidden[:2] = torch.zeros_like(hidden), 0  # other neighbours; the place is kept, see test_packed_slots.py
    TritonFormKernel(slots, of, gate).run(hidden, pairs, groups[:1], 1, beside)
    assert torch.equal(beside[2], ys[1][2])
    with pytest.raises(FormError, match="no Triton kernel"):
        TritonFormKernel(slots, expert_form("q8_0", 256, 128), gate)


@pytest.mark.parametrize(
    ("dtype", "codes", "scale", "capability", "by"),
    quick(
        [("bf16", 1, 1, 80, "mma"), ("fp16", 2, 0, 90, "mma"), ("fp32", 0, 0, 90, "fma"), ("bf16", 1, 2, 90, "mma")],
        fast=[("bf16", 1, 1, 80, "mma")],
    ),
)
def test_triton_compiles(dtype: str, codes: int, scale: int, capability: int, by: str, tmp_path: Path) -> None:
    """For GPUs, which it takes none to compile for."""
    pytest.importorskip("triton")
    sizes = ("rows", "slot", "WIDTH", "DEPTH", "G", *(f"{name}_slot" for name in ("weight", "scale", "zero", "whole",
                                                                                  "order")))  # fmt: skip
    types = dict.fromkeys(sizes, "i32") | {"x": f"*{dtype}", "y": f"*{dtype}", "weight": "*u8", "zero": "*u8"}
    types |= {"whole": "*fp32", "order": "*i32", "scale": "*u8" if scale else "*fp16"}
    fixed = {"CODES": codes, "SCALE": scale, "GROUP": 32, "BLOCK": 1, "ZEROS": codes == 2, "ORDER": codes == 2,
             "DIVIDES": scale == 2, "ROWS": 16, "OUTPUTS": 32, "INPUTS": 64}  # fmt: skip
    assert compiled("forms", "_linear_kernel", types, fixed, capability, tmp_path)[0] == by
