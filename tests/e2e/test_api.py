"""`tiermoe serve` on the default model, as its clients see it: one server for all tests, ended by the last one."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import edge_attack
import httpx
import psutil
import pytest
from listening import off_loopback
from prometheus_client.parser import text_string_to_metric_families
from second_user import as_nobody, needs_root
from started import ON_CPU, WAIT_S, Started, started

from tiermoe.cluster.config import default_model_dir

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")

_TIERMOE = str(Path(sys.executable).with_name("tiermoe"))
_KEY = "sesame-open"
_PROMPT = "def read_config(path):"

pytestmark = pytest.mark.skipif(not default_model_dir().is_dir(), reason="the default model is not there")


@dataclass
class Server(Started):
    """A server that is ready, and what /ready said before it was."""

    start: list[httpx.Response]

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=WAIT_S, headers={"Authorization": f"Bearer {_KEY}"})

    def complete(self, prompt: Any, **options: Any) -> dict[str, Any]:
        with self.client() as http:
            response = http.post("/v1/completions", json={"prompt": prompt, "temperature": 0} | options)
        assert response.status_code == 200, response.text
        return response.json()

    def metrics(self) -> dict[tuple[str, ...], float]:
        with self.client() as http:
            text = http.get("/metrics").text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {(sample.name, *sample.labels.values()): sample.value for sample in samples}

    def wait_until(self, holds: Callable[[dict[tuple[str, ...], float]], bool]) -> None:
        """Until it holds for the metrics."""
        end_s = time.monotonic() + WAIT_S
        while not holds(self.metrics()):
            assert time.monotonic() < end_s
            time.sleep(0.05)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("serve")
    (folder / "key").write_text(f"{_KEY}\n")
    (folder / "key").chmod(0o600)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    options = (*ON_CPU, "--budget", "25%", "--port", port, "--api-key-file", str(folder / "key"))
    with started(folder, "serve", *options, wait=False) as it:
        server = Server(**vars(it), start=_watched_start(it, f"http://127.0.0.1:{port}"))
        server.wait_until_ready()
        yield server


def _watched_start(program: Started, url: str) -> list[httpx.Response]:
    """What /ready answers from its first answer on, until it is ready."""
    answers: list[httpx.Response] = []
    headers = {"Authorization": f"Bearer {_KEY}"}
    while not answers or answers[-1].status_code != 200:
        assert program.process.poll() is None, program.said()
        time.sleep(0.1)
        try:
            answers.append(httpx.get(f"{url}/ready", headers=headers, timeout=WAIT_S))
        except httpx.TransportError:  # nobody listens yet
            assert not answers or "serving at" not in program.out()
    return answers


def test_ready_says_what_the_start_does(server: Server) -> None:
    *before, ready = server.start
    assert {answer.status_code for answer in before} == {503}
    assert ready.json()["status"] == "ready"
    reasons = [answer.json()["reason"] for answer in before]
    assert all(reason.startswith("the server starts") for reason in reasons), reasons
    assert "the server starts: starting Ray" in reasons
    assert all("seconds_left" in answer.json() and "retry-after" in answer.headers for answer in before)


def test_a_local_runtime_listens_on_loopback_only(server: Server) -> None:
    assert off_loopback(server.process.pid) == {}


@needs_root
def test_a_second_user_gets_at_none_of_its_files(server: Server) -> None:
    """Ray makes its folders writable to all: sockets, logs, the request log's pipe could be replaced."""
    words = [word for process in server.family() for word in process.cmdline()]
    sessions = {Path(word.partition("=")[2]) for word in words if word.startswith("--session_dir=")}
    assert sessions, words
    for session in sessions:
        assert stat.S_IMODE(session.stat().st_mode) == 0o777  # Ray's doing
        assert as_nobody(lambda: os.listdir(session)) == "EACCES"  # noqa: B023 (called at once)
        assert as_nobody(lambda: (session / "sockets" / "raylet").rename(session / "old")) == "EACCES"  # noqa: B023


def test_greedy_text_is_that_of_run(server: Server) -> None:
    command = [_TIERMOE, "run", _PROMPT, "--attach", server.address, "--max-tokens", "24", "--json"]
    done = subprocess.run(
        command, env=server.environment, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)
    answer = server.complete(_PROMPT, max_tokens=24, logprobs=0)
    (choice,) = answer["choices"]
    assert choice["text"] == run["text"]
    assert answer["usage"] == {"prompt_tokens": run["prompt_tokens"], "completion_tokens": 24,
                               "total_tokens": run["prompt_tokens"] + 24,
                               "prompt_tokens_details": {"cached_tokens": 0}}  # fmt: skip
    with server.client() as http:
        ids = http.post("/tokenize", json={"prompt": _PROMPT}).json()["tokens"]
        shown = http.post("/detokenize", json={"tokens": run["token_ids"]}).json()["prompt"]
    assert shown == "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert server.complete(ids, max_tokens=24)["choices"][0]["text"] == run["text"]


