"""The expert cache where copies fail or it is closed: typed errors, what is loaded again, nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from cache_rigs import SLOT_BYTES, TIMEOUT_S, Fixture, Make, caches

from tiermoe.actors.engine.cache.device import Copied
from tiermoe.actors.policies.plan import Load, LoadOnMiss
from tiermoe.actors.policies.residency import State
from tiermoe.errors import RuntimeFailure


@pytest.fixture
def make() -> Iterator[Make]:
    with caches() as make:
        yield make


def test_a_failed_migration_is_loaded_on_demand(make: Make) -> None:
    fixture = make(2)
    fixture.device.failing = OSError("unplugged")
    fixture.cache.migrate([4], keep_others=False)
    fixture.settle()
    fixture.device.failing = None
    fixture.forward(1, 0)
    assert fixture.stats.layers[1].bytes_loaded_demand == SLOT_BYTES
    assert fixture.stats.layers[1].bytes_loaded_migration == 0
    assert fixture.stats.layers[1].failed_prefetches == 0


def test_a_failing_copy_is_a_typed_error_and_leaves_no_trace(make: Make) -> None:
    """Guards the release of a failed load that the forward had pinned: it raised a bookkeeping error instead."""
    fixture = make(3)
    fixture.forward(0, 0)
    fixture.device.failing = OSError("the mapping is gone")
    with pytest.raises(RuntimeFailure, match="MoE layer 0 failed: the mapping is gone") as raised:
        fixture.forward(0, 0, 1, 2)
    assert raised.value.__cause__ is fixture.device.failing
    assert fixture.residency.state(1) == State.ABSENT
    assert not any(fixture.residency.pinned(key) for key in range(8))
    fixture.cache.check_integrity()


def test_the_cache_works_again_once_copies_do(make: Make) -> None:
    fixture = make(2)
    fixture.device.failing = OSError("for now")
    with pytest.raises(RuntimeFailure):
        fixture.forward(0, 0)
    fixture.device.failing = None
    for layer in (0, 1):
        fixture.forward(layer, 0, 1, 2, 3)


def test_a_failed_prefetch_is_dropped_and_loaded_on_demand(make: Make) -> None:
    """Guards promise 6: a guess that could not be copied failed the next forward, which may not even need it."""
    fixture = make(2)
    fixture.device.failing = OSError("for now")
    assert fixture.prefetch(4, 5) == 2
    fixture.device.failing = None
    assert fixture.residency.free_slots == 2
    assert fixture.outcomes == (0, 2)
    fixture.forward(0, 0)
    fixture.forward(1, 0)
    fixture.forward(1, 0)
    stats = fixture.stats.layers[1]
    assert (stats.failed_prefetches, stats.prefetched_hits, stats.hits, stats.misses) == (2, 0, 1, 1)
    assert (stats.bytes_loaded_prefetch, stats.bytes_loaded_demand, stats.bytes_wasted) == (0, SLOT_BYTES, 0)


def fail_first(fixture: Fixture, failures: int) -> None:
    """The next `failures` copies raise, later ones go through."""
    copy, left = fixture.device.copy, iter(range(failures))

    def failing(*args: Any) -> Copied:
        if next(left, None) is not None:
            raise OSError("for now")
        return copy(*args)

    fixture.device.copy = failing


def test_a_prefetch_that_fails_while_a_forward_waits_for_it_is_loaded_again(make: Make) -> None:
    fixture = make(2)
    fail_first(fixture, 1)
    fixture.cache.prefetch([4])
    assert fixture.cache.loads.under_way[4].done.wait(TIMEOUT_S)
    plan = LoadOnMiss().plan([4], fixture.residency, fixture.cache.eviction)  # not polled: 4 still counts as arriving
    assert plan.arriving == 1
    fixture.cache.begin(1, plan)
    fixture.check_slot(4, fixture.cache.await_expert(4, 1))
    fixture.cache.ran([4])
    fixture.cache.check_integrity()
    stats = fixture.stats.layers[1]
    assert (stats.failed_prefetches, stats.late_prefetches, stats.bytes_loaded_demand) == (1, 1, SLOT_BYTES)
    assert stats.bytes_loaded_prefetch == 0


def test_a_demand_load_after_a_failed_prefetch_may_fail_too(make: Make) -> None:
    fixture = make(2)
    fail_first(fixture, 2)
    fixture.cache.prefetch([4])
    assert fixture.cache.loads.under_way[4].done.wait(TIMEOUT_S)
    fixture.cache.begin(1, LoadOnMiss().plan([4], fixture.residency, fixture.cache.eviction))
    with pytest.raises(RuntimeFailure, match="MoE layer 1 failed: for now"):
        fixture.cache.await_expert(4, 1)
    fixture.cache.check_integrity()
    assert not fixture.residency.pinned(4)
    fixture.forward(1, 0)


def test_evicting_a_prefetch_that_fails_meanwhile(make: Make) -> None:
    fixture = make(1)
    fail_first(fixture, 1)
    fixture.cache.prefetch([4])
    assert fixture.cache.loads.under_way[4].done.wait(TIMEOUT_S)
    fixture.cache.issue([Load(0, evict=4, after=0)])
    fixture.check_slot(0, fixture.cache.await_expert(0, 0))
    assert fixture.stats.layers[1].failed_prefetches == 1


def test_what_a_failed_forward_left_behind_does_not_fail_the_next(make: Make) -> None:
    """Guards a second failing load of one forward: its error was raised in the next forward, which did not need it."""
    fixture = make(3)
    fail_first(fixture, 2)
    with pytest.raises(RuntimeFailure, match="MoE layer 0 failed"):
        fixture.forward(0, 0, 1)
    if 1 in fixture.cache.loads.under_way:
        assert fixture.cache.loads.under_way[1].done.wait(TIMEOUT_S)
    fixture.forward(1, 0)
    assert fixture.stats.total().failed_prefetches == 0


def test_a_failing_preload_is_a_typed_error(make: Make) -> None:
    fixture = make(3)
    fixture.device.failing = OSError("the mapping is gone")
    with pytest.raises(RuntimeFailure, match="the mapping is gone"):
        fixture.cache.preload(range(3))


def test_close_ends_a_forward_that_waits(make: Make) -> None:
    fixture = make(2)
    fixture.device.held = True
    fixture.cache.issue([Load(0, None, 0), Load(1, None, 0)])
    fixture.device.await_start()
    closing = threading.Thread(target=fixture.cache.close)
    closing.start()
    with pytest.raises(RuntimeFailure, match="closed"):
        fixture.cache.await_expert(1, 0)
    fixture.device.go.release()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    with pytest.raises(RuntimeFailure, match="closed"):
        fixture.cache.prefetch([4])
