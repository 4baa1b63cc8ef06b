"""What a layer's policies read on the host comes in one transfer, and is the same as when each reads on its own.

Where a decode step's host time goes, and what the device is given for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from fake_gpu import FakeGpu
from moe_stack import HIDDEN, engine_for, make_case
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode

from tiermoe.actors.engine import engine as engine_module
from tiermoe.actors.engine.cuda.tables import TableRing
from tiermoe.actors.engine.engine import ExpertEngine
from tiermoe.actors.engine.host_times import PARTS, Calls, count_calls, device_calls, host_passes
from tiermoe.actors.engine.host_view import Asked, HostViews, share
from tiermoe.actors.engine.pinned_fetch import PinnedFetch
from tiermoe.actors.policies.routing import SequenceRows

LAYERS, EXPERTS, TOP_K = 3, 8, 2
_AHEAD = {"kind": "release-target"}
_BUDGET = {"kind": "budget-aware"}
_READS = {
    torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.nonzero,
    torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__,
    torch.Tensor.__array__, torch.nonzero,
}  # fmt: skip


class Link(TorchFunctionMode):
    """Stands for the way to a GPU: tensors are fetched in copies and counted; read otherwise they raise."""

    def __init__(self) -> None:
        super().__init__()
        self.fetches: list[int] = []
        self._inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and not self._inside:
            raise AssertionError(f"{func.__name__} reads the device outside of a fetch")
        return func(*args, **(kwargs or {}))

    def fetch(
        self, tensors: Sequence[torch.Tensor], hidden: torch.Tensor | None = None, asked: Sequence[Asked] = ()
    ) -> list[NDArray[Any]]:
        self.fetches.append(len(tensors) + len(asked))
        self._inside = True
        try:
            return [array.copy() for array in share([tensor.detach() for tensor in tensors], hidden, asked)]
        finally:
            self._inside = False


@contextmanager
def _linked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    link = Link()
    with monkeypatch.context() as patched:
        patched.setattr(engine_module, "fetch_from", lambda device: link.fetch)
        yield link


def _forwards(rows: Sequence[Sequence[int]]) -> list[tuple[list[SequenceRows], torch.Tensor, torch.Tensor]]:
    """Of each forward whose sequences have so many rows: them, hidden states and the routing's scores per layer."""
    generator, out = torch.Generator().manual_seed(7), []
    for lengths in rows:
        ends = np.cumsum([0, *lengths]).tolist()
        spans = [SequenceRows(f"s{i}", ends[i], ends[i + 1], n == 1) for i, n in enumerate(lengths)]
        hidden = torch.randn(ends[-1], HIDDEN, generator=generator)
        out.append((spans, hidden, torch.rand(LAYERS, ends[-1], EXPERTS, generator=generator)))
    return out


