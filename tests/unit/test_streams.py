"""Events of a request: their order, how they end, and which requests are refused."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tiermoe.actors.engine.serving import streams as streams_module
from tiermoe.actors.engine.serving.streams import Streams
from tiermoe.actors.requests import Generation, GenerationRequest, SamplingParams, TokenEvent
from tiermoe.errors import RequestError, RuntimeFailure, StoreError, TierMoeError, rebuilt

CAPACITY, EOS, VOCABULARY = 20, 2, 100


@pytest.fixture
def streams() -> Streams:
    return Streams(CAPACITY, [EOS], VOCABULARY)


def asked(name: str = "r", prompt: tuple[int, ...] = (5, 6), **sampling: Any) -> GenerationRequest:
    return GenerationRequest(name, prompt, SamplingParams(**{"max_tokens": 8, **sampling}))


def test_events_hold_what_is_new_in_order(streams: Streams) -> None:
    stream = streams.open(asked())
    streams.deliver(stream.name, [10])
    streams.deliver(stream.name, [10])  # nothing new, no event
    streams.deliver(stream.name, [10, 11, 12])
    streams.finish(stream.name, [10, 11, 12, 13])
    events = list(stream)
    assert [event.token_ids for event in events] == [(10,), (11, 12), (13,)]
    assert [event.finish for event in events] == [None, None, "length"]
    assert {event.request_id for event in events} == {"r"}
    assert len(streams) == 0


def test_the_iterator_waits_for_the_next_event(streams: Streams) -> None:
    stream, seen = streams.open(asked()), []
    consumer = threading.Thread(target=lambda: seen.extend(stream))
    consumer.start()
    streams.deliver(stream.name, [10])
    streams.finish(stream.name, [10, EOS])
    consumer.join(30)
    assert [event.token_ids for event in seen] == [(10,), (EOS,)]


def test_the_type_of_an_error_of_ours_goes_with_its_text(streams: Streams) -> None:
    lost = StoreError("layers 1, 2 are nowhere; tried store/0", "bring it back")
    ours, other = streams.open(asked("a")), streams.open(asked("b"))
    streams.abort(ours.name, "error", "what a manager says", lost)
    streams.abort(other.name, "error", "what a manager says", ValueError("odd"))
    (first,), (second,) = ours, other
    assert (first.error_type, first.error) == ("StoreError", str(lost))
    assert (second.error_type, second.error) == (None, "what a manager says")
    again = rebuilt(first.error_type, first.error)
    assert (type(again), again.what, again.remedy) == (StoreError, lost.what, lost.remedy)
    assert type(rebuilt("Unheard", "what; remedy")) is TierMoeError


@pytest.mark.parametrize(
    ("generated", "ignore_eos", "finish"),
    [([10, 11], False, "length"), ([10, EOS], False, "stop"), ([10, EOS], True, "length"), ([], False, "length")],
)
def test_why_it_finished(streams: Streams, generated: list[int], ignore_eos: bool, finish: str) -> None:
    stream = streams.open(asked(ignore_eos=ignore_eos))
    streams.finish(stream.name, generated)
    (event,) = stream
    assert (event.token_ids, event.finish, event.error) == (tuple(generated), finish, None)


def test_times_are_on_the_last_event_only(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 100.5, 102.5])  # open, first token, finish
    monkeypatch.setattr(streams_module.time, "perf_counter", lambda: next(clock))
    stream = streams.open(asked())
    streams.deliver(stream.name, [10])
    streams.deliver(stream.name, [10, 11])
    streams.finish(stream.name, [10, 11, 12, 13, 14])
    *earlier, last = stream
    assert all(event.ttft_s is None and event.tpot_s is None for event in earlier)
    assert (last.ttft_s, last.tpot_s) == (0.5, 2.0 / 4)
    generation = Generation("r")
    for event in (*earlier, last):
        generation.add(event)
    assert generation == Generation("r", [10, 11, 12, 13, 14], "length", None, 0.5, 0.5)


def test_one_token_has_no_time_between_tokens(streams: Streams) -> None:
    stream = streams.open(asked())
    streams.finish(stream.name, [10])
    (event,) = stream
    assert event.ttft_s is not None
    assert event.tpot_s is None


def test_an_error_ends_a_stream(streams: Streams) -> None:
    stream = streams.open(asked())
    assert streams.abort(stream.name, "error", "out of memory") is True
    assert list(stream) == [TokenEvent("r", (), finish="error", error="out of memory")]
    assert streams.abort(stream.name, "error") is False


def test_cancelling_is_idempotent(streams: Streams) -> None:
    stream = streams.open(asked())
    streams.deliver(stream.name, [10])
    assert streams.abort(stream.name, "cancelled") is True
    assert streams.abort(stream.name, "cancelled") is False
    assert streams.abort("nobody", "cancelled") is False
    assert list(stream) == [TokenEvent("r", (10,)), TokenEvent("r", (), finish="cancelled")]


def test_what_comes_after_the_end_is_dropped(streams: Streams) -> None:
    stream = streams.open(asked())
    streams.abort(stream.name, "cancelled")
    streams.deliver(stream.name, [10])
    streams.finish(stream.name, [10])
    assert [event.finish for event in stream] == ["cancelled"]
    assert stream.events.empty()


def test_an_id_may_be_used_again_and_gets_only_its_own_tokens(streams: Streams) -> None:
    """Guards the reuse of an id: tokens still coming for the cancelled request reached the new one."""
    first = streams.open(asked())
    streams.abort(first.name, "cancelled")
    second = streams.open(asked())
    assert streams.find("r") is second
    streams.deliver(first.name, [10])
    streams.finish(first.name, [10, 11])
    assert streams.is_open(second.name)
    assert not streams.is_open(first.name)
    streams.finish(second.name, [20])
    assert [event.token_ids for event in second] == [(20,)]


def test_names_cannot_be_forged(streams: Streams) -> None:
    first = streams.open(asked("r"))
    other = streams.open(asked(first.name))
    assert other.name != first.name


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (asked(prompt=()), "the prompt is empty"),
        (asked(prompt=(5,) * 13), "21 tokens, the KV cache holds 20"),
        (asked(prompt=(5,), max_tokens=20), "21 tokens"),
        (asked(max_tokens=0), "max_tokens is 0"),
        (asked(prompt=(5, VOCABULARY)), "no token 100"),
        (asked(prompt=(-1,)), "no token -1"),
        (asked(temperature=-0.1), "temperature is -0.1"),
        (asked(temperature=float("nan")), "temperature is nan"),
        (asked(temperature=float("inf")), "temperature is inf"),
        (asked(top_p=0.0), "top_p is 0.0"),
        (asked(top_p=1.1), "top_p is 1.1"),
        (asked(top_p=float("nan")), "top_p is nan"),
        (asked(top_k=-1), "top_k is -1"),
        (asked(seed=-1), "seed is -1"),
        (asked(seed=1 << 64), "seed is"),
    ],
)
def test_refused(streams: Streams, request_: GenerationRequest, match: str) -> None:
    """What fails inside a batch takes the whole generation loop with it, so it must not get there."""
    with pytest.raises(RequestError, match=match):
        streams.open(request_)
    assert len(streams) == 0
    streams.open(asked())  # the id is still free


def test_the_capacity_may_be_used_to_the_last_token(streams: Streams) -> None:
    streams.open(asked(prompt=(5,) * 12))
    streams.open(asked("extremes", prompt=(0, VOCABULARY - 1), seed=(1 << 64) - 1, top_p=1.0, top_k=VOCABULARY + 1))


def test_an_open_stream_is_found_by_its_id(streams: Streams) -> None:
    stream = streams.open(asked())
    assert streams.find("r") is stream
    assert streams.find("nobody") is None
    streams.finish(stream.name, [10])
    assert streams.find("r") is None


def test_the_models_positions_bound_a_request_as_well_as_the_kv_cache() -> None:
    """Guards prompts beyond the model's positions: they gave text without sense, or an index error in the batch."""
    model_is_tighter = Streams(CAPACITY, [EOS], VOCABULARY, positions=12)
    cache_is_tighter = Streams(CAPACITY, [EOS], VOCABULARY, positions=40)
    assert (model_is_tighter.limit_tokens, cache_is_tighter.limit_tokens) == (12, CAPACITY)
    with pytest.raises(RequestError, match="13 tokens, the model was made for 12 positions"):
        model_is_tighter.open(asked(prompt=(5,) * 5))
    model_is_tighter.open(asked(prompt=(5,) * 4))
    with pytest.raises(RequestError, match="21 tokens, the KV cache holds 20"):
        cache_is_tighter.open(asked(prompt=(5,) * 13))
    cache_is_tighter.open(asked(prompt=(5,) * 12))


def test_an_id_in_use_is_refused(streams: Streams) -> None:
    stream = streams.open(asked())
    with pytest.raises(RequestError, match="id r is in use"):
        streams.open(asked())
    streams.finish(stream.name, [10])  # the first is not disturbed
    assert [event.token_ids for event in stream] == [(10,)]
    streams.open(asked())


def test_close_cancels_everything_and_refuses_more(streams: Streams) -> None:
    opened = [streams.open(asked(name)) for name in "abc"]
    streams.close()
    streams.close()
    assert [[event.finish for event in stream] for stream in opened] == [["cancelled"]] * 3
    with pytest.raises(RuntimeFailure, match="stopped"):
        streams.open(asked())
