"""The C++ expert kernel against the torch reference, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Forbidden, gate_for, groups_of, pool_of

from tiermoe.kernels import _cpu
from tiermoe.kernels.expert_ffn import CPU_MAX_ROWS, CpuKernel, Group, Operands, TorchKernel
from tiermoe.kernels.packed_ffn import ACTIVATIONS


def kernels(pool: Operands, activation: str = "silu") -> tuple[CpuKernel, TorchKernel]:
    reference = TorchKernel(pool, gate_for(activation))
    return CpuKernel(pool, activation, Forbidden()), reference


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_agrees_with_the_reference(data: st.DataObject) -> None:
    draw = data.draw
    activation = draw(st.sampled_from(sorted(ACTIVATIONS)))
    slots, top_k = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    width, neurons = draw(st.integers(1, 70)), draw(st.integers(1, 37))
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    pool = pool_of(slots, neurons, width, seed=generator.initial_seed())
    groups = groups_of(sizes, [draw(st.integers(0, slots - 1)) for _ in sizes], neurons)

    tokens = -(-(sum(sizes) + draw(st.integers(0, 3))) // top_k)
    pairs = torch.randperm(tokens * top_k, generator=generator)  # the last ones may belong to no group
    hidden = torch.randn(tokens, 2 * width, generator=generator)
    layout = draw(st.sampled_from(["contiguous", "columns", "transposed", "expanded"]))
    if layout == "contiguous":
        hidden = hidden[:, :width].contiguous()
    elif layout == "columns":
        hidden = hidden[:, ::2]
    elif layout == "transposed":
        hidden = torch.randn(width, tokens, generator=generator).t()
    else:
        hidden = hidden[:1, :width].expand(tokens, width)

    reference = TorchKernel(pool, gate_for(activation))
    fast = CpuKernel(pool, activation, reference)
    expected = torch.full((tokens * top_k, width), float("nan"))
    found = expected.clone()
    reference.run(hidden, pairs, groups, top_k, expected)
    fast.run(hidden, pairs, groups, top_k, found)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    untouched = pairs[sum(sizes) :]
    assert found[untouched].isnan().all()


@pytest.mark.parametrize("rows", range(1, CPU_MAX_ROWS + 1))
@pytest.mark.parametrize("neurons", [1, 7, 8, 9, 131])
def test_every_block_size(rows: int, neurons: int) -> None:
    """All row and neuron remainders, with the C++ kernel alone."""
    generator = torch.Generator().manual_seed(rows)
    pool = pool_of(2, neurons, 33, seed=rows)
    fast, reference = kernels(pool)
    hidden, pairs = torch.randn(rows, 33, generator=generator), torch.arange(rows)
    expected, found = torch.empty(rows, 33), torch.empty(rows, 33)
    reference.run(hidden, pairs, [(0, rows, neurons, neurons, False)], 1, expected)
    fast.run(hidden, pairs, [(0, rows, neurons, neurons, False)], 1, found)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def broken(**fields: torch.Tensor | None) -> Operands:
    whole = {"gate_up": torch.zeros(2, 4, 2, 8), "down": torch.zeros(2, 4, 8)}
    return Operands(**{"gate_up_bias": None, "down_bias": None, **whole, **fields})


@pytest.mark.parametrize(
    ("pool", "activation"),
    [
        (broken(), "tanh"),
        (broken(), ""),
        (broken(gate_up=torch.zeros(2, 4, 1, 8)), "silu"),
        (broken(gate_up=torch.zeros(2, 4, 2, 8).bfloat16(), down=torch.zeros(2, 4, 8).bfloat16()), "silu"),
        (broken(down=torch.zeros(2, 4, 8).bfloat16()), "silu"),
        (broken(down=torch.zeros(2, 3, 8)), "silu"),
        (broken(down=torch.zeros(1, 4, 8)), "silu"),
        (broken(gate_up_bias=torch.zeros(2, 4, 2)), "silu"),
        (broken(down_bias=torch.zeros(2, 8)), "silu"),
        (broken(gate_up=torch.zeros(2, 4, 2, 16)[..., ::2]), "silu"),
        (broken(down=torch.zeros(2, 8, 4).transpose(1, 2)), "silu"),
        (broken(gate_up=torch.zeros(2, 4, 2, 8, device="meta")), "silu"),
    ],
)
def test_unsupported_operands_are_refused(pool: Operands, activation: str) -> None:
    assert not CpuKernel.supports(pool, activation)
    with pytest.raises(ValueError, match="does not support"):
        CpuKernel(pool, activation, Forbidden())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("groups", "top_k", "activation", "match"),
    [
        ([(-1, 1, 0, 1, False)], 2, 0, "starts out of range: -1"),
        ([(2, 1, 0, 1, False)], 2, 0, "starts out of range: 2"),
        ([(0, 5, 0, 1, False)], 2, 0, "stops out of range: 5"),
        ([(0, 1, 0, 1, False), (0, 1, -1, 1, True)], 2, 0, "no such neuron: -1"),
        ([(0, 1, 4, 0, False)], 2, 0, "no such neuron: 4"),
        ([(0, 1, 2, 2, False)], 2, 0, "more neurons than there are: 2"),
        ([(0, 1, 2, -1, False)], 2, 0, "more neurons than there are: -1"),
        ([(0, 1, 1, 2**63 - 1, False)], 2, 0, "more neurons than there are"),
        ([], 0, 0, "top_k does not divide the number of pairs: 0"),
        ([], 3, 0, "top_k does not divide the number of pairs: 3"),
        ([], 2, 4, "no such activation: 4"),
        ([], 2, -1, "no such activation: -1"),
    ],
)
def test_the_bindings_refuse_numbers_out_of_range(groups: list[Group], top_k: int, activation: int, match: str) -> None:
    """All addresses are null: whoever follows one crashes. Four pairs, three neurons."""
    pairs = torch.arange(4)
    with pytest.raises(ValueError, match=match):
        _cpu.expert_ffn(0, 0, 0, pairs.data_ptr(), 4, groups, top_k, 3, 1, activation, 0)


@pytest.mark.parametrize("pair", [-1, 4])
def test_the_bindings_refuse_pairs_out_of_range(pair: int) -> None:
    pairs = torch.tensor([0, 1, pair, 2])
    with pytest.raises(ValueError, match=f"no such pair: {pair}"):
        _cpu.expert_ffn(0, 0, 0, pairs.data_ptr(), 4, [(0, 3, 0, 1, False)], 2, 3, 1, 0, 0)
