"""The link of a GPU, on one made of lists: what is enqueued when and behind what, and that no host waits.

Random plans on the streams of a GPU made of lists: no slot is read too early or overwritten too early.
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cache_rigs import (
    CARRIED,
    EXPERTS,
    KEYS,
    LAYERS,
    NEURONS,
    RATE,
    Rig,
    begin_layer,
    end_layer,
    plan_layer,
    run_layer,
    with_replicas,
)
from fake_gpu import FakeGpu

from tiermoe.actors.core import _core
from tiermoe.actors.engine.cache.low_bits import ReplicaPool
from tiermoe.actors.engine.cache.slots import LayerWeights, LowBitPart
from tiermoe.actors.policies.eviction import SweepLru
from tiermoe.actors.policies.moepic.split import SplitLayout
from tiermoe.actors.policies.residency import State
from tiermoe.errors import RuntimeFailure
from tiermoe.kernels.pack import PackedShape


def under_way(rig: Rig, lane: str) -> list[int]:
    """Experts of which something is enqueued and not known to have ended."""
    return list(dict.fromkeys(segment for segment, _ in rig.link.enqueued(lane == "demand")))


def bytes_under_way(rig: Rig) -> int:
    """Of prefetches."""
    return sum(nbytes for _, nbytes in rig.link.enqueued(False))


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


@pytest.mark.parametrize(("spin_s", "kept"), [(60.0, True), (0.0, False)])
def test_a_wait_on_a_forwards_way_keeps_the_interpreters_lock(spin_s: float, kept: bool) -> None:
    """Once it gave it up after 1 ms: another thread then has it for up to 5 ms, and each layer is late by that."""
    gpu, polled, ran, go = FakeGpu(), list[int](), list[int](), threading.Lock()
    go.acquire()
    addresses = gpu.driver().addresses

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    def query(event: int) -> int:
        polled.append(event)
        return 0 if len(polled) == 100 else 600  # CUDA_ERROR_NOT_READY

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    def synchronize(event: int) -> int:
        other.join()  # which can run only without the lock
        return 0

    def work() -> None:
        with go:
            ran.append(len(polled))

    calls = {"query": query, "synchronize": synchronize}
    pointers = {name: ctypes.cast(call, ctypes.c_void_p).value or 0 for name, call in calls.items()}
    driver, other = _core.Driver(1, addresses | pointers), threading.Thread(target=work)
    before = sys.getswitchinterval()
    other.start()
    sys.setswitchinterval(60.0)
    try:
        go.release()
        driver.wait_for(7, spin_s)
        assert (len(polled), ran) == ((100, []) if kept else (1, [1]))
    finally:
        sys.setswitchinterval(before)
        other.join()


def test_a_large_guess_goes_in_parts_and_ends_where_it_proves_wrong() -> None:
    """What has been moved of it counts as loaded and wasted; its slot is written anew only after that."""
    rig = Rig(1)
    rig.link.ahead(40, 32)  # of 64 + 32
    rig.gpu.idle = True
    rig.cache.prefetch([4])
    assert (under_way(rig, "prefetch"), bytes_under_way(rig)) == ([4], 32)
    rig.cache.poll()
    assert bytes_under_way(rig) == 32
    rig.gpu.finish()
    rig.cache.poll()
    assert bytes_under_way(rig) == 32  # the second part
    rig.forward(1, [2])  # of the same layer
    stats = rig.stats.layers[1]
    assert stats.bytes_wasted == stats.bytes_loaded_prefetch == 64
    assert stats.bytes_loaded_demand == CARRIED
    rig.finish()


def test_demand_goes_before_what_waits() -> None:
    rig = Rig(8, ahead=1)
    rig.gpu.idle = True
    rig.cache.prefetch([4, 5, 6])
    begin_layer(rig.cache, 0, [0])
    assert under_way(rig, "demand") == [0]
    assert under_way(rig, "prefetch") == [4]
    assert rig.link.waiting == [5, 6]
    begin_layer(rig.cache, 1, [6])  # needed now: promoted
    assert under_way(rig, "demand") == [0, 6]
    assert under_way(rig, "prefetch") == [4]
    assert not rig.link.waiting
    assert rig.residency.state(5) == State.ABSENT
    assert rig.residency.state(4) == State.LOADING  # enqueued: it arrives
    rig.cache.core.abandon()
    rig.finish()


@pytest.mark.parametrize(
    ("slots", "needed", "pairs", "streamed"),
    [
        (8, [0, 1, 2, 3], 64, [4, 5, 6, 7]),  # both layers fit
        (8, [0, 1, 3], 64, [4, 5, 6, 7]),  # three quarters of a layer
        (8, [0, 1], 64, None),  # fewer, however many rows: these may need others
        (8, [0, 1, 2, 3], 63, None),  # few rows
        (6, [0, 1, 2, 3], 64, [4, 5]),  # as many as find a slot
        (4, [0, 1, 2, 3], 64, []),
        (3, [0, 1, 2, 3], 64, []),  # the layer's own experts take turns
    ],
)
def test_a_long_prompt_has_the_next_layer_whole_behind_its_own_demand(
    slots: int, needed: list[int], pairs: int, streamed: list[int] | None
) -> None:
    """The bytes that prefetches may have under way are no bound: the link would be idle until the next routing."""
    rig = Rig(slots, ahead=1, eviction=SweepLru(LAYERS, EXPERTS))
    rig.gpu.idle = True
    core = rig.cache.core
    counts = [pairs * EXPERTS - len(needed) + 1] + [1] * (len(needed) - 1)
    core.plan(core.open(0, needed, counts, pairs, []), [])
    core.begin()
    core.load()
    assert core.stream(rig.cache.number_of("whole")) == (streamed is not None)
    assert under_way(rig, "demand") == needed[:slots] + (streamed or [])
    assert not under_way(rig, "prefetch")
    while len(set(core.next())) > 1:
        pass
    core.close()
    assert not core.stream(rig.cache.number_of("whole"))  # no pass
    rig.forward(1, [0, 1, 2, 3])
    assert rig.gpu.synchronized == 0
    rig.finish()
    sources = {name: (one.queued, one.late) for name, one in rig.stats.prefetch_sources.items()}
    assert sources == ({"whole": (len(streamed), len(streamed))} if streamed else {})


def test_layers_of_a_prompt_take_the_slots_of_those_behind_them() -> None:
    """A pool of two layers. The first prompt fills it; later ones find a layer there, and copy the others once."""
    for seed in range(5):
        rig = Rig(2 * EXPERTS, seed, eviction=SweepLru(LAYERS, EXPERTS))
        for prompt in range(3):
            for layer in range(LAYERS):
                core, keys = rig.cache.core, list(range(layer * EXPERTS, (layer + 1) * EXPERTS))
                rig.cache.poll(layer)
                plan = plan_layer(rig.cache, core.open(layer, keys, [64] * EXPERTS, 64, []))
                assert plan.resident + plan.arriving == (EXPERTS if layer else 0)
                core.begin()
                core.load()
                assert core.stream(rig.cache.number_of("whole"))
                end_layer(rig.cache, plan, rig.run)
                rig.cache.check_integrity()
            loaded = [layer.bytes_loaded // CARRIED for layer in rig.stats.layers]
            assert loaded == [EXPERTS * (prompt + 1), EXPERTS, EXPERTS * (prompt + 1)]
        assert rig.gpu.synchronized == 0
        rig.finish()


def test_blocked_time_is_what_the_compute_waited() -> None:
    rig = Rig(4)
    rig.gpu.idle = True
    rig.forward(1, [0, 2])
    assert rig.stats.layers[1].blocked_io_s == 0  # nobody knows yet
    rig.gpu.finish()
    rig.cache.settle_times()
    stats = rig.stats.layers[1]
    assert (stats.hits, stats.misses) == (0, 2)
    assert stats.bytes_loaded_demand == 2 * CARRIED
    assert stats.total_io_s == pytest.approx(2 * CARRIED / RATE)
    assert 0 < stats.blocked_io_s <= 2 * CARRIED / RATE * 1.0001
    assert stats.io_path_s == stats.blocked_io_s
    assert stats.link_path_s == stats.link_s
    spans = [event for event in rig.cache.timeline.events() if event["ph"] == "X"]
    assert sorted(event["name"] for event in spans) == ["L1 E0", "L1 E2", "L1 wait", "L1 wait"]
    rig.forward(1, [0, 2])
    stats = rig.stats.layers[1]
    assert (stats.hits, stats.misses) == (2, 2)
    rig.finish()


def test_a_copy_that_cannot_be_enqueued_fails_its_forward_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(3)
    with monkeypatch.context() as patch:
        patch.setattr(rig.gpu, "copy", _refuse)
        rig.cache.prefetch([4])
        with pytest.raises(RuntimeFailure, match="MoE layer 0 failed: no such memory"):
            rig.forward(0, [1])
        assert rig.residency.pins == 0
        rig.cache.core.abandon()
    rig.cache.poll()
    assert rig.stats.layers[1].failed_prefetches == 1
    rig.forward(0, [1])
    rig.forward(1, [0])
    rig.finish()


def _refuse(*given: Any, **options: Any) -> None:
    raise RuntimeError("no such memory")


@pytest.mark.parametrize("call", ["event", "wait_event", "record"])
def test_where_the_driver_refuses_no_expert_without_its_weights_is_resident(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards a copy that was joined before any of it was enqueued, and then told as one that had ended."""
    rig = Rig(2)
    rig.gpu.idle = True
    rig.cache.poll()
    with monkeypatch.context() as patch:
        patch.setattr(rig.gpu, call, _refuse)
        with pytest.raises(RuntimeFailure, match="no such memory"):
            rig.forward(0, [1, 2])
        rig.cache.core.abandon()
    rig.cache.poll()
    assert not rig.resident()
    rig.forward(0, [1, 2])  # reads their bytes
    rig.finish()


