"""Recorded layers in one native call (`backend.RecordedRun`): the same as one by one, as the engine runs them."""

from __future__ import annotations

from typing import Any

import decision_rig
import pytest

from tiermoe.cluster.config import load_policy, policy_names
from tiermoe.cluster.simulate.executor import SimulatedEngine
from tiermoe.cluster.simulate.hit_rates import serve
from tiermoe.cluster.simulate.trace import Trace

SHARE = 0.5  # of the kernels' speed while a copy is under way


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return Trace(decision_rig.frozen_trace(tmp_path_factory.mktemp("recorded") / "trace"))


def _presets() -> list[str]:
    return [name for name in policy_names() if decision_rig.runs_on(name, "slow") and _alone(name)]


def _alone(name: str) -> bool:
    settings = load_policy(name)
    return not (settings.uses_ndp or settings.reroutes or settings.low_bit is not None)


def replayed(trace: Trace, preset: str, batch: int, one_by_one: bool) -> tuple[SimulatedEngine, dict[str, Any], str]:
    costs = {"kernel_share": SHARE, "load_s": 3e-6, "miss_s": 7e-6, "wait_s": 5e-6}
    engine = decision_rig.engine_of(preset, trace, decision_rig.SCRIPTS["slow"], check=False, **costs)
    if one_by_one:
        engine.recorded = None
    serve(engine, trace.requests(), batch)
    return engine, engine.live_stats().as_dict(), engine.clock.now_s.hex()


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("preset", _presets())
def test_one_call_is_layer_by_layer(trace: Trace, preset: str, batch: int) -> None:
    fast, counted, clock = replayed(trace, preset, batch, False)
    assert fast.recorded is not None
    slow, expected, expected_clock = replayed(trace, preset, batch, True)
    assert (counted, clock) == (expected, expected_clock)
    assert fast.cache.residency.states.tolist() == slow.cache.residency.states.tolist()
