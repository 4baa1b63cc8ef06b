"""Random weights in published forms."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiermoe.kernels.forms import BLOCKS, FLOATS, Expert, ExpertForm, MatrixForm

Parts = dict[str, NDArray[Any]]

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


def random_parts(form: MatrixForm, rng: np.random.Generator, size: float = 0.05) -> Parts:
    """Weights of about `size`; every code occurs."""
    parts: Parts = {}
    for name, (code, shape) in form.parts().items():
        if name == "order":
            parts[name] = rng.permutation(form.inputs).astype(np.int32)
        elif name == "zero":
            parts[name] = rng.integers(0, 1 << form.bits, shape, dtype=np.uint8)
        elif name == "global_scale":
            parts[name] = np.array([1 / 50.0 if not form.divides else 50.0], np.float32)
        elif name == "weight" and form.kind in FLOATS:
            parts[name] = floats(rng.standard_normal(shape) * size, code)
        elif name == "weight":
            parts[name] = rng.integers(0, 256, shape, dtype=np.uint8)
        elif code in ("U8", "F8_E8M0"):
            parts[name] = rng.integers(118, 124, shape, dtype=np.uint8)
        elif code == "F8_E4M3":
            parts[name] = rng.integers(40, 80, shape, dtype=np.uint8)
        else:
            parts[name] = floats(rng.uniform(0.2, 1, shape) * size / 8, code)
    if form.kind.startswith("fp8"):
        parts["weight"] = np.where(parts["weight"] & 127 == 127, 0, parts["weight"]).astype(np.uint8)  # no NaN
    if form.kind in BLOCKS:
        _, bytes_of_block, places = BLOCKS[form.kind]
        blocks = parts["weight"].reshape(-1, bytes_of_block)
        for at in places:
            scales = rng.uniform(0.2, 1, (len(blocks), 1)) * size / 64
            blocks[:, at : at + 2] = scales.astype(np.float16).view(np.uint8)
        if form.kind == "iq1_m":  # a float16 in the upper four bits of four words
            scales = (rng.uniform(0.2, 1, len(blocks)) * size / 64).astype(np.float16).view(np.uint16)
            for at in range(4):
                blocks[:, 49 + 2 * at] = blocks[:, 49 + 2 * at] & 15 | (scales >> 4 * at & 15) << 4
        elif not places:
            blocks[:, 0] = rng.integers(118, 124, len(blocks))
    return parts


def floats(values: NDArray[Any], code: str) -> NDArray[Any]:
    """Values as a part of this type."""
    if code == "BF16":
        return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16 if code == "F16" else np.float32)


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


def random_expert(form: ExpertForm, rng: np.random.Generator) -> Parts:
    parts = {
        f"{name}.{part}": array
        for name, matrix in form.matrices.items()
        for part, array in random_parts(matrix, rng).items()
    }
    for name, (code, shape) in form.parts().items():
        if name.endswith(".bias"):
            parts[name] = floats(rng.standard_normal(shape) * 0.1, code)
    return {name: parts[name] for name in form.parts()}


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
