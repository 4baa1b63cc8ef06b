"""The loader's queue, seen through a device whose copies wait for the test.

The stand-in's link: order, rate, cancelling and closing, seen in the times that it gives to copies.

The CPU stand-in's link, and which device one gets.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

from tiermoe.actors.engine.cache import device as cpu_device
from tiermoe.actors.engine.cache.device import Copied, CpuDevice
from tiermoe.actors.engine.cache.link_queue import LinkQueue, copy_queue
from tiermoe.actors.engine.cache.loader import DEMAND, PREFETCH, Loader, LoadJob
from tiermoe.actors.engine.cache.slots import LayerWeights, SlotPool
from tiermoe.actors.engine.make_device import make_device
from tiermoe.actors.policies.residency import Reservation
from tiermoe.actors.settings import CopySettings, LinkSettings
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
        return Copied(1.0, 2.0, src)

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
    return LoadJob(Reservation(0, 0, 1), dst=(), src=name, after=None, layer=0, cause=cause)  # type: ignore


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


def test_first_come_first_served(loader: Loader, device: HeldDevice) -> None:
    submitted = jobs("abcd")
    loader.submit(submitted[:1], DEMAND)
    loader.submit(submitted[1:], DEMAND)
    assert order(device, 4) == "abcd"
    assert all(finished(item).copied == Copied(1.0, 2.0, item.src) for item in submitted)


def test_demand_overtakes_prefetch_but_does_not_interrupt_it(loader: Loader, device: HeldDevice) -> None:
    loader.submit(jobs("pqr", prefetch=True), PREFETCH)
    assert device.next() == "p"
    loader.submit(jobs("ab"), DEMAND)
    device.go.release()
    assert order(device, 4) == "abqr"


def test_done_is_set_after_the_copy_and_not_before(loader: Loader, device: HeldDevice) -> None:
    item = job("a")
    loader.submit([item], DEMAND)
    assert device.next() == "a"
    assert (item.started, item.done.is_set(), loader.pending) == (True, False, 1)
    device.go.release()
    assert finished(item).copied == Copied(1.0, 2.0, "a")


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


def test_promote_after_the_start_does_nothing(loader: Loader, device: HeldDevice) -> None:
    item = job("p", prefetch=True)
    loader.submit([item], PREFETCH)
    assert device.next() == "p"
    loader.promote(item)
    assert loader.pending == 1
    device.go.release()
    finished(item)
    loader.submit(jobs("z"), DEMAND)
    assert device.next() == "z"


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


def test_an_error_is_handed_to_its_job_and_the_loader_goes_on(loader: Loader, device: HeldDevice) -> None:
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


FLOATS = 5000
COPY_S = 0.25  # of FLOATS floats on SLOW; long enough that a busy machine asks for the next ones meanwhile
SLOW = LinkSettings(gbps=4e-9 * FLOATS / COPY_S)


@pytest.fixture
def link() -> Iterator[LinkQueue]:
    link = LinkQueue(SLOW)
    yield link
    link.close()


def link_job(link: LinkQueue, value: float = 0.0, dtype: torch.dtype = torch.float32) -> LoadJob:
    source = torch.full((FLOATS,), value, dtype=dtype)
    return LoadJob(
        Reservation(0, 0, 1), (torch.empty(FLOATS),), (source,), None, 0, "demand", done=link.event()
    )  # fmt: skip


def started(link_job: LoadJob) -> float:
    link_job.done.wait()
    assert link_job.copied is not None
    return link_job.copied.start_s


def in_order(jobs: Sequence[LoadJob]) -> bool:
    starts = [started(j) for j in jobs]
    return starts == sorted(starts)


def test_demand_overtakes_queued_prefetches(link: LinkQueue) -> None:
    running, guess, urgent = link_job(link), link_job(link), link_job(link)
    link.submit([running], DEMAND)
    link.submit([guess], PREFETCH)
    link.submit([urgent], DEMAND)
    assert in_order([running, urgent, guess])


def test_a_promoted_prefetch_goes_before_the_others(link: LinkQueue) -> None:
    running, guess, other = link_job(link), link_job(link), link_job(link)
    link.submit([running], DEMAND)
    link.submit([guess, other], PREFETCH)
    link.promote(other)
    assert in_order([running, other, guess])


def test_promoting_what_has_ended_changes_nothing(link: LinkQueue) -> None:
    ended = link_job(link)
    link.submit([ended], PREFETCH)
    ended.done.wait()
    link.promote(ended)
    assert link.pending == 0


def test_copies_follow_each_other_at_the_links_rate(link: LinkQueue) -> None:
    jobs = [link_job(link) for _ in range(3)]
    link.submit(jobs, DEMAND)
    starts = [started(j) for j in jobs]
    for earlier, later in zip(jobs, starts[1:], strict=False):
        assert earlier.copied is not None
        assert later == pytest.approx(earlier.copied.end_s)
    assert [j.copied.link_s for j in jobs if j.copied] == pytest.approx([COPY_S] * 3)
    assert all(j.copied.end_s - j.copied.start_s >= COPY_S - 1e-9 for j in jobs if j.copied)


def test_a_cancelled_copy_writes_nothing(link: LinkQueue) -> None:
    running, dropped = link_job(link, 1.0), link_job(link, 2.0)
    dropped.dst[0].zero_()
    link.submit([running, dropped], DEMAND)
    assert link.cancel(dropped)
    assert dropped.done.is_set()
    assert dropped.copied is None
    running.done.wait()
    assert not link.cancel(running)
    assert running.dst[0].eq(1.0).all()
    assert dropped.dst[0].eq(0.0).all()


def test_bfloat16_is_widened_exactly(link: LinkQueue) -> None:
    source = torch.randn(FLOATS).to(torch.bfloat16)
    target = torch.empty(FLOATS)
    load = LoadJob(Reservation(0, 0, 1), (target,), (source,), None, 0, "demand", done=link.event())
    link.submit([load], DEMAND)
    load.done.wait()
    assert torch.equal(target, source.float())


def test_closing_drops_what_is_queued_and_refuses_more() -> None:
    link = LinkQueue(SLOW)
    jobs = [link_job(link) for _ in range(20)]
    link.submit(jobs, PREFETCH)
    link.close()
    link.close()
    assert all(j.done.is_set() for j in jobs)
    assert jobs[-1].copied is None
    assert jobs[-1].error is None
    late = link_job(link)
    with pytest.raises(RuntimeFailure, match="closed"):
        link.submit([late], DEMAND)
    assert late.done.is_set()
    assert late.copied is None


def test_a_latency_is_added_to_each_copy() -> None:
    link = LinkQueue(LinkSettings(latency_us=3000.0))
    load = link_job(link)
    link.submit([load], DEMAND)
    load.done.wait()
    link.close()
    assert load.copied is not None
    assert load.copied.link_s == pytest.approx(0.003)


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
    link = copy_queue(CpuDevice(LinkSettings()), pool, weights(stored))
    link.close()
    assert isinstance(link, LinkQueue if native else Loader)


def test_promises_are_left_to_the_loader_that_can_wait_for_them() -> None:
    class Remote:
        def expert(self, index: int) -> tuple[torch.Tensor, ...]:
            raise AssertionError("not asked here")

    shape = ExpertShape(num_experts=4, intermediate=8, hidden=16, gates=2, has_bias=False)
    pool = SlotPool.allocate(shape, 2, torch.float32, torch.device("cpu"))
    assert not LinkQueue.supports(pool, [*weights(torch.bfloat16), Remote()])


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


def test_a_copy_takes_latency_and_bytes_over_bandwidth(clock: Clock) -> None:
    copied = copy(CpuDevice(LinkSettings(gbps=0.001, latency_us=500)), 4000)
    assert copied.start_s == 100.0
    assert copied.end_s - copied.start_s == pytest.approx(0.0005 + 4000 / 1e6)
    assert clock.now_s == pytest.approx(copied.end_s)
    assert copied.event is None


def test_copies_follow_each_other_without_overlap(clock: Clock) -> None:
    device = CpuDevice(LinkSettings(gbps=0.001))
    first, second = copy(device), copy(device)
    assert second.start_s == pytest.approx(first.end_s)
    clock.now_s += 5.0
    third = copy(device)
    assert third.start_s == pytest.approx(second.end_s + 5.0)  # an idle link starts at once
    assert third.end_s == pytest.approx(third.start_s + 0.004)


def test_all_tensors_of_an_expert_share_one_latency(clock: Clock) -> None:
    device = CpuDevice(LinkSettings(gbps=0.001, latency_us=1000))
    source = (torch.zeros(10), torch.zeros(30))
    copied = device.copy(tuple(map(torch.empty_like, source)), source, None)
    assert copied.end_s - copied.start_s == pytest.approx(0.001 + 160 / 1e6)


def test_the_link_carries_the_bytes_of_the_slot(clock: Clock) -> None:
    device = CpuDevice(LinkSettings(gbps=0.001))
    source = torch.zeros(100, dtype=torch.bfloat16)
    copied = device.copy((torch.empty(100),), (source,), None)
    assert copied.end_s - copied.start_s == pytest.approx(400 / 1e6)


def test_no_rate_no_wait(clock: Clock) -> None:
    copy(CpuDevice(LinkSettings()))
    assert clock.slept_s == 0.0
    copy(CpuDevice(LinkSettings(latency_us=7)))
    assert clock.slept_s == pytest.approx(7e-6)


def test_the_real_clock_is_never_faster_than_the_link() -> None:
    device, copies, nbytes = CpuDevice(LinkSettings(gbps=0.01, latency_us=200)), 5, 40_000
    began_s = time.perf_counter()
    spans = [copy(device, nbytes) for _ in range(copies)]
    each_s = 200e-6 + nbytes / 0.01e9
    assert time.perf_counter() - began_s >= copies * each_s
    assert all(span.end_s - span.start_s >= each_s * 0.999 for span in spans)
    assert all(later.start_s >= earlier.end_s for earlier, later in pairwise(spans))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_widening_is_exact(stored: torch.dtype) -> None:
    source = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(stored)
    slot = torch.full((64,), float("nan"))
    CpuDevice(LinkSettings()).copy((slot,), (source,), None)
    assert torch.equal(slot.to(stored), source)
    assert torch.equal(slot, source.float())


def test_a_tensor_too_many_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        CpuDevice(LinkSettings()).copy((torch.zeros(2),), (torch.zeros(2), torch.zeros(2)), None)


def test_the_cpu_does_not_claim_what_it_cannot() -> None:
    device = CpuDevice(LinkSettings())
    assert (device.executor, device.torch_device, device.mark_use()) == ("emulated", torch.device("cpu"), None)
    assert device.pin([], CopySettings()) == ([], None)


@pytest.mark.parametrize("kind", ["cpu", "auto"])
def test_without_cuda(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(make_device(kind, LinkSettings()), CpuDevice)
    with pytest.raises(ConfigError, match="--device cpu"):
        make_device("cuda", LinkSettings())
