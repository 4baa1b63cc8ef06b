"""The matcher as a Ray actor beside two GPUs: killed with SIGKILL it comes back with its maps; no request notices."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from tiermoe.actors.requests import Generation, GenerationRequest, SamplingParams
from tiermoe.cluster.config import engine_settings, load_run_config
from tiermoe.cluster.deploy import Deployment
from tiermoe.cluster.jobs.bench.serving import heldout_prompts, prepared_store

_TOKENS = 80
_REJOIN_S = 60.0


@pytest.fixture(scope="module")
def runtime() -> Iterator[Deployment]:
    matcher, cluster = {"snapshot_s": 0.05}, {"shards": 2}
    options = {"policy": "fmoe", "budget": "0.25", "threads": 1, "cluster": cluster, "matcher": matcher}
    config = load_run_config(None, options)
    settings = engine_settings(config)
    with Deployment(config, settings, str(prepared_store(config, settings))) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def prompt() -> tuple[int, ...]:
    return heldout_prompts(load_run_config(None).model_dir, 1, 32)[0]


def _generate(runtime: Deployment, name: str, prompt: tuple[int, ...], kill_at: int | None = None) -> list[int]:
    generation = Generation(name)
    sampling = SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
    for event in runtime.generate(GenerationRequest(name, prompt, sampling)):
        generation.add(event)
        if kill_at is not None and len(generation.token_ids) >= kill_at:
            kill_at = None
            os.kill(runtime.actor_health("matcher")["pid"], signal.SIGKILL)
    assert generation.error is None
    return generation.token_ids


def _until(holds: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + _REJOIN_S
    while not holds():  # each look is a round trip; the bound is above
        assert time.monotonic() < end_s, what


def test_commands_reach_both_gpus(runtime: Deployment, prompt: tuple[int, ...]) -> None:
    assert runtime.plan["matcher"]["state"] == "serving"
    assert runtime.health()["matcher"] == "connected"
    tokens = _generate(runtime, "a", prompt)
    _until(lambda: _generate(runtime, "again", prompt) == tokens and runtime.actor_health("matcher")["posted"] > 0, "")
    account, stats = runtime.actor_health("matcher"), runtime.stats()
    assert account["shards_connected"] == 1
    assert account["maps"] >= _TOKENS
    assert stats.matcher is not None
    assert stats.matcher["commands"] > 0


def test_killed_in_the_middle_of_a_request(runtime: Deployment, prompt: tuple[int, ...]) -> None:
    undisturbed = _generate(runtime, "b", prompt)
    _until(lambda: runtime.actor_health("matcher")["unsaved"] == 0, "no snapshot was written")
    before = runtime.actor_health("matcher")
    assert _generate(runtime, "c", prompt, kill_at=10) == undisturbed
    _until(lambda: runtime.health()["matcher"] == "connected", "the matcher did not come back")
    after = runtime.actor_health("matcher")
    assert after["pid"] != before["pid"]
    assert after["begun_from"] == "snapshot"
    assert after["maps"] >= before["maps"]
    assert runtime.stats().matcher["lost"] == 1
    assert _generate(runtime, "d", prompt) == undisturbed
    assert runtime.actor_health("matcher")["commands"] > 0
