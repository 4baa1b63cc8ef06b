"""What the topology planner plans from: presets, and nodes from Ray or a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from topology_cases import FACTS, a_node, places_of

from tiermoe.cluster.config import engine_settings, load_run_config
from tiermoe.cluster.topology.estimate import predict, resolve_hardware
from tiermoe.cluster.topology.inputs import nodes_from_file, nodes_from_ray
from tiermoe.cluster.topology.planner import plan_topology
from tiermoe.cluster.topology.spec import NODE_ID_LABEL, NodeInfo, cluster_spec, replica_bytes
from tiermoe.errors import ConfigError


@pytest.mark.parametrize(
    ("preset", "nodes", "places"),
    [
        ("multi-gpu", [a_node("a", CPU=17, GPU=4, memory=None)],
         {"lead": "a", "shard-1": "a", "shard-2": "a", "shard-3": "a", "store-0": "a", "directory": "a"}),
        ("gpu-plus-ndp", [a_node("g", CPU=5, GPU=1), a_node("m", CPU=16, ndp=1)],
         {"lead": "g", "store-0": "g", "ndp-0": "m", "directory": "g"}),
        ("multi-node", [a_node("g", CPU=4, GPU=1), a_node("h", CPU=4, GPU=1), a_node("m", CPU=17, ndp=1, store=1)],
         {"lead": "g", "shard-1": "h", "store-0": "m", "ndp-0": "m", "directory": "g"}),
    ],
)  # fmt: skip
def test_the_presets_plan_on_the_nodes_that_they_are_for(
    preset: str, nodes: list[NodeInfo], places: dict[str, str]
) -> None:
    config = load_run_config(preset)
    spec = cluster_spec(config, engine_settings(config), FACTS, nodes)
    assert spec.gpu_memory_bytes == 80 * 10**9
    assert spec.slot_bytes == 96  # bfloat16
    topology = plan_topology(spec, FACTS, nodes)
    assert places_of(topology) == places
    assert predict(topology, spec, FACTS, resolve_hardware(config.hardware, True, None, 0.0)).tokens_per_s > 0


def test_today_s_presets_plan_as_deploy_places_them() -> None:
    for preset, node in (("laptop", a_node("a", CPU=64)), ("one-gpu", a_node("a", CPU=5, GPU=1))):
        config = load_run_config(preset)
        settings = engine_settings(config)
        roomy = replace(node, resources=node.resources | {"memory": 1e12})
        topology = plan_topology(cluster_spec(config, settings, FACTS, [roomy]), FACTS, [roomy])
        assert places_of(topology) == {"lead": "a", "store-0": "a"}
        assert topology.groups[0].bundles[0]["CPU"] == settings.threads


def test_replicas_count_every_width() -> None:
    config = load_run_config(None, {"policy": "context-ndp-3bit", "device": "cpu", "threads": 1})
    spec = cluster_spec(config, engine_settings(config), FACTS, [])
    assert spec.ndp is not None
    assert spec.ndp.widths == (1, 2, 3, 4)
    # 48 weights of 10 bits in all, and for each width 12 groups of 4 bytes
    assert spec.ndp.replica_bytes == 48 * 10 // 8 + 4 * 12 * 4
    assert replica_bytes(replace(FACTS, gates=1), 4, 64) == (24 + 48) * 2 // 3


def test_nodes_as_ray_reports_them() -> None:
    record = {
        "NodeID": "b", "Alive": True, "NodeManagerAddress": "10.0.0.2", "NodeName": "x",
        "Resources": {"CPU": 4.0, "node:10.0.0.2": 1.0, "accelerator_type:H100": 1.0, "ndp": 1.0, "memory": 5e9},
        "Labels": {NODE_ID_LABEL: "b"},
    }  # fmt: skip
    other = record | {"NodeID": "a", "Alive": False, "Labels": None}
    assert nodes_from_ray([record, other]) == [
        NodeInfo("a", "10.0.0.2", False, {"CPU": 4.0, "ndp": 1.0, "memory": 5e9}, {}),
        NodeInfo("b", "10.0.0.2", True, {"CPU": 4.0, "ndp": 1.0, "memory": 5e9}, {NODE_ID_LABEL: "b"}),
    ]


def test_nodes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text("nodes:\n  - {id: a, address: 10.0.0.1, resources: {CPU: 4, memory: 200GB, ndp: 0.5}}\n")
    assert nodes_from_file(path) == [
        NodeInfo("a", "10.0.0.1", True, {"CPU": 4.0, "memory": 200e9, "ndp": 0.5}, {})
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nodes: []", "nodes"),
        ("nodes:\n  - {id: a}", r"nodes.0.address' is missing"),
        ("nodes:\n  - {id: a, address: b, resources: {CPU: 4GB}}", "valid number"),
        ("nodes:\n  - {id: a, address: b, resources: {CPU: -1}}", "greater than or equal to 0"),
        ("nodes:\n  - {id: a, address: b, resources: {memory: lots}}", "byte"),
        ("nodes:\n  - {id: a, address: b, gpus: 1}", "unknown key"),
    ],
)
def test_a_malformed_nodes_file(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        nodes_from_file(path)
