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
    until(lambda: _generate(runtime) == tokens and runtime.actor_health("matcher")["posted"] > 0, runtime.health)
    account, stats = runtime.actor_health("matcher"), runtime.stats()
    assert account["shards_connected"] == 1
    assert account["maps"] >= _TOKENS
    assert stats.matcher["commands"] > 0


def test_killed_in_the_middle_of_a_request(runtime: Deployment) -> None:
    undisturbed = _generate(runtime)
    until(lambda: runtime.actor_health("matcher")["unsaved"] == 0, lambda: "no snapshot was written")
    before = runtime.actor_health("matcher")
    assert _generate(runtime, kill=before["pid"]) == undisturbed
    until(lambda: runtime.health()["matcher"] == "connected", lambda: "the matcher did not come back")
    after = runtime.actor_health("matcher")
    assert after["pid"] != before["pid"]
    assert after["begun_from"] == "snapshot"
    assert after["maps"] >= before["maps"]
    assert runtime.stats().matcher["lost"] == 1
    assert _generate(runtime) == undisturbed
    assert runtime.actor_health("matcher")["commands"] > 0