def _run(options: dict[str, Any], mode: Link | None) -> tuple[list[torch.Tensor], dict[str, Any]]:
    case = make_case(3, LAYERS, EXPERTS, TOP_K, False, torch.float32)
    outs = []
    with engine_for(case, 0.5, **options) as engine:
        for spans, hidden, scores in _forwards([(4, 3), (1, 1), (1,), (1, 1)]):
            engine.begin_forward(spans)
            for index, layer in enumerate(engine.layers):
                weights, ids = scores[index].topk(TOP_K)
                if mode is None:
                    outs.append(layer.forward(hidden, ids, weights))
                    continue
                with mode:
                    outs.append(layer.forward(hidden, ids, weights))
        total = engine.stats().total()
        counters = {name: getattr(total, name) for name in ("hits", "misses", "vacated")}
        counters |= {name: getattr(engine.stats(), name) for name in ("substitutions", "dropped")}
    return outs, counters


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefetch": "next-gate", "distance": 2},
        {"prefetch": "speculative"},
        {"prefetch": "activation-matrix"},
        {"pre_evict": _AHEAD, "eviction": "importance", "prefetch": "next-gate"},
        {"pre_evict": _AHEAD, "eviction": "importance", "routing": _BUDGET, "lossless": False},
        {"on_miss": "drop", "lossless": False, "substitution": {"tau": 0.5}},
    ],
    ids=["none", "next-gate", "speculative", "matrix", "pre-evict", "budget-aware", "drop"],
)
def test_one_transfer_per_layer(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    expected, counted = _run(options, None)
    with _linked(monkeypatch) as link:
        found, counters = _run(options, link)
    assert len(link.fetches) == 4 * LAYERS
    if "prefetch" not in options:  # else they depend on what arrived in time
        assert counters == counted
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_unforeseen_rows_are_fetched_on_demand() -> None:
    fetches: list[int] = []

    def fetch(
        tensors: Sequence[torch.Tensor], hidden: torch.Tensor | None = None, asked: Sequence[Asked] = ()
    ) -> list[NDArray[Any]]:
        fetches.append(len(tensors) + len(asked))
        return [array.copy() for array in share(tensors, hidden, asked)]

    weight = torch.randn(EXPERTS, HIDDEN)
    probe: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden @ weight.T  # noqa: E731
    foreseen, other = Asked(probe, softmax=True), Asked(probe, softmax=False, rows=(2,))
    views = HostViews(fetch, True, [lambda layer, tokens: [foreseen], lambda layer, tokens: [foreseen]], weighed=True)
    hidden, ids, weights = torch.randn(3, HIDDEN), torch.tensor([[0, 1]] * 3), torch.rand(3, 2).bfloat16()
    view = views.look(0, hidden, ids, weights)
    assert fetches == [3]  # ids, what two ask for, weights
    np.testing.assert_array_equal(view.weights, weights.float().numpy())
    np.testing.assert_allclose(view.scores(foreseen), torch.softmax(hidden @ weight.T, -1).numpy(), rtol=1e-6)
    assert fetches == [3]
    for _ in range(2):
        np.testing.assert_allclose(view.scores(other), (hidden @ weight.T)[2:].numpy(), rtol=1e-5, atol=1e-5)
    assert fetches == [3, 1]


def test_the_pinned_buffer_is_used_again_and_grows() -> None:
    """What `tests/cuda` runs on a GPU; the host polls and keeps the interpreter's lock."""
    for seed in range(5):
        gpu, kept = FakeGpu(seed), []
        fetch = PinnedFetch(gpu, spin_s=60.0)  # not to depend on this machine's load
        for rows in (1, 5, 1, 9000, 5):
            tensors = [torch.randint(0, 64, (rows, 3)), torch.rand(rows, 3), torch.rand(7, rows).half().T]
            kept.append((tensors, fetch(tensors)))
        assert gpu.synchronized == 0
        assert gpu.calls["kernel_copy"] == 3 * len(kept)
        assert "copy" not in gpu.calls
        for tensors, found in kept:
            for tensor, array in zip(tensors, found, strict=True):
                np.testing.assert_array_equal(array, tensor.numpy())
        gpu.finish()


def test_a_long_wait_gives_up_the_lock() -> None:
    gpu = FakeGpu()
    fetch = PinnedFetch(gpu)
    gpu.idle = True
    (found,) = fetch([torch.arange(3)])
    assert gpu.synchronized == 1
    assert found.tolist() == [0, 1, 2]


def test_a_buffer_that_grew_in_inference_mode_serves_outside() -> None:
    """Guards against a pinned buffer that torch lets nobody write into any more."""
    fetch, rows = PinnedFetch(FakeGpu()), torch.rand(9000, 3)
    with torch.inference_mode():
        fetch([rows])
    (found,) = fetch([rows + 1])
    np.testing.assert_array_equal(found, (rows + 1).numpy())


def test_a_table_does_not_wait_for_experts_on_their_way() -> None:
    """Guards against tables that the copy engine took behind 64 MiB of prefetches: 1.2 ms a layer."""
    table, taken = np.arange(16, dtype=np.float32), {}
    for way in ("ring", "copy"):
        gpu = FakeGpu(bytes_per_s=64e9, in_order=True)
        ring, done = TableRing(gpu, entries=2, nbytes=64), gpu.event()
        expert = torch.zeros(64 << 20, dtype=torch.uint8)
        begin = gpu.event()
        gpu.record(begin, gpu.current())
        with gpu.on(gpu.stream(name="prefetch")):
            gpu.copy(torch.empty_like(expert), expert)
        if way == "ring":
            found = ring.put(table)
        else:
            found = torch.empty(16)
            gpu.copy(found, torch.from_numpy(table))
        gpu.record(done, gpu.current())
        gpu.finish()
        taken[way] = gpu.elapsed_s(begin, done)
        np.testing.assert_array_equal(found.numpy(), table)
    assert taken["copy"] > 1e-3
    assert taken["ring"] < 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_tables_stay_what_they_were_while_the_ring_goes_round(seed: int) -> None:
    """Many more than it has entries, some larger than a buffer, of every kind that layers put."""
    gpu = FakeGpu(seed)
    ring, put = TableRing(gpu, entries=3, nbytes=64), list[tuple[torch.Tensor, np.ndarray]]()
    for i in range(40):
        for array in (np.arange(i, i + 3 + i % 5 * 20), np.full((2, i % 3), i, np.float32), np.array([i], np.int32)):
            put.append((ring.put(array), array.copy()))
            array[...] = 99
    assert ring.put([4, 5]).dtype == torch.int32
    gpu.finish()
    for found, array in put:
        np.testing.assert_array_equal(found.numpy(), array)


def _decode(engine: ExpertEngine, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for layer in engine.layers:
            weights, ids = torch.rand(1, EXPERTS, generator=generator).topk(TOP_K)
            layer.forward(torch.randn(1, HIDDEN, generator=generator), ids, weights)


def test_parts_of_a_pass_are_exclusive_and_nothing_stays_behind() -> None:
    case = make_case(3, LAYERS, EXPERTS, TOP_K, False, torch.float32)
    with engine_for(case, 0.5, prefetch="next-gate") as engine:
        before = [set(vars(owner)) for owner in (*engine.layers, engine.cache, engine.layers[0].kernel)]
        with host_passes(engine) as passes:
            _decode(engine, 4)
        assert [set(vars(owner)) for owner in (*engine.layers, engine.cache, engine.layers[0].kernel)] == before
    assert [(p.layer, p.tokens) for p in passes] == [(layer, 1) for _ in range(4) for layer in range(LAYERS)]
    for found in passes:
        assert set(found.parts) == set(PARTS)
        for part in ("read", "place", "run", "kernels", "combine", "prefetch", "other"):
            assert found.parts[part] > 0, part
        assert found.parts["send"] == found.parts["reroute"] == 0
        whole = sum(found.parts.values())
        beyond = sum(found.parts[part] for part in ("kernels", "combine", "copies"))  # nothing is fetched from a GPU
        assert 0 < found.outside_s == pytest.approx(whole - beyond)


def test_calls_belong_to_the_layer_that_they_are_in_or_come_before() -> None:
    def at(start: float, name: str) -> tuple[str, float, float]:
        return name, start, start + 1

    events = [
        at(0, "cudaLaunchKernel"), at(2, "cudaGraphLaunch"), at(4, "aten::mm"),
        ("tiermoe.layer", 10, 20), at(11, "cudaMemcpyAsync"), at(13, "cudaEventSynchronize"),
        at(15, "cuLaunchKernelEx"),
        at(30, "cudaLaunchKernel"), at(33, "cudaLaunchKernel"),
        ("tiermoe.layer", 40, 50), at(41, "cudaLaunchKernel"),
        at(60, "cudaLaunchKernel"),
    ]  # fmt: skip
    found = count_calls(reversed(events))
    assert found.layers == 2
    assert found.experts == Calls(launches=1, graphs=0, copies=0.5, waits=0.5)
    assert found.dense == Calls(launches=1.5, graphs=0.5)
    with pytest.raises(ValueError, match="no layer"):
        count_calls(events[:3])


def test_one_step_is_profiled_without_its_first_layer() -> None:
    case = make_case(3, LAYERS, EXPERTS, TOP_K, False, torch.float32)
    with engine_for(case, 1.0) as engine:
        found = device_calls(engine, lambda: _decode(engine, 4), tokens=1, skip=2)
        assert found.layers == LAYERS - 1
        if not torch.cuda.is_available():
            assert found.experts == found.dense == Calls()
        with pytest.raises(ValueError, match="fewer than 8"):
            device_calls(engine, lambda: _decode(engine, 4), tokens=1)
