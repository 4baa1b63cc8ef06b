"""Rules of other systems for misses: each decision against a transcription of the published rule, written here."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermoe.actors.policies.auto import Action, Costs, LayerPlan
from tiermoe.actors.policies.hybrid import FreeToken, HybridRule, LlamaCppCache
from tiermoe.actors.policies.registry import PolicyContext, make
from tiermoe.cluster.config import load_policy

LAYERS, EXPERTS, TOP_K = 2, 8, 2
ABSENT, LOADING, RESIDENT = 0, 1, 2


def started(
    name: str, *, copy_s: float = 1.0, near_s: float = 0.4, gpu_s: float = 0.1, row_s: float = 0.0, workers: int = 1,
    free_rows: float = 1.0, message_s: float = 0.0,
) -> Any:  # fmt: skip
    """The rule of a preset, with nothing resident."""
    rule = make("placement", load_policy(name).placement, PolicyContext(LAYERS, EXPERTS, TOP_K))
    assert isinstance(rule, HybridRule)
    costs = Costs(copy_s, gpu_s, row_s, near_s, 2 * near_s, free_rows, message_s, 0.5)
    return rule.start(costs, workers, np.zeros((LAYERS, EXPERTS), np.uint8))


def planned(
    rule: HybridRule, needed: list[int], rows: list[int] | None = None, layer: int = 0, **more: Any
) -> LayerPlan:
    counts = np.array([1] * len(needed) if rows is None else rows, np.int32)
    return rule.plan(layer, np.array(needed, np.int32), counts, 10.0, 10.0, **more)


def near(plan: LayerPlan) -> list[bool]:
    return (plan.actions == Action.NEAR_DATA).tolist()


# -- llama-cpp-cache ---------------------------------------------------------------------------------------------------


def test_llama_cpp_computes_every_miss_near_data_and_copies_it_behind() -> None:
    rule = started("llama-cpp-cache")
    assert isinstance(rule, LlamaCppCache)
    rule.states[1, [1, 2]] = RESIDENT, LOADING
    plan = planned(rule, [4, 1, 2, 7], layer=1)
    assert plan.actions.tolist() == [Action.NEAR_DATA, Action.RUN_HERE, Action.NEAR_DATA, Action.NEAR_DATA]
    assert [(one.key, one.victim) for one in plan.wanted] == [(EXPERTS + 4, None), (EXPERTS + 7, None)]
    assert plan.end_s == pytest.approx(10.0 + 3 * 0.4)
    assert planned(rule, [4, 1], prompt_tokens=9).wanted == []  # a prompt does not empty the cache


# -- freetoken ---------------------------------------------------------------------------------------------------------


def share_of_the_link(misses: int, pcie: float, cpu: float) -> int:
    """fetched : computed = pcie : (cpu - pcie), the whole number of experts with which both sides end soonest. The CPU
    computes at `cpu` where the copies are counted in: alone it would be the share pcie / cpu of all misses."""
    if cpu <= pcie:
        return misses
    exact = misses * pcie / (pcie + (cpu - pcie))
    around = [int(exact), min(misses, int(exact) + 1)]
    ends = [max(n / pcie, (misses - n) / cpu) for n in around]
    return around[0] if ends[0] <= ends[1] else around[1]


def test_freetoken_divides_misses_by_bandwidth() -> None:
    for misses, copy_s, near_s in product(range(EXPERTS + 1), (0.5, 1.0, 3.0), (0.1, 0.26, 0.5, 2.0)):
        rule = started("freetoken", copy_s=copy_s, near_s=near_s)
        assert rule.fetched(misses) == share_of_the_link(misses, 1 / copy_s, 1 / near_s), (misses, copy_s, near_s)
    assert started("freetoken", near_s=0.8, workers=4).fetched(5) == started("freetoken", near_s=0.2).fetched(5) == 1


@given(steps=st.lists(st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=6, unique=True), max_size=8))
def test_freetoken_fetches_what_was_needed_last(steps: list[list[int]]) -> None:
    rule, history = started("freetoken"), list[set[int]]()
    assert isinstance(rule, FreeToken)
    rule.states[0, [0, 1]] = RESIDENT
    for needed in steps:
        age = {e: next((i for i, used in enumerate(reversed(history)) if e in used), 99) for e in needed}
        missing = [e for e in needed if e > 1]
        best = sorted(missing, key=lambda e: (age[e], needed.index(e)))[: share_of_the_link(len(missing), 1.0, 2.5)]
        plan = planned(rule, needed)
        loads = [e for e, action in zip(needed, plan.actions.tolist(), strict=True) if action == Action.LOAD]
        assert sorted(loads) == sorted(best)
        assert near(plan) == [e in missing and e not in best for e in needed]
        assert plan.wanted == []
        history.append(set(needed))


def test_freetoken_loads_prompts_and_waits_for_what_comes() -> None:
    rule = started("freetoken")
    rule.states[0, 3] = LOADING
    assert planned(rule, [1, 2, 3], prompt_tokens=4).actions.tolist() == [Action.LOAD, Action.LOAD, Action.WAIT]
    plan = planned(rule, [3, 5], flight_keys=np.array([3], np.int32), arrival_s=np.array([12.0]))
    assert plan.actions.tolist() == [Action.WAIT, Action.NEAR_DATA]
    assert plan.end_s == pytest.approx(12.1)


# -- hybrimoe ----------------------------------------------------------------------------------------------------------


def list_schedule(cached: list[int], uncached: list[int], load: dict[int, int], times: Any) -> tuple[set[int], float]:
    """Two queues filled from the two ends of one list, as the original's simulation; (GPU queue, end)."""
    queue = sorted(cached, key=lambda e: -load[e]) + sorted(uncached, key=lambda e: -load[e])
    gpu: list[int] = []
    gpu_total = cpu_total = move_total = 0.0
    cpu = 0
    while queue:
        head, tail = queue[0], queue[-1]
        gpu_time = times.gpu(load[head])
        if head in uncached and move_total + times.move > gpu_total:
            gpu_time += move_total + times.move - gpu_total
        cpu_time = times.cpu(load[tail]) + (0 if cpu else times.start)
        if gpu_total + gpu_time <= cpu_total + cpu_time:
            move_total += times.move if head in uncached else 0.0
            gpu_total += gpu_time
            gpu.append(queue.pop(0))
        else:
            cpu_total += cpu_time
            cpu += 1
            queue.pop()
    return set(gpu), max(gpu_total, cpu_total)


