"""Caches on tiny pools: copies that a test lets through or fails one by one, and copies on a fake GPU's streams."""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from fake_gpu import FakeGpu

from tiermoe.actors.engine.cache.cache import ExpertCache
from tiermoe.actors.engine.cache.device import Copied, CpuDevice
from tiermoe.actors.engine.cache.slots import LayerWeights, SlotMemory, SlotPool
from tiermoe.actors.engine.cuda.device import CudaDevice
from tiermoe.actors.engine.cuda.stream_queue import StreamQueue
from tiermoe.actors.engine.stats import EngineStats, LayerStats, Timeline
from tiermoe.actors.policies.eviction import EvictionPolicy, Lru
from tiermoe.actors.policies.moepic.split import SplitLayout
from tiermoe.actors.policies.plan import LoadOnMiss
from tiermoe.actors.policies.prefetch import PrefetchGovernor
from tiermoe.actors.policies.residency import Residency, State
from tiermoe.actors.policies.slot_classes import split_eviction
from tiermoe.actors.settings import LinkSettings
from tiermoe.actors.store.format import ExpertShape

TIMEOUT_S = 30
LAYERS, EXPERTS, NEURONS = 3, 4, 4  # keys 0-3 are layer 0, 4-7 layer 1, 8-11 layer 2
KEYS = LAYERS * EXPERTS
BIASED = ExpertShape(num_experts=EXPERTS, hidden=4, intermediate=3, gates=2, has_bias=True)
SLOT_BYTES = BIASED.nbytes(4)
SHAPE = ExpertShape(num_experts=EXPERTS, hidden=4, intermediate=NEURONS, gates=2, has_bias=False)
CARRIED = SHAPE.nbytes(2)  # bytes of an expert in the store
RATE = 1e3  # bytes per second, so that a copy takes 0.1 s


def run_layer(
    cache: ExpertCache, layer: int, segments: Sequence[int], run: Callable[[int], object], guesses: Sequence[int] = ()
) -> None:
    """A layer's turn as `MoeLayer` takes it: load what is missing, give each segment to `run`, which awaits it.

    Args:
        guesses: prefetches, which come behind demand.
    """
    cache.poll()
    cache.drop_stale(layer, segments)
    plan = LoadOnMiss().plan(segments, cache.residency, cache.eviction)
    cache.begin(layer, plan)
    cache.issue([load for load in plan.loads if not load.after])
    cache.prefetch(guesses)
    for i, segment in enumerate(plan.run, start=1):
        run(segment)
        cache.ran([segment])
        cache.issue([load for load in plan.loads if load.after == i])


