"""`tiermoe plan`: the nodes and sizes it plans from, what it prints, what it refuses, and that it starts nothing."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from safetensors.numpy import save_file
from topology_cases import FACTS, MIXTRAL, NODES, SPEC, a_node, places_of

import tiermoe
from tiermoe.actors.settings import KvSettings
from tiermoe.actors.store.format import MANIFEST_NAME, Manifest
from tiermoe.cluster.config import engine_settings, load_run_config
from tiermoe.cluster.jobs.plan import model_facts
from tiermoe.cluster.report.tables import size
from tiermoe.cluster.topology.estimate import Hardware, copy_times, links_of
from tiermoe.cluster.topology.inputs import facts_of_checkpoint, nodes_from_file, nodes_from_ray
from tiermoe.cluster.topology.planner import plan_topology
from tiermoe.cluster.topology.spec import NODE_ID_LABEL, NodeInfo, cluster_spec
from tiermoe.errors import ConfigError
from tiermoe.kernels.pack import PackedShape


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
    assert copy_times(topology, spec, FACTS, links_of(config, True, here=False), KvSettings()).one_s > 0


def test_today_s_presets_plan_as_deploy_places_them() -> None:
    for preset, node in (("laptop", a_node("a", CPU=64)), ("one-gpu", a_node("a", CPU=5, GPU=1))):
        config = load_run_config(preset)
        settings = engine_settings(config)
        roomy = replace(node, resources=node.resources | {"memory": 1e12})
        topology = plan_topology(cluster_spec(config, settings, FACTS, [roomy]), FACTS, [roomy])
        assert places_of(topology) == {"lead": "a", "store-0": "a"}
        assert topology.groups[0].bundles[0]["CPU"] == settings.threads
        near = replace(roomy, resources=roomy.resources | {"CPU": 64.0, "ndp": 1.0})
        started = {} if preset == "one-gpu" else {"ndp-0": "a", "directory": "a"}  # by auto, but beside a GPU
        joined = load_run_config(preset, {"ray": {"address": "head:6379"}})
        topology = plan_topology(cluster_spec(joined, engine_settings(joined), FACTS, [near]), FACTS, [near])
        assert places_of(topology) == {"lead": "a", "store-0": "a"} | started


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
    assert nodes_from_file(path) == [NodeInfo("a", "10.0.0.1", True, {"CPU": 4.0, "memory": 200e9, "ndp": 0.5}, {})]


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


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint of which only config.json is there."""
    folder = tmp_path / "mixtral"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MIXTRAL))
    return folder


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    path = tmp_path / "nodes.yaml"
    path.write_text(NODES)
    return path


def test_json_of_a_cluster_from_a_file(command: Command, model: Path, nodes: Path) -> None:
    record = command.json("plan", "--config", "multi-node", "--model", model, "--nodes", nodes)
    placed = [(actor["name"], actor["node"]) for actor in record["topology"]["actors"]]
    assert placed == [("lead", "g"), ("shard-1", "h"), ("store-0", "m"), ("ndp-0", "m"), ("directory", "g")]
    assert record["prediction"]["label"] == "predicted"
    assert record["prediction"]["hardware"]["name"] == "H100-class, assumed"
    assert record["nodes_from"] == f"file {nodes}"
    assert record["model"]["expert_bytes"] == 3 * 8 * 16 * 2
    # nodes without Ray's label cannot be bound, so nothing pretends to
    assert record["topology"]["groups"][0]["selectors"] == [{}, {}]
    assert record["notes"][-1].startswith("dense bytes are computed from config.json")


