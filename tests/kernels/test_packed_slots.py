"""Packed experts on slots: torch, the CPU's kernel and Triton against float64 on dequantized weights."""

from __future__ import annotations

from collections.abc import Callable

import kernel_cases as reference
import numpy as np
import pytest
import torch
from kernel_cases import Expert, experts_of, stacked

from tiermoe.kernels.pack import BITS, PackedShape, PackError
from tiermoe.kernels.packed_ffn import ACTIVATIONS
from tiermoe.kernels.packed_slots import CpuPackedKernel, PackedKernel, TorchPackedKernel, try_out

Make = Callable[[tuple[torch.Tensor, ...], PackedShape, str, torch.dtype], PackedKernel]


def slots_of(shape: PackedShape, count: int, rng: np.random.Generator) -> tuple[list[Expert], tuple[torch.Tensor, ...]]:
    """Random experts and the slots that hold them; what fills tiles up is as `pack_expert` has it."""
    experts = experts_of(count, shape, rng)
    arrays = stacked(experts)
    return experts, tuple(torch.from_numpy(arrays[name]) for name in shape.tensors())


def expected(experts: list[Expert], x: np.ndarray, pairs: np.ndarray, groups: list, top_k: int, activation: str):
    """float64 [N, H]; rows of no group are NaN."""
    out = np.full((len(pairs), x.shape[1]), np.nan)
    for start, stop, slot in groups:
        gate, up, down = (m.dequantized().astype(np.float64) for m in experts[slot])
        rows = pairs[start:stop]
        out[rows] = reference.expert_ffn(gate, up, down, x[rows // top_k].astype(np.float64), activation)
    return out


def error_of(make: Make, shape: PackedShape, rows: list[int], activation: str, dtype: torch.dtype, seed: int) -> float:
    """Largest error relative to the largest value, with NaN where the kernel wrote what it should leave alone."""
    rng = np.random.default_rng(seed)
    experts, slots = slots_of(shape, 3, rng)
    top_k = 2
    tokens = -(-sum(rows) // top_k) + 1  # the last pairs are of no group
    pairs = rng.permutation(tokens * top_k)
    stops = np.cumsum(rows).tolist()
    groups = [(stop - n, stop, int(rng.integers(3))) for n, stop in zip(rows, stops, strict=True)]
    hidden = torch.from_numpy(rng.standard_normal((tokens, shape.hidden)).astype(np.float32)).to(dtype)
    y = torch.full((tokens * top_k, shape.hidden), float("nan"), dtype=dtype)
    make(slots, shape, activation, dtype).run(hidden, torch.from_numpy(pairs), groups, top_k, y)
    ideal = expected(experts, hidden.float().numpy(), pairs, groups, top_k, activation)
    assert np.array_equal(np.isnan(y.float().numpy()), np.isnan(ideal))
    return float(np.nanmax(np.abs(y.float().numpy() - ideal)) / np.nanmax(np.abs(ideal)))


SHAPES = {
    "even": PackedShape(64, 96, 4, 32),
    "tails": PackedShape(72, 40, 4, 64),  # H and I end within a tile, a block and a group
    "wide groups": PackedShape(160, 136, 4, 128),
}


def with_bits(shape: PackedShape, bits: int) -> PackedShape:
    return PackedShape(shape.hidden, shape.intermediate, bits, shape.group)


def torch_kernel(slots: tuple[torch.Tensor, ...], shape: PackedShape, activation: str, _: torch.dtype) -> PackedKernel:
    return TorchPackedKernel(slots, shape, activation)


def cpu_kernel(slots: tuple[torch.Tensor, ...], shape: PackedShape, activation: str, _: torch.dtype) -> PackedKernel:
    return CpuPackedKernel(slots, shape, activation)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", SHAPES)
def test_torch(name: str, bits: int) -> None:
    assert error_of(torch_kernel, with_bits(SHAPES[name], bits), [1, 5, 0, 3], "silu", torch.float32, 0) < 1e-5


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_cpu_rounds_activations_to_eight_bits(activation: str) -> None:
    for seed, shape in enumerate(SHAPES.values()):
        error = error_of(cpu_kernel, shape, [2, 1, 17], activation, torch.float32, seed)
        assert 1e-5 < error < 0.03
        assert error_of(cpu_kernel, shape, [2, 1], activation, torch.bfloat16, seed) < 0.05


@pytest.fixture(scope="module")
def triton_kernel() -> Make:
    """Interpreted where there is no GPU, see conftest.py; on a GPU tests/cuda has these."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("tests/cuda/test_packed_ffn.py runs the compiled kernel")
    from tiermoe.kernels.triton.forms import TritonPackedKernel

    return TritonPackedKernel


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", SHAPES)
def test_triton(triton_kernel: Make, name: str, bits: int) -> None:
    shape = with_bits(SHAPES[name], bits)
    assert error_of(triton_kernel, shape, [1, 16, 0, 3], "silu", torch.float32, bits) < 1e-5


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_triton_activations(triton_kernel: Make, activation: str) -> None:
    assert error_of(triton_kernel, SHAPES["tails"], [3], activation, torch.float32, 1) < 1e-5


def test_triton_in_halves(triton_kernel: Make) -> None:
    """Weights are rounded to the type of the rows, and so are the neurons' values."""
    assert error_of(triton_kernel, SHAPES["tails"], [4, 1], "silu", torch.float16, 2) < 4e-3
    assert error_of(triton_kernel, SHAPES["tails"], [4, 1], "silu", torch.bfloat16, 2) < 6e-2


def test_triton_prefill_rows(triton_kernel: Make) -> None:
    _, slots = slots_of(SHAPES["even"], 1, np.random.default_rng(6))
    try_out(triton_kernel(slots, SHAPES["even"], "silu", torch.float16), 64, torch.float16, torch.device("cpu"))
    assert error_of(triton_kernel, with_bits(SHAPES["even"], 3), [17, 70], "silu", torch.float32, 3) < 1e-5


def test_a_row_does_not_depend_on_its_neighbours(triton_kernel: Make) -> None:
    """Bit for bit, within the class of up to 16 rows.

    A row keeps its place: the interpreter multiplies with BLAS, whose sums may depend on it. tests/cuda moves rows.
    """
    shape, rng = SHAPES["tails"], np.random.default_rng(4)
    _, slots = slots_of(shape, 2, rng)
    hidden = torch.from_numpy(rng.standard_normal((16, shape.hidden)).astype(np.float32))
    pairs, kernel = torch.arange(16), triton_kernel(slots, shape, "silu", torch.float32)
    together, fewer = torch.empty_like(hidden), torch.empty_like(hidden)
    kernel.run(hidden, pairs, [(0, 16, 1)], 1, together)
    for rows in range(1, 17):
        kernel.run(hidden, pairs, [(0, rows, 1)], 1, fewer)
        assert torch.equal(together[:rows], fewer[:rows])


def test_refused() -> None:
    shape, rng = SHAPES["even"], np.random.default_rng(5)
    _, slots = slots_of(shape, 2, rng)
    with pytest.raises(PackError, match="packed slots"):
        TorchPackedKernel(slots, with_bits(shape, 3), "silu")
    with pytest.raises(PackError, match="4 tensors"):
        TorchPackedKernel(slots[:3], shape, "silu")
    with pytest.raises(ValueError, match="no activation"):
        TorchPackedKernel(slots, shape, "swish")
    hidden, pairs, y = torch.zeros(2, 64), torch.arange(4), torch.zeros(4, 64)
    for kernel in (TorchPackedKernel(slots, shape, "silu"), CpuPackedKernel(slots, shape, "silu")):
        for wrong in (
            (hidden, pairs, [(0, 5, 0)], 2, y), (hidden, pairs, [(0, 1, 2)], 2, y), (hidden, pairs.int(), [], 2, y),
            (hidden[:, :60], pairs, [], 2, y), (hidden, pairs, [], 2, y.half()), (hidden, pairs, [], 2, y[:3]),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=r"hidden is|pairs must|y must|group \("):
                kernel.run(*wrong)
