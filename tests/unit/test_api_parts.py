"""Parts of the server: what it is started with, the lead as it reaches it, and text that comes in tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_api import EOS, byte_tokenizer, score
from fake_leads import FakeLead
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from tiermoe.actors.requests import GenerationRequest, TokenEvent
from tiermoe.cluster.api.backend import LeadBackend
from tiermoe.cluster.api.schema import Display
from tiermoe.cluster.api.settings import LimitSettings
from tiermoe.cluster.api.text import ChoiceText, StopMatcher
from tiermoe.cluster.cli import main
from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.detokenizer import IncrementalText, TokenBytes
from tiermoe.cluster.jobs import serve
from tiermoe.cluster.prompt import load_tokenizer
from tiermoe.errors import DeadlinePassed, NotServing, RequestError, RuntimeFailure


@pytest.mark.parametrize(
    ("text", "words"),
    [("colour: red", "unknown key 'colour'"), ("limits: {waiting: -1}", "key 'limits.waiting' is -1"),
     ("deployment: abcdef", "give --attach"), ("limits: {request_s: 5}", "set request_deadline_s")],
)  # fmt: skip
def test_a_server_configuration_is_checked_before_anything_starts(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "server.yaml").write_text(text)
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--device", "cpu", "--server-config", str(tmp_path / "server.yaml")])
    assert words in capsys.readouterr().err


def test_options_come_over_the_servers_configuration(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("request_log: json\nmodel_name: a\nlimits: {waiting: 3, body_s: 5}\n")
    found = serve._settings(file, {"model_name": "b", "request_log": None, "limits": {"waiting": 0}, "replicas": None})
    assert (found.model_name, found.request_log) == ("b", "json")
    assert (found.limits.waiting, found.limits.body_s) == (0, 5)
    plain = serve._settings(None, {"chat_template": Path("a.jinja"), "limits": {}})
    assert (plain.limits, plain.request_log) == (LimitSettings(), "text")
    assert Path(str(plain.chat_template)).is_absolute()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--api-key-file", "/nowhere/key"], "cannot be read"),
        (["--chat-template", "/nowhere/template"], "cannot be read"),
        (["--deployment", "abcdef"], "--attach"),
        (["--attach", "127.0.0.1:1", "--budget", "25%"], "belongs to the runtime"),
        (["--policy", "nothing"], "no policy"),
    ],
    ids=str,
)
def test_the_command_refuses_before_it_starts_anything(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["serve", "--device", "cpu", *options])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1


_REQUEST = GenerationRequest("r", (1, 2))
_WAIT_S = 20.0


def run(lead: FakeLead, call: Callable[[LeadBackend], Any], cancelled: int, deadline_s: float = 60.0) -> None:
    """Call with a backend before the lead, and wait until all cancellations have come."""

    async def bounded() -> None:
        backend = LeadBackend({"abcdef": lead}, {}, deadline_s)
        (client,) = backend.leads
        await asyncio.wait_for(call(backend), _WAIT_S)
        assert cancelled or not client._reapers
        while client._reapers:
            await asyncio.wait(client._reapers)
        assert [name.partition(".")[0] for name in lead.cancelled] == ["r"] * cancelled

    asyncio.run(bounded())


def test_events_come_in_order_and_an_ended_request_is_not_cancelled() -> None:
    events = [TokenEvent("r", (5,)), TokenEvent("r", (6,)), TokenEvent("r", (), "length")]

    async def call(backend: LeadBackend) -> None:
        assert [event async for event in backend.generate(_REQUEST)] == events
        assert await backend.ask("health") == {"state": "serving"}

    run(FakeLead(events), call, cancelled=0)


def test_a_consumer_that_leaves_has_its_request_cancelled() -> None:
    async def call(backend: LeadBackend) -> None:
        events = backend.generate(_REQUEST)
        assert (await anext(events)).token_ids == (5,)
        await events.aclose()

    run(FakeLead([TokenEvent("r", (5,))]), call, cancelled=1)


def test_a_request_is_cancelled_behind_its_beginning() -> None:
    """The consumer leaves while the request is on its way to the worker."""
    begins = asyncio.Event()
    lead = FakeLead([TokenEvent("r", (5,))], begins=begins)

    async def call(backend: LeadBackend) -> None:
        first = asyncio.ensure_future(anext(backend.generate(_REQUEST)))
        while not lead.requests:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        await asyncio.sleep(0.01)
        assert lead.cancelled == []
        begins.set()

    run(lead, call, cancelled=1)


def test_a_request_past_its_deadline_is_cancelled() -> None:
    async def call(backend: LeadBackend) -> None:
        with pytest.raises(DeadlinePassed, match="passed its deadline"):
            await anext(backend.generate(_REQUEST))

    run(FakeLead([]), call, cancelled=1, deadline_s=0.01)


@pytest.mark.parametrize(
    ("item", "kind"),
    [
        (TokenEvent("r", (), "error", error="out of memory"), RuntimeFailure),
        (RayTaskError("generate", "traceback", RequestError("the prompt is empty", "give one")), RequestError),
    ],
    ids=["event", "refusal"],
)
def test_failures_are_typed_and_need_no_cancellation(item: Any, kind: type[Exception]) -> None:
    async def call(backend: LeadBackend) -> None:
        with pytest.raises(kind):
            await anext(backend.generate(_REQUEST))

    run(FakeLead([item]), call, cancelled=0)


def test_a_request_goes_on_behind_its_last_token_once_a_lead_serves_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiermoe.cluster.api.lead._RETRY_S", 0.001)
    unavailable, not_started = ActorUnavailableError("it restarts", None), NotServing("not started", "wait")
    lead = FakeLead(
        [TokenEvent("r", (5,)), TokenEvent("r", (6,)), ActorDiedError()],
        later=[[RayTaskError("generate", "traceback", not_started)], [TokenEvent("r.2", (7, 8), "length")]],
        states=["serving", unavailable, ActorDiedError(), "created", "loading weights", "serving"],
    )

    async def call(backend: LeadBackend) -> None:
        events = [event async for event in backend.generate(_REQUEST)]
        assert [event.token_ids for event in events] == [(5,), (6,), (7, 8)]
        assert {event.request_id for event in events} == {"r"}

    run(lead, call, cancelled=2)  # a process that Ray did not reach for a moment may still run it
    first, *again = lead.requests
    assert [request.generated for request in lead.requests] == [(), (5, 6), (5, 6)]
    assert first.sampling.seed is not None
    assert all(request.sampling == first.sampling for request in again)
    assert len({request.request_id for request in lead.requests}) == 3


@pytest.mark.parametrize(
    ("states", "tries"), [([ActorDiedError()], 0), (["serving"], 4)], ids=["dead for good", "dies of the request"]
)
def test_a_request_fails_when_no_lead_lives_through_it(
    states: list[str | Exception], tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiermoe.cluster.api.lead._RETRY_S", 0.001)
    monkeypatch.setattr("tiermoe.cluster.api.lead._GONE_S", 0.01)
    lead = FakeLead([ActorDiedError()], later=[[ActorDiedError()]] * 3, states=states)

    async def call(backend: LeadBackend) -> None:
        with pytest.raises(RuntimeFailure, match="during a request"):
            await anext(backend.generate(_REQUEST))

    run(lead, call, cancelled=tries)


_TOKENIZER = byte_tokenizer()
_PIECES = st.lists(st.text("abc", max_size=4), max_size=12)
_STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def _feed(pieces: list[str], stops: list[str]) -> tuple[list[str], StopMatcher]:
    matcher = StopMatcher(stops)
    shown = []
    for piece in pieces:
        shown.append(matcher.feed(piece))
        if matcher.matched is not None:
            return shown, matcher
    return [*shown, matcher.finish()], matcher


@settings(max_examples=300, deadline=None)
@given(_PIECES, _STOPS)
def test_stops_are_found_wherever_the_pieces_are_cut(pieces: list[str], stops: list[str]) -> None:
    shown, matcher = _feed(pieces, stops)
    text = "".join(pieces)
    if not any(stop in text for stop in stops):
        assert ("".join(shown), matcher.matched) == (text, None)
        return
    assert matcher.matched in stops
    assert text.startswith("".join(shown) + matcher.matched)
    assert not any(stop in "".join(shown) for stop in stops)


def test_what_may_become_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["\n\nuser", "END"])
    assert [matcher.feed(piece) for piece in ("a\n", "\nb", "E", "N", "x", "EN", "D!")] == [
        "a", "\n\nb", "", "", "ENx", "", "",
    ]  # fmt: skip
    assert matcher.matched == "END"
    assert (matcher.feed("more"), matcher.finish()) == ("", "")


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30), st.data())
def test_characters_come_whole(text: str, data: st.DataObject) -> None:
    tokens = list(text.encode("utf-8", errors="replace"))
    whole = bytes(tokens).decode()
    incremental = IncrementalText(_TOKENIZER)
    pieces, rest = [], tokens
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        pieces.append(incremental.add(rest[:count]))
        rest = rest[count:]
        assert whole.startswith("".join(pieces))
    assert "".join(pieces) + incremental.finish() == whole


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=24))
def test_any_bytes_give_what_decoding_all_gives(tokens: list[int]) -> None:
    """Bytes that are no UTF-8: nothing is lost, doubled or taken back."""
    incremental = IncrementalText(_TOKENIZER)
    pieces = [incremental.add([token]) for token in tokens]
    assert "".join(pieces) + incremental.finish() == _TOKENIZER.decode(tokens)


def _events(tokens: list[int]) -> list[TokenEvent]:
    return [TokenEvent("r", (token,), logprobs=score((token,), 0)) for token in tokens]


def test_scores_come_with_their_text_and_stop_with_it_or_come_at_the_end() -> None:
    text = ChoiceText(_TOKENIZER, Display(("lo!",)))
    shown, offsets = [], []
    for event in _events([*"hé".encode(), *b"llo!", *b"more"]):
        shown.append(text.add(event))
        offsets.append([s.offset for s in text.take_scores(last=text.stopped)])
        if text.stopped:
            break
    assert shown == ["h", "", "é", "", "l", "", ""]
    assert offsets == [[0], [], [1, 1], [], [2], [], []]  # the stop string's tokens are not shown
    assert text.tokens == 7
    text = ChoiceText(_TOKENIZER, Display())
    for event in _events([ord("a"), 0xC3]):
        text.add(event)
    assert text.finish() == "\ufffd"
    assert len(text.take_scores(last=True)) == 2
    text = ChoiceText(_TOKENIZER, Display(("b",)), min_tokens=3)  # below the minimal length a stop string is text
    shown = "".join(text.add(event) for event in _events(list(b"abcdb")))
    assert (shown, text.stopped, text.tokens) == ("abcd", True, 5)


@pytest.mark.parametrize(
    ("display", "shown"),
    [
        (Display(("lo",)), "hel"),
        (Display(("lo",), include_stop=True), "hello"),
        (Display(), "hel<lo!"),  # the stop token is the last
        (Display(include_stop=True), "hel<lo!?"),
        (Display(skip_special=False), "hel<end><lo!"),
    ],
    ids=str,
)
def test_what_of_stops_and_special_tokens_is_shown(display: Display, shown: str) -> None:
    word = b"hello" if display.stops else b"hel<lo!"
    text = ChoiceText(_TOKENIZER, display)
    deltas = [text.delta(TokenEvent("r", (token,))) for token in word[:3]]
    deltas += [text.delta(TokenEvent("r", (EOS, *word[3:]))), text.delta(TokenEvent("r", (ord("?"),), "stop"))]
    found = [delta for delta in deltas if delta is not None]
    ends = [i for i, delta in enumerate(found) if delta.finish is not None]
    whole = "".join(delta.text for delta in found[: ends[0] + 1])
    assert (whole, found[ends[0]].finish) == (shown, "stop")


def test_bytes_of_tokens() -> None:
    names = TokenBytes(_TOKENIZER)
    assert [names.of(token) for token in range(256)] == [bytes([token]) for token in range(256)]
    assert names.of(EOS) == b"<end>"
    assert names.of(9999) == b""
    assert (names.shown(ord("a")), names.shown(0xC3)) == ("a", "bytes:\\xc3")


@pytest.mark.skipif(not default_model_dir().is_dir(), reason="the default model is not there")
def test_bytes_of_the_default_model() -> None:
    tokenizer = load_tokenizer(default_model_dir())
    names = TokenBytes(tokenizer)
    text = "def größe(x):\n\treturn '🙂'  # 大"
    assert b"".join(names.of(token) for token in tokenizer.encode(text).ids).decode() == text
