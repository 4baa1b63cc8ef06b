"""Split experts under pressure: random evictions, guesses and new cuts change no bit, and no plan gets stuck."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moe_stack import Call, Case, agrees, calls_of, engine_for, make_case

from tiermoe.actors.engine.engine import ExpertEngine
from tiermoe.actors.policies.moepic.split import CacheCut, SplitOptions
from tiermoe.actors.policies.residency import State

SPLIT = SplitOptions(kind="fixed", theta=0.5)
NEURONS = 16


def a_cut(draw: st.DrawFn, case: Case, tops: Sequence[int]) -> CacheCut:
    """Slots for these tops within the memory of all experts, often few."""
    left = case.layers * case.experts * NEURONS
    slots = [draw(st.integers(1, case.experts)) if top else 0 for top in tops]
    left -= sum(top * count for top, count in zip(tops, slots, strict=True))
    bottom = NEURONS - min(tops)
    return CacheCut(NEURONS, tuple(tops), tuple(slots), draw(st.integers(1, left // bottom)) if bottom else 0)


def disturb(engine: ExpertEngine, draw: st.DrawFn, call: Call) -> None:
    """Evict some of what is held, and guess. What is held is the loader's affair: no draw depends on it."""
    cache, residency, chance = engine.cache, engine.cache.residency, random.Random(draw(st.integers(0, 999)))
    cache.poll()
    for segment in sorted(residency.held()):
        if chance.random() < 0.25 and residency.state(segment) != State.ABSENT:
            cache.loads.evict(segment, call.layer)
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
    tops = [draw(st.integers(0, NEURONS)) for _ in range(case.layers)]
    roomy = CacheCut(
        NEURONS, tuple(tops), tuple(experts if top else 0 for top in tops),
        (case.layers * experts * NEURONS - experts * sum(tops)) // (NEURONS - min(tops)) if min(tops) < NEURONS else 0,
    )  # fmt: skip
    found: list[list[torch.Tensor]] = []
    for pressed in (False, True):
        prefetch = draw(st.sampled_from(["none", "next-gate"])) if pressed else "none"
        with engine_for(case, 1.0, prefetch, eviction=draw(st.sampled_from(["lru", "lcp"])), split=SPLIT) as engine:
            cache, out = engine.cache, list[torch.Tensor]()
            cache.recut(roomy)
            for call in calls:
                if pressed and draw(st.integers(0, 2)) == 0:
                    cache.recut(a_cut(draw, case, tops), cache.eviction.ranked(range(case.layers * experts)))
                    cache.check_integrity()
                if pressed:
                    disturb(engine, draw, call)
                out.append(engine.layers[call.layer].forward(call.hidden, call.ids, call.weights))
                assert not any(cache.residency.pinned(segment) for segment in cache.residency.held())
                assert cache.residency.bytes_held <= engine.stats().expert_budget_bytes
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
            tops = [draw(st.integers(0, NEURONS)) for _ in range(case.layers)]
            engine.cache.recut(a_cut(draw, case, tops), draw(st.permutations(range(case.layers * 4))))
            out.append(engine.layers[call.layer].forward(call.hidden, call.ids, call.weights))
    agrees(case, calls, out)
