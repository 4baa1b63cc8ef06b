"""A store whose neurons are ordered gives the very tokens of the unmodified model, with experts whole or cut in two."""

from __future__ import annotations

import pytest
from rich.console import Console
from serving import default_model_greedy, greedy, serving, settings

from tiermoe.actors.policies.moepic.split import SplitOptions
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.settings import KvSettings
from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.jobs.bench.serving import heldout_prompts
from tiermoe.cluster.jobs.prepare import prepare
from tiermoe.cluster.jobs.prepare.calibration import read_texts, shipped_calibration
from tiermoe.cluster.jobs.prepare.neuron_order import order_neurons

TOKENS = 24
KV = KvSettings(page_size=32, num_blocks=64)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    folder, model = tmp_path_factory.mktemp("ordered"), default_model_dir()
    shipped = shipped_calibration(model)
    assert shipped is not None
    text = folder / "text.txt"
    text.write_text("".join(read_texts(shipped))[:6000])  # some of it: seconds
    out = prepare(model, folder / "store", progress=False)
    return ExpertStore(order_neurons(out, model, text, Console(quiet=True)))


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    return [tuple(prompt) for prompt in heldout_prompts(default_model_dir(), 4, 24)]


@pytest.fixture(scope="module")
def expected(prompts: list[tuple[int, ...]]) -> list[list[int]]:
    return default_model_greedy(prompts, TOKENS)


@pytest.mark.parametrize("theta", [None, 0.25])
def test_same_tokens(
    theta: float | None, store: ExpertStore, prompts: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    assert store.manifest.neuron_order is not None
    split = SplitOptions() if theta is None else SplitOptions(kind="fixed", theta=theta)
    prefetch = {"kind": "next-gate", "min_useful": 0.0}
    policy = PolicySettings(name="test", lossless=True, eviction="lcp", prefetch=prefetch, split=split)
    with serving(store, settings(0.25, policy=policy, kv=KV)) as worker:
        assert greedy(worker, prompts, TOKENS) == expected
        assert (worker.stats().total().top_hits > 0) == (theta is not None)
