"""The deployment on a real local Ray, with stand-ins for the actors."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from fakes import FAKE_FACTS, FakeStore, FakeWorker, RefusingWorker, StuckWorker

from tiermoe.actors.requests import Generation, GenerationRequest, SamplingParams
from tiermoe.cluster.config import RaySettings, RunConfig, engine_settings
from tiermoe.cluster.deploy import Deployment
from tiermoe.cluster.launch import Launch, StandIns
from tiermoe.errors import BudgetError, ConfigError, RuntimeFailure, StoreError


def _deployment(store: str = "store", worker: type = FakeWorker, **config: Any) -> Deployment:
    run = RunConfig(**{"threads": 1, "policy": "next-gate"} | config)  # auto would open the store, which is none
    return Deployment(Launch(run, engine_settings(run), store, StandIns(worker, FakeStore, FAKE_FACTS)))


@pytest.fixture(scope="module")
def runtime() -> Iterator[Deployment]:
    with _deployment() as deployment:
        yield deployment


def _request(name: str, behaviour: int = 1, max_tokens: int = 5) -> GenerationRequest:
    return GenerationRequest(name, (behaviour,), SamplingParams(max_tokens=max_tokens))


def test_plan_stats_trace_and_tokens_come_from_the_worker(runtime: Deployment) -> None:
    assert runtime.plan["store_path"] == "store"
    assert runtime.stats().hit_rate == 0.75
    assert runtime.trace_events()[0]["ph"] == "X"
    runtime.reset_stats()
    generation = Generation("a")
    for event in runtime.generate(_request("a")):
        generation.add(event)
    assert generation.token_ids == [0, 1, 2, 3, 4]
    assert (generation.finish, generation.ttft_s) == ("length", 0.01)


def test_the_start_leaves_the_driver_s_environment_and_a_private_token(runtime: Deployment) -> None:
    assert runtime.health()["omp"] == "1"  # of the worker
    assert "RAY_USAGE_STATS_ENABLED" not in os.environ
    token = Path.home() / ".ray" / "auth_token"
    if token.exists():
        assert stat.S_IMODE(token.stat().st_mode) & 0o077 == 0


def test_rays_store_has_its_room_from_the_start(runtime: Deployment) -> None:
    """With a full /dev/shm the first message above 100 KB ended the raylet, and so the runtime."""
    (raylet,) = [child for child in psutil.Process().children(recursive=True) if child.name() == "raylet"]
    held = sum(part.rss for part in raylet.memory_maps() if "/plasma" in part.path)
    assert held >= 80_000_000


def test_leaving_the_stream_cancels_the_request(runtime: Deployment) -> None:
    stream = runtime.generate(_request("left", max_tokens=1_000_000_000))
    assert next(stream).token_ids == (0,)
    stream.close()
    assert runtime.health()["waiting"] == 0


def test_control_calls_get_through_while_a_request_waits(runtime: Deployment) -> None:
    events: list[str | None] = []
    thread = threading.Thread(
        target=lambda: events.extend(e.finish for e in runtime.generate(_request("stuck", behaviour=8)))
    )
    thread.start()
    runtime.cancel("stuck")
    thread.join(timeout=20)
    assert events == ["cancelled"]


def test_a_second_deployment_leaves_the_first_alone(runtime: Deployment) -> None:
    with pytest.raises(RuntimeFailure, match="uses Ray already"), _deployment():
        pytest.fail("started")
    assert runtime.health()["state"] == "serving"


def test_death_of_the_worker_is_one_typed_error(runtime: Deployment) -> None:
    """Last of this module: the worker that Ray makes anew has no weights."""
    with pytest.raises(RuntimeFailure, match="worker failed during a request: its process ended"):
        list(runtime.generate(_request("doomed", behaviour=7)))


@pytest.mark.usefixtures("_after_runtime")
class TestStartUp:
    """Deployments that do not come up. Their Ray is their own."""

    @pytest.fixture
    def _after_runtime(self, runtime: Deployment) -> None:
        runtime.close()  # one Ray per process

    @pytest.mark.slow
    def test_the_refusal_of_a_store_keeps_its_type(self) -> None:
        with pytest.raises(StoreError, match="'broken' is incomplete; twice; prepare it again"), _deployment("broken"):
            pytest.fail("started")

    def test_the_refusal_of_a_worker_keeps_its_type(self) -> None:
        with pytest.raises(BudgetError) as refused, _deployment(worker=RefusingWorker):
            pytest.fail("started")
        # guards against the text of Ray's own class, which is the actor's traceback
        assert str(refused.value) == "budget 1 is less than one expert; give at least 1024 bytes"

    @pytest.mark.slow
    @pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a GPU to find")
    def test_missing_resources_are_named_at_once(self) -> None:
        short = r"the lead fits on no node: node \w+ \(GPU: needs 1, has 0 free of 0, short of 1\)"
        with pytest.raises(ConfigError, match=short), _deployment(device="cuda"):
            pytest.fail("started")

    @pytest.mark.parametrize(
        ("cluster", "says"),
        [
            ({"shards": 17}, "cluster.shards is 17, but the model has 8 experts in 2 layers"),
            ({"store": {"layout": "sliced", "copies": 2}}, "cluster.store.copies is 2, but only 1 node holds a store"),
            ({"lead": "elsewhere"}, "cluster.lead is 'elsewhere', which is not a living node"),
        ],
    )
    def test_a_plan_that_cannot_be_is_refused_before_ray_starts(self, cluster: dict[str, Any], says: str) -> None:
        with pytest.raises(ConfigError, match=says), _deployment(device="cpu", cluster=cluster):
            pytest.fail("started")
        assert not ray.is_initialized()

    @pytest.mark.slow
    def test_deadline(self) -> None:
        slow = RaySettings(startup_deadline_s=8.0)
        stuck = _deployment(worker=StuckWorker, ray=slow)
        with pytest.raises(RuntimeFailure, match="did not start within 8 s"), stuck:
            pytest.fail("started")
