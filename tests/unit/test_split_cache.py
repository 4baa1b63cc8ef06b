"""The cache under a cut: what it loads, counts, cancels and refuses; promises; the simulator.

Split experts under pressure: random evictions, guesses and new cuts change no bit, and no plan gets stuck.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import traces
from cache_rigs import KnownLoader, bytes_held, place_of, run_layer, tops_and_bottoms
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moe_stack import Call, Case, agrees, calls_of, engine_for, make_case

from tiermoe.actors.budget import Budget
from tiermoe.actors.engine.cache.cache import ExpertCache
from tiermoe.actors.engine.cache.device import CpuDevice
from tiermoe.actors.engine.cache.links import loader_link
from tiermoe.actors.engine.cache.slot_map import PendingSegment, SharedPending, SlotMap
from tiermoe.actors.engine.cache.slots import LayerWeights, PendingExpert, SlotPool
from tiermoe.actors.engine.engine import ExpertEngine
from tiermoe.actors.engine.stats import EngineStats, LayerStats, Timeline
from tiermoe.actors.policies.moepic.split import SplitLayout, SplitOptions
from tiermoe.actors.policies.prefetch import NextGatePrefetch
from tiermoe.actors.policies.residency import State
from tiermoe.actors.settings import LinkSettings
from tiermoe.actors.store.format import ExpertShape
from tiermoe.cluster.simulate.executor import Policies, SimulatedEngine
from tiermoe.cluster.simulate.machine import Machine
from tiermoe.cluster.simulate.trace import Trace

LAYERS, EXPERTS, KEYS, NEURONS = 2, 4, 8, 8
SHAPE = ExpertShape(num_experts=EXPERTS, hidden=16, intermediate=NEURONS, gates=2, has_bias=False)
NEURON_BYTES = SHAPE.nbytes(4) // NEURONS
CUT = SplitLayout(NEURONS, (2, 5), (2, 1), 3)  # 4 + 5 + 18 = 27 neurons of 32


class Split:
    """A cache of four experts' memory under a cut."""

    def __init__(self, cut: SplitLayout = CUT) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = SHAPE.stacked().values()
        self.weights = [LayerWeights(tuple(torch.randn(s, generator=generator) for s in shapes)) for _ in range(LAYERS)]
        device = CpuDevice(LinkSettings())
        self.loader = KnownLoader(device)
        pool = SlotPool.allocate(SHAPE, 4, torch.float32, torch.device("cpu"))
        where = SlotMap(pool, self.weights, EXPERTS, 4, SHAPE.nbytes(4), cut)
        self.cache = ExpertCache(
            where, loader_link(self.loader, where), tops_and_bottoms(LAYERS, EXPERTS),
            EngineStats(layers=[LayerStats() for _ in range(LAYERS)]), Timeline(False),
        )  # fmt: skip
        self.residency = self.cache.residency

    @property
    def stats(self) -> EngineStats:
        return self.cache.live_stats()

    def forward(self, layer: int, *experts: int) -> None:
        """One layer as `MoeLayer` runs it; each segment's place must hold its neurons at its turn."""
        cache = self.cache

        def check(segment: int) -> None:
            first, count = place_of(cache, segment, self.residency.slot(segment))
            begin = cache.split.tops[layer] if segment >= KEYS else 0  # type: ignore[union-attr]
            stored = self.weights[layer].expert(segment % EXPERTS)
            for found, whole in zip(cache.pool.neuron_range(first, count), stored, strict=True):
                assert torch.equal(found, whole[begin : begin + count])

        run_layer(cache, layer, [layer * EXPERTS + e for e in experts], check)
        cache.check_integrity()

    def settle(self) -> None:
        for segment in self.cache.core.under_way:
            assert self.loader.jobs[segment].done.wait(30)  # type: ignore[call-arg]  # an event's
        self.cache.poll()
        self.cache.check_integrity()


