"""Quantized weights of an expert as the C++ kernel reads them: b bits a weight, neuron-major.

A tile has 16 outputs x 32 inputs. Four consecutive inputs of its outputs make one vector of 64 bytes
(byte 4 * output + input), the operand of one 4-way byte dot product per 32-bit lane. A tile has eight vectors, v0 to
v7, and stores them in b vectors of 64 bytes:

    8 bits   v0 .. v7 as they are
    4 bits   v0 | v1 << 4,  v2 | v3 << 4,  ..
    2 bits   v0 | v1 << 2 | v2 << 4 | v3 << 6,  v4 | ..
    1 bit    v0 | v1 << 1 | .. | v7 << 7
    3 bits   v0 | v1 << 3 | (v6 & 3) << 6,  v2 | v3 << 3 | (v7 & 3) << 6,
             v4 | v5 << 3 | (v6 >> 2) << 6 | (v7 >> 2) << 7

Each field is at most one shift and one `and` away. The whole layout: docs/store-format.md, "Packed replicas".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BITS = (1, 2, 3, 4, 8)
GROUPS = (32, 64, 128)
OUTPUTS, INPUTS = 16, 32  # of a tile
NEURONS = 32  # of a block of gate and up: two tiles of each, which share one read of the inputs
_VECTOR = 64  # bytes of four inputs of a tile's outputs

DTYPES: dict[str, type[np.generic]] = {"U8": np.uint8, "F16": np.float16}


class PackError(ValueError):
    """Quantized or packed arrays that do not fit together."""


def tiles(size: int, tile: int) -> int:
    """The number of tiles that cover `size`."""
    return -(-size // tile)


@dataclass(frozen=True)
class Quantized:
    """One matrix of O outputs and I inputs: w ~= scales * codes + offsets, per group of `group` consecutive inputs.

    Args:
        codes: uint8 [O, I], below 2**bits.
        scales: float16 [O, ceil(I / group)], finite.
        offsets: float16, the same shape, finite.
        bits: one of `BITS`.
        group: one of `GROUPS`; the last group of a row may be shorter.

    Raises:
        PackError: the arrays break one of these rules.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float16]
    offsets: NDArray[np.float16]
    bits: int
    group: int

    def __post_init__(self) -> None:
        check_width(self.bits, self.group)
        if self.codes.dtype != np.uint8 or self.codes.ndim != 2 or 0 in self.codes.shape:
            raise PackError(f"codes must be uint8 [outputs, inputs], not {self.codes.dtype} {self.codes.shape}")
        if int(self.codes.max()) >= 1 << self.bits:
            raise PackError(f"a code is {int(self.codes.max())}: {self.bits} bits hold values below {1 << self.bits}")
        expected = (self.codes.shape[0], tiles(self.codes.shape[1], self.group))
        for name, array in (("scales", self.scales), ("offsets", self.offsets)):
            if array.dtype != np.float16 or array.shape != expected:
                raise PackError(f"{name} must be float16 {expected}, not {array.dtype} {array.shape}")
            if not np.isfinite(array).all():
                raise PackError(f"{name} are not all finite")

    def dequantized(self) -> NDArray[np.float32]:
        """float32 [O, I]."""
        inputs = self.codes.shape[1]
        scales = np.repeat(self.scales.astype(np.float32), self.group, axis=1)[:, :inputs]
        offsets = np.repeat(self.offsets.astype(np.float32), self.group, axis=1)[:, :inputs]
        return scales * self.codes + offsets


