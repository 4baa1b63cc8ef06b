"""Shards, NDP workers and the matcher in processes of their own: the unmodified model's very tokens, whoever dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from channel_peer import wait_until
from quick import quick
from serving import Reference, greedy, serving_group, serving_locally, settings

from tiermoe.actors.settings import EngineSettings, KvSettings, LinkSettings, MatcherSettings, ShardSettings
from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.config import engine_settings, load_policy, load_run_config
from tiermoe.cluster.jobs.prepare.needs import prepared_store
from tiermoe.cluster.local import LocalWorker
from tiermoe.cluster.worker_process import Role, WorkerProcess

slow = pytest.mark.slow
PATIENCE_S = 30.0
SLOW = {"gbps": 0.05, "latency_us": 10.0}  # 4 ms an expert: near data is cheaper, also on a busy machine
LOST_S = 5.0  # liveness within 1 s, recomputation, and a busy machine; less than a deadline would take


def _rejoined(worker: LocalWorker, process: WorkerProcess, peer: str) -> None:
    """Start a process again, and see that the lead finds it."""
    process.restart()
    assert worker.engine.peers[peer].wait_until_found(20.0)


# -- shards --------------------------------------------------------------------------------------------------------

BALANCE = {2: 1.1, 4: 1.3}  # most over least bytes loaded per GPU, of so few tokens: experts differ in popularity


def _sharded(count: int, budget: float, prefetch: str = "next-gate", **more: Any) -> EngineSettings:
    kv = KvSettings(page_size=32, num_blocks=64)
    return settings(budget, prefetch, kv=kv, shards=ShardSettings(count=count), **more)


@pytest.mark.parametrize(
    ("count", "budget", "prefetch"),  # every two of their values together
    quick(
        [(2, "share", "none"), (2, "small", "next-gate"), (4, "share", "next-gate"), (4, "small", "none")],
        fast=[(2, "small", "next-gate"), (4, "share", "next-gate")],
    ),
)
def test_shards(count: int, budget: str, prefetch: str, store: ExpertStore, reference: Reference) -> None:
    """Each GPU holds half of what it owns, or a twentieth of the model."""
    with serving_group(store, _sharded(count, 0.5 / count if budget == "share" else 0.05, prefetch)) as group:
        reference.check(group.lead, 12, 32)
        parts = group.lead.shard_stats()
        assert all(part["expert_bytes_peak"] <= part["expert_budget_bytes"] for part in parts)
        assert all((part["bytes_loaded_prefetch"] > 0) == (prefetch != "none") for part in parts)
        stats = group.lead.stats()
        assert stats.shard_losses == stats.total().shard_recomputed == 0
        loaded = [part["bytes_loaded_demand"] + part["bytes_loaded_prefetch"] for part in parts]
        assert max(loaded) <= BALANCE[count] * min(loaded)


def test_each_gpu_reads_the_disk_into_host_memory_of_its_own(store: ExpertStore, reference: Reference) -> None:
    """A quarter of the experts each, of which it owns a half."""
    experts, each = 16 * 32, 98_304
    with serving_group(store, _sharded(2, 0.05, host_bytes=experts // 4 * each)) as group:
        reference.check(group.lead, 4, 32)
        shards = [(shard.engine.stats(), shard.sample()) for shard in group.shards]
        for stats, sample in ((group.lead.stats(), group.lead.sample()), *shards):
            host, counters = stats.host_memory, sample.counters
            assert (host.slots, host.budget_bytes) == (experts // 4, experts // 4 * each)
            assert 0 < host.bytes_demand + host.bytes_prefetch <= host.read_bytes
            assert counters["host_misses"] == host.misses > 0
            assert counters["bytes_loaded_demand"] > 0


@pytest.mark.usefixtures("usual_liveness")
@pytest.mark.parametrize("strike", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=slow)])
def test_a_request_outlives_a_shard(strike: signal.Signals, store: ExpertStore, reference: Reference) -> None:
    config = _sharded(2, 0.125, link=LinkSettings(gbps=2.0, latency_us=10.0))
    with serving_locally(store, config) as worker:
        (process,) = worker.shard_processes
        longest_s = reference.check_struck(worker, 0, lambda: os.kill(process.pid, strike))
        stats = worker.stats()
        assert stats.shard_losses >= 1  # one more where a full machine silences it
        assert stats.shard_last_failure is not None
        assert longest_s < LOST_S
        os.kill(process.pid, signal.SIGKILL)  # as whoever watches over it would
        _rejoined(worker, process, "shard/1")
        before = stats.total().shard_tokens
        reference.check(worker, 2, 32, first=1)
        assert stats.total().shard_tokens > before
        pid = process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# -- one NDP worker ------------------------------------------------------------------------------------------------


@contextmanager
def _near_data(
    policy: str, budget: str = "0.5", workers: int = 1, host_bytes: int | None = None, **more: Any
) -> Iterator[LocalWorker]:
    options = {"policy": policy, "budget": budget, "threads": 1, "integrity_checks": True, **more}
    config = load_run_config(None, options)
    made = engine_settings(config).model_copy(update={"host_bytes": host_bytes})
    with closing(LocalWorker(made, prepared_store(config, made), workers)) as worker:
        worker.start()
        yield worker


@slow
@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_near_data_in_full_precision(transport: str, reference: Reference) -> None:
    """The other placements in one process: tests/unit/test_placer.py, and their tokens in tests/golden."""
    with _near_data("context-ndp-full", ndp={"transport": transport}) as worker:
        reference.check(worker, 4, 48)
        reference.check(worker, 1, 48, first=4)
        stats = worker.stats()
        assert stats.total().ndp_tokens > 0
        assert stats.total().bytes_demanded_decode == 0
        assert stats.ndp_losses == 0, stats.ndp_last_failure
        assert stats.expert_bytes_peak <= stats.expert_budget_bytes
        assert worker.engine.peers["ndp/0"].transport == transport
        assert worker.engine.prefetching is None


@slow
def test_near_data_beside_host_memory_that_is_read_from_the_disk(reference: Reference) -> None:
    """A worker that maps the store, as on a node of its own, and a lead whose half of it is read."""
    with _near_data("auto", "0.25", link=SLOW, host_bytes=16 * 32 // 2 * 98_304) as worker:
        reference.check(worker, 4, 24)
        reference.check(worker, 1, 24, first=4)
        stats = worker.stats()
        assert stats.total().ndp_tokens > 0
        assert stats.host_memory.misses > 0
        assert stats.expert_bytes_peak <= stats.expert_budget_bytes


@slow
def test_quantized_replicas_serve_and_are_labelled(reference: Reference) -> None:
    with _near_data("context-ndp-3bit") as worker:
        tokens = greedy(worker, reference.prompts[:2], 48)
        assert [len(t) for t in tokens] == [48] * 2
        record = worker.stats().as_dict()
        assert record["ndp_tokens"] > 0
        assert record["bytes_demanded_decode"] == 0
        assert record["migrations"] == 2
        assert record["executor"] == "emulated"


@slow
@pytest.mark.usefixtures("usual_liveness")
@pytest.mark.parametrize(("strike", "transport"), [(signal.SIGKILL, "grpc"), (signal.SIGSTOP, "shm")])
def test_a_request_outlives_an_ndp_worker(strike: signal.Signals, transport: str, reference: Reference) -> None:
    with _near_data("context-ndp-full", ndp={"transport": transport}) as worker:
        (process,) = worker.ndp_processes
        longest_s = reference.check_struck(worker, 0, lambda: os.kill(process.pid, strike), 48)
        stats = worker.stats()
        assert stats.ndp_losses >= 1  # one more where a full machine silences it
        assert longest_s < LOST_S
        _rejoined(worker, process, "ndp/0")
        before = stats.total().ndp_tokens
        reference.check(worker, 1, 48, first=1)
        assert worker.stats().total().ndp_tokens > before


@slow
def test_auto_outlives_a_worker_and_a_gpu(reference: Reference) -> None:
    with _near_data("auto", "0.25", 2, cluster={"shards": 2}, link=SLOW) as worker:
        reference.check(worker, 4, 16)
        sent = worker.stats().total()
        assert sent.ndp_tokens + sent.shard_tokens > 0  # to whom of them, this machine's costs decide
        for process, peer in ((worker.ndp_processes[0], "ndp/0"), (worker.shard_processes[0], "shard/1")):
            pid = process.pid
            assert reference.check_struck(worker, 0, lambda pid=pid: os.kill(pid, signal.SIGKILL)) < LOST_S
            assert worker.health()[peer] == "lost"
            _rejoined(worker, process, peer)
            reference.check(worker, 2, 16, first=1)


# -- two GPUs and two NDP workers ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def started() -> Iterator[LocalWorker]:
    with _near_data("context-ndp-full", "0.25", 2, cluster={"shards": 2}) as worker:
        yield worker


@pytest.fixture
def worker(started: LocalWorker) -> LocalWorker:
    """The module's, with all its peers: a machine that is full may have silenced one in the test before."""
    for name in ("ndp/0", "ndp/1", "shard/1"):
        assert started.engine.peers[name].wait_until_found(20.0)
    return started


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


