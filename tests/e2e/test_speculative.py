"""Prefetch by score, at random and by trained gates on the default model: the model's own tokens, split or not."""

from __future__ import annotations

from typing import Any

import pytest
from serving import greedy, policy, prepared, serving, settings

from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.policies.moepic.split import SplitOptions
from tiermoe.actors.policies.residency import State
from tiermoe.actors.settings import EngineSettings, KvSettings, LinkSettings
from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.config import default_model_dir, load_policy
from tiermoe.cluster.jobs.prepare.measures import add_gates
from tiermoe.errors import StoreError

pytestmark = pytest.mark.slow

PROMPTS, PROMPT_TOKENS, TOKENS = 3, 24, 12
KV = KvSettings(page_size=32, num_blocks=32)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    """With gates that were trained on a little text."""
    folder = tmp_path_factory.mktemp("speculative")
    opened = prepared(default_model_dir(), folder / "store")
    with pytest.raises(StoreError, match="--gates TEXT"):
        GpuWorker(_preset("pre-gated"), opened.describe()).start()
    lines = (default_model_dir() / "calibration" / "prose.jsonl").read_text(encoding="utf-8").splitlines()
    (folder / "text.jsonl").write_text("\n".join(lines[:4]), encoding="utf-8")
    add_gates(folder / "store", default_model_dir(), folder / "text.jsonl")
    assert not [path for path in folder.iterdir() if path.name.startswith(".store.")]
    return opened


def _preset(name: str, budget: float = 0.25) -> EngineSettings:
    return settings(budget, kv=KV).model_copy(update={"policy": load_policy(name)})


def _kind(kind: str, split: SplitOptions, **prefetch: Any) -> EngineSettings:
    if kind != "none":
        prefetch["min_useful"] = 0.0  # bad guesses do not rest
    made = policy(kind, **prefetch).model_copy(update={"split": split})
    return settings(0.25, kv=KV, policy=made, link=LinkSettings(gbps=4.0))


SPLIT = SplitOptions(kind="fixed", theta=0.5)
TRIED = [
    _preset("pre-gated"), _preset("prefetch-only"), _kind("speculative", SplitOptions()), _kind("speculative", SPLIT),
    _kind("speculative", SPLIT, top=9), _kind("random", SplitOptions()), _kind("random", SPLIT),
    _kind("pre-gated", SPLIT),
]  # fmt: skip


def _name(config: EngineSettings) -> str:
    return f"{config.policy.name}-{config.policy.prefetch.kind}-{config.policy.split.kind}"


@pytest.mark.parametrize("config", TRIED, ids=_name)
def test_same_tokens(
    config: EngineSettings, store: ExpertStore, prompts: list[Any], expected: list[list[int]]
) -> None:
    with serving(store, config) as worker:
        assert greedy(worker, prompts[:1], TOKENS) == expected[:1]
        stats = worker.stats()
        source = stats.prefetch_sources[config.policy.prefetch.kind]
        assert source.queued > 0
        first = stats.layers[0].bytes_loaded_prefetch + stats.layers[0].late_prefetches
        if config.policy.prefetch.kind == "speculative":
            assert first > 0  # foreseen at the last layer
            assert source.hits + source.late > 0
        elif config.policy.prefetch.kind == "pre-gated":
            assert first == 0
        assert greedy(worker, prompts, TOKENS) == expected  # together
        assert 0 < stats.expert_bytes_peak <= stats.expert_budget_bytes


def test_speculation_finds_more_than_chance(store: ExpertStore, prompts: list[Any], expected: list[list[int]]) -> None:
    useful = {}
    for kind in ("speculative", "pre-gated", "random"):
        with serving(store, _kind(kind, SplitOptions())) as worker:
            assert greedy(worker, prompts[:1], TOKENS) == expected[:1]
            source = worker.stats().prefetch_sources[kind]
            useful[kind] = (source.hits + source.late) / source.queued
    assert useful["speculative"] > useful["random"]
    assert useful["pre-gated"] > useful["random"]


@pytest.mark.parametrize("theta", [None, 0.0, 0.5])
def test_what_a_routing_rule_is_told_of_the_cache(
    theta: float | None, store: ExpertStore, prompts: list[Any], expected: list[list[int]]
) -> None:
    split = SplitOptions() if theta is None else SplitOptions(kind="fixed", theta=theta)
    with serving(store, _kind("none", split)) as worker:
        assert greedy(worker, prompts[:1], TOKENS) == expected[:1]
        cache, shown = worker.engine.cache, worker.engine.residency()
        there = 0
        for layer, residency in enumerate(shown):
            available, slots = cache.standing(layer)
            assert available.tolist() == [state != State.ABSENT for state in residency.states]
            there += residency.states.count(State.RESIDENT)
            if theta is None:
                assert slots == cache.residency.slots
            else:
                assert slots == (cache.cut.slots[layer] if theta else cache.cut.buffer_slots)
        assert there > 0
