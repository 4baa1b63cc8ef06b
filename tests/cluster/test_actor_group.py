"""A planned topology on a local Ray: two shards and two NDP workers, killed one by one while a request runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import ray_nodes
from ray_nodes import until
from serving import default_model_greedy

from tiermoe.cluster.attach import ActorRecord, actor_records, samples
from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.deploy import Deployment
from tiermoe.cluster.deployed_actors import role_of

_TOKENS = 64

pytestmark = pytest.mark.skipif(not default_model_dir().is_dir(), reason="the default model is not there")


@pytest.fixture(scope="module")
def prompt() -> tuple[int, ...]:
    return ray_nodes.prompt()


@pytest.fixture(scope="module")
def undisturbed(prompt: tuple[int, ...]) -> list[int]:
    """What the unmodified model says."""
    return default_model_greedy([prompt], _TOKENS)[0]


@pytest.fixture(scope="module")
def runtime() -> Iterator[Deployment]:
    cluster = {"shards": 2, "ndp_workers": 2}
    with ray_nodes.deployed(policy="context-ndp-full", budget="0.25", cluster=cluster) as deployment:
        yield deployment


def _records(runtime: Deployment) -> dict[str, ActorRecord]:
    return {r.role: r for r in actor_records() if r.deployment == runtime.id}


def _generate(runtime: Deployment, prompt: tuple[int, ...], kill: int | None = None) -> list[int]:
    return ray_nodes.generate(runtime, prompt, _TOKENS, kill)


def test_what_runs_is_what_was_planned(runtime: Deployment) -> None:
    planned = {role_of(actor) for actor in runtime.topology.actors}
    assert planned == {"lead", "shard/1", "store/0", "ndp/0", "ndp/1", "endpoints"}
    records = _records(runtime)
    assert {role: record.state for role, record in records.items()} == dict.fromkeys(planned, "ALIVE")
    assert len({record.pid for record in records.values()}) == len(planned)
    peers = {name: state for name, state in runtime.health().items() if "/" in name}
    assert peers == dict.fromkeys(("shard/1", "ndp/0", "ndp/1"), "connected")
    assert runtime.plan["ndp"]["transport"] == "shm"
    for actor in runtime.topology.having("shard", "ndp"):
        assert ray_nodes.actor_health(runtime, role_of(actor))["pid"] == records[role_of(actor)].pid


def test_shards_and_ndp_workers_give_the_models_own_tokens(
    runtime: Deployment, prompt: tuple[int, ...], undisturbed: list[int]
) -> None:
    assert _generate(runtime, prompt) == undisturbed
    lead, shard = runtime.shard_stats()
    assert shard["hits"] + shard["misses"] > 0
    assert lead["hits"] + lead["misses"] > 0
    assert all(ray_nodes.actor_health(runtime, f"ndp/{i}")["pairs"] > 0 for i in range(2))


def test_what_one_process_sent_is_what_the_other_received(runtime: Deployment, prompt: tuple[int, ...]) -> None:
    _generate(runtime, prompt)
    found = {sample.worker: sample for sample in samples(runtime.id)}
    records = _records(runtime)
    assert {name: (sample.problem, sample.pid, sample.host) for name, sample in found.items()} == {
        role: (None, record.pid, record.host) for role, record in records.items()
    }
    assert {sample.kind for sample in found.values()} == {"lead", "shard", "store", "ndp", "endpoints"}
    lead = found["lead"]
    assert set(lead.peers) == {"shard/1", "ndp/0", "ndp/1"}
    for name, here in lead.peers.items():
        there = found[name].counters
        assert here["rows_sent"] == here["rows_received"] == there["rows"] > 0
        assert (here["bytes_sent"], here["bytes_received"]) == (there["bytes_received"], there["bytes_sent"])
        assert here["waited_s"] > 0 < there["busy_s"]
    assert sum(found[f"ndp/{i}"].counters["pairs"] for i in range(2)) >= lead.counters["ndp_tokens"] > 0
    assert lead.counters["step_s"] > lead.counters["blocked_io_s"]
    assert all(sample.rss_bytes > 0 < sample.cpu_s for sample in found.values())


def test_status_shows_every_gpu(runtime: Deployment, prompt: tuple[int, ...]) -> None:
    _generate(runtime, prompt)
    command = [sys.executable, "-c", "from tiermoe.cluster.cli import main; main()", "status"]
    command += ["--address", runtime.address]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"} | {"COLUMNS": "160"}
    said = []
    for more in ([], ["--json"]):
        done = subprocess.run(
            [*command, *more], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    for text in ("shard/1", "ndp/1", "endpoints", "GPUs", "in 128 slots", "on all GPUs", "lead to ndp/1", "A second"):
        assert text in said[0], said[0]
    (record,) = json.loads(said[1])["deployments"]
    assert [gpu["shard"] for gpu in record["gpus"]] == ["shard/0", "shard/1"]
    experts = runtime.plan["experts_per_layer"]
    for number, gpu in enumerate(record["gpus"]):
        states = [state for layer in gpu["residency"] for state in layer["states"]]
        there = {key for key, state in enumerate(states) if state}
        assert there
        assert {key % 2 for key in there} == {number}  # by the rule `layer-expert`
        assert len(states) == runtime.plan["moe_layers"] * experts
    rates = {sample["name"]: sample["rates"] for sample in record["samples"]}
    assert set(rates) == {"lead", "shard/1", "store/0", "ndp/0", "ndp/1", "endpoints"}
    assert rates["ndp/0"]["over_s"] >= 1.0
    assert rates["lead"]["counters"]["hits"] == 0  # it is idle
    merged = [state for layer in record["residency"] for state in layer["states"]]
    assert sum(state == 2 for state in merged) == sum(
        state == 2 for gpu in record["gpus"] for layer in gpu["residency"] for state in layer["states"]
    )


@pytest.mark.parametrize("role", [pytest.param("shard/1", marks=pytest.mark.slow), "ndp/0", "store/0", "endpoints"])
def test_killed_in_the_middle_of_a_request(
    runtime: Deployment, prompt: tuple[int, ...], undisturbed: list[int], role: str
) -> None:
    """Nothing shows in the tokens; Ray starts it again, and it is used again."""
    before, losses = _records(runtime)[role], runtime.stats().ndp_losses
    counted = {sample.worker: sample for sample in samples(runtime.id)}
    assert before.pid is not None
    assert _generate(runtime, prompt, kill=before.pid) == undisturbed
    until(lambda: _is_back(runtime, before), lambda: (_records(runtime)[role], runtime.health()))
    lost = runtime.stats().ndp_losses - losses
    assert lost >= (role == "ndp/0")  # one more where a full machine silences it
    pairs = runtime.stats().total().ndp_tokens
    assert _generate(runtime, prompt) == undisturbed
    assert runtime.stats().total().ndp_tokens > pairs
    after = {sample.worker: sample for sample in samples(runtime.id)}
    assert after[role].restarts == counted[role].restarts + 1  # it is named: its own counters begin at 0
    assert after[role].since(counted[role]) is None
    for peer, traffic in counted["lead"].peers.items():  # what others count of it goes on
        assert all(after["lead"].peers[peer][name] >= value for name, value in traffic.items()), peer


def _is_back(runtime: Deployment, before: ActorRecord) -> bool:
    now = _records(runtime)[before.role]
    peers = [state for name, state in runtime.health().items() if "/" in name]
    restarted = now.state == "ALIVE" and now.restarts == before.restarts + 1 and now.pid != before.pid
    return restarted and set(peers) == {"connected"}


@pytest.mark.slow
def test_a_worker_finds_the_lead_again_after_the_directory_was_lost(
    runtime: Deployment, prompt: tuple[int, ...], undisturbed: list[int]
) -> None:
    """The directory keeps its entries in its memory; the deployment enters them again."""
    for role in ("endpoints", "shard/1"):
        before = _records(runtime)[role]
        assert before.pid is not None
        os.kill(before.pid, signal.SIGKILL)
        until(lambda before=before: _is_back(runtime, before), runtime.health)
    assert _generate(runtime, prompt) == undisturbed
