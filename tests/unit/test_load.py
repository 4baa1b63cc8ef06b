"""Load on a server: the same requests at the same times, what a failed one counts as, goodput, intervals."""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
from pathlib import Path

import pytest
from fake_api import byte_tokenizer
from fake_openai import fake_openai

from tiermoe.cluster.jobs.bench.load import (
    NGRAM,
    Answered,
    Conversation,
    Limits,
    Load,
    connecting,
    drive,
    errors_of,
    figures_of,
    made_conversations,
    read_conversations,
    read_schedule,
)
from tiermoe.cluster.jobs.bench.metrics import interval95
from tiermoe.errors import ConfigError, RequestError

_POOL = tuple(Conversation(f"prompt {number}") for number in range(10))


def _texts(load: Load, repetition: int) -> list[int]:
    return [_POOL.index(conversation) for conversation in load.conversations(repetition)]


def test_a_repetition_takes_the_next_conversations_and_begins_again_behind_the_last() -> None:
    load = Load(_POOL, 4, clients=2, first=1)
    assert [_texts(load, repetition) for repetition in range(3)] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 0, 1, 2]]


def test_arrivals_are_those_of_the_seed_and_of_the_repetition() -> None:
    load = Load(_POOL, 400, rate=20.0, seed=3)
    first, second = (load.arrivals_s(repetition) or () for repetition in (0, 1))
    assert first == Load(_POOL, 400, rate=20.0, seed=3).arrivals_s(0) != second
    assert first != Load(_POOL, 400, rate=20.0, seed=4).arrivals_s(0)
    assert first[0] == 0.0
    assert list(first) == sorted(first)
    assert 399 / first[-1] == pytest.approx(20.0, rel=0.2)  # four of its standard deviations
    assert Load(_POOL, 2, schedule_s=(0.0, 0.5, 2.0)).arrivals_s(1) == (0.0, 0.5)
    assert Load(_POOL, 2, clients=1).arrivals_s() is None


@pytest.mark.parametrize(
    "given",
    [
        {}, {"clients": 1, "rate": 1.0}, {"rate": 0.0}, {"rate": math.inf}, {"clients": 0}, {"schedule_s": (0.0,)},
        {"clients": 1, "max_tokens": 0}, {"clients": 1, "pool": ()},
    ],
)  # fmt: skip
def test_a_load_that_says_nothing_or_two_things_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Load(**{"pool": _POOL, "requests": 2} | given)  # type: ignore[arg-type]


def test_made_prompts_have_their_length_and_repeat_their_share() -> None:
    texts = ["".join(random.Random(k).choices("abcdefgh", k=900)) for k in range(3)]

    def repeats(share: float) -> float:
        """Share of the runs of the prompts that were there before."""
        found = made_conversations(texts, byte_tokenizer(), 8, 320, share, seed=1)
        again = []
        for conversation in found:
            text = conversation.text or ""
            assert len(text) == 320
            runs = [text[begin : begin + NGRAM] for begin in range(0, 320, NGRAM)]
            again += [run in text[: begin * NGRAM + NGRAM - 1] for begin, run in enumerate(runs)]
        assert len({conversation.text for conversation in found}) == 8
        assert found == made_conversations(texts, byte_tokenizer(), 8, 320, share, seed=1)
        return sum(again) / len(again)

    assert repeats(0.5) - repeats(0.0) == pytest.approx(0.5, abs=0.15)


def test_requests_that_fail_are_errors_by_kind_and_the_others_go_on() -> None:
    fails = {3: 503, 4: "cut", 5: "error", 6: "silent", 7: "garbage"}  # behind three of the warm-up
    with fake_openai(fails=fails) as server:
        load = Load(_POOL, 8, max_tokens=7, clients=1, warmup=3, ignore_eos=True)
        found = asyncio.run(drive(server.url, "words", load))
        nobody = asyncio.run(drive("http://127.0.0.1:9", "words", Load(_POOL, 1, rate=1.0)))
        late = asyncio.run(drive(server.url, "words", Load(_POOL, 1, clients=1), timeout_s=0.0))
    assert [one.error for one in found] == [
        "HTTP 503", "disconnected", "stream: overloaded", "no token", "malformed answer", None, None, None,
    ]  # fmt: skip
    assert errors_of([*nobody, *late]) == {"no connection": 1, "timeout": 1}
    assert {(one.tokens, one.counted, one.prompt_tokens, one.cached_tokens) for one in found[5:]} == {(4, True, 5, 2)}
    assert all(len(one.times_s) == 3 for one in found[5:])
    paths, bodies = zip(*server.asked[3:11], strict=True)
    assert set(paths) == {"/v1/completions"}
    assert [body["prompt"] for body in bodies] == [conversation.text for conversation in _POOL[:8]]
    wanted = {"model": "words", "max_tokens": 7, "temperature": 0.0, "stream": True, "ignore_eos": True}
    assert all(body.items() >= wanted.items() for body in bodies)
    figures = figures_of(found, Limits())
    assert figures["tokens_per_s"] / figures["requests_per_s"] == pytest.approx(4.0)
    assert all(math.isnan(value) for value in figures_of(nobody, Limits()).values() if value)  # 0 a second


