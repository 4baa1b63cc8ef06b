"""Routing rules on hand-made cases and against direct transcriptions, and how the engine carries them out.

Slots for low-bit replicas beside those of experts in full: loads, counters, victims, results; the simulator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import traces
from cache_rigs import begin_layer, end_layer, with_replicas

from tiermoe.actors.budget import Budget
from tiermoe.actors.combinations import check_combination
from tiermoe.actors.engine.cache.cache import ExpertCache
from tiermoe.actors.engine.cache.device import CpuDevice
from tiermoe.actors.engine.cache.low_bits import ReplicaPool, ReplicaWeights, make_part
from tiermoe.actors.engine.cache.slot_map import SlotMap
from tiermoe.actors.engine.cache.slots import LayerWeights, SlotPool
from tiermoe.actors.engine.host_view import HostViews, LayerView, share
from tiermoe.actors.engine.make_cache import make_link
from tiermoe.actors.engine.rerouting import LowBits, Rerouter
from tiermoe.actors.engine.stats import EngineStats, LayerStats, Timeline
from tiermoe.actors.policies.hobbit import MixedPrecision
from tiermoe.actors.policies.registry import PolicyContext
from tiermoe.actors.policies.residency import State
from tiermoe.actors.policies.routing import Rerouted, RerouteView, Rerouting, drop_pairs
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.settings import EngineSettings, LinkSettings, ShardSettings
from tiermoe.actors.store.format import ExpertShape
from tiermoe.cluster.simulate.executor import SimulatedEngine, eviction_of, policies_of, replica_bytes
from tiermoe.cluster.simulate.hit_rates import serve
from tiermoe.cluster.simulate.machine import Machine
from tiermoe.cluster.simulate.trace import Trace
from tiermoe.errors import ConfigError
from tiermoe.kernels.expert_ffn import Operands, TorchKernel
from tiermoe.kernels.pack import PackedShape, Quantized, pack_expert
from tiermoe.kernels.packed_slots import TorchPackedKernel


def test_what_a_dropped_pair_becomes() -> None:
    ids = np.array([[5, 6, 7], [1, 2, 3]])
    weights = np.array([[0.2, 0.5, 0.3], [0.4, 0.4, 0.2]], np.float32)
    found = drop_pairs(ids, weights, np.array([[True, False, False], [False, False, True]]), renormalise=False)
    assert found.ids.tolist() == [[6, 6, 7], [1, 2, 1]]
    np.testing.assert_array_equal(found.weights, np.array([[0, 0.5, 0.3], [0.4, 0.4, 0]], np.float32))
    assert found.dropped == 2
    again = drop_pairs(ids, weights, np.array([[True, False, False], [False, False, False]]), renormalise=True)
    np.testing.assert_allclose(again.weights, [[0, 0.625, 0.375], [0.4, 0.4, 0.2]], rtol=1e-6)
    assert drop_pairs(ids, weights, np.zeros((2, 3), bool), True).ids is ids
    with pytest.raises(ValueError, match="keeps at least one"):
        drop_pairs(ids, weights, np.array([[True] * 3, [False] * 3]), True)


# -- the engine's side ---------------------------------------------------------------------------------------


@dataclass
class Cache:
    """Four experts a layer and five slots."""

    held: set[int] = field(default_factory=set)
    stats: EngineStats = field(default_factory=EngineStats)
    residency: ClassVar[Any] = SimpleNamespace(emptied=0)

    @property
    def core(self) -> Any:
        return SimpleNamespace(rerouted=self._rerouted)

    def _rerouted(self, substituted: int, dropped: int) -> None:
        self.stats.substitutions += substituted
        self.stats.dropped += dropped

    def occupancy(self, layer: int) -> tuple[Any, int]:
        return np.array([layer * 4 + expert in self.held for expert in range(4)]), 5

    def vacant(self, layer: int) -> int:
        return 0


class Scripted(Rerouting):
    """Answers what it is told to, and keeps what it is shown."""

    name: ClassVar[str] = "scripted"
    needs_probabilities: ClassVar[bool] = True

    def __init__(self, says: Rerouted) -> None:
        self.says = says
        self.shown: list[tuple[Any, ...]] = []

    def reroute(self, layer: int, ids: Any, weights: Any, probabilities: Any, view: RerouteView) -> Rerouted:
        self.shown.append((layer, ids, weights, probabilities, view))
        return self.says


def _rerouter(rule: Rerouting, cache: Cache, mute: bool = False) -> Rerouter:
    router = None if mute else (lambda hidden: hidden * 2)
    blocks: Any = [SimpleNamespace(router=router)] * 2
    return Rerouter(rule, cache, blocks, 2)  # type: ignore[arg-type]


def test_a_rule_sees_routing_and_cache_and_is_counted() -> None:
    cache = Cache({0, 4, 6})
    rule = Scripted(Rerouted(np.array([[2, 0]]), np.array([[0.7, 0.3]], np.float32), substituted=1))
    hidden, ids, weights = torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.tensor([[3, 0]]), torch.tensor([[0.6, 0.4]])
    seen = HostViews().look(1, hidden, ids, weights.to(torch.bfloat16))
    assert _rerouter(rule, cache).layer(1, seen) == set()
    layer, seen_ids, seen_weights, probabilities, view = rule.shown[0]
    assert (layer, seen_ids.tolist(), seen_weights.dtype) == (1, [[3, 0]], np.float32)
    np.testing.assert_allclose(probabilities, torch.softmax(hidden * 2, -1).numpy(), rtol=1e-6)
    assert view.available.tolist() == [True, False, True, False]
    assert (view.free_slots, view.top_k) == (3, 2)
    assert (seen.ids.tolist(), seen.ids.dtype, seen.weights.dtype) == ([[2, 0]], np.int64, np.float32)
    assert seen.picked.tolist() == [[3, 0]]
    assert (cache.stats.substitutions, cache.stats.dropped) == (1, 0)


def test_places_that_nobody_uses_are_left_out() -> None:
    cache = Cache()
    ids, weights = torch.tensor([[3, 0], [1, 2]]), torch.tensor([[0.6, 0.4], [0.5, 0.5]])
    one = Rerouted(np.array([[3, 3], [1, 2]]), np.array([[1, 0], [0.5, 0.5]], np.float32), dropped=1)
    two = Rerouted(np.array([[3, 3], [1, 1]]), np.array([[1, 0], [1, 0]], np.float32), dropped=2)
    seen = HostViews().look(0, torch.zeros(2, 4), ids, weights)
    _rerouter(Scripted(one), cache).layer(0, seen)
    assert seen.ids.tolist() == [[3, 3], [1, 2]]
    seen = HostViews().look(0, torch.zeros(2, 4), ids, weights)
    _rerouter(Scripted(two), cache).layer(0, seen)
    assert (seen.ids.tolist(), seen.weights.tolist()) == ([[3], [1]], [[1.0], [1.0]])
    assert cache.stats.dropped == 3


def test_a_rule_that_needs_a_mute_router_is_refused() -> None:
    rule = Scripted(Rerouted(np.zeros((1, 1), np.int64), np.ones((1, 1), np.float32)))
    with pytest.raises(ConfigError, match="does not expose"):
        _rerouter(rule, Cache(), mute=True)


LAYERS, EXPERTS, KEYS, HIDDEN, NEURONS = 2, 6, 12, 32, 32
SHAPE = ExpertShape(num_experts=EXPERTS, hidden=HIDDEN, intermediate=NEURONS, gates=2, has_bias=False)
PACKED = PackedShape(HIDDEN, NEURONS, 4, 32)
FULL, LOW = SHAPE.nbytes(4), PACKED.nbytes()


def _gate(up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(up[:, ::2]) * up[:, 1::2]


def _random(rng: np.random.Generator) -> dict[str, np.ndarray]:
    def one() -> Quantized:
        scales = np.full((32, 1), 0.02, np.float16)
        return Quantized(rng.integers(0, 16, (32, 32), dtype=np.uint8), scales, -7 * scales, 4, 32)

    return pack_expert(one(), one(), one())


class Mixed:
    """Three slots in full and two for replicas, with real kernels."""

    def __init__(self, link: LinkSettings | None = None) -> None:
        rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
        packed = [[_random(rng) for _ in range(EXPERTS)] for _ in range(LAYERS)]
        self.replicas = [
            LayerWeights(tuple(torch.from_numpy(np.stack([e[name] for e in layer])) for name in PACKED.tensors()))
            for layer in packed
        ]
        shapes = SHAPE.stacked().values()
        self.weights = [LayerWeights(tuple(torch.randn(s, generator=generator) for s in shapes)) for _ in range(LAYERS)]
        device = CpuDevice(link or LinkSettings())
        part = make_part(ReplicaWeights(PACKED, self.replicas), 2, torch.device("cpu"))
        assert part.slot_bytes == LOW
        pool = SlotPool.allocate(SHAPE, 3, torch.float32, torch.device("cpu"))
        where = SlotMap(pool, self.weights, EXPERTS, 3, FULL, low_bit=part)
        self.cache = ExpertCache(
            where, make_link(device, where), with_replicas(LAYERS, EXPERTS),
            EngineStats(layers=[LayerStats() for _ in range(LAYERS)]), Timeline(True),
        )  # fmt: skip
        self.residency = self.cache.residency
        assert isinstance(part.pool, ReplicaPool)
        self.packed = TorchPackedKernel(part.pool.tensors, PACKED, "silu")
        self.kernel = TorchKernel(Operands(pool.gate_up, pool.down, None, None), _gate)

    def forward(self, layer: int, full: list[int], low: list[int]) -> torch.Tensor:
        """One row through these experts of a layer, as `MoeLayer` runs it: y, one row for each."""
        cache, base, experts = self.cache, layer * EXPERTS, [*full, *low]
        plan = begin_layer(cache, layer, [base + e for e in experts], low=[base + e for e in low])
        hidden = torch.linspace(-1, 1, HIDDEN)[None]
        y = torch.full((len(experts), HIDDEN), float("nan"))
        order, top_k = torch.arange(len(experts)), len(experts)

        def run(segment: int) -> None:
            at, slot = experts.index(segment % EXPERTS), self.residency.slot(segment)
            if segment < KEYS:
                groups = [(at, at + 1, slot * cache.neurons, cache.neurons, False)]
                self.kernel.run(hidden, order, groups, top_k, y)
            else:
                self.packed.run(hidden, order, [(at, at + 1, slot - 3)], top_k, y)

        end_layer(cache, plan, run)
        cache.check_integrity()
        for i, expert in enumerate(experts):
            torch.testing.assert_close(y[i], self.alone(layer, expert, i >= len(full), hidden)[0])
        return y

    def alone(self, layer: int, expert: int, low: bool, hidden: torch.Tensor) -> torch.Tensor:
        """FFN of one expert from the host's bytes."""
        if low:
            slots = tuple(t[expert : expert + 1] for t in self.replicas[layer].tensors)
            gate, up, down = TorchPackedKernel(slots, PACKED, "silu").weights(0)
            return (torch.nn.functional.silu(hidden @ gate.t()) * (hidden @ up.t())) @ down.t()
        gate_up, down = self.weights[layer].expert(expert)
        return _gate(hidden @ gate_up.reshape(-1, HIDDEN).t()) @ down

    @property
    def stats(self) -> EngineStats:
        return self.cache.live_stats()

    def settle(self) -> None:
        self.cache.core.wait_all()
        self.cache.check_integrity()


