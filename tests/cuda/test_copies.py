"""Copies on a real GPU's streams: the bytes that kernels see, that no host waits, and what the link gives."""

from __future__ import annotations

import mmap
import random
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_rigs import begin_layer, end_layer, run_layer

from tiermoe.actors.budget import Budget
from tiermoe.actors.core import _core
from tiermoe.actors.engine.cache.cache import ExpertCache
from tiermoe.actors.engine.cache.slots import LayerWeights
from tiermoe.actors.engine.cuda.device import CudaDevice
from tiermoe.actors.engine.make_cache import ModelExperts, make_cache, pinned_layers
from tiermoe.actors.engine.make_device import make_device
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.settings import CopySettings, EngineSettings, LinkSettings
from tiermoe.actors.store.format import ExpertShape

LAYERS, EXPERTS = 3, 6
KEYS = LAYERS * EXPERTS
SHAPE = ExpertShape(num_experts=EXPERTS, hidden=256, intermediate=512, gates=2, has_bias=False)  # 768 KiB in bfloat16
MiB = 1 << 20


@pytest.fixture
def device(gpu: torch.device) -> Iterator[CudaDevice]:
    made = make_device("cuda", LinkSettings())
    assert isinstance(made, CudaDevice)
    yield made
    made.close()


def weights_in(place: str, folder: Path, shape: ExpertShape = SHAPE, layers: int = LAYERS) -> list[LayerWeights]:
    """Random experts in pinned memory, in pageable memory, or in a file that is mapped read-only."""
    out = []
    generator = torch.Generator().manual_seed(0)
    for i in range(layers):
        tensors = [torch.randn(s, generator=generator).bfloat16() for s in shape.stacked().values()]
        if place == "pinned":
            tensors = [t.pin_memory() for t in tensors]
        elif place == "file":
            path = folder / f"layer{i}"
            path.write_bytes(b"".join(t.view(torch.uint8).numpy().tobytes() for t in tensors))
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            first = 0
            for j, t in enumerate(tensors):
                flat = torch.frombuffer(mapped, dtype=torch.bfloat16, count=t.numel(), offset=first)
                tensors[j], first = flat.view(t.shape), first + t.nbytes
        out.append(LayerWeights(tuple(tensors)))
    return out


def cache_of(
    device: CudaDevice, weights: Sequence[LayerWeights], slots: int, dtype: torch.dtype, shape: ExpertShape = SHAPE,
    **copies: Any,
) -> ExpertCache:  # fmt: skip
    settings = EngineSettings(
        policy=PolicySettings(name="test", lossless=True), device="cuda",
        budget=Budget(nbytes=slots * shape.nbytes(dtype.itemsize)),
        copies=CopySettings(**copies),
    )  # fmt: skip
    return make_cache(settings, ModelExperts(shape, weights, dtype), device, range(len(weights) * shape.num_experts))


class Looker:
    """Runs layers on a cache; its kernel compares a slot with the expert that should be in it, on the GPU."""

    def __init__(self, cache: ExpertCache, weights: Sequence[LayerWeights], device: torch.device) -> None:
        dtype = cache.pool.gate_up.dtype
        self.cache = cache
        self.wanted = [[t.to(device=device, dtype=dtype) for t in layer.tensors] for layer in weights]
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)

    def forward(self, layer: int, experts: Sequence[int], guesses: Sequence[int]) -> None:
        cache = self.cache

        def look(key: int) -> None:
            slot = cache.pool.slot(cache.residency.slot(key))
            for found, whole in zip(slot, self.wanted[layer], strict=True):
                self.wrong += (found != whole[key % EXPERTS]).sum()

        run_layer(cache, layer, [layer * EXPERTS + e for e in experts], look, guesses)

    def drive(self, seed: int, layers: int) -> None:
        chance = random.Random(seed)
        for turn in range(layers):
            experts = sorted(chance.sample(range(EXPERTS), chance.randint(1, EXPERTS)))
            self.forward(turn % LAYERS, experts, chance.sample(range(KEYS), chance.randrange(5)))


@contextmanager
def looking(
    device: CudaDevice, weights: Sequence[LayerWeights], slots: int, dtype: torch.dtype, **copies: Any
) -> Iterator[Looker]:
    """A looker on a cache of its own, which is flushed in the end; it must have seen the right bytes only."""
    with closing(cache_of(device, weights, slots, dtype, **copies)) as cache:
        looker = Looker(cache, weights, device.torch_device)
        yield looker
        cache.flush()
        torch.cuda.synchronize()  # the default stream, which reads the count, waits for no other
        assert int(looker.wrong) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("place", ["pinned", "file", "pageable"])
