"""Pre-eviction on the cache, evictions that are copied back, and both on the simulated executor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import traces
from activeevict_reference import NativeState
from cache_rigs import begin_layer, end_layer
from numpy.typing import NDArray
from orders_reference import Lru
from reference import LayerPlan

from tiermoe.actors.budget import Budget
from tiermoe.actors.engine.cache.cache import ExpertCache
from tiermoe.actors.engine.cache.device import CpuDevice
from tiermoe.actors.engine.cache.links import loader_link
from tiermoe.actors.engine.cache.loader import Loader
from tiermoe.actors.engine.cache.places import thread_link
from tiermoe.actors.engine.cache.slot_map import SlotMap
from tiermoe.actors.engine.cache.slots import LayerWeights, SlotPool
from tiermoe.actors.engine.pre_evicting import PreEvicting, last_rows
from tiermoe.actors.engine.rerouting import reroute_view
from tiermoe.actors.engine.stats import EngineStats, LayerStats, Timeline
from tiermoe.actors.policies.activeevict import BudgetAwareTopK, ImportanceEviction, PreEviction
from tiermoe.actors.policies.eviction import EvictionPolicy
from tiermoe.actors.policies.prefetch import Span
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.settings import LinkSettings
from tiermoe.actors.store.format import ExpertShape
from tiermoe.cluster.config import load_policy
from tiermoe.cluster.simulate.executor import PLAIN, Policies, SimulatedEngine, eviction_of, policies_of
from tiermoe.cluster.simulate.hit_rates import serve
from tiermoe.cluster.simulate.machine import Machine
from tiermoe.cluster.simulate.trace import Trace

LAYERS, EXPERTS = 2, 4  # keys 0-3 are layer 0, 4-7 layer 1
SHAPE = ExpertShape(num_experts=EXPERTS, hidden=4, intermediate=3, gates=2, has_bias=False)
BYTES = SHAPE.nbytes(4)
PRESETS = ("activeevict-lossless", "activeevict-prediction-only", "activeevict-hotness-only", "activeevict-lru")
Make = Callable[..., ExpertCache]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[ExpertCache] = []

    def cache(
        slots: int, eviction: EvictionPolicy | None = None, writeback: bool = False, native: bool = False
    ) -> ExpertCache:
        weights = [
            LayerWeights(tuple(torch.full(shape, float(layer + 1)) for shape in SHAPE.stacked().values()))
            for layer in range(LAYERS)
        ]
        pool = SlotPool.allocate(SHAPE, slots, torch.float32, torch.device("cpu"))
        where = SlotMap(pool, weights, EXPERTS, slots, BYTES)
        found = ExpertCache(
            where, thread_link(where, 1e9, 0.0) if native else loader_link(Loader(CpuDevice(LinkSettings())), where),
            eviction or Lru(), EngineStats(layers=[LayerStats() for _ in range(LAYERS)]), Timeline(False),
            writeback=writeback,
        )  # fmt: skip
        made.append(found)
        return found

    yield cache
    for found in made:
        found.close()


def forward(cache: ExpertCache, layer: int, *experts: int) -> None:
    end_layer(cache, begin(cache, layer, *experts))
    cache.check_integrity()


def begin(cache: ExpertCache, layer: int, *experts: int) -> LayerPlan:
    """The first half of a layer's turn, as `MoeLayer` takes it."""
    return begin_layer(cache, layer, [layer * EXPERTS + e for e in experts])


def seen(ids: NDArray[Any]) -> Any:
    """A layer's view, as far as pre-eviction reads it."""
    return SimpleNamespace(picked=ids)


def scores(*rows: Sequence[float]) -> Callable[[int, Any], NDArray[np.floating]]:
    return lambda layer, hidden: np.array(rows)