@pytest.fixture
def mixed() -> Iterator[Mixed]:
    made = Mixed()
    yield made
    made.cache.close()


def test_an_unimportant_use_of_a_replica_loads_nothing_and_an_important_one_all(mixed: Mixed) -> None:
    mixed.forward(0, [0], [1])
    stats = mixed.stats.layers[0]
    assert (stats.hits, stats.misses, stats.low_bit_misses) == (0, 2, 1)
    assert (stats.bytes_loaded_demand, stats.bytes_loaded_low_bit) == (FULL + LOW, LOW)
    mixed.forward(0, [0], [1])
    stats = mixed.stats.layers[0]
    assert (stats.hits, stats.misses, stats.low_bit_hits, stats.bytes_loaded) == (2, 2, 1, FULL + LOW)
    mixed.forward(0, [0, 1], [])  # 1 matters now
    stats = mixed.stats.layers[0]
    assert (stats.misses, stats.low_bit_misses, stats.bytes_loaded) == (3, 1, 2 * FULL + LOW)
    assert list(mixed.cache.uses[:2]) == [3, 3]
    assert len(mixed.cache.states()) == KEYS
    assert mixed.cache.states()[:2] == [State.RESIDENT, State.RESIDENT]


def test_who_runs_on_a_replica(mixed: Mixed) -> None:
    low_bits = LowBits(MixedPrecision(0.6, 0.9, renormalise=True), mixed.cache, EXPERTS)
    ids, weights = torch.tensor([[3, 0, 5, 2]]), torch.tensor([[0.5, 0.25, 0.2, 0.05]])
    view = LayerView(share, torch.zeros(1, 1), ids, weights)
    assert low_bits.layer(1, view) == {EXPERTS + 5}
    assert view.ids.tolist() == [[3, 0, 5]]
    np.testing.assert_allclose(view.weights, weights[:, :3] / 0.95, rtol=1e-6)
    assert (mixed.cache.live_stats().dropped, mixed.stats.layers[1].low_bit_pairs) == (1, 1)
    mixed.forward(1, [3, 0, 5], [])
    view = LayerView(share, torch.zeros(1, 1), ids[:, :3], weights[:, :3])
    assert low_bits.layer(1, view) == set()
    assert mixed.stats.layers[1].low_bit_pairs == 1


