"""`budget: auto`: its arithmetic, what it asks of devices and of this machine, what is refused with what numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from control_groups import make_groups
from fake_gpu import FakeGpu
from serving import settings
from tiny_models import tiny_config
from topology_cases import FACTS
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tiermoe import LLM, limits
from tiermoe.actors.budget import (
    MARGIN_BYTES,
    MARGIN_SHARE,
    AutoBudget,
    Budget,
    ModelSizes,
    activation_bytes,
    graph_bytes,
    in_words,
    most_recordings,
)
from tiermoe.actors.engine.cache.device import CpuDevice, settle_budget
from tiermoe.actors.engine.cuda.device import CudaDevice
from tiermoe.actors.gpu_driver import gpus_free_bytes
from tiermoe.actors.settings import LinkSettings
from tiermoe.cluster import config as configs
from tiermoe.cluster.cli import app
from tiermoe.cluster.config import engine_settings, load_run_config
from tiermoe.cluster.jobs.local_worker import run_config
from tiermoe.cluster.topology import inputs
from tiermoe.cluster.topology.decided import decided
from tiermoe.cluster.topology.estimate import make_plans
from tiermoe.cluster.topology.spec import NodeInfo, cluster_spec
from tiermoe.errors import BudgetError, ConfigError

GIB, MIB = 1 << 30, 1 << 20
TERMS = AutoBudget(dense=GIB, kv=512 * MIB, activations=256 * MIB, slot=8 * MIB, most=64 * GIB, chunk=512, tokens=8192)


def margin(free: int) -> int:
    return MARGIN_BYTES + int(MARGIN_SHARE * free)


def test_what_is_left_is_for_experts() -> None:
    found = TERMS.measured(10 * GIB)
    left = 10 * GIB - GIB - 768 * MIB - margin(10 * GIB)
    assert found.terms == {
        "free": 10 * GIB, "dense": GIB, "kv": 512 * MIB, "states": 0, "activations": 256 * MIB, "graphs": 0,
        "mapped": 0, "processes": 0, "margin": margin(10 * GIB), "experts": left,
    }  # fmt: skip
    assert Budget(auto=found).bytes_of(8 * MIB, 1 << 20) == left
    assert sum(found.terms.values()) == 2 * 10 * GIB
    assert TERMS.measured(200 * GIB).nbytes == 64 * GIB  # all experts
    shard = TERMS.measured(10 * GIB, lead=False)  # has neither dense weights nor a KV cache
    assert shard.nbytes == left + GIB + 512 * MIB
    shared = TERMS.model_copy(update={"free": 40 * GIB, "final": True, "leads": 2, "devices": 4, "mapped": GIB})
    assert shared.nbytes == (40 * GIB - 2 * (GIB + 768 * MIB) - GIB - margin(40 * GIB)) // 4
    assert shared.measured(1) == shared  # the driver has divided it


def test_too_little_is_refused_with_every_term() -> None:
    with pytest.raises(BudgetError) as found:
        _ = TERMS.measured(2 * GIB).nbytes
    said = found.value.what
    for part in (
        "2.00 GiB free", "1.00 GiB dense weights", "512.00 MiB KV cache of 8192 tokens",
        "256.00 MiB activations of 512 tokens at once", "margin leave nothing", "one takes 8.00 MiB",
    ):  # fmt: skip
        assert part in said
    for of in (TERMS, TERMS.model_copy(update={"devices": 3, "least": 100 * MIB})):
        with pytest.raises(BudgetError, match=r"which \d+B more of free memory") as found:
            _ = of.measured(2 * GIB).nbytes
        more = int(str(found.value).partition("which ")[2].partition("B more")[0])  # was less by the margin's share
        assert of.measured(2 * GIB + more).nbytes >= max(of.slot, of.least)
        with pytest.raises(BudgetError):
            _ = of.measured(2 * GIB + more - MIB).nbytes
    assert "--kv-tokens" in found.value.remedy
    with pytest.raises(ConfigError, match=r"free memory, which is not known here.*cluster\.gpu_memory"):
        _ = AutoBudget().nbytes


def test_other_processes_of_a_gpu_count() -> None:
    gpu = FakeGpu()
    gpu.memory, gpu.others = 24 * GIB, 9 * GIB
    device = CudaDevice(gpu)
    config = settings(TERMS.model_copy(update={"free": 24 * GIB}))  # what the driver assumed
    settled = settle_budget(config, device)
    auto = settled.budget.auto
    assert auto is not None
    assert auto.terms["free"] == 15 * GIB
    assert auto.nbytes == 15 * GIB - GIB - 768 * MIB - margin(15 * GIB)
    gpu.buffer(3 * MIB)
    gpu.pinned(MIB)  # of the host
    assert device.free_bytes() == 15 * GIB - 3 * MIB
    gpu.others = 23 * GIB
    with pytest.raises(BudgetError, match=r"1020\.99 MiB free|1021\.00 MiB free"):
        settle_budget(config, device)
    assert settle_budget(settings(0.5), device) == settings(0.5)


def test_the_control_group_bounds_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that was read is no use of memory. No memory left is not memory that is not known."""
    device = CpuDevice(LinkSettings(gbps=None))
    for used, cached, free in ((5, 0, 1000), (2005, 0, 0), (2005, 1600, 600)):
        make_groups(tmp_path, "v2", "own", memory=1005, used=used, cached=cached)
        monkeypatch.setattr(limits, "_ROOT", tmp_path)
        assert limits.host_free_bytes() == device.free_bytes() == free
        assert inputs.this_machine(inputs.LocalRay(1, {}))[0].amount("memory") == max(1, free)


