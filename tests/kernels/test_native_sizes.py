"""Native entry points refuse numbers whose products overflow, and read what they have checked, once."""

from __future__ import annotations

import numpy as np
import pytest
from hostile import CASES

from tiermoe.kernels import _cpu
from tiermoe.kernels.packed_ffn import FullLayer, Threads


@pytest.mark.parametrize("case", CASES)
def test_numbers_that_no_caller_has_are_refused(case: str) -> None:
    CASES[case](_cpu)


def test_rows_that_change_after_their_check_are_not_read_again() -> None:
    """Guards reads outside the rows of hidden: here the kernel itself writes where the row numbers are."""
    rng = np.random.default_rng(0)
    gate_up = rng.normal(size=(1, 8, 2, 16)).astype(np.float32)
    down = rng.normal(size=(1, 8, 16)).astype(np.float32)
    layer = FullLayer(gate_up, down, "float32", "silu", Threads(1))
    hidden, groups = rng.normal(size=(3, 16)).astype(np.float32), [(0, 0, 3)]
    rows, weights = np.array([2, 1, 0], np.int32), np.ones(3, np.float32)
    expected, out = np.empty_like(hidden), np.empty_like(hidden)
    layer.run(groups, rows, weights, hidden, expected)
    inside = out.reshape(-1)[:3].view(np.int32)
    inside[:] = rows
    layer.run(groups, inside, weights, hidden, out)
    np.testing.assert_array_equal(out, expected)
