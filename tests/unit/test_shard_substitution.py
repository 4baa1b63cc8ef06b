"""Buddies over two GPUs in this process, with integrity checks: what the lead decides by, and what shards do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import Group, add_random_profile, greedy, prepared, serving_group, settings
from tiny_models import save_tiny_checkpoint

from tiermoe.actors.engine.peers.shards import owners
from tiermoe.actors.policies.adapmoe import Rerouted, RerouteView
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.settings import EngineSettings, ShardSettings, check_combination
from tiermoe.actors.store.files import ExpertStore
from tiermoe.errors import ConfigError

_PROMPTS = [[5, 9, 2, 7, 1, 3], [8, 8, 4, 6, 2, 9, 11, 30, 2]]
_NEW = 16


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    """2 layers of 8 experts, of which a token takes 2."""
    folder = tmp_path_factory.mktemp("shard-substitution")
    out = prepared(save_tiny_checkpoint("olmoe", folder / "checkpoint"), folder / "store")
    add_random_profile(Path(out.describe().path), 2)
    return out


def _settings(prefetch: str = "none", on_miss: str = "substitute", shards: int = 2, **options: Any) -> EngineSettings:
    policy = PolicySettings(
        name="test", lossless=False, prefetch={"kind": prefetch}, on_miss=on_miss,  # type: ignore[arg-type]
        substitution=dict(**options),
    )  # fmt: skip
    return settings(0.25, policy=policy, shards=ShardSettings(count=shards))


class _Watched:
    """Every decision of the lead's rule."""

    def __init__(self, group: Group) -> None:
        self.moves: list[tuple[int, int]] = []  # shard of the replaced expert, and of its buddy
        engine = group.lead.engine
        rule = engine.layers[0].hooks.reroute[0].rule
        owner = np.array(owners(len(engine.layers), engine.experts, group.settings.shards))
        decide = rule.reroute

        def reroute(layer: int, ids: Any, weights: Any, probabilities: Any, view: RerouteView) -> Rerouted:
            found = decide(layer, ids, weights, probabilities, view)
            changed = found.ids != ids
            for before, after in zip(ids[changed].tolist(), found.ids[changed].tolist(), strict=True):
                assert not view.available[before]
                assert view.available[after]
                base = layer * engine.experts
                self.moves.append((int(owner[base + before]), int(owner[base + after])))
            return found

        rule.reroute = reroute


@pytest.mark.parametrize("prefetch", ["none", "next-gate"])
def test_buddies_across_shards(store: ExpertStore, prefetch: str) -> None:
    with serving_group(store, _settings(prefetch)) as group:
        watched = _Watched(group)
        greedy(group.lead, _PROMPTS, _NEW)
        stats = group.lead.stats()
        assert stats.substitutions == len(watched.moves) > 0
        assert {(0, 1), (1, 0)} <= set(watched.moves)
        assert stats.shard_refusals == stats.shard_losses == 0
        # what the lead was told is what the shard holds: it has answered last, and nothing was asked of it since
        (peer,) = group.lead.engine.shards.peers.values()
        if prefetch == "none":
            held = np.unpackbits(peer.held, count=16).nonzero()[0].tolist()
            assert held == sorted(group.shards[0].engine.cache.residency.held())


def test_less_is_loaded_than_without_buddies(store: ExpertStore) -> None:
    """The lead's view is exact without prefetch: a shard loads only while it fills its cache."""
    loaded = {}
    for on_miss in ("load", "substitute"):
        with serving_group(store, _settings(on_miss=on_miss)) as group:
            greedy(group.lead, _PROMPTS, _NEW)
            loaded[on_miss] = [part["misses"] for part in group.lead.shard_stats()]
    assert all(few < many for few, many in zip(loaded["substitute"], loaded["load"], strict=True))
    assert loaded["substitute"][1] <= 8  # its slots, and those of the one layer in which it filled the last


def test_at_kappa_1_buddies_are_on_the_lead(store: ExpertStore) -> None:
    with serving_group(store, _settings(kappa=1.0)) as group:
        watched = _Watched(group)
        greedy(group.lead, _PROMPTS, _NEW)
        assert {there for _, there in watched.moves} == {0}


def test_a_shard_is_lost_and_comes_back(store: ExpertStore) -> None:
    with serving_group(store, _settings("next-gate")) as group:
        watched = _Watched(group)
        greedy(group.lead, _PROMPTS, _NEW)
        (peer,) = group.lead.engine.shards.peers.values()
        group.shards[0].close()
        greedy(group.lead, _PROMPTS[:1], 2)  # notices
        watched.moves.clear()
        greedy(group.lead, _PROMPTS, _NEW)
        assert group.lead.stats().shard_losses == 1
        group.shards[0] = group.start_shard(1)
        try:
            assert peer.wait_until_found(10.0)
            assert peer.held is None
            greedy(group.lead, _PROMPTS, _NEW)
            assert group.shards[0].engine.stats().total().misses > 0  # it fills its cache again
            assert (0, 1) in watched.moves
        finally:
            group.shards[0].close()


def test_dropping_and_random_replacement_run_over_shards(store: ExpertStore) -> None:
    for on_miss in ("drop", "random"):
        with serving_group(store, _settings(on_miss=on_miss)) as group:
            greedy(group.lead, _PROMPTS, _NEW)
            stats = group.lead.stats()
            assert (stats.dropped > 0, stats.substitutions > 0) == (on_miss == "drop", on_miss == "random")


def test_kappa_is_of_several_shards() -> None:
    check_combination(_settings(kappa=0.5))
    with pytest.raises(ConfigError, match="there is one GPU"):
        check_combination(_settings(kappa=0.5, shards=1))
