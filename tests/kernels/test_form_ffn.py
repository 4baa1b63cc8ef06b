"""Experts in published forms on the CPU: weights decoded exactly; the error of products, in each instruction set."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from form_cases import (
    FORMS,
    OF_INTEGERS,
    Parts,
    expert_form,
    form,
    fused_form,
    random_expert,
    random_parts,
    reference,
)
from numpy.typing import NDArray

from tiermoe.errors import FormError
from tiermoe.kernels.form_ffn import FORM_ACTIVATIONS, FormLayer, form_linear
from tiermoe.kernels.forms import BLOCKS, FLOATS, ExpertForm, MatrixForm
from tiermoe.kernels.packed_ffn import Threads, instruction_sets

SETS = instruction_sets()
RNG = np.random.default_rng(0)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("name", FORMS)
def test_every_weight_is_decoded_to_the_bit(name: str, instruction_set: str) -> None:
    """A row with a single 1 gives a column of the matrix, in the registers of few rows and in the buffer of many."""
    inputs = 512 if BLOCKS.get(name, (32,))[0] == 256 else 288
    of = form(name, 11, inputs)
    parts = random_parts(of, RNG)
    x = np.eye(inputs, dtype=np.float32)
    wanted = of.dequantize(parts).T
    threads = Threads(instruction_set=instruction_set)
    np.testing.assert_array_equal(form_linear(of, parts, x, threads), wanted)
    for row in range(0, inputs, 17):
        np.testing.assert_array_equal(form_linear(of, parts, x[row : row + 1], threads)[0], wanted[row])


@pytest.mark.parametrize("name", [kind for kind in BLOCKS if kind.startswith("iq")])
def test_every_entry_of_a_grid(name: str) -> None:
    """The largest grid has 2048 entries, of which 65536 are drawn; sizes and signs of few bits come with them."""
    of = form(name, 2048, 256)
    parts = random_parts(of, RNG)
    found = form_linear(of, parts, np.eye(256, dtype=np.float32), Threads())
    np.testing.assert_array_equal(found, of.dequantize(parts).T)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        *itertools.product(("float32", "bfloat16", "fp8_block", "fp8_tensor"), (1, 31, 33, 130)),
        *itertools.product(("int, 4 bits", "int, 4 bits, rows", "int, 8 bits, zeros"), (1, 77, 163)),
        ("int, 4 bits, groups of 24", 100), ("nvfp4", 48), ("nvfp4, divides", 16), ("mxfp4", 32), ("q8_0", 32),
    ],
)  # fmt: skip
def test_rows_that_units_do_not_fill(name: str, inputs: int, instruction_set: str) -> None:
    of = form(name, 5, inputs)
    parts = random_parts(of, RNG)
    found = form_linear(of, parts, np.eye(inputs, dtype=np.float32), Threads(instruction_set=instruction_set))
    np.testing.assert_array_equal(found, of.dequantize(parts).T)


# whose products are those of integers
INTEGERS = [name for name in FORMS if form(name, 1, 512).kind not in FLOATS and "fp8" not in name and "24" not in name]
ROWS = ["normal", "large ones among small", "of bfloat16", "tiny", "the largest round up", "zeros"]


def inputs_of(kind: str, inputs: int) -> NDArray[np.float32]:
    """Rows [9, inputs], which neither registers nor blocks of rows divide."""
    x = RNG.standard_normal((9, inputs), dtype=np.float32)
    if kind == "large ones among small":
        x[:, ::37] *= 1000
    elif kind == "of bfloat16":
        x = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    elif kind == "tiny":
        x *= np.float32(1e-36)
    elif kind == "the largest round up":
        x = np.sign(x) * np.float32(1.9999999)
    elif kind == "zeros":
        x[:, 64:] = 0
    return np.ascontiguousarray(x)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("name", INTEGERS)
def test_the_error_of_integers(name: str, kind: str) -> None:
    """At most 2^-15 of the largest of 32 inputs for each, and what sums in float32 add; the same bits in all sets.

    An order changes which inputs share a scale.
    """
    of = form(name, 37, 512)
    parts = random_parts(of, RNG)
    x, weights = inputs_of(kind, 512), of.dequantize(parts).astype(np.float64)
    found = [form_linear(of, parts, x, Threads(instruction_set=instruction_set)) for instruction_set in SETS]
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    order = parts.get("order", np.arange(512))
    blocks = np.abs(x[:, order]).reshape(9, -1, 32).max(axis=2).astype(np.float64)
    sizes = np.abs(weights[:, order]).reshape(37, -1, 32)
    inputs = 2.0**-15 * np.einsum("rb,ob->ro", np.maximum(blocks, 2.0**-111), sizes.sum(axis=2))
    sums = 2.0**-20 * np.einsum("rb,ob->ro", blocks, 32 * sizes.max(axis=2))  # with offsets, which cancel
    assert (np.abs(found[0] - x.astype(np.float64) @ weights.T) <= inputs + sums).all()


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_input_that_is_not_finite_is_seen(bad: float, instruction_set: str) -> None:
    of = form("q4_k", 5, 256)
    x = np.ones((1, 256), np.float32)
    x[0, 77] = bad
    assert np.isnan(form_linear(of, random_parts(of, RNG), x, Threads(instruction_set=instruction_set))).all()


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("name", ["fp8_block", "mxfp4", "nvfp4", "int, 4 bits, order", "int, 8 bits, zeros", "q6_k",
                                  "q2_k", "iq1_m", "iq3_s", "tq1_0"])  # fmt: skip
def test_experts_against_float64(name: str, instruction_set: str) -> None:
    of = expert_form(name, 512, 256)
    experts = [random_expert(of, RNG) for _ in range(3)]
    layer = FormLayer(experts, [of] * 3, "silu", Threads(2, instruction_set=instruction_set))
    x = RNG.standard_normal((80, 512), dtype=np.float32)
    rows = np.concatenate([np.arange(70), [3, 4, 5], [79]]).astype(np.int32)
    weights = RNG.random(len(rows)).astype(np.float32)
    groups = [(2, 0, 70), (0, 70, 73), (1, 73, 74)]
    out = np.full_like(x, np.nan)
    layer.run(groups, rows, weights, x, out)
    wanted = np.zeros(x.shape)
    for expert, start, stop in groups:
        whole = of.dequantize(experts[expert])
        wanted[rows[start:stop]] += weights[start:stop, None] * reference(x[rows[start:stop]], whole)
    worst = OF_INTEGERS if name in INTEGERS else 2e-6
    np.testing.assert_allclose(out, wanted, rtol=0, atol=worst * np.abs(wanted).max())


@pytest.mark.parametrize("activation", FORM_ACTIVATIONS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("bias", ["", "BF16", "F16", "F32"])
def test_fused_experts_and_activations(activation: str, interleaved: bool, bias: str) -> None:
    of = fused_form("mxfp4", 64, 96, interleaved=interleaved, bias=bias)
    parts = random_expert(of, RNG)
    parts["gate_up.scale"] += 4  # beyond the clamps of gpt-oss
    x = RNG.standard_normal((3, 64), dtype=np.float32)
    out = np.empty_like(x)
    layer = FormLayer([parts], [of], activation, Threads())
    layer.run([(0, 0, 3)], np.arange(3, dtype=np.int32), np.ones(3, np.float32), x, out)
    wanted = reference(x, of.dequantize(parts), activation)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=OF_INTEGERS * np.abs(wanted).max())


@pytest.mark.parametrize("instruction_set", SETS)
def test_results_do_not_depend_on_other_rows_experts_or_threads(instruction_set: str) -> None:
    """To the bit: alone, and among 150 rows of four experts of several forms."""
    forms = [expert_form(name, 256, 256) for name in ("mxfp4", "q5_k", "int, 4 bits, order", "fp8_block")]
    experts = [random_expert(of, RNG) for of in forms]
    x = RNG.standard_normal((150, 256), dtype=np.float32)
    rows = np.tile(np.arange(150, dtype=np.int32), 4)
    ones = np.ones(600, np.float32)
    one, two = (FormLayer(experts, forms, "silu", Threads(n, instruction_set=instruction_set)) for n in (1, 2))
    out, again, alone = (np.empty_like(x) for _ in range(3))
    for expert in range(4):
        one.run([(expert, 0, 150)], rows, ones, x, out)
        for row in (0, 77, 149):
            two.run([(expert, row, row + 1)], rows, ones, x, alone)
            np.testing.assert_array_equal(alone[row], out[row])
    groups = [(e, 150 * e, 150 * e + 150) for e in (2, 0, 3, 1)]
    one.run(groups, rows, ones, x, out)
    two.run(groups, rows, ones, x, again)
    np.testing.assert_array_equal(out, again)


def test_no_copy_of_what_is_given() -> None:
    """A later change of the arrays, as of slots, is seen; an order that is no permutation is refused in the call."""
    of = expert_form("int, 4 bits, order", 256, 128)
    parts = random_expert(of, RNG)
    layer = FormLayer([parts], [of], "silu", Threads())
    x = RNG.standard_normal((1, 256), dtype=np.float32)
    call = [(0, 0, 1)], np.zeros(1, np.int32), np.ones(1, np.float32), x
    first, second = np.empty_like(x), np.empty_like(x)
    layer.run(*call, first)
    other = random_expert(of, RNG)
    for name, array in parts.items():
        array[...] = other[name]
    layer.run(*call, second)
    wanted = reference(x, of.dequantize(other))
    np.testing.assert_allclose(second, wanted, rtol=0, atol=OF_INTEGERS * np.abs(wanted).max())
    assert not np.array_equal(first, second)
    for bad in (-1, 256, 2**31 - 1):
        parts["up.order"][5] = bad
        with pytest.raises(ValueError, match="order"):
            layer.run(*call, second)


def refused(parts: Parts, of: ExpertForm, says: str) -> None:
    with pytest.raises(FormError, match=says):
        FormLayer([parts], [of], "silu", Threads())


def test_what_is_refused() -> None:
    of = expert_form("mxfp4", 64, 96)
    parts = random_expert(of, RNG)
    refused({**parts, "up.scale": parts["up.scale"][:, :1]}, of, "up.scale")
    refused({**parts, "up.scale": np.asfortranarray(parts["up.scale"])}, of, "contiguous")
    refused({name: array for name, array in parts.items() if name != "up.scale"}, of, "parts")
    full = expert_form("float32", 64, 96)
    whole = random_expert(full, RNG)
    raw = np.empty(whole["down.weight"].nbytes + 1, np.uint8)[1:].view(np.float32).reshape(64, 96)
    refused({**whole, "down.weight": raw}, full, "aligned")
    with pytest.raises(FormError, match="one size"):
        FormLayer([parts, whole], [of, expert_form("float32", 64, 64)], "silu", Threads())
    with pytest.raises(FormError, match="give each expert"):
        FormLayer([], [], "silu", Threads())
    with pytest.raises(ValueError, match="no activation"):
        FormLayer([parts], [of], "swish", Threads())
    layer = FormLayer([parts], [of], "silu", Threads())
    x = np.zeros((2, 64), np.float32)
    rows, ones = np.zeros(2, np.int32), np.ones(2, np.float32)
    for groups, given in (([(1, 0, 1)], x), ([(0, 0, 3)], x), ([(0, -1, 1)], x), ([(0, 0, 1)], x[:, :32].copy())):
        with pytest.raises(ValueError, match=r"expert|group|width"):
            layer.run(groups, rows, ones, given, np.empty_like(given))
    with pytest.raises(ValueError, match="x and out"):
        form_linear(MatrixForm("mxfp4", 64, 96), of.of("down", parts), x, Threads())
