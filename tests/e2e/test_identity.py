"""The default model gives the very tokens of the unmodified model, whatever the cache does."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import Phase, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from serving import greedy, serving, settings

from tiermoe.actors.settings import KvSettings, LinkSettings
from tiermoe.actors.store.files import ExpertStore

PROMPTS, PROMPT_TOKENS, TOKENS = 20, 48, 64
KV = KvSettings(page_size=32, num_blocks=128)


@pytest.mark.parametrize("prefetch", ["none", "next-gate"])
@pytest.mark.parametrize("budget", [1.0, 0.25, 0.05])
def test_same_tokens_at_every_budget(
    budget: float, prefetch: str, store: ExpertStore, prompts: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    with serving(store, settings(budget, prefetch, kv=KV)) as worker:
        assert greedy(worker, prompts, TOKENS) == expected
        _check_budget(worker)


def test_same_tokens_one_at_a_time(
    store: ExpertStore, prompts: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    with serving(store, settings(0.25, "next-gate", kv=KV)) as worker:
        for prompt, tokens in zip(prompts[:6], expected[:6], strict=True):
            assert greedy(worker, [prompt], TOKENS) == [tokens]
        assert worker.stats().total().prefetched_hits > 0
        _check_budget(worker)


@pytest.mark.parametrize("prefetch", ["none", "next-gate"])
def test_same_tokens_under_a_throttled_link(
    prefetch: str, store: ExpertStore, prompts: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    link = LinkSettings(gbps=2.0, latency_us=10.0)
    with serving(store, settings(0.25, prefetch, kv=KV, link=link)) as worker:
        assert greedy(worker, prompts, TOKENS) == expected
        assert worker.stats().total().blocked_io_s > 0
        _check_budget(worker)


def press(worker: Any, seed: int, share: float) -> None:
    """Before every pass of a layer, evict a random share of the pool and prefetch random experts."""
    rng, cache = random.Random(seed), worker.engine.cache
    residency = cache.residency

    def pressed(index: int, forward: Any) -> Any:
        def run(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            cache.poll()
            for key in [k for k in residency.held() if rng.random() < share]:
                cache.loads.evict(key, index)
            cache.prefetch(rng.sample(range(residency.keys), 4))
            return forward(hidden, ids, weights)

        return run

    for layer in worker.engine.layers:
        layer.forward = pressed(layer.index, layer.forward)


# a failing example is shown as it is: shrinking one would serve the model a hundred times
@examples(max_examples=6, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(seed=st.integers(0, 2**32), budget=st.sampled_from([0.02, 0.05, 0.25, 0.6]), share=st.floats(0.0, 0.9))
def test_same_tokens_under_random_eviction(
    seed: int,
    budget: float,
    share: float,
    store: ExpertStore,
    prompts: list[tuple[int, ...]],
    expected: list[list[int]],
) -> None:
    with serving(store, settings(budget, "next-gate", kv=KV)) as worker:
        press(worker, seed, share)
        found = greedy(worker, prompts[:4], 24)
        assert found == [tokens[: len(f)] for tokens, f in zip(expected[:4], found, strict=True)]
        assert all(len(f) == min(24, len(e)) for f, e in zip(found, expected[:4], strict=True))
        _check_budget(worker)


def _check_budget(worker: Any) -> None:
    stats = worker.stats()
    assert 0 < stats.expert_bytes_peak <= stats.expert_budget_bytes
    assert worker.engine.cache.residency.bytes_held <= stats.expert_budget_bytes