def _asked(*parts: str | bytes, head: str = "200 OK") -> Answered:
    """One request, answered with these bytes, whose end is the connection's."""
    begin = f"HTTP/1.1 {head}\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    body = b"".join(part if isinstance(part, bytes) else f"{part}\n\n".encode() for part in parts)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(asked.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        writer.write(begin.encode() + body)
        await writer.drain()
        writer.close()

    async def ask() -> Answered:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            (one,) = await drive(f"http://127.0.0.1:{port}", "words", Load(_POOL, 1, clients=1))
            return one

    return asyncio.run(ask())


_TEXT, _DONE = 'data: {"choices": [{"text": "a"}]}', "data: [DONE]"
_COUNT = 'data: {"usage": {"completion_tokens": %s}}'


@pytest.mark.parametrize(
    ("parts", "error", "text", "tokens"),
    [
        ((_TEXT, _DONE), None, "a", 1),
        ((_TEXT.replace(": ", ":"), "data:[DONE]"), None, "a", 1),
        ((": ping", "event: x", _TEXT.replace("]}", "]}\r"), "data: [DONE]\r"), None, "a", 1),
        (('data: {"choices": [{"text": "a\u2028b\x85c", "finish_reason": "stop"}]}',), None, "a\u2028b\x85c", 1),
        ((b'data: {"choices": [{"text": "\xff"}]}\n\ndata: [DONE]',), None, "\ufffd", 1),
        ((_TEXT, _COUNT % '"7"', _DONE), None, "a", 7), ((_TEXT, _COUNT % "null", _DONE), None, "a", 1),
        ((_TEXT,), "disconnected", "a", 1), ((), "no token", "", 0), ((_DONE,), "no token", "", 0),
        *(((_TEXT, found, _DONE), "malformed answer", "a", 0) for found in (
            'data: {"choices": [1]}', 'data: {"choices": {"a": 1}}', 'data: {"choices": [{"delta": "x"}]}',
            'data: {"choices": [{"text": 5}]}', 'data: {"usage": [1]}', _COUNT % "-7", _COUNT % "1e999",
            'data: {"usage": {"completion_tokens": 3, "prompt_tokens_details": "x"}}', "data: " + "[" * 9999, "data: x",
        )),
    ],
)  # fmt: skip
def test_what_is_no_answer_fails_its_request_alone(
    parts: tuple[str, ...], error: str | None, text: str, tokens: int
) -> None:
    one = _asked(*parts)
    assert (one.error, one.text, one.tokens) == (error, text, tokens)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"error": {"message": "no model\\n m"}}', "no model m"), ('{"error": "busy"}', "busy"),
        ("<html>\n  gone\n", "<html> gone"), ("", ""), ('{"detail": "Not Found"}', '{"detail": "Not Found"}'),
    ],
)  # fmt: skip
def test_the_server_s_words_of_an_error_are_kept(body: str, said: str) -> None:
    one = _asked(body.encode(), head="404 Not Found")
    assert (one.error, one.said) == ("HTTP 404", said)
    stream = _asked('data: {"error": {"type": "too\\nlong", "message": "8192 tokens"}}')
    assert (stream.error, stream.said) == ("stream: too long", "8192 tokens")


def test_a_server_here_is_not_asked_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert _asked(_TEXT, _DONE).error is None
    here = [connecting(f"{url}:1").get("trust_env") for url in ("http://localhost", "http://[::1]", "http://10.0.0.1")]
    assert here == [False, False, None]


def test_pieces_are_counted_where_the_server_does_not_count() -> None:
    with fake_openai(usage=False) as server:
        (one,) = asyncio.run(drive(server.url, "words", Load(_POOL, 1, clients=1)))
    assert (one.tokens, one.counted, one.error) == (3, False, None)


def test_a_closed_loop_has_as_many_requests_under_way_as_clients_and_an_open_one_does_not_wait() -> None:
    with fake_openai() as server:
        asyncio.run(drive(server.url, "words", Load(_POOL, 9, clients=3)))
        assert server.most_running <= 3
        gate = threading.Barrier(6)  # all six are under way at once, or none is answered

        def meet(number: int) -> None:
            gate.wait(60)

        server.when = meet
        found = asyncio.run(drive(server.url, "words", Load(_POOL, 6, rate=1000.0)))
    assert [one.error for one in found] == [None] * 6


def test_a_conversation_carries_the_recorded_answers_or_else_the_server_s() -> None:
    said = ("system", "be short"), ("user", "one"), ("assistant", "recorded"), ("user", "two"), ("user", "three")
    with fake_openai() as server:
        load = Load((Conversation(messages=said, max_tokens=9),), 1, clients=1)
        found = asyncio.run(drive(server.url, "words", load))
    assert [path for path, _ in server.asked] == ["/v1/chat/completions"] * 3
    assert [body["max_tokens"] for _, body in server.asked] == [9] * 3
    last = server.asked[-1][1]["messages"]
    assert [(message["role"], message["content"]) for message in last] == [
        *said[:4], ("assistant", "word0 word1 word2 "), said[4],
    ]  # fmt: skip
    assert [one.tokens for one in found] == [4] * 3