@pytest.mark.parametrize(
    ("model", "state", "paged"),
    [
        ("qwen3_moe", 0, True),
        ("deepseek_v2", 0, False),  # latents
        # one layer of two, four heads of 8 x 8, and the last four tokens' inputs of its convolution
        ("qwen3_next", 4 * 1 * (4 * 8 * 8 + 4 * (2 * 2 * 8 + 4 * 8)), False),
        ("nemotron_h", 4 * 1 * (4 * 16 * 8 + 4 * (4 * 16 + 2 * 2 * 8)), False),
        ("jamba", 4 * 4 * (2 * 32 * 8 + 4 * 2 * 32), False),  # its configuration does not name its layers
        ("lfm2_moe", 4 * 2 * 3 * 32, False),
    ],
)
def test_running_states_count(model: str, state: int, paged: bool, tmp_path: Path) -> None:
    """Those of as many requests as may run; on the stand-in checkpoints too, which are in host memory."""
    tiny_config(model).save_pretrained(tmp_path)
    facts = inputs.facts_of_checkpoint(tmp_path)
    assert (facts.state_bytes, facts.paged) == (state, paged)
    cache = AutoModelForCausalLM.from_config(tiny_config(model))(torch.tensor([[1, 2]]), use_cache=True).past_key_values
    parts = [getattr(layer, name, {}) for layer in cache.layers for name in ("conv_states", "recurrent_states")]
    assert sum(one.nbytes for part in parts for one in part.values() if one is not None) <= state
    kv = {"max_num_seqs": 16, "checkpoint_mib": 3}
    for device, node in (("cpu", {"memory": 64.0 * GIB}), ("cuda", {"GPU": 1.0})):
        config = load_run_config(None, {"budget": "auto", "device": device, "threads": 1, "kv": kv})
        config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"gpu_memory": 64 * GIB})})
        nodes = [NodeInfo("a", "a", True, {"CPU": 8, **node})]
        found, _ = decided(config, engine_settings(config), facts, nodes, here=False)
        assert found.budget.auto is not None
        kept = 3 * MIB if device == "cpu" and not paged else 0
        assert found.budget.auto.terms["states"] == 16 * state + kept


def test_the_stand_in_shares_host_memory_with_the_run() -> None:
    config = load_run_config(None, {"budget": "auto", "device": "cpu", "threads": 1, "cluster": {"shards": 2}})
    nodes = [NodeInfo(name, name, True, {"CPU": 8, "memory": free * GIB}) for name, free in (("a", 64.0), ("b", 8.0))]
    found, _ = decided(config, engine_settings(config), FACTS, nodes, here=False)
    auto = found.budget.auto
    assert auto is not None
    terms = auto.terms
    assert (terms["free"], terms["mapped"]) == (8 * GIB, FACTS.all_bytes)
    assert terms["processes"] == 4 * 512 * MIB + GIB  # two workers, a store, the driver; Ray
    assert auto.devices == 2
    assert auto.nbytes == auto.most == 4 * 8 * FACTS.expert_elements * 4  # all fit, in float32
    spec = cluster_spec(config, found, FACTS, nodes)
    assert (spec.budget_bytes, spec.auto) == (auto.nbytes, auto.in_terms)