@pytest.fixture
def split() -> Iterator[Split]:
    made = Split()
    yield made
    made.cache.close()


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (replace(CUT, neurons=16), "experts of 16 neurons"),
        (SplitLayout(NEURONS, (2,), (2,), 2), "split of 1 layers"),
        (replace(CUT, buffer_slots=4), "a split of 33 neurons, the pool has 32"),
        (SplitLayout(NEURONS, (1, 1), (5, 1), 2), "5 slots for tops of 4"),
    ],
)
def test_a_cut_of_another_pool_changes_nothing(split: Split, cut: SplitLayout, message: str) -> None:
    split.forward(0, 0, 1)
    held = set(split.residency.held())
    with pytest.raises(ValueError, match=message):
        split.cache.set_split(cut)
    assert (split.cache.split, set(split.residency.held())) == (CUT, held)
    split.forward(0, 0, 1)
    assert split.stats.layers[0].hits == 2
    with pytest.raises(ValueError, match=message):
        Split(cut)


def test_whole_experts_stay_whole() -> None:
    case = make_case(0, 2, 4, 2, True, torch.float32)
    with engine_for(case, 1.0) as engine, pytest.raises(ValueError, match="cannot be split"):
        engine.cache.set_split(SplitLayout(16, (8, 8), (1, 1), 1))


class Whole:
    """A promise that counts."""

    def __init__(self, lasts: bool = True) -> None:
        self.lasts = lasts
        self.asked: list[list[Any]] = []
        self.taken = 0

    def ask(self, behind: Any) -> None:
        self.asked.append(list(behind))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        self.taken += 1
        return torch.arange(8.0).view(4, 2, 1), torch.arange(4.0).view(4, 1)


def test_both_segments_of_a_promised_expert_are_fetched_once() -> None:
    one, other = Whole(), Whole()
    shared = SharedPending(one)
    top, bottom = PendingSegment(shared, 0, 1), PendingSegment(shared, 1, 4)
    later = PendingSegment(SharedPending(other), 0, 4)
    assert isinstance(top, PendingExpert)
    top.ask([bottom, later])
    assert one.asked == [[other]]
    assert [t.flatten().tolist() for t in top.tensors()] == [[0, 1], [0]]
    bottom.ask([later])  # what has come is not asked for again
    assert (one.asked, other.asked) == ([[other]], [[]])
    assert [t.flatten().tolist() for t in bottom.tensors()] == [[2, 3, 4, 5, 6, 7], [1, 2, 3]]
    assert one.taken == 1


def test_a_promised_expert_that_does_not_last_is_fetched_for_each_segment() -> None:
    """Its memory may have another expert by then: an expert of the disk tier, once."""
    one = Whole(lasts=False)
    shared = SharedPending(one)
    top, bottom = PendingSegment(shared, 0, 1), PendingSegment(shared, 1, 4)
    for segment in (top, bottom):
        segment.ask([])
        segment.tensors()
    assert (one.asked, one.taken) == ([[], []], 2)


def test_a_cache_fetches_a_promised_expert_once() -> None:
    made = Split()
    whole = Whole()
    whole.tensors = lambda: made.weights[0].expert(1)  # type: ignore[method-assign]
    made.cache.where.weights = [type("Remote", (), {"expert": lambda self, index: whole})(), made.weights[1]]
    made.forward(0, 1)
    made.cache.close()
    assert made.stats.layers[0].bytes_loaded == 8 * NEURON_BYTES


def simulated(trace: Trace, cut: SplitLayout, prefetch: bool, gbps: float | None) -> SimulatedEngine:
    header = trace.header
    gate = NextGatePrefetch(header.layers, header.experts, header.top_k) if prefetch else None
    policies = Policies(tops_and_bottoms(header.layers, header.experts), gate, split=cut)
    machine = Machine(name="tiny", **traces.COSTS.model_dump(), link_gbps=gbps)
    return SimulatedEngine(header, machine, Budget(share=1.0), policies, check=True)


def test_bottoms_are_prefetched_where_every_top_is_cached(tmp_path: Path) -> None:
    """Guards: with every top in a slot a fixed split found nothing absent, and loaded all bottoms on demand."""
    traces.write(tmp_path / "t", traces.header(), [[1, 2, 3]], decodes=4)
    trace = Trace(tmp_path / "t")
    engine = simulated(trace, SplitLayout(10, (4,) * 3, (6,) * 3, 4), True, None)
    for part in next(iter(trace.requests())).iterations:
        engine.forward([("r", part)])
    assert engine.live_stats().total().bytes_loaded_prefetch > 0


