"""The topology planner: memory of low-bit replicas that are loaded on a miss."""

from __future__ import annotations

import pytest
from topology_cases import FACTS, a_node, plan

from tiermoe.cluster.config import engine_settings, load_run_config
from tiermoe.cluster.topology.spec import LowBitSpec, PlannedBytes, cluster_spec
from tiermoe.errors import BudgetError, ConfigError
from tiermoe.kernels.pack import PackedShape

_LOW_BIT = LowBitSpec(replica_bytes=40, share=0.25)


def test_low_bit_replicas_take_host_memory_and_a_share_of_the_budget() -> None:
    """Guards against plans that left the replicas out of what the lead's node must hold."""
    topology = plan([a_node("a", CPU=3, GPU=1)], low_bit=_LOW_BIT)
    # a quarter of 768 bytes holds 4 replicas, the rest 3 experts in full; 32 replicas lie in host memory
    assert topology.lead.nbytes == PlannedBytes(dense=400, kv=64, slots=3 * 192, low_bit=4 * 40, replicas=32 * 40)
    (load,) = topology.loads
    assert (load.host_bytes, load.device_bytes) == (3072 + 1280, 464 + 576 + 160)
    assert load.kinds == PlannedBytes(400, 64, 576, 3072, 1280, 160)
    (stand_in,) = plan([a_node("a", CPU=3)], low_bit=_LOW_BIT, gpu=False).loads
    assert stand_in.host_bytes == 3072 + 1280 + 1200


def test_low_bit_replicas_that_host_memory_cannot_hold_are_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        plan([a_node("a", CPU=3, GPU=1, memory=3072 + 1279)], low_bit=_LOW_BIT)
    assert "needs 4.25 KiB with what is there already (1.25 KiB of it replicas)" in str(refused.value)
    assert "short of 1 B" in str(refused.value)
    assert "choose a policy without on_miss low-bit" in str(refused.value)
    assert plan([a_node("a", CPU=3, GPU=1, memory=3072 + 1280)], low_bit=_LOW_BIT).lead.node == "a"
    with pytest.raises(BudgetError, match="does not hold an expert in full"):
        plan([a_node("a", CPU=3, GPU=1)], low_bit=_LOW_BIT, budget_bytes=200)


def test_low_bit_replicas_are_read_from_the_lead_s_own_node() -> None:
    nodes = [a_node("a", CPU=2, GPU=1), a_node("m", CPU=1, store=1)]
    with pytest.raises(ConfigError, match="loads replicas, which the lead maps from its own node's store; node a"):
        plan(nodes, store_nodes="marked", low_bit=_LOW_BIT)


@pytest.mark.parametrize("policy", ["hobbit", "moe-apex"])
def test_low_bit_presets_count_the_bytes_that_the_files_have(policy: str) -> None:
    config = load_run_config(None, {"policy": policy, "device": "cpu", "threads": 1, "budget": "0.5"})
    spec = cluster_spec(config, engine_settings(config), FACTS, [])
    assert spec.low_bit == LowBitSpec(PackedShape(4, 4, 4, 64).nbytes(), 0.25)
