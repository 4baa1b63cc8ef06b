"""Work in processes that can be killed: what ends one request ends no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tiermoe.proto.bounded import NotStarted, Workers

_TESTS = Path(__file__).parents[1]


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(_TESTS), os.environ.get("PYTHONPATH", "")]))
    found = Workers("bounded_jobs", b"what was given")
    yield found
    found.close()


# request, seconds, what comes of it: a value, or the error and its words
CASES: dict[str, tuple[dict[str, Any], float, Any]] = {
    "an answer": ({"echo": {"text": "é\ud800" * 100_000}}, 20.0, "é\ud800" * 100_000),
    "what the helper was given": ({"given": {}}, 20.0, "what was given"),
    "a failure": ({"fail": {"why": "no such word\nat all"}}, 20.0, (ValueError, "no such word")),
    "no such job": ({"other": {}}, 20.0, (ValueError, "other")),
    "arguments that do not fit": ({"echo": {"texts": 1}}, 20.0, (ValueError, "unexpected keyword")),
    "too much memory": ({"fill": {"size": 2**31}}, 20.0, (ValueError, "needs more than 1024 MiB")),
    "too long": ({"sleep": {"seconds": 600}}, 0.3, (TimeoutError, None)),
    "the end of the process": ({"die": {}}, 20.0, (ConnectionError, "it has ended")),
}


@pytest.mark.parametrize("case", CASES)
def test_what_comes_of_a_request_while_others_are_answered(case: str, workers: Workers) -> None:
    request, within_s, expected = CASES[case]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(workers.ask, request, within_s)
        assert [workers.ask({"echo": {"text": str(i)}}, 20.0) for i in range(20)] == [str(i) for i in range(20)]
        if isinstance(expected, tuple):
            kind, words = expected
            with pytest.raises(kind, match=words):
                asked.result()
        else:
            assert asked.result() == expected
    assert workers.ask({"echo": {"text": "after"}}, 20.0) == "after"


def test_a_worker_that_ends_is_replaced_once(workers: Workers, tmp_path: Path) -> None:
    assert workers.ask({"die": {"unless": str(tmp_path / "died")}}, 20.0) == "alive"


def test_workers_are_kept_and_replaced_with_their_helper(workers: Workers) -> None:
    first = workers.ask({"pid": {}}, 20.0)
    assert workers.ask({"pid": {}}, 20.0) == first
    assert workers.helper is not None
    workers.helper.kill()
    workers.helper.wait()
    process = psutil.Process(first)
    process.kill()
    assert not psutil.wait_procs([process], timeout=20)[1]  # not there, not even as a zombie
    assert workers.ask({"pid": {}}, 20.0) != first


def test_a_stopped_worker_is_given_up(workers: Workers) -> None:
    worker = workers.worker()
    process = psutil.Process(worker.pid)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        worker.ask({"echo": {"text": "x"}}, 0.2)
    worker.close()
    process.kill()


def test_as_many_work_as_ask(workers: Workers) -> None:
    with ThreadPoolExecutor(4) as pool:
        asked = [f"{i}" * 10_000 for i in range(100)]
        assert list(pool.map(lambda text: workers.ask({"echo": {"text": text}}, 20.0), asked)) == asked
    assert 1 <= len(workers.idle) <= 4


def test_all_end_with_the_process_that_started_them(workers: Workers) -> None:
    code = (
        "import sys; from tiermoe.proto.bounded import Workers\n"
        "workers = Workers('bounded_jobs'); one = workers.worker()\n"
        "print(workers.helper.pid, workers.ask({'pid': {}}, 20.0), one.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        family = [psutil.Process(int(pid)) for pid in server.stdout.readline().split()]
        server.kill()
        assert not psutil.wait_procs(family, timeout=20)[1]


def test_a_module_that_does_not_start_is_not_the_requests_fault() -> None:
    with pytest.raises(NotStarted):
        Workers("no_such_module").ask({"echo": {"text": "x"}}, 5.0)
