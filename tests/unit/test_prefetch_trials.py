"""Prefetch that does not pay turns itself off, and is tried again."""

from __future__ import annotations

from pathlib import Path

import pytest
import traces
from orders_reference import Lru

from tiermoe.actors.budget import Budget
from tiermoe.actors.policies.prefetch import NextGatePrefetch, PrefetchPolicy, RandomPrefetch
from tiermoe.actors.policies.prefetch_trials import DecodeForward, PrefetchTrials
from tiermoe.cluster.config import load_policy
from tiermoe.cluster.report.status_tables import _prefetch_rows
from tiermoe.cluster.simulate.executor import Policies, SimulatedEngine, eviction_of, policies_of
from tiermoe.cluster.simulate.hit_rates import serve
from tiermoe.cluster.simulate.machine import Machine
from tiermoe.cluster.simulate.trace import Trace

FIRST, BLOCK, HOLD = 4, 8, 40


def trials() -> PrefetchTrials:
    return PrefetchTrials(BLOCK, 2, FIRST, HOLD)


def played(tested: PrefetchTrials, on: DecodeForward, off: DecodeForward, forwards: int) -> list[bool]:
    """Whether each forward prefetched, where one with prefetch measures `on` and one without `off`."""
    found, before = list[bool](), None
    for _ in range(forwards):
        found.append(tested.next(1, before))
        before = on if found[-1] else off
    return found


TRIAL = [True] * BLOCK + [False] * 2 * BLOCK + [True] * BLOCK


@pytest.mark.parametrize(
    ("on", "off", "pays"),
    [
        (DecodeForward(10.0, 2.0), DecodeForward(11.0, 4.0), True),  # saves 2, costs 1
        (DecodeForward(10.0, 2.0), DecodeForward(9.5, 4.0), False),  # saves 2, costs 2.5
        (DecodeForward(10.0, 4.0), DecodeForward(9.0, 3.0), False),  # prefetch delays demand
        (DecodeForward(10.0, 2.0), DecodeForward(10.0, 2.0), False),  # saves nothing
    ],
)
def test_it_pays_if_it_saves_more_waits_than_it_costs(on: DecodeForward, off: DecodeForward, pays: bool) -> None:
    tested = trials()
    found = played(tested, on, off, FIRST + len(TRIAL) + HOLD + len(TRIAL))
    assert found == [True] * FIRST + TRIAL + [pays] * HOLD + TRIAL  # then it is tried again
    assert tested.result.trials == 1
    assert tested.result.pays is pays
    assert tested.result.saved_wait_s == pytest.approx(off.waited_s - on.waited_s)
    assert tested.result.cost_s == pytest.approx(on.elapsed_s - on.waited_s - off.elapsed_s + off.waited_s)
    assert tested.result.paused_forwards == found.count(False)


def test_a_trial_with_other_rows_is_given_up() -> None:
    tested, same = trials(), DecodeForward(1.0, 0.5)
    for rows in (1,) * (FIRST + BLOCK + 1):
        tested.next(rows, same)
    assert [tested.next(2, same) for _ in range(FIRST)] == [True] * FIRST  # as before the trial
    assert [tested.next(2, same) for _ in range(len(TRIAL) + 1)] == [*TRIAL, False]
    assert tested.result.trials == 1


def test_unmeasured_forwards_decide_nothing() -> None:
    tested = trials()
    assert [tested.next(1, None) for _ in range(FIRST + len(TRIAL) + 1)][-1]
    assert tested.result.trials == 0


@pytest.mark.parametrize(
    ("policy", "gbps", "pays"),
    [
        (NextGatePrefetch(3, 16, 2), 0.002, True),  # a perfect gate
        (RandomPrefetch(3, 16, 2), 0.0005, False),  # demand waits behind useless copies
        (RandomPrefetch(3, 16, 2), 0.006, False),  # some waits are saved, and the host's work is longer
    ],
)
def test_a_simulated_engine_decides(tmp_path: Path, policy: PrefetchPolicy, gbps: float, pays: bool) -> None:
    traces.write(tmp_path / "t", traces.header(experts=16), [[1, 2]], decodes=150)
    trace, tested = Trace(tmp_path / "t"), PrefetchTrials(first=32)
    machine = Machine(name="tiny", **traces.COSTS.model_dump(), link_gbps=gbps, load_s=1e-5)
    policies = Policies(Lru(), policy, trials=tested)
    engine = SimulatedEngine(trace.header, machine, Budget(nbytes=36_000), policies, check=True)
    serve(engine, trace.requests())
    assert engine.stats.prefetch_trials is tested.result
    assert tested.result.trials == 1
    assert tested.result.pays is pays
    assert tested.result.cost_s > 0  # `load_s`
    assert tested.result.paused_forwards == 32 + (0 if pays else 150 - 32 - 64)  # of the trial, and after it


@pytest.mark.parametrize(("preset", "adapts"), [("next-gate", True), ("mixtral-offloading", False), ("hobbit", False)])
def test_presets_of_the_user_adapt(tmp_path: Path, preset: str, adapts: bool) -> None:
    settings = load_policy(preset)
    assert settings.adapts_prefetch is adapts
    if settings.lossless:
        traces.write(tmp_path / "t", traces.header(), [[1]], decodes=1)
        header = Trace(tmp_path / "t").header
        machine = Machine(name="tiny", **traces.COSTS.model_dump())
        policy = NextGatePrefetch(3, 6, 2)
        policies = policies_of(settings, header, machine, Budget(share=0.5), eviction_of(settings, header), policy)
        engine = SimulatedEngine(header, machine, Budget(share=0.5), policies)
        assert (engine.stats.prefetch_trials is not None) is adapts


def test_the_summary_says_so() -> None:
    shown = {"pays": False, "trials": 2, "saved_wait_s": 0.001, "cost_s": 0.0015, "paused_forwards": 7}
    (row,) = _prefetch_rows({"prefetch_trials": shown})
    assert row == (
        "prefetch is", "paused, since it does not pay; saves 1.000 ms of waits a token and costs 1.500 ms, in the last "
        "of 2 trials; 7 decode steps without it",
    )  # fmt: skip
