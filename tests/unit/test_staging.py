"""Pinned memory: what is registered, what is copied, what is staged, and that staged copies arrive whole."""

from __future__ import annotations

import mmap
from types import SimpleNamespace

import pytest
import torch
from fake_gpu import FakeGpu

from tiermoe.actors.core import _core
from tiermoe.actors.engine.cache.device import CpuDevice
from tiermoe.actors.engine.cache.low_bits import ReplicaWeights
from tiermoe.actors.engine.cache.slot_map import SlotMap
from tiermoe.actors.engine.cache.slots import LayerWeights, SlotPool
from tiermoe.actors.engine.cache.sources import Sources
from tiermoe.actors.engine.cuda.device import CudaDevice
from tiermoe.actors.engine.cuda.staging import Staging
from tiermoe.actors.engine.make_cache import make_link, pinned_layers
from tiermoe.actors.settings import CopySettings, LinkSettings
from tiermoe.actors.store.format import ExpertShape
from tiermoe.kernels.pack import PackedShape

PAGE = mmap.PAGESIZE
FLOATS = 1000


def layer(value: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> LayerWeights:
    """Two tensors that share a page, as those of a layer file may."""
    backing = torch.frombuffer(mmap.mmap(-1, 4 * FLOATS * dtype.itemsize), dtype=dtype).fill_(value)
    return LayerWeights((backing[: 3 * FLOATS].view(3, FLOATS), backing[3 * FLOATS :].view(1, FLOATS)))


def layers(count: int) -> list[LayerWeights]:
    return [layer(float(i)) for i in range(count)]


BYTES = 4 * FLOATS * 2


def device(pin_all: bool = False) -> tuple[FakeGpu, CudaDevice]:
    gpu = FakeGpu(pin_all=pin_all)
    return gpu, CudaDevice(gpu, staging_bytes=128)


@pytest.mark.parametrize(("stored", "kept"), [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_staged_copies_arrive_whole(stored: torch.dtype, kept: torch.dtype) -> None:
    """In chunks of two buffers and a third for casts, in any order that the GPU may take."""
    for seed in range(10):
        gpu = FakeGpu(seed)
        staging = Staging(gpu, 96)
        for size in (1, 48, 96, 1000):
            source = (torch.randn(size).to(stored), torch.randn(2, size).to(stored))
            slot = tuple(torch.full(s.shape, float("nan"), dtype=kept) for s in source)
            used = gpu.event(timing=False)
            gpu.record(used, gpu.compute)
            staging.copy(slot, source, used)
            for found, wanted in zip(slot, source, strict=True):
                assert torch.equal(found, wanted.to(kept))
        gpu.finish()


def test_a_staged_copy_waits_for_the_slots_last_use() -> None:
    for seed in range(10):
        gpu = FakeGpu(seed)
        cuda, slot = CudaDevice(gpu, staging_bytes=64), (torch.zeros(100),)
        seen: list[float] = []
        gpu.kernel(slot, lambda seen=seen, slot=slot: seen.append(float(slot[0].sum())))  # type: ignore[misc]
        copied = cuda.copy(slot, (torch.ones(100),), cuda.mark_use())
        assert seen == [0.0]
        assert slot[0].sum() == 100.0
        assert copied.link_s == copied.end_s - copied.start_s


def file_of(count: int, gap: int = 0) -> list[LayerWeights]:
    """Layers in one mapping, each beginning within the page in which the one before ends."""
    size = 4 * FLOATS + gap
    backing = torch.frombuffer(mmap.mmap(-1, count * size * 2 + PAGE), dtype=torch.bfloat16)[100:]
    parts = [backing[i * size : i * size + 4 * FLOATS] for i in range(count)]
    return [LayerWeights((p[: 3 * FLOATS].view(3, FLOATS), p[3 * FLOATS :].view(1, FLOATS))) for p in parts]


def test_layers_of_one_file_are_registered_together() -> None:
    """Guards against a range a layer: neighbours share a page, so every second one was refused and staged."""
    gpu, cuda = device()
    mapped = file_of(7)
    found, report = cuda.pin(mapped, CopySettings())
    assert found == mapped
    assert (report.registered, report.staged, report.problem) == (7 * BYTES, 0, None)
    assert all(cuda.is_pinned(one.tensors) for one in mapped)
    assert len(gpu.registered) == 1
    cuda.close()
    assert not gpu.registered


def test_layers_whose_tensors_lie_between_each_others() -> None:
    """All first tensors in one range, all second ones in another."""
    gpu, cuda = device()
    first, second = (torch.frombuffer(mmap.mmap(-1, 5 * FLOATS * 2), dtype=torch.bfloat16) for _ in range(2))
    parts = [slice(i * FLOATS, (i + 1) * FLOATS) for i in range(5)]
    mapped = [LayerWeights((first[part].view(1, FLOATS), second[part].view(1, FLOATS))) for part in parts]
    _, report = cuda.pin(mapped, CopySettings())
    assert (report.registered, report.staged) == (5 * 2 * FLOATS * 2, 0)
    assert len(gpu.registered) == 2


def test_the_limit_holds() -> None:
    cuda = device()[1]
    mapped = layers(3)
    _, report = cuda.pin(mapped, CopySettings(pinned_gib=2.5 * BYTES / 2**30))
    assert (report.registered, report.staged) == (2 * BYTES, BYTES)
    assert report.problem is not None
    assert "limit" in report.problem
    assert [cuda.is_pinned(one.tensors) for one in mapped] == [True, True, False]
    _, none = device()[1].pin(mapped, CopySettings(pinned_gib=0))
    assert none.staged == 3 * BYTES


def test_a_refused_layer_is_staged_or_copied() -> None:
    gpu, cuda = device()
    mapped = layers(2)
    first = mapped[0].tensors[0].data_ptr()
    gpu.refuse = lambda address, nbytes: address <= first < address + nbytes
    found, report = cuda.pin(mapped, CopySettings())
    assert (report.registered, report.staged, report.problem) == (BYTES, BYTES, "refused")
    assert found == mapped
    found, report = cuda.pin(mapped, CopySettings(unpinned="copy"))
    assert (report.registered, report.copied, report.staged) == (BYTES, BYTES, 0)
    assert found[1] is mapped[1]
    assert all(torch.equal(a, b) for a, b in zip(found[0].tensors, mapped[0].tensors, strict=True))
    assert cuda.is_pinned(found[0].tensors)
    gpu.refuse, fresh = lambda address, nbytes: True, layers(1)
    found, report = cuda.pin(fresh, CopySettings(unpinned="copy"))
    assert (report.copied, report.staged) == (0, BYTES)
    assert found == fresh
    assert found[0].tensors[0].data_ptr() != first


def test_layers_are_copied_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the limit, and pinned in place where there is no room for a copy."""
    cuda = device()[1]
    mapped = layers(3)
    found, report = cuda.pin(mapped, CopySettings(pin="copy", pinned_gib=2.5 * BYTES / 2**30))
    assert (report.registered, report.copied, report.staged) == (0, 2 * BYTES, BYTES)
    assert found[2] is mapped[2]
    for copy, one in zip(found[:2], mapped, strict=False):
        assert cuda.is_pinned(copy.tensors)
        assert not cuda.is_pinned(one.tensors)
        assert copy.tensors[0].data_ptr() != one.tensors[0].data_ptr()
        assert all(torch.equal(a, b) for a, b in zip(copy.tensors, one.tensors, strict=True))

    def full(*_: object, **__: object) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", full)
    found, report = cuda.pin(mapped[2:], CopySettings(pin="copy"))
    assert (report.registered, report.copied, report.problem) == (BYTES, 0, None)
    assert found == mapped[2:]


def test_a_layer_of_which_the_host_holds_no_copy_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cuda = device()
    gpu.refuse = lambda address, nbytes: True
    mapped = layers(1)

    def full(*_: object, **__: object) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", full)
        found, report = cuda.pin(mapped, CopySettings(unpinned="copy"))
    assert found == mapped
    assert (report.copied, report.staged) == (0, BYTES)


def test_a_layer_refused_in_part_stays_pinned_in_no_part() -> None:
    """Its first tensor was registered when the second was refused: that would count for nothing, and against nobody."""
    gpu, cuda = device()
    far = torch.frombuffer(mmap.mmap(-1, 40 * PAGE), dtype=torch.bfloat16)
    one = LayerWeights((far[:FLOATS].view(1, FLOATS), far[10 * PAGE : 10 * PAGE + FLOATS].view(1, FLOATS)))
    last = one.tensors[1].data_ptr()
    gpu.refuse = lambda address, nbytes: address <= last < address + nbytes
    _, report = cuda.pin([one], CopySettings())
    assert (report.registered, report.staged) == (0, 2 * FLOATS * 2)
    assert not gpu.registered
    assert not cuda.is_pinned(one.tensors[:1])
    cuda.close()


def test_replicas_are_pinned_within_what_experts_leave_of_the_limit() -> None:
    gpu, cuda = device()
    settings = CopySettings(pinned_gib=3.5 * BYTES / 2**30)
    _, experts = cuda.pin(layers(2), settings)
    replicas, both = ReplicaWeights(PackedShape(32, 32, 4, 32), layers(2)).pinned_by(cuda, settings, experts)
    assert (both.registered, both.staged) == (3 * BYTES, BYTES)
    assert both.problem is not None
    assert len(gpu.registered) == 3
    assert [cuda.is_pinned(one.tensors) for one in replicas.layers] == [True, False]
    cpu = CpuDevice(LinkSettings())
    assert ReplicaWeights(replicas.shape, replicas.layers).pinned_by(cpu, settings, None)[1] is None


def test_sources_give_the_copies_from_then_on() -> None:
    gpu, cuda = device()
    mapped = layers(2)
    theirs = [one.tensors[0].data_ptr() for one in mapped]
    gpu.refuse = lambda address, nbytes: any(address <= first < address + nbytes for first in theirs)
    sources = Sources(list(mapped), list(mapped), None)
    report = sources.pin(cuda, CopySettings(unpinned="copy"))
    assert report.copied == 2 * BYTES
    assert [id(layer) for layer in sources.weights] == [id(layer) for layer in sources.mapped]
    assert not {id(layer) for layer in sources.mapped} & {id(layer) for layer in mapped}
    assert sources.pin(CpuDevice(LinkSettings()), CopySettings()) is None


def test_a_shard_pins_its_own_experts_alone() -> None:
    """Once each shard pinned all experts: with 8 GPUs each page was registered eight times."""
    tensors = [torch.frombuffer(mmap.mmap(-1, 4 * 8 * PAGE), dtype=torch.bfloat16) for _ in range(4)]
    mapped = [LayerWeights((a.view(4, -1), b.view(4, -1))) for a, b in zip(tensors[::2], tensors[1::2], strict=True)]
    pages = set[int]()
    for shard in range(2):
        gpu, cuda = device()
        sources, own = Sources(list(mapped), list(mapped), None), [key for key in range(8) if key % 2 == shard]
        report = sources.pin(cuda, CopySettings(), own, experts=4)
        assert (report.registered, report.staged) == (64 * PAGE, 0)  # half of both layers
        assert sources.weights == mapped
        pinned = {page for at, nbytes in gpu.registered.items() for page in range(at, at + nbytes, PAGE)}
        assert len(pinned) == 64
        assert not pages & pinned
        pages |= pinned
        where = SimpleNamespace(weights=mapped, keys=8, experts=4, low_bit=None)
        assert pinned_layers(cuda, where, own) == [True, True]  # type: ignore[arg-type]
        assert pinned_layers(cuda, where) == [False, False]  # type: ignore[arg-type]
        assert pinned_layers(cuda, where, [1 - shard]) == [False, True]  # type: ignore[arg-type]
    for copying in (CopySettings(pin="copy"), CopySettings(unpinned="copy")):
        sources = Sources(list(mapped), list(mapped), None)
        assert sources.pin(device()[1], copying, [0], experts=4).staged == 0  # whole layers


def test_the_queue_follows_the_device_and_what_is_pinned() -> None:
    shape = ExpertShape(num_experts=2, intermediate=4, hidden=8, gates=2, has_bias=False)
    stores = [
        LayerWeights((one.tensors[0].view(-1)[:128].view(2, 4, 2, 8), one.tensors[0].view(-1)[128:192].view(2, 4, 8)))
        for one in layers(2)
    ]
    pool = SlotPool.allocate(shape, 2, torch.float32, torch.device("cpu"))
    where = SlotMap(pool, stores, 2, 2, shape.nbytes(4))
    link = make_link(CpuDevice(LinkSettings()), where).core
    assert isinstance(link, _core.ThreadLink)
    link.close()
    gpu, cuda = device()
    gpu.refuse = lambda address, nbytes: len(gpu.registered) == 1
    cuda.pin(stores, CopySettings())
    assert pinned_layers(cuda, where) == [True, False]
    streams = make_link(cuda, where, CopySettings(ahead_mib=2)).core
    assert isinstance(streams, _core.StreamLink)
    streams.close()
