"""Every preset that prefetches gives the very tokens of the unmodified model, with and without its matcher."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from serving import greedy, settings, struck_greedy

from tiermoe.actors.settings import EngineSettings, KvSettings, MatcherOptions, ShardSettings
from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.config import load_policy, policy_names
from tiermoe.cluster.local import LocalWorker
from tiermoe.errors import TraceError

pytestmark = pytest.mark.slow

PROMPTS, PROMPT_TOKENS, TOKENS = 4, 40, 24
KV = KvSettings(page_size=32, num_blocks=32)
MAPS = ("fmoe", "fmoe-blend", "fmoe-t", "fmoe-ts")
OTHERS = (
    "deepspeed-inference", "mixtral-offloading", "mixtral-offloading-swap", "moe-infinity", "moe-offloading",
)  # fmt: skip
_PATIENCE_S = 30.0


def _settings(preset: str, budget: float = 0.25, **more: Any) -> EngineSettings:
    made = settings(budget, "none", kv=KV, **more)
    return made.model_copy(update={"policy": load_policy(preset), "integrity_checks": True})


@contextmanager
def _serving(store: ExpertStore, config: EngineSettings) -> Iterator[LocalWorker]:
    worker = LocalWorker(config, Path(store.describe().path))
    try:
        worker.start()
        yield worker
    finally:
        worker.close()


def test_all_presets_that_prefetch_are_tried() -> None:
    kinds = {name: load_policy(name).prefetch.kind for name in policy_names()}
    prefetching = {name for name, kind in kinds.items() if kind != "none"}
    elsewhere = {
        "test_split.py": {"prefetch-only"},
        "test_speculative.py": {"pre-gated"},
        "test_configuring.py": {"moepic", "moepic-no-sp", "moepic-no-lcp", "moepic-no-cca", "adapmoe"},
        "test_active_evict.py": {"moe-offloading", "mixtral-offloading-swap"},
        "test_low_bit.py": {"hobbit", "moe-apex"},
        "test_on_miss.py": {"buddymoe", "buddymoe-rho4", "buddymoe-cft75", "random-replacement", "drop", "original"},
        "test_bench_buddymoe.py": {"buddymoe-own-weight"},
    }
    assert all(Path(__file__).with_name(file).exists() for file in elsewhere)
    assert prefetching == {*MAPS, *OTHERS, "next-gate", "promoe"}.union(*elsewhere.values())


@pytest.mark.parametrize("budget", [0.25, 0.03])
@pytest.mark.parametrize("preset", [*MAPS, *OTHERS])
def test_same_tokens(
    preset: str, budget: float, store: ExpertStore, prompts: list[Any], expected: list[list[int]]
) -> None:
    with _serving(store, _settings(preset, budget)) as worker:
        assert greedy(worker, prompts, TOKENS) == expected  # together
        assert greedy(worker, prompts[:1], TOKENS) == expected[:1]
        stats = worker.stats()
        assert 0 < stats.expert_bytes_peak <= stats.expert_budget_bytes
        if preset in MAPS:
            assert stats.matcher is not None
            assert stats.matcher["published"] > 0
            assert "expert-map" in stats.prefetch_sources or budget < 0.25  # no slot may be left for a guess
        else:
            assert stats.matcher is None


def test_predictors_are_asked_for(store: ExpertStore) -> None:
    with pytest.raises(TraceError, match=r"predictors-3\.safetensors") as raised, _serving(store, _settings("promoe")):
        pass
    assert "tiermoe prepare MODEL --predictors TRACE --stride 3" in str(raised.value)


def test_same_tokens_on_two_gpus(store: ExpertStore, prompts: list[Any], expected: list[list[int]]) -> None:
    with _serving(store, _settings("fmoe", shards=ShardSettings(count=2))) as worker:
        for _ in range(2):
            assert greedy(worker, prompts, TOKENS) == expected
        assert all(part["bytes_loaded_prefetch"] > 0 for part in worker.shard_stats())


def test_the_matcher_is_killed(
    store: ExpertStore, prompts: list[Any], expected: list[list[int]], tmp_path: Path
) -> None:
    """No token changes, no request fails, next-gate steps in; the restarted matcher has what it knew, and leads."""
    kept = MatcherOptions(keep=str(tmp_path / "maps"), snapshot_s=0.02)
    with _serving(store, _settings("fmoe", 0.5, matcher=kept)) as worker:
        process = worker.matcher_process
        assert process is not None
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert greedy(worker, [prompt], TOKENS) == [tokens]
        before = _hit_rate(worker, prompts[0], expected[0])
        _until(lambda: worker.matcher_stats()["unsaved"] == 0)
        held = worker.matcher_stats()["maps"]

        pid = process.pid
        tokens, _ = struck_greedy(worker, prompts[0], TOKENS, lambda: os.kill(pid, signal.SIGKILL))
        assert tokens == expected[0]
        _until(lambda: worker.health()["matcher"] == "lost")
        during = _hit_rate(worker, prompts[0], expected[0])
        stats = worker.stats()
        assert stats.matcher["source"] == "next-gate"
        assert stats.matcher["commands"] == 0
        assert set(stats.prefetch_sources) == {"next-gate"}
        assert stats.matcher["fallback_layers"] > 0
        assert during > 0.5  # it still prefetches

        process.restart()
        _until(lambda: worker.health()["matcher"] == "connected")
        assert worker.matcher_stats()["maps"] >= held
        _until(lambda: _hit_rate(worker, prompts[0], expected[0]) > 0.8 * before and _follows_maps(worker))


def _follows_maps(worker: LocalWorker) -> bool:
    stats = worker.stats()
    return stats.matcher["source"] == "expert-map" and stats.prefetch_sources["expert-map"].hits > 0


def _hit_rate(worker: LocalWorker, prompt: Any, expected: list[int]) -> float:
    worker.reset_stats()
    assert greedy(worker, [prompt], TOKENS) == [expected]
    return worker.stats().hit_rate


def _until(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + _PATIENCE_S
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.01)
