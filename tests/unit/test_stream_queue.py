"""The copy queue of a GPU, on one made of lists: what is enqueued when and behind what, and that no host waits."""

from __future__ import annotations

from typing import Any

import pytest
from cache_rigs import CARRIED, EXPERTS, KEYS, LAYERS, RATE, Rig
from fake_gpu import Hazard

from tiermoe.actors.engine.cache.loader import DEMAND
from tiermoe.actors.engine.stats import LayerStats
from tiermoe.actors.policies.plan import Load, LoadOnMiss
from tiermoe.actors.policies.residency import State
from tiermoe.errors import RuntimeFailure


def under_way(rig: Rig, lane: str) -> list[int]:
    """Experts of which something is enqueued and not known to have ended."""
    parts = rig.queue._demand.under_way if lane == "demand" else rig.queue._prefetch.under_way
    return list(dict.fromkeys(part.copy.job.reservation.key for part in parts))


def test_the_host_never_waits_on_a_forwards_way() -> None:
    """Guards the point of it all: neither synchronisation nor a blocking wait, in waves and evictions too."""
    for seed in range(5):
        rig = Rig(2, seed)
        rig.gpu.idle = True  # nothing ends unless the host waits
        for turn in range(12):
            rig.forward(turn % LAYERS, [0, 1, 3], guesses=[turn % KEYS, (turn + 5) % KEYS])
        assert rig.gpu.synchronized == 0
        assert rig.looked == 0
        rig.finish()


def test_a_layers_misses_are_one_batch() -> None:
    """One wait for the slots' last use, copies back to back, an event for each expert and one to begin with."""
    rig = Rig(4)
    rig.gpu.idle = True
    rig.cache.poll()
    rig.gpu.calls.clear()
    rig.cache.issue([Load(key, None, 0) for key in range(4)])
    assert rig.gpu.calls == {"record": 1 + 1 + 4, "on": 1, "wait_event": 1, "copy": 4 * 2}
    rig.cache.close()


def test_only_so_much_is_prefetched_at_a_time() -> None:
    rig = Rig(8, ahead=2)
    rig.gpu.idle = True
    assert rig.cache.prefetch(range(6)) == 6
    assert (len(rig.queue._prefetch.under_way), len(rig.queue._waiting)) == (2, 4)
    rig.gpu.finish()
    rig.cache.poll()
    assert (len(rig.queue._prefetch.under_way), len(rig.queue._waiting)) == (2, 2)
    assert len(rig.resident()) == 2
    rig.gpu.finish()
    rig.cache.poll()
    rig.gpu.finish()
    rig.cache.poll()
    assert len(rig.resident()) == 6
    rig.finish()


def test_a_large_guess_goes_in_parts_and_ends_where_it_proves_wrong() -> None:
    """What has been moved of it counts as loaded and wasted; its slot is written anew only after that."""
    rig = Rig(1)
    rig.queue._ahead_bytes, rig.queue._part_bytes = 40, 32  # of 64 + 32
    rig.gpu.idle = True
    rig.cache.prefetch([4])
    assert (under_way(rig, "prefetch"), rig.queue._prefetch.bytes) == ([4], 32)
    rig.cache.poll()
    assert rig.queue._prefetch.bytes == 32
    rig.gpu.finish()
    rig.cache.poll()
    assert rig.queue._prefetch.bytes == 32  # the second part
    rig.forward(1, [2])  # of the same layer
    stats = rig.stats.layers[1]
    assert stats.bytes_wasted == stats.bytes_loaded_prefetch == 64
    assert stats.bytes_loaded_demand == CARRIED
    rig.finish()


def test_the_rest_of_a_large_guess_is_demanded() -> None:
    rig = Rig(2)
    rig.queue._ahead_bytes, rig.queue._part_bytes = 32, 32
    rig.gpu.idle = True
    rig.cache.prefetch([4, 5])
    rig.forward(1, [0])
    assert (under_way(rig, "demand"), under_way(rig, "prefetch")) == ([4], [4])
    assert rig.residency.state(5) == State.ABSENT
    rig.finish()
    stats = rig.stats.layers[1]
    assert (stats.late_prefetches, stats.bytes_wasted) == (1, 0)
    assert stats.link_s == pytest.approx(CARRIED / RATE)