class _Caching:
    """Random bfloat16 weights, the residency of `slots` slots, counters; a subclass makes the cache."""

    cache: ExpertCache

    def __init__(
        self, shape: ExpertShape, slots: int, dtype: torch.dtype, seed: int = 0, memory: SlotMemory | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weights = [
            LayerWeights(tuple(torch.randn(s, generator=generator).bfloat16() for s in shape.stacked().values()))
            for _ in range(LAYERS)
        ]
        self.pool = SlotPool.allocate(shape, slots, dtype, torch.device("cpu"), memory)
        most = None if memory is None else memory.most
        self.residency = Residency(KEYS, slots, shape.nbytes(dtype.itemsize), most)
        self.stats = EngineStats(layers=[LayerStats() for _ in range(LAYERS)])

    def resident(self) -> set[int]:
        return {key for key in self.residency.held() if self.residency.state(key) == State.RESIDENT}


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


class Fixture(_Caching):
    """A cache of `slots` slots in float32, with what a test looks at.

    most: slots that it may get. eviction: None: by last use.
    """

    def __init__(
        self, slots: int, device: CpuDevice, most: int | None = None, eviction: EvictionPolicy | None = None
    ) -> None:
        memory = None if most is None else SlotMemory(device, slots, most)
        super().__init__(BIASED, slots, torch.float32, memory=memory)
        self.device, self.governor = device, PrefetchGovernor(0.5)
        self.cache = ExpertCache(
            self.pool, self.weights, device, self.residency, Lru() if eviction is None else eviction, self.governor,
            self.stats, Timeline(True), memory=memory,
        )

    def forward(self, layer: int, *experts: int) -> None:
        """One layer; every slot must hold the weights of its expert at its turn."""
        needed = [layer * EXPERTS + e for e in experts]
        run_layer(self.cache, layer, needed, lambda key: self.check_slot(key, self.cache.await_expert(key, layer)))
        self.cache.check_integrity()

    def check_slot(self, key: int, slot: int) -> None:
        layer, expert = divmod(key, EXPERTS)
        for found, stored in zip(self.pool.slot(slot), self.weights[layer].expert(expert), strict=True):
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

    @property
    def outcomes(self) -> tuple[int, int]:
        """Prefetches used and wasted, as the governor was told."""
        used, wasted, _ = self.governor.words
        return used, wasted


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


class Rig(_Caching):
    """A cache of `slots` slots on a fake GPU, and compute that looks at slots when its turn comes.

    most: slots that it may get. shape: of an expert.
    """

    def __init__(
        self, slots: int = 3, seed: int = 0, dtype: torch.dtype = torch.bfloat16, ahead: float = 2,
        pinned: Sequence[bool] = (True,) * LAYERS, cut: SplitLayout | None = None, writeback: bool = False,
        most: int | None = None, shape: ExpertShape = SHAPE,
    ) -> None:  # fmt: skip
        self.gpu = FakeGpu(seed, RATE)
        self.gpu.pages.granularity = mmap.PAGESIZE
        self.device = CudaDevice(self.gpu, staging_bytes=24)
        memory = None if most is None else SlotMemory(self.device, slots, most)
        super().__init__(shape, slots, dtype, seed, memory)
        self.queue = StreamQueue(self.device, pinned, int(ahead * CARRIED), casts=dtype != torch.bfloat16)
        eviction = Lru() if cut is None else split_eviction(Lru, LAYERS, EXPERTS)
        self.cache = ExpertCache(
            self.pool, self.weights, self.device, self.residency, eviction, PrefetchGovernor(0.0), self.stats,
            Timeline(True), self.queue, cut=cut, writeback=writeback, memory=memory,
        )  # fmt: skip
        for tensor in self.pool.tensors:
            tensor[:slots].fill_(float("nan"))
        self.ran = self.looked = 0
        self.gpu.synchronized = 0

    def forward(self, layer: int, experts: Sequence[int], guesses: Sequence[int] = ()) -> None:
        """One layer as `MoeLayer` runs it."""
        cache = self.cache
        cache.settle_times()
        needed = cache.segments([layer * EXPERTS + e for e in experts])
        run_layer(cache, layer, needed, lambda s: self.run(s, cache.await_expert(s, layer)), guesses)
        cache.check_integrity()

    def run(self, segment: int, slot: int) -> None:
        """Enqueue a kernel on a segment's place, which must hold its neurons when the kernel's turn comes."""
        first, count = self.cache.place(segment, slot)
        key, cut = segment % KEYS, self.cache.cut
        begin = cut.tops[key // EXPERTS] if cut is not None and segment >= KEYS else 0
        stored = self.weights[key // EXPERTS].expert(key % EXPERTS)
        wanted = [whole[begin : begin + count].to(self.cache.pool.gate_up.dtype) for whole in stored]
        found = self.cache.pool.neuron_range(first, count)

        def act() -> None:
            self.looked += 1
            for have, want in zip(found, wanted, strict=True):
                assert torch.equal(have, want), f"segment {segment} in slot {slot}"

        self.ran += 1
        self.gpu.kernel(found, act, seconds=0.0)

    def finish(self) -> None:
        """Let everything happen, and see that it did."""
        self.gpu.finish()
        assert self.looked == self.ran
        self.cache.poll()
        self.cache.settle_times()
        self.cache.check_integrity()
        self.cache.close()
        self.device.close()
        assert self.queue.pending == 0
