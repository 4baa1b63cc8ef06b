"""Policies that trade tokens for bytes on the default model: what they replace, drop or load in few bits, and save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu
from serving import Reference, greedy, serving, serving_group, settings

from tiermoe.actors.combinations import check_combination
from tiermoe.actors.engine.serving.scoring import score_with
from tiermoe.actors.engine.stats import EngineStats
from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.settings import KvSettings, LinkSettings, ShardSettings
from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.config import load_policy
from tiermoe.errors import ConfigError

KV = KvSettings(page_size=32, num_blocks=32)
slow = pytest.mark.slow


def _policy(
    prefetch: str = "none", on_miss: str = "load", routing: Any = None, **substitution: object
) -> PolicySettings:
    more = {} if routing is None else {"routing": routing}
    return PolicySettings(
        name="test", lossless=False, prefetch={"kind": prefetch}, on_miss=on_miss, substitution=substitution, **more
    )


@contextmanager
def _served(store: ExpertStore, policy: PolicySettings | str, budget: float, **more: Any) -> Iterator[GpuWorker]:
    made = load_policy(policy) if isinstance(policy, str) else policy
    with serving(store, settings(budget, kv=KV, policy=made, **more)) as worker:
        yield worker


# -- experts that are not at hand ----------------------------------------------------------------------------------


def _warm_run(store: ExpertStore, policy: PolicySettings | str, reference: Reference) -> tuple[list[int], EngineStats]:
    """Twelve tokens of a prompt once another has filled half of the experts' room, and the counters of that run."""
    with _served(store, policy, 0.5) as worker:
        greedy(worker, reference.prompts[1:2], 4)
        worker.reset_stats()
        return greedy(worker, reference.prompts[:1], 12)[0], worker.stats()


@slow
def test_what_becomes_of_misses(store: ExpertStore, reference: Reference) -> None:
    expected = reference.tokens[0][:12]
    tokens, loading = _warm_run(store, _policy(), reference)
    assert tokens == expected
    assert (loading.substitutions, loading.dropped) == (0, 0)

    substituted, demanded = [], []
    for rho in (1, 4):
        _, stats = _warm_run(store, _policy(on_miss="substitute", rho=rho), reference)
        substituted.append(stats.substitutions)
        demanded.append(stats.total().bytes_loaded_demand)
        assert stats.dropped == 0
    assert 0 < substituted[0] < substituted[1]
    assert loading.total().bytes_loaded_demand > demanded[0] > demanded[1]

    tokens, stats = _warm_run(store, _policy(on_miss="substitute", beta=0.0), reference)
    assert tokens == expected  # every batch with a miss is bypassed
    assert (stats.substitutions, stats.dropped) == (0, 0)
    tokens, stats = _warm_run(store, _policy(on_miss="substitute", tau=1.0), reference)
    assert tokens == expected  # no entropy is above 1
    assert stats.substitutions == 0

    for on_miss in ("random", "drop"):
        _, stats = _warm_run(store, _policy(on_miss=on_miss), reference)
        assert (stats.substitutions > 0, stats.dropped > 0) == (on_miss == "random", on_miss == "drop")
        assert stats.total().bytes_loaded_demand < demanded[0]


@slow
def test_buddymoe_on_two_gpus(store: ExpertStore, reference: Reference) -> None:
    """Each holds half of what it owns; buddies load fewer bytes on both, with integrity checks all along."""
    demanded = {}
    for name in ("original", "buddymoe"):
        config = settings(0.25, kv=KV, policy=load_policy(name), shards=ShardSettings(count=2))
        with serving_group(store, config) as group:
            greedy(group.lead, reference.prompts[1:2], 4)
            before = [part["bytes_loaded_demand"] for part in group.lead.shard_stats()]
            greedy(group.lead, reference.prompts[:1], 12)
            after = [part["bytes_loaded_demand"] for part in group.lead.shard_stats()]
            demanded[name] = [b - a for a, b in zip(before, after, strict=True)]
            assert (group.lead.stats().substitutions > 0) == (name == "buddymoe")
            assert group.lead.stats().shard_losses == 0
    assert all(few < many for few, many in zip(demanded["buddymoe"], demanded["original"], strict=True))


# -- experts that the router chose and nobody runs -----------------------------------------------------------------


