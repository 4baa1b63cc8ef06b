"""The topology planner: ownership, exact plans on tiny clusters, balance, refusals, and predicted seconds."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from topology_cases import ALL, FACTS, NDP, a_node, places_of, plan

from tiermoe.actors.policies.sharding import owned_experts, shard_of, spread_by_bytes
from tiermoe.cluster.config import engine_settings, load_run_config
from tiermoe.cluster.topology.estimate import Hardware, links_of
from tiermoe.cluster.topology.spec import NODE_ID_LABEL, LowBitSpec, NodeInfo, PlannedBytes, cluster_spec
from tiermoe.errors import BudgetError, ConfigError

# ownership


def test_shard_of_by_both_rules() -> None:
    assert [[shard_of(layer, e, 3, 2) for e in range(3)] for layer in range(2)] == [[0, 1, 0], [1, 0, 1]]
    assert [[shard_of(layer, e, 3, 2, "expert") for e in range(3)] for layer in range(2)] == [[0, 1, 0], [0, 1, 0]]
    for nowhere in ((0, 8, 8, 2), (0, -1, 8, 2), (-1, 0, 8, 2), (0, 0, 8, 0)):
        with pytest.raises(ValueError, match="owns expert"):
            shard_of(*nowhere)


@given(st.integers(1, 6), st.integers(1, 24), st.integers(1, 8))
def test_ownership_balances(layers: int, experts: int, shards: int) -> None:
    by_layer_expert = owned_experts(layers, experts, shards)
    by_expert = owned_experts(layers, experts, shards, "expert")
    assert sum(by_layer_expert) == sum(by_expert) == layers * experts
    assert max(by_layer_expert) - min(by_layer_expert) <= 1
    assert max(by_expert) - min(by_expert) <= layers
    if experts % shards == 0:
        assert set(by_expert) == set(by_layer_expert) == {layers * experts // shards}
    for layer in range(layers):  # within a layer too, so that a token's work is spread
        counts = Counter(shard_of(layer, e, experts, shards) for e in range(experts))
        assert max(counts.values()) - min(counts[shard] for shard in range(shards)) <= 1


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 7))
def test_spread_by_bytes_balances(nbytes: list[int], workers: int) -> None:
    owners = spread_by_bytes(nbytes, workers)
    held = [sum(n for n, owner in zip(nbytes, owners, strict=True) if owner == w) for w in range(workers)]
    assert sum(held) == sum(nbytes)
    assert max(held) - min(held) <= max(nbytes, default=0)
    assert owners == spread_by_bytes(nbytes, workers)


def test_spread_by_bytes_goes_round_for_equal_sizes_and_follows_bytes_else() -> None:
    assert spread_by_bytes([5] * 7, 3) == (0, 1, 2, 0, 1, 2, 0)
    assert spread_by_bytes([9, 1, 1, 1, 9], 2) == (0, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="0 workers"):
        spread_by_bytes([1], 0)


# exact plans


def test_one_gpu_is_what_deploy_places_today() -> None:
    topology = plan([a_node("a", CPU=3, GPU=1)])
    (group,) = topology.groups
    assert (group.strategy, group.bundles) == ("STRICT_PACK", ({"CPU": 2.0, "GPU": 1.0}, {"CPU": 1.0}))
    assert group.selectors == ({}, {})  # one node: nothing to choose
    assert [(a.name, a.bundle, a.experts, a.layers) for a in topology.actors] == [
        ("lead", 0, 32, ALL),
        ("store-0", 1, 32, ALL),
    ]
    assert topology.lead.nbytes == PlannedBytes(dense=400, kv=64, slots=768)
    (load,) = topology.loads
    assert (load.host_bytes, load.device_bytes, load.host_total) == (3072, 1232, 100_000)
    assert load.resources == {"CPU": (3.0, 3.0), "GPU": (1.0, 1.0)}
    assert topology.notes == ()
    assert json.loads(json.dumps(topology.as_dict()))["groups"][0]["name"] == "workers"

    (stand_in,) = plan([a_node("a", CPU=3)], gpu=False).loads  # takes host memory
    assert (stand_in.host_bytes, stand_in.resources) == (3072 + 1232, {"CPU": (3.0, 3.0)})


def test_four_shards_on_one_node_share_its_store() -> None:
    topology = plan([a_node("a", CPU=9, GPU=4)], shards=4)
    names = [actor.name for actor in topology.actors]
    assert names == ["lead", "shard-1", "shard-2", "shard-3", "store-0", "directory"]
    assert {(a.experts, a.nbytes.slots) for a in topology.having("lead", "shard")} == {(8, 768)}
    assert topology.loads[0].host_bytes == 3072
    assert topology.groups[0].strategy == "STRICT_PACK"
    # a large budget gives no more slots than the experts that a shard owns
    large = plan([a_node("a", CPU=9, GPU=4)], shards=4, budget_bytes=100 * 192, gpu_memory_bytes=None)
    assert {actor.nbytes.slots for actor in large.having("lead", "shard")} == {8 * 192}


def test_pinned_copies_take_host_memory_of_each_worker() -> None:
    """Of `copies.pin: copy`: the layers that its node's store holds, within `copies.pinned_gib`."""
    topology = plan([a_node("a", CPU=9, GPU=2)], shards=2, copied_most=4 * 768)
    assert [actor.nbytes.copied for actor in topology.having("lead", "shard")] == [3072, 3072]
    assert topology.loads[0].host_bytes == 3 * 3072
    assert plan([a_node("a", CPU=9, GPU=2)], shards=2, copied_most=1000).loads[0].host_bytes == 3072 + 2 * 1000
    nodes = [a_node("a", CPU=3, GPU=1), a_node("b", CPU=3, GPU=1)]
    sliced = plan(nodes, shards=2, store_layout="sliced", copied_most=4 * 768)
    assert [load.host_bytes for load in sliced.loads] == [2 * 2 * 768] * 2
    with pytest.raises(ConfigError, match=r"the pinned copy of the lead fits on no node.*host memory.*short of 1000"):
        plan([a_node("a", CPU=3, GPU=1, memory=2 * 3072 - 1000)], copied_most=4 * 768)
    copy = load_run_config(None, {"policy": "on-demand", "device": "cuda", "threads": 1, "copies": {"pin": "copy"}})
    assert cluster_spec(copy, engine_settings(copy), FACTS, []).copied_most == 3072


