"""What every kernel of experts on slots has to do: the one in C++, and the one in Triton, interpreted without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_cases import ACTIVATIONS, Forbidden, assert_near, exact, gate_for, groups_of, pool_of, rows_for

from tiermoe.kernels.expert_ffn import (
    CPU_MAX_ROWS,
    DECODE_ROWS,
    SHORT_ROWS,
    CpuKernel,
    ExpertKernel,
    Group,
    Operands,
    TorchKernel,
)

Make = Callable[[Operands, str], ExpertKernel]


def unwritten(pairs: torch.Tensor, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((len(pairs), width), float("nan"), dtype=dtype)


@pytest.fixture(params=["cpu", "triton"])
def make(request: pytest.FixtureRequest) -> Make:
    """A kernel for a pool and an activation. The C++ one runs few rows itself and leaves many to torch."""
    if request.param == "cpu":
        return lambda pool, activation: CpuKernel(pool, activation, TorchKernel(pool, gate_for(activation)))
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("tests/cuda runs these cases on the GPU")
    from tiermoe.kernels.triton.expert_ffn import TritonKernel

    return lambda pool, activation: TritonKernel(pool, activation, Forbidden())


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def dtype(request: pytest.FixtureRequest, make: Make) -> torch.dtype:
    """Of the slots and rows; the C++ kernel is for float32."""
    try:
        make(pool_of(1, 4, 8, request.param), "silu")
    except ValueError:
        pytest.skip("the kernel does not support this type")
    return request.param


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_every_class_of_rows_against_the_exact_result(make: Make, activation: str, dtype: torch.dtype) -> None:
    """Odd sizes: neither H nor I a multiple of a block; pairs that belong to no group stay as they are."""
    pool = pool_of(3, 37, 50, dtype)
    sizes = [1, 5, DECODE_ROWS + 1, SHORT_ROWS + 6]
    hidden, pairs = rows_for([*sizes, 3], 2, 50, dtype)
    groups = groups_of(sizes, [2, 0, 1, 2], 37)
    found = unwritten(pairs, 50, dtype)
    make(pool, activation).run(hidden, pairs, groups, 2, found)
    assert found[pairs[sum(sizes) :]].isnan().all()
    assert_near(found, exact(pool, activation, hidden, pairs, groups, 2))


def test_two_segments_give_the_whole_in_either_order_and_in_one_call_or_two(make: Make, dtype: torch.dtype) -> None:
    """FFN = FFN(top) + FFN(bottom), wherever in the pool they begin; to the last bit the same however they run."""
    pool = pool_of(2, 24, 40, dtype)
    sizes = [3, 20]
    hidden, pairs = rows_for(sizes, 1, 40, dtype)
    top: list[Group] = [(0, 3, 5, 11, False), (3, 23, 30, 7, False)]
    bottom: list[Group] = [(0, 3, 33, 13, False), (3, 23, 1, 17, False)]
    kernel = make(pool, "silu")

    def added(groups: list[Group]) -> list[Group]:
        return [(*group[:4], True) for group in groups]

    together, apart, turned = (unwritten(pairs, 40, dtype) for _ in range(3))
    kernel.run(hidden, pairs, [top[0], *added(bottom[:1]), top[1], *added(bottom[1:])], 1, together)
    for groups in (top, added(bottom)):
        kernel.run(hidden, pairs, groups, 1, apart)
    for groups in (bottom, added(top)):
        kernel.run(hidden, pairs, groups, 1, turned)
    assert_near(together, exact(pool, "silu", hidden, pairs, top + added(bottom), 1))
    assert torch.equal(together, apart)
    assert torch.equal(together, turned)


def test_the_other_groups_of_a_call_and_the_slot_change_no_bit(make: Make) -> None:
    """Guards the choice by mean rows: an expert's result hung on what else ran in the same call."""
    pool = pool_of(3, 24, 32)
    pool.gate_up[2], pool.down[2] = pool.gate_up[0], pool.down[0]
    for sizes in ([SHORT_ROWS + 4, 1, DECODE_ROWS], [CPU_MAX_ROWS + 4, 1, CPU_MAX_ROWS]):
        hidden, pairs = rows_for(sizes, 1, 32, torch.float32)
        kernel = make(pool, "silu")
        together, apart = (unwritten(pairs, 32) for _ in range(2))
        kernel.run(hidden, pairs, groups_of(sizes, [0, 0, 1], 24), 1, together)
        for group in groups_of(sizes, [2, 2, 1], 24):
            kernel.run(hidden, pairs, [group], 1, apart)
        assert torch.equal(together, apart)


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_extremes_are_what_torch_gives(make: Make, activation: str) -> None:
    """Guards relu, which turned NaN into zero and so hid a broken layer; and padding, where zero times infinity must
    not get in."""
    pool = Operands(torch.ones(1, 1, 2, 1), torch.ones(1, 1, 1), None, None)
    hidden = torch.tensor([0.0, -0.0, 1e-30, -1e4, 1e4, float("inf"), float("nan")]).unsqueeze(1)
    pairs, groups = torch.arange(7), [(0, 7, 0, 1, False)]
    expected, found = torch.empty(7, 1), torch.empty(7, 1)
    TorchKernel(pool, gate_for(activation)).run(hidden, pairs, groups, 1, expected)
    make(pool, activation).run(hidden, pairs, groups, 1, found)
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_no_groups_empty_groups_and_no_neurons(make: Make) -> None:
    kernel = make(pool_of(1, 4, 8), "silu")
    y = torch.full((2, 8), 7.0)
    for groups in ([], [(1, 1, 0, 2, False)], [(0, 1, 0, 0, True)]):
        kernel.run(torch.zeros(2, 8), torch.arange(2), groups, 1, y)
    assert (y == 7.0).all()


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden": torch.zeros(2, 7)},
        {"hidden": torch.zeros(1, 8)},
        {"hidden": torch.zeros(16)},
        {"hidden": torch.zeros(2, 1, 8)},
        {"pairs": torch.arange(4, dtype=torch.int32)},
        {"pairs": torch.arange(8)[::2]},
        {"pairs": torch.arange(6)},
        {"y": torch.zeros(3, 8)},
        {"y": torch.zeros(4, 9)},
        {"y": torch.zeros(8, 4).t()},
        {"groups": [(0, 5, 0, 4, False)]},
        {"groups": [(-1, 1, 0, 4, False)]},
        {"groups": [(0, 1, 8, 1, False)]},
        {"groups": [(0, 1, 5, 4, False)]},
        {"groups": [(0, 1, -1, 4, False)]},
    ],
)
def test_what_lies_outside_is_refused(make: Make, wrong: dict[str, object]) -> None:
    """Guards raw addresses: a hidden state of another width was read past its end, without a word."""
    kernel = make(pool_of(2, 4, 8), "silu")
    given: dict[str, object] = {"hidden": torch.zeros(2, 8), "pairs": torch.arange(4), "groups": [(0, 4, 4, 4, False)]}
    given |= {"top_k": 2, "y": torch.zeros(4, 8)}
    kernel.run(**given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"hidden is|pairs must|y must|out of range|more .*neurons|no such neuron"):
        kernel.run(**{**given, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("top_k", [1, 3])
def test_combine(make: Make, top_k: int, dtype: torch.dtype, weights: torch.dtype, strided: bool) -> None:
    """Strided is what a norm after the experts may hand over."""
    pool, generator = pool_of(1, 4, 1030, dtype), torch.Generator().manual_seed(0)
    kernel = make(pool, "silu")
    y = torch.randn(4 * top_k, 1030, generator=generator).to(dtype)
    shares = torch.rand(4, top_k, generator=generator).to(weights)
    expected = (y.double().view(4, top_k, 1030) * shares.double().unsqueeze(-1)).sum(dim=1)
    given = (y.t().contiguous().t(), shares.t().contiguous().t()) if strided else (y, shares)
    found = kernel.combine(*given)
    assert found.dtype == dtype
    assert_near(found, expected)
    assert kernel.combine(y[:0], shares[:0]).shape == (0, 1030)


def test_combine_refuses_wrong_shapes(make: Make) -> None:
    for y in (torch.zeros(3, 8), torch.zeros(4, 9), torch.zeros(32)):
        with pytest.raises(ValueError, match="y is"):
            make(pool_of(2, 4, 8), "silu").combine(y, torch.ones(2, 2))