@slow
def test_dynamic_top_k_drops_experts_only_where_slots_lack(store: ExpertStore, reference: Reference) -> None:
    with _served(store, "activeevict", 1.0) as worker:
        reference.check(worker, 2)
        assert worker.stats().dropped == 0
    with _served(store, "activeevict", 0.25) as worker:
        assert all(greedy(worker, reference.prompts[:2], 24))
        stats = worker.stats()
        assert stats.dropped > 0
        assert stats.substitutions == 0


# -- misses in few bits --------------------------------------------------------------------------------------------


def _scored(worker: GpuWorker, reference: Reference) -> tuple[torch.Tensor, EngineStats]:
    """Log-probabilities of a prompt, a token at a time, once the cache is warm by another."""
    score_with(worker, reference.prompts[2], 16, rows=1)
    worker.reset_stats()
    return score_with(worker, reference.prompts[0], 16, rows=1), worker.stats()


@slow
def test_quality_and_bytes_of_replicas(packed_store: ExpertStore, reference: Reference) -> None:
    with _served(packed_store, "next-gate", 0.3) as worker:
        exact, loading = _scored(worker, reference)
        reference.check(worker, 1, 8)
    assert worker.plan()["low_bit"] is None
    hobbit = load_policy("hobbit")
    half = 16 * 32 // 2 * 98_304  # of the experts, in host memory that is read from the disk
    for preset, host in ((hobbit, None), (hobbit, half), (hobbit.model_copy(update={"evict_writeback": True}), None)):
        # with the cache's integrity checked after each layer
        with _served(packed_store, preset, 0.3, host_bytes=host) as worker:
            plan = worker.plan()
            found, stats = _scored(worker, reference)
            total = stats.total()
            tokens = greedy(worker, reference.prompts[:3:2], 8)  # together, too
            assert (stats.host_memory is None) == (host is None)
        kl = (exact.exp() * (exact - found)).sum(-1)
        assert kl.mean() < 0.02  # nats; four bits are good replicas
        assert (exact.argmax(-1) == found.argmax(-1)).float().mean() > 0.9
        assert sum(a == b for a, b in zip(tokens[0], reference.tokens[0], strict=False)) >= 4
        assert total.low_bit_pairs > 0
        assert total.low_bit_hits > 0
        assert 0 < total.bytes_loaded_low_bit < total.bytes_loaded < loading.total().bytes_loaded
        assert (total.bytes_written_back > 0) == preset.evict_writeback
        assert 0 < stats.expert_bytes_peak <= stats.expert_budget_bytes
        low = plan["low_bit"]
        assert low["kernel"] == "cpu"
        assert stats.expert_bytes_peak == plan["slots"] * plan["slot_bytes"] + low["slots"] * low["slot_bytes"]
        assert low["bytes"] <= 0.25 * stats.expert_budget_bytes


@slow
def test_replicas_go_through_a_gpus_streams(
    packed_store: ExpertStore, reference: Reference, fake_gpu: FakeGpu
) -> None:
    """Replicas are pinned as experts are, and no host waits for them."""
    with _served(packed_store, "hobbit", 0.3) as worker:
        plan, waits = worker.plan(), fake_gpu.synchronized
        greedy(worker, reference.prompts[:3:2], 8)
        total = worker.stats().total()
        assert fake_gpu.synchronized == waits
        in_full = sum(sum(t.nbytes for t in layer.tensors) for layer in worker._sources.mapped)
        assert plan["pinned_bytes"] > in_full
        assert plan["staged_bytes"] == 0
        assert total.low_bit_pairs > 0
        assert total.link_s > 0
        assert 0 < total.bytes_loaded_low_bit < total.bytes_loaded
    assert not fake_gpu.registered
    assert not fake_gpu.hazards


@slow
def test_a_width_that_the_store_lacks(packed_store: ExpertStore) -> None:
    hobbit = load_policy("hobbit")
    other = hobbit.model_copy(update={"on_miss": hobbit.on_miss.model_copy(update={"bits": 2})})
    with pytest.raises(ConfigError, match=r"replicas of 2 bits, the store has those of 4 bits"), _served(
        packed_store, other, 0.3
    ):
        pass


# -- a link whose clock layers move --------------------------------------------------------------------------------

LINK = LinkSettings(gbps=0.7, latency_us=10.0, layer_us=900.0)


def test_refusals_of_a_stepped_link() -> None:
    """Other processes do not see its clock; and it is a throttled link."""
    with pytest.raises(ConfigError, match="layer_us"):
        check_combination(settings(0.25, link=LINK, shards=ShardSettings(count=2)))
    with pytest.raises(ValueError, match="gbps"):
        LinkSettings(layer_us=5.0)
