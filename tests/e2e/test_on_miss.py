"""Experts that are not at hand on the default model: replaced, left out or loaded, and what that costs the link."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from serving import default_model_greedy, greedy, prepared, serving, settings

from tiermoe.actors.engine.stats import EngineStats
from tiermoe.actors.expert_store import ExpertStore
from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.policies.entropy import BINS, TEMPERATURES
from tiermoe.actors.policies.expert_profile import ExpertProfile
from tiermoe.actors.policy_settings import PolicySettings, PrefetchSettings, SubstitutionSettings
from tiermoe.actors.profile_file import (
    PROFILE_NAME,
    ProfileManifest,
    ProfileSource,
    encode_arrays,
    encode_profile,
)
from tiermoe.actors.settings import KvSettings
from tiermoe.actors.store_format import model_fingerprint, read_manifest
from tiermoe.cluster.config import default_model_dir, load_policy
from tiermoe.cluster.jobs.bench.serving import heldout_prompts
from tiermoe.errors import StoreError

pytestmark = pytest.mark.slow

PROMPTS, PROMPT_TOKENS, TOKENS = 1, 24, 12
KV = KvSettings(page_size=32, num_blocks=32)
BUDGET = 0.5


def _policy(on_miss: str, prefetch: str = "none", **options: object) -> PolicySettings:
    return PolicySettings(
        name="test", lossless=False, prefetch=PrefetchSettings(kind=prefetch), on_miss=on_miss,  # type: ignore[arg-type]
        substitution=SubstitutionSettings(**options),  # type: ignore[arg-type]
    )  # fmt: skip


def _add_profile(folder: Path) -> None:
    """Counts at random: what the buddies are worth is not tested here."""
    manifest = read_manifest(folder)
    layers, experts = len(manifest.layers), manifest.experts.num_experts
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 100, (layers, experts, experts)).astype(np.float64)
    counts = (counts + counts.transpose(0, 2, 1)) * ~np.eye(experts, dtype=bool)
    entropies = np.ones((layers, len(TEMPERATURES), BINS))
    data, record = encode_arrays(ExpertProfile(counts.sum(axis=2), counts, counts, entropies, None))
    source = ProfileSource(
        kind="trace", sha256="0" * 64, tokens=100, output_tokens=0, warmup_steps=0, warmup_weight=0.0
    )
    (folder / record.file).write_bytes(data)
    profile = ProfileManifest(
        profile_version=1, fingerprint=model_fingerprint(manifest), layers=layers, experts=experts, top_k=4,
        source=source, arrays=record,
    )  # fmt: skip
    (folder / PROFILE_NAME).write_bytes(encode_profile(profile))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    bare = prepared(default_model_dir(), tmp_path_factory.mktemp("on-miss") / "store")
    with pytest.raises(StoreError, match="--profile TEXT"):
        GpuWorker(settings(BUDGET, kv=KV, policy=load_policy("buddymoe")), bare.describe()).start()
    _add_profile(Path(bare.describe().path))
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
