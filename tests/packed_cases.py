"""Packed experts for tests: random ones, their results in float64, and how far 8-bit activations may take a kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiermoe.kernels.pack import PackedShape, Quantized, pack_expert, tiles

Expert = tuple[Quantized, Quantized, Quantized]
Array = NDArray[np.float64]
TINY = 1e-30  # a group whose values are all below counts as zero (kTiny in neuron_body.hpp)
_erf = np.vectorize(math.erf, otypes=[np.float64])

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": lambda v: v / (1.0 + np.exp(-np.clip(v, -700.0, 700.0))),
    "gelu": lambda v: 0.5 * v * (1.0 + _erf(v / math.sqrt(2.0))),
    "gelu_tanh": lambda v: 0.5 * v * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (v + 0.044715 * v**3))),
    "relu": lambda v: np.maximum(v, 0.0),
}
SLOPES = {"silu": 1.1, "gelu": 1.13, "gelu_tanh": 1.13, "relu": 1.0}  # upper bounds of |derivative|


def expert_ffn(gate: Array, up: Array, down: Array, x: Array, activation: str) -> Array:
    """y = down(act(gate x) * up x): gate, up [I, H], down [H, I], x [T, H] -> [T, H]."""
    hidden: Array = ACTIVATIONS[activation](x @ gate.T) * (x @ up.T)
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
    hidden: Array = ACTIVATIONS[activation](seen @ g.T) * (seen @ u.T)
    return fake_quantized(hidden, down.group) @ d.T


def activation_bound(
    gate: Quantized, up: Quantized, down: Quantized, x: Array, activation: str
) -> Array:
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
    acted = ACTIVATIONS[activation](gates)
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
