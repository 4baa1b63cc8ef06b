"""The loader's queue, seen through a device whose copies wait for the test."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tiermoe.actors.engine.cache.device import Copied
from tiermoe.actors.engine.cache.loader import DEMAND, PREFETCH, Loader, LoadJob
from tiermoe.actors.policies.residency import Reservation
from tiermoe.errors import RuntimeFailure

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
