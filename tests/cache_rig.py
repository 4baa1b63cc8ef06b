"""A cache on a tiny pool whose copies a test lets through or fails one by one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from run_layer import run_layer

from tiermoe.actors.engine.cache.cache import ExpertCache
from tiermoe.actors.engine.cache.device import Copied, CpuDevice
from tiermoe.actors.engine.cache.slots import LayerWeights, SlotPool
from tiermoe.actors.engine.stats import EngineStats, LayerStats, Timeline
from tiermoe.actors.policies.eviction import Lru
from tiermoe.actors.policies.prefetch import PrefetchGovernor
from tiermoe.actors.policies.residency import Residency, State
from tiermoe.actors.settings import LinkSettings
from tiermoe.actors.store.format import ExpertShape

TIMEOUT_S = 30
LAYERS, EXPERTS = 2, 4  # keys 0-3 are layer 0, 4-7 layer 1
SHAPE = ExpertShape(num_experts=EXPERTS, hidden=4, intermediate=3, gates=2, has_bias=True)
SLOT_BYTES = SHAPE.nbytes(4)


class GatedDevice(CpuDevice):
    """Copies pass one by one through `go` while `held`; a copy fails where `failing` says so."""

    def __init__(self) -> None:
        super().__init__(LinkSettings())
        self.held = False
        self.go = threading.Semaphore(0)
        self.started: queue.Queue[None] = queue.Queue()
        self.failing: Exception | None = None

    def copy(self, dst: Any, src: Any, after: Any) -> Copied:
        self.started.put(None)
        if self.held:
            assert self.go.acquire(timeout=TIMEOUT_S)
        if self.failing is not None:
            raise self.failing
        return super().copy(dst, src, after)

    def await_start(self) -> None:
        self.started.get(timeout=TIMEOUT_S)


class Fixture:
    """A cache of `slots` slots over bfloat16 weights, with what a test looks at."""

    def __init__(self, slots: int, device: CpuDevice) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = SHAPE.stacked().values()
        self.weights = [
            LayerWeights(tuple(torch.randn(shape, generator=generator).bfloat16() for shape in shapes))
            for _ in range(LAYERS)
        ]
        self.device = device
        self.governor = PrefetchGovernor(0.5)
        self.residency = Residency(LAYERS * EXPERTS, slots, SLOT_BYTES)
        pool = SlotPool.allocate(SHAPE, slots, torch.float32, torch.device("cpu"))
        self.stats = EngineStats(layers=[LayerStats() for _ in range(LAYERS)])
        self.cache = ExpertCache(
            pool, self.weights, device, self.residency, Lru(), self.governor, self.stats, Timeline(True)
        )

    def forward(self, layer: int, *experts: int) -> None:
        """One layer as `MoeLayer` runs it; every slot must hold the weights of its expert at its turn."""
        cache, needed = self.cache, [layer * EXPERTS + e for e in experts]
        run_layer(cache, layer, needed, lambda key: self.check_slot(key, cache.await_expert(key, layer)))
        cache.check_integrity()

    def check_slot(self, key: int, slot: int) -> None:
        layer, expert = divmod(key, EXPERTS)
        for found, stored in zip(self.cache.pool.slot(slot), self.weights[layer].expert(expert), strict=True):
            assert torch.equal(found, stored.float())

    def prefetch(self, *keys: int) -> int:
        """Prefetch and let all of it arrive."""
        queued = self.cache.prefetch(keys)
        self.settle()
        return queued

    def settle(self) -> None:
        """Let every copy arrive."""
        for job in list(self.cache.loads.under_way.values()):
            assert job.done.wait(TIMEOUT_S)
        self.cache.poll()
        self.cache.check_integrity()

    def release_when_awaited(self, key: int) -> None:
        """Let the held copy of `key` through once somebody waits for it."""
        go = self.device.go

        class Awaited(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                go.release()
                return super().wait(timeout)

        self.cache.loads.under_way[key].done = Awaited()

    def resident(self) -> set[int]:
        return {key for key in self.residency.held() if self.residency.state(key) == State.RESIDENT}

    @property
    def outcomes(self) -> tuple[int, int]:
        """Prefetches used and wasted, as the governor was told."""
        return self.governor._used, self.governor._wasted


Make = Callable[[int], Fixture]


@contextmanager
def caches() -> Iterator[Make]:
    """Makes fixtures of so many slots; in the end all copies are let through, and the caches closed."""
    made: list[Fixture] = []

    def build(slots: int) -> Fixture:
        made.append(Fixture(slots, GatedDevice()))
        return made[-1]

    yield build
    for fixture in made:
        for _ in range(50):
            fixture.device.go.release()
        fixture.cache.close()