def test_pack_fills_the_roomiest_node_first_and_spread_goes_round() -> None:
    nodes = [a_node("a", CPU=5, GPU=2), a_node("b", CPU=7, GPU=3), a_node("c", CPU=3, GPU=1)]
    packed = plan(nodes, shards=4)
    assert [a.node for a in packed.having("lead", "shard")] == ["b", "b", "b", "a"]
    assert [a.node for a in packed.having("store")] == ["b", "a"]
    spread = plan(nodes, shards=4, strategy="spread")
    assert [a.node for a in spread.having("lead", "shard")] == ["b", "a", "c", "b"]
    (group,) = spread.groups
    assert group.strategy == "PACK"
    assert [dict(s)[NODE_ID_LABEL] for s in group.selectors] == ["b", "a", "c", "b", "b", "a", "c"]
    assert [a.bundle for a in spread.actors if a.group] == list(range(7))


def test_the_lead_is_placed_on_the_node_that_the_configuration_names() -> None:
    nodes = [a_node("b", CPU=7, GPU=3), a_node("c", CPU=3, GPU=1)]
    for lead in ("c", "10.0.0.99"):
        assert [a.node for a in plan(nodes, shards=2, lead=lead).having("lead", "shard")] == ["c", "b"]


def test_gpu_nodes_without_store_read_from_the_marked_node() -> None:
    nodes = [a_node("a", CPU=2, GPU=1), a_node("b", CPU=2, GPU=1), a_node("m", CPU=3, store=1, ndp=1)]
    topology = plan(nodes, shards=2, store_nodes="marked", ndp=NDP)
    assert places_of(topology) == {"lead": "a", "shard-1": "b", "store-0": "m", "ndp-0": "m", "directory": "a"}
    assert [a.layers for a in topology.having("lead", "shard")] == [(), ()]
    assert [a.group for a in topology.having("store", "ndp", "directory")] == [None] * 3
    assert topology.having("store")[0].resources == {"CPU": 1.0, "store": 1.0}
    assert topology.having("ndp")[0].nbytes == PlannedBytes(replicas=32 * 40)
    memory = next(load for load in topology.loads if load.node == "m")
    assert memory.host_bytes == 3072 + 1280
    assert topology.notes == (
        "lead reads 4 of 4 layers from other nodes",
        "shard-1 reads 4 of 4 layers from other nodes",
    )


