"""The stand-in's link: order, rate, cancelling and closing, seen in the times that it gives to copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from tiermoe.actors.engine.cache.device import CpuDevice
from tiermoe.actors.engine.cache.link_queue import LinkQueue, copy_queue
from tiermoe.actors.engine.cache.loader import DEMAND, PREFETCH, Loader, LoadJob
from tiermoe.actors.engine.cache.slots import LayerWeights, SlotPool
from tiermoe.actors.policies.residency import Reservation
from tiermoe.actors.settings import LinkSettings
from tiermoe.actors.store.format import ExpertShape
from tiermoe.errors import RuntimeFailure

FLOATS = 5000
COPY_S = 0.25  # of FLOATS floats on SLOW; long enough that a busy machine asks for the next ones meanwhile
SLOW = LinkSettings(gbps=4e-9 * FLOATS / COPY_S)


@pytest.fixture
def queue() -> Iterator[LinkQueue]:
    queue = LinkQueue(SLOW)
    yield queue
    queue.close()


def job(queue: LinkQueue, value: float = 0.0, dtype: torch.dtype = torch.float32) -> LoadJob:
    source = torch.full((FLOATS,), value, dtype=dtype)
    return LoadJob(
        Reservation(0, 0, 1), (torch.empty(FLOATS),), (source,), None, 0, "demand", done=queue.event()
    )  # fmt: skip


def started(job: LoadJob) -> float:
    job.done.wait()
    assert job.copied is not None
    return job.copied.start_s


def in_order(jobs: Sequence[LoadJob]) -> bool:
    starts = [started(j) for j in jobs]
    return starts == sorted(starts)


def test_demand_overtakes_queued_prefetches(queue: LinkQueue) -> None:
    running, guess, urgent = job(queue), job(queue), job(queue)
    queue.submit([running], DEMAND)
    queue.submit([guess], PREFETCH)
    queue.submit([urgent], DEMAND)
    assert in_order([running, urgent, guess])


def test_a_promoted_prefetch_goes_before_the_others(queue: LinkQueue) -> None:
    running, guess, other = job(queue), job(queue), job(queue)
    queue.submit([running], DEMAND)
    queue.submit([guess, other], PREFETCH)
    queue.promote(other)
    assert in_order([running, other, guess])


def test_promoting_what_has_ended_changes_nothing(queue: LinkQueue) -> None:
    ended = job(queue)
    queue.submit([ended], PREFETCH)
    ended.done.wait()
    queue.promote(ended)
    assert queue.pending == 0


def test_copies_follow_each_other_at_the_links_rate(queue: LinkQueue) -> None:
    jobs = [job(queue) for _ in range(3)]
    queue.submit(jobs, DEMAND)
    starts = [started(j) for j in jobs]
    for earlier, later in zip(jobs, starts[1:], strict=False):
        assert earlier.copied is not None
        assert later == pytest.approx(earlier.copied.end_s)
    assert [j.copied.link_s for j in jobs if j.copied] == pytest.approx([COPY_S] * 3)
    assert all(j.copied.end_s - j.copied.start_s >= COPY_S - 1e-9 for j in jobs if j.copied)


def test_a_cancelled_copy_writes_nothing(queue: LinkQueue) -> None:
    running, dropped = job(queue, 1.0), job(queue, 2.0)
    dropped.dst[0].zero_()
    queue.submit([running, dropped], DEMAND)
    assert queue.cancel(dropped)
    assert dropped.done.is_set()
    assert dropped.copied is None
    running.done.wait()
    assert not queue.cancel(running)
    assert running.dst[0].eq(1.0).all()
    assert dropped.dst[0].eq(0.0).all()


def test_bfloat16_is_widened_exactly(queue: LinkQueue) -> None:
    source = torch.randn(FLOATS).to(torch.bfloat16)
    target = torch.empty(FLOATS)
    load = LoadJob(Reservation(0, 0, 1), (target,), (source,), None, 0, "demand", done=queue.event())
    queue.submit([load], DEMAND)
    load.done.wait()
    assert torch.equal(target, source.float())


def test_closing_drops_what_is_queued_and_refuses_more() -> None:
    queue = LinkQueue(SLOW)
    jobs = [job(queue) for _ in range(20)]
    queue.submit(jobs, PREFETCH)
    queue.close()
    queue.close()
    assert all(j.done.is_set() for j in jobs)
    assert jobs[-1].copied is None
    assert jobs[-1].error is None
    late = job(queue)
    with pytest.raises(RuntimeFailure, match="closed"):
        queue.submit([late], DEMAND)
    assert late.done.is_set()
    assert late.copied is None


def test_a_latency_is_added_to_each_copy() -> None:
    queue = LinkQueue(LinkSettings(latency_us=3000.0))
    load = job(queue)
    queue.submit([load], DEMAND)
    load.done.wait()
    queue.close()
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
    queue = copy_queue(CpuDevice(LinkSettings()), pool, weights(stored))
    queue.close()
    assert isinstance(queue, LinkQueue if native else Loader)


def test_promises_are_left_to_the_loader_that_can_wait_for_them() -> None:
    class Remote:
        def expert(self, index: int) -> tuple[torch.Tensor, ...]:
            raise AssertionError("not asked here")

    shape = ExpertShape(num_experts=4, intermediate=8, hidden=16, gates=2, has_bias=False)
    pool = SlotPool.allocate(shape, 2, torch.float32, torch.device("cpu"))
    assert not LinkQueue.supports(pool, [*weights(torch.bfloat16), Remote()])
