"""A router's scores on the host, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tiermoe.kernels import _cpu
from tiermoe.kernels.router import LinearRouter


@pytest.mark.parametrize(("rows", "experts", "width"), [(1, 32, 256), (3, 7, 40), (8, 128, 33)])
@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_native_scores_are_torchs(rows: int, experts: int, width: int, softmax: bool, biased: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    hidden, weight = (torch.randn(n, width, generator=generator) for n in (rows, experts))
    router = LinearRouter(weight, torch.randn(experts, generator=generator) if biased else None)
    expected = router(hidden)
    found = router.on_host(hidden, softmax)
    assert found is not None
    np.testing.assert_allclose(found, (expected.softmax(-1) if softmax else expected).numpy(), atol=2e-5)


@pytest.mark.parametrize(
    ("hidden", "weight"),
    [
        (torch.zeros(65, 8), torch.zeros(4, 8)),
        (torch.zeros(1, 8, dtype=torch.bfloat16), torch.zeros(4, 8)),
        (torch.zeros(1, 8), torch.zeros(4, 8, dtype=torch.bfloat16)),
        (torch.zeros(8, 2).T, torch.zeros(4, 8)),
    ],
)
def test_what_is_not_for_the_native_call(hidden: torch.Tensor, weight: torch.Tensor) -> None:
    assert LinearRouter(weight, None).on_host(hidden, True) is None


def test_refuses_scores_of_another_size() -> None:
    row = np.zeros(8, np.float32)
    with pytest.raises(ValueError, match="size"):
        _cpu.router_scores(row.ctypes.data, 1, row.ctypes.data, 8, 1, 0, False, np.zeros(2, np.float32))