def test_slices_go_round_and_every_layer_has_its_copies() -> None:
    nodes = [a_node("a", CPU=9, GPU=1), *(a_node(name, CPU=1, store=1) for name in "xyz")]
    sliced = plan(nodes, store_nodes="marked", store_layout="sliced")
    assert [(a.node, a.layers) for a in sliced.having("store")] == [("x", (0, 3)), ("y", (1,)), ("z", (2,))]
    twice = plan(nodes, store_nodes="marked", store_layout="sliced", store_copies=2)
    assert [a.layers for a in twice.having("store")] == [(0, 2, 3), (0, 1, 3), (1, 2)]

    nodes = [a_node("a", CPU=3, GPU=1), a_node("b", CPU=3, GPU=1)]  # on the workers' nodes
    topology = plan(nodes, shards=2, store_layout="sliced")
    assert [(a.node, a.layers) for a in topology.having("lead", "shard")] == [("a", (0, 2)), ("b", (1, 3))]
    assert [load.host_bytes for load in topology.loads] == [1536, 1536]
    assert "directory" in places_of(topology)


def test_ndp_experts_are_spread_over_the_workers() -> None:
    nodes = [a_node("a", CPU=9, GPU=1), a_node("m", CPU=4, ndp=2), a_node("n", CPU=4, ndp=1)]
    each = plan(nodes, ndp=NDP)
    assert [(a.node, a.experts) for a in each.having("ndp")] == [("m", 16), ("n", 16)]
    three = plan(nodes, ndp=replace(NDP, workers=3))
    assert [(a.node, a.experts) for a in three.having("ndp")] == [("m", 11), ("n", 11), ("m", 10)]

    both = [a_node(name, CPU=9, GPU=1, ndp=1) for name in "abc"]  # the first beside the lead that is named
    for lead, expected in ((None, ["a"]), ("b", ["b"])):
        topology = plan(both, lead=lead, ndp=replace(NDP, workers=1))
        assert [a.node for a in topology.having("ndp")] == expected

    # NDP workers come first, so that the others leave them room
    nodes = [a_node("a", CPU=6, GPU=2, ndp=1), a_node("b", CPU=3, GPU=1)]
    assert [a.node for a in plan(nodes, shards=2, ndp=NDP).having("lead", "shard")] == ["a", "b"]
    # in full precision they share the pages of their node's store
    full = replace(NDP, widths=(), replica_bytes=0, stored=True)
    beside, alone = a_node("a", CPU=5, GPU=1, ndp=1), a_node("b", CPU=2, ndp=1)
    topology = plan([beside, alone], ndp=full)
    assert [(load.node, load.host_bytes) for load in topology.loads] == [("a", 3072), ("b", 16 * 96)]


def test_unknown_memory_and_dead_nodes_are_noted() -> None:
    topology = plan([a_node("a", CPU=3, GPU=1, memory=None)], gpu_memory_bytes=None)
    notes = [note.split(":")[0] for note in topology.notes]
    assert notes == ["GPU memory was not checked", "host memory was not checked on a"]
    topology = plan([a_node("a", CPU=9, GPU=9, alive=False), a_node("b", CPU=3, GPU=1)])
    assert (topology.lead.node, topology.notes) == ("b", ("node a is dead and left out",))


