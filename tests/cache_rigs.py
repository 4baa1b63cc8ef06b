"""Caches on tiny pools: copies that a test lets through or fails one by one, and copies on a fake GPU's streams."""

from __future__ import annotations

import mmap
import queue
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from fake_gpu import FakeGpu
from orders_reference import Lru
from reference import LayerPlan, Load

from tiermoe.actors.engine.cache.cache import ExpertCache
from tiermoe.actors.engine.cache.device import Copied, CpuDevice
from tiermoe.actors.engine.cache.links import CacheLink, loader_link
from tiermoe.actors.engine.cache.loader import Loader, LoadJob
from tiermoe.actors.engine.cache.slot_map import SlotMap
from tiermoe.actors.engine.cache.slots import LayerWeights, LowBitPart, SlotMemory, SlotPool
from tiermoe.actors.engine.cuda.device import CudaDevice
from tiermoe.actors.engine.cuda.stream_link import stream_link
from tiermoe.actors.engine.stats import EngineStats, LayerStats, Timeline
from tiermoe.actors.policies.eviction import EvictionPolicy
from tiermoe.actors.policies.moepic.split import SplitLayout
from tiermoe.actors.policies.registry import PolicyContext, options
from tiermoe.actors.policies.residency import State
from tiermoe.actors.policies.slot_classes import make_eviction
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


def begin_layer(
    cache: ExpertCache, layer: int, keys: Sequence[int], guesses: Sequence[int] = (), low: Collection[int] = (),
    keep: Collection[int] = (), arrivals: bool = True,
) -> LayerPlan:  # fmt: skip
    """A layer's turn as `MoeLayer` takes it, until its experts can run: what is missing is queued, then the guesses.

    Args:
        keys: experts that run, one row each. low: of these, those that run on replicas.
        keep: leave last.
        arrivals: what has arrived lands before.
    """
    if arrivals:
        cache.poll(layer)
    plan = plan_layer(cache, cache.core.open(layer, list(keys), [1] * len(keys), 1, list(low)), keep)
    cache.core.begin()
    cache.core.load()
    cache.prefetch(guesses)
    return plan


def plan_layer(cache: ExpertCache, here: Sequence[int], keep: Collection[int] = ()) -> LayerPlan:
    """The core's plan of the segments that run on this device."""
    run, resident, arriving, loads = cache.core.plan(here, list(keep))
    found = [Load(key, None if victim < 0 else victim, after) for key, victim, after in loads]
    return LayerPlan(tuple(run), resident, arriving, tuple(found))


def end_layer(cache: ExpertCache, plan: LayerPlan, run: Callable[[int], object] = lambda segment: None) -> None:
    """The rest of the turn: `run` is given each segment once it is in its slot."""
    while True:
        first, stop = cache.core.next()
        if first == stop:
            break
        for segment in plan.run[first:stop]:
            run(segment)
    cache.core.close()
    cache.draw()


def bytes_held(cache: ExpertCache) -> int:
    """Of the segments that have a slot."""
    return sum(map(cache.bytes_of, cache.residency.held()))


def place_of(cache: ExpertCache, segment: int, slot: int) -> tuple[int, int]:
    """First neuron in the pool and number of neurons of a segment in this slot."""
    if cache.split is None:
        return slot * cache.neurons, cache.neurons
    first, neurons = cache.layout
    return first[slot], neurons[segment]


def run_layer(
    cache: ExpertCache, layer: int, keys: Sequence[int], run: Callable[[int], object], guesses: Sequence[int] = (),
    low: Collection[int] = (),
) -> None:  # fmt: skip
    """`begin_layer` and `end_layer`. No expert is pinned after an error, as the core says itself."""
    end_layer(cache, begin_layer(cache, layer, keys, guesses, low), run)


def tops_and_bottoms(layers: int, experts: int, kind: str = "lru") -> EvictionPolicy:
    """The order of eviction of a split cache."""
    return make_eviction(options("eviction", kind), PolicyContext(layers, experts), split=True)


def with_replicas(layers: int, experts: int, kind: str = "lru") -> EvictionPolicy:
    """The order of eviction of a cache with replicas."""
    return make_eviction(options("eviction", kind), PolicyContext(layers, experts), low_bit=True)


