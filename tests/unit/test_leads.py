"""Requests to one lead and over several: in order, cancelled, spread, taken over, and no token twice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from fake_leads import REQUEST, FakeLead
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError, TaskCancelledError

from tiermoe.actors.requests import GenerationRequest, TokenEvent
from tiermoe.cluster.api.backend import LeadBackend
from tiermoe.cluster.attach import Sample
from tiermoe.errors import DeadlinePassed, LoopDied, NotServing, RequestError, RuntimeFailure, StoreError

_WAIT_S = 20.0
_REQUEST = GenerationRequest("r", (1, 2))
_FIVE, _SIX, _END = TokenEvent("r", (5,)), TokenEvent("r", (6,)), TokenEvent("r", (7, 8), "length")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_LOOK_S", 0.01), ("_RETRY_S", 0.01), ("_HUNG_S", 0.05), ("_GONE_S", 0.1)):
        monkeypatch.setattr(f"tiermoe.cluster.api.lead.{name}", seconds)


def run(leads: list[FakeLead], call: Callable[[LeadBackend], Awaitable[None]], deadline_s: float = 60.0) -> None:
    """Call with a backend before the leads, and wait until all cancellations have come."""

    async def bounded() -> None:
        backend = LeadBackend(dict(zip("ab", leads, strict=False)), {"max_requests": 4}, deadline_s)
        await asyncio.wait_for(call(backend), _WAIT_S)
        for lead in leads:
            lead.over.set()
        while reapers := [task for client in backend.leads for task in client._reapers]:
            await asyncio.wait(reapers, timeout=_WAIT_S)

    asyncio.run(bounded())


async def _tokens(backend: LeadBackend) -> list[int]:
    return [token async for event in backend.generate(_REQUEST) for token in event.token_ids]


def _cancelled(lead: FakeLead) -> list[str]:
    """The requests, without the numbers of their tries."""
    return [name.partition(".")[0] for name in lead.cancelled]


def test_events_come_in_order_and_an_ended_request_is_not_cancelled() -> None:
    events, lead = [_FIVE, _SIX, TokenEvent("r", (), "length")], FakeLead([_FIVE, _SIX, TokenEvent("r", (), "length")])

    async def call(backend: LeadBackend) -> None:
        assert [event async for event in backend.generate(_REQUEST)] == events
        assert await backend.ask("health") == {"state": "serving"}

    run([lead], call)
    assert lead.cancelled == []


def test_a_request_is_cancelled_behind_its_beginning() -> None:
    """The consumer leaves while the request is on its way to the worker."""
    begins = asyncio.Event()
    lead = FakeLead([_FIVE], begins=begins)

    async def call(backend: LeadBackend) -> None:
        first = asyncio.ensure_future(anext(backend.generate(_REQUEST)))
        while not lead.requests:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        await asyncio.sleep(0.01)
        assert lead.cancelled == []
        begins.set()

    run([lead], call)
    assert _cancelled(lead) == ["r"]


def test_a_request_past_its_deadline_is_cancelled() -> None:
    lead = FakeLead([])

    async def call(backend: LeadBackend) -> None:
        with pytest.raises(DeadlinePassed, match="passed its deadline"):
            await anext(backend.generate(_REQUEST))

    run([lead], call, deadline_s=0.01)
    assert _cancelled(lead) == ["r"]


@pytest.mark.parametrize(
    ("item", "kind"),
    [
        (TokenEvent("r", (), "error", error="out of memory"), RuntimeFailure),
        (TokenEvent("r", (), "error", error="the grammar is too complex", error_type="RequestError"), RequestError),
        (TokenEvent("r", (), "error", error="no; finite score", error_type="CheckpointError"), RuntimeFailure),
        (RayTaskError("generate", "traceback", RequestError("the prompt is empty", "give one")), RequestError),
        (RayTaskError("generate", "traceback", StoreError("an expert is nowhere", "bring it back")), RuntimeFailure),
    ],
    ids=["event", "of the request", "of the model", "refusal", "of the store"],
)
def test_failures_are_typed_and_need_no_cancellation(item: Any, kind: type[Exception]) -> None:
    lead = FakeLead([item])

    async def call(backend: LeadBackend) -> None:
        with pytest.raises(kind):
            await anext(backend.generate(_REQUEST))

    run([lead], call)
    assert lead.cancelled == []


def test_a_request_goes_on_behind_its_last_token_once_a_lead_serves_again() -> None:
    not_started = RayTaskError("generate", "traceback", NotServing("not started", "wait"))
    states = ["serving", ActorUnavailableError("it restarts", None), ActorDiedError(), "created", "loading weights",
              "serving"]  # fmt: skip
    lead = FakeLead([_FIVE, _SIX, ActorDiedError()], later=[[not_started], [_END]], states=states)

    async def call(backend: LeadBackend) -> None:
        events = [event async for event in backend.generate(_REQUEST)]
        assert [event.token_ids for event in events] == [(5,), (6,), (7, 8)]
        assert {event.request_id for event in events} == {"r"}

    run([lead], call)
    assert _cancelled(lead) == ["r", "r"]  # a process that Ray did not reach for a moment may still run it
    first, *again = lead.requests
    assert [request.generated for request in lead.requests] == [(), (5, 6), (5, 6)]
    assert first.sampling.seed is not None
    assert all(request.sampling == first.sampling for request in again)
    assert len({request.request_id for request in lead.requests}) == 3


@pytest.mark.parametrize(
    ("count", "states", "tries"),
    [(1, [ActorDiedError()], 0), (2, [ActorDiedError()], 0), (1, ["serving"], 4)],
    ids=["dead for good", "all are", "dies of the request"],
)
def test_a_request_fails_when_no_lead_lives_through_it(count: int, states: list[str | Exception], tries: int) -> None:
    leads = [FakeLead([ActorDiedError()], later=[[ActorDiedError()]] * 3, states=states) for _ in range(count)]

    async def call(backend: LeadBackend) -> None:
        with pytest.raises(RuntimeFailure, match="during a request"):
            await anext(backend.generate(_REQUEST))

    run(leads, call)
    assert _cancelled(leads[0]) == ["r"] * tries


_POISON = 66
_DIED = LoopDied("the generation loop died (KeyError: 'boom')", "send the request again")


class DyingLead(FakeLead):
    """Counts: the n-th token of a request is n, one a call. Its loop dies of a prompt that has `_POISON`.

    Attributes:
        deaths: the requests of each step that it died in, without the numbers of their tries.
    """

    def __init__(self) -> None:
        super().__init__([], later=[[]] * 99)
        self.deaths: list[set[str]] = []
        self._asked: dict[str, GenerationRequest] = {}

    async def _begun(self, request: GenerationRequest, number: int) -> str:
        known = len(request.generated)
        tokens = [TokenEvent("", (n,), "length" if n == 7 else None) for n in range(known, 8)]
        self._waiting[request.request_id] = tokens
        self._asked[request.request_id] = request
        return self.life

    async def _take(self, client: str, wait_s: float) -> tuple[str, list[TokenEvent]]:
        await asyncio.sleep(0.001)
        inside = [name for name, items in self._waiting.items() if items]
        if any(_POISON in self._asked[name].prompt_ids for name in inside):
            self.deaths.append({name.partition(".")[0] for name in inside})
            self._waiting.clear()
            return self.life, [TokenEvent(n, (), "error", str(_DIED), "LoopDied") for n in inside]
        return self.life, [replace(self._waiting[name].pop(0), request_id=name) for name in inside]


@pytest.mark.parametrize("poisons", [1, 2])
def test_a_request_that_a_loop_dies_of_fails_and_the_others_resume(poisons: int) -> None:
    """Each is sent twice; who was in the same step is sent again, one at a time, and gets its tokens once.

    One more such request comes meanwhile, and one that is good.
    """
    lead = DyingLead()

    async def call(backend: LeadBackend) -> None:
        async def tokens(name: str, *prompt: int) -> list[int]:
            events = backend.generate(GenerationRequest(name, prompt))
            return [token async for event in events for token in event.token_ids]

        good = [asyncio.ensure_future(tokens(name, 1)) for name in "abc"]
        while not all(f"{name}" in lead._waiting for name in "abc"):
            await asyncio.sleep(0)
        bad = [asyncio.ensure_future(tokens(f"p{i}", 1, _POISON)) for i in range(poisons)]
        while not lead.deaths:
            await asyncio.sleep(0.001)
        good.append(asyncio.ensure_future(tokens("new", 1)))
        bad.append(asyncio.ensure_future(tokens("late", 1, _POISON)))
        for task in bad:
            with pytest.raises(RuntimeFailure, match=r"died \(KeyError: 'boom'\), \d times .* not run again") as failed:
                await task
            assert not isinstance(failed.value, NotServing)
        assert [await task for task in good] == [list(range(8))] * 4
        assert await tokens("later", 1) == list(range(8))

    run([lead], call)
    assert len(lead.deaths) <= 2 * poisons + 2
    for name in [f"p{i}" for i in range(poisons)] + ["late"]:
        assert sum(name in death for death in lead.deaths) == 2


def test_a_request_that_is_in_every_death_is_not_resumed_for_ever() -> None:
    """Though it gets a token each time."""
    died = TokenEvent("r", (), "error", str(_DIED), "LoopDied")
    lead = FakeLead([_FIVE, died], later=[[_FIVE, died]] * 9)

    async def call(backend: LeadBackend) -> None:
        with pytest.raises(RuntimeFailure, match="4 times in steps that carried this request"):
            await _tokens(backend)

    run([lead], call)
    assert len(lead.requests) == 4


def test_a_lead_whose_loop_died_is_waited_for() -> None:
    """Guards: every request failed at once, and the server's port closed."""
    dead = RayTaskError("health", "traceback", _DIED)
    refused = RayTaskError("begin", "traceback", NotServing(_DIED.what, _DIED.remedy))
    states = ["serving", dead, "serving", dead, dead, ActorUnavailableError("it restarts", None), "created", "serving"]
    first = [_FIVE, TokenEvent("r", (), "error", str(_DIED), "NotServing")]
    lead = FakeLead(first, later=[[refused], [_SIX, _END]], states=states)

    async def call(backend: LeadBackend) -> None:
        assert await _tokens(backend) == [5, 6, 7, 8]
        assert backend.leads[0].failure is None

    run([lead], call)