@given(st.randoms(use_true_random=False), st.sampled_from(["pack", "spread"]), st.integers(1, 4))
def test_the_order_of_the_nodes_does_not_matter(shuffle: random.Random, strategy: str, shards: int) -> None:
    nodes = [a_node(name, CPU=7, GPU=2, ndp=1, store=1) for name in "dacb"]
    expected = plan(nodes, shards=shards, strategy=strategy, ndp=NDP)
    shuffle.shuffle(nodes)
    assert plan(nodes, shards=shards, strategy=strategy, ndp=NDP) == expected


_AMOUNTS = st.integers(0, 6)


@given(
    st.lists(st.tuples(_AMOUNTS, _AMOUNTS, st.integers(0, 2), st.integers(0, 1), st.integers(0, 9000)), max_size=5),
    st.integers(1, 4),
    st.sampled_from(["workers", "marked"]),
    st.sampled_from(["replicated", "sliced"]),
    st.booleans(),
)
def test_a_plan_overbooks_nothing_or_is_refused(
    sizes: list[tuple[int, int, int, int, int]], shards: int, where: str, layout: str, with_ndp: bool
) -> None:
    nodes = [
        a_node("abcde"[i], CPU=cpu, GPU=gpu, ndp=ndp, store=store, memory=memory)
        for i, (cpu, gpu, ndp, store, memory) in enumerate(sizes)
    ]
    try:
        topology = plan(nodes, shards=shards, store_nodes=where, store_layout=layout, ndp=NDP if with_ndp else None)
    except ConfigError:
        return
    used: dict[tuple[str, str], float] = Counter()
    for actor in topology.actors:
        for name, amount in actor.resources.items():
            used[actor.node, name] += amount
    by_id = {node.id: node for node in nodes}
    assert all(amount <= by_id[node].amount(name) for (node, name), amount in used.items())
    booked = {(load.node, name): pair[0] for load in topology.loads for name, pair in load.resources.items()}
    assert booked == {key: amount for key, amount in used.items() if amount}
    assert all(load.host_bytes <= (load.host_total or 0) for load in topology.loads)
    assert len(topology.having("lead", "shard")) == shards
    assert {layer for store in topology.having("store") for layer in store.layers} == set(ALL)


# the matcher


def test_a_matcher_is_beside_the_lead_and_found_through_the_directory() -> None:
    nodes = [a_node("a", CPU=2.0), a_node("b", CPU=8.0, GPU=1.0)]
    topology = plan(nodes, matcher=True)
    (matcher,) = topology.having("matcher")
    assert (matcher.node, dict(matcher.resources), matcher.group) == (topology.lead.node, {}, None)
    assert [actor.node for actor in topology.having("directory")] == [topology.lead.node]
    assert plan(nodes).having("matcher", "directory") == ()


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

    assert plan([a_node("a", CPU=3, GPU=1, memory=3072 + 1280)], low_bit=_LOW_BIT).lead.node == "a"


_SNUG, _ROOMY = a_node("a", CPU=3, GPU=1), a_node("a", CPU=9, GPU=1)


