"""The compiled kernel of packed experts against torch on dequantized weights, in all widths and types."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tiermoe.kernels.pack import BITS, PackedShape
from tiermoe.kernels.packed_slots import TorchPackedKernel, packed_shapes

EVEN, REAL, TAILS, ODD = (256, 128, 64), (2048, 1408, 64), (200, 72, 128), (1000, 333, 32)
# Each width, size of groups and type once: a case is compiled in seconds, all that there are in minutes.
CASES = [
    *[(sizes, bits, torch.bfloat16) for sizes in (EVEN, REAL) for bits in BITS],
    *[(sizes, bits, torch.bfloat16) for sizes in (TAILS, ODD) for bits in (3, 8)],
    (REAL, 3, torch.float16), (TAILS, 4, torch.float16), (EVEN, 4, torch.float32), (ODD, 3, torch.float32),
]  # fmt: skip
BOUNDS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of the largest value


def _slots(shape: PackedShape, count: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Random codes in every byte, what fills up tiles included: nothing may read that into a result."""
    rng = np.random.default_rng(shape.bits)
    step = 2.0 * shape.hidden**-0.5 / ((1 << shape.bits) - 1)
    out = []
    for dtype, dims in packed_shapes(shape):
        if dtype == torch.uint8:
            array = rng.integers(0, 256, (count, *dims), dtype=np.uint8)
        else:  # scales before offsets on the last axis but one
            array = (step * rng.uniform(0.5, 1.5, (count, *dims))).astype(np.float16)
            array[..., 1, :] = -(shape.hidden**-0.5) * rng.uniform(0.8, 1.2, array[..., 1, :].shape)
        out.append(torch.from_numpy(array).to(device))
    return tuple(out)


@pytest.mark.parametrize(("sizes", "bits", "dtype"), CASES, ids=str)
def test_agrees_with_torch(sizes: tuple[int, int, int], bits: int, dtype: torch.dtype, gpu: torch.device) -> None:
    pytest.importorskip("triton")
    from tiermoe.kernels.triton.forms import TritonPackedKernel

    hidden_size, neurons, group = sizes
    shape = PackedShape(hidden_size, neurons, bits, group)
    slots = _slots(shape, 3, gpu)
    compiled, reference = TritonPackedKernel(slots, shape, "silu", dtype), TorchPackedKernel(slots, shape, "silu")
    generator = torch.Generator().manual_seed(bits)
    for rows in ([1], [2, 16, 0, 5], [17, 64, 130]):
        total, top_k = sum(rows), 2
        tokens = -(-total // top_k) + 1
        hidden = torch.randn((tokens, hidden_size), generator=generator).to(gpu, dtype)
        pairs = torch.randperm(tokens * top_k, generator=generator).to(gpu)
        stops = np.cumsum(rows).tolist()
        groups = [(stop - n, stop, i % 3) for i, (n, stop) in enumerate(zip(rows, stops, strict=True))]
        y = torch.full((tokens * top_k, hidden_size), float("nan"), device=gpu, dtype=dtype)
        compiled.run(hidden, pairs, groups, top_k, y)
        exact = torch.full((tokens * top_k, hidden_size), float("nan"), device=gpu, dtype=torch.float64)
        for start, stop, slot in groups:
            gate, up, down = (m.double() for m in reference.weights(slot))
            x = hidden[pairs[start:stop] // top_k].double()
            exact[pairs[start:stop]] = (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()
        assert torch.equal(y.isnan(), exact.isnan())
        error = (y.double() - exact).abs().nan_to_num().max() / exact.abs().nan_to_num().max()
        assert float(error) < BOUNDS[dtype]


def test_the_same_bits_alone_and_beside_others(gpu: torch.device) -> None:
    pytest.importorskip("triton")
    from tiermoe.kernels.triton.forms import TritonPackedKernel

    shape = PackedShape(512, 384, 3, 64)
    kernel = TritonPackedKernel(_slots(shape, 2, gpu), shape, "gelu_tanh", torch.bfloat16)
    hidden = torch.randn((16, 512), generator=torch.Generator().manual_seed(1)).to(gpu, torch.bfloat16)
    pairs = torch.arange(16, device=gpu)
    together, alone = torch.empty_like(hidden), torch.empty_like(hidden)
    kernel.run(hidden, pairs, [(0, 16, 1)], 1, together)
    kernel.run(hidden, pairs, [(i, i + 1, 1) for i in range(16)], 1, alone)
    assert torch.equal(together, alone)
