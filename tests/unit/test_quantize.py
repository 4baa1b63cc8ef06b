"""Quantizers: GPTQ against round-to-nearest, exact cases, odd Hessians; a layer's experts and their losses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermoe.cluster.jobs.prepare.capture import LayerInputs
from tiermoe.cluster.jobs.prepare.quantize import (
    MIN_ROWS,
    Matrices,
    widths_of,
)
from tiermoe.kernels.pack import PackError
from tiermoe.kernels.quantize import (
    QuantizedBatch,
    _factor,
    _sweep,
    _upper_product,
    damped,
    gptq,
    round_to_nearest,
)

torch.set_num_threads(1)


def correlated(batch: int, outputs: int, inputs: int, rows: int = 400) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [B, O, I] and the Hessian [B, I, I] of inputs that go together and differ in scale."""
    g = torch.Generator().manual_seed(inputs + rows)
    mix = torch.randn(batch, inputs, inputs, generator=g) / inputs**0.5 + torch.eye(inputs)
    x = torch.randn(batch, rows, inputs, generator=g) @ mix * torch.rand(batch, 1, inputs, generator=g).exp()
    return torch.randn(batch, outputs, inputs, generator=g) * 0.05, x.transpose(1, 2) @ x


def errors(weights: torch.Tensor, hessian: torch.Tensor, quantized: QuantizedBatch) -> torch.Tensor:
    """tr(R H R^T) of each matrix [B], relative to the same without any weights."""
    rest = weights - quantized.dequantized()
    return ((rest @ hessian) * rest).sum(dim=(1, 2)) / ((weights @ hessian) * weights).sum(dim=(1, 2))


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_gptq_beats_round_to_nearest(bits: int) -> None:
    weights, hessian = correlated(4, 48, 96)
    nearest = errors(weights, hessian, round_to_nearest(weights, bits, 32))
    fitted = errors(weights, hessian, gptq(weights, hessian, bits, 32))
    assert bool((fitted < 0.9 * nearest).all()), (fitted, nearest)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_weights_on_the_grid_come_back_exactly(bits: int, group: int) -> None:
    """A group whose codes touch both ends of the range; scales and offsets are powers of two."""
    g = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (2, 8, 200), generator=g)
    for start in range(0, 200, group):
        codes[..., start], codes[..., start + 1] = 0, (1 << bits) - 1
    weights = codes * 0.0625 - 0.25
    _, hessian = correlated(2, 8, 200)
    for quantized in (round_to_nearest(weights, bits, group), gptq(weights, hessian, bits, group)):
        assert torch.equal(quantized.dequantized(), weights)
        assert torch.equal(quantized.codes.long(), codes)
        assert quantized.scales.shape == (2, 8, -(-200 // group))


def test_singular_hessians() -> None:
    """Zero, rank one, an input that never occurs, and fewer rows than inputs."""
    weights, full = correlated(4, 24, 64)
    hessian = full.clone()
    hessian[0] = 0
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    hessian[1] = x.T @ x
    hessian[2, 7], hessian[2, :, 7] = 0, 0
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    hessian[3] = x.T @ x
    quantized = gptq(weights, hessian, 4, 64)
    rest = (weights - quantized.dequantized()).square().mean(dim=(1, 2)) / weights.square().mean(dim=(1, 2))
    assert bool((rest < 0.1).all()), rest
    nearest = round_to_nearest(weights, 4, 64)
    assert bool((errors(weights, hessian, quantized)[1:] < errors(weights, hessian, nearest)[1:]).all())


def test_a_hessian_that_is_not_one_is_refused() -> None:
    weights, hessian = correlated(1, 8, 32)
    with pytest.raises(ValueError, match="not finite"):
        gptq(weights, hessian * torch.nan, 4, 32)
    with pytest.raises(ValueError, match="positive semi-definite"):
        gptq(weights, hessian - 1e6 * (1 - torch.eye(32)), 4, 32)


def test_an_indefinite_hessian_is_damped_until_it_is_definite() -> None:
    weights, hessian = correlated(2, 8, 32)
    hessian[0] -= 0.05 * hessian[0].diagonal().mean() * torch.ones(32, 32)
    assert torch.isfinite(gptq(weights, hessian, 3, 32).dequantized()).all()


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from([1, 2, 3, 4, 8]),
    inputs=st.integers(1, 70),
    seed=st.integers(0, 2**16),
    scale=st.floats(1e-3, 50),
)
def test_codes_are_nearest_and_fit_no_worse_than_the_range(bits: int, inputs: int, seed: int, scale: float) -> None:
    weights = torch.randn(1, 3, inputs, generator=torch.Generator().manual_seed(seed)) * scale
    searched, most = round_to_nearest(weights, bits, 32), (1 << bits) - 1
    assert int(searched.codes.max()) <= most
    assert torch.isfinite(searched.scales).all()
    for start in range(0, inputs, 32):
        part = slice(start, min(start + 32, inputs))
        left = (weights - searched.dequantized())[..., part].square().sum(dim=2)
        low = weights[..., part].amin(dim=2, keepdim=True).half().float()
        scale = ((weights[..., part].amax(dim=2, keepdim=True) - low) / most).half().float()
        codes = ((weights[..., part] - low) / torch.where(scale == 0, torch.inf, scale)).round().clamp(0, most)
        right = (weights[..., part] - low - scale * codes).square().sum(dim=2)
        size = weights[..., part].square().sum(dim=2)  # the search compares sums of squares in float32
        assert bool((left <= right * (1 + 1e-4) + 1e-6 * size + 1e-12).all())


@pytest.mark.parametrize(("bits", "group"), [(5, 64), (0, 64), (4, 48)])
def test_unknown_widths_and_groups_are_refused(bits: int, group: int) -> None:
    with pytest.raises(PackError, match="choose one of"):
        round_to_nearest(torch.zeros(1, 4, 64), bits, group)
    with pytest.raises(PackError, match="choose one of"):
        gptq(torch.zeros(1, 4, 64), torch.eye(64).unsqueeze(0), bits, group)


def layer(seed: int = 0, experts: int = 4, hidden: int = 40, size: int = 24, tokens: int = 600) -> tuple:
    """Neuron-major weights of a layer and inputs of which expert 1 gets five and expert 3 none."""
    g = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(experts, size, 2, hidden, generator=g) * 0.3
    down = torch.randn(experts, size, hidden, generator=g) * 0.3
    mix = torch.randn(hidden, hidden, generator=g) / hidden**0.5 + torch.eye(hidden)
    rows = torch.randn(tokens, hidden, generator=g) @ mix
    ids = np.zeros((tokens, 1), dtype=np.int32)
    ids[::2] = 2
    ids[:5] = 1
    return gate_up, down, LayerInputs(rows.numpy(), ids, np.ones((tokens, 1), dtype=np.float32))


def test_experts_with_too_few_rows_fall_back() -> None:
    gate_up, down, inputs = layer()
    results = list(widths_of(gate_up, down, inputs, "silu", (2, 4), 32))
    assert [r.bits for r in results] == [2, 4]
    assert MIN_ROWS > 5
    for result in results:
        assert result.fallback.tolist() == [False, True, False, True]
        assert (result.losses < 0.9 * result.rtn_losses).tolist() == [True, False, True, False]
        assert (result.losses == result.rtn_losses).tolist() == [False, True, False, True]
        full = Matrices.of(gate_up, down)
        nearest = round_to_nearest(full.down, result.bits, 32)
        for expert in (1, 3):
            assert torch.equal(result.experts.down.codes[expert], nearest.codes[expert])
    assert bool((results[1].losses < results[0].losses).all())


def test_losses_are_of_whole_experts_on_their_rows() -> None:
    gate_up, down, inputs = layer()
    (result,) = widths_of(gate_up, down, inputs, "gelu", (3,), 64)
    lossy = result.experts.dequantized()
    for expert, rows in ((0, inputs.ids[:, 0] == 0), (1, inputs.ids[:, 0] == 1), (3, np.full(600, True))):
        x = torch.from_numpy(inputs.hidden[rows])
        x = x[:: max(1, len(x) // 256)]  # on which losses are measured

        def output(gate: torch.Tensor, up: torch.Tensor, tall: torch.Tensor, x: torch.Tensor = x) -> torch.Tensor:
            return (torch.nn.functional.gelu(x @ gate.T) * (x @ up.T)) @ tall.T

        exact = output(gate_up[expert, :, 0], gate_up[expert, :, 1], down[expert].T)
        off = output(lossy.gate_up[expert, :24], lossy.gate_up[expert, 24:], lossy.down[expert])
        assert result.losses[expert] == pytest.approx(float((exact - off).square().mean()), rel=1e-4)


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_the_sweep_is_the_papers_recursion(bits: int) -> None:
    """In double precision, input after input, with the scales that the sweep fitted; a tie may fall the other way."""
    weights, hessian = correlated(1, 21, 80)
    factor, pivots, hessian = _factor(damped(hessian, 0.03))
    swept = _sweep(weights, (factor, pivots), bits, 32)
    codes, scales, offsets = (t[0].double() for t in (swept.codes, swept.scales, swept.offsets))
    left, u = weights[0].double().T.clone(), torch.linalg.cholesky(torch.inverse(hessian[0].double()), upper=True)
    assert torch.allclose(1 / u.diagonal().square(), pivots[0].double(), rtol=1e-3)
    for i in range(80):
        scale, offset = scales[i // 32], offsets[i // 32]
        code = ((left[i] - offset) / scale).round().clamp(0, 2**bits - 1)
        assert int((code != codes[i]).sum()) <= 1
        error = (left[i] - scale * codes[i] - offset) / u[i, i]
        left[i + 1 :] -= u[i, i + 1 :].unsqueeze(1) * error
    index = torch.arange(80) // 32
    rest = weights[0].double().T - scales[index] * codes - offsets[index]
    slope = hessian[0].double() @ rest
    assert torch.allclose(_upper_product(factor, swept.errors)[0].double(), slope, atol=0.02 * float(slope.abs().max()))


def test_weights_that_are_not_finite_are_refused() -> None:
    weights = torch.zeros(1, 4, 32)
    weights[0, 1, 2] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        round_to_nearest(weights, 4, 32)