def test_a_request_goes_to_the_lead_with_the_fewest() -> None:
    leads = [FakeLead([_FIVE], later=[[_FIVE]]) for _ in range(2)]

    async def call(backend: LeadBackend) -> None:
        assert backend.plan["max_requests"] == 8
        streams = [backend.generate(GenerationRequest(f"r{i}", (1,))) for i in range(4)]
        for stream in streams:
            await anext(stream)
        assert [len(lead.requests) for lead in leads] == [2, 2]
        for stream in streams:
            await stream.aclose()

    run(leads, call)


@pytest.mark.parametrize("hangs", [False, True], ids=["dead", "hung"])
def test_another_lead_takes_the_requests_over(hangs: bool) -> None:
    """The first stays as it is: what it has of the request comes too late, and is cancelled."""
    items: list[TokenEvent | Exception] = [_FIVE, _SIX] if hangs else [_FIVE, _SIX, ActorDiedError()]
    leads = [FakeLead(items, states=["serving", "hangs" if hangs else ActorDiedError()]), FakeLead([_END])]

    async def call(backend: LeadBackend) -> None:
        assert await _tokens(backend) == [5, 6, 7, 8]
        assert [state.serves for state in backend.states()] == [False, True]

    run(leads, call)
    (first,), (second,) = leads[0].requests, leads[1].requests
    assert second.generated == (5, 6)
    assert second.sampling == first.sampling
    assert second.request_id != first.request_id
    assert leads[0].cancelled == ["r"]