class Times:
    """Sums of these are exact, so that ties are."""

    move, start = 1.0, 0.0625

    @staticmethod
    def gpu(rows: int) -> float:
        return 0.125 + (rows - 1) * 0.03125

    @staticmethod
    def cpu(rows: int) -> float:
        return 0.375 * max(1.0, rows / 2)


def hybrimoe() -> Any:
    return started("hybrimoe", near_s=0.375, gpu_s=0.125, row_s=0.03125, free_rows=2.0, message_s=0.0625)


@settings(max_examples=200, deadline=None)
@given(
    experts=st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=EXPERTS),
)  # fmt: skip
def test_hybrimoe_schedules_from_both_ends(experts: list[tuple[int, bool]]) -> None:
    rule, rows, needed = hybrimoe(), [count for count, _ in experts], list(range(len(experts)))
    cached = [e for e, (_, there) in enumerate(experts) if there]
    uncached = [e for e in needed if e not in cached]
    rule.states[0, cached] = RESIDENT
    want, end_s = list_schedule(cached, uncached, dict(enumerate(rows)), Times)
    plan = planned(rule, needed, rows)
    assert near(plan) == [e not in want for e in needed]
    assert rule.schedule(rows, [e in cached for e in needed])[1] == pytest.approx(end_s)
    assert plan.actions.tolist().count(Action.LOAD) == len(want - set(cached))


def test_hybrimoe_scores_by_the_router() -> None:
    """alpha 0.5: S of the 2 K = 4 most probable rises to half of their probability, all others halve."""
    rule, p = hybrimoe(), np.array([0.3, 0.25, 0.2, 0.1, 0.06, 0.05, 0.03, 0.01])
    rule.scored(1, np.log(p)[None])
    rule.scored(1, np.log(p[::-1])[None])
    first, second = np.where(p >= 0.1, p, 0), np.where(p[::-1] >= 0.1, p[::-1], 0)
    want = 0.5 * second + 0.5 * 0.5 * first
    assert rule.worths[1] == pytest.approx(want)
    assert not rule.worths[0].any()


def test_hybrimoe_prefetches_what_would_shorten_a_later_layer_while_the_link_rests() -> None:
    """Two rows want expert 3 of the next layer, one each 4 and 5; a copy takes 1 s, the dense part 0.5 s."""
    logits = np.full((2, EXPERTS), -9.0)
    logits[:, 3], logits[0, 4], logits[1, 5] = 3.0, 2.0, 2.0
    rule = started("hybrimoe", near_s=0.8, message_s=0.05)
    rule.states[0, [0, 1]] = RESIDENT
    rule.foreseen(1, logits)
    load = {3: 2, 4: 1, 5: 1}
    times = type("T", (), {"move": 1.0, "start": 0.05, "gpu": lambda n: 0.1, "cpu": lambda n: 0.8 * n})
    base = list_schedule([], [3, 4, 5], load, times)[1]
    gains = {e: base - list_schedule([e], [o for o in load if o != e], load, times)[1] for e in load}
    best = max(load, key=lambda e: gains[e])
    plan = planned(rule, [0, 1, 2])  # near data 0.85 s, then 0.5 s: the link has time for one
    assert [(one.key - EXPERTS, one.worth_s) for one in plan.wanted] == [(best, pytest.approx(gains[best]))]
    rule.foreseen(1, logits)
    assert planned(rule, [0]).wanted == []  # over in 0.1 s
    rule.foreseen(1, logits)
    assert planned(rule, [0, 1, 2], prompt_tokens=4).wanted == []


# -- ktransformers -----------------------------------------------------------------------------------------------------


def test_ktransformers_is_static_ndp_by_another_name() -> None:
    """So whatever is shown of the one, such as its tokens, is of the other."""
    rival, ours = load_policy("ktransformers"), load_policy("static-ndp")
    assert rival.model_copy(update={"name": ours.name, "description": ours.description}) == ours


# -- all ---------------------------------------------------------------------------------------------------------------


def test_the_error_of_the_predicted_time_is_reported() -> None:
    rule = started("freetoken")
    for _ in range(20_000):
        planned(rule, [1])
        rule.took(0.8)
    assert rule.error() == pytest.approx(0.5, abs=1e-3)