def test_after_close_nothing_is_taken() -> None:
    rig = Rig(4, ahead=1)
    rig.gpu.idle = True
    rig.cache.prefetch([4, 5])
    assert (under_way(rig, "prefetch"), rig.link.waiting) == ([4], [5])
    rig.cache.close()
    assert (rig.link.pending, rig.link.waiting) == (0, [])  # one came to its end
    with pytest.raises(RuntimeFailure, match="closed"):  # the other was dropped
        rig.cache.poll()
    assert rig.residency.state(4) == State.RESIDENT
    assert rig.residency.state(5) == State.ABSENT
    with pytest.raises(RuntimeFailure, match="closed"):
        begin_layer(rig.cache, 0, [0], arrivals=False)
    rig.cache.close()


def disturb(rig: Rig, chance: random.Random, cuts: Sequence[SplitLayout] = ()) -> None:
    """Do one of the things that happen between layers."""
    cache, what = rig.cache, chance.randrange(9)
    if what == 0:
        for key in sorted(rig.residency.held()):
            if chance.random() < 0.4 and rig.residency.state(key) != State.ABSENT:
                cache.core.leave([key], 0)
    elif what == 1:
        cache.prefetch(chance.sample(range(KEYS), 3))
    elif what == 2 and not cuts:
        cache.core.migrate(chance.sample(range(KEYS), 3), chance.random() < 0.5)
    elif what == 3 and not cuts:
        cache.core.vacate(chance.randrange(3), 1)
    elif what == 4:
        rig.gpu.compute = rig.gpu.stream(name="another compute")
    elif what == 5:
        cache.core.finish_prefetch(chance.sample(range(KEYS), 2), 0)
    elif what == 6 and chance.random() < 0.3:
        cache.flush()
    elif what == 7 and cuts:
        cache.set_split(chance.choice(cuts), chance.sample(range(KEYS), 3))
    cache.check_integrity()


