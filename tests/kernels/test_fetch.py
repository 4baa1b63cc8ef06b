"""What the host reads of a layer by one kernel: interpreted against torch, and launched natively on a fake GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from fake_gpu import FakeGpu
from numpy.typing import NDArray

from tiermoe.actors.engine.host_view import Asked, HostViews
from tiermoe.actors.engine.pinned_fetch import PinnedFetch
from tiermoe.kernels import _launch
from tiermoe.kernels.router import MOST_GPU_ROWS, LinearRouter
from tiermoe.kernels.triton import tables
from tiermoe.kernels.triton.launch import Launch

H, E, K = 136, 11, 3  # no powers of two
_AT = ctypes.c_void_p
_CALL = ctypes.CFUNCTYPE(ctypes.c_int, _AT, *[ctypes.c_uint] * 7, _AT, ctypes.POINTER(_AT), _AT)
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted where there is a GPU")


class KernelGpu(FakeGpu):
    """A fake GPU whose kernels read and write pinned memory, and run late.

    launches: programs of each. compiled: what a GPU compiles apart, by the kernel and its tensors' types. The first
    launch of a kind is Triton's, the others come from native code by the driver's call.
    """

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(seed)
        self.launches: list[int] = []
        self.compiled: set[tuple[Any, ...]] = set()
        self.copier: Any = tables.copier_of(
            self.device, tables.copying.__wrapped__(), lambda: self.handle(self.compute)
        )
        self._kinds: list[Callable[[list[int]], list[torch.Tensor | int]]] = []
        self._native = _CALL(self._called)
        self._driver = _launch.Driver(ctypes.cast(self._native, _AT).value or 0)
        monkeypatch.setattr(Launch, "first", lambda launch, grid, *args: self._first(launch, grid, *args))

    def _first(self, launch: Launch, grid: tuple[int, int, int], *args: Any) -> tuple[Any, ...]:
        dtypes = [arg.dtype if isinstance(arg, torch.Tensor) else None for arg in args]
        self.compiled.add((launch, *dtypes))

        def tensors_of(values: list[int]) -> list[torch.Tensor | int]:
            """Of a launch: tensors of the items that the kernel takes, at the addresses given."""
            firsts, seconds, thirds, wides = values[10:14]
            rows, outputs, width = values[19], values[20:22], values[26]
            counts = [1 << 14, firsts, seconds, thirds, wides, rows * width]
            for n in range(2):
                counts += [outputs[n] * width, outputs[n] * values[24 + n]]
            target = _tensor_at(values[0], counts[0], torch.int32)
            places = enumerate(zip(values, counts, strict=False))
            given = [target if at == values[0] else _tensor_at(at, n, dtypes[i]) for i, (at, n) in places]
            return [*given, *values[10:]]

        self._kinds.append(tensors_of)
        self._enqueue_kernel(launch, grid, list(args))
        return self._driver, len(self._kinds), 0, 128, 0, bytes(1 if d else 2 for d in dtypes), 0, int

    def _called(self, kind: int, *rest: Any) -> int:
        values = [ctypes.cast(rest[8][i], ctypes.POINTER(_AT if i < 10 else ctypes.c_int32))[0] for i in range(27)]
        kernel = self.copier.reads[sum(values[20 + n] > 0 for n in range(2))]
        self._enqueue_kernel(kernel, rest[:3], self._kinds[kind - 1](values))
        return 0

    def _enqueue_kernel(self, launch: Launch, grid: Any, args: list[Any]) -> None:
        self.launches.append(grid[0])
        self.kernel([], partial(launch._interpreted, tuple(grid), *args))
        with self._lock:
            for i, arg in enumerate(args[:10]):
                if i == 0 or arg.data_ptr() != args[0].data_ptr():
                    self._touch(self.compute, arg, write=i == 0)


def _tensor_at(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    memory = (ctypes.c_uint8 * (max(1, count) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)[:count]


def _scores(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    found = hidden.to(weight.dtype).float() @ weight.float().T
    return found if bias is None else found + bias.float()


def _same(found: NDArray[Any], expected: torch.Tensor, **near: float) -> None:
    assert found.shape == tuple(expected.shape)
    if near:
        np.testing.assert_allclose(found, expected.numpy(), **near)
    else:
        np.testing.assert_array_equal(found, expected.numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3])
def test_ids_weights_and_scores_take_one_launch(rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later router and the layer's own; layers follow each other in one buffer, and what was read stays."""
    gpu, kept = KernelGpu(rows, monkeypatch), []
    fetch = PinnedFetch(gpu, spin_s=60.0)
    later, own = (torch.randn(2 * E, H).to(dtype), torch.randn(2 * E).to(dtype)), (torch.randn(E, H), None)
    asked = [Asked(LinearRouter(*later, layers=2), softmax=True), Asked(LinearRouter(*own), softmax=False)]
    views = HostViews(fetch, True, [lambda layer, tokens: asked], weighed=True)
    for _ in range(4):
        hidden = torch.randn(rows, H).to(dtype)
        weights, ids = torch.rand(rows, E).to(dtype).topk(K)
        kept.append((hidden, ids, weights, views.look(0, hidden, ids, weights)))
    assert len(gpu.launches) == gpu.calls["record"] == 4
    assert gpu.launches[0] == 1 + rows * (-(-2 * E // tables.SCORES) + -(-E // tables.SCORES))
    for hidden, ids, weights, view in kept:
        _same(view.ids, ids)
        _same(view.weights, weights.float())
        expected = torch.softmax(_scores(hidden, *later).view(rows, 2, E), -1)
        _same(view.scores(asked[0]), expected, rtol=1e-5, atol=1e-6)
        _same(view.scores(asked[1]), _scores(hidden, *own), rtol=1e-5, atol=1e-4)
    assert len(gpu.launches) == 4
    gpu.finish()


def test_scores_that_no_kernel_computes_come_by_the_same_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of routers that are not linear, of some rows, and of a third router; the order is that of what was asked."""
    gpu = KernelGpu(0, monkeypatch)
    fetch, weight = PinnedFetch(gpu, spin_s=60.0), torch.randn(E, H)
    plain = LinearRouter(weight, None)
    asked = [
        Asked(lambda hidden: hidden @ weight.T, softmax=True), Asked(plain, softmax=False),
        Asked(plain, softmax=False, rows=(1,)), Asked(plain, softmax=True),
    ]  # fmt: skip
    hidden, ids = torch.randn(2, H), torch.randint(0, E, (2, K))
    monkeypatch.setattr("tiermoe.actors.engine.host_view.upload", lambda array, device: torch.from_numpy(array))
    for _ in range(2):
        found = fetch((ids,), hidden, asked)
        logits = _scores(hidden, weight, None)
        near = {"rtol": 1e-5, "atol": 1e-4}
        _same(found[0], ids)
        for array, expected in zip(
            found[1:], (torch.softmax(logits, -1), logits, logits[[1]], torch.softmax(logits, -1)), strict=True
        ):
            _same(array, expected, **near)
    assert len(gpu.launches) == gpu.calls["record"] == 2
    gpu.finish()


def test_many_rows_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = KernelGpu(0, monkeypatch)
    fetch, router = PinnedFetch(gpu, spin_s=60.0), LinearRouter(torch.randn(E, H), None)
    hidden, rows = torch.randn(MOST_GPU_ROWS + 1, H), MOST_GPU_ROWS + 1
    ids, scores = fetch((torch.zeros(rows, K, dtype=torch.int64),), hidden, [Asked(router, softmax=False)])
    assert gpu.launches == [1]
    assert ids.shape == (rows, K)
    _same(scores, router(hidden))


@pytest.mark.parametrize("seed", range(3))
def test_tensors_of_all_kinds_and_sizes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a launch takes, larger than the buffer, with gaps, of nothing; the buffer is used again."""
    gpu, kept = KernelGpu(seed, monkeypatch), []
    fetch = PinnedFetch(gpu, spin_s=60.0)
    for rows in (1, 5, 9000, 5):
        tensors = [
            torch.randint(0, 1 << 40, (rows, 3)), torch.rand(rows, 3).bfloat16(), torch.rand(7, rows).half().T,
            torch.rand(rows), torch.empty(0, 4), torch.randint(0, 9, (2, rows), dtype=torch.int32),
            torch.rand(rows, 2).T, torch.tensor(rows),
        ]  # fmt: skip
        before = len(gpu.launches)
        kept.append((tensors, fetch(tensors)))
        assert len(gpu.launches) - before == 2  # of three, and one that is widened
    for tensors, found in kept:
        for tensor, array in zip(tensors, found, strict=True):
            _same(array, tensor.float() if tensor.itemsize == 2 else tensor)
    with pytest.raises(TypeError, match=r"integers and floats of a layer, not torch\.bool"):
        fetch([torch.zeros(3, dtype=torch.bool)])
    assert fetch([torch.arange(3)])[0].tolist() == [0, 1, 2]
    gpu.finish()


def test_a_router_of_another_width_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = PinnedFetch(KernelGpu(0, monkeypatch))
    with pytest.raises(ValueError, match=r"a router of \(11, 136\) for hidden of \(1, 135\)"):
        fetch((), torch.zeros(1, H - 1), [Asked(LinearRouter(torch.zeros(E, H), None), softmax=False)])


def test_what_stands_in_for_the_kernel_reads_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the GPU of `bench host --device fake-gpu`, whose kernels are functions in C: from the second call on."""
    from tiermoe.benchmarks.instant_gpu import instant_gpu

    with instant_gpu() as gpu:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            fetch, weight, bias = PinnedFetch(gpu), torch.randn(E, H).to(dtype), torch.randn(E).to(dtype)
            asked = [Asked(LinearRouter(weight, bias), softmax=False), Asked(LinearRouter(weight, None), softmax=True)]
            for _ in range(3):
                hidden, values = torch.randn(2, H).to(dtype), torch.randn(2, K).to(dtype) * 1e-3
                ids = torch.randint(0, E, (2, K))
                found = fetch((ids, values), hidden, asked)
                _same(found[0], ids)
                _same(found[1], values.float())
                logits = _scores(hidden, weight, None)
                _same(found[2], logits + bias.float(), rtol=1e-5, atol=1e-4)
                _same(found[3], torch.softmax(logits, -1), rtol=1e-5, atol=1e-5)


def test_nothing_is_compiled_once_layers_were_warmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a second of compilation in the first request: weights in both types, each layer's router."""
    gpu = KernelGpu(0, monkeypatch)
    routers = [LinearRouter(torch.randn(E, H).bfloat16(), None), LinearRouter(torch.randn(E, H), torch.randn(E))]
    asker = lambda layer, tokens: [Asked(routers[layer], softmax=False)]  # noqa: E731
    views = HostViews(PinnedFetch(gpu, spin_s=60.0), True, [asker], weighed=True)
    views.warm(2, torch.zeros(1, H).bfloat16(), K)
    compiled = set(gpu.compiled)
    assert len(compiled) == 4
    for layer in range(2):
        hidden = torch.randn(3, H).bfloat16()
        for dtype in (torch.bfloat16, torch.float32):
            view = views.look(layer, hidden, torch.zeros(3, K, dtype=torch.int64), torch.rand(3, K).to(dtype))
            _same(view.scores(asker(layer, 3)[0]), routers[layer](hidden).float(), rtol=1e-2, atol=1e-1)
    assert gpu.compiled == compiled
    gpu.finish()
