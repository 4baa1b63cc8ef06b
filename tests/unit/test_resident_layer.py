"""A layer without misses as one native call, against the step in Python: same outputs, counters and eviction order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cache_rigs import EXPERTS, KEYS, LAYERS, SHAPE

from tiermoe.actors.engine.cache.cache import ExpertCache
from tiermoe.actors.engine.cache.device import CpuDevice, PlainActivations
from tiermoe.actors.engine.cache.link_queue import LinkQueue
from tiermoe.actors.engine.cache.slots import LayerWeights, SlotPool
from tiermoe.actors.engine.dispatch import DeviceBackend
from tiermoe.actors.engine.host_view import HostViews, Routing
from tiermoe.actors.engine.layer import MoeLayer, Placer
from tiermoe.actors.engine.stats import EngineStats, LayerStats, Timeline
from tiermoe.actors.policies.eviction import EvictionPolicy, Lfu, LfuDecay, Lru
from tiermoe.actors.policies.moepic import Lcp
from tiermoe.actors.policies.prefetch import PrefetchGovernor
from tiermoe.actors.policies.registry import PolicyContext, make, options
from tiermoe.actors.policies.residency import Residency
from tiermoe.actors.settings import LinkSettings
from tiermoe.kernels.expert_ffn import CPU_MAX_ROWS, CpuKernel, Operands, TorchKernel

POLICIES = [Lru, Lfu, LfuDecay, Lcp]
COUNTED = ("hits", "misses", "forwards", "waves", "bytes_loaded_demand")


def kernel_of(pool: SlotPool) -> CpuKernel:
    operands = Operands(pool.gate_up, pool.down, None, None)

    def gate(up: torch.Tensor) -> torch.Tensor:
        pairs = up.view(len(up), -1, 2)
        return torch.nn.functional.silu(pairs[..., 0]) * pairs[..., 1]

    return CpuKernel(operands, "silu", TorchKernel(operands, gate))


class Stack:
    """The layers of one tiny model on one cache."""

    def __init__(self, slots: int, policy: type[EvictionPolicy]) -> None:
        generator = torch.Generator().manual_seed(5)
        weights = [
            LayerWeights(tuple(torch.randn(s, generator=generator) for s in SHAPE.stacked().values()))
            for _ in range(LAYERS)
        ]
        pool, device = SlotPool.allocate(SHAPE, slots, torch.float32, torch.device("cpu")), CpuDevice(LinkSettings())
        self.stats = EngineStats(layers=[LayerStats() for _ in range(LAYERS)])
        kind = next(kind for kind in ("lru", "lfu", "lfu-decay", "lcp") if made(kind, policy))
        self.cache = ExpertCache(
            pool, weights, device, Residency(KEYS, slots, SHAPE.nbytes(4)),
            make("eviction", options("eviction", kind), PolicyContext(LAYERS, EXPERTS)), PrefetchGovernor(0.0),
            self.stats, Timeline(False), LinkQueue(LinkSettings(gbps=None)),
        )  # fmt: skip
        backend = DeviceBackend(self.cache, HostViews(), PlainActivations(torch.device("cpu")))
        kernel, placer = kernel_of(pool), Placer(self.cache)
        self.layers = [MoeLayer(i, EXPERTS, self.cache, backend, placer, kernel) for i in range(LAYERS)]

    def known(self) -> dict[str, Any]:
        """What later decisions and counters depend on."""
        cache = self.cache
        cache.check_integrity()
        return {
            "layers": [{name: getattr(layer, name) for name in COUNTED} for layer in self.stats.layers],
            "uses": list(cache.uses),
            "order": cache.eviction.victims(KEYS, lambda key: True),
            "slots": cache.residency.resident_slots.tolist(),
        }


def made(kind: str, policy: type[EvictionPolicy]) -> bool:
    return type(make("eviction", options("eviction", kind), PolicyContext(LAYERS, EXPERTS))) is policy


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", [KEYS, KEYS - 2, EXPERTS])
def test_the_native_call_is_the_step_in_python(policy: type[EvictionPolicy], slots: int) -> None:
    native, python = Stack(slots, policy), Stack(slots, policy)
    for layer in python.layers:
        layer.resident = None
    rng, calls = np.random.default_rng(slots), 0
    for step in range(150):
        tokens = int(rng.choice([1, 1, 1, 2, 5, CPU_MAX_ROWS, 3 * CPU_MAX_ROWS]))
        top = int(rng.integers(1, EXPERTS))
        for index in range(LAYERS):
            ids = torch.from_numpy(np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :top].copy())
            hidden, weights = torch.randn(tokens, SHAPE.hidden), torch.rand(tokens, top)
            before = int(native.cache.passes.words[0])
            out = native.layers[index].forward(hidden, ids, weights)
            calls += int(native.cache.passes.words[0]) != before
            assert torch.equal(out, python.layers[index].forward(hidden, ids, weights))
        if step % 10 == 9:
            assert native.known() == python.known()
    assert native.known() == python.known()
    assert calls > 20 or slots == EXPERTS
    assert sum(layer.forwards for layer in native.stats.layers) == 150 * LAYERS


Change = Callable[[torch.Tensor, torch.Tensor, np.ndarray, np.ndarray], None]


def _missing(hidden: torch.Tensor, ids: torch.Tensor, slots: np.ndarray, record: np.ndarray) -> None:
    slots[1] = -1


def _many_rows(hidden: torch.Tensor, ids: torch.Tensor, slots: np.ndarray, record: np.ndarray) -> None:
    ids[:] = torch.tensor([0, 1])


def _full(hidden: torch.Tensor, ids: torch.Tensor, slots: np.ndarray, record: np.ndarray) -> None:
    record[0] = len(record) - 4


@pytest.mark.parametrize("change", [_missing, _many_rows, _full])
def test_it_leaves_the_pass_to_python(change: Change) -> None:
    pool = SlotPool.allocate(SHAPE, EXPERTS, torch.float32, torch.device("cpu"))
    slots, record = np.arange(EXPERTS, dtype=np.int32), np.zeros(64, np.int64)
    record[0] = 1
    ids = torch.tensor([[0, 1], [1, 2], [2, 3]] * 3)  # 9 tokens, 6 at most for an expert
    hidden = torch.randn(9, SHAPE.hidden)
    layer = kernel_of(pool).resident(0, slots, record)
    change(hidden, ids, slots, record)
    used = int(record[0])
    assert layer.run(hidden, ids, torch.rand(9, 2)) is None
    assert record[0] == used


def test_it_refuses_experts_that_do_not_exist() -> None:
    """A router's mistake reads no foreign memory."""
    pool = SlotPool.allocate(SHAPE, EXPERTS, torch.float32, torch.device("cpu"))
    record = np.ones(64, np.int64)
    layer = kernel_of(pool).resident(0, np.arange(EXPERTS, dtype=np.int32), record)
    for ids in ([[0, EXPERTS]], [[-1, 0]]):
        with pytest.raises(ValueError, match="no such expert"):
            layer.run(torch.randn(1, SHAPE.hidden), torch.tensor(ids), torch.rand(1, 2))


def test_one_token_keeps_its_order_in_the_record() -> None:
    pool = SlotPool.allocate(SHAPE, EXPERTS, torch.float32, torch.device("cpu"))
    record = np.ones(64, np.int64)
    layer = kernel_of(pool).resident(2, np.arange(EXPERTS, dtype=np.int32), record)
    ids = torch.tensor([[3, 0, 1]])
    assert layer.run(torch.randn(1, SHAPE.hidden), ids, torch.rand(1, 3)) is not None
    experts = Routing.of(ids.numpy(), torch.device("cpu")).experts
    assert record[1 : int(record[0])].tolist() == [2, 1, 3, *[2 * EXPERTS + e for e in experts], 1, 1, 1]
