"""The inverse of `kernels.pack.pack_expert`: what packed replicas hold, as plain matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiermoe.kernels.pack import INPUTS, OUTPUTS, PackedShape, Quantized, code_vectors


def unpack_expert(arrays: Mapping[str, NDArray[Any]], shape: PackedShape) -> tuple[Quantized, Quantized, Quantized]:
    """Gate, up and down of one packed expert.

    Raises:
        PackError: the arrays are not those of `shape`, or a scale is not finite.
    """
    shape.check(arrays)
    hidden, neurons = shape.hidden, shape.intermediate

    def matrix(codes: NDArray[np.uint8], affine: NDArray[np.float16], outputs: int, inputs: int) -> Quantized:
        rows = affine.transpose(2, 0, 3, 1).reshape(2, -1, affine.shape[1])[:, :outputs]  # [2, O, G]
        unpacked = _unfields(codes, shape.bits)[:outputs, :inputs]
        return Quantized(
            np.ascontiguousarray(unpacked), np.ascontiguousarray(rows[0]), np.ascontiguousarray(rows[1]),
            shape.bits, shape.group,
        )  # fmt: skip

    gate, up = (
        matrix(_tiles(arrays["gate_up"][:, :, m]), _tiles(arrays["gate_up_scales"][:, :, m]), neurons, hidden)
        for m in range(2)
    )
    codes = arrays["down"].transpose(1, 0, 2, 3)
    columns = codes.shape[0]
    down = matrix(
        codes.reshape(columns, -1, codes.shape[-1]), arrays["down_scales"].transpose(1, 0, 2, 3), hidden, neurons
    )
    return gate, up, down


def _unfields(packed: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Inverse of `_fields`, padding included: [R, U, 64 b] -> [16 R, 32 U]."""
    rows, units, _ = packed.shape
    v = np.stack(code_vectors(packed, bits), axis=2)
    v = v.reshape(rows, units, INPUTS // 4, OUTPUTS, 4).transpose(0, 3, 1, 2, 4)
    return v.reshape(rows * OUTPUTS, units * INPUTS)


def _tiles(blocks: NDArray[Any]) -> NDArray[Any]:
    """Inverse of `_blocks`, padding included."""
    apart = np.moveaxis(blocks, 2, 1)
    return apart.reshape(-1, *apart.shape[2:])