@slow
def test_hot_on_two_gpus_and_cold_on_two_workers(worker: LocalWorker, reference: Reference) -> None:
    reference.check(worker, 4, 32)
    _assert_shared(worker, {"ndp/0", "ndp/1"})
    assert _decode_bytes(worker) == [0, 0]
    assert all(part["bytes_loaded_migration"] > 0 for part in worker.shard_stats())
    peers = dict.fromkeys(("ndp/0", "ndp/1", "shard/1"), "connected")
    assert worker.health() == {"state": "serving", "running": 0} | peers


@slow
def test_static_placement_on_two_gpus(reference: Reference) -> None:
    with _near_data("static-ndp", "0.25", 2, cluster={"shards": 2}) as worker:
        reference.check(worker, 4, 32)
        _assert_shared(worker, {"ndp/0", "ndp/1"})
        for part in worker.shard_stats():
            assert (part["bytes_demanded_decode"], part["bytes_loaded_demand"]) == (0, 0)
            assert part["bytes_preloaded"] > 0


@slow
def test_one_of_two_ndp_workers_is_killed(worker: LocalWorker, reference: Reference) -> None:
    worker.reset_stats()
    struck: list[dict[str, int]] = []

    def strike() -> None:
        struck.append(_pairs(worker))
        os.kill(worker.ndp_processes[0].pid, signal.SIGKILL)

    assert reference.check_struck(worker, 0, strike) < LOST_S
    assert worker.stats().ndp_losses >= 1  # on a full machine the other one may also be silent for a second
    assert worker.health()["ndp/0"] == "lost"
    after = _pairs(worker)
    assert after["ndp/1"] - struck[0]["ndp/1"] > after["ndp/0"] - struck[0]["ndp/0"]
    _rejoined(worker, worker.ndp_processes[0], "ndp/0")
    worker.reset_stats()
    before = _decode_bytes(worker)
    reference.check(worker, 1, 32, first=1)
    _assert_shared(worker, {"ndp/0", "ndp/1"})
    assert _decode_bytes(worker)[1] == before[1]