SPLIT = SplitOptions(kind="fixed", theta=0.5)
WHOLE = 16


def a_cut(draw: st.DrawFn, case: Case, tops: Sequence[int]) -> SplitLayout:
    """Slots for these tops within the memory of all experts, often few."""
    left = case.layers * case.experts * WHOLE
    slots = [draw(st.integers(1, case.experts)) if top else 0 for top in tops]
    left -= sum(top * count for top, count in zip(tops, slots, strict=True))
    bottom = WHOLE - min(tops)
    return SplitLayout(WHOLE, tuple(tops), tuple(slots), draw(st.integers(1, left // bottom)) if bottom else 0)


def disturb(engine: ExpertEngine, draw: st.DrawFn, call: Call) -> None:
    """Evict some of what is held, and guess. What is held is the loader's affair: no draw depends on it."""
    cache, residency, chance = engine.cache, engine.cache.residency, random.Random(draw(st.integers(0, 999)))
    cache.poll()
    for segment in sorted(residency.held()):
        if chance.random() < 0.25 and residency.state(segment) != State.ABSENT:
            cache.core.leave([segment], call.layer)
    cache.check_integrity()
    cache.prefetch(call.prefetches)
    cache.check_integrity()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_pressure_changes_no_bit(data: st.DataObject) -> None:
    draw = data.draw
    experts = draw(st.integers(1, 5))
    case = make_case(
        draw(st.integers(0, 100)), draw(st.integers(1, 3)), experts, draw(st.integers(1, experts)), True, torch.float32
    )
    calls = calls_of(case, draw, forwards=draw(st.integers(1, 3)))
    tops = [draw(st.integers(0, WHOLE)) for _ in range(case.layers)]
    roomy = SplitLayout(
        WHOLE, tuple(tops), tuple(experts if top else 0 for top in tops),
        (case.layers * experts * WHOLE - experts * sum(tops)) // (WHOLE - min(tops)) if min(tops) < WHOLE else 0,
    )  # fmt: skip
    found: list[list[torch.Tensor]] = []
    for pressed in (False, True):
        prefetch = draw(st.sampled_from(["none", "next-gate"])) if pressed else "none"
        with engine_for(case, 1.0, prefetch, eviction=draw(st.sampled_from(["lru", "lcp"])), split=SPLIT) as engine:
            cache, out = engine.cache, list[torch.Tensor]()
            cache.set_split(roomy)
            for call in calls:
                if pressed and draw(st.integers(0, 2)) == 0:
                    cache.set_split(a_cut(draw, case, tops), cache.eviction.ranked(range(case.layers * experts)))
                    cache.check_integrity()
                if pressed:
                    disturb(engine, draw, call)
                out.append(engine.layers[call.layer].forward(call.hidden, call.ids, call.weights))
                assert cache.residency.pins == 0
                assert bytes_held(cache) <= engine.stats().expert_budget_bytes
            stats = engine.stats()
            assert stats.expert_bytes_peak == cache.pool.bytes <= stats.expert_budget_bytes
            total = stats.total()
            assert total.hits + total.misses == sum(len(call.ids.unique()) for call in calls)
            assert total.top_hits <= total.misses
            assert total.prefetched_hits <= total.hits
            assert sum(cache.uses) == total.hits + total.misses
            cache.flush()
            cache.check_integrity()
            found.append(out)
    agrees(case, calls, found[0])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_any_cut_gives_the_layers_output(data: st.DataObject) -> None:
    """Other ratios sum in another order, and give the same up to that; in half precision, too."""
    draw = data.draw
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    case = make_case(draw(st.integers(0, 100)), draw(st.integers(1, 3)), 4, 2, True, dtype)
    calls = calls_of(case, draw, forwards=2)
    with engine_for(case, 1.0, "next-gate", split=SPLIT) as engine:
        out = []
        for call in calls:
            tops = [draw(st.integers(0, WHOLE)) for _ in range(case.layers)]
            engine.cache.set_split(a_cut(draw, case, tops), draw(st.permutations(range(case.layers * 4))))
            out.append(engine.layers[call.layer].forward(call.hidden, call.ids, call.weights))
    agrees(case, calls, out)
