"""The published forms that tests try, and the exact result of an expert."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiermoe.benchmarks.random_forms import Parts as Parts
from tiermoe.benchmarks.random_forms import floats as floats
from tiermoe.benchmarks.random_forms import random_expert as random_expert
from tiermoe.benchmarks.random_forms import random_parts as random_parts
from tiermoe.kernels.forms import BLOCKS, Expert, ExpertForm, MatrixForm

# The error of an expert whose weights are integers, over its largest result: the CPU's kernels round the inputs of each
# product by at most 2^-15 of the largest of 32, and random weights with an offset (K-quants) make sums that cancel.
OF_INTEGERS = 1e-3

# every kind with every type of scale, at a small size that its blocks allow
FORMS: dict[str, dict[str, Any]] = {
    "float32": {}, "float16": {}, "bfloat16": {},
    "fp8_block": {"scale": "F32"}, "fp8_block, bfloat16": {"scale": "BF16"}, "fp8_block, e8m0": {"scale": "F8_E8M0"},
    "fp8_block, 64 x 32": {"block": 64, "group": 32}, "fp8_block, 3 x 24": {"block": 3, "group": 24},
    "fp8_channel": {"scale": "BF16"}, "fp8_tensor": {"scale": "F32"},
    "mxfp4": {}, "nvfp4": {}, "nvfp4, divides": {"divides": True},
    "int, 4 bits": {"bits": 4, "group": 32}, "int, 4 bits, zeros": {"bits": 4, "group": 64, "zeros": True},
    "int, 4 bits, rows": {"bits": 4, "scale": "BF16"}, "int, 4 bits, order": {"bits": 4, "group": 128, "order": True},
    "int, 4 bits, groups of 24": {"bits": 4, "group": 24, "zeros": True, "order": True},
    "int, 8 bits": {"bits": 8, "group": 128, "scale": "F32"},
    "int, 8 bits, zeros": {"bits": 8, "group": 32, "zeros": True, "order": True, "scale": "BF16"},
    **{kind: {} for kind in BLOCKS},
}  # fmt: skip


def form(name: str, outputs: int, inputs: int) -> MatrixForm:
    """A form of `FORMS`."""
    return MatrixForm(name.split(",")[0], outputs, inputs, **FORMS[name])


def expert_form(name: str, hidden: int, neurons: int) -> ExpertForm:
    """Gate, up and down in one form of `FORMS`."""
    of = form(name, neurons, hidden)
    return ExpertForm(down=_down(name, hidden, neurons), gate=of, up=of)


def fused_form(name: str, hidden: int, neurons: int, *, interleaved: bool, bias: str = "") -> ExpertForm:
    """Gate and up in one matrix."""
    gate_up = form(name, 2 * neurons, hidden)
    return ExpertForm(down=_down(name, hidden, neurons), gate_up=gate_up, interleaved=interleaved, bias=bias)


def _down(name: str, hidden: int, neurons: int) -> MatrixForm:
    """Its inputs are in the order of the neurons."""
    return replace(form(name, hidden, neurons), order=False)


def activated(gate: NDArray[np.float64], up: NDArray[np.float64], activation: str) -> NDArray[np.float64]:
    if activation == "silu":
        return gate / (1 + np.exp(-gate)) * up
    if activation == "relu":
        return np.maximum(gate, 0) * up
    if activation == "gelu":
        return 0.5 * gate * (1 + np.vectorize(math.erf)(gate / math.sqrt(2))) * up
    if activation == "gelu_tanh":
        return 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


def reference(x: NDArray[np.float32], expert: Expert, activation: str = "silu") -> NDArray[np.float64]:
    """FFN(x) in float64, from dequantized weights."""
    wide = x.astype(np.float64)
    gate, up = wide @ expert.gate.T.astype(np.float64), wide @ expert.up.T.astype(np.float64)
    if expert.gate_bias is not None:
        gate, up = gate + expert.gate_bias, up + expert.up_bias
    out = activated(gate, up, activation) @ expert.down.T.astype(np.float64)
    return out if expert.down_bias is None else out + expert.down_bias
