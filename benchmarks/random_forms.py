"""Random weights in published forms: every number is finite, and of about the size of a model's weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiermoe.kernels.forms import BLOCKS, FLOATS, ExpertForm, MatrixForm

Parts = dict[str, NDArray[Any]]


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
            bits = (rng.uniform(0.2, 1, len(blocks)) * size / 64).astype(np.float16).view(np.uint16)
            for at in range(4):
                blocks[:, 49 + 2 * at] = blocks[:, 49 + 2 * at] & 15 | (bits >> 4 * at & 15) << 4
        elif not places:
            blocks[:, 0] = rng.integers(118, 124, len(blocks))
    return parts


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


def floats(values: NDArray[Any], code: str) -> NDArray[Any]:
    """Values as a part of this type."""
    if code == "BF16":
        return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16 if code == "F16" else np.float32)