class _Caching:
    """Random bfloat16 weights, slots, and the cache that a subclass asks for."""

    cache: ExpertCache

    def make_cache(
        self, shape: ExpertShape, slots: int, dtype: torch.dtype, link: Callable[[SlotMap], CacheLink],
        eviction: EvictionPolicy, seed: int = 0, timeline: Timeline | None = None, split: SplitLayout | None = None,
        low_bit: LowBitPart | None = None, memory: SlotMemory | None = None, **options: Any,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.weights = [
            LayerWeights(tuple(torch.randn(s, generator=generator).bfloat16() for s in shape.stacked().values()))
            for _ in range(LAYERS)
        ]
        self.pool = SlotPool.allocate(shape, slots, dtype, torch.device("cpu"), memory)
        nbytes = shape.nbytes(dtype.itemsize)
        where = SlotMap(self.pool, self.weights, shape.num_experts, slots, nbytes, split, low_bit, memory)
        self.cache = ExpertCache(
            where, link(where), eviction, EngineStats(layers=[LayerStats() for _ in range(LAYERS)]),
            timeline or Timeline(True), **options,
        )  # fmt: skip
        self.residency = self.cache.residency

    @property
    def stats(self) -> EngineStats:
        """As counted by now."""
        return self.cache.live_stats()

    def resident(self) -> set[int]:
        return {key for key in self.residency.held() if self.residency.state(key) == State.RESIDENT}


class KnownLoader(Loader):
    """Has the last copy of each segment."""

    def __init__(self, device: CpuDevice) -> None:
        self.jobs: dict[int, LoadJob] = {}
        super().__init__(device)

    def submit(self, jobs: list[LoadJob], priority: int) -> None:
        self.jobs |= {job.segment: job for job in jobs}
        super().submit(jobs, priority)


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
        self, slots: int, device: CpuDevice, most: int | None = None, eviction: EvictionPolicy | None = None,
        timeline: Timeline | None = None,
    ) -> None:  # fmt: skip
        memory = None if most is None else SlotMemory(device, slots, most)
        self.device, self.loader = device, KnownLoader(device)
        self.make_cache(
            BIASED, slots, torch.float32, partial(loader_link, self.loader), Lru() if eviction is None else eviction,
            memory=memory, timeline=timeline, min_useful=0.5,
        )  # fmt: skip

    def begin(self, layer: int, *experts: int, keep: Collection[int] = (), arrivals: bool = True) -> LayerPlan:
        """`begin_layer`."""
        return begin_layer(self.cache, layer, [layer * EXPERTS + e for e in experts], keep=keep, arrivals=arrivals)

    def end(self, plan: LayerPlan) -> None:
        """`end_layer`; every slot must hold the weights of its expert at its turn."""
        end_layer(self.cache, plan, self.check_slot)
        self.cache.check_integrity()

    def forward(self, layer: int, *experts: int) -> None:
        """One layer; every slot must hold the weights of its expert at its turn."""
        self.end(self.begin(layer, *experts))

    def check_slot(self, key: int) -> None:
        layer, expert = divmod(key, EXPERTS)
        slot = self.pool.slot(self.residency.slot(key))
        for found, stored in zip(slot, self.weights[layer].expert(expert), strict=True):
            assert torch.equal(found, stored.float())

    def prefetch(self, *keys: int) -> int:
        """Prefetch and let all of it arrive."""
        queued = self.cache.prefetch(keys)
        self.settle()
        return queued

    def await_copy(self, key: int) -> None:
        """Its copy has ended, and nobody has looked yet."""
        assert self.loader.jobs[key].done.wait(TIMEOUT_S)  # type: ignore[call-arg]  # an event's

    def settle(self) -> None:
        """Let every copy arrive."""
        for key in self.cache.core.under_way:
            self.await_copy(key)
        self.cache.poll()
        self.cache.check_integrity()

    def release_when_awaited(self, key: int) -> None:
        """Let the held copy of `key` through once somebody waits for it."""
        go = self.device.go

        class Awaited(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                go.release()
                return super().wait(timeout)

        self.loader.jobs[key].done = Awaited()

    @property
    def outcomes(self) -> tuple[int, int]:
        """Prefetches used and wasted, as the governor was told."""
        return self.cache.governor.outcomes


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

    most: slots that it may get. shape: of an expert. low_bit: with slots for replicas, and an order for both.
    """

    def __init__(
        self, slots: int = 3, seed: int = 0, dtype: torch.dtype = torch.bfloat16, ahead: float = 2,
        pinned: Sequence[bool] = (True,) * LAYERS, split: SplitLayout | None = None, writeback: bool = False,
        most: int | None = None, shape: ExpertShape = SHAPE, low_bit: LowBitPart | None = None,
        eviction: EvictionPolicy | None = None,
    ) -> None:  # fmt: skip
        self.gpu = FakeGpu(seed, RATE)
        self.gpu.pages.granularity = mmap.PAGESIZE
        self.device = CudaDevice(self.gpu, staging_bytes=24)
        if eviction is None:
            eviction = Lru() if split is None else tops_and_bottoms(LAYERS, EXPERTS)
        self.make_cache(
            shape, slots, dtype,
            lambda where: stream_link(self.device, where, pinned, int(ahead * CARRIED), dtype != torch.bfloat16),
            eviction, seed, None, split, low_bit, None if most is None else SlotMemory(self.device, slots, most),
            writeback=writeback,
        )  # fmt: skip
        self.link: Any = self.cache.link
        for tensor in self.pool.tensors:
            tensor[:slots].fill_(float("nan"))
        self.ran = self.looked = 0
        self.gpu.synchronized = 0

    def forward(self, layer: int, experts: Sequence[int], guesses: Sequence[int] = ()) -> None:
        """One layer as `MoeLayer` runs it."""
        run_layer(self.cache, layer, [layer * EXPERTS + e for e in experts], self.run, guesses)
        self.cache.check_integrity()

    def run(self, segment: int) -> None:
        """Enqueue a kernel on a segment's place, which must hold its neurons when the kernel's turn comes."""
        slot = self.residency.slot(segment)
        first, count = place_of(self.cache, segment, slot)
        key, cut = segment % KEYS, self.cache.split
        begin = cut.tops[key // EXPERTS] if cut is not None and segment >= KEYS else 0
        stored = self.weights[key // EXPERTS].expert(key % EXPERTS)
        wanted = [whole[begin : begin + count].to(self.pool.gate_up.dtype) for whole in stored]
        self.read(self.pool.neuron_range(first, count), wanted, f"segment {segment} in slot {slot}")

    def read(self, found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], said: str) -> None:
        """Enqueue a kernel that must find these when its turn comes. said: where it does not."""

        def act() -> None:
            self.looked += 1
            for have, want in zip(found, wanted, strict=True):
                assert torch.equal(have, want), said

        self.ran += 1
        self.gpu.kernel(found, act, seconds=0.0)

    def finish(self) -> None:
        """Let everything happen, and see that it did."""
        self.gpu.finish()
        assert self.looked == self.ran
        self.cache.poll()
        self.cache.check_integrity()
        self.cache.close()
        self.device.close()
        assert self.link.pending == 0
