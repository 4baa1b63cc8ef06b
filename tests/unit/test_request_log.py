"""The request log and what is counted of refused requests: one record a request, one line, no key, no text."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_api import FakeBackend, ask, error, events
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import ClientDisconnect

from tiermoe.cluster.api.guard import Guard
from tiermoe.cluster.api.records import CLIENT_GONE, RequestRecord
from tiermoe.cluster.api.request_log import RequestLog, check_file, fields
from tiermoe.cluster.api.settings import LimitSettings
from tiermoe.errors import ConfigError

SECRET, WRONG = "sesame-open-0123456789", "not-the-key-0123456789"


def records_of(call: Any, backend: FakeBackend | None = None, **options: Any) -> tuple[list[RequestRecord], str]:
    """The records of the requests of a call, and /metrics after them."""
    found: list[RequestRecord] = []

    async def run(http: httpx.AsyncClient) -> str:
        await call(http)
        headers = {"Authorization": f"Bearer {SECRET}"}
        return (await http.get("/metrics", headers=headers)).text

    page = ask(backend or FakeBackend(), run, sinks=[found.append], **options)
    return found[:-1], page


def refused(page: str) -> dict[str, float]:
    return {
        sample.labels["reason"]: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "tiermoe_requests_refused_total"
    }


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_line_with_its_tokens_and_times(stream: bool) -> None:
    async def call(http: httpx.AsyncClient) -> None:
        body = {"prompt": ["abc", "defg"], "n": 2, "max_tokens": 3, "stream": stream}
        await http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine"})

    (record,), page = records_of(call, FakeBackend(cached=1))
    line = fields(record)
    kept = ("id", "key", "method", "path", "status", "prompt_tokens", "cached_tokens", "generated_tokens", "finish")
    assert [line[name] for name in kept] == [
        "mine", "anyone", "POST", "/v1/completions", 200, 7, 2, 12, "length",
    ]  # fmt: skip
    assert 0 < line["ttft_s"] <= line["total_s"]
    assert line["queue_s"] >= 0.002  # as the backend says
    assert line["tpot_s"] >= 0
    assert "reason" not in line
    assert refused(page) == {}


@pytest.mark.parametrize(
    ("request_", "status", "reason"),
    [
        (("POST", "/v1/completions", {"prompt": ""}), 400, "invalid_request"),
        (("POST", "/v1/completions", {"prompt": "x" * 65}), 400, "context_length_exceeded"),
        (("POST", "/v1/completions", {"prompt": "x", "n": 10}), 429, "rate_limit_exceeded"),
        (("POST", "/v1/completions", {"prompt": "x" * 2000}), 413, "body_too_large"),
        (("POST", "/v1/embeddings", {}), 400, "unsupported_endpoint"),
        (("GET", "/nowhere", None), 404, "not_found"),
        (("GET", "/v1/completions", None), 405, "method_not_allowed"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)
def test_what_is_refused_is_in_the_log_and_counted(request_: tuple[str, str, Any], status: int, reason: str) -> None:
    method, path, body = request_
    limits = LimitSettings(waiting=1, body_bytes=1024)
    (record,), page = records_of(lambda http: http.request(method, path, json=body), limits=limits)
    assert (record.status, record.reason) == (status, reason)
    assert record.message
    assert refused(page) == {reason: 1}


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_the_runtime_is_in_it_also_within_a_stream(stream: bool) -> None:
    backend = FakeBackend()
    backend.failure = "the worker died"
    body = {"prompt": "p", "stream": stream}
    answers: list[httpx.Response] = []

    async def call(http: httpx.AsyncClient) -> None:
        answers.append(await http.post("/v1/completions", json=body))

    (record,), page = records_of(call, backend)
    told = events(answers[0])[-1]["error"]["message"] if stream else error(answers[0])[2]
    assert "the worker died" in told
    assert (record.status, record.reason, record.finish) == (200 if stream else 503, "unavailable", ["error"])
    assert refused(page) == {"unavailable": 1}


def test_a_body_that_does_not_come_is_a_timeout() -> None:
    async def slow() -> Any:
        yield b"{"
        await asyncio.sleep(10)

    headers = {"Content-Type": "application/json"}
    call = lambda http: http.post("/v1/completions", content=slow(), headers=headers)  # noqa: E731
    (record,), page = records_of(call, limits=LimitSettings(body_s=0.05))
    assert (record.status, refused(page)) == (408, {"timeout": 1})
    assert record.message == "the body did not arrive within 0.05 s; send it again"


def test_keys_are_names_and_wrong_ones_the_beginning_of_a_hash(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{SECRET} name=web\n")
    keys.chmod(0o600)
    log = tmp_path / "log"

    async def call(http: httpx.AsyncClient) -> None:
        for key in (SECRET, WRONG, None):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            await http.post("/v1/completions", json={"prompt": "a secret text"}, headers=headers)

    records, page = records_of(call, keys=keys)
    for form in ("text", "json"):
        sink = RequestLog(form, log)  # type: ignore[arg-type]
        for record in records:
            sink(record)
        sink.close()
    text = log.read_text()
    assert len(text.splitlines()) == 6
    assert not any(word in text for word in (SECRET, WRONG, "a secret text", "A SECRET TEXT"))
    assert [record.key for record in records] == ["web", records[1].key, None]
    assert re.fullmatch(r"sha256:[0-9a-f]{8}", records[1].key or "")
    assert [record.status for record in records] == [200, 401, 401]
    assert refused(page) == {"invalid_api_key": 2}
    assert log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("form", ["text", "json"])
def test_no_request_writes_two_lines(form: Any, tmp_path: Path) -> None:
    record = RequestRecord("id", "GET", '/a\nb\x1b[31m "\ud800\u2028', status=404, key="k")
    record.message = "x" * 10_000
    sink = RequestLog(form, tmp_path / "log")
    sink(record)
    sink(RequestRecord("id", "GET", "/health", status=200))  # a probe that went well has no line
    sink(RequestRecord("id", "GET", "/health", status=503))
    sink.close()
    text = (tmp_path / "log").read_text(encoding="ascii")
    first, second = text.splitlines()
    assert "\x1b" not in text
    assert len(first) < 4096  # one write to a FIFO
    if form == "json":
        assert json.loads(first)["path"] == record.path
        assert json.loads(second)["status"] == 503


def test_a_rotated_file_is_made_again(tmp_path: Path) -> None:
    file = tmp_path / "log"
    sink = RequestLog("text", file)
    sink(RequestRecord("one", "GET", "/v1/models", status=200))
    wait_for(lambda: "one" in file.read_text())
    file.rename(tmp_path / "old")
    sink(RequestRecord("two", "GET", "/v1/models", status=200))
    sink.close()
    assert "two" in file.read_text()
    assert "two" not in (tmp_path / "old").read_text()


def test_a_writer_that_hangs_costs_lines_and_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiermoe.cluster.api.request_log._QUEUED", 5)
    fifo, dropped = tmp_path / "fifo", list[None]()
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDWR)
    os.set_blocking(reader, False)
    filler = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(filler, b"x" * 4096)
    sink = RequestLog("text", fifo, lambda: dropped.append(None))
    begin_s = time.thread_time()
    for _ in range(20):
        sink(RequestRecord("id", "GET", "/v1/models", status=200))
    assert time.thread_time() - begin_s < 1
    assert len(dropped) >= 14  # the thread holds one
    with contextlib.suppress(BlockingIOError):  # the reader is back
        while True:
            os.read(reader, 65536)
    sink.close()
    os.close(reader)
    os.close(filler)


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    check_file(tmp_path / "new")
    for bad in (tmp_path, tmp_path / "none" / "log"):
        with pytest.raises(ConfigError, match="request log"):
            check_file(bad)
    with pytest.raises(ConfigError):
        RequestLog("text", tmp_path / "none" / "log")


@pytest.mark.parametrize(
    ("kind", "told"), [(ZeroDivisionError, (500, "server_error")), (ClientDisconnect, (CLIENT_GONE, None))]
)
def test_a_handler_that_raises_is_a_500_and_a_client_that_left_is_none(kind: type[Exception], told: object) -> None:
    async def run() -> RequestRecord:
        async def broken(scope: Any, receive: Any, send: Any) -> None:
            raise kind

        async def send(message: Any) -> None:
            assert message["type"] == "http.response.body" or message["status"] == 500

        found: list[RequestRecord] = []
        guard = Guard(broken, None, LimitSettings(), [found.append])
        with pytest.raises(kind):
            await guard({"type": "http", "method": "GET", "path": "/", "headers": []}, None, send)  # type: ignore[arg-type]
        return found[0]

    record = asyncio.run(run())
    assert (record.status, record.reason) == told


def wait_for(done: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 10
    while not done():
        assert time.monotonic() < end_s
        time.sleep(0.005)
