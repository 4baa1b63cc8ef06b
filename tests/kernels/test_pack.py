"""The packed layout: exact inverse, exact size, and what a prefix of neurons is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import experts_of
from packed_reference import unpack_expert

from tiermoe.kernels.pack import BITS, GROUPS, PackedShape, Quantized, pack_expert


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 150), st.integers(1, 150), st.sampled_from(BITS), st.sampled_from(GROUPS), st.integers(0, 10_000))
def test_unpacking_is_the_exact_inverse(hidden: int, neurons: int, bits: int, group: int, seed: int) -> None:
    matrices = experts_of(1, PackedShape(hidden, neurons, bits, group), np.random.default_rng(seed))[0]
    arrays, shape = pack_expert(*matrices), PackedShape(hidden, neurons, bits, group)
    for before, after in zip(matrices, unpack_expert(arrays, shape), strict=True):
        np.testing.assert_array_equal(after.codes, before.codes)
        np.testing.assert_array_equal(after.scales, before.scales)
        np.testing.assert_array_equal(after.offsets, before.offsets)
    assert sum(a.nbytes for a in arrays.values()) == shape.nbytes()
    assert all(a.flags.c_contiguous for a in arrays.values())


@pytest.mark.parametrize("bits", BITS)
def test_no_bit_is_wasted(bits: int) -> None:
    """Three bits a weight are three bits, where no tile is filled up."""
    tensors = PackedShape(2048, 768, bits, 64).tensors()
    codes = sum(int(np.prod(tensors[name][1])) for name in ("gate_up", "down"))
    assert codes * 8 == bits * 3 * 2048 * 768


@pytest.mark.parametrize("bits", BITS)
def test_a_prefix_of_neurons_is_a_prefix_of_each_array(bits: int) -> None:
    group, keep = 64, 128
    gate, up, down = experts_of(1, PackedShape(70, 320, bits, group), np.random.default_rng(bits))[0]

    def rows(m: Quantized) -> Quantized:
        return Quantized(m.codes[:keep], m.scales[:keep], m.offsets[:keep], bits, group)

    columns = Quantized(
        down.codes[:, :keep], down.scales[:, : keep // group], down.offsets[:, : keep // group], bits, group
    )
    whole, part = pack_expert(gate, up, down), pack_expert(rows(gate), rows(up), columns)
    for name, array in part.items():
        np.testing.assert_array_equal(whole[name][: len(array)], array)


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (8, [0, 1, 2, 3, 4, 5, 6, 7]),
        (4, [0x10, 0x32, 0x54, 0x76]),
        (3, [0 | 1 << 3 | 2 << 6, 2 | 3 << 3 | 3 << 6, 4 | 5 << 3 | 1 << 6 | 1 << 7]),
        (2, [0b11100100, 0b11100100]),
        (1, [0b10101010]),
    ],
)
def test_the_bytes_of_a_tile(bits: int, expected: list[int]) -> None:
    """Vector k of a tile holds inputs 4 k to 4 k + 3: here they all have code k, as far as the width goes."""
    codes = np.repeat(np.arange(8, dtype=np.uint8) & ((1 << bits) - 1), 4)[None].repeat(32, axis=0)
    ones = np.ones((32, 1), dtype=np.float16)
    square = Quantized(codes, ones, ones, bits, 32)
    gate_up = pack_expert(square, square, square)["gate_up"].reshape(4, bits, 64)
    assert gate_up[0, :, 0].tolist() == expected
    assert (gate_up == gate_up[:1, :, :1]).all()


def test_dequantized_with_a_short_last_group() -> None:
    codes = np.array([[1] * 32 + [3]], dtype=np.uint8)
    scales, offsets = np.array([[0.5, 2.0]], dtype=np.float16), np.array([[1.0, -1.0]], dtype=np.float16)
    assert Quantized(codes, scales, offsets, 2, 32).dequantized().tolist() == [[1.5] * 32 + [5.0]]
