"""The expert cache on a tiny pool: what it counts, what it cancels, what it waits for, what it evicts.

The expert cache where copies fail or it is closed: typed errors, what is loaded again, nothing left behind.

The memory of an expert cache: what the device refuses is said as what it is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cache_rigs import SLOT_BYTES, TIMEOUT_S, Fixture, Make, caches

from tiermoe.actors.budget import Budget
from tiermoe.actors.engine.cache.device import Copied, CpuDevice
from tiermoe.actors.engine.cache.slots import LayerWeights, SlotPool
from tiermoe.actors.engine.make_cache import ModelExperts, make_cache
from tiermoe.actors.engine.stats import LayerStats, Timeline
from tiermoe.actors.policies.residency import ResidencyError, State
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.settings import EngineSettings, LinkSettings
from tiermoe.actors.store.format import ExpertShape
from tiermoe.errors import BudgetError, RuntimeFailure, size


@pytest.fixture
def make() -> Iterator[Make]:
    with caches() as make:
        yield make


def test_the_stored_bytes_arrive_exactly(make: Make) -> None:
    """bfloat16 store, float32 slots: `forward` compares every tensor, biases too, in every wave."""
    fixture = make(1)
    for layer in range(2):
        fixture.forward(layer, 3, 1, 0, 2)
    assert fixture.stats.layers[1].waves == 4
    assert fixture.stats.total().bytes_loaded == 8 * SLOT_BYTES


def test_a_late_prefetch_is_a_miss_that_goes_first(make: Make) -> None:
    fixture = make(4)
    fixture.device.held = True
    fixture.cache.prefetch([2, 6, 4])  # 2 occupies the link
    fixture.device.await_start()
    plan = fixture.begin(1, 0)
    fixture.device.go.release()
    fixture.release_when_awaited(4)
    fixture.end(plan)
    stats = fixture.stats.layers[1]
    assert (stats.hits, stats.misses, stats.late_prefetches, stats.prefetched_hits) == (0, 1, 1, 0)
    assert (stats.bytes_loaded_prefetch, stats.bytes_loaded_demand) == (SLOT_BYTES, 0)
    assert fixture.residency.state(6) == State.ABSENT  # guessed for the same layer, and wrong
    assert fixture.outcomes == (1, 1)


def test_waiting_for_a_copy_is_blocked_time(make: Make) -> None:
    fixture = make(4)
    fixture.device.held = True
    plan = fixture.begin(1, 1)
    fixture.release_when_awaited(5)
    fixture.end(plan)
    assert fixture.stats.layers[1].blocked_io_s > 0
    assert fixture.stats.layers[0].blocked_io_s == 0
    assert fixture.stats.layers[1].total_io_s > 0
    tracks = [event["tid"] for event in fixture.cache.timeline.events() if event["ph"] == "X"]
    assert tracks == [2, 3]  # wait, copy
    (copy,) = (event for event in fixture.cache.timeline.events() if event["tid"] == 3 and event["ph"] == "X")
    assert (copy["args"]["bytes"], copy["args"]["cause"]) == (fixture.cache.residency.slot_bytes, "demand")


def test_a_timeline_shows_forwards_tokens_and_each_peer() -> None:
    timeline = Timeline(True)
    timeline.begin("token", "prefill, 3 rows", {"rows": 3})
    timeline.span("ndp/0", "L0 NDP", 1.0, 2.0, {"experts": 2})
    timeline.span("shard/1", "L0 shard 1", 1.0, 2.0)
    timeline.begin("token", "decode, 1 rows", {"rows": 1})  # ends the one before
    timeline.end("token")
    timeline.end("token")
    events = timeline.events()
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    order = {names[e["tid"]]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert list(order) == ["token", "forward", "compute", "wait", "copy", "prefetch", "matcher", "ndp/0", "shard/1"]
    spans = [(names[e["tid"]], e["name"], e.get("args")) for e in events if e["ph"] == "X"]
    assert spans == [
        ("ndp/0", "L0 NDP", {"experts": 2}), ("shard/1", "L0 shard 1", None),
        ("token", "prefill, 3 rows", {"rows": 3}), ("token", "decode, 1 rows", {"rows": 1}),
    ]  # fmt: skip
    timeline.clear()
    assert not [event for event in timeline.events() if event["ph"] == "X"]


def test_an_arrived_copy_is_not_waited_for(make: Make) -> None:
    fixture = make(4)
    plan = fixture.begin(1, 1)
    fixture.await_copy(5)
    fixture.end(plan)
    assert fixture.stats.layers[1].blocked_io_s == 0


def test_evicting_a_started_prefetch_waits_for_it_and_counts_the_wait(make: Make) -> None:
    """Guards the wait inside an eviction: it was in no counter, so prefetch looked cheaper than it was."""
    fixture = make(1)
    fixture.device.held = True
    fixture.cache.prefetch([4])
    fixture.device.await_start()
    fixture.release_when_awaited(4)
    plan = fixture.begin(0, 0)
    assert fixture.stats.layers[0].blocked_io_s > 0
    assert fixture.stats.layers[1].bytes_loaded_prefetch == fixture.stats.layers[1].bytes_wasted == SLOT_BYTES
    assert fixture.outcomes == (0, 1)
    fixture.device.go.release()
    fixture.end(plan)  # not overwritten by the late copy


def test_preload_is_counted_apart(make: Make) -> None:
    fixture = make(3)
    fixture.cache.core.preload(range(8))
    assert fixture.resident() == {0, 1, 2}
    assert fixture.stats.bytes_preloaded == 3 * SLOT_BYTES
    assert fixture.stats.total() == LayerStats()
    fixture.forward(0, 0, 1, 2)
    assert fixture.stats.layers[0].hits == 3


def test_migration_brings_in_what_is_absent_and_turns_the_rest_out(make: Make) -> None:
    fixture = make(4)
    fixture.forward(0, 0, 1)
    fixture.cache.core.migrate([1, 4, 5], False)
    fixture.settle()
    assert sorted(fixture.residency.held()) == [1, 4, 5]
    assert fixture.stats.layers[1].bytes_loaded_migration == 2 * SLOT_BYTES
    assert fixture.stats.layers[0].bytes_loaded_migration == 0
    fixture.forward(1, 0, 1)  # a hit each, with the right bytes
    assert (fixture.stats.layers[1].hits, fixture.stats.layers[1].misses) == (2, 0)
    fixture.cache.check_integrity()


def test_counters_begin_anew_and_what_is_held_stays(make: Make) -> None:
    """A prefetch from before counts for nobody."""
    fixture = make(3)
    fixture.forward(0, 0)
    fixture.prefetch(4, 5)
    fixture.cache.reset_stats()
    assert fixture.stats.total() == LayerStats()
    assert fixture.stats.prefetch_sources == {}
    assert list(fixture.cache.uses) == [0] * 12
    assert fixture.resident() == {0, 4, 5}
    fixture.forward(1, 0)
    assert (fixture.stats.layers[1].hits, fixture.stats.layers[1].misses) == (1, 0)
    fixture.cache.flush()
    assert fixture.stats.prefetch_sources == {}
    assert fixture.cache.uses[4] == 1
    fixture.prefetch(4)
    assert fixture.stats.prefetch_sources["command"].queued == 1


def test_flush_empties_the_pool(make: Make) -> None:
    fixture = make(3)
    fixture.forward(0, 0)
    fixture.cache.prefetch([4, 5])
    fixture.cache.flush()
    fixture.cache.check_integrity()
    assert (list(fixture.residency.held()), fixture.residency.free_slots) == ([], 3)
    assert fixture.stats.layers[1].bytes_wasted == 2 * SLOT_BYTES


def test_the_pool_is_allocated_once(make: Make) -> None:
    fixture = make(3)
    addresses = [tensor.data_ptr() for tensor in fixture.cache.pool.tensors]
    for layer in (0, 1, 0):
        fixture.forward(layer, 0, 1, 2, 3)
    assert [tensor.data_ptr() for tensor in fixture.cache.pool.tensors] == addresses
    assert fixture.stats.expert_bytes_peak == fixture.cache.pool.bytes == 3 * SLOT_BYTES


def test_a_copy_outside_a_forward_is_on_the_timeline(make: Make) -> None:
    fixture = make(2)
    fixture.cache.prefetch([4])
    fixture.cache.flush()
    assert [event["name"] for event in fixture.cache.timeline.events() if event["ph"] == "X"] == ["L1 E0"]


def test_check_integrity_sees_a_disagreement(make: Make) -> None:
    fixture = make(2)
    fixture.forward(0, 0)
    fixture.cache.eviction.removed(0)
    with pytest.raises(ResidencyError, match="eviction policy"):
        fixture.cache.check_integrity()
    fixture.cache.eviction.admitted(0)
    fixture.cache.core.states[0] = State.LOADING
    fixture.cache.core.evictable[0] = 0
    with pytest.raises(ResidencyError, match="under way"):
        fixture.cache.check_integrity()


def test_a_failed_migration_is_loaded_on_demand(make: Make) -> None:
    fixture = make(2)
    fixture.device.failing = OSError("unplugged")
    fixture.cache.core.migrate([4], False)
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
    fixture.await_copy(4)
    plan = fixture.begin(1, 0, arrivals=False)  # 4 still counts as arriving
    assert plan.arriving == 1
    fixture.end(plan)
    stats = fixture.stats.layers[1]
    assert (stats.failed_prefetches, stats.late_prefetches, stats.bytes_loaded_demand) == (1, 1, SLOT_BYTES)
    assert stats.bytes_loaded_prefetch == 0


def test_a_demand_load_after_a_failed_prefetch_may_fail_too(make: Make) -> None:
    fixture = make(2)
    fail_first(fixture, 2)
    fixture.cache.prefetch([4])
    fixture.await_copy(4)
    plan = fixture.begin(1, 0, arrivals=False)
    with pytest.raises(RuntimeFailure, match="MoE layer 1 failed: for now"):
        fixture.end(plan)
    fixture.cache.check_integrity()
    assert not fixture.residency.pinned(4)
    fixture.forward(1, 0)


def test_evicting_a_prefetch_that_fails_meanwhile(make: Make) -> None:
    fixture = make(1)
    fail_first(fixture, 1)
    fixture.cache.prefetch([4])
    fixture.await_copy(4)
    fixture.end(fixture.begin(0, 0, arrivals=False))
    assert fixture.stats.layers[1].failed_prefetches == 1


def test_what_a_failed_forward_left_behind_does_not_fail_the_next(make: Make) -> None:
    """Guards a second failing load of one forward: its error was raised in the next forward, which did not need it."""
    fixture = make(3)
    fail_first(fixture, 2)
    with pytest.raises(RuntimeFailure, match="MoE layer 0 failed"):
        fixture.forward(0, 0, 1)
    if 1 in fixture.cache.core.under_way:
        fixture.await_copy(1)
    fixture.forward(1, 0)
    assert fixture.stats.total().failed_prefetches == 0


def test_a_failing_preload_is_a_typed_error(make: Make) -> None:
    fixture = make(3)
    fixture.device.failing = OSError("the mapping is gone")
    with pytest.raises(RuntimeFailure, match="the mapping is gone"):
        fixture.cache.core.preload(range(3))


def test_close_ends_a_forward_that_waits(make: Make) -> None:
    fixture = make(2)
    fixture.device.held = True
    fixture.cache.prefetch([4])
    fixture.device.await_start()
    plan = fixture.begin(0, 1)
    closing = threading.Thread(target=fixture.cache.close)
    closing.start()
    with pytest.raises(RuntimeFailure, match="closed"):
        fixture.end(plan)
    fixture.device.go.release()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    with pytest.raises(RuntimeFailure, match="closed"):
        fixture.cache.prefetch([5])
    fixture.cache.close()


def test_a_gpu_without_room_for_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an error of torch's that names none of our settings."""
    shape = ExpertShape(num_experts=2, hidden=4, intermediate=4, gates=2, has_bias=False)
    weights = [LayerWeights(tuple(torch.zeros(one) for one in shape.stacked().values()))]
    settings = EngineSettings(policy=PolicySettings(name="x", lossless=True), budget=Budget(nbytes=shape.nbytes(4)))

    def full(*_: object) -> SlotPool:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has 1 GiB free. And more. So.")

    monkeypatch.setattr(SlotPool, "allocate", full)
    with pytest.raises(BudgetError, match=f"cache of {size(shape.nbytes(4))} .*GPU 0 has 1 GiB free") as found:
        make_cache(settings, ModelExperts(shape, weights, torch.float32), CpuDevice(LinkSettings()), 2)
    assert "smaller budget" in str(found.value)