@slow
def test_one_more_ndp_worker_joins(worker: LocalWorker, reference: Reference) -> None:
    worker.reset_stats()
    with WorkerProcess(Role.ndp(worker.settings.ndp, 2), worker.store) as third:

        def join() -> None:
            worker.add_ndp(third.link)
            assert worker.engine.peers["ndp/2"].wait_until_found(20.0)

        reference.check_struck(worker, 2, join)
        _assert_shared(worker, {"ndp/0", "ndp/1", "ndp/2"})
        worker.reset_stats()
        reference.check(worker, 4, 32)
        assert min(_pairs(worker).values()) > 0
        assert worker.health()["ndp/2"] == "connected"
    reference.check(worker, 4, 32)  # it has gone, and the two others serve its share


@slow
def test_a_gpu_is_killed(worker: LocalWorker, reference: Reference) -> None:
    (shard,) = worker.shard_processes
    assert reference.check_struck(worker, 3, lambda: os.kill(shard.pid, signal.SIGKILL)) < LOST_S
    assert worker.stats().shard_losses >= 1  # one more where a full machine silences it
    assert worker.health()["shard/1"] == "lost"
    _rejoined(worker, shard, "shard/1")
    asked = worker.stats().total().shard_tokens
    reference.check(worker, 4, 32)
    assert worker.stats().total().shard_tokens > asked
    assert _decode_bytes(worker)[1] == 0


# -- the matcher ---------------------------------------------------------------------------------------------------


def _fmoe(budget: float, **more: Any) -> EngineSettings:
    return settings(budget, policy=load_policy("fmoe"), kv=KvSettings(page_size=32, num_blocks=32), **more)


@slow
def test_maps_on_two_gpus(store: ExpertStore, reference: Reference) -> None:
    with serving_locally(store, _fmoe(0.25, shards=ShardSettings(count=2))) as worker:
        for _ in range(2):
            reference.check(worker, 4)
        assert all(part["bytes_loaded_prefetch"] > 0 for part in worker.shard_stats())


@slow
def test_the_matcher_is_killed(store: ExpertStore, reference: Reference, tmp_path: Path) -> None:
    """No token changes, no request fails, next-gate steps in; the restarted matcher has what it knew, and leads."""
    kept = MatcherSettings(keep=str(tmp_path / "maps"), snapshot_s=0.02)
    with serving_locally(store, _fmoe(0.5, matcher=kept)) as worker:
        process = worker.matcher_process
        assert process is not None

        def hit_rate() -> float:
            worker.reset_stats()
            reference.check(worker, 1)
            return worker.stats().hit_rate

        def follows_maps() -> bool:
            stats = worker.stats()
            return stats.matcher["source"] == "expert-map" and stats.prefetch_sources["expert-map"].hits > 0

        for number in range(4):
            reference.check(worker, 1, first=number)
        before = hit_rate()
        wait_until(lambda: worker.matcher_stats()["unsaved"] == 0, PATIENCE_S)
        held = worker.matcher_stats()["maps"]

        pid = process.pid
        reference.check_struck(worker, 0, lambda: os.kill(pid, signal.SIGKILL), 24)
        wait_until(lambda: worker.health()["matcher"] == "lost", PATIENCE_S)
        during = hit_rate()
        stats = worker.stats()
        assert stats.matcher["source"] == "next-gate"
        assert stats.matcher["commands"] == 0
        assert set(stats.prefetch_sources) == {"next-gate"}
        assert stats.matcher["fallback_layers"] > 0
        assert during > 0.5  # it still prefetches

        process.restart()
        wait_until(lambda: worker.health()["matcher"] == "connected", PATIENCE_S)
        assert worker.matcher_stats()["maps"] >= held
        wait_until(lambda: hit_rate() > 0.8 * before and follows_maps(), PATIENCE_S)
