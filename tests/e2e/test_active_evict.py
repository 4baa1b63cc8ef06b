"""ActiveEvict on the default model: pre-eviction changes no token, dynamic top-k drops experts, swaps cost the link."""

from __future__ import annotations

from typing import Any

import pytest
from serving import greedy, serving, settings

from tiermoe.actors.settings import EngineSettings, KvSettings, LinkSettings
from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.config import load_policy

pytestmark = pytest.mark.slow

PROMPTS, PROMPT_TOKENS, TOKENS = 4, 40, 24
KV = KvSettings(page_size=32, num_blocks=32)
LOSSLESS = [
    ("activeevict-lossless", 0.5),
    ("activeevict-lossless", 0.03),
    ("activeevict-prediction-only", 0.25),
    ("activeevict-hotness-only", 0.25),
    ("activeevict-lru", 0.25),
]


def _settings(preset: str, budget: float, **more: Any) -> EngineSettings:
    return settings(budget, kv=KV, policy=load_policy(preset), **more)


@pytest.mark.parametrize(("preset", "budget"), LOSSLESS)
def test_same_tokens(preset: str, budget: float, store: ExpertStore, prompts: list[Any], expected: Any) -> None:
    with serving(store, _settings(preset, budget)) as worker:
        assert greedy(worker, prompts, TOKENS) == expected  # together
        assert greedy(worker, prompts[:1], TOKENS) == expected[:1]
        stats, total = worker.stats(), worker.stats().total()
        assert 0 < stats.expert_bytes_peak <= stats.expert_budget_bytes
        assert total.vacated > 0
        assert total.bytes_loaded == total.bytes_loaded_demand  # nothing is fetched that no router has chosen
        assert total.bytes_wasted == total.bytes_written_back == stats.dropped == 0


def test_dynamic_top_k_drops_experts_only_where_slots_lack(
    store: ExpertStore, prompts: list[Any], expected: Any
) -> None:
    with serving(store, _settings("activeevict", 1.0)) as worker:
        assert greedy(worker, prompts[:2], TOKENS) == expected[:2]
        assert worker.stats().dropped == 0
    with serving(store, _settings("activeevict", 0.25)) as worker:
        found = greedy(worker, prompts[:2], TOKENS)
        stats = worker.stats()
        assert all(found)
        assert stats.dropped > 0
        assert stats.substitutions == 0


def test_swapping_presets_write_back_and_change_no_token(
    store: ExpertStore, prompts: list[Any], expected: Any
) -> None:
    link = LinkSettings(gbps=8.0)
    with serving(store, _settings("moe-offloading", 0.25, link=link)) as worker:
        assert greedy(worker, prompts[:2], TOKENS) == expected[:2]
        total = worker.stats().total()
        assert 0 < total.bytes_written_back <= total.bytes_loaded
        carried = (total.bytes_written_back + total.bytes_loaded) / 8e9
        assert total.link_s == pytest.approx(carried, rel=0.05)
