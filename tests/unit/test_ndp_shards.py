"""Placements with NDP workers on several GPUs: each GPU holds its part of the hot set, and decode loads nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeLink
from serving import Group, Tiny, greedy, serving_group, settings, struck_greedy

from tiermoe.actors.engine.peers.shards import owners
from tiermoe.actors.policies.context_ndp import PlacementOptions
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.settings import EngineSettings, NdpSettings, ShardSettings
from tiermoe.actors.shard_worker import ShardWorker
from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.config import load_hardware
from tiermoe.errors import BudgetError, StoreError
from tiermoe.proto.messages import ExpertBatch, PlacementCommand
from tiermoe.proto.peers import LocalDirectory

_NDP = NdpSettings(hardware=vars(load_hardware("paper-ndp")), deadline_s=5.0)


_PROMPTS, _TOKENS = Tiny.PROMPTS, Tiny.TOKENS
_EXPERTS = 8


@pytest.fixture(scope="module")
def olmoe(tiny: Callable[[str], Tiny]) -> Tiny:
    return tiny("olmoe")


@pytest.fixture(scope="module")
def shared_store(olmoe: Tiny) -> ExpertStore:
    return olmoe.store


@pytest.fixture(scope="module")
def expected_tokens(olmoe: Tiny) -> list[list[int]]:
    return olmoe.expected


@pytest.fixture
def links(shared_store: ExpertStore) -> list[FakeLink]:
    return [FakeLink(shared_store.describe(), index) for index in (0, 1)]


def _settings(kind: str, count: int, **placement: Any) -> EngineSettings:
    policy = PolicySettings(name="test", lossless=True, placement=PlacementOptions(kind=kind, **placement))  # type: ignore[arg-type]
    return settings(0.25, policy=policy, ndp=_NDP, shards=ShardSettings(count=count))


def _caches(group: Group) -> list[Any]:
    return [group.lead.engine.cache, *(shard.engine.cache for shard in group.shards)]


def _held(group: Group) -> list[set[int]]:
    return [set(cache.residency.held()) for cache in _caches(group)]


@pytest.mark.parametrize("count", [2, 3])
def test_decode_loads_nothing_on_any_gpu(
    shared_store: ExpertStore, links: list[FakeLink], expected_tokens: list[list[int]], count: int
) -> None:
    config = _settings("context", count)
    with serving_group(shared_store, config, links) as group:
        assert greedy(group.lead, _PROMPTS, _TOKENS) == expected_tokens
        assert [greedy(group.lead, [prompt], _TOKENS)[0] for prompt in _PROMPTS] == expected_tokens
        owner, hot = owners(2, _EXPERTS, config.shards), group.lead.engine._placer._hot_keys
        stats = group.lead.stats()
        assert stats.total().ndp_tokens > 0
        assert stats.total().shard_tokens > 0
        assert stats.migrations == 4
        for gpu, (cache, held) in enumerate(zip(_caches(group), _held(group), strict=True)):
            total = cache.live_stats().total()
            assert held == {key for key in hot if owner[key] == gpu}
            assert 0 < len(held) <= cache.residency.slots
            assert total.bytes_demanded_decode == 0
            assert total.bytes_loaded_migration > 0
            assert total.bytes_loaded_prefetch == 0
            assert total.hits > 0
        for number, link in enumerate(links):
            assert {(batch.layer * _EXPERTS + int(e)) % 2 for batch in link.batches for e in batch.experts} == {number}


@pytest.mark.usefixtures("replica_tables")
def test_hot_experts_are_preloaded_where_they_belong(
    shared_store: ExpertStore, links: list[FakeLink], expected_tokens: list[list[int]]
) -> None:
    with serving_group(shared_store, _settings("static", 2), links) as group:
        assert group.lead.engine.hot_per_layer == 4
        assert _held(group) == [{0, 2, 8, 10}, {1, 3, 9, 11}]
        assert greedy(group.lead, _PROMPTS, _TOKENS) == expected_tokens
        slot = group.lead.engine.slot_bytes
        for cache in _caches(group):
            assert (cache.live_stats().total().bytes_loaded, cache.live_stats().bytes_preloaded) == (0, 4 * slot)
            assert cache.live_stats().total().hits > 0
        assert all(int(e) >= 4 for link in links for batch in link.batches for e in batch.experts)
        assert len(links[0].batches) > 0


@pytest.mark.usefixtures("replica_tables")
@pytest.mark.parametrize("kind", ["context", "static"])
def test_a_lost_gpu_gets_its_part_back(
    kind: str, shared_store: ExpertStore, links: list[FakeLink], expected_tokens: list[list[int]]
) -> None:
    with serving_group(shared_store, _settings(kind, 2), links) as group:
        (peer,) = group.lead.engine.shards.peers.values()
        tokens, _ = struck_greedy(group.lead, _PROMPTS[0], _TOKENS, group.shards[0].close)
        assert tokens == expected_tokens[0]
        assert group.lead.stats().shard_losses == 1
        assert group.lead.health()["shard/1"] == "lost"
        before = group.lead.engine.cache.live_stats().total().bytes_demanded_decode
        assert greedy(group.lead, _PROMPTS[1:], _TOKENS) == expected_tokens[1:]  # near data
        assert group.lead.engine.cache.live_stats().total().bytes_demanded_decode == before
        group.shards[0] = group.start_shard(1)
        try:
            assert peer.wait_until_found(10.0)
            assert greedy(group.lead, _PROMPTS, _TOKENS) == expected_tokens
            hot = group.lead.engine._placer._hot_keys
            assert _held(group) == [{k for k in hot if k % 2 == 0}, {k for k in hot if k % 2}]
            total = group.shards[0].engine.stats().total()
            assert total.hits > 0
            assert total.bytes_demanded_decode == 0
        finally:
            group.shards[0].close()


def test_without_ndp_the_owners_compute_everything(
    shared_store: ExpertStore, links: list[FakeLink], expected_tokens: list[list[int]]
) -> None:
    with serving_group(shared_store, _settings("context", 2), links[:1]) as group:
        links[0].dies_at = 2
        links[0].up.clear()
        assert greedy(group.lead, _PROMPTS[:1], _TOKENS) == expected_tokens[:1]
        other = group.shards[0].engine.stats().total()
        assert other.bytes_demanded_decode > 0
        links[0].up.set()
        assert group.lead.engine.peers["ndp/0"].wait_until_found(10.0)
        before = other.bytes_demanded_decode
        assert greedy(group.lead, _PROMPTS, _TOKENS) == expected_tokens
        assert group.shards[0].engine.stats().total().bytes_demanded_decode == before


def test_a_prompt_that_never_decodes_leaves_the_hot_set_to_the_others(
    shared_store: ExpertStore, links: list[FakeLink], expected_tokens: list[list[int]]
) -> None:
    with serving_group(shared_store, _settings("context", 2), links) as group:
        shed: list[list[list[int]]] = []
        tokens, _ = struck_greedy(
            group.lead, _PROMPTS[0], _TOKENS, lambda: shed.append(greedy(group.lead, _PROMPTS[1:], 1))
        )
        assert (tokens, shed) == (expected_tokens[0], [[expected_tokens[1][:1]]])
        assert [cache.live_stats().total().bytes_demanded_decode for cache in _caches(group)] == [0, 0]


def test_places_that_do_not_fit_one_gpu_are_refused(shared_store: ExpertStore) -> None:
    group = Group(_settings("context", 2, hot_per_layer=5), shared_store.describe().path)
    with pytest.raises(BudgetError, match=r"take 5 slots on GPU 0; the budget holds 4"):
        group.start_shard(1)


def _one_row(layer: int, experts: list[int], decode: bool = False) -> ExpertBatch:
    n = len(experts)
    return ExpertBatch(
        layer, np.array(experts, np.int32), np.zeros(n, np.uint8), np.arange(n + 1, dtype=np.int32),
        np.zeros(n, np.int32), np.full(n, 0.5, np.float32), np.ones((1, 32), np.float32), decode=decode,
    )  # fmt: skip


def test_a_shard_holds_what_it_is_told(shared_store: ExpertStore) -> None:
    shard = ShardWorker(_settings("context", 2), 1, shared_store.describe().path, LocalDirectory())
    try:
        cache = shard.engine.cache
        for preload, keys in ((True, [1, 3, 9]), (False, [11, 9])):
            shard.handle(PlacementCommand(np.array(keys, np.int32), False, preload))
            assert set(cache.residency.held()) == set(keys)
        with pytest.raises(StoreError, match="no expert 16"):
            shard.handle(PlacementCommand(np.array([16], np.int32), False, False))
        shard.handle(_one_row(0, [1, 3, 5, 7]))  # a prompt takes turns with itself before it takes their slots
        held = set(cache.residency.held())
        assert {9, 11} < held
        shard.handle(PlacementCommand(np.array([], np.int32), True, False))  # holds them no longer, but drops none
        assert set(cache.residency.held()) == held
        shard.handle(_one_row(0, [1, 3, 5, 7]))
        assert set(cache.residency.held()) == {1, 3, 5, 7}
        assert cache.live_stats().total().bytes_demanded_decode == 0
        cache.flush()
        assert cache.live_stats().bytes_preloaded == 3 * cache.residency.slot_bytes
        assert cache.live_stats().total().bytes_loaded_migration == cache.residency.slot_bytes  # of 11
        assert cache.live_stats().total().bytes_loaded_prefetch == 0
        shard.handle(_one_row(0, [1], decode=True))
        assert cache.live_stats().total().bytes_demanded_decode == cache.residency.slot_bytes
        cache.check_integrity()
    finally:
        shard.close()