@pytest.mark.parametrize("slots", [2, 7])
def test_kernels_see_the_right_bytes(
    place: str, dtype: torch.dtype, slots: int, device: CudaDevice, tmp_path: Path
) -> None:
    """Random loads, guesses and evictions in a pool smaller than a layer, from memory of every kind."""
    weights = weights_in(place, tmp_path)
    if place == "file":
        _, report = device.pin(weights, CopySettings())
        assert report is not None
        assert report.registered + report.staged == sum(t.nbytes for layer in weights for t in layer.tensors)
        print("a mapped file:", report)
    with looking(device, weights, slots, dtype, ahead_mib=1) as looker:
        cache = looker.cache
        assert isinstance(cache.link, _core.StreamLink)
        assert place != "pinned" or all(pinned_layers(device, cache.where))
        looker.drive(0, 60)
        cache.flush()
        cache.check_integrity()
        assert int(looker.wrong) == 0
        assert cache.live_stats().total().link_s > 0


def test_a_compute_on_another_stream_sees_them_too(device: CudaDevice, tmp_path: Path) -> None:
    with looking(device, weights_in("pinned", tmp_path), 4, torch.bfloat16) as looker:
        streams = [torch.cuda.Stream(device.torch_device) for _ in range(3)]
        for turn in range(12):
            with torch.cuda.stream(streams[turn % 3]):
                looker.drive(turn, 6)


def test_nothing_synchronises_on_a_forwards_way(device: CudaDevice, tmp_path: Path, forbid_waits: Any) -> None:
    """Neither by name nor by an operation of torch that waits inside."""
    with looking(device, weights_in("pinned", tmp_path), 3, torch.float32, ahead_mib=1) as looker:
        looker.drive(0, 6)  # what is made once is made
        with forbid_waits() as calls:
            looker.drive(1, 60)
        assert calls == []


def test_waiting_is_measured_without_waiting(device: CudaDevice, tmp_path: Path) -> None:
    with looking(device, weights_in("pinned", tmp_path), 3, torch.bfloat16) as looker:
        cache = looker.cache
        looker.drive(0, 12)
        cache.flush()
        torch.cuda.synchronize()
        cache.settle_times()
        total = cache.live_stats().total()
        moved = total.bytes_loaded_demand + total.bytes_loaded_prefetch
        assert total.blocked_io_s > 0
        assert total.link_s == pytest.approx(total.total_io_s)
        print(f"{moved / MiB:.0f} MiB in {total.link_s * 1e3:.2f} ms of the link, "
              f"{total.blocked_io_s * 1e3:.2f} ms of which the compute waited")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "hidden", "intermediate", "experts"),
    [("Qwen1.5-MoE-A2.7B", 2048, 1408, 16), ("Mixtral-8x7B", 4096, 14336, 3)],
)
def test_bandwidth_of_a_layers_misses(
    name: str, hidden: int, intermediate: int, experts: int, device: CudaDevice, record_property: Any
) -> None:
    """What the streams give against a large pinned copy, in GB/s: printed and recorded, for no clock fails a test."""
    shape = ExpertShape(num_experts=experts, hidden=hidden, intermediate=intermediate, gates=2, has_bias=False)
    layer = LayerWeights(tuple(
        torch.empty(s, dtype=torch.bfloat16, pin_memory=True).zero_() for s in shape.stacked().values()
    ))  # fmt: skip
    source = layer.tensors[0].view(-1)
    target = torch.empty_like(source, device=device.torch_device)
    peak = source.nbytes / min(_seconds(lambda: target.copy_(source, non_blocking=True)) for _ in range(5))
    with closing(cache_of(device, [layer], experts, torch.bfloat16, shape)) as cache:
        for _ in range(4):
            end_layer(cache, begin_layer(cache, 0, range(experts)))
            cache.flush()
            torch.cuda.synchronize()
        cache.settle_times()
        stats = cache.live_stats().total()
        assert stats.bytes_loaded_demand == 4 * experts * shape.nbytes(2)
        assert stats.link_s > 0
        rate = stats.bytes_loaded_demand / stats.link_s
        print(f"{name}: {rate / 1e9:.1f} of {peak / 1e9:.1f} GB/s = {rate / peak:.1%}")
        record_property("gbps", rate / 1e9)
        record_property("share_of_peak", rate / peak)


def _seconds(act: Any) -> float:
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    act()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) * 1e-3
