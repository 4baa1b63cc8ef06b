"""Data-free quantization in C++: against the same rule in torch, and the losses that it expects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from packed_reference import unpack_expert

from tiermoe.cluster.jobs.prepare.quantize import Matrices, expert_outputs, output_losses
from tiermoe.kernels.fit import FittedLayer, expected_losses, fit_layer
from tiermoe.kernels.pack import PackedShape
from tiermoe.kernels.packed_ffn import Threads, instruction_sets
from tiermoe.kernels.quantize import round_to_nearest

ELEMENTS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def weights(
    dtype: str, experts: int = 2, neurons: int = 40, hidden: int = 72, scale: float = 0.05
) -> tuple[NDArray[Any], NDArray[Any], Matrices]:
    """Heavy-tailed weights as a store has them, and as matrices; sizes that fill no tile, block or group."""
    made = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=made)
        return (scale * values * (1 + values.square())).to(ELEMENTS[dtype])

    gate_up, down = draw(experts, neurons, 2, hidden), draw(experts, neurons, hidden)
    arrays = [(t.view(torch.uint16) if dtype == "bfloat16" else t).numpy() for t in (gate_up, down)]
    return arrays[0], arrays[1], Matrices.of(gate_up, down)


def dequantized(fitted: FittedLayer, shape: PackedShape) -> list[NDArray[np.float32]]:
    """Gate and up [E, 2I, H], down [E, H, I]."""
    experts = len(fitted.arrays["down"])
    parts = [unpack_expert({n: a[e] for n, a in fitted.arrays.items()}, shape) for e in range(experts)]
    gate_up = [np.concatenate([gate.dequantized(), up.dequantized()]) for gate, up, _ in parts]
    return [np.stack(gate_up), np.stack([down.dequantized() for _, _, down in parts])]


@pytest.mark.parametrize("name", instruction_sets())
@pytest.mark.parametrize(("dtype", "group"), [("float32", 32), ("float16", 64), ("bfloat16", 128)])
def test_no_group_is_worse_than_the_rule_in_torch(name: str, dtype: str, group: int) -> None:
    gate_up, down, full = weights(dtype)
    fitted, powers = fit_layer(gate_up, down, dtype, (1, 2, 3, 4, 8), group, Threads(2, instruction_set=name))
    assert np.allclose(powers[..., 2], full.down.square().sum(1), rtol=1e-5)
    for each in fitted:
        made = dequantized(each, PackedShape(72, 40, each.bits, group))
        for matrices, own in zip((full.gate_up, full.down), made, strict=True):
            reference = round_to_nearest(matrices, each.bits, group)
            ours = (matrices - torch.from_numpy(own)).square().sum((0, 2))
            theirs = (matrices - reference.dequantized()).square().sum((0, 2))
            # roundings differ, so a turn of the search may end elsewhere
            assert ours.sum() <= theirs.sum() * 1.002, each.bits
            assert bool((ours <= theirs * 1.05 + 1e-9).all()), each.bits
        errors = (full.gate_up - torch.from_numpy(made[0])).square().sum(2).unflatten(1, (2, 40)).transpose(1, 2)
        assert np.allclose(each.errors[..., :2], errors, rtol=1e-3, atol=1e-7)
        errors = (full.down - torch.from_numpy(made[1])).square().sum(1)
        assert np.allclose(each.errors[..., 2], errors, rtol=1e-3, atol=1e-7)


def test_bytes_do_not_depend_on_threads_or_other_widths() -> None:
    gate_up, down, _ = weights("bfloat16")
    (alone,), _ = fit_layer(gate_up, down, "bfloat16", (3,), 64, Threads(1))
    among, _ = fit_layer(gate_up, down, "bfloat16", (1, 3, 8), 64, Threads(3))
    assert all(np.array_equal(alone.arrays[name], among[1].arrays[name]) for name in alone.arrays)


def test_constant_groups_zeros_and_padding() -> None:
    gate_up, down = np.full((1, 5, 2, 20), 0.25, np.float32), np.zeros((1, 5, 20), np.float32)
    for fitted in fit_layer(gate_up, down, "float32", (1, 2, 3, 4, 8), 32, Threads(1))[0]:
        made = dequantized(fitted, PackedShape(20, 5, fitted.bits, 32))
        assert (made[0] == 0.25).all()
        assert (made[1] == 0).all()
        assert not fitted.errors.any()
        assert not fitted.arrays["down_scales"].any()


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu"])
def test_expected_losses_are_those_of_inputs_of_unit_variance(activation: str) -> None:
    gate_up, down, full = weights("float32", experts=3, neurons=96, hidden=128, scale=0.02)
    x = torch.randn(8000, 128, generator=torch.Generator().manual_seed(1))
    rows = [x] * 3
    outputs = expert_outputs(full, rows, activation)
    for fitted in fit_layer(gate_up, down, "float32", (2, 3, 4, 8), 32, Threads(1))[0]:
        _, powers = fit_layer(gate_up, down, "float32", (4,), 32, Threads(1))
        made = dequantized(fitted, PackedShape(128, 96, fitted.bits, 32))
        lossy = Matrices(torch.from_numpy(made[0]), torch.from_numpy(made[1]))
        measured = output_losses(lossy, rows, outputs, activation)
        expected = expected_losses(fitted.errors, powers, 128, activation)
        assert expected == pytest.approx(measured, rel=0.25), fitted.bits
