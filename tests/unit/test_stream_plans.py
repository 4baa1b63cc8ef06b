"""Random plans on the streams of a GPU made of lists: no slot is read too early or overwritten too early."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from cache_rigs import CARRIED, EXPERTS, KEYS, LAYERS, NEURONS, Rig, run_layer

from tiermoe.actors.engine.cache.cache import ExpertCache
from tiermoe.actors.engine.cache.low_bits import ReplicaPool
from tiermoe.actors.engine.cache.slots import LayerWeights, LowBitPart
from tiermoe.actors.engine.stats import Timeline
from tiermoe.actors.policies.eviction import Lru, TwoPools
from tiermoe.actors.policies.moepic.split import CacheCut
from tiermoe.actors.policies.prefetch import PrefetchGovernor
from tiermoe.actors.policies.residency import Residency, State
from tiermoe.kernels.pack import PackedShape


def disturb(rig: Rig, chance: random.Random, cuts: Sequence[CacheCut] = ()) -> None:
    """Do one of the things that happen between layers."""
    cache, what = rig.cache, chance.randrange(9)
    if what == 0:
        for key in sorted(rig.residency.held()):
            if chance.random() < 0.4 and rig.residency.state(key) != State.ABSENT:
                cache.loads.evict(key, 0)
    elif what == 1:
        cache.prefetch(chance.sample(range(KEYS), 3))
    elif what == 2 and not cuts:
        cache.migrate(chance.sample(range(KEYS), 3), keep_others=chance.random() < 0.5)
    elif what == 3 and not cuts:
        cache.vacate(chance.randrange(3), 1)
    elif what == 4:
        rig.gpu.compute = rig.gpu.stream(name="another compute")
    elif what == 5:
        cache.finish_prefetch(chance.sample(range(KEYS), 2), 0)
    elif what == 6 and chance.random() < 0.3:
        cache.flush()
    elif what == 7 and cuts:
        cache.recut(chance.choice(cuts), chance.sample(range(KEYS), 3))
    cache.check_integrity()


def drive(rig: Rig, seed: int, cuts: Sequence[CacheCut] = (), layers: int = 24) -> None:
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
        CacheCut(NEURONS, (1, 2, 3), (2, 1, 2), 2), CacheCut(NEURONS, (2, 2, 2), (1, 1, 1), 4),
        CacheCut(NEURONS, (3, 1, 2), (1, 1, 1), 3),
    ]  # fmt: skip
    for seed in range(12):
        drive(Rig(5, seed, dtype, ahead=(1 / 3, 1)[seed % 2], cut=cuts[0]), seed, cuts)


def test_random_plans_that_copy_back() -> None:
    for seed in range(20):
        rig = Rig(2, seed, writeback=True)
        drive(rig, seed)
        assert rig.stats.total().bytes_written_back > 0


def test_random_plans_where_some_layers_are_not_pinned() -> None:
    """Their copies are a thread's; those of the streams and the thread's share the slots."""
    for seed in range(6):
        drive(Rig(3, seed, torch.float32, pinned=(True, False, True)), seed, layers=12)


class MixedRig(Rig):
    """As `Rig`, with two further slots for replicas of half the size, which some experts run on."""

    def __init__(self, seed: int, pinned: Sequence[bool]) -> None:
        super().__init__(3, seed, ahead=(1 / 3, 1)[seed % 2], pinned=pinned)
        generator = torch.Generator().manual_seed(seed)
        kinds = ((torch.uint8, (32,)), (torch.float16, (3,)))  # packed numbers, and scales
        self.replicas = [
            LayerWeights(tuple(torch.randint(0, 99, (EXPERTS, *dims), generator=generator).to(d) for d, dims in kinds))
            for _ in range(LAYERS)
        ]
        self.small = ReplicaPool(PackedShape(32, 32, 4, 32), tuple(torch.zeros(2, *dims, dtype=d) for d, dims in kinds))
        self.residency = Residency(KEYS, 3, CARRIED)
        self.cache = ExpertCache(
            self.cache.pool, self.weights, self.device, self.residency, TwoPools(Lru(), KEYS, 1), PrefetchGovernor(0.0),
            self.stats, Timeline(True), self.queue, low_bit=LowBitPart(self.small, self.replicas, 2, 38),
        )  # fmt: skip

    def mix(self, layer: int, experts: Sequence[int], low: Sequence[int], guesses: Sequence[int]) -> None:
        """One layer of which the experts in `low` run on replicas."""
        cache, base = self.cache, layer * EXPERTS
        cache.settle_times()
        needed = cache.segments([base + e for e in experts], {base + e for e in low})

        def run(segment: int) -> None:
            if segment < KEYS:
                self.run(segment, cache.await_expert(segment, layer))
            else:
                self.run_replica(segment - KEYS, cache.replica_slot(segment, layer))

        run_layer(cache, layer, needed, run, guesses)
        cache.check_integrity()

    def run_replica(self, key: int, slot: int) -> None:
        found, wanted = self.small.slot(slot), self.replicas[key // EXPERTS].expert(key % EXPERTS)

        def act() -> None:
            self.looked += 1
            for have, want in zip(found, wanted, strict=True):
                assert torch.equal(have, want), f"the replica of {key} in slot {slot}"

        self.ran += 1
        self.gpu.kernel(found, act, seconds=0.0)


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
