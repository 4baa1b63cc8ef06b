"""Expert parallelism on the default model: the very tokens of the unmodified model, whatever the GPUs do."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from serving import greedy, serving_group, settings, struck_greedy

from tiermoe.actors.settings import EngineSettings, KvSettings, LinkSettings, ShardSettings
from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.local import LocalWorker

PROMPTS, PROMPT_TOKENS, TOKENS = 8, 48, 32
BALANCE = {2: 1.1, 4: 1.3}  # most over least bytes loaded per GPU, of so few tokens: experts differ in popularity


def _settings(count: int, budget: float, prefetch: str, **more: Any) -> EngineSettings:
    kv = KvSettings(page_size=32, num_blocks=64)
    return settings(budget, prefetch, kv=kv, shards=ShardSettings(count=count), **more)


@pytest.mark.parametrize("prefetch", ["none", "next-gate"])
@pytest.mark.parametrize("budget", ["share", "small"])
@pytest.mark.parametrize("count", [2, 4])
def test_same_tokens(
    count: int, budget: str, prefetch: str, store: ExpertStore, prompts: list[Any], expected: list[list[int]]
) -> None:
    """Each GPU holds half of what it owns, or a twentieth of the model."""
    with serving_group(store, _settings(count, 0.5 / count if budget == "share" else 0.05, prefetch)) as group:
        assert greedy(group.lead, prompts, TOKENS) == expected
        parts = group.lead.shard_stats()
        assert all(part["expert_bytes_peak"] <= part["expert_budget_bytes"] for part in parts)
        assert all((part["bytes_loaded_prefetch"] > 0) == (prefetch != "none") for part in parts)
        stats = group.lead.stats()
        assert stats.shard_losses == stats.total().shard_recomputed == 0
        loaded = [part["bytes_loaded_demand"] + part["bytes_loaded_prefetch"] for part in parts]
        assert max(loaded) <= BALANCE[count] * min(loaded)


@contextmanager
def _processes(store: ExpertStore, config: EngineSettings) -> Iterator[LocalWorker]:
    worker = LocalWorker(config, store.describe().path)  # type: ignore[arg-type]
    try:
        worker.start()
        yield worker
    finally:
        worker.close()


@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGSTOP])
def test_a_request_outlives_a_shard(
    strike: signal.Signals, store: ExpertStore, prompts: list[Any], expected: list[list[int]]
) -> None:
    config = _settings(2, 0.125, "next-gate", link=LinkSettings(gbps=2.0, latency_us=10.0))
    with _processes(store, config) as worker:
        (process,) = worker.shard_processes
        tokens, longest_s = struck_greedy(worker, prompts[0], TOKENS, lambda: os.kill(process.pid, strike))
        assert tokens == expected[0]
        stats = worker.stats()
        assert stats.shard_losses == 1
        assert stats.shard_last_failure is not None
        assert longest_s < 4.0  # liveness within 1 s, recomputation, and a busy machine
        os.kill(process.pid, signal.SIGKILL)  # as whoever watches over it would
        process.restart()
        (peer,) = worker.engine.shards.peers.values()
        assert peer.wait_until_found(20.0)
        before = stats.total().shard_tokens
        assert greedy(worker, prompts[1:3], TOKENS) == expected[1:3]
        assert stats.total().shard_tokens > before  # it rejoined
        pid = process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_four_processes(store: ExpertStore, prompts: list[Any], expected: list[list[int]]) -> None:
    with _processes(store, _settings(4, 0.125, "next-gate")) as worker:
        assert greedy(worker, prompts, TOKENS) == expected
        pids = {part["pid"] for part in worker.shard_stats()[1:]}
        assert pids == {process.pid for process in worker.shard_processes}
        assert len(pids) == 3
