"""A link whose clock layers move: the same run twice is the same to the last counter, and loses nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from serving import greedy, serving, settings

from tiermoe.actors.engine.serving.scoring import score_with
from tiermoe.actors.settings import LinkSettings, ShardSettings, check_combination
from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.config import load_policy
from tiermoe.errors import ConfigError

PROMPTS, PROMPT_TOKENS, TOKENS = 2, 16, 8
LINK = LinkSettings(gbps=0.7, latency_us=10.0, layer_us=900.0)


def test_tokens_are_those_of_the_model(
    store: ExpertStore, prompts: list[tuple[int, ...]], expected: list[list[int]]
) -> None:
    with serving(store, settings(0.25, "next-gate", link=LINK)) as worker:
        assert greedy(worker, prompts, TOKENS) == expected
        total = worker.stats().total()
        assert total.late_prefetches > 0
        assert total.blocked_io_s > 0


def _scored(store: ExpertStore, ids: Sequence[int], link: LinkSettings) -> tuple[list[float], dict[str, float]]:
    config = settings(0.375, link=link, policy=load_policy("random-replacement"))
    with serving(store, config) as worker:
        log_probs = score_with(worker, ids, 4, rows=1)
        total = worker.stats().total()
        counts = {name: getattr(total, name) for name in ("hits", "misses", "late_prefetches", "bytes_loaded_prefetch")}
        return log_probs.max(-1).values.tolist(), counts | {"s": worker.stats().substitutions}


def test_a_lossy_policy_does_the_same_every_time(store: ExpertStore, prompts: list[tuple[int, ...]]) -> None:
    first = _scored(store, prompts[0], LINK)
    assert first[1]["s"] > 0
    assert _scored(store, prompts[0], LINK) == first
    assert _scored(store, prompts[0], LINK.model_copy(update={"gbps": 7.0})) != first


def test_other_processes_do_not_see_the_clock() -> None:
    config = settings(0.25, link=LINK, shards=ShardSettings(count=2))
    with pytest.raises(ConfigError, match="layer_us"):
        check_combination(config)


def test_it_is_a_throttled_link() -> None:
    with pytest.raises(ValueError, match="gbps"):
        LinkSettings(layer_us=5.0)
