"""The cache configurator on a live engine: it cuts the cache anew in mid-generation, and no token changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import greedy, prepared, serving, settings

from tiermoe.actors.engine.split import Configurator
from tiermoe.actors.policies.moepic.configure import Times
from tiermoe.actors.settings import EngineSettings, KvSettings, LinkSettings
from tiermoe.actors.store.artifacts import SENSITIVITY_NAME, encode_sensitivity
from tiermoe.actors.store.files import ExpertStore
from tiermoe.actors.store.format import read_manifest
from tiermoe.cluster.config import default_model_dir, load_policy

PROMPTS, PROMPT_TOKENS, TOKENS = 3, 24, 32
BUDGET, WAIT_S = 0.25, 120
KV = KvSettings(page_size=32, num_blocks=64)
LINK = LinkSettings(gbps=2.0, latency_us=10)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    return prepared(default_model_dir(), tmp_path_factory.mktemp("configuring") / "store")


def preset(name: str, tau: int) -> EngineSettings:
    policy = load_policy(name)
    if policy.split.kind == "adaptive":
        split = policy.split.model_copy(update={"tau": tau, "min_gain": 0.0})
        policy = policy.model_copy(update={"split": split})
    return settings(BUDGET, policy=policy, kv=KV, link=LINK)


@pytest.mark.parametrize("name", ["moepic", "moepic-no-sp", "moepic-no-lcp", "moepic-no-cca"])
def test_presets_keep_every_token(
    name: str, store: ExpertStore, prompts: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    with serving(store, preset(name, tau=40)) as worker:
        assert greedy(worker, prompts, TOKENS) == expected
        stats = worker.stats()
        assert stats.expert_bytes_peak <= stats.expert_budget_bytes
        assert (stats.configurator is None) == (name == "moepic-no-cca")


@pytest.fixture
def slow_link(monkeypatch: pytest.MonkeyPatch) -> list[Times | None]:
    """Whatever this machine is busy with, the configurator is told that loading takes longest; what was measured."""
    measured: list[Times | None] = []
    original = Configurator.times

    def times(self: Configurator) -> Times | None:
        measured.append(original(self))
        return Times(attention_s=1e-3, moe_s=1e-3, head_s=1e-3, load_s=3e-3)

    monkeypatch.setattr(Configurator, "times", times)
    return measured


def test_cuts_anew_in_mid_generation(
    store: ExpertStore, prompts: list[tuple[int, ...]], expected: list[list[int]], slow_link: list[Times | None]
) -> None:
    """Asked in mid-generation, it changes the cut before the next forward; the sequence goes on as if nothing was."""
    with serving(store, preset("moepic", tau=1 << 30)) as worker:
        configuring = worker.engine.configuring
        assert configuring is not None
        before, apply, forwards = worker.engine.cache.cut, configuring.begin_forward, [0]

        def ask_after_twenty() -> None:
            forwards[0] += 1
            if forwards[0] == 20:
                assert configuring.ask().wait(WAIT_S)
            apply()

        configuring.begin_forward = ask_after_twenty  # type: ignore[method-assign]
        assert greedy(worker, prompts[:1], TOKENS) == expected[:1]
        after, found = worker.engine.cache.cut, worker.stats().configurator
        assert found is not None
        assert found.problem is None
        assert (found.configurations, found.reconfigurations) == (1, 1)
        assert found.expected_after_s < found.expected_before_s
        assert found.record_s > 0
        [times] = slow_link
        assert times is not None
        assert min(times.moe_s, times.attention_s) > 0
        assert after is not None
        assert after != before
        assert after.total_neurons <= worker.engine.cache.pool.total_neurons
        assert worker.stats().total().bytes_loaded_migration > 0
        assert greedy(worker, prompts, TOKENS) == expected
        worker.reset_stats()
        again = worker.stats().configurator
        assert again is not None
        assert again.reconfigurations == 0


def test_adapmoe_gives_layers_whole_experts(
    store: ExpertStore, prompts: list[tuple[int, ...]], slow_link: list[Times | None]
) -> None:
    """Lossy, so tokens are not compared: sizes change by dynamic programming, within the same pool."""
    path = Path(store.describe().path)
    (path / SENSITIVITY_NAME).write_bytes(encode_sensitivity((1.0,) * 8, read_manifest(path), 100))
    with serving(store, preset("adapmoe", tau=1 << 30)) as worker:
        configuring, cache = worker.engine.configuring, worker.engine.cache
        assert configuring is not None
        before = cache.cut
        greedy(worker, prompts[:1], TOKENS)
        assert configuring.ask().wait(WAIT_S)
        greedy(worker, prompts[1:2], TOKENS)
        after, found = cache.cut, worker.stats().configurator
        assert found is not None
        assert found.reconfigurations == 1
        assert after is not None
        assert after != before
        assert set(after.tops) == {after.neurons}
        assert after.buffer_slots == 0
        assert after.total_neurons == cache.pool.total_neurons
        assert worker.stats().dropped > 0
