"""Random cases of the kernels and their exact results: experts in slots, packed experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from form_cases import random_expert
from numpy.typing import NDArray
from torch import nn

from tiermoe.kernels.expert_ffn import Group, Operands
from tiermoe.kernels.forms import ExpertForm
from tiermoe.kernels.pack import PackedShape, Quantized, pack_expert, tiles

ACTIVATIONS = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu": nn.functional.relu,
}
# of the largest value of a result, where sums are in float32 and results rounded
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class Forbidden:
    """In place of a kernel that must not be called."""

    def run(self, *args: object) -> None:
        raise AssertionError("the reference was called")

    combine = run


def gate_for(activation: str):
    """Maps interleaved pre-activations [n, 2I] to activations [n, I]."""

    def gate(x: torch.Tensor) -> torch.Tensor:
        pairs = x.view(x.shape[0], -1, 2)
        return ACTIVATIONS[activation](pairs[..., 0]) * pairs[..., 1]

    return gate


def gpt_oss_gate(both: torch.Tensor) -> torch.Tensor:
    """As in transformers' GptOssExperts."""
    g, u = both[..., ::2].clamp(max=7), both[..., 1::2].clamp(-7, 7)
    return (u + 1) * g * torch.sigmoid(1.702 * g)


def slots_of(
    of: ExpertForm, count: int, *, strided: bool = False, seed: int = 0
) -> tuple[list[torch.Tensor], list[dict]]:
    """Slots of random experts, and their parts; `strided`: parts side by side in one run of bytes per slot."""
    rng = np.random.default_rng(seed)
    experts = [random_expert(of, rng) for _ in range(count)]
    raw = [torch.from_numpy(np.stack([e[name].reshape(-1).view(np.uint8) for e in experts])) for name in of.parts()]
    if strided:
        ends = np.cumsum([0, *(-(-part.shape[1] // 64) * 64 for part in raw)]).tolist()
        whole = torch.zeros((count, ends[-1]), dtype=torch.uint8)
        views = [whole[:, first : first + part.shape[1]] for first, part in zip(ends, raw, strict=False)]
        for view, part in zip(views, raw, strict=True):
            view.copy_(part)
        raw = views
    return raw, experts


def pool_of(
    slots: int, neurons: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0,
    device: torch.device | str = "cpu", biased: bool = False,
) -> Operands:  # fmt: skip
    """A pool of random experts, whose results are of about the size of their inputs."""
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(slots, neurons, 2, width, generator=generator) * (1.5 / width**0.5)
    down = torch.randn(slots, neurons, width, generator=generator) * (1.5 / neurons**0.5)
    biases = [torch.randn(shape, generator=generator) for shape in ((slots, neurons, 2), (slots, width)) if biased]
    both = [bias.to(device, dtype) for bias in biases] or [None, None]
    return Operands(gate_up.to(device, dtype), down.to(device, dtype), *both)


def groups_of(sizes: list[int], slots: list[int], neurons: int) -> list[Group]:
    """Whole experts, their rows one after another."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        (start, start + size, slot * neurons, neurons, False)
        for start, size, slot in zip(starts, sizes, slots, strict=True)
    ]


def rows_for(
    sizes: list[int], top_k: int, width: int, dtype: torch.dtype, seed: int = 0, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [T, H] and shuffled pairs [T * top_k] for experts of these many rows; some pairs may be over."""
    generator = torch.Generator().manual_seed(seed)
    tokens = -(-sum(sizes) // top_k)
    hidden = torch.randn(tokens, width, generator=generator)
    return hidden.to(device, dtype), torch.randperm(tokens * top_k, generator=generator).to(device)


def exact(
    pool: Operands, activation: str, hidden: torch.Tensor, pairs: torch.Tensor, groups: list[Group], top_k: int
) -> torch.Tensor:
    """The result in float64 [T * top_k, H] on the CPU; NaN where no group writes."""
    slots, neurons, _, width = pool.gate_up.shape
    biases = [
        torch.zeros(shape, dtype=torch.float64) if bias is None else bias.double().cpu().view(shape)
        for bias, shape in ((pool.gate_up_bias, (slots * neurons * 2,)), (pool.down_bias, (slots, width)))
    ]
    gate_up, down = (t.flatten(0, 1).double().cpu() for t in (pool.gate_up, pool.down))
    hidden, pairs = hidden.double().cpu(), pairs.cpu()
    y = torch.full((len(pairs), hidden.shape[1]), float("nan"), dtype=torch.float64)
    gate = gpt_oss_gate if activation == "gpt_oss" else gate_for(activation)
    for start, stop, first, count, add in groups:
        rows = pairs[start:stop]
        up = hidden[rows // top_k] @ gate_up[first : first + count].flatten(0, 1).t()
        up += biases[0][2 * first : 2 * (first + count)]
        out = gate(up) @ down[first : first + count] + biases[1][first // neurons]
        y[rows] = y[rows] + out if add else out
    return y


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within what rounding explains of the exact result, and NaN where that is."""
    limit = TOLERANCE[found.dtype] * float(expected.nan_to_num().abs().max())
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=limit, equal_nan=True)


Expert = tuple[Quantized, Quantized, Quantized]
Array = NDArray[np.float64]
TINY = 1e-30  # a group whose values are all below counts as zero (kTiny in neuron_body.hpp)
_erf = np.vectorize(math.erf, otypes=[np.float64])

FLOAT64_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": lambda v: v / (1.0 + np.exp(-np.clip(v, -700.0, 700.0))),
    "gelu": lambda v: 0.5 * v * (1.0 + _erf(v / math.sqrt(2.0))),
    "gelu_tanh": lambda v: 0.5 * v * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (v + 0.044715 * v**3))),
    "relu": lambda v: np.maximum(v, 0.0),
}
SLOPES = {"silu": 1.1, "gelu": 1.13, "gelu_tanh": 1.13, "relu": 1.0}  # upper bounds of |derivative|


def expert_ffn(gate: Array, up: Array, down: Array, x: Array, activation: str) -> Array:
    """y = down(act(gate x) * up x): gate, up [I, H], down [H, I], x [T, H] -> [T, H]."""
    hidden: Array = FLOAT64_ACTIVATIONS[activation](x @ gate.T) * (x @ up.T)
    return hidden @ down.T


def fake_quantized(x: Array, group: int) -> Array:
    """x as the kernels see it: int8 per group of the last axis, the largest absolute value of the group 127."""
    out = np.zeros_like(x)
    for start in range(0, x.shape[-1], group):
        part = x[..., start : start + group].astype(np.float32)
        largest = np.abs(part).max(axis=-1, keepdims=True)
        safe = np.where(largest < TINY, np.float32(1), largest)
        codes = np.rint(part * (np.float32(127) / safe))
        out[..., start : start + group] = np.where(largest < TINY, 0.0, codes * (safe.astype(np.float64) / 127.0))
    return out


def packed_expert_ffn(gate: Quantized, up: Quantized, down: Quantized, x: Array, activation: str) -> Array:
    """`expert_ffn` on the dequantized weights with quantized activations: what the kernels compute but for rounding."""
    g, u, d = (m.dequantized().astype(np.float64) for m in (gate, up, down))
    seen = fake_quantized(x, gate.group)
    hidden: Array = FLOAT64_ACTIVATIONS[activation](seen @ g.T) * (seen @ u.T)
    return fake_quantized(hidden, down.group) @ d.T


def activation_bound(gate: Quantized, up: Quantized, down: Quantized, x: Array, activation: str) -> Array:
    """Upper bound of |kernel - expert_ffn on dequantized weights| per output, float64 [T, H], from eight-bit steps.

    A group's inputs are off by at most half a step s = max|x| / 127 each, so a dot product by at most s/2 * sum|w|
    over the group. With e_g and e_u the bounds of gate and up, the neuron's product is off by at most
    e_h = L e_g (|u| + e_u) + |act(g)| e_u (L bounds the activation's slope), it is itself rounded with the step of the
    computed products, and down carries both on: sum |w| (e_h + step / 2). A percent is left for rounding in float32.
    """
    g, u, d = (m.dequantized().astype(np.float64) for m in (gate, up, down))
    e_x = _half_steps(x, gate.group)
    gates, ups = x @ g.T, x @ u.T
    e_g, e_u = e_x @ np.abs(g).T, e_x @ np.abs(u).T
    acted = FLOAT64_ACTIVATIONS[activation](gates)
    e_h = SLOPES[activation] * e_g * (np.abs(ups) + e_u) + np.abs(acted) * e_u
    products = np.abs(acted * ups) + e_h
    bound: Array = (e_h + _half_steps(products, down.group)) @ np.abs(d).T
    slack = 1e-4 * (products @ np.abs(d).T) + 1e-6
    return 1.01 * bound + slack


def _half_steps(x: Array, group: int) -> Array:
    """Half of the quantization step of each value's group, in the shape of x."""
    out = np.zeros_like(x)
    for start in range(0, x.shape[-1], group):
        part = np.abs(x[..., start : start + group])
        out[..., start : start + group] = part.max(axis=-1, keepdims=True) / 254.0
    return out


def matrix(outputs: int, inputs: int, bits: int, group: int, rng: np.random.Generator) -> Quantized:
    """Weights in about +-1 / sqrt(inputs)."""
    shape, unit = (outputs, tiles(inputs, group)), inputs**-0.5
    step = 2.0 * unit / ((1 << bits) - 1)
    return Quantized(
        rng.integers(0, 1 << bits, (outputs, inputs), dtype=np.uint8),
        (step * rng.uniform(0.5, 1.5, shape)).astype(np.float16),
        (-unit * rng.uniform(0.8, 1.2, shape)).astype(np.float16),
        bits,
        group,
    )


def experts_of(count: int, shape: PackedShape, rng: np.random.Generator) -> list[Expert]:
    h, i, b, g = shape.hidden, shape.intermediate, shape.bits, shape.group
    return [(matrix(i, h, b, g, rng), matrix(i, h, b, g, rng), matrix(h, i, b, g, rng)) for _ in range(count)]


def stacked(experts: list[Expert]) -> dict[str, NDArray[Any]]:
    packed = [pack_expert(*e) for e in experts]
    return {name: np.stack([p[name] for p in packed]) for name in packed[0]}