def drive(rig: Rig, seed: int, cuts: Sequence[SplitLayout] = (), layers: int = 24) -> None:
    chance = random.Random(seed)
    for turn in range(layers):
        rig.cache.poll()
        for _ in range(chance.randrange(3)):
            disturb(rig, chance, cuts)
        experts = sorted(chance.sample(range(EXPERTS), chance.randint(1, EXPERTS)))
        guesses = chance.sample(range(KEYS), chance.randrange(4))
        rig.forward(turn % LAYERS, experts, guesses)
    rig.finish()


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_random_plans_read_the_right_bytes(slots: int, dtype: torch.dtype) -> None:
    """Evictions, guesses, cancels, waves, migrations and changes of stream, in any order of the streams."""
    for seed in range(12):
        rig = Rig(slots, seed, dtype, ahead=(1 / 3, 1, 2)[seed % 3])
        drive(rig, seed)
        total = rig.stats.total()
        assert rig.stats.expert_bytes_peak == rig.cache.pool.bytes
        assert total.link_s > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_random_plans_with_split_experts(dtype: torch.dtype) -> None:
    cuts = [
        SplitLayout(NEURONS, (1, 2, 3), (2, 1, 2), 2), SplitLayout(NEURONS, (2, 2, 2), (1, 1, 1), 4),
        SplitLayout(NEURONS, (3, 1, 2), (1, 1, 1), 3),
    ]  # fmt: skip
    for seed in range(12):
        drive(Rig(5, seed, dtype, ahead=(1 / 3, 1)[seed % 2], split=cuts[0]), seed, cuts)


