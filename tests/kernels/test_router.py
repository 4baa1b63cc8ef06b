"""A router's scores on the host, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tiermoe.kernels import _cpu
from tiermoe.kernels.router import LinearRouter, windows


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
        _cpu.router_scores(row.ctypes.data, 1, row.ctypes.data, 8, 1, 0, 0, np.zeros(2, np.float32))


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_a_window_has_the_scores_of_its_layers(softmax: bool, biased: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    hidden, layers = torch.randn(3, 24, generator=generator), 4
    routers = [
        LinearRouter(torch.randn(7, 24, generator=generator), torch.randn(7, generator=generator) if biased else None)
        for _ in range(layers)
    ]
    for layer, window in enumerate(windows(routers, 2)[:-1]):
        later = routers[layer + 1 : layer + 3]
        assert window is not None
        assert window.layers == len(later)
        found, plain = window.on_host(hidden, softmax), window(hidden)
        assert found is not None
        for place, router in enumerate(later):
            mine = found if len(later) == 1 else found[:, place]
            np.testing.assert_array_equal(mine, router.on_host(hidden, softmax))
            expected = plain if len(later) == 1 else plain[:, place]
            np.testing.assert_allclose(expected.numpy(), router(hidden).numpy(), atol=2e-5)
    assert windows(routers, 2)[-1] is None
    assert windows([*routers, None], 2) == [None] * (layers + 1)
