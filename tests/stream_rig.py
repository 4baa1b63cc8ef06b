"""A cache on the streams of a GPU made of lists, and compute that looks at slots when its turn comes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from fake_gpu import FakeGpu
from run_layer import run_layer

from tiermoe.actors.engine.cache.cache import ExpertCache
from tiermoe.actors.engine.cache.slots import LayerWeights, SlotPool
from tiermoe.actors.engine.cuda.device import CudaDevice
from tiermoe.actors.engine.cuda.stream_queue import StreamQueue
from tiermoe.actors.engine.stats import EngineStats, LayerStats, Timeline
from tiermoe.actors.policies.eviction import Lru, split_eviction
from tiermoe.actors.policies.moepic.split import CacheCut
from tiermoe.actors.policies.prefetch import PrefetchGovernor
from tiermoe.actors.policies.residency import Residency, State
from tiermoe.actors.store.format import ExpertShape

LAYERS, EXPERTS, NEURONS = 3, 4, 4  # keys 0-3 are layer 0, 4-7 layer 1, 8-11 layer 2
KEYS = LAYERS * EXPERTS
SHAPE = ExpertShape(num_experts=EXPERTS, hidden=4, intermediate=NEURONS, gates=2, has_bias=False)
CARRIED = SHAPE.nbytes(2)  # bytes of an expert in the store
RATE = 1e3  # bytes per second, so that a copy takes 0.1 s


class Rig:
    """A cache of `slots` slots on a fake GPU, and compute that looks at slots when its turn comes."""

    def __init__(
        self, slots: int = 3, seed: int = 0, dtype: torch.dtype = torch.bfloat16, ahead: float = 2,
        pinned: Sequence[bool] = (True,) * LAYERS, cut: CacheCut | None = None, writeback: bool = False,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        shapes = SHAPE.stacked().values()
        self.weights = [
            LayerWeights(tuple(torch.randn(shape, generator=generator).bfloat16() for shape in shapes))
            for _ in range(LAYERS)
        ]
        self.gpu = FakeGpu(seed, RATE)
        self.device = CudaDevice(self.gpu, staging_bytes=24)
        self.queue = StreamQueue(self.device, pinned, int(ahead * CARRIED), casts=dtype != torch.bfloat16)
        self.residency = Residency(KEYS, slots, SHAPE.nbytes(dtype.itemsize))
        self.stats = EngineStats(layers=[LayerStats() for _ in range(LAYERS)])
        eviction = Lru() if cut is None else split_eviction(Lru, LAYERS, EXPERTS)
        self.cache = ExpertCache(
            SlotPool.allocate(SHAPE, slots, dtype, torch.device("cpu")), self.weights, self.device, self.residency,
            eviction, PrefetchGovernor(0.0), self.stats, Timeline(True), self.queue, cut=cut, writeback=writeback,
        )  # fmt: skip
        for tensor in self.cache.pool.tensors:
            tensor.fill_(float("nan"))
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

    def resident(self) -> set[int]:
        return {key for key in self.residency.held() if self.residency.state(key) == State.RESIDENT}