def test_random_plans_that_copy_back() -> None:
    for seed in range(20):
        rig = Rig(2, seed, writeback=True)
        drive(rig, seed)
        assert rig.stats.total().bytes_written_back > 0


def test_copies_back_are_charged_as_link_time_and_as_waits() -> None:
    """Guards a comparison that charged baselines that copy back in neither."""
    for seed in range(10):
        rig = Rig(2, seed, writeback=True)
        rig.gpu.idle = True
        rig.forward(0, [0, 1])
        rig.forward(1, [2, 3])
        rig.gpu.finish()
        rig.cache.settle_times()
        first, second = rig.stats.layers[:2]
        assert (first.writebacks, first.writeback_link_s, first.writeback_blocked_s) == (0, 0.0, 0.0)
        assert (second.writebacks, second.bytes_written_back) == (2, 2 * CARRIED)
        assert second.writeback_link_s == pytest.approx(2 * CARRIED / RATE)
        assert second.link_s == pytest.approx(4 * CARRIED / RATE)
        assert second.writeback_blocked_s == pytest.approx(second.blocked_io_s / 2)
        assert second.blocked_io_s == pytest.approx(second.link_s)
        rig.finish()


def test_random_plans_where_some_layers_are_not_pinned() -> None:
    """Their copies are a thread's; those of the streams and the thread's share the slots."""
    for seed in range(6):
        drive(Rig(3, seed, torch.float32, pinned=(True, False, True)), seed, layers=12)


class MixedRig(Rig):
    """As `Rig`, with two further slots for replicas of half the size, which some experts run on."""

    def __init__(self, seed: int, pinned: Sequence[bool]) -> None:
        generator = torch.Generator().manual_seed(seed)
        kinds = ((torch.uint8, (32,)), (torch.float16, (3,)))  # packed numbers, and scales
        self.replicas = [
            LayerWeights(tuple(torch.randint(0, 99, (EXPERTS, *dims), generator=generator).to(d) for d, dims in kinds))
            for _ in range(LAYERS)
        ]
        self.small = ReplicaPool(PackedShape(32, 32, 4, 32), tuple(torch.zeros(2, *dims, dtype=d) for d, dims in kinds))
        super().__init__(
            3, seed, ahead=(1 / 3, 1)[seed % 2], pinned=pinned, low_bit=LowBitPart(self.small, self.replicas, 2, 38),
            eviction=with_replicas(LAYERS, EXPERTS),
        )  # fmt: skip

    def mix(self, layer: int, experts: Sequence[int], low: Sequence[int], guesses: Sequence[int]) -> None:
        """One layer of which the experts in `low` run on replicas."""
        base = layer * EXPERTS

        def run(segment: int) -> None:
            if segment < KEYS:
                self.run(segment)
            else:
                self.run_replica(segment - KEYS, self.residency.slot(segment) - self.cache.where.whole_slots)

        run_layer(self.cache, layer, [base + e for e in experts], run, guesses, [base + e for e in low])
        self.cache.check_integrity()

    def run_replica(self, key: int, slot: int) -> None:
        wanted = self.replicas[key // EXPERTS].expert(key % EXPERTS)
        self.read(self.small.slot(slot), wanted, f"the replica of {key} in slot {slot}")


@pytest.mark.parametrize("pinned", [(True, True, True), (True, False, True)])
def test_random_plans_with_replicas(pinned: tuple[bool, ...]) -> None:
    """Slots of two sizes and dtypes: each kind's are read as they were written, and given away in order."""
    for seed in range(8):
        rig, chance = MixedRig(seed, pinned), random.Random(seed)
        for turn in range(18 if all(pinned) else 8):
            experts = sorted(chance.sample(range(EXPERTS), chance.randint(1, EXPERTS)))
            low = [e for e in experts if chance.random() < 0.5]
            rig.mix(turn % LAYERS, experts, low, chance.sample(range(2 * KEYS), chance.randrange(5)))
        rig.finish()
        assert 0 < rig.stats.total().bytes_loaded_low_bit < rig.stats.total().bytes_loaded
