"""Experts by grouped_mm, against the exact result; and several kernels as one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_cases import assert_near, exact, gate_for, groups_of, pool_of, rows_for
from numpy.typing import NDArray

from tiermoe.kernels import expert_ffn
from tiermoe.kernels.expert_ffn import DECODE_ROWS, ByRows, Group, GroupedMmKernel, Operands, TorchKernel


class HostTables:
    """Tables on the CPU."""

    def put(self, table: NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(table)


class Recording:
    """Notes the groups that it is handed."""

    def __init__(self) -> None:
        self.groups: list[Group] = []

    def run(self, hidden: torch.Tensor, pairs: torch.Tensor, groups: list[Group], top_k: int, y: torch.Tensor) -> None:
        self.groups += groups

    def combine(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return y


def kernel_of(pool: Operands, reference: TorchKernel | Recording) -> GroupedMmKernel:
    return GroupedMmKernel(pool, gate_for("silu"), reference, HostTables())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("most_slots", [1, 3, 1023])
def test_agrees_with_the_exact_result(dtype: torch.dtype, most_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots in any order, with others between them, in one product or in several."""
    monkeypatch.setattr(expert_ffn, "MAX_SLOTS", most_slots)
    pool = pool_of(7, 24, 16, dtype)
    sizes = [1, 5, 20]
    hidden, pairs = rows_for([*sizes, 2], 2, 16, dtype)
    groups = groups_of(sizes, [6, 0, 3], 24)
    found = torch.full((len(pairs), 16), float("nan"), dtype=dtype)
    kernel_of(pool, Recording()).run(hidden, pairs, [*groups, (1, 1, 0, 24, False)], 2, found)
    assert_near(found, exact(pool, "silu", hidden, pairs, groups, 2))


def test_segments_and_other_dtypes_go_to_the_reference() -> None:
    pool, reference = pool_of(2, 8, 8), Recording()
    kernel = kernel_of(pool, reference)
    segments: list[Group] = [(0, 1, 3, 5, False), (0, 1, 8, 8, True), (0, 1, 4, 8, False)]
    y = torch.zeros(1, 8)
    kernel.run(torch.ones(1, 8), torch.arange(1), segments, 1, y)
    assert reference.groups == segments
    assert (y == 0).all()
    kernel.run(torch.ones(1, 8).double(), torch.arange(1), groups_of([1], [0], 8), 1, y.double())
    assert len(reference.groups) == 4


def test_each_expert_by_the_kernel_of_its_own_rows() -> None:
    few, many = Recording(), Recording()
    kernel = ByRows({"decode": few, "short": many, "prefill": many}, few)
    groups = groups_of([1, DECODE_ROWS + 1, 300, DECODE_ROWS], [0, 1, 2, 3], 4)
    kernel.run(torch.zeros(1, 1), torch.arange(1), groups, 1, torch.zeros(1, 1))
    assert few.groups == [groups[0], groups[3]]
    assert many.groups == [groups[1], groups[2]]
    assert kernel.combine(torch.ones(1, 1), torch.ones(1, 1)).tolist() == [[1.0]]
