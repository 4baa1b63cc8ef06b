"""No slot is overwritten while a forward needs it: whatever the budget, the prefetches and the evictions.

A tiny engine without a transformers model: each MoE layer is called as its block would call it, with
random routing, and an adversary loads, evicts and prefetches other experts between the layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from cache_rigs import bytes_held
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moe_stack import HIDDEN, Call, agrees, calls_of, engine_for, make_case

from tiermoe.actors.budget import Budget
from tiermoe.actors.engine.engine import ExpertEngine
from tiermoe.actors.policies.residency import State


def disturb(engine: ExpertEngine, call: Call) -> None:
    """What another user of the cache might do between layers: load over a victim, prefetch."""
    cache, residency = engine.cache, engine.cache.residency
    for key, victim in call.swaps:
        cache.poll()
        if residency.state(key) != State.ABSENT:
            continue
        if residency.state(victim) == State.RESIDENT:
            cache.core.leave([victim], key // engine.experts)
        elif not residency.free_slots:
            continue
        cache.core.preload([key])
    cache.prefetch(call.prefetches)


def outputs(engine: ExpertEngine, calls: Sequence[Call], disturbed: bool) -> list[torch.Tensor]:
    out = []
    for call in calls:
        if disturbed:
            disturb(engine, call)
        out.append(engine.layers[call.layer].forward(call.hidden, call.ids, call.weights))
        assert engine.cache.residency.pins == 0
    return out


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_pressure_changes_no_bit(data: st.DataObject) -> None:
    """Also guards the choice of kernel: it looked at which experts ran in one call, which the budget decides."""
    draw = data.draw
    experts = draw(st.integers(1, 6))
    case = make_case(
        seed=draw(st.integers(0, 100)),
        layers=draw(st.integers(1, 3)),
        experts=experts,
        top_k=draw(st.integers(1, experts)),
        native=draw(st.booleans()),
        dtype=torch.float32,
    )
    calls = calls_of(case, draw, forwards=draw(st.integers(1, 4)))
    with engine_for(case, 1.0) as engine:
        expected = outputs(engine, calls, disturbed=False)
    agrees(case, calls, expected)

    slots = draw(st.integers(1, case.layers * case.experts))
    budget = slots * case.shape.nbytes(4) + draw(st.integers(0, case.shape.nbytes(4) - 1))
    prefetch, distance = draw(st.sampled_from([("none", 1), ("next-gate", 1), ("next-gate", 2)]))
    with engine_for(case, budget, prefetch, distance) as engine:
        found = outputs(engine, calls, disturbed=True)
        stats = engine.stats()
        assert stats.slots == slots
        assert stats.expert_bytes_peak <= stats.expert_budget_bytes
        assert engine.cache.pool.bytes == stats.expert_bytes_peak
        assert bytes_held(engine.cache) <= stats.expert_budget_bytes
        engine.cache.flush()
        engine.cache.check_integrity()
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("slots", [1, 2, 5, 8])
def test_half_precision_slots(slots: int) -> None:
    case = make_case(3, layers=2, experts=4, top_k=2, native=True, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    calls = []
    for step in range(6):
        hidden = torch.randn(7, HIDDEN, generator=generator).bfloat16()
        ids = torch.rand(7, 4, generator=generator).topk(2).indices
        calls.append(Call(step % 2, hidden, ids, torch.rand(7, 2, generator=generator).bfloat16(), [], [step]))
    with engine_for(case, slots * case.shape.nbytes(2), "next-gate") as engine:
        agrees(case, calls, outputs(engine, calls, disturbed=True))


def test_the_choice_of_kernel_is_each_experts_own() -> None:
    """Nine tokens for one expert and one for another: mean rows and own rows disagree on the kernel."""
    case = make_case(0, layers=1, experts=4, top_k=1, native=True, dtype=torch.float32)
    hidden = torch.randn(11, HIDDEN, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[0]] * 9 + [[1], [2]])
    found = []
    for slots in (1, 2, 4):
        with engine_for(case, slots * case.shape.nbytes(4)) as engine:
            engine.cache.core.preload(range(slots))
            found.append(engine.layers[0].forward(hidden, ids, torch.ones(11, 1)))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[2])


def test_an_expert_asked_for_twice_by_one_token_runs_once() -> None:
    case = make_case(0, layers=1, experts=4, top_k=3, native=True, dtype=torch.float32)
    call = Call(0, torch.ones(1, HIDDEN), torch.tensor([[2, 2, 0]]), torch.tensor([[0.5, 0.25, 1.0]]), [], [])
    with engine_for(case, case.shape.nbytes(4)) as engine:
        agrees(case, [call], outputs(engine, [call], disturbed=False))
        assert engine.stats().total().misses == 2


def test_what_raises_before_the_kernels_leaves_nothing_pinned() -> None:
    """Guards a prefetch that raised between the pins and the kernels: the pins stayed for good."""
    case = make_case(0, layers=2, experts=4, top_k=2, native=True, dtype=torch.float32)
    good = Call(0, torch.ones(1, HIDDEN), torch.tensor([[1, 2]]), torch.ones(1, 2), [], [])
    with engine_for(case, 2 * case.shape.nbytes(4), "next-gate") as engine:
        case.routers[1].resize_(4, HIDDEN + 1)  # the later router fails
        with pytest.raises(RuntimeError):
            engine.layers[0].forward(good.hidden, good.ids, good.weights)
        assert engine.cache.residency.pins == 0
        case.routers[1].resize_(4, HIDDEN)
        agrees(case, [good], outputs(engine, [good], disturbed=False))


def test_a_farther_prefetch_takes_no_slot_that_a_nearer_one_wants() -> None:
    """Guards distance 2: the guess for the second layer evicted residents that the guess for the first wanted."""
    case = make_case(0, layers=3, experts=4, top_k=2, native=True, dtype=torch.float32)
    ids, hidden = torch.tensor([[0, 1]]), torch.ones(1, HIDDEN)
    nearer = [4 + e for e in (case.routers[1] @ hidden[0]).topk(2).indices.tolist()]
    with engine_for(case, 4 * case.shape.nbytes(4), "next-gate", distance=2) as engine:
        cache = engine.cache
        cache.core.preload([*nearer, 0, 1])  # the nearer guesses are the oldest, the pool is full
        engine.layers[0].forward(hidden, ids, torch.ones(1, 2))
        assert set(nearer) <= set(cache.residency.held())


@given(st.integers(1, 400), st.integers(1, 10**9), st.data())
def test_a_share_loses_no_slot_and_no_byte(experts: int, slot_bytes: int, data: st.DataObject) -> None:
    """Guards the rounding of shares: a budget was one byte under the slots that it bought."""
    slots = data.draw(st.integers(1, experts))
    assert Budget(share=slots / experts).bytes_of(slot_bytes, experts) // slot_bytes == slots
    share = data.draw(st.floats(1 / experts, 1.0))
    held = Budget(share=share).bytes_of(slot_bytes, experts)
    assert int(share * experts) <= held // slot_bytes <= experts
    assert abs(held - share * experts * slot_bytes) <= 1 + 1e-9 * slot_bytes


def test_a_kernel_that_raises_leaves_nothing_pinned() -> None:
    """Guards pins that outlived a failed forward: later layers found ever fewer slots."""
    case = make_case(0, layers=1, experts=4, top_k=2, native=False, dtype=torch.float32)
    good = Call(0, torch.ones(1, HIDDEN), torch.tensor([[1, 2]]), torch.ones(1, 2), [], [])
    with engine_for(case, 2 * case.shape.nbytes(4)) as engine:
        with pytest.raises(RuntimeError):
            engine.layers[0].forward(torch.ones(1, HIDDEN + 1), torch.tensor([[0, 3]]), torch.ones(1, 2))
        agrees(case, [good], outputs(engine, [good], disturbed=False))
