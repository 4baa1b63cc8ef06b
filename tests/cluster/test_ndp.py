"""The NDP worker as a Ray actor: killed with SIGKILL it is restarted, and the request that ran does not notice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from tiermoe.actors.requests import Generation, GenerationRequest, SamplingParams
from tiermoe.cluster.config import engine_settings, load_run_config
from tiermoe.cluster.deploy import Deployment
from tiermoe.cluster.jobs.bench.serving import heldout_prompts, prepared_store

_TOKENS = 200
_REJOIN_S = 60.0


@pytest.fixture(scope="module")
def runtime() -> Iterator[Deployment]:
    config = load_run_config(None, {"policy": "context-ndp-full", "budget": "0.5", "threads": 1})
    settings = engine_settings(config)
    with Deployment(config, settings, str(prepared_store(config, settings))) as deployment:
        yield deployment


def _generate(runtime: Deployment, name: str, prompt: tuple[int, ...], kill_at: int | None = None) -> list[int]:
    generation = Generation(name)
    sampling = SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
    for event in runtime.generate(GenerationRequest(name, prompt, sampling)):
        generation.add(event)
        if kill_at is not None and len(generation.token_ids) >= kill_at:
            kill_at = None
            os.kill(runtime.actor_health("ndp/0")["pid"], signal.SIGKILL)
    return generation.token_ids


def test_the_plan_names_the_worker(runtime: Deployment) -> None:
    assert runtime.plan["ndp"]["transport"] == "shm"
    assert runtime.health()["ndp/0"] == "connected"


def test_killed_in_the_middle_of_a_request(runtime: Deployment) -> None:
    prompt = heldout_prompts(load_run_config(None).model_dir, 1, 32)[0]
    undisturbed = _generate(runtime, "a", prompt)
    first = runtime.actor_health("ndp/0")["pid"]
    assert _generate(runtime, "b", prompt, kill_at=10) == undisturbed
    stats = runtime.stats()
    assert stats.ndp_losses == 1
    end_s = time.monotonic() + _REJOIN_S
    while runtime.health()["ndp/0"] != "connected":  # each answer of the worker is a round trip; the bound is above
        assert time.monotonic() < end_s, "the NDP worker did not come back"
    assert runtime.actor_health("ndp/0")["pid"] != first
    before = runtime.stats().total().ndp_tokens
    assert _generate(runtime, "c", prompt) == undisturbed
    assert runtime.stats().total().ndp_tokens > before