def test_a_gpu_of_another_machine_needs_its_size() -> None:
    nodes = [NodeInfo("a", "1", True, {"CPU": 8, "GPU": 1})]
    config = load_run_config(None, {"budget": "auto", "threads": 1})
    with pytest.raises(ConfigError, match="not known here"):
        decided(config, engine_settings(config), FACTS, nodes, here=False)
    config = load_run_config(None, {"budget": "auto", "threads": 1, "cluster": {"gpu_memory": "1GiB"}})
    found = decided(config, engine_settings(config), FACTS, nodes, here=False)[0].budget.auto
    assert found is not None
    assert not found.final  # the worker asks its own
    assert in_words(found.terms, found.chunk, found.tokens).startswith("1.00 GiB free less ")


def test_nvidia_smi_says_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus_free_bytes({}) == ()  # no such program
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\ncase "$*" in *--id=1*) echo 8000;; *) echo 4096; echo 8000;; esac\n')
    program.chmod(0o755)
    assert gpus_free_bytes({}) == (4096 * MIB - 512 * MIB, 8000 * MIB - 512 * MIB)
    assert gpus_free_bytes({"CUDA_VISIBLE_DEVICES": "1"}) == (8000 * MIB - 512 * MIB,)
    assert gpus_free_bytes({"CUDA_VISIBLE_DEVICES": ""}) == ()
    both, one = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, {"CUDA_VISIBLE_DEVICES": "1"}
    assert gpus_free_bytes(both) == ()  # CUDA's GPU 0 may be nvidia-smi's GPU 1
    assert len(gpus_free_bytes({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})) == 2
    assert len(gpus_free_bytes(both | one)) == 1
    program.write_text("#!/bin/sh\necho 'No devices were found'\nexit 6\n")
    assert gpus_free_bytes({}) == ()
    program.write_text("#!/bin/sh\necho '[N/A]'\n")
    assert gpus_free_bytes({}) == ()


def test_it_is_the_default_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_settings(load_run_config(None, {"emulate": True})).budget == Budget(share=0.25)
    monkeypatch.setattr(configs, "has_gpu", lambda: True)
    monkeypatch.setattr(configs, "gpus_free_bytes", lambda: (GIB,))
    assert engine_settings(load_run_config(None, {"threads": 1})).budget == Budget(auto=AutoBudget())
    assert engine_settings(load_run_config(None, {"threads": 1, "budget": "6GiB"})).budget == Budget(nbytes=6 * GIB)
    assert engine_settings(load_run_config(None, {"emulate": True})).budget == Budget(share=0.25)
    assert engine_settings(load_run_config(None, {"device": "cpu"})).budget == Budget(mapped=True)
    assert engine_settings(run_config(None)).budget == Budget(share=0.25)  # of benchmarks: comparable between devices
    monkeypatch.setattr(configs, "gpus_free_bytes", lambda: ())
    assert engine_settings(load_run_config(None, {"threads": 1})).budget == Budget(share=0.25)
    with pytest.raises(BudgetError, match=r"'much'.*or auto$"):
        engine_settings(load_run_config(None, {"budget": "much"}))


def test_the_plan_prints_each_term(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "host_free_bytes", lambda: 20 * GIB)
    said = CliRunner().invoke(app, ["plan", "--budget", "auto", "--device", "cpu"])
    assert said.exit_code == 0, said.output
    (row,) = [line for line in said.output.splitlines() if line.startswith("budget auto")]
    for part in (
        "20.00 GiB free less ", "dense weights", "64.00 MiB KV cache of 8192 tokens", "MiB activations of 512 tokens",
        "MiB mapped experts", "GiB processes", "1.50 GiB margin leave 96.00 MiB for experts",
    ):  # fmt: skip
        assert part in row