def test_the_only_lead_that_hangs_keeps_its_requests() -> None:
    lead = FakeLead([_FIVE], states=["serving", "hangs"])

    async def call(backend: LeadBackend) -> None:
        events = backend.generate(_REQUEST)
        await anext(events)
        late = asyncio.ensure_future(anext(events))
        while (state := backend.states()[0]).serves:
            await asyncio.sleep(0.01)
        assert "does not answer" in str(state.problem)
        assert not late.done()
        lead.over.set()
        assert (await late).finish == "cancelled"

    run([lead], call)


def test_counters_are_sums_and_a_lead_that_is_away_counts_with_its_last() -> None:
    leads = [FakeLead([], states=["serving"] * 4 + ["hangs"]), FakeLead([])]

    async def call(backend: LeadBackend) -> None:
        assert (await backend.ask("stats")).as_dict()["hits"] == 6
        assert await backend.ask("load") == {"running": 0, "waiting": 0, "kv_usage": 0.0}
        while backend.leads[0].serves:
            await asyncio.sleep(0.01)
        assert (await backend.ask("stats")).as_dict()["hits"] == 6

    run(leads, call)


def test_requests_of_one_lead_share_its_messages() -> None:
    """One consumer leaves, and one comes when the reader has rested: each gets its own events."""
    lead = FakeLead([_FIVE, _SIX, _END], later=[[_FIVE], [_FIVE, _END], [_SIX, _END]], together=True)

    async def call(backend: LeadBackend) -> None:
        async def tokens(name: str) -> list[int]:
            events = backend.generate(GenerationRequest(name, (1,)))
            return [token async for event in events for token in event.token_ids]

        whole = asyncio.ensure_future(tokens("a"))
        await asyncio.sleep(0)
        left = backend.generate(GenerationRequest("b", (1,)))
        assert (await anext(left)).token_ids == (5,)
        await left.aclose()
        assert await tokens("c") == [5, 7, 8]
        assert await whole == [5, 6, 7, 8]
        (client,) = backend.leads
        assert client._reader is not None
        await client._reader
        assert await tokens("d") == [6, 7, 8]

    run([lead], call)
    assert lead.cancelled == ["b"]


