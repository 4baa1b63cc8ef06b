"""Experts that are not at hand on the default model: replaced, left out or loaded, and what that costs the link."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import add_random_profile, default_model_greedy, greedy, prepared, serving, serving_group, settings

from tiermoe.actors.engine.stats import EngineStats
from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.settings import KvSettings, ShardSettings
from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.config import default_model_dir, load_policy
from tiermoe.cluster.jobs.bench.serving import heldout_prompts
from tiermoe.errors import StoreError

pytestmark = pytest.mark.slow

PROMPTS, PROMPT_TOKENS, TOKENS = 1, 24, 12
KV = KvSettings(page_size=32, num_blocks=32)
BUDGET = 0.5


def _policy(on_miss: str, prefetch: str = "none", **options: object) -> PolicySettings:
    return PolicySettings(
        name="test", lossless=False, prefetch={"kind": prefetch}, on_miss=on_miss,  # type: ignore[arg-type]
        substitution=dict(**options),  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    bare = prepared(default_model_dir(), tmp_path_factory.mktemp("on-miss") / "store")
    with pytest.raises(StoreError, match="--profile TEXT"):
        GpuWorker(settings(BUDGET, kv=KV, policy=load_policy("buddymoe")), bare.describe()).start()
    add_random_profile(Path(bare.describe().path), 4)
    return bare


def _run(store: ExpertStore, policy: PolicySettings) -> tuple[list[list[int]], EngineStats]:
    """The tokens of a prompt once the cache is full, and the counters of that run."""
    prompts = heldout_prompts(default_model_dir(), PROMPTS + 1, PROMPT_TOKENS)
    with serving(store, settings(BUDGET, kv=KV, policy=policy)) as worker:
        greedy(worker, prompts[1:], 4)
        worker.reset_stats()
        return greedy(worker, prompts[:1], TOKENS), worker.stats()


def test_what_becomes_of_misses(store: ExpertStore) -> None:
    expected = default_model_greedy(heldout_prompts(default_model_dir(), PROMPTS, PROMPT_TOKENS), TOKENS)
    tokens, loading = _run(store, _policy("load"))
    assert tokens == expected
    assert (loading.substitutions, loading.dropped) == (0, 0)

    substituted, demanded = [], []
    for rho in (1, 4):
        _, stats = _run(store, _policy("substitute", rho=rho))
        substituted.append(stats.substitutions)
        demanded.append(stats.total().bytes_loaded_demand)
        assert stats.dropped == 0
    assert 0 < substituted[0] < substituted[1]
    assert loading.total().bytes_loaded_demand > demanded[0] > demanded[1]

    tokens, stats = _run(store, _policy("substitute", beta=0.0))
    assert tokens == expected  # every batch with a miss is bypassed
    assert (stats.substitutions, stats.dropped) == (0, 0)
    tokens, stats = _run(store, _policy("substitute", tau=1.0))
    assert tokens == expected  # no entropy is above 1
    assert stats.substitutions == 0

    for on_miss in ("random", "drop"):
        _, stats = _run(store, _policy(on_miss))
        assert (stats.substitutions > 0, stats.dropped > 0) == (on_miss == "random", on_miss == "drop")
        assert stats.total().bytes_loaded_demand < demanded[0]


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "buddy", "eta": 0.5, "fallback": "drop", "alpha": 0.1, "max_buddies": 1},
        {"percentile": 15.0, "temperature": 1.1, "gamma": 0.9, "reuse": 0.5, "weighted": True},
        {"link_ms": 0.1, "alpha": 0.5, "alpha_last": 0.9},
    ],
    ids=str,
)
def test_options_run(store: ExpertStore, options: dict[str, object]) -> None:
    """Each combination serves, replaces something, and loads no more than loading everything does."""
    _, loading = _run(store, _policy("load", "next-gate"))
    tokens, stats = _run(store, _policy("substitute", "next-gate", **options))
    assert len(tokens[0]) == TOKENS
    assert stats.substitutions > 0
    assert stats.total().bytes_loaded_demand < loading.total().bytes_loaded_demand


def test_preset(store: ExpertStore) -> None:
    _, stats = _run(store, load_policy("buddymoe"))
    assert stats.substitutions > 0


def test_preset_on_two_gpus(store: ExpertStore) -> None:
    """Each holds half of what it owns; buddies load fewer bytes on both, with integrity checks all along."""
    prompts = heldout_prompts(default_model_dir(), PROMPTS + 1, PROMPT_TOKENS)
    demanded = {}
    for name in ("original", "buddymoe"):
        config = settings(BUDGET / 2, kv=KV, policy=load_policy(name), shards=ShardSettings(count=2))
        with serving_group(store, config) as group:
            greedy(group.lead, prompts[1:], 4)
            before = [part["bytes_loaded_demand"] for part in group.lead.shard_stats()]
            greedy(group.lead, prompts[:1], TOKENS)
            after = [part["bytes_loaded_demand"] for part in group.lead.shard_stats()]
            demanded[name] = [b - a for a, b in zip(before, after, strict=True)]
            assert (group.lead.stats().substitutions > 0) == (name == "buddymoe")
            assert group.lead.stats().shard_losses == 0
    assert all(few < many for few, many in zip(demanded["buddymoe"], demanded["original"], strict=True))
