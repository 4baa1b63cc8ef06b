"""Every route of the server before real workers in this process, for every shape that a runtime has: the payloads are
those of their producers. A route failed with two GPUs because a test had written the plan by hand.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import httpx
import pytest
from fake_api import WAIT_S, serving
from fake_leads import RealLead
from quick import quick
from serving import Group, Tiny, serving_group, settings

from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.ndp_worker import NdpWorker
from tiermoe.actors.policies.context_ndp import PlacementOptions
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.settings import NdpSettings, ShardSettings
from tiermoe.cluster.api.backend import LeadBackend
from tiermoe.cluster.config import load_hardware
from tiermoe.errors import RuntimeFailure
from tiermoe.proto.peers import LocalDirectory, PeerLink

_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [5, 9, 2], "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "\x05\x09\x02"}], "max_tokens": 2},
    "/v1/responses": {"input": "\x05\x09\x02", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "\x05\x09\x02"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "\x05\x09\x02"}]},
    "/v1/embeddings": {"input": "x"},
    "/tokenize": {"prompt": "\x05"},
    "/detokenize": {"tokens": [5]},
}
_GENERATE = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
_WHILE_STARTING = {"/ready": 503} | dict.fromkeys(_GENERATE, 503)


@contextmanager
def one(tiny: Tiny) -> Iterator[list[Group]]:
    with serving_group(tiny.store, settings(0.5)) as group:
        yield [group]


@contextmanager
def two_gpus(tiny: Tiny) -> Iterator[list[Group]]:
    with serving_group(tiny.store, settings(0.25, "next-gate", shards=ShardSettings(count=2))) as group:
        yield [group]


@contextmanager
def near_data(tiny: Tiny) -> Iterator[list[Group]]:
    policy = PolicySettings(name="test", lossless=True, placement=PlacementOptions(kind="context", hot_per_layer=1))
    ndp, board = NdpSettings(hardware=vars(load_hardware("paper-ndp"))), LocalDirectory()
    with (
        closing(NdpWorker(ndp, tiny.store.describe().path, board)),
        serving_group(tiny.store, settings(0.5, policy=policy, ndp=ndp), [PeerLink(board, name="ndp/0")]) as group,
    ):
        yield [group]


@contextmanager
def replicas_of_two_gpus(tiny: Tiny) -> Iterator[list[Group]]:
    with two_gpus(tiny) as first, two_gpus(tiny) as second:
        yield first + second


@contextmanager
def a_lost_gpu(tiny: Tiny) -> Iterator[list[Group]]:
    with two_gpus(tiny) as groups:
        groups[0].shards[0].close()
        yield groups


async def answers(http: httpx.AsyncClient) -> dict[str, httpx.Response]:
    """Of every route that the application has."""
    schema = (await http.get("/openapi.json")).json()
    assert {path for path, methods in schema["paths"].items() if "post" in methods} == set(_BODIES)
    found: dict[str, httpx.Response] = {}
    for path, methods in schema["paths"].items():
        address = path.replace("{name}", "fake")
        found[path] = await (http.post(address, json=_BODIES[path]) if "post" in methods else http.get(address))
    return found


def answered(
    leads: dict[str, Any], plan: dict[str, Any], times: int = 1, stopping: bool = False
) -> list[dict[str, httpx.Response]]:
    async def run() -> list[dict[str, httpx.Response]]:
        backend = LeadBackend({name: RealLead(lead) for name, lead in leads.items()}, plan, WAIT_S)
        await backend.first_look()
        if stopping:  # else requests wait for the lead to serve
            backend.end(RuntimeFailure("it starts", "wait"))
        _, client = serving(backend, template="{{ messages[0].content }}")  # type: ignore[arg-type]
        try:
            async with client() as http:
                return [await answers(http) for _ in range(times)]
        finally:
            backend.end(RuntimeFailure("the test ends", "none"))

    return asyncio.run(asyncio.wait_for(run(), 4 * WAIT_S))


@pytest.mark.parametrize(
    "topology",
    quick(
        [one, two_gpus, near_data, replicas_of_two_gpus, a_lost_gpu], fast=[two_gpus, near_data, replicas_of_two_gpus]
    ),
    ids=lambda made: made.__name__,
)
def test_every_route_answers(topology: Callable[[Tiny], Any], tiny: Callable[[str], Tiny]) -> None:
    """Before any request, and behind some."""
    with topology(tiny("olmoe")) as groups:
        leads = {f"r{i}": group.lead for i, group in enumerate(groups)}
        plan = groups[0].lead.plan()
        fresh, used = answered(leads, plan, times=2)
    for found in (fresh, used):
        statuses = {path: response.status_code for path, response in found.items()}
        assert statuses == dict.fromkeys(statuses, 200) | {"/v1/embeddings": 400}, {
            path: response.text for path, response in found.items() if response.status_code >= 400
        }
    answering = 1 if topology is a_lost_gpu else len(plan["shards"] or [0])
    page = used["/metrics"].text
    links = re.findall(r'link_busy_seconds_total\{gpu="(shard/\d)"\}', page)
    assert sorted(links) == [f"shard/{i}" for i in range(answering)]
    assert "tiermoe_expert_hits_total" in page


def test_every_route_answers_while_a_lead_starts(tiny: Callable[[str], Tiny]) -> None:
    """As Ray makes it again behind a server that has run: nothing is loaded, and the plan is that of before."""
    store = tiny("olmoe").store
    with two_gpus(tiny("olmoe")) as groups:
        plan = groups[0].lead.plan()
    with ExitStack() as stack:
        lead = stack.enter_context(closing(GpuWorker(settings(0.25, shards=ShardSettings(count=2)), store.describe())))
        (found,) = answered({"r0": lead}, plan, stopping=True)
    statuses = {path: response.status_code for path, response in found.items()}
    assert statuses == dict.fromkeys(statuses, 200) | {"/v1/embeddings": 400} | _WHILE_STARTING
    assert "the runtime is created" in found["/ready"].json()["reason"]