def test_no_speed_is_predicted_and_copies_have_a_bound(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said "4.6e+02 tokens/s (rough)" where 33 to 87 were measured. Text, JSON and Python agree."""
    monkeypatch.setenv("COLUMNS", "200")
    options = ("--device", "cpu", "--policy", "on-demand", "--budget", "25%")
    said, found = command("plan", *options)[1], command.json("plan", *options)["prediction"]
    assert tiermoe.plan(device="cpu", policy="on-demand", budget="25%")["prediction"] == found
    assert (found["label"], found["tokens_per_s"]) == ("predicted", None)
    slot = 3 * 256 * 64 * 4
    assert found["copy_bytes"] == slot
    assert found["copy_s_least"] == pytest.approx(10e-6 + slot / 16e9)  # of the emulated link
    assert found["token_copies_s_least"] == pytest.approx(16 * 4 * found["copy_s_least"])
    assert (found["prompt_tokens"], found["prompt_rows"]) == (8192, 512)
    assert found["prompt_copy_bytes"] == 16 * 24 * 16 * slot  # 16 passes, three quarters of 32 experts, 16 layers
    assert found["prompt_copies_s_least"] == pytest.approx(16 * 24 * 16 * found["copy_s_least"])
    assert found["hardware"]["name"] == "CPU stand-in, as configured"
    rows = {line.partition(" ")[0]: " ".join(line.split()) for line in said.splitlines()}
    assert rows["tokens/s"] == f"tokens/s {found['not_predicted']}"
    assert rows["copies"] == (
        "copies 192.00 KiB each, at least 22 us over these links; at least 1.4 ms for a token whose experts are all "
        "copied"
    )
    assert not re.search(r"\de[+-]\d", said)  # plain numbers


def test_each_gpu_copies_its_part_of_a_token() -> None:
    """Of 2 experts each of 2 GPUs copies at least 1; a layer that another node holds comes over the network."""
    spec, nodes = replace(SPEC, shards=2), [a_node("a", CPU=9, GPU=2)]
    hardware = Hardware("any", link_gbps=1, link_latency_us=0)
    times = [copy_times(plan_topology(of, FACTS, nodes), of, FACTS, hardware, KvSettings()) for of in (SPEC, spec)]
    assert [of.token_s / of.one_s for of in times] == [FACTS.layers * 2, FACTS.layers]


def test_this_machine_as_a_local_ray_would_have_it(command: Command) -> None:
    """The default model, which is there with its weights: exact sizes."""
    record = command.json("plan", "--config", "laptop", "--policy", "context-ndp-2bit")
    assert [actor["name"] for actor in record["topology"]["actors"]] == ["lead", "store-0", "ndp-0", "directory"]
    assert record["nodes_from"].startswith("this machine")
    assert record["model"]["dense_estimated"] is False
    assert record["spec"]["slot_bytes"] == 3 * 256 * 64 * 4


def test_options_override_the_file(command: Command, model: Path) -> None:
    record = command.json("plan", "--model", model, "--device", "cpu", "--budget", "2304B", "--policy", "on-demand")
    assert record["spec"]["budget_bytes"] == 2304
    assert record["topology"]["actors"][0]["nbytes"]["slots"] == 1536  # one whole slot
    assert record["spec"]["policy"] == "on-demand"


def test_replicas_of_a_low_bit_policy_are_counted_and_shown(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default model: 16 layers of 32 experts, hidden 256, 64 neurons."""
    monkeypatch.setenv("COLUMNS", "250")
    args = ("--device", "cpu", "--policy", "hobbit")
    record, plain = command.json("plan", *args), command.json("plan", "--device", "cpu", "--policy", "next-gate")
    model, replicas = record["model"], record["topology"]["actors"][0]["nbytes"]["replicas"]
    assert replicas == model["layers"] * model["experts"] * PackedShape(256, 64, 4, 64).nbytes()
    (load,), (without,) = record["topology"]["loads"], plain["topology"]["loads"]
    assert load["kinds"]["replicas"] == replicas
    assert load["host_bytes"] - load["device_bytes"] == without["host_bytes"] - without["device_bytes"] + replicas
    code, out, _ = command("plan", *args)
    assert code == 0
    assert "slots for replicas" in out
    assert "25% of it for replicas of 27.00 KiB, the rest for experts in full of 192.00 KiB" in out
    assert f"{size(replicas)} replicas" in out


# sizes of a model


def test_facts_from_the_headers_of_the_weights(model: Path) -> None:
    import numpy as np

    tensors = {
        "model.embed_tokens.weight": np.zeros((10, 8), np.float16),
        "model.layers.0.mlp.experts.0.gate_proj.weight": np.zeros((16, 8), np.float16),
        "model.layers.0.mlp.shared_experts.up_proj.weight": np.zeros((3, 8), np.float16),
    }
    save_file(tensors, model / "model.safetensors")
    facts = facts_of_checkpoint(model)
    assert facts.dense_elements == 80 + 24
    assert not facts.dense_estimated
    # a part of a split checkpoint is not taken for all of it
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert facts_of_checkpoint(model).dense_estimated


_MIXTRAL = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
_QWEN3 = {
    "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
    "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
_DEEPSEEK = {
    "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "published"),
    [(_MIXTRAL, 46.70e9), (_QWEN3, 30.53e9), (_DEEPSEEK, 15.71e9)],
    ids=["Mixtral-8x7B", "Qwen3-30B-A3B", "DeepSeek-V2-Lite"],
)
def test_sizes_add_up_to_the_published_number_of_parameters(
    model: Path, fields: dict[str, Any], published: float
) -> None:
    (model / "config.json").write_text(json.dumps(fields))
    facts = facts_of_checkpoint(model)
    total = facts.layers * facts.experts * facts.expert_elements + facts.dense_elements
    assert total == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"first_k_dense_replace": 1}, 3),
        ({"decoder_sparse_step": 2}, 2),
        ({"mlp_only_layers": [0, 3]}, 2),
        ({"interleave_moe_layer_step": 2}, 2),
        ({"moe_layer_freq": 1}, 4),
    ],
)
def test_moe_layers_are_counted_by_the_configuration(model: Path, fields: dict[str, Any], layers: int) -> None:
    latent = {"kv_lora_rank": 2, "qk_nope_head_dim": 3, "qk_rope_head_dim": 1, "v_head_dim": 5}
    (model / "config.json").write_text(json.dumps(MIXTRAL | fields | latent))
    facts = facts_of_checkpoint(model)
    assert facts.layers == layers
    assert facts.kv_elements == 4 * 2 * (3 + 1 + 5)  # latent attention is cached expanded


def test_facts_of_a_store_are_its_manifests(model: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    record: dict[str, Any] = {"nbytes": 1, "sha256": "0" * 64}
    manifest = Manifest.model_validate_json(json.dumps({
        "format_version": 1, "model": "m", "architecture": "A", "dtype": "float32", "transformers_version": "5",
        "experts": {"num_experts": 8, "hidden": 8, "intermediate": 16, "gates": 1, "has_bias": True},
        "layers": [record | {"file": f"l{i}", "index": i, "module": f"m{i}"} for i in range(3)],
        "dense": {"file": "d", "nbytes": 4000, "sha256": "0" * 64, "tied": []}, "extras": [], "source": [],
    }))  # fmt: skip
    (store / MANIFEST_NAME).write_bytes(manifest.encode())
    facts = model_facts(load_run_config(None, {"model": str(model), "store": str(store)}))
    assert (facts.name, facts.layers, facts.experts, facts.gates, facts.item_bytes) == ("m", 3, 8, 1, 4)
    assert facts.expert_elements == 2 * 8 * 16 + 16 + 8
    assert (facts.dense_elements, facts.dense_estimated, facts.top_k) == (1000, False, 2)
    later = load_run_config(None, {"model": str(model), "store": str(tmp_path / "later")})  # not there yet
    assert model_facts(later).source == "config.json"
