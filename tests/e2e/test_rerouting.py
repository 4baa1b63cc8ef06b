"""Routing rules on the default model: adaptive gating changes nothing at threshold 0, and drops more above."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from serving import default_model_greedy, greedy, prepared, serving, settings

from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.settings import KvSettings
from tiermoe.actors.store.artifacts import SENSITIVITY_NAME, encode_sensitivity
from tiermoe.actors.store.files import ExpertStore
from tiermoe.actors.store.format import read_manifest
from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.jobs.bench.serving import heldout_prompts
from tiermoe.errors import StoreError

PROMPTS, PROMPT_TOKENS, TOKENS = 3, 24, 12
KV = KvSettings(page_size=32, num_blocks=32)


def _policy(threshold: float) -> PolicySettings:
    return PolicySettings(
        name="test", lossless=False, prefetch={"kind": "next-gate"},
        routing={"kind": "adaptive", "threshold": threshold},
    )  # fmt: skip


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    return prepared(default_model_dir(), tmp_path_factory.mktemp("rerouting") / "store")


@pytest.fixture(scope="module")
def store(bare: ExpertStore) -> ExpertStore:
    path = Path(bare.describe().path)
    with pytest.raises(StoreError, match="--sensitivity TEXT"):
        GpuWorker(settings(0.25, kv=KV, policy=_policy(0.1)), bare.describe()).start()
    (path / SENSITIVITY_NAME).write_bytes(encode_sensitivity((1.0,) * 8, read_manifest(path), 100))
    return bare


def test_adaptive_gating(store: ExpertStore) -> None:
    prompts = heldout_prompts(default_model_dir(), PROMPTS, PROMPT_TOKENS)
    expected = default_model_greedy(prompts, TOKENS)
    dropped, computed = [], []
    for threshold in (0.0, 0.01, 0.05, 100.0):
        with serving(store, settings(0.25, kv=KV, policy=_policy(threshold))) as worker:
            seen: list[np.ndarray] = []
            worker.engine.layers[1].observers.append(lambda layer, ids, weights, seen=seen: seen.append(ids.copy()))
            tokens = greedy(worker, prompts[:1], TOKENS)
            stats = worker.stats()
            total = stats.total()
            dropped.append(stats.dropped / sum(len(ids) for ids in seen))
            computed.append(total.hits + total.misses)
            assert stats.substitutions == 0
            assert all(ids.shape[1] == 4 and len(set(row)) == 4 for ids in seen for row in ids.tolist())  # the model's
            if threshold == 0:
                assert tokens == expected[:1]
                assert greedy(worker, prompts, TOKENS) == expected
                worker.reset_stats()
                assert worker.stats().dropped == 0
            if threshold == 100:  # one expert per token and layer
                decodes = [len(ids) for ids in seen].count(1)
                assert total.hits + total.misses >= 8 * decodes
                assert dropped[-1] == 8 * 3
    assert dropped[0] == 0
    assert dropped == sorted(dropped)
    assert 0 < dropped[1] < dropped[2] < dropped[3]
    assert computed[0] > computed[3]