def test_calls_for_everybodys_tokens_belong_to_no_request() -> None:
    """Guards Ray's cancelling of a request's calls with it: others lost theirs when the first request's client left."""
    lead = FakeLead([_FIVE], later=[[_END]])

    async def call(backend: LeadBackend) -> None:
        REQUEST.set("first")
        left = backend.generate(GenerationRequest("a", (1,)))
        assert (await anext(left)).token_ids == (5,)
        REQUEST.set("second")
        assert await _tokens(backend) == [7, 8]
        await left.aclose()

    run([lead], call)
    assert lead.began_by == ["first", "second"]
    assert set(lead.taken_by) == {""}
    assert lead.cancelled_by == [""]


def test_an_answer_that_is_lost_costs_no_request() -> None:
    lost = TaskCancelledError()
    lead = FakeLead([_FIVE, lost], later=[[_SIX, _END]])

    async def call(backend: LeadBackend) -> None:
        assert await _tokens(backend) == [5, 6, 7, 8]

    run([lead], call)
    assert lead.requests[1].generated == (5,)


def test_a_lead_that_was_started_again_unseen_has_none_of_the_requests() -> None:
    lead = FakeLead([_FIVE], later=[[_END]])

    async def call(backend: LeadBackend) -> None:
        events = backend.generate(_REQUEST)
        assert (await anext(events)).token_ids == (5,)
        lead.life = "second"
        assert (await anext(events)).token_ids == (7, 8)

    run([lead], call)
    assert lead.requests[1].generated == (5,)


def test_a_slow_consumer_gets_tokens_together() -> None:
    lead = FakeLead([_FIVE, _SIX, _END])

    async def call(backend: LeadBackend) -> None:
        events = backend.generate(_REQUEST)
        assert (await anext(events)).token_ids == (5,)
        while any(lead._waiting.values()):
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)  # the reader hands on what it took
        last = await anext(events)
        assert (last.token_ids, last.finish) == ((6, 7, 8), "length")

    run([lead], call)


def test_a_lead_whose_file_changed_refuses_requests_at_once_and_takes_them_again() -> None:
    """Guards: 200 of `/ready`, and every request failed, or gave wrong tokens."""
    damaged = {"state": "loading weights", "problem": "layer-000.safetensors changed", "remedy": "put the file back"}
    lead = FakeLead([_END], states=["serving", *[damaged] * 3, "loading weights", "serving"])

    async def call(backend: LeadBackend) -> None:
        while not backend.states()[0].damaged:
            await asyncio.sleep(0)
        (state,) = backend.states()
        assert not state.serves
        assert "layer-000.safetensors changed" in str(state.problem)
        with pytest.raises(RuntimeFailure, match=r"layer-000\.safetensors changed; put the file back"):
            await _tokens(backend)
        assert backend.leads[0].failure is None  # for Serve, the server is well
        while backend.states()[0].damaged:
            await asyncio.sleep(0)
        assert await _tokens(backend) == [7, 8]

    run([lead], call)


def test_the_samples_of_all_processes_are_asked_for_once_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a thread: Ray's head node may not answer, and requests go on."""
    gate, asked = threading.Event(), list[str]()
    found = [Sample("a", "lead", "lead", "h", "n", 0)]

    def samples(deployment: str) -> list[Sample]:
        asked.append(deployment)
        assert gate.wait(_WAIT_S)
        if len(asked) > 1:
            raise RayTaskError("samples", "", ValueError())
        return found

    monkeypatch.setattr("tiermoe.cluster.api.backend.samples", samples)
    monkeypatch.setattr("tiermoe.cluster.api.backend._SAMPLES_S", 0.05)

    async def call(backend: LeadBackend) -> None:
        for _ in range(2):
            with pytest.raises(RuntimeFailure, match="does not say which actors"):
                await backend.ask("samples")
        assert await _tokens(backend) == [7, 8]
        gate.set()
        while not (backend._sampling is not None and backend._sampling.done()):
            await asyncio.sleep(0.001)
        assert backend._sampling.result() is found
        assert asked == ["a"]
        with pytest.raises(RuntimeFailure, match="does not say which actors"):
            await backend.ask("samples")

    run([FakeLead([_END]), FakeLead([_END])], call)
    assert asked == ["a", "a"]