def test_openais_client_streams_what_it_gets_whole(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=_KEY, max_retries=0, timeout=WAIT_S)
    (model,) = client.models.list().data
    options: dict[str, Any] = {"model": model.id, "temperature": 0.8, "seed": 7, "max_tokens": 20, "n": 2}
    whole = client.completions.create(prompt=_PROMPT, **options)
    assert whole.choices[0].text != whole.choices[1].text
    parts = ["", ""]
    for chunk in client.completions.create(prompt=_PROMPT, stream=True, **options):
        for choice in chunk.choices:
            parts[choice.index] += choice.text
    assert parts == [choice.text for choice in whole.choices]

    messages: Any = [{"role": "user", "content": "import os"}]
    asked: dict[str, Any] = {"model": model.id, "messages": messages, "temperature": 0, "max_completion_tokens": 12}
    answer = client.chat.completions.create(logprobs=True, top_logprobs=2, **asked)
    assert answer.choices[0].finish_reason == "length"
    scores = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in scores) == answer.choices[0].message.content
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in scores)
    *chunks, last = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content
    assert last.usage == answer.usage


def test_a_prompts_scores_as_lm_evaluation_harness_asks(server: Server) -> None:
    answer = server.complete(_PROMPT, max_tokens=1, logprobs=1, echo=True)
    found = answer["choices"][0]["logprobs"]
    assert answer["choices"][0]["text"].startswith(_PROMPT)
    assert len(found["tokens"]) == answer["usage"]["prompt_tokens"] + 1
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    for logprob, top in zip(found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True):
        assert logprob <= max(top.values()) <= 0
    assert found["text_offset"][-1] == len(_PROMPT)


def test_four_at_a_time_get_what_each_gets_alone(server: Server) -> None:
    prompts = [_PROMPT, "import os", "class Cache:", "for i in range("]
    alone = [server.complete(prompt, max_tokens=32)["choices"] for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda prompt: server.complete(prompt, max_tokens=32)["choices"], prompts)) == alone
    assert [c["text"] for c in server.complete(prompts, max_tokens=32)["choices"]] == [a[0]["text"] for a in alone]


def test_a_client_that_leaves_ends_its_request(server: Server) -> None:
    generated, ended = ("tiermoe_generation_tokens_total",), ("tiermoe_request_success_total", "abort")
    before = server.metrics()[generated]
    body = {"prompt": _PROMPT, "max_tokens": 2000, "ignore_eos": True, "temperature": 0}
    with server.client() as http, http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert next(response.iter_lines()).startswith("data: {")
    server.wait_until(lambda found: found.get(ended) == 1)
    streamed = server.metrics()[generated]

    async def leave_without_an_answer() -> None:
        async with httpx.AsyncClient(timeout=WAIT_S, headers={"Authorization": f"Bearer {_KEY}"}) as http:
            whole = asyncio.ensure_future(http.post(f"{server.url}/v1/completions", json=body))
            await asyncio.to_thread(server.wait_until, lambda found: found[generated] > streamed)
            whole.cancel()

    asyncio.run(leave_without_an_answer())
    server.wait_until(lambda found: found[ended] == 2)
    time.sleep(1.5)  # the lead is asked once a second
    server.wait_until(lambda found: found["tiermoe_num_requests_running",] == 0)
    assert server.metrics()[generated] - before < 2 * 2000


def test_the_key_is_asked_for(server: Server) -> None:
    for headers in ({}, {"Authorization": "Bearer other"}):
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 401
        assert httpx.get(f"{server.url}/metrics", headers=headers).status_code == 401
    health = httpx.get(f"{server.url}/health").json()
    assert health["status"] == "ok"
    assert [lead["state"] for lead in health["leads"]] == ["serving"]


def test_ids_and_errors_reach_the_client(server: Server) -> None:
    with server.client() as http:
        response = http.post("/v1/completions", json={"prompt": "p", "best_of": 3}, headers={"X-Request-Id": "mine"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")
        assert response.headers.get_list("x-request-id") == ["mine"]
        assert http.post("/v1/completions", content=b" " * (5 * 2**20)).status_code == 413


@pytest.mark.slow
@pytest.mark.parametrize("kind", edge_attack.KINDS)
def test_big_bodies_delay_nobody(server: Server, kind: str) -> None:
    """One text of 3.9 MB froze /health for 22 s and a stream of another client for 23 s; eight ended the replica."""
    found = edge_attack.measure(server.url, kind, seconds=4.0, key_file=server.folder / "key")
    assert found["failures"] == []
    assert set(found["statuses"]) == {"400"}
    # on an idle machine 85 ms and 1 s; other tests run beside
    assert max(found["health_p99_ms"], found["ready_p99_ms"]) < 5000
    assert found["stream_gap_max_ms"] < 5000


def test_metrics_of_server_and_runtime(server: Server) -> None:
    found = server.metrics()
    assert found["tiermoe_time_to_first_token_seconds_count",] >= 10
    assert found["tiermoe_request_queue_time_seconds_sum",] >= 0
    assert found["tiermoe_expert_hits_total",] > 0
    assert found["tiermoe_expert_misses_total",] > 0
    assert found["tiermoe_expert_bytes_loaded_total", "demand"] > 0
    assert found["tiermoe_kv_cache_usage_ratio",] == 0


def test_sigterm_lets_streams_end_and_leaves_nothing(server: Server) -> None:
    body = {"prompt": _PROMPT, "max_tokens": 64, "ignore_eos": True, "stream": True}
    with server.client() as http, http.stream("POST", "/v1/completions", json=body) as response:
        lines, family = response.iter_lines(), server.family()
        assert next(lines).startswith("data: {")
        server.process.terminate()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.process.wait(timeout=WAIT_S) == 0
    assert not psutil.wait_procs(family, timeout=30)[1]
    assert not (server.folder / "tiermoe").exists()
    assert "Traceback" not in server.said()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")
