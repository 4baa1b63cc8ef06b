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
from tiermoe.actors.engine.stats import Timeline
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
    assert fixture.residency.pins == 0
    fixture.cache.check_integrity()


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
        make_cache(settings, ModelExperts(shape, weights, torch.float32), CpuDevice(LinkSettings()), range(2))
    assert "smaller budget" in str(found.value)
