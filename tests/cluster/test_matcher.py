"""The matcher as a Ray actor beside two GPUs: killed with SIGKILL it comes back with its maps; no request notices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray_nodes
from ray_nodes import until

from tiermoe.cluster.deploy import Deployment

pytestmark = pytest.mark.slow

_TOKENS = 80


@pytest.fixture(scope="module")
def runtime() -> Iterator[Deployment]:
    with ray_nodes.deployed(policy="fmoe", cluster={"shards": 2}, matcher={"snapshot_s": 0.05}) as deployment:
        yield deployment


def _generate(runtime: Deployment, kill: int | None = None) -> list[int]:
    return ray_nodes.generate(runtime, ray_nodes.prompt(), _TOKENS, kill)


def test_commands_reach_both_gpus(runtime: Deployment) -> None:
    assert runtime.plan["matcher"]["state"] == "serving"
    assert runtime.health()["matcher"] == "connected"
    tokens = _generate(runtime)

    def reached() -> bool:
        return _generate(runtime) == tokens and ray_nodes.actor_health(runtime, "matcher")["posted"] > 0

    until(reached, runtime.health)
    account, stats = ray_nodes.actor_health(runtime, "matcher"), runtime.stats()
    assert account["shards_connected"] == 1
    assert account["maps"] >= _TOKENS
    assert stats.matcher["commands"] > 0


def test_killed_in_the_middle_of_a_request(runtime: Deployment) -> None:
    undisturbed = _generate(runtime)
    until(lambda: ray_nodes.actor_health(runtime, "matcher")["unsaved"] == 0, lambda: "no snapshot was written")
    before = ray_nodes.actor_health(runtime, "matcher")
    assert _generate(runtime, kill=before["pid"]) == undisturbed
    until(lambda: runtime.health()["matcher"] == "connected", lambda: "the matcher did not come back")
    after = ray_nodes.actor_health(runtime, "matcher")
    assert after["pid"] != before["pid"]
    assert after["begun_from"] == "snapshot"
    assert after["maps"] >= before["maps"]
    assert runtime.stats().matcher["lost"] == 1
    assert _generate(runtime) == undisturbed
    assert ray_nodes.actor_health(runtime, "matcher")["commands"] > 0
