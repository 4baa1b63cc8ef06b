"""The packed and the full-precision neuron kernels against float64, on every instruction set here; what they refuse."""

from __future__ import annotations

import os
import threading

import kernel_cases as reference
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import experts_of, stacked
from numpy.typing import NDArray

from tiermoe.kernels.pack import BITS, GROUPS, PackedShape
from tiermoe.kernels.packed_ffn import ACTIVATIONS, FullLayer, PackedLayer, RowGroup, Threads, instruction_sets

POOLS = {(name, count): Threads(count, instruction_set=name) for name in instruction_sets() for count in (1, 2)}
BEST = POOLS[instruction_sets()[0], 1]


def run(layer: PackedLayer | FullLayer, groups: list[RowGroup], rows: NDArray, weights: NDArray, x: NDArray) -> NDArray:
    out = np.full_like(x, np.nan)
    layer.run(groups, rows, weights, x, out)
    return out


def one_row(layer: PackedLayer | FullLayer, expert: int, x: NDArray) -> NDArray:
    count = len(x)
    return run(layer, [(expert, 0, count)], np.arange(count, dtype=np.int32), np.ones(count, np.float32), x)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_agrees_within_the_bound_of_eight_bit_activations(data: st.DataObject) -> None:
    """Every width, group, activation, tail and instruction set; threads change no bit."""
    draw = data.draw
    shape = PackedShape(
        draw(st.integers(1, 200)), draw(st.integers(1, 200)), draw(st.sampled_from(BITS)), draw(st.sampled_from(GROUPS))
    )
    activation = draw(st.sampled_from(sorted(ACTIVATIONS)))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    experts = experts_of(2, shape, rng)
    sizes = draw(st.lists(st.integers(0, 11), min_size=1, max_size=3))
    stops = np.cumsum(sizes).tolist()
    groups = [(int(rng.integers(2)), stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
    tokens = draw(st.integers(1, 6))
    rows = rng.integers(0, tokens, stops[-1]).astype(np.int32)
    weights = rng.uniform(0, 1, stops[-1]).astype(np.float32)
    x = rng.standard_normal((tokens, shape.hidden)).astype(np.float32)

    ideal, seen, bound = (np.zeros(x.shape) for _ in range(3))
    for expert, start, stop in groups:
        matrices = experts[expert]
        for p in range(start, stop):
            row = x[rows[p]][None].astype(np.float64)
            exact = [m.dequantized().astype(np.float64) for m in matrices]
            ideal[rows[p]] += weights[p] * reference.expert_ffn(exact[0], exact[1], exact[2], row, activation)[0]
            seen[rows[p]] += weights[p] * reference.packed_expert_ffn(*matrices, row, activation)[0]
            bound[rows[p]] += weights[p] * reference.activation_bound(*matrices, row, activation)[0]

    arrays = stacked(experts)
    found = {
        pool: run(PackedLayer(arrays, shape, activation, threads), groups, rows, weights, x)
        for pool, threads in POOLS.items()
    }
    for name in instruction_sets():
        out = found[name, 1]
        np.testing.assert_array_equal(found[name, 2], out)
        assert (np.abs(out - ideal) <= bound + 1e-6).all()
        # An activation may round to the other side; but for that the reference sees the same integers.
        assert np.abs(out - seen).max() <= 0.02 * np.abs(seen).max() + 1e-5


def test_the_vector_instruction_sets_agree_bit_by_bit() -> None:
    vector = [name for name in instruction_sets() if name != "portable"]
    rng = np.random.default_rng(1)
    for bits in BITS:
        shape = PackedShape(130, 70, bits, 64)
        arrays = stacked(experts_of(1, shape, rng))
        x = rng.standard_normal((5, 130)).astype(np.float32)
        found = [one_row(PackedLayer(arrays, shape, "silu", POOLS[name, 1]), 0, x) for name in vector]
        for other in found[1:]:
            np.testing.assert_array_equal(other, found[0])


@pytest.mark.parametrize("name", instruction_sets())
@pytest.mark.parametrize("kind", ["packed", "full"])
def test_other_rows_and_experts_change_no_bit(kind: str, name: str) -> None:
    """Blocks of 1, 2 and 4 rows, more than 64 rows: each row comes out as it does alone."""
    rng = np.random.default_rng(2)
    shape = PackedShape(70, 150, 3, 32)
    layer: PackedLayer | FullLayer
    if kind == "packed":
        layer = PackedLayer(stacked(experts_of(3, shape, rng)), shape, "silu", POOLS[name, 2])
    else:
        gate_up = rng.standard_normal((3, 150, 2, 70), dtype=np.float32)
        layer = FullLayer(gate_up, gate_up[:, :, 0].copy(), "float32", "silu", POOLS[name, 2])
    x = rng.standard_normal((130, 70)).astype(np.float32)
    sizes = [1, 2, 3, 5, 119]
    stops = np.cumsum(sizes).tolist()
    groups = [(i % 3, stop - size, stop) for i, (size, stop) in enumerate(zip(sizes, stops, strict=True))]
    together = run(layer, groups, np.arange(130, dtype=np.int32), np.ones(130, np.float32), x)
    for expert, start, stop in groups:
        for row in {start, (start + stop) // 2, stop - 1}:
            np.testing.assert_array_equal(one_row(layer, expert, x[row : row + 1])[0], together[row])


ELEMENT = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def stored(values: NDArray, dtype: str) -> tuple[NDArray, NDArray]:
    """As the expert store has them, and as numbers."""
    if dtype == "bfloat16":
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    kept = values.astype(ELEMENT[dtype])
    return kept, kept.astype(np.float64)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 100), st.integers(1, 60), st.sampled_from(sorted(ELEMENT)), st.sampled_from(sorted(ACTIVATIONS)),
    st.integers(0, 10_000),
)  # fmt: skip
def test_full_precision_agrees_with_float64(hidden: int, neurons: int, dtype: str, activation: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    gate_up, gu = stored(rng.standard_normal((2, neurons, 2, hidden), dtype=np.float32) / hidden**0.5, dtype)
    down, d = stored(rng.standard_normal((2, neurons, hidden), dtype=np.float32) / neurons**0.5, dtype)
    x = rng.standard_normal((7, hidden)).astype(np.float32)
    expected = reference.expert_ffn(gu[1, :, 0], gu[1, :, 1], d[1].T, x.astype(np.float64), activation)
    # a sum's rounding is in proportion to its terms, not to what is left where they cancel
    sizes = np.abs(x).astype(np.float64)
    terms = ((sizes @ np.abs(gu[1, :, 0]).T) * (sizes @ np.abs(gu[1, :, 1]).T)) @ np.abs(d[1])
    scale = terms.max(axis=1, keepdims=True)
    for name in instruction_sets():
        out = one_row(FullLayer(gate_up, down, dtype, activation, POOLS[name, 1]), 1, x)
        assert (np.abs(out - expected) <= 1e-6 * scale).all()
        two = one_row(FullLayer(gate_up, down, dtype, activation, POOLS[name, 2]), 1, x)
        np.testing.assert_array_equal(two, out)


@pytest.mark.parametrize("name", instruction_sets())
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_comes_out_so_and_alone(bad: float, name: str) -> None:
    rng = np.random.default_rng(3)
    shape = PackedShape(48, 64, 4, 32)
    layer = PackedLayer(stacked(experts_of(1, shape, rng)), shape, "silu", POOLS[name, 1])
    x = rng.standard_normal((3, 48)).astype(np.float32)
    clean = one_row(layer, 0, x)
    x[1, 40] = bad
    out = one_row(layer, 0, x)
    assert np.isnan(out[1]).all()
    np.testing.assert_array_equal(out[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("name", instruction_sets())
@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-31, 1e25])
def test_tiny_and_huge_rows(scale: float, name: str) -> None:
    """Guards 127 / maximum, which is infinite for the smallest floats."""
    rng = np.random.default_rng(4)
    shape = PackedShape(48, 64, 4, 32)
    layer = PackedLayer(stacked(experts_of(1, shape, rng)), shape, "relu", POOLS[name, 1])
    x = np.float32(scale) * rng.standard_normal((1, 48)).astype(np.float32)
    out = one_row(layer, 0, x)
    if scale < 1.0:
        assert (np.abs(out) <= 1e-30).all()
    else:
        assert np.isfinite(x).all()
        assert not (out == 0).all()


def test_no_rows_no_groups() -> None:
    rng = np.random.default_rng(5)
    shape = PackedShape(48, 64, 4, 32)
    layer = PackedLayer(stacked(experts_of(1, shape, rng)), shape, "silu", BEST)
    none, weightless = np.zeros(0, np.int32), np.zeros(0, np.float32)
    assert run(layer, [], none, weightless, np.ones((0, 48), np.float32)).shape == (0, 48)
    assert (run(layer, [(0, 0, 0)], none, weightless, np.ones((2, 48), np.float32)) == 0).all()


def test_calls_from_several_threads_take_turns() -> None:
    rng = np.random.default_rng(6)
    shape = PackedShape(64, 96, 2, 32)
    layer = PackedLayer(stacked(experts_of(1, shape, rng)), shape, "silu", POOLS[instruction_sets()[0], 2])
    inputs = [rng.standard_normal((4, 64)).astype(np.float32) for _ in range(4)]
    expected = [one_row(layer, 0, x) for x in inputs]
    found: dict[int, bool] = {}

    def call(i: int) -> None:
        found[i] = all((one_row(layer, 0, inputs[i]) == expected[i]).all() for _ in range(50))

    callers = [threading.Thread(target=call, args=(i,), daemon=True) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=30)
    assert found == dict.fromkeys(range(4), True)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores cannot be named here")
def test_a_bound_pool_leaves_the_caller_where_it_was() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    rng = np.random.default_rng(7)
    shape = PackedShape(32, 32, 1, 32)
    layer = PackedLayer(stacked(experts_of(1, shape, rng)), shape, "silu", Threads(2, [core, core]))
    x = rng.standard_normal((1, 32)).astype(np.float32)
    np.testing.assert_array_equal(one_row(layer, 0, x), one_row(layer, 0, x))
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("count", "cores", "error"),
    [
        (0, [], ValueError), (2000, [], ValueError), (2, [0], ValueError), (1, [-1], ValueError),
        (1, [5000], ValueError), (1, [1023], OSError), (2, [0, 1023], OSError),
    ],
)  # fmt: skip
def test_threads_that_cannot_be_are_refused(count: int, cores: list[int], error: type[Exception]) -> None:
    if cores and 1023 in cores and hasattr(os, "sched_getaffinity") and 1023 in os.sched_getaffinity(0):
        pytest.skip("there is such a core here")
    with pytest.raises(error):
        Threads(count, cores)
    with pytest.raises(ValueError, match="has no sse9: choose one of"):
        Threads(1, instruction_set="sse9")


def valid() -> tuple[PackedLayer, dict[str, object]]:
    rng = np.random.default_rng(8)
    shape = PackedShape(48, 64, 4, 32)
    given: dict[str, object] = {
        "groups": [(0, 0, 2), (1, 2, 4)],
        "rows": np.array([0, 1, 2, 0], dtype=np.int32),
        "weights": np.ones(4, dtype=np.float32),
        "hidden": np.ones((3, 48), dtype=np.float32),
        "out": np.empty((3, 48), dtype=np.float32),
    }
    return PackedLayer(stacked(experts_of(2, shape, rng)), shape, "silu", BEST), given


READ_ONLY = np.empty((3, 48), dtype=np.float32)
READ_ONLY.flags.writeable = False
SHARED = np.ones((3, 48), dtype=np.float32)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"groups": [(2, 0, 1)]}, "no such expert: 2"),
        ({"groups": [(-1, 0, 1)]}, "no such expert: -1"),
        ({"groups": [(0, -1, 1)]}, "starts out of range: -1"),
        ({"groups": [(0, 3, 2)]}, "starts out of range: 3"),
        ({"groups": [(0, 0, 5)]}, "stops out of range: 5"),
        ({"rows": np.array([0, 1, 3, 0], dtype=np.int32)}, "no such row: 3"),
        ({"rows": np.array([0, 1, -1, 0], dtype=np.int32)}, "no such row: -1"),
        ({"rows": np.zeros(4, dtype=np.int64)}, "must be numpy.int32 with 1 axes"),
        ({"rows": np.zeros((2, 2), dtype=np.int32)}, "must be numpy.int32 with 1 axes"),
        ({"rows": np.zeros(8, dtype=np.int32)[::2]}, "contiguous"),
        ({"weights": np.ones(3, dtype=np.float32)}, "not as many as rows: 3"),
        ({"weights": np.ones(4)}, "must be numpy.float32 with 1 axes"),
        ({"hidden": np.ones((3, 47), dtype=np.float32)}, "another width: 47"),
        ({"hidden": np.ones((3, 48), dtype=np.float16)}, "must be numpy.float32 with 2 axes"),
        ({"hidden": np.ones((3, 96), dtype=np.float32)[:, ::2]}, "contiguous"),
        ({"hidden": np.ones((48, 3), dtype=np.float32).T}, "contiguous"),
        ({"out": np.empty((2, 48), dtype=np.float32)}, "not the shape of hidden"),
        ({"out": np.empty((3, 48))}, "must be numpy.float32 with 2 axes"),
        ({"out": READ_ONLY}, "(?i)read-only|writ"),
        ({"hidden": SHARED, "out": SHARED}, "overlaps"),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, object], error: str) -> None:
    layer, given = valid()
    layer.run(**given)  # type: ignore[arg-type]
    with pytest.raises((ValueError, BufferError), match=error):
        layer.run(**{**given, **wrong})  # type: ignore[arg-type]