def test_too_little_is_refused_before_ray_starts(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard of unit tests against Ray fails, where it is not."""
    monkeypatch.setattr(inputs, "host_free_bytes", lambda: 3 * GIB)
    llm = LLM(str(checkpoint), budget="auto", device="cpu", threads=1, cache_dir=str(tmp_path))
    with pytest.raises(BudgetError, match=r"^budget auto: 3\.00 GiB free less .* processes.*leave nothing for experts"):
        llm.start()


@pytest.mark.parametrize("attention", ["auto", "eager", "triton"])
def test_activations_grow_with_what_they_are_of(attention: str) -> None:
    sizes = ModelSizes(2048, 32, 128, 151_936, 6144, 1024, 8, 768, 3 * 2048 * 768)
    of = activation_bytes(sizes, 512, 8192, 64, 2, attention)
    assert activation_bytes(sizes, 1024, 8192, 64, 2, attention) > 1.4 * of
    assert activation_bytes(sizes, 512, 8192, 64, 4, attention) > 1.2 * of
    assert (activation_bytes(sizes, 512, 1 << 16, 64, 2, attention) > of) == (attention != "triton")


def test_recorded_decode_steps_are_a_term_on_a_gpu() -> None:
    """Once they were in none: on a card of 24 GB the margin did not hold them."""
    sizes = ModelSizes(
        hidden=2048, heads=32, head_size=128, vocabulary=152_000, mlp=6144, kv=1024, top_k=8, intermediate=768,
        expert=3 * 768 * 2048,
    )  # fmt: skip
    for seqs, tokens, count in ((1, 512, 1), (1, 8192, 5), (2, 8192, 10), (64, 8192, 24), (16, 600, 24)):
        assert most_recordings(seqs, tokens) == count
        logits = min(seqs, 16) * 152_000 * 2
        assert graph_bytes(sizes, 48, seqs, tokens, 2) == count * (49 * 384 * 1024 + logits)
    with_graphs = TERMS.model_copy(update={"graphs": 300 * MIB})
    assert with_graphs.measured(10 * GIB).nbytes == TERMS.measured(10 * GIB).nbytes - 300 * MIB
    assert with_graphs.measured(10 * GIB, lead=False) == TERMS.measured(10 * GIB, lead=False)  # a shard has none
    assert "300.00 MiB decode graphs" in in_words(with_graphs.measured(10 * GIB).terms, 512, 8192)
    gpu = {"cluster": {"gpu_memory": "20GiB"}, "threads": 1, "budget": "auto", "device": "cuda"}
    for given, has in (
        ({}, True), ({"compile": "off"}, False), ({"attention": "sdpa"}, False), ({"compile": "graphs"}, True),
        ({"kv": {"batching": "serial"}}, False),
    ):  # fmt: skip
        config = load_run_config(None, gpu | given)
        nodes = [NodeInfo("a", "1", True, {"CPU": 8, "GPU": 1})]
        auto = decided(config, engine_settings(config), FACTS, nodes, here=False)[0].budget.auto
        assert auto is not None
        assert (auto.terms["graphs"] > 0) == has


def test_activations_of_the_stand_in_are_an_upper_estimate() -> None:
    """One layer of attention with gathered, repeated keys, as transformers' paged sdpa makes it, and its tensors."""
    sizes = ModelSizes(256, 8, 32, 4096, 512, 128, 4, 64, 3 * 256 * 64)
    rows, tokens = 128, 1024
    keys = torch.zeros(tokens + rows, 2, 2, 32)  # [K, keys and values, heads of them, D]
    repeated = keys.repeat_interleave(4, dim=2)
    mask = torch.zeros(rows, tokens + rows)
    made = sum(t.nbytes for t in (keys, repeated, mask, torch.zeros(4, rows, 256), torch.zeros(rows, 4096)))
    assert made < activation_bytes(sizes, rows, tokens, 8, 4, "sdpa") < 4 * made


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ({}, 512),  # all experts fit
        ({"cluster": {"gpu_memory": "12GiB"}}, 8192),
        ({"cluster": {"gpu_memory": "6GiB"}}, 4096),
        ({"cluster": {"gpu_memory": "3GiB"}}, 1024),
        ({"cluster": {"gpu_memory": "12GiB"}, "kv": {"tokens": 2048}}, 2048),  # no prompt is longer
        ({"cluster": {"gpu_memory": "12GiB"}, "kv": {"max_batch_tokens": 512}}, 512),  # given
        ({"cluster": {"gpu_memory": "12GiB"}, "budget": "25%"}, 8192),  # beside what was given for experts
        ({"cluster": {"gpu_memory": "12GiB"}, "budget": "10.3GiB"}, 2048),
        ({"cluster": {"gpu_memory": "12GiB", "shards": 2}}, 4096),  # 8192 rows are more than a message holds
        ({"cluster": {"gpu_memory": None}, "budget": "25%"}, 512),  # nobody knows what is free
        ({"device": "cpu"}, 512),
    ],
)
def test_prompts_on_a_gpu_go_in_chunks_that_its_memory_holds(given: dict[str, Any], rows: int) -> None:
    """Once in chunks of 512: a prompt of 8192 tokens copied nearly all absent experts sixteen times."""
    facts = replace(
        FACTS, layers=24, experts=64, hidden=2048, intermediate=1408, vocabulary=32_000, expert_elements=3 * 2048 * 1408
    )
    base = {"budget": "auto", "threads": 1, "device": "cuda", "cluster": {"gpu_memory": "80GiB"}}
    config = load_run_config(None, base | given)
    nodes = [NodeInfo("a", "1", True, {"CPU": 8, "GPU": 2, "memory": 64.0 * GIB})]
    found = decided(config, engine_settings(config), facts, nodes, here=False)[0]
    assert found.kv.max_batch_tokens == rows
    if found.budget.auto is not None:
        assert found.budget.auto.chunk == rows


