"""The default model's store, held-out prompts and the tokens that the unmodified model gives for them.

A module says with PROMPTS, PROMPT_TOKENS and TOKENS how many prompts it takes, how long, and how many tokens follow.
One that adds to the store, or takes other prompts, has a fixture of its own.
"""

from __future__ import annotations

import pytest
from serving import default_model_greedy, prepared

from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.jobs.bench.serving import heldout_prompts


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    return prepared(default_model_dir(), tmp_path_factory.mktemp("default") / "store")


@pytest.fixture(scope="module")
def prompts(request: pytest.FixtureRequest) -> list[tuple[int, ...]]:
    return heldout_prompts(default_model_dir(), request.module.PROMPTS, request.module.PROMPT_TOKENS)


@pytest.fixture(scope="module")
def expected(request: pytest.FixtureRequest, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    return default_model_greedy(prompts, request.module.TOKENS)