def test_several_gpus_are_refused() -> None:
    policy = PolicySettings(name="x", lossless=False, on_miss="low-bit")
    with pytest.raises(ConfigError, match="memory of one GPU"):
        check_combination(EngineSettings(policy=policy, budget=Budget(share=0.5), shards=ShardSettings(count=2)))


@pytest.mark.parametrize("prefetch", ["none", "next-gate"])
def test_simulated(prefetch: str, tmp_path: Path) -> None:
    """The preset's replay loads fewer bytes than loading all in full, within the budget and with checks."""
    traces.write(tmp_path, traces.header(experts=16, top_k=4), [[1, 2, 3]] * 3, decodes=12)
    trace = Trace(tmp_path)
    header = trace.header.model_copy(update={"hidden": 64, "slot_bytes": 3 * 64 * 32 * 4})  # wide enough to pack
    packed = replica_bytes(header, 4)
    assert packed == PackedShape(64, 32, 4, 64).nbytes()
    loaded, took = [], []
    for on_miss in ("load", "low-bit"):
        policy = PolicySettings(
            name="x", lossless=False, on_miss=on_miss, prefetch={"kind": prefetch},  # type: ignore[arg-type]
            low_bit={"share": 0.3} if on_miss == "low-bit" else {},
        )  # fmt: skip
        machine = Machine(name="m", link_gbps=0.05, **traces.COSTS.model_dump())
        prefetching = policy.make_prefetch(PolicyContext(3, 16, 4))
        policies = policies_of(policy, header, machine, Budget(share=0.4), eviction_of(policy, header), prefetching)
        engine = SimulatedEngine(header, machine, Budget(share=0.4), policies, check=True)
        served = serve(engine, trace.requests())
        stats = engine.live_stats()
        total = stats.total()
        assert 0 < stats.expert_bytes_peak <= stats.expert_budget_bytes
        assert (total.low_bit_pairs > 0) == (stats.low_bit_slots > 0) == (on_miss == "low-bit")
        loaded.append(total.bytes_loaded)
        took.append(served.tpot_s)
    assert loaded[1] < loaded[0]
    assert took[1] < took[0]
