"""Slot pools, groups and the exact result, for tests of kernels that run experts."""

from __future__ import annotations

import torch
from torch import nn

from tiermoe.kernels.expert_ffn import Group, Operands

ACTIVATIONS = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu": nn.functional.relu,
}
# of the largest value of a result, where sums are in float32 and results rounded
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class Forbidden:
    """In place of a kernel that must not be called."""

    def run(self, *args: object) -> None:
        raise AssertionError("the reference was called")

    combine = run


def gate_for(activation: str):
    """Maps interleaved pre-activations [n, 2I] to activations [n, I]."""

    def gate(x: torch.Tensor) -> torch.Tensor:
        pairs = x.view(x.shape[0], -1, 2)
        return ACTIVATIONS[activation](pairs[..., 0]) * pairs[..., 1]

    return gate


def pool_of(
    slots: int, neurons: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0,
    device: torch.device | str = "cpu",
) -> Operands:  # fmt: skip
    """A pool of random experts, whose results are of about the size of their inputs."""
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(slots, neurons, 2, width, generator=generator) * (1.5 / width**0.5)
    down = torch.randn(slots, neurons, width, generator=generator) * (1.5 / neurons**0.5)
    return Operands(gate_up.to(device, dtype), down.to(device, dtype), None, None)


def groups_of(sizes: list[int], slots: list[int], neurons: int) -> list[Group]:
    """Whole experts, their rows one after another."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        (start, start + size, slot * neurons, neurons, False)
        for start, size, slot in zip(starts, sizes, slots, strict=True)
    ]


def rows_for(
    sizes: list[int], top_k: int, width: int, dtype: torch.dtype, seed: int = 0, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [T, H] and shuffled pairs [T * top_k] for experts of these many rows; some pairs may be over."""
    generator = torch.Generator().manual_seed(seed)
    tokens = -(-sum(sizes) // top_k)
    hidden = torch.randn(tokens, width, generator=generator)
    return hidden.to(device, dtype), torch.randperm(tokens * top_k, generator=generator).to(device)


def exact(
    pool: Operands, activation: str, hidden: torch.Tensor, pairs: torch.Tensor, groups: list[Group], top_k: int
) -> torch.Tensor:
    """The result in float64 [T * top_k, H] on the CPU; NaN where no group writes."""
    gate_up, down = (t.flatten(0, 1).double().cpu() for t in (pool.gate_up, pool.down))
    hidden, pairs = hidden.double().cpu(), pairs.cpu()
    y = torch.full((len(pairs), hidden.shape[1]), float("nan"), dtype=torch.float64)
    for start, stop, first, neurons, add in groups:
        rows = pairs[start:stop]
        up = hidden[rows // top_k] @ gate_up[first : first + neurons].flatten(0, 1).t()
        out = gate_for(activation)(up) @ down[first : first + neurons]
        y[rows] = y[rows] + out if add else out
    return y


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within what rounding explains of the exact result, and NaN where that is."""
    limit = TOLERANCE[found.dtype] * float(expected.nan_to_num().abs().max())
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=limit, equal_nan=True)