# 4096 experts of 16 MiB each: 64 GiB in all
LARGE = replace(FACTS, layers=64, experts=64, hidden=2048, intermediate=1365, expert_elements=8 * MIB)


@pytest.mark.parametrize(
    ("given", "node", "host_gib"),
    [
        ({}, {"memory": 80.0 * GIB}, None),  # the store fits
        ({}, {"memory": 40.0 * GIB}, 40 * 0.95 - 0.5 - 1 - 1.5), ({}, {}, None), ({}, {"memory": 3.0 * GIB}, None),
        ({"cluster": {"replicas": 2}}, {"memory": 40.0 * GIB}, (40 * 0.95 - 0.5 - 1 - 2.5) / 2),
        ({"emulate": True, "policy": "on-demand", "budget": "8GiB"}, {"memory": 80.0 * GIB}, 80 * 0.95 - 3 - 8),
        ({"emulate": True, "policy": "on-demand", "budget": "8GiB"}, {"memory": 40.0 * GIB}, 40 * 0.95 - 3 - 8),
        # two processes, each with slots and host memory of its own
        (
            {"policy": "on-demand", "budget": "8GiB", "cluster": {"shards": 2}}, {"memory": 40.0 * GIB},
            (40 * 0.95 - 3.5 - 16) / 2,
        ),
        (
            {"policy": "on-demand", "budget": "8GiB", "cluster": {"shards": 2}}, {"memory": 40.0 * GIB, "GPU": 2.0},
            (40 * 0.95 - 3.5) / 2,
        ),
        ({"policy": "moepic", "budget": "8GiB"}, {"memory": 40.0 * GIB}, 40 * 0.95 - 3 - 8),  # loads parts of experts
        # with the replicas that the lead, or an NDP worker, maps
        ({"policy": "hobbit", "budget": "4GiB"}, {"memory": 44.0 * GIB}, 44 * 0.95 - 3 - 4 - 18.3),
        (
            {"policy": "context-ndp-uniform", "budget": "8GiB"}, {"memory": 44.0 * GIB, "ndp": 1.0},
            44 * 0.95 - 3.5 - 8 - 14.02,
        ),
        ({"policy": "on-demand", "budget": "8GiB"}, {"memory": 40.0 * GIB, "GPU": 1.0}, 40 * 0.95 - 3),
        # NDP workers would map the store: those of auto are left out
        ({"policy": "auto", "budget": "8GiB"}, {"memory": 40.0 * GIB, "ndp": 1.0}, 40 * 0.95 - 3.5 - 8),
        ({"policy": "auto", "budget": "8GiB"}, {"memory": 90.0 * GIB, "ndp": 1.0}, None),
        ({"policy": "context-ndp-full", "budget": "8GiB"}, {"memory": 90.0 * GIB, "ndp": 1.0}, None),
        ({"policy": "on-demand", "budget": "8GiB", "cluster": {"replicas": 2}}, {"memory": 90.0 * GIB}, None),
    ],
)  # fmt: skip
def test_a_store_larger_than_host_memory_is_read_from_the_disk(
    given: dict[str, Any], node: dict[str, float], host_gib: float | None
) -> None:
    """Into what host memory leaves beside processes, Ray, a margin, and on a CPU slots, dense weights and KV cache."""
    config = load_run_config(None, {"threads": 1, **given})
    nodes = [NodeInfo("a", "a", True, {"CPU": 8, **node})]
    settings, why = decided(config, engine_settings(config), LARGE, nodes, here=False)
    said = any("read from the disk, past the page cache" in line for line in why)
    assert said == (host_gib is not None and host_gib < 64)
    if not said:
        assert settings.host_bytes is None
        return
    assert settings.host_bytes == pytest.approx(host_gib * GIB, rel=0.015)
    assert settings.policy.name == (given.get("policy") or "next-gate")
    planned = make_plans(config, settings, LARGE, nodes, "the tests", here=False)[0]
    load, spec = planned.topology.loads[0], planned.spec
    assert load.host_bytes <= node["memory"]  # mapped pages take none
    assert spec.mapped == ("policy" not in given)
    lead = planned.topology.lead.nbytes
    assert (lead.slots if spec.mapped else lead.copied) == pytest.approx(settings.host_bytes, abs=16 * MIB)
    assert all(shard.nbytes.copied == settings.host_bytes for shard in planned.topology.having("shard"))
    assert bool(planned.topology.having("ndp")) == (given.get("policy") == "context-ndp-uniform")
    times = planned.times
    assert times.hardware.name == "NVMe disk, assumed"
    if given.get("policy") != "hobbit":  # a replica is less
        assert (times.nbytes, times.one_s) == (16 * MIB, pytest.approx(16 * MIB / 3e9))
        assert times.token_s == pytest.approx(64 * 2 * times.one_s)  # also of two GPUs, which share the disk
    held = spec.budget_bytes // spec.slot_bytes + (0 if spec.mapped else settings.host_bytes // (16 * MIB))
    forwards = times.prompt_tokens // times.prompt_rows
    assert times.prompt_bytes == (64 * 64 - spec.shards * held) * forwards * times.nbytes


