"""Launch handles: what a compiled kernel is given, and when it is compiled anew. Interpreted kernels have none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernel_cases import Forbidden, groups_of, pool_of, rows_for

from tiermoe.kernels.triton import launch
from tiermoe.kernels.triton.expert_ffn import TritonKernel
from tiermoe.kernels.triton.launch import Launch


class Parameter:
    def __init__(self, do_not_specialize: bool) -> None:
        self.do_not_specialize = do_not_specialize


class Jit:
    """As `triton.JITFunction`: a launch compiles and returns the compiled kernel, which can be launched as it is."""

    def __init__(self, arg_names: list[str], loose: set[str]) -> None:
        self.arg_names = arg_names
        self.params = [Parameter(name in loose) for name in arg_names]
        self.bound: list[tuple[Any, ...]] = []
        self.direct: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **fixed: (self.bound.append((grid, args, fixed)), Compiled(self))[1]


class Compiled:
    def __init__(self, jit: Jit) -> None:
        self.jit = jit

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args: self.jit.direct.append((grid, args))


def test_a_kernel_is_bound_once_for_what_triton_specialises() -> None:
    jit = Jit(["x", "first", "size", "BLOCK", "EVEN"], {"first"})
    launch = Launch(jit, BLOCK=32, EVEN=True, num_warps=4)
    x, odd = torch.zeros(8), torch.zeros(9)[1:]
    launch((1, 1, 1), x, 3, 16)
    assert jit.bound == [((1, 1, 1), (x, 3, 16), {"BLOCK": 32, "EVEN": True, "num_warps": 4})]
    launch((2, 1, 1), x, 4, 16)  # an integer that is not specialised, another grid
    assert jit.direct == [((2, 1, 1), (x, 4, 16, 32, True))]  # all parameters in order, constants too, no options
    for args in ((odd, 4, 16), (x, 4, 17), (x.double(), 4, 16)):
        launch((1, 1, 1), *args)
    assert (len(jit.bound), len(jit.direct), len(launch.handles)) == (4, 1, 4)
    for args in ((odd, 1, 16), (x, 2, 17), (x.double(), 3, 16)):
        launch((1, 1, 1), *args)
    assert (len(jit.bound), len(jit.direct)) == (4, 4)


def test_constants_come_last() -> None:
    with pytest.raises(ValueError, match="not the last parameters"):
        Launch(Jit(["x", "A", "B"], set()), A=1)
    with pytest.raises(ValueError, match="not the last parameters"):
        Launch(Jit(["x", "A", "B"], set()), B=1, A=1)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that are launched."""
    found: list[str] = []
    call = Launch.__call__
    monkeypatch.setattr(
        launch.Launch, "__call__", lambda self, *args: (found.append(self._kernel.__name__), call(self, *args))[1]
    )
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted where there is a GPU")
@pytest.mark.parametrize("rows", [1, 4])
def test_a_layers_experts_take_three_launches(rows: int, launches: list[str]) -> None:
    """Beside the table of tiles, which takes one; the same of any number of experts."""
    pool = pool_of(3, 8, 16)
    hidden, pairs = rows_for([rows, rows, rows], 1, 16, torch.float32)
    kernel = TritonKernel(pool, "silu", Forbidden())
    y = torch.empty(3 * rows, 16)
    kernel.run(hidden, pairs, groups_of([rows, rows, rows], [0, 1, 2], 8), 1, y)
    kernel.combine(y, torch.ones(3 * rows, 1))
    assert launches == ["_gate_up", "_down", "_combine"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted where there is a GPU")
def test_dropped_experts_combine_by_the_same_kernel(launches: list[str]) -> None:
    """Guards against a kernel for each number of experts that a rule leaves, compiled in a request."""
    kernel = TritonKernel(pool_of(1, 4, 16), "silu", Forbidden())
    for top_k in (8, 6, 1, 9):
        y, weights = torch.randn(2 * top_k, 16), torch.rand(2, top_k)
        found = kernel.combine(y, weights)
        torch.testing.assert_close(found, (y.view(2, top_k, 16) * weights[:, :, None]).sum(dim=1))
    assert list(kernel._combines) == [8, 16]
    assert launches == ["_combine"] * 4