def test_demand_goes_before_what_waits() -> None:
    rig = Rig(8, ahead=1)
    rig.gpu.idle = True
    rig.cache.prefetch([4, 5, 6])
    rig.cache.issue([Load(0, None, 0)])
    rig.cache.begin(1, LoadOnMiss().plan([6], rig.residency, rig.cache.eviction))  # needed now: promoted
    assert under_way(rig, "demand") == [0, 6]
    assert under_way(rig, "prefetch") == [4]
    assert [job.reservation.key for job in rig.queue._waiting] == [5]
    rig.cache.drop_stale(1, [6])
    assert not rig.queue._waiting
    assert rig.residency.state(5) == State.ABSENT
    assert rig.residency.state(4) == State.LOADING  # enqueued: it arrives
    rig.cache.abandon()
    rig.finish()


def test_blocked_time_is_what_the_compute_waited() -> None:
    rig = Rig(4)
    rig.gpu.idle = True
    rig.forward(1, [0, 2])
    assert rig.stats.layers[1].blocked_io_s == 0  # nobody knows yet
    rig.gpu.finish()
    rig.cache.settle_times()
    stats = rig.stats.layers[1]
    assert stats.bytes_loaded_demand == 2 * CARRIED
    assert stats.total_io_s == pytest.approx(2 * CARRIED / RATE)
    assert 0 < stats.blocked_io_s <= 2 * CARRIED / RATE * 1.0001
    assert stats.io_path_s == stats.blocked_io_s
    assert stats.link_path_s == stats.link_s
    spans = [event for event in rig.cache.timeline.events() if event["ph"] == "X"]
    assert sorted(event["name"] for event in spans) == ["L1 E0", "L1 E2", "L1 wait", "L1 wait"]
    rig.forward(1, [0, 2])
    assert (stats.hits, stats.misses) == (2, 2)
    rig.finish()


def test_two_streams_share_one_link() -> None:
    """Copies that overlap are not counted twice: the link cannot be busy longer than time passed."""
    for seed in range(10):
        rig = Rig(6, seed)
        for turn in range(9):
            rig.forward(turn % LAYERS, [turn % EXPERTS, (turn + 1) % EXPERTS], guesses=[(5 * turn + 4) % KEYS])
        rig.finish()
        assert 0 < rig.stats.total().link_s <= rig.gpu.now_s * 1.0001


def test_preload_and_flush_wait_for_the_bytes() -> None:
    rig = Rig(3)
    rig.gpu.idle = True
    rig.cache.preload([0, 1, 2])
    assert rig.stats.bytes_preloaded == 3 * CARRIED
    assert rig.queue.pending == 0
    rig.cache.settle_times()
    assert rig.stats.total() == LayerStats()
    rig.forward(0, [0, 1, 2])
    assert rig.stats.layers[0].hits == 3
    rig.cache.flush()
    assert rig.resident() == set()
    rig.finish()


def test_a_copy_that_cannot_be_enqueued_fails_its_forward_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(3)
    with monkeypatch.context() as patch:
        patch.setattr(rig.gpu, "copy", _refuse)
        rig.cache.prefetch([4])
        with pytest.raises(RuntimeFailure, match="MoE layer 0 failed: no such memory"):
            rig.forward(0, [1])
        rig.cache.abandon()
    rig.cache.poll()
    assert rig.stats.layers[1].failed_prefetches == 1
    rig.forward(0, [1])
    rig.forward(1, [0])
    rig.finish()


def _refuse(dst: Any, src: Any) -> None:
    raise RuntimeError("no such memory")


def test_after_close_nothing_is_taken() -> None:
    rig = Rig(4, ahead=1)
    rig.gpu.idle = True
    rig.cache.prefetch([4, 5])
    waiting = rig.cache.loads.under_way[5]
    rig.cache.close()
    assert waiting.cancelled
    assert waiting.done.is_set()
    assert rig.cache.loads.under_way[4].done.is_set()  # enqueued: it came to its end
    with pytest.raises(RuntimeFailure, match="closed"):
        rig.cache.issue([Load(0, None, 0)])
    rig.cache.close()


def test_the_fake_finds_what_is_in_no_order() -> None:
    """The net itself: without the wait for the slots' last use, or for the copy, it raises."""
    rig = Rig(1)
    rig.gpu.idle = True
    rig.forward(0, [0])
    rig.cache.loads.evict(0, 0)
    job = rig.cache.loads.new_job(rig.residency.reserve(5), "demand", None)  # no mark of the slot's last use
    with pytest.raises(Hazard, match="writes what compute reads"):
        rig.queue.submit([job], DEMAND)
