"""Replicas of a runtime: each is counted beside those before it, and all are one deployment."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import FAKE_FACTS

from tiermoe.cluster.config import engine_settings, load_run_config
from tiermoe.cluster.deployed_actors import family, group_id, new_id, split_name
from tiermoe.cluster.topology.estimate import PlanResult, make_plans
from tiermoe.cluster.topology.inputs import local_ray
from tiermoe.cluster.topology.spec import NodeInfo
from tiermoe.errors import ConfigError


def _plans(replicas: int, **resources: float) -> list[PlanResult]:
    options: dict[str, Any] = {"policy": "next-gate", "threads": 1, "device": "cpu", "budget": 0.5}
    config = load_run_config(None, options | {"cluster": {"replicas": replicas}})
    settings = engine_settings(config)
    given = {"CPU": float(local_ray(config, settings).cpus), "memory": 1e12} | resources
    return make_plans(config, settings, FAKE_FACTS, [NodeInfo("n", "h", True, given)], "this machine", here=False)


def test_replicas_share_mapped_pages_and_nothing_else() -> None:
    (alone,) = _plans(1)
    (load,) = alone.topology.loads
    own, mapped = load.host_bytes - load.kinds.mapped, load.kinds.mapped
    assert own > 0
    assert mapped > 0
    first, second = _plans(2, memory=2 * own + mapped)
    assert first.topology.actors == second.topology.actors == alone.topology.actors
    assert any("2 replica groups" in note for note in first.notes)
    with pytest.raises(ConfigError, match=r"replica group 2 of 2 does not fit.*host memory.*lower cluster.replicas"):
        _plans(2, memory=2 * own + mapped - 1)


def test_replicas_count_the_cpus_of_those_before_them() -> None:
    with pytest.raises(ConfigError, match=r"replica group 2 of 2 does not fit.*CPU"):
        _plans(2, CPU=float(local_ray_cpus()))


def local_ray_cpus() -> int:
    config = load_run_config(None, {"policy": "next-gate", "threads": 1, "device": "cpu"})
    return local_ray(config, engine_settings(config)).cpus


def test_the_actors_of_replicas_have_the_deployments_id() -> None:
    name = new_id()
    second = group_id(name, 1)
    assert group_id(name, 0) == name
    assert split_name(f"{second}/ndp/0") == (second, "ndp/0")
    assert family(second) == family(name) == name