@dataclass(frozen=True)
class PackedShape:
    """The shape of one packed expert.

    Args:
        hidden: H, inputs of gate and up, outputs of down.
        intermediate: I, neurons: outputs of gate and up, inputs of down.
        bits, group: as in `Quantized`, the same for the three matrices.

    Raises:
        PackError: a size below 1, an unknown width or group.
    """

    hidden: int
    intermediate: int
    bits: int
    group: int

    def __post_init__(self) -> None:
        check_width(self.bits, self.group)
        if self.hidden < 1 or self.intermediate < 1:
            raise PackError(f"an expert of hidden {self.hidden} and intermediate {self.intermediate} has no weights")

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Per expert: name -> (safetensors type, shape). A layer file stacks its experts in front: [E, ...].

        The first axis of `gate_up*` counts blocks of 32 neurons, that of `down*` groups of `group` neurons. Gate comes
        before up, the block's first half before its second, scales before offsets. Padding is zero.
        """
        vector = _VECTOR * self.bits
        blocks, columns = tiles(self.intermediate, NEURONS), tiles(self.hidden, OUTPUTS)
        groups, halves = tiles(self.intermediate, self.group), NEURONS // OUTPUTS
        return {
            "gate_up": ("U8", (blocks, tiles(self.hidden, INPUTS), 2, halves, vector)),
            "gate_up_scales": ("F16", (blocks, tiles(self.hidden, self.group), 2, halves, 2, OUTPUTS)),
            "down": ("U8", (groups, columns, self.group // INPUTS, vector)),
            "down_scales": ("F16", (groups, columns, 2, OUTPUTS)),
        }

    def nbytes(self) -> int:
        """Bytes of one packed expert, scales and padding included."""
        return sum(int(np.prod(shape)) * np.dtype(DTYPES[code]).itemsize for code, shape in self.tensors().values())

    def check(self, arrays: Mapping[str, NDArray[Any]], *, leading: int = 0) -> None:
        """Raise PackError unless `arrays` are exactly `tensors()`, after `leading` common axes."""
        expected = self.tensors()
        if set(arrays) != set(expected):
            raise PackError(f"a packed expert has the arrays {sorted(expected)}, not {sorted(arrays)}")
        front = next(iter(arrays.values())).shape[:leading]
        for name, (code, shape) in expected.items():
            array = arrays[name]
            if array.dtype != DTYPES[code] or array.shape != (*front, *shape):
                raise PackError(
                    f"{name} must be {np.dtype(DTYPES[code])} {(*front, *shape)}, not {array.dtype} {array.shape}"
                )


def pack_expert(gate: Quantized, up: Quantized, down: Quantized) -> dict[str, NDArray[Any]]:
    """Pack one expert, gate and up [I, H], down [H, I]; `tests/packed_reference.py` has the exact inverse.

    Returns:
        The arrays of `PackedShape.tensors()`, contiguous.

    Raises:
        PackError: shapes, widths or groups of the three differ.
    """
    neurons, hidden = gate.codes.shape
    if up.codes.shape != (neurons, hidden) or down.codes.shape != (hidden, neurons):
        raise PackError(
            f"gate {gate.codes.shape}, up {up.codes.shape} and down {down.codes.shape} are not [I, H], [I, H], [H, I]"
        )
    if len({(m.bits, m.group) for m in (gate, up, down)}) != 1:
        raise PackError("gate, up and down must have the same bits and group")
    bits, group = gate.bits, gate.group
    shape = PackedShape(hidden, neurons, bits, group)
    columns, groups = tiles(hidden, OUTPUTS), tiles(neurons, group)

    down_codes = _fields(down.codes, bits, groups * group)  # [columns, units, 64 b]
    down_codes = down_codes.reshape(columns, groups, group // INPUTS, -1).transpose(1, 0, 2, 3)
    arrays: dict[str, NDArray[Any]] = {
        "gate_up": np.stack([_blocks(_fields(m.codes, bits, hidden)) for m in (gate, up)], axis=2),
        "gate_up_scales": np.stack([_blocks(_affine(m)) for m in (gate, up)], axis=2),
        "down": down_codes,
        "down_scales": _affine(down).transpose(1, 0, 2, 3),
    }
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    shape.check(arrays)
    return arrays


def check_width(bits: int, group: int) -> None:
    """Raise PackError unless packed replicas may have this width and group."""
    if bits not in BITS:
        raise PackError(f"there is no width of {bits} bits: choose one of {BITS}")
    if group not in GROUPS:
        raise PackError(f"there is no group of {group} inputs: choose one of {GROUPS}")


def _fields(codes: NDArray[np.uint8], bits: int, inputs: int) -> NDArray[np.uint8]:
    """[O, I] -> [ceil(O / 16), ceil(inputs / 32), 64 b], zero-padded."""
    outputs = codes.shape[0]
    rows, units = tiles(outputs, OUTPUTS), tiles(inputs, INPUTS)
    padded = np.zeros((rows * OUTPUTS, units * INPUTS), dtype=np.uint8)
    padded[:outputs, : codes.shape[1]] = codes
    v = padded.reshape(rows, OUTPUTS, units, INPUTS // 4, 4).transpose(0, 2, 3, 1, 4)
    v = v.reshape(rows, units, INPUTS // 4, _VECTOR)
    if bits == 3:
        a = v[:, :, 0] | v[:, :, 1] << 3 | (v[:, :, 6] & 3) << 6
        b = v[:, :, 2] | v[:, :, 3] << 3 | (v[:, :, 7] & 3) << 6
        c = v[:, :, 4] | v[:, :, 5] << 3 | (v[:, :, 6] >> 2) << 6 | (v[:, :, 7] >> 2) << 7
        packed = np.stack([a, b, c], axis=2)
    else:
        per_byte = 8 // bits
        parts = v.reshape(rows, units, bits, per_byte, _VECTOR)
        packed = parts[:, :, :, 0].copy()
        for field in range(1, per_byte):
            packed |= parts[:, :, :, field] << (field * bits)
    return packed.reshape(rows, units, bits * _VECTOR)


def code_vectors(packed: Any, bits: int) -> list[Any]:
    """The vectors v0 to v7, each [R, U, 64], of uint8 [R, U, 64 b]: a NumPy array or a torch tensor."""
    p = packed.reshape(*packed.shape[:2], bits, _VECTOR)
    if bits == 3:
        a, b, c = p[:, :, 0], p[:, :, 1], p[:, :, 2]
        return [
            a & 7, a >> 3 & 7, b & 7, b >> 3 & 7, c & 7, c >> 3 & 7,
            a >> 6 | (c >> 6 & 1) << 2, b >> 6 | (c >> 7) << 2,
        ]  # fmt: skip
    mask = (1 << bits) - 1
    return [p[:, :, i] >> field * bits & mask for i in range(bits) for field in range(8 // bits)]


def _affine(matrix: Quantized) -> NDArray[np.float16]:
    """Scales and offsets by tile: [ceil(O / 16), G, 2, 16], zero-padded."""
    outputs, groups = matrix.scales.shape
    rows = tiles(outputs, OUTPUTS)
    padded = np.zeros((2, rows * OUTPUTS, groups), dtype=np.float16)
    padded[0, :outputs], padded[1, :outputs] = matrix.scales, matrix.offsets
    return np.ascontiguousarray(padded.reshape(2, rows, OUTPUTS, groups).transpose(1, 3, 0, 2))


def _blocks(rows: NDArray[Any]) -> NDArray[Any]:
    """[tiles, N, ...] -> [ceil(tiles / 2), N, 2, ...], zero-padded."""
    count, halves = len(rows), NEURONS // OUTPUTS
    padded = np.zeros((tiles(count, halves) * halves, *rows.shape[1:]), dtype=rows.dtype)
    padded[:count] = rows
    return np.moveaxis(padded.reshape(-1, halves, *rows.shape[1:]), 1, 2)