class TestPreEvicting:
    def test_the_least_important_experts_make_room_for_the_predicted_ones(self, make: Make) -> None:
        eviction = ImportanceEviction(LAYERS, EXPERTS, alpha=0.5, top_k=2)
        cache = make(4, eviction)
        forward(cache, 0, 0, 1)
        forward(cache, 1, 2, 3)
        pre = PreEvicting(PreEviction(2, 0.0, 2), cache, LAYERS, EXPERTS, scores([5.0, 4.0, 0.0, 0.0]))
        NativeState(eviction.state).saw(0, np.array([[0, 1], [0, 1]]))
        pre.layer(0, seen(np.array([[0, 1]])))
        assert cache.residency.free_slots == 2  # experts 0 and 1 of layer 1 are predicted, and not there
        assert set(cache.residency.held()) == {0, 1}
        forward(cache, 1, 0, 1)
        assert set(cache.residency.held()) == {0, 1, 4, 5}

    def test_the_first_layer_goes_by_its_last_rows_of_the_forward_before(self, make: Make) -> None:
        asked: list[int] = []

        def score(layer: int, hidden: Any) -> NDArray[np.floating]:
            asked.append(layer)
            return np.array([[9.0, 8.0, 0.0, 0.0], [0.0, 0.0, 8.0, 9.0]])

        cache = make(4)
        forward(cache, 0, 0, 1)
        forward(cache, 1, 0, 1)
        pre = PreEvicting(PreEviction(2, 0.0, 0), cache, LAYERS, EXPERTS, score)
        pre.begin_forward(last_rows([Span("a", 0, 2, decode=False)]))
        pre.layer(0, seen(np.array([[0, 1], [2, 3]])))
        freed = cache.residency.free_slots
        pre.layer(1, seen(np.array([[0, 1], [2, 3]])))
        assert asked == [0, 1]
        assert freed == 2  # of layer 1 all four are predicted, two are there
        assert cache.residency.free_slots == 2  # of layer 0 the last row's 2 and 3, which are not there


def test_widths_go_by_what_is_free_at_this_moment(make: Make) -> None:
    cache = make(3)
    forward(cache, 0, 0, 1, 2)
    cache.core.vacate(1, 1)
    view = reroute_view(cache, 0, 3)
    assert (view.vacant, view.free_slots, view.available.tolist()) == (1, 1, [False, True, True, False])
    ids, weights = np.array([[1, 3, 0]]), np.array([[0.5, 0.3, 0.2]], np.float32)
    found = BudgetAwareTopK().reroute(0, ids, weights, None, view)
    assert found.ids.tolist() == [[1, 3, 1]]
    assert found.weights[0].tolist() == pytest.approx([0.625, 0.375, 0.0])
    assert found.dropped == 1
    plain = BudgetAwareTopK(renormalise=False).reroute(0, ids, weights, None, view)
    assert plain.weights[0].tolist() == pytest.approx([0.5, 0.3, 0.0])
    assert BudgetAwareTopK(min_top_k=3).reroute(0, ids, weights, None, view).dropped == 0


class TestWriteback:
    def test_the_link_is_busy_both_ways(self) -> None:
        """A replay's copies take twice the time once slots are used again."""
        header, step = traces.header(), Machine(name="tiny", **traces.COSTS.model_dump(), link_gbps=2e-3)
        busy = []
        for writeback in (False, True):
            settings = PLAIN.model_copy(update={"evict_writeback": writeback})
            engine = SimulatedEngine(header, step, Budget(share=0.3), Policies(Lru(), settings=settings), check=True)
            engine.cache.core.preload(range(engine.stats.slots))
            forward(engine.cache, 1, 2, 3)
            total = engine.live_stats().total()
            busy.append(total.link_s)
            assert total.writeback_link_s == pytest.approx(total.link_s / 2 if writeback else 0.0)
        assert busy[1] == pytest.approx(2 * busy[0])


def replayed(trace: Trace, preset: str, budget: float = 0.4) -> tuple[EngineStats, float]:
    chosen, header = load_policy(preset), trace.header
    step = Machine(name="tiny", **traces.COSTS.model_dump(), link_gbps=2e-3)
    policies = policies_of(chosen, header, step, Budget(share=budget), eviction_of(chosen, header), None)
    engine = SimulatedEngine(header, step, Budget(share=budget), policies)
    tpot_s = serve(engine, trace.requests()).tpot_s
    return engine.live_stats(), tpot_s


@pytest.mark.parametrize("preset", PRESETS)
def test_a_replay_frees_slots_ahead_and_fetches_only_what_is_used(preset: str, tmp_path: Path) -> None:
    traces.write(tmp_path / "t", traces.header(), [[1, 2, 3], [7], [9, 9, 1, 4], [5, 6]])
    stats, tpot_s = replayed(Trace(tmp_path / "t"), preset)
    total = stats.total()
    assert total.vacated > 0
    assert total.bytes_loaded == total.bytes_loaded_demand
    assert total.bytes_wasted == total.bytes_written_back == 0
    assert total.bytes_premature <= total.bytes_loaded
    assert stats.dropped == 0
    again, _ = replayed(Trace(tmp_path / "t"), preset)
    assert again == stats  # deterministic
    assert tpot_s > 0


def preset(**changes: Any) -> PolicySettings:
    return PolicySettings.model_validate({"name": "test", "lossless": True} | changes)
