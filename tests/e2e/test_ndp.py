"""The NDP worker in a process of its own: exact in full precision, and missed by nobody when it dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from serving import greedy, struck_greedy

from tiermoe.cluster.config import engine_settings, load_run_config
from tiermoe.cluster.jobs.bench.serving import prepared_store
from tiermoe.cluster.local import LocalWorker

pytestmark = pytest.mark.slow

PROMPTS, PROMPT_TOKENS, TOKENS = 8, 48, 48


@contextmanager
def _serving(policy: str, budget: str = "0.5", **ndp: Any) -> Iterator[LocalWorker]:
    options = {"policy": policy, "budget": budget, "threads": 1, "integrity_checks": True, "ndp": ndp}
    config = load_run_config(None, options)
    settings = engine_settings(config)
    worker = LocalWorker(settings, prepared_store(config, settings))
    try:
        worker.start()
        yield worker
    finally:
        worker.close()


@pytest.mark.parametrize(
    ("policy", "transport"),
    [("context-ndp-full", "shm"), ("context-ndp-full", "grpc"), ("static-ndp", "auto"), ("monde", "auto")],
)
def test_full_precision_gives_the_tokens_of_the_model(
    policy: str, transport: str, prompts: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    with _serving(policy, transport=transport) as worker:
        assert greedy(worker, prompts[:4], TOKENS) == expected[:4]  # together
        assert greedy(worker, prompts[4:5], TOKENS) == expected[4:5]
        stats = worker.stats()
        assert stats.total().ndp_tokens > 0
        assert stats.total().bytes_demanded_decode == 0 or policy == "monde"
        assert stats.ndp_losses == 0
        assert stats.expert_bytes_peak <= stats.expert_budget_bytes
        if transport != "auto":
            assert worker.engine.peers["ndp/0"].transport == transport


def test_quantized_replicas_serve_and_are_labelled(prompts: list[tuple[int, ...]]) -> None:
    with _serving("context-ndp-3bit") as worker:
        tokens = greedy(worker, prompts[:2], TOKENS)
        assert [len(t) for t in tokens] == [TOKENS] * 2
        record = worker.stats().as_dict()
        assert record["ndp_tokens"] > 0
        assert record["bytes_demanded_decode"] == 0
        assert record["migrations"] == 2
        assert record["executor"] == "emulated"


def _kill(worker: LocalWorker) -> None:
    os.kill(worker.ndp_processes[0].pid, signal.SIGKILL)


def _stop(worker: LocalWorker) -> None:
    os.kill(worker.ndp_processes[0].pid, signal.SIGSTOP)


@pytest.mark.parametrize("strike", [_kill, _stop])
@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_a_request_outlives_the_worker(
    strike: Callable[[LocalWorker], None], transport: str, prompts: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    with _serving("context-ndp-full", transport=transport) as worker:
        tokens, longest_s = struck_greedy(worker, prompts[0], TOKENS, lambda: strike(worker))
        assert tokens == expected[0]
        stats = worker.stats()
        assert stats.ndp_losses == 1
        assert longest_s < 4.0  # liveness within 1 s, recomputation within 1 s of it, and a busy machine
        worker.ndp_processes[0].restart()
        assert worker.engine.peers["ndp/0"].wait_until_found(20.0)
        before = stats.total().ndp_tokens
        assert greedy(worker, prompts[1:2], TOKENS) == expected[1:2]
        assert worker.stats().total().ndp_tokens > before  # it rejoined