@pytest.mark.parametrize(
    ("nodes", "changes", "says"),
    [
        ([_ROOMY], {"shards": 2},
         r"shard 1 fits on no node: node a \(GPU: needs 1, has 0 free of 1, short of 1\)"),
        ([a_node("a", CPU=2, GPU=1), a_node("b", CPU=8)], {},
         r"the lead .* node a \(CPU: needs 3, has 2 free of 2, short of 1\), node b \(GPU: .* short of 1\)"),
        ([a_node("a", CPU=3, GPU=1, memory=3000)], {},
         r"node a \(host memory: needs 3.00 KiB .* has 2.93 KiB, short of 72 B\)"),
        ([a_node("a", CPU=3, memory=4000)], {"gpu": False},
         r"host memory: needs 4.20 KiB .* short of 304 B"),
        ([_SNUG], {"store_nodes": "marked"},
         r"no node has the resource store: short of 1"),
        ([_SNUG, a_node("s", store=1)], {"store_nodes": "marked"},
         r"store 0 fits on no node: node s \(CPU: needs 1, has 0"),
        ([_SNUG, a_node("s", CPU=1, store=1, memory=3071)], {"store_nodes": "marked"},
         r"node s \(host memory: .* short of 1 B"),
        ([_ROOMY], {"ndp": NDP},
         r"needs 1 of the resource ndp, the nodes have none: short of 1"),
        ([a_node("a", CPU=9, GPU=1, ndp=1)], {"ndp": replace(NDP, workers=3)},
         r"needs 3 of the resource ndp, the nodes have 1 \(a\): short of 2"),
        ([_ROOMY, a_node("m", CPU=1, ndp=1)], {"ndp": NDP},
         r"NDP worker 0 fits on no node: node m \(CPU: needs 2"),
        ([_ROOMY, a_node("m", CPU=2, ndp=1, memory=1000)], {"ndp": NDP},
         r"node m \(host memory: .* short of 280 B"),
        ([a_node("a", CPU=9, GPU=1, ndp=1)], {"ndp": replace(NDP, capacity_bytes=1000)},
         r"NDP worker 0 holds 1.25 KiB .* short of 280 B"),
        ([_SNUG], {"lead": "z"},
         r"cluster.lead is 'z', which is not a living node; give one of a at"),
        ([a_node("a", CPU=2, GPU=1), a_node("b", CPU=9, GPU=9)], {"lead": "a"},
         r"the lead fits on no node: node a \(CPU: needs 3, has 2 free of 2, short of 1\);"),
        ([_SNUG], {"store_layout": "sliced", "store_copies": 2},
         r"store.copies is 2, but only 1 node holds a store: short of 1"),
        ([a_node("a", CPU=3, GPU=1, memory=3000)], {"store_layout": "sliced"},
         r"store 0 fits on no node: node a \(host memory"),
        ([a_node("a", CPU=3, GPU=1, alive=False)], {}, r"none of 1 nodes is alive"),
        ([_SNUG, _SNUG], {}, r"two nodes have the id 'a'"),
        ([a_node("a", CPU=99, GPU=64)], {"shards": 9, "ownership": "expert"},
         r"a shard would hold none by the rule 'expert'; lower cluster.shards to 8"),
        ([a_node("a", CPU=3, GPU=1, memory=3072 + 1279)], {"low_bit": _LOW_BIT},
         r"needs 4.25 KiB with what is there already \(1.25 KiB of it replicas\).*"
         "short of 1 B.*choose a policy without on_miss low-bit"),
        ([a_node("a", CPU=2, GPU=1), a_node("m", CPU=1, store=1)], {"store_nodes": "marked", "low_bit": _LOW_BIT},
         "loads replicas, which the lead maps from its own node's store; node a"),
    ],
)  # fmt: skip
def test_it_says_what_is_short_where_and_by_how_much(nodes: list[NodeInfo], changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan(nodes, **changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gpu_memory_bytes": 1000}, "the lead needs 1.20 KiB of GPU memory .*: short of 232 B"),
        ({"low_bit": _LOW_BIT, "budget_bytes": 200}, "does not hold an expert in full"),
    ],
)
def test_a_budget_that_does_not_fit(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BudgetError, match=says):
        plan([a_node("a", CPU=9, GPU=1, ndp=1)], **changes)


@pytest.mark.parametrize(
    ("gpu", "link", "wanted"),
    [
        (True, {}, ("H100-class, assumed", 55.0, 10.0)),
        (False, {}, ("CPU stand-in, as configured", 16.0, 10.0)),
        (False, {"gbps": 2.0, "latency_us": 1.0}, ("CPU stand-in, as configured", 2.0, 1.0)),
        (False, {"gbps": None}, ("CPU stand-in, assumed", 10.0, 0.0)),
    ],
)
def test_links_are_as_configured_or_named_assumed(gpu: bool, link: dict[str, Any], wanted: tuple[Any, ...]) -> None:
    config = load_run_config(None, {"link": link})
    assert links_of(config, gpu, here=False) == Hardware(*wanted, network_gbps=3.0, network_latency_us=50.0)
