"""A request that the generation loop dies of, on a real local Ray: the lead is started again, the others resume."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import ray_nodes
from ray import cloudpickle
from serving import default_model_greedy

from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.requests import GenerationRequest, SamplingParams
from tiermoe.cluster.api.backend import LeadBackend
from tiermoe.cluster.attach import leads_of
from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.deploy import Deployment
from tiermoe.errors import RuntimeFailure

_TOKENS = 64
_POISON = 77  # a prompt's first token
_WAIT_S = 180.0

pytestmark = [
    pytest.mark.skipif(not default_model_dir().is_dir(), reason="the default model is not there"),
    pytest.mark.slow,
]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import the tests


class FragileWorker(GpuWorker):
    """A lead whose step fails when a request's prompt begins with `_POISON`."""

    def start(self) -> dict[str, Any]:
        plan = super().start()
        begin = self.engine.begin_forward

        def begin_forward(rows: Any) -> None:
            streams = [self.batcher.streams.get(row.name) for row in rows]
            if any(stream is not None and stream.request.prompt_ids[0] == _POISON for stream in streams):
                raise KeyError("a step that fails")
            begin(rows)

        self.engine.begin_forward = begin_forward
        return plan


@pytest.fixture
def runtime() -> Iterator[Deployment]:
    with ray_nodes.deployed(budget="0.5", policy="next-gate", worker_class=FragileWorker) as deployment:
        yield deployment


def test_others_resume_and_the_request_fails(runtime: Deployment) -> None:
    """Guards `serve`, which closed its port and ended four seconds after such a request."""
    prompts = [ray_nodes.prompt()[:n] for n in (12, 20)]
    expected = default_model_greedy(prompts, _TOKENS, ignore_eos=True)
    ended = threading.Event()
    problems: list[BaseException] = []

    def keep() -> None:
        while not ended.wait(0.5):
            try:
                runtime.watch()
            except Exception as error:
                problems.append(error)
                return

    async def tokens(backend: LeadBackend, name: str, prompt: tuple[int, ...], begun: asyncio.Event) -> list[int]:
        found: list[int] = []
        request = GenerationRequest(name, prompt, SamplingParams(_TOKENS, ignore_eos=True))
        async for event in backend.generate(request):
            found += event.token_ids
            begun.set()
        return found

    async def run() -> None:
        backend = LeadBackend({n: lead.handle for n, lead in leads_of(runtime.id).items()}, runtime.plan, _WAIT_S)
        begun = [asyncio.Event() for _ in range(4)]
        good = [asyncio.ensure_future(tokens(backend, f"good-{i}", prompts[i], begun[i])) for i in range(2)]
        for one in begun[:2]:
            await one.wait()
        with pytest.raises(RuntimeFailure, match=r"a step that fails.* 2 times in steps that carried this request"):
            await tokens(backend, "bad", (_POISON, *prompts[0]), begun[2])
        assert [await task for task in good] == expected
        assert await tokens(backend, "later", prompts[0], begun[3]) == expected[0]

    keeper = threading.Thread(target=keep)
    keeper.start()
    try:
        asyncio.run(asyncio.wait_for(run(), _WAIT_S))
    finally:
        ended.set()
        keeper.join()
    assert problems == []
    assert runtime.health()["state"] == "serving"