def test_near_data_workers_map_the_store_on_a_node_that_holds_it() -> None:
    """Lead and shard read the disk of theirs."""
    config = load_run_config(None, {"threads": 1, "budget": "8GiB", "policy": "context-ndp-full"})
    nodes = [
        NodeInfo("gpu", "gpu", True, {"CPU": 2, "GPU": 1.0, "memory": 40.0 * GIB}),
        NodeInfo("near", "near", True, {"CPU": 8, "ndp": 1.0, "memory": 90.0 * GIB}),
    ]
    settings, _ = decided(config, engine_settings(config), LARGE, nodes, here=False)
    assert settings.host_bytes == pytest.approx((40 * 0.95 - 3.5) * GIB, rel=0.015)
    topology = make_plans(config, settings, LARGE, nodes, "the tests", here=False)[0].topology
    assert {actor.name: actor.node for actor in topology.having("lead", "ndp")} == {"lead": "gpu", "ndp-0": "near"}
    assert {load.node: load.host_bytes for load in topology.loads} == {
        "gpu": settings.host_bytes, "near": LARGE.all_bytes,
    }  # fmt: skip


@pytest.mark.parametrize(
    "given", [{"policy": "context-ndp-full"}, {"policy": "auto", "cluster": {"ndp_workers": 1}}],
)  # fmt: skip
def test_workers_that_map_the_store_are_refused_where_it_does_not_fit(given: dict[str, Any]) -> None:
    config = load_run_config(None, {"threads": 1, "budget": "8GiB", **given})
    nodes = [NodeInfo("a", "a", True, {"CPU": 8, "memory": 40.0 * GIB, "ndp": 1.0})]
    with pytest.raises(ConfigError, match=r"host memory leaves 26.\d+ GiB for 64.00 GiB") as raised:
        decided(config, engine_settings(config), LARGE, nodes, here=False)
    assert "--host-memory" in raised.value.remedy
