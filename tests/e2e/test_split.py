"""Experts cut in two give the very tokens of the unmodified model, wherever they are cut and whenever that changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from serving import greedy, serving, settings

from tiermoe.actors.engine.engine import ExpertEngine
from tiermoe.actors.policies.moepic.split import CacheCut, SplitOptions
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.settings import EngineSettings, KvSettings
from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.config import default_model_dir, load_policy
from tiermoe.cluster.jobs.bench.serving import heldout_prompts

pytestmark = pytest.mark.slow

LENGTHS, TOKENS = (5, 12, 24, 33), 24
KV = KvSettings(page_size=32, num_blocks=64)
LAYERS, NEURONS = 8, 128
MIXED = CacheCut(NEURONS, (128, 96, 64, 0, 13, 51, 127, 1), (4, 6, 10, 0, 32, 8, 3, 1), 6)


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    whole = heldout_prompts(default_model_dir(), len(LENGTHS), max(LENGTHS))
    return [tuple(prompt[:length]) for prompt, length in zip(whole, LENGTHS, strict=True)]


def split(theta: float, prefetch: str = "none", budget: float = 0.25, **options: Any) -> EngineSettings:
    policy = PolicySettings(
        name="test", lossless=True, eviction="lcp", prefetch={"kind": prefetch, "min_useful": 0.0},
        split=SplitOptions(kind="fixed", theta=theta, **options),
    )  # fmt: skip
    return settings(budget, policy=policy, kv=KV)


@pytest.mark.parametrize("prefetch", ["none", "next-gate"])
@pytest.mark.parametrize("theta", [0.0, 0.1, 0.25, 0.4, 0.5, 0.75, 1.0])
def test_same_tokens_at_every_ratio(
    theta: float, prefetch: str, store: ExpertStore, prompts: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    with serving(store, split(theta, prefetch)) as worker:
        assert greedy(worker, prompts, TOKENS) == expected
        assert greedy(worker, prompts[:1], TOKENS) == expected[:1]
        stats, total = worker.stats(), worker.stats().total()
        assert stats.expert_bytes_peak <= stats.expert_budget_bytes
        assert (total.top_hits > 0) == (0 < theta < 1)
        assert total.top_hits <= total.misses
        assert total.prefetched_hits <= total.hits
        assert (total.prefetched_hits > 0) == (prefetch != "none")


@pytest.mark.parametrize("prefetch", ["none", "next-gate"])
def test_one_buffer_slot_and_one_top_of_each_layer(
    prefetch: str, store: ExpertStore, prompts: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    with serving(store, split(0.5, prefetch, budget=5 / 256, buffer=1)) as worker:
        worker.engine.cache.recut(CacheCut(NEURONS, (64,) * LAYERS, (1,) * LAYERS, 1))
        assert greedy(worker, prompts, TOKENS) == expected


class Recuts:
    """Cuts the cache anew before some forwards, on their thread."""

    def __init__(self, engine: ExpertEngine, every: int, cuts: Sequence[CacheCut]) -> None:
        self._engine, self._begin, self._every, self._cuts = engine, engine.begin_forward, every, cuts
        self._forwards = self.done = 0
        engine.begin_forward = self.begin_forward  # type: ignore[method-assign]

    def begin_forward(self, sequences: Any) -> None:
        self._forwards += 1
        if self._forwards % self._every == 0:
            cache = self._engine.cache
            cache.recut(self._cuts[self.done % len(self._cuts)], cache.eviction.ranked(range(256)))
            cache.check_integrity()
            self.done += 1
        self._begin(sequences)


@pytest.mark.parametrize("prefetch", ["none", "next-gate"])
@pytest.mark.parametrize("together", [False, True])
def test_same_tokens_across_live_recuts(
    together: bool, prefetch: str, store: ExpertStore, prompts: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    cuts = [MIXED, *(CacheCut.uniform(LAYERS, 32, NEURONS, 64 * NEURONS, theta, 4) for theta in (0.0, 0.75, 1.0, 0.25))]
    with serving(store, split(0.5, prefetch)) as worker:
        address = worker.engine.cache.pool.gate_up.data_ptr()
        recuts = Recuts(worker.engine, 3, cuts)
        if together:
            assert greedy(worker, prompts, TOKENS) == expected
        else:
            assert [greedy(worker, [prompt], TOKENS)[0] for prompt in prompts] == expected
        assert recuts.done >= len(cuts)
        assert worker.engine.cache.pool.gate_up.data_ptr() == address
        assert worker.stats().total().bytes_loaded_migration > 0
        assert worker.stats().expert_bytes_peak <= worker.stats().expert_budget_bytes


@pytest.mark.parametrize("name", ["cache-only", "prefetch-only"])
def test_presets(name: str, store: ExpertStore, prompts: list[tuple[int, ...]], expected: list[list[int]]) -> None:
    with serving(store, settings(0.25, policy=load_policy(name), kv=KV)) as worker:
        assert greedy(worker, prompts, TOKENS) == expected
        plan = worker.plan()
        assert plan["split"]["top_ratio"] == [1.0 if name == "cache-only" else 0.0] * LAYERS
