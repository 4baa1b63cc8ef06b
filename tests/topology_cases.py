"""A tiny model, its runtime and nodes to plan it on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tiermoe.actors.policies.cost import NdpDevice
from tiermoe.cluster.topology.planner import plan_topology
from tiermoe.cluster.topology.spec import NODE_ID_LABEL, ClusterSpec, ModelFacts, NdpSpec, NodeInfo, Topology

# 4 layers of 8 experts of 48 numbers: 96 bytes stored, 768 bytes a layer, 3072 in all; 192 bytes in a float32 slot.
FACTS = ModelFacts("tiny", 4, 8, 2, 4, 4, 2, 48, 100, 4, 2, "test")
ALL = (0, 1, 2, 3)
DEVICE = NdpDevice(
    name="ndp", memory_gbps=1, capacity_bytes=10_000, arrays=1, array_rows=4, array_cols=4, clock_ghz=1,
    narrowest_bits=1, link_gbps=1, link_latency_us=1,
)  # fmt: skip
NDP = NdpSpec(None, 2, (4,), 40, 10_000, DEVICE)
SPEC = ClusterSpec(
    shards=1, ownership="layer-expert", strategy="pack", lead=None, gpu=True, threads=2, policy="p", budget_bytes=768,
    slot_bytes=192, compute_item_bytes=4, dense_bytes=400, kv_bytes=64,
    gpu_memory_bytes=10_000, store_layout="replicated", store_nodes="workers", store_copies=1, ndp=None,
)  # fmt: skip


def a_node(name: str, *, alive: bool = True, memory: int | None = 100_000, **resources: float) -> NodeInfo:
    held = resources | ({"memory": float(memory)} if memory is not None else {})
    return NodeInfo(name, f"10.0.0.{ord(name[0])}", alive, held, {NODE_ID_LABEL: name})


def plan(nodes: list[NodeInfo], **changes: Any) -> Topology:
    return plan_topology(replace(SPEC, **changes), FACTS, nodes)


def places_of(topology: Topology) -> dict[str, str]:
    return {actor.name: actor.node for actor in topology.actors}

# the configuration of a small model, and a file of three nodes
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 4,
    "num_local_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "vocab_size": 10, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
NODES = """
nodes:
  - {id: g, address: 10.0.0.1, resources: {CPU: 5, GPU: 1, memory: 64GB}}
  - {id: h, address: 10.0.0.2, resources: {CPU: 5, GPU: 1, memory: 64GB}}
  - {id: m, address: 10.0.0.3, resources: {CPU: 20, ndp: 1, store: 1, memory: 256GB}}
"""
