"""The arithmetic of a plan's predicted seconds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from topology_cases import FACTS, NDP, PROFILE, SPEC, a_node

from tiermoe.actors.policies.cost import Work, batch_cost
from tiermoe.cluster.config import HardwareConfig
from tiermoe.cluster.topology.estimate import Hardware, Prediction, predict, resolve_hardware
from tiermoe.cluster.topology.planner import plan_topology
from tiermoe.cluster.topology.spec import NodeInfo

_HARDWARE = Hardware("test", 1e-3, 1e-3, 0.0, 1e-3, 0.0, 0.5)  # a byte a microsecond everywhere


def _predict(nodes: list[NodeInfo], hardware: Hardware = _HARDWARE, **changes: Any) -> Prediction:
    spec = replace(SPEC, **changes)
    return predict(plan_topology(spec, FACTS, nodes), spec, FACTS, hardware)


def test_prediction_without_prefetch() -> None:
    got = _predict([a_node("a", CPU=3, GPU=1)])  # 4 of 32 experts are resident: an eighth
    assert got.hit_share == 0.125
    parts = {"dense_s": 100e-6, "hit_s": 48e-6, "shard_s": 0.0, "miss_s": 336e-6, "load_s": 168e-6}
    assert got.parts_s == pytest.approx(parts)
    assert got.layer_s == pytest.approx((100 + 168 + 336) * 1e-6)
    assert got.tokens_per_s == pytest.approx(1 / (4 * 604e-6))
    assert got.bytes_loaded_per_token == 4 * 1.75 * 96
    assert got.bound_by == "miss"
    assert got.as_dict()["label"] == "predicted"


def test_prefetch_overlaps_the_dense_part() -> None:
    got = _predict([a_node("a", CPU=3, GPU=1)], prefetch=True)
    assert got.layer_s == pytest.approx((max(100, 84) + max(48, 84) + 336) * 1e-6)


def test_two_shards_halve_loads_and_experts() -> None:
    one, two = (_predict([a_node("a", CPU=9, GPU=2)], shards=shards, budget_bytes=192) for shards in (1, 2))
    assert two.hit_share == 2 * one.hit_share
    assert two.parts_s["load_s"] == pytest.approx(one.parts_s["load_s"] / 2 * (1 - 2 / 32) / (1 - 1 / 32))
    assert two.parts_s["shard_s"] == 0.0
    away = _predict(
        [a_node("a", CPU=3, GPU=1), a_node("b", CPU=3, GPU=1)], replace(_HARDWARE, network_latency_us=7.0), shards=2
    )
    assert away.parts_s["shard_s"] == pytest.approx(2 * (7 + 16) * 1e-6)


def test_layers_on_another_node_come_over_the_network() -> None:
    nodes = [a_node("a", CPU=3, GPU=1), a_node("s", CPU=1, store=1)]
    slow = replace(_HARDWARE, network_gbps=0.5e-3, network_latency_us=10.0)
    far, near = _predict(nodes, slow, store_nodes="marked"), _predict(nodes, slow)
    assert far.parts_s["load_s"] == pytest.approx(2 * near.parts_s["load_s"] + 1.75 * 10e-6)


def test_ndp_works_beside_the_gpu() -> None:
    nodes = [a_node("a", CPU=3, GPU=1), a_node("m", CPU=2, ndp=1)]
    got = _predict(nodes, ndp=replace(NDP, hot_per_layer=1))
    profile, row = PROFILE, 16
    ndp_s = batch_cost(profile, [Work(4, 4, rows=1, bits=4, group=64)] * 2, row, row).total_s
    assert got.parts_s["ndp_s"] == pytest.approx(ndp_s + 2 * 16e-6)  # it is on another node
    assert got.layer_s == pytest.approx(100e-6 + max(48e-6, ndp_s + 32e-6))
    assert (got.bytes_loaded_per_token, got.ndp_hardware) == (0.0, "ndp")
    near = _predict([a_node("a", CPU=5, GPU=1, ndp=1)], ndp=replace(NDP, hot_per_layer=1))
    assert near.parts_s["ndp_s"] == ndp_s


def test_hardware_is_named_assumed_until_all_of_it_is_given() -> None:
    gpu = resolve_hardware(HardwareConfig(), True, 16.0, 10.0)
    assert (gpu.name, gpu.memory_gbps, gpu.link_gbps) == ("H100-class, assumed", 3350.0, 55.0)
    stand_in = resolve_hardware(HardwareConfig(), False, 16.0, 10.0)
    assert (stand_in.name, stand_in.link_gbps, stand_in.link_latency_us) == ("CPU stand-in, assumed", 16.0, 10.0)
    given_all = HardwareConfig(memory_gbps=1, link_gbps=2, link_latency_us=0)
    assert resolve_hardware(given_all, True, None, 0.0) == Hardware("as configured", 1, 2, 0, 3.0, 50.0, 0.5)
