"""`tiermoe bench serve --url`: exit codes, the result, options that do not go together; no Ray, no model."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_openai import fake_openai

from tiermoe.cluster import attach
from tiermoe.cluster.jobs.bench import nodes
from tiermoe.cluster.jobs.bench.cases import Serve
from tiermoe.cluster.jobs.bench.load import UNANSWERED, Answered, Conversation, Limits, Load
from tiermoe.cluster.jobs.bench.metrics import Report
from tiermoe.cluster.jobs.bench.process_log import ProcessLog
from tiermoe.cluster.jobs.bench.serve import Cell, measured
from tiermoe.cluster.jobs.bench.serve_page import write_page
from tiermoe.cluster.jobs.bench.targets import Target
from tiermoe.errors import ConfigError


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"prompt {number}\n" for number in range(40)))
    return file


def test_some_are_answered(command: Any, prompts: Path, tmp_path: Path) -> None:
    """Requests that fail are part of the result, and the exit code is 0."""
    out = tmp_path / "out"
    with fake_openai(fails={2: 503}) as server:
        words = ["--url", f"{server.url}/v1/", "--prompts", prompts, "--repeats", 2, "--warmup", 1, "--rate", 200.0]
        code, _, err = command(
            "bench", "serve", *words, "--rate", 100.0, "--requests", 5, "--slo-ttft-ms", 60_000, "--out", out
        )
    assert code == 0, err
    record = json.loads((out / "serve.json").read_text())
    assert [(row["load"], row["requests"], row["failed"], row["errors"]) for row in record["rows"]] == [
        ("200 requests/s", 9, 1, {"HTTP 503": 1}), ("100 requests/s", 10, 0, {}),
    ]  # fmt: skip
    assert [row["good_share"] for row in record["rows"]] == [0.9, 1.0]
    assert all(row["tokens_per_s_low"] <= row["tokens_per_s"] <= row["tokens_per_s_high"] for row in record["rows"])
    assert len(record["all_requests"]) == 20
    asked = [body["prompt"] for _, body in server.asked if body["prompt"] not in ("prompt 39",)]
    assert len(asked) == len(set(asked)) == 20  # each repetition and load has prompts of its own
    assert {body["model"] for _, body in server.asked} == {"words"}
    assert not record["settings"]["prompts_repeat"]
    page = (out / "serve.md").read_text()
    assert "| HTTP 503 | 1 |" in page
    assert (out / "serve.png").read_bytes().startswith(b"\x89PNG")


def test_none_is_answered(command: Any, prompts: Path) -> None:
    with fake_openai(fails=dict.fromkeys(range(100), 429)) as server:
        words = ["--url", server.url, "--prompts", prompts, "--streams", 2, "--repeats", 1, "--warmup", 0, "--json"]
        code, out, err = command("bench", "serve", *words)
    assert code == 1
    (row,) = json.loads(out)["rows"]
    assert row["refused"].startswith("no request was answered: HTTP 429 (4)")
    assert "2 clients: no request was answered: HTTP 429 (4)" in err


def test_no_server_is_there(command: Any, prompts: Path) -> None:
    code, _, err = command("bench", "serve", "--url", "http://127.0.0.1:9", "--prompts", prompts)
    assert (code, err.count("\n")) == (1, 1)
    assert "no server lists its models at http://127.0.0.1:9/v1/models" in err


@pytest.mark.parametrize("url", ["localhost:8080", "http://[::1", "http://a:b"])
def test_what_is_no_url_is_the_user_s_to_correct(url: str, command: Any, prompts: Path) -> None:
    code, _, err = command("bench", "serve", "--url", url, "--prompts", prompts)
    assert (code, err.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"url": "u", "attach": "a"}, "--attach and --url both"),
        ({"config": "c", "url": "u"}, "--config and --url both"),
        ({"streams": (1,), "rate": (1.0,)}, "--streams and --rate both"),
        ({"rate": (1.0,), "schedule": Path("s")}, "--rate and --schedule both"),
        ({"model_name": "m"}, "--model-name belongs to a server"), ({"deployment": "d"}, "--deployment belongs"),
        ({"url": "u", "deployment": "d"}, "--deployment belongs"),
        ({"attach": "a", "api_key_file": Path("k")}, "--api-key-file belongs"),
        ({"url": "u", "policy": "auto"}, "--policy belongs to a runtime"),
        ({"attach": "a", "budget": "0.5"}, "--budget belongs to a runtime"),
        ({"url": "u", "store": "s"}, "--store belongs to a runtime"),
        ({"prompts": Path("p"), "prompt_tokens": 9}, "--prompt-tokens belongs to prompts that are made"),
        ({"prompts": Path("p"), "repeated": 0.5}, "--repeated belongs to prompts that are made"),
        ({"url": "u", "prompts": Path("p"), "model": "m"}, "--model belongs to prompts that are made"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together_are_refused(given: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Serve(**given).check()


def test_a_target_that_has_ended_is_asked_no_more() -> None:
    """What it had under way is unanswered."""
    gate = threading.Event()

    def hold(number: int) -> None:
        gate.wait(60)

    with fake_openai(when=hold) as server:
        looks = iter((None, "it was ended"))

        def look() -> str | None:
            found = next(looks, "it was ended")
            if found:
                gate.set()
            return found

        log, loads = ProcessLog(None), [Load((Conversation("x"),), 2, clients=clients) for clients in (1, 2)]
        cells = measured(Target("a", server.url, "words", look=look), loads, 3, log)
    assert [(len(cell.repetitions), cell.ended) for cell in cells] == [(1, "it was ended"), (0, "it was ended")]
    (lost,) = log.as_dict()["lost"]
    assert (lost["worker"], lost["what"]) == ("a", "it was ended")


def test_a_repetition_that_an_end_cut_short_is_in_no_mean() -> None:
    def asked(error: str | None) -> Answered:
        return Answered(0.0, times_s=[0.5, 1.0], ended_s=1.0, tokens=0 if error else 10, error=error)

    cell = Cell(Target("a", "u", "m"), Load((Conversation("x"),), 2, clients=2), ended="it was ended")
    cell.repetitions = [[asked(None), asked(None)], [asked("HTTP 503"), asked(None)], [asked(None), asked(UNANSWERED)]]
    row = cell.row(Limits())
    assert (row["tokens_per_s"], row["requests"], row["failed"]) == (15.0, 4, 2)  # of 20 and 10
    del cell.repetitions[:2]
    assert cell.row(Limits())["tokens_per_s"] == 10.0  # there is no other


def test_the_log_has_rates_by_second_and_what_was_lost(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def sample(worker: str, at_s: float, pid: int = 1, restarts: int = 0, **more: Any) -> attach.Sample:
        given = {"rss_bytes": 2**21, "cpu_s": at_s / 2, "counters": {}, "peers": {}} | more
        kind = worker.partition("/")[0]
        return attach.Sample("abcdef", worker, kind, "10.0.0.1", "n", restarts, pid=pid, at_s=at_s, **given)

    def lead(at_s: float) -> attach.Sample:
        counters = {"step_s": at_s, "blocked_io_s": 0.25 * at_s, "hits": 3 * at_s, "misses": at_s, "never": 0.0}
        counters["bytes_loaded_demand"] = 8e6 * max(0.0, at_s - 3)  # from then on
        return sample("lead", at_s, counters=counters, peers={"ndp/0": {"rows_sent": 10 * at_s}})

    looks = [
        ([lead(1), sample("ndp/0", 1)], {"n": "10.0.0.1", "m": "10.0.0.2"}),
        ([lead(3), sample("ndp/0", 3, problem="it is restarting")], {"n": "10.0.0.1", "m": "10.0.0.2"}),
        ([lead(4), sample("ndp/0", 4, pid=2, restarts=1), sample("ndp/1", 4)], {"n": "10.0.0.1"}),
        ([lead(5), sample("ndp/0", 5, pid=2, restarts=1)], {"n": "10.0.0.1"}),
    ]
    now = iter(looks)
    state: list[Any] = [None]

    def samples(deployment: str) -> list[attach.Sample]:
        state[0] = next(now)
        return list(state[0][0])

    monkeypatch.setattr(attach, "samples", samples)
    monkeypatch.setattr(nodes, "node_facts", lambda: [{"node": "10.0.0.1"}])
    monkeypatch.setattr(nodes, "living_nodes", lambda: looks[0][1] if state[0] is None else state[0][1])
    log = ProcessLog("abcdef")
    for _ in looks:
        log.look()
    found = log.as_dict()
    assert [(one["worker"], one["node"], one["what"]) for one in found["lost"]] == [
        ("ndp/0", "10.0.0.1", "it is restarting"), ("ndp/0", "10.0.0.1", "serves; restarts: 1"),
        ("ndp/1", "10.0.0.1", "joined"), ("", "10.0.0.2", "node lost"), ("ndp/1", "10.0.0.1", "ended"),
    ]  # fmt: skip
    first = next(row for row in found["workers"] if row["worker"] == "lead")
    counted = {"step_s": 1.0, "blocked_io_s": 0.25, "hits": 3.0, "misses": 1.0, "bytes_loaded_demand": 0.0}
    assert first["rates"] == counted
    assert (first["cpu"], first["rss_mib"], first["host"], first["node"]) == (0.5, 2.0, 0.75, "10.0.0.1")
    assert (first["shares"]["hit"], first["shares"]["loaded"]) == (0.75, 0.25)
    assert [row["worker"] for row in found["workers"]] == ["lead", "lead", "lead", "ndp/0"]  # not across a restart
    assert [(row["peer"], row["rates"]) for row in found["peers"]] == [("ndp/0", {"rows_sent": 10.0})] * 3
    assert [row["over_s"] for row in found["workers"]] == [2.0, 1.0, 1.0, 1.0]
    report = Report("serve", "emulated", settings={"model": "m"}, figures={**found, "nodes": [], "clients": []})
    write_page(tmp_path / "serve.md", report)
    page = (tmp_path / "serve.md").read_text()
    lead = next(line for line in page.splitlines() if line.startswith("| lead | 10.0.0.1 |"))
    assert "|  | 4.0 |  |  | 25% |" in lead  # MB/s over four seconds, not over three rows
    assert "| 10.0.0.2 | node lost |" in page
    assert (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")


def test_a_short_run_has_its_last_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last look is behind the last answer: a run of one second has rates, and what was lost in it."""
    looks, log = list[int](), ProcessLog(None)
    with fake_openai() as server:
        monkeypatch.setattr(log, "look", lambda: looks.append(len(server.asked)))
        measured(Target("a", server.url, "words"), [Load((Conversation("x"),), 4, clients=1)], 2, log)
    assert looks[-1] == 8