def test_what_is_under_way_when_it_is_ended_is_unanswered() -> None:
    began, gate = threading.Event(), threading.Event()

    async def ended(url: str) -> list[Answered]:
        found: list[Answered] = []
        task = asyncio.create_task(drive(url, "words", Load(_POOL, 5, clients=1), answered=found))
        await asyncio.to_thread(began.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        return found

    def when(number: int) -> None:
        if number == 1:
            began.set()
            gate.wait(60)

    with fake_openai(when=when) as server:
        found = asyncio.run(ended(server.url))
    assert [one.error for one in found] == [None, "unanswered"]


def _answered(arrived_s: float, times_s: list[float], tokens: int, error: str | None = None) -> Answered:
    return Answered(arrived_s, times_s=times_s, ended_s=times_s[-1], tokens=tokens, error=error)


def test_goodput_counts_requests_within_both_limits() -> None:
    requests = [
        _answered(10.0, [0.1, 0.3], 3),  # 100 ms, 100 ms a token
        _answered(11.0, [0.2, 0.3], 11),  # 200 ms, 10 ms
        _answered(12.0, [0.1], 1),  # 100 ms; no further token
        _answered(13.0, [0.1, 1.0], 2, error="disconnected"),
    ]
    expected = {(None, None): None, (150.0, None): 0.5, (None, 50.0): 0.5, (150.0, 50.0): 0.25, (999.0, 999.0): 0.75}
    for (ttft_ms, tpot_ms), share in expected.items():
        figures = figures_of(requests, Limits(ttft_ms, tpot_ms))
        assert figures.get("good_share") == share
        if share is not None:
            assert figures["goodput"] == pytest.approx(4 * share / 4.0)  # in the four seconds to the last end
    figures = figures_of(requests, Limits())
    assert figures["tokens_per_s"] == pytest.approx(15 / 4.0)
    assert figures["ttft_p50_ms"] == pytest.approx(100.0)
    assert figures["tpot_p50_ms"] == pytest.approx(55.0)


@pytest.mark.parametrize(
    ("values", "expected"),
    [([3.0], None), ([2.0, 4.0], (3 - 12.706, 3 + 12.706)), ([5.0] * 4, (5.0, 5.0)),
     ([float(v) for v in range(13)], (6 - 2.228 * 15.16667**0.5 / 13**0.5, 6 + 2.228 * 15.16667**0.5 / 13**0.5))],
)  # fmt: skip
def test_an_interval_is_student_s(values: list[float], expected: tuple[float, float] | None) -> None:
    assert interval95(values) == (None if expected is None else pytest.approx(expected, rel=1e-4))


def test_files_of_prompts_and_schedules(tmp_path: Path) -> None:
    lines, chats, times, trace = (tmp_path / name for name in ("a.txt", "b.jsonl", "c.txt", "d.jsonl"))
    lines.write_text("one\n\n two \n")
    assert read_conversations(lines) == (Conversation("one"), Conversation(" two "))
    entries = [{"prompt": "a", "max_tokens": 3}, {"text": "b"}, {"messages": [{"role": "user", "content": "c"}]}]
    chats.write_text("\n".join(map(json.dumps, entries)))
    assert read_conversations(chats) == (
        Conversation("a", max_tokens=3), Conversation("b"), Conversation(messages=(("user", "c"),)),
    )  # fmt: skip
    times.write_text("3.5\n1\n2\n")
    assert read_schedule(times) == (0.0, 1.0, 2.5)
    trace.write_text('{"timestamp": 2000, "input_length": 7}\n{"at_s": 2.5}\n')
    assert read_schedule(trace) == (0.0, 0.5)


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("a.txt", "\n", "no prompt"), ("a.jsonl", "{", "not JSON"), ("a.jsonl", "[1]", "not a JSON object"),
        ("a.jsonl", '{"prompt": "\\ud800"}', "surrogates"), ("a.jsonl", '{"a":' + "[" * 9999, "not JSON"),
        ("a.jsonl", "{}", ":1 has no prompt"), ("a.jsonl", '{"prompt": "a", "max_tokens": 0}', "max_tokens is 0"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}', "no role or content"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": null}]}', "no role or content"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": [{"text": "a"}]}]}', "no role or content"),
        ("a.jsonl", '{"messages": [{"role": "system", "content": "x"}]}', "no prompt"),
    ],
)  # fmt: skip
def test_files_that_mean_nothing_are_refused(name: str, text: str, what: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RequestError, match=what):
        read_conversations(tmp_path / name)
    with pytest.raises(RequestError):
        read_schedule(tmp_path / "none")


@pytest.mark.parametrize("text", ["", "soon", "nan", '{"time": 3}', f'{{"at_s": 1{"0" * 400}}}', '{"at_s": null}'])
def test_schedules_that_mean_nothing_are_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "times"
    file.write_text(text)
    with pytest.raises(RequestError):
        read_schedule(file)
