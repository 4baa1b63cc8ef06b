"""Data-free quantization of a layer's experts into packed replicas, in C++ (`kernels/cpu/fit.hpp`).

NumPy without torch. `fit_layer` gives each group the scale and offset with the least squared error of its weights.
`expected_losses` says what that does to the experts' outputs, for inputs of unit variance. With vg = |gate_i|^2,
vu = |up_i|^2 and vd = |down_i|^2 of neuron i, eg, eu, ed the squared errors of the three, and independent errors,

    loss = 1/H sum_i  vd (D(vg) eg vu + S(vg) eu) + ed S(vg) vu      S(v) = E act(z)^2, D(v) = E act'(z)^2, z ~ N(0, v)

to first order: the neuron's own error through down, and down's error on the neuron.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import _cpu
from .pack import DTYPES, PackedShape
from .packed_ffn import ACTIVATIONS, ELEMENTS, Threads

_NODES = 24  # of the Gauss-Hermite rule
_STEP = 1e-3  # of the derivative's difference


@dataclass(frozen=True)
class FittedLayer:
    """E experts of one layer at one width.

    Attributes:
        arrays: of `PackedShape.tensors()`, [E, ...].
        errors: float32 [E, I, 3], squared error of each neuron's gate, up and down.
    """

    bits: int
    arrays: dict[str, NDArray[Any]]
    errors: NDArray[np.float32]


def fit_layer(
    gate_up: NDArray[Any], down: NDArray[Any], dtype: str, widths: Sequence[int], group: int, threads: Threads
) -> tuple[list[FittedLayer], NDArray[np.float32]]:
    """Quantize and pack a layer at some widths, in one pass.

    Args:
        gate_up: [E, I, 2, H], C-contiguous, as in the expert store; bfloat16 as its bits, uint16.
        down: [E, I, H], the same type.
        dtype: a key of `ELEMENTS`.

    Returns:
        Each width's experts, and float32 [E, I, 3], the sums of squares of each neuron's gate, up and down.

    Raises:
        PackError: unknown width or group.
        ValueError: shapes or types differ, or a weight is not finite, or its scale is beyond float16.
    """
    element, wanted = ELEMENTS[dtype]
    experts, neurons, _, hidden = gate_up.shape
    for array, shape in ((gate_up, (experts, neurons, 2, hidden)), (down, (experts, neurons, hidden))):
        if array.dtype != wanted or array.shape != shape or not array.flags.c_contiguous:
            raise ValueError(f"weights must be contiguous {np.dtype(wanted)} {shape}, not {array.dtype} {array.shape}")
    made = [
        FittedLayer(
            bits,
            {
                name: np.empty((experts, *dims), dtype=DTYPES[code])
                for name, (code, dims) in PackedShape(hidden, neurons, bits, group).tensors().items()
            },
            np.empty((experts, neurons, 3), dtype=np.float32),
        )
        for bits in widths
    ]
    powers = np.empty((experts, neurons, 3), dtype=np.float32)
    into = [
        (
            m.bits, m.arrays["gate_up"].ctypes.data, m.arrays["gate_up_scales"].ctypes.data,
            m.arrays["down"].ctypes.data, m.arrays["down_scales"].ctypes.data, m.errors.ctypes.data,
        )
        for m in made
    ]  # fmt: skip
    _cpu.fit(
        *threads.handle, hidden, neurons, experts, element, group, gate_up.ctypes.data, down.ctypes.data,
        powers.ctypes.data, into,
    )  # fmt: skip
    for m in made:
        if not all(np.isfinite(a).all() for a in (m.errors, m.arrays["gate_up_scales"], m.arrays["down_scales"])):
            raise ValueError("a weight is not finite, or too large for a scale in float16")
    return made, powers


def expected_losses(
    errors: NDArray[np.float32], powers: NDArray[np.float32], hidden: int, activation: str
) -> NDArray[np.float32]:
    """The loss of each expert, float32 [E]; see the module's docstring.

    Args:
        errors, powers: [E, I, 3], of `fit_layer`.
        activation: a key of `ACTIVATIONS`.
    """
    vg, vu, vd = np.moveaxis(powers.astype(np.float64), 2, 0)  # [E, I]
    eg, eu, ed = np.moveaxis(errors.astype(np.float64), 2, 0)
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NODES)
    act, share = _FUNCTIONS[activation], weights / weights.sum()
    value, slope = np.zeros_like(vg), np.zeros_like(vg)  # S, D
    for node, part in zip(nodes, share, strict=True):
        z = node * np.sqrt(vg)
        value += part * act(z) ** 2
        slope += part * ((act(z + _STEP) - act(z - _STEP)) / (2 * _STEP)) ** 2
    losses = (vd * (slope * eg * vu + value * eu) + ed * value * vu).sum(axis=1) / hidden
    return np.asarray(losses, dtype=np.float32)


def _sigmoid(z: NDArray[np.float64]) -> NDArray[np.float64]:
    return 0.5 * (1 + np.tanh(0.5 * z))


def _gelu_tanh(z: NDArray[np.float64]) -> NDArray[np.float64]:
    return 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))


# exact gelu differs from its tanh form by less than 1e-3, which an estimate does not see
_FUNCTIONS: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "silu": lambda z: z * _sigmoid(z),
    "gelu": _gelu_tanh,
    "gelu_tanh": _gelu_tanh,
    "relu": lambda z: np.maximum(z, 0),
}
assert _FUNCTIONS.keys() == ACTIVATIONS.keys()
