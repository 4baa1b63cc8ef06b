"""Two GPUs and two NDP workers in processes of their own: the very tokens of the unmodified model, whoever dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from serving import greedy, struck_greedy

from tiermoe.cluster.config import engine_settings, load_run_config
from tiermoe.cluster.jobs.bench.serving import prepared_store
from tiermoe.cluster.local import LocalWorker
from tiermoe.cluster.worker_process import Role, WorkerProcess

pytestmark = pytest.mark.slow

PROMPTS, PROMPT_TOKENS, TOKENS = 4, 48, 32


def _started(policy: str) -> LocalWorker:
    options = {
        "policy": policy, "budget": "0.25", "threads": 1, "integrity_checks": True, "cluster": {"shards": 2},
    }  # fmt: skip
    config = load_run_config(None, options)
    settings = engine_settings(config)
    worker = LocalWorker(settings, prepared_store(config, settings), ndp_workers=2)
    worker.start()
    return worker


@pytest.fixture(scope="module")
def worker() -> Iterator[LocalWorker]:
    with closing(_started("context-ndp-full")) as started:
        yield started


def _pairs(worker: LocalWorker) -> dict[str, int]:
    return {name: seen.pairs for name, seen in worker.stats().ndp_workers.items()}


def _assert_shared(worker: LocalWorker, names: set[str]) -> None:
    """Everybody of these worked for the lead since the counters were reset, and nobody loaded while decoding."""
    assert {name for name, pairs in _pairs(worker).items() if pairs} == names
    parts = worker.shard_stats()
    assert [part["state"] for part in parts] == ["serving"] * 2
    assert all(part["expert_bytes_peak"] <= part["expert_budget_bytes"] for part in parts)
    assert worker.stats().total().shard_tokens > 0


def _decode_bytes(worker: LocalWorker) -> list[Any]:
    return [part["bytes_demanded_decode"] for part in worker.shard_stats()]


def test_hot_on_two_gpus_and_cold_on_two_workers(
    worker: LocalWorker, prompts: list[Any], expected: list[list[int]]
) -> None:
    assert greedy(worker, prompts, TOKENS) == expected
    _assert_shared(worker, {"ndp/0", "ndp/1"})
    assert _decode_bytes(worker) == [0, 0]
    assert all(part["bytes_loaded_migration"] > 0 for part in worker.shard_stats())
    assert worker.health() == {"state": "serving", "running": 0} | dict.fromkeys(
        ("ndp/0", "ndp/1", "shard/1"), "connected"
    )
    reports = {report["worker"]: report["pairs"] for report in worker.ndp_stats()}
    assert reports.keys() == {"ndp/0", "ndp/1"}
    assert all(reports[name] >= pairs for name, pairs in _pairs(worker).items())


def test_static_placement(prompts: list[Any], expected: list[list[int]]) -> None:
    with closing(_started("static-ndp")) as worker:
        assert greedy(worker, prompts, TOKENS) == expected
        _assert_shared(worker, {"ndp/0", "ndp/1"})
        for part in worker.shard_stats():
            assert (part["bytes_demanded_decode"], part["bytes_loaded_demand"]) == (0, 0)
            assert part["bytes_preloaded"] > 0


def test_one_of_two_ndp_workers_is_killed(
    worker: LocalWorker, prompts: list[Any], expected: list[list[int]]
) -> None:
    worker.reset_stats()
    struck: list[dict[str, int]] = []

    def strike() -> None:
        struck.append(_pairs(worker))
        os.kill(worker.ndp_processes[0].pid, signal.SIGKILL)

    tokens, longest_s = struck_greedy(worker, prompts[0], TOKENS, strike)
    assert tokens == expected[0]
    assert longest_s < 4.0  # liveness within 1 s, and a busy machine
    assert worker.stats().ndp_losses == 1
    assert worker.health()["ndp/0"] == "lost"
    after = _pairs(worker)
    assert after["ndp/1"] - struck[0]["ndp/1"] > after["ndp/0"] - struck[0]["ndp/0"]
    worker.ndp_processes[0].restart()
    assert worker.engine.peers["ndp/0"].wait_until_found(20.0)
    worker.reset_stats()
    before = _decode_bytes(worker)
    assert greedy(worker, prompts[1:2], TOKENS) == expected[1:2]
    _assert_shared(worker, {"ndp/0", "ndp/1"})
    assert _decode_bytes(worker)[1] == before[1]


def test_one_more_ndp_worker_joins(worker: LocalWorker, prompts: list[Any], expected: list[list[int]]) -> None:
    worker.reset_stats()
    with WorkerProcess(Role.ndp(worker.settings.ndp, 2), worker.store) as third:

        def join() -> None:
            worker.add_ndp(third.link)
            assert worker.engine.peers["ndp/2"].wait_until_found(20.0)

        assert struck_greedy(worker, prompts[2], TOKENS, join)[0] == expected[2]
        _assert_shared(worker, {"ndp/0", "ndp/1", "ndp/2"})
        worker.reset_stats()
        assert greedy(worker, prompts, TOKENS) == expected
        pairs = _pairs(worker)
        assert min(pairs.values()) > 0
        assert worker.health()["ndp/2"] == "connected"
    assert greedy(worker, prompts, TOKENS) == expected  # it has gone, and the two others serve its share


def test_a_gpu_is_killed(worker: LocalWorker, prompts: list[Any], expected: list[list[int]]) -> None:
    shard = worker.shard_processes[0]
    tokens, longest_s = struck_greedy(
        worker, prompts[3], TOKENS, lambda: os.kill(shard.pid, signal.SIGKILL)
    )
    assert tokens == expected[3]
    assert longest_s < 4.0
    assert worker.stats().shard_losses == 1
    assert worker.health()["shard/1"] == "lost"
    shard.restart()
    assert worker.engine.peers["shard/1"].wait_until_found(20.0)
    asked = worker.stats().total().shard_tokens
    assert greedy(worker, prompts, TOKENS) == expected
    assert worker.stats().total().shard_tokens > asked
    assert _decode_bytes(worker)[1] == 0
