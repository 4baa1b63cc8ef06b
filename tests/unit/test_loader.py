"""Copies to the stand-in for a GPU: the loader's queue, the link's order, rate, cancelling and closing, the device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from cache_rigs import EXPERTS, LAYERS, begin_layer, end_layer
from channel_peer import wait_until
from orders_reference import Lru

from tiermoe.actors.core import _core
from tiermoe.actors.engine.cache import device as cpu_device
from tiermoe.actors.engine.cache.cache import ExpertCache
from tiermoe.actors.engine.cache.device import Copied, CpuDevice
from tiermoe.actors.engine.cache.loader import DEMAND, PREFETCH, Loader, LoadJob
from tiermoe.actors.engine.cache.slot_map import SlotMap
from tiermoe.actors.engine.cache.slots import LayerWeights, SlotPool
from tiermoe.actors.engine.make_cache import make_link
from tiermoe.actors.engine.make_device import make_device
from tiermoe.actors.engine.stats import EngineStats, LayerStats, Timeline
from tiermoe.actors.policies.residency import State
from tiermoe.actors.settings import LinkSettings
from tiermoe.actors.store.format import ExpertShape
from tiermoe.errors import ConfigError, RuntimeFailure

TIMEOUT_S = 30


class HeldDevice:
    """Copies nothing; each copy reports its start and then waits for `go`."""

    torch_device: Any = None
    executor = "emulated"

    def __init__(self) -> None:
        self.started: queue.Queue[str] = queue.Queue()
        self.go = threading.Semaphore(0)
        self.fail: BaseException | None = None

    def enter(self) -> None: ...
    def mark_use(self) -> None: ...

    def copy(self, dst: Any, src: Any, after: Any) -> Copied:
        self.started.put(src)
        assert self.go.acquire(timeout=TIMEOUT_S)
        if self.fail is not None:
            raise self.fail
        return Copied(ord(src), 200.0)

    def wait(self, copied: Copied) -> None: ...

    def pin_host(self, tensors: Any) -> bool:
        return False

    def next(self) -> str:
        """The name of the next copy to start."""
        return self.started.get(timeout=TIMEOUT_S)


@pytest.fixture
def device() -> HeldDevice:
    return HeldDevice()


@pytest.fixture
def loader(device: HeldDevice) -> Iterator[Loader]:
    loader = Loader(device)
    yield loader
    for _ in range(50):
        device.go.release()
    loader.close()


def job(name: str, prefetch: bool = False) -> LoadJob:
    cause = "prefetch" if prefetch else "demand"
    return LoadJob(0, 0, dst=(), src=name, after=None, layer=0, cause=cause)  # type: ignore[arg-type]


def jobs(names: str, prefetch: bool = False) -> list[LoadJob]:
    return [job(name, prefetch) for name in names]


def order(device: HeldDevice, count: int) -> str:
    """Let `count` copies through, one at a time."""
    out = ""
    for _ in range(count):
        out += device.next()
        device.go.release()
    return out


def finished(item: LoadJob) -> LoadJob:
    assert item.done.wait(TIMEOUT_S)
    return item


def test_demand_overtakes_prefetch_but_does_not_interrupt_it(loader: Loader, device: HeldDevice) -> None:
    loader.submit(jobs("pqr", prefetch=True), PREFETCH)
    assert device.next() == "p"
    loader.submit(jobs("ab"), DEMAND)
    device.go.release()
    assert order(device, 4) == "abqr"


def test_promote_puts_a_prefetch_behind_earlier_demand(loader: Loader, device: HeldDevice) -> None:
    prefetched = jobs("pqr", prefetch=True)
    loader.submit(jobs("x"), DEMAND)
    assert device.next() == "x"
    loader.submit(prefetched, PREFETCH)
    loader.submit(jobs("a"), DEMAND)
    loader.promote(prefetched[1])
    loader.submit(jobs("b"), DEMAND)
    device.go.release()
    assert order(device, 5) == "aqbpr"
    assert prefetched[1].prefetch  # why it was asked for stays known


def test_cancel_before_the_start(loader: Loader, device: HeldDevice) -> None:
    item = job("p", prefetch=True)
    loader.submit(jobs("x"), DEMAND)
    assert device.next() == "x"
    loader.submit([item], PREFETCH)
    assert loader.cancel(item) is True
    assert (item.cancelled, item.done.is_set(), item.copied, item.error) == (True, True, None, None)
    assert loader.pending == 1
    loader.promote(item)  # a cancelled copy does not come back
    loader.submit(jobs("y"), DEMAND)
    device.go.release()
    assert order(device, 1) == "y"


def test_cancel_after_the_start_is_refused(loader: Loader, device: HeldDevice) -> None:
    item = job("p", prefetch=True)
    loader.submit([item], PREFETCH)
    assert device.next() == "p"
    assert loader.cancel(item) is False
    assert not item.cancelled
    device.go.release()
    assert finished(item).copied is not None
    assert loader.cancel(item) is False


def test_an_error_reaches_its_job_and_the_loader_continues(loader: Loader, device: HeldDevice) -> None:
    bad, good = jobs("ab")
    device.fail = MemoryError("no")
    loader.submit([bad], DEMAND)
    assert order(device, 1) == "a"
    assert finished(bad).error is device.fail
    assert bad.copied is None
    device.fail = None
    loader.submit([good], DEMAND)
    assert order(device, 1) == "b"
    assert finished(good).copied is not None


def test_close_finishes_the_copy_under_way_and_drops_the_rest(device: HeldDevice) -> None:
    loader = Loader(device)
    under_way, *queued = jobs("abc")
    loader.submit([under_way, *queued], DEMAND)
    assert device.next() == "a"
    closing = threading.Thread(target=loader.close)
    closing.start()
    assert all(finished(item).cancelled for item in queued)  # dropped at once ...
    assert not under_way.done.is_set()  # ... while the first goes on
    device.go.release()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    assert under_way.copied is not None
    assert device.started.empty()
    assert (loader.pending, loader._thread.is_alive()) == (0, False)


def test_after_close(device: HeldDevice) -> None:
    loader = Loader(device)
    loader.close()
    loader.close()
    late = job("a")
    with pytest.raises(RuntimeFailure, match="closed"):
        loader.submit([late], DEMAND)
    assert late.done.is_set()  # nobody waits for what will never come
    assert late.cancelled
    assert loader.pending == 0


SMALL = ExpertShape(num_experts=EXPERTS, hidden=8, intermediate=6, gates=2, has_bias=False)
BYTES = SMALL.nbytes(4)
COPY_S = 0.15  # on SLOW; long enough that a busy machine asks for the next ones meanwhile
SLOW = LinkSettings(gbps=1e-9 * BYTES / COPY_S)


class Linked:
    """A cache of float32 slots behind the stand-in's link, and bfloat16 experts."""

    def __init__(self, link: LinkSettings = SLOW, slots: int = LAYERS * EXPERTS, writeback: bool = False) -> None:
        made = [tuple(torch.randn(s).bfloat16() for s in SMALL.stacked().values()) for _ in range(LAYERS)]
        self.weights = [LayerWeights(tensors) for tensors in made]
        self.pool = SlotPool.allocate(SMALL, slots, torch.float32, torch.device("cpu"))
        for tensor in self.pool.tensors:
            tensor.zero_()
        device = CpuDevice(link)
        where = SlotMap(self.pool, self.weights, EXPERTS, slots, BYTES)
        found = make_link(device, where)
        assert isinstance(found.core, _core.ThreadLink)
        self.cache = ExpertCache(
            where, found, Lru(), EngineStats(layers=[LayerStats() for _ in range(LAYERS)]), Timeline(False),
            writeback=writeback,
        )  # fmt: skip
        self._seen = _core.Watched()
        self.cache.core.watch(self._seen)

    def copies(self) -> list[tuple[int, float, float, float]]:
        """Lets all arrive; expert, start, end and seconds of the link of each copy that has, in order of starting."""
        self.cache.core.wait_all()
        self.cache.check_integrity()
        found = [(key, *times) for wait, _, key, _, *times in self._seen.take() if not wait]
        return sorted(found, key=lambda copy: copy[1])

    def await_idle(self) -> None:
        """The link has copied all; nobody has looked yet."""
        wait_until(lambda: not self.cache.link.pending)

    def order(self) -> list[int]:
        return [key for key, *_ in self.copies()]

    def holds(self, key: int) -> bool:
        """Whether its slot has its bytes."""
        slot = self.pool.slot(self.cache.residency.slot(key))
        stored = self.weights[key // EXPERTS].expert(key % EXPERTS)
        return all(torch.equal(have, want.float()) for have, want in zip(slot, stored, strict=True))


@pytest.fixture
def linked() -> Iterator[Linked]:
    made = Linked()
    yield made
    made.cache.close()


def test_demand_overtakes_queued_prefetches(linked: Linked) -> None:
    begin_layer(linked.cache, 0, [3])
    linked.cache.prefetch([5])
    begin_layer(linked.cache, 0, [1])
    assert linked.order() == [3, 1, 5]


def test_a_promoted_prefetch_goes_before_the_others(linked: Linked) -> None:
    begin_layer(linked.cache, 0, [3])
    linked.cache.prefetch([8, 0])
    begin_layer(linked.cache, 0, [0])
    assert linked.order() == [3, 0, 8]


def test_copies_follow_each_other_at_the_links_rate(linked: Linked) -> None:
    begin_layer(linked.cache, 0, [0, 1, 2])
    copies = linked.copies()
    for (_, _, end_s, _), (_, start_s, _, _) in pairwise(copies):
        assert start_s == pytest.approx(end_s)
    assert [link_s for *_, link_s in copies] == pytest.approx([COPY_S] * 3)
    assert all(end_s - start_s >= COPY_S - 1e-9 for _, start_s, end_s, _ in copies)


def test_a_cancelled_copy_writes_nothing(linked: Linked) -> None:
    linked.cache.prefetch([4])
    linked.await_idle()
    begin_layer(linked.cache, 0, [0], arrivals=False)
    linked.cache.prefetch([8])
    where = linked.pool.slot(linked.cache.residency.slot(8))
    linked.cache.core.drop_stale(2, [])
    linked.cache.core.drop_stale(1, [])  # too late: it is there
    assert [linked.cache.residency.state(key) for key in (4, 8)] == [State.LOADING, State.ABSENT]
    assert linked.order() == [4, 0]
    assert linked.holds(4)  # widened, and exactly
    assert linked.holds(0)
    assert all(tensor.eq(0.0).all() for tensor in where)


def test_closing_drops_what_is_queued_and_refuses_more(linked: Linked) -> None:
    linked.cache.prefetch(range(8))
    linked.cache.close()
    linked.cache.close()
    assert linked.cache.link.pending == 0
    with pytest.raises(RuntimeFailure, match="closed during a forward"):
        linked.cache.core.wait_all()
    with pytest.raises(RuntimeFailure, match="closed"):
        begin_layer(linked.cache, 2, [8], arrivals=False)
    with pytest.raises(RuntimeFailure, match="closed"):
        linked.cache.prefetch([9])


def test_a_latency_is_added_to_each_copy() -> None:
    linked = Linked(LinkSettings(latency_us=3000.0))
    begin_layer(linked.cache, 0, [0])
    ((_, _, _, link_s),) = linked.copies()
    assert link_s == pytest.approx(0.003)
    linked.cache.close()


def test_a_write_back_and_the_load_after_it_are_one_copy_with_one_latency() -> None:
    """The slot's float32 goes back, the expert's bfloat16 comes: the link's time is shared by these bytes."""
    linked = Linked(LinkSettings(gbps=BYTES * 1e-6, latency_us=2000.0), slots=1, writeback=True)
    for layer in range(2):
        end_layer(linked.cache, begin_layer(linked.cache, layer, [layer * EXPERTS]))
    first, second = (link_s for *_, link_s in linked.copies())
    assert (first, second) == pytest.approx((0.003, 0.004))
    stats = linked.cache.live_stats().layers
    assert (stats[0].writebacks, stats[1].writebacks) == (0, 1)
    assert stats[1].bytes_written_back == BYTES
    assert stats[1].writeback_link_s == pytest.approx(second * 2 / 3)
    assert 0 < stats[1].writeback_blocked_s < stats[1].blocked_io_s
    linked.cache.close()


def weights(dtype: torch.dtype) -> list[LayerWeights]:
    return [LayerWeights((torch.zeros(4, 8, 2, 16, dtype=dtype), torch.zeros(4, 8, 16, dtype=dtype)))]


@pytest.mark.parametrize(
    ("stored", "kept", "native"),
    [
        (torch.bfloat16, torch.float32, True),
        (torch.float32, torch.float32, True),
        (torch.bfloat16, torch.bfloat16, True),
        (torch.float16, torch.float32, False),
        (torch.float32, torch.bfloat16, False),
    ],
)
def test_what_it_cannot_convert_is_left_to_torch(stored: torch.dtype, kept: torch.dtype, native: bool) -> None:
    shape = ExpertShape(num_experts=4, intermediate=8, hidden=16, gates=2, has_bias=False)
    pool = SlotPool.allocate(shape, 2, kept, torch.device("cpu"))
    link = make_link(CpuDevice(LinkSettings()), SlotMap(pool, weights(stored), 4, 2, BYTES)).core
    link.close()
    assert isinstance(link, _core.ThreadLink if native else _core.PythonLink)


class Clock:
    """`time` for the device: passes only when slept."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(cpu_device, "time", clock)
    return clock


def copy(device: CpuDevice, nbytes: int = 4000) -> Copied:
    source = torch.arange(nbytes // 4, dtype=torch.float32)
    return device.copy((torch.empty_like(source),), (source,), None)


@pytest.mark.parametrize(
    ("link", "sources", "seconds"),
    [
        (LinkSettings(gbps=0.001, latency_us=500), [torch.zeros(1000)], 0.0005 + 4000 / 1e6),
        # all tensors of an expert share one latency
        (LinkSettings(gbps=0.001, latency_us=1000), [torch.zeros(10), torch.zeros(30)], 0.001 + 160 / 1e6),
        (LinkSettings(gbps=0.001), [torch.zeros(100, dtype=torch.bfloat16)], 400 / 1e6),  # the bytes of the slot
        (LinkSettings(), [torch.zeros(1000)], 0.0),
        (LinkSettings(latency_us=7), [torch.zeros(1000)], 7e-6),
    ],
)
def test_a_copy_takes_latency_and_bytes_over_bandwidth(
    link: LinkSettings, sources: list[torch.Tensor], seconds: float, clock: Clock
) -> None:
    copied = CpuDevice(link).copy(tuple(torch.empty(s.shape) for s in sources), tuple(sources), None)
    assert copied.start_s == 100.0
    assert copied.end_s - copied.start_s == pytest.approx(seconds)
    assert clock.slept_s == pytest.approx(seconds)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_widening_is_exact(stored: torch.dtype) -> None:
    source = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(stored)
    slot = torch.full((64,), float("nan"))
    CpuDevice(LinkSettings()).copy((slot,), (source,), None)
    assert torch.equal(slot.to(stored), source)
    assert torch.equal(slot, source.float())


@pytest.mark.parametrize("kind", ["cpu", "auto"])
def test_without_cuda(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(make_device(kind, LinkSettings()), CpuDevice)
    with pytest.raises(ConfigError, match="--device cpu"):
        make_device("cuda", LinkSettings())
