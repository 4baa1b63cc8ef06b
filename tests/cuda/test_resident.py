"""Residency on the device on a GPU: the values of the host's path, as plain launches and as a replayed graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import Forbidden

pytest.importorskip("triton")

from tiermoe.actors.engine.cache.slots import LayerWeights, SlotPool
from tiermoe.actors.engine.cuda.resident import DeviceResidency
from tiermoe.actors.engine.cuda.runtime import runtime_of
from tiermoe.actors.store.format import ExpertShape
from tiermoe.kernels.expert_ffn import Operands
from tiermoe.kernels.triton.expert_ffn import TritonKernel

LAYERS, EXPERTS, SLOTS, TOP_K = 3, 16, 8, 4
SHAPE = ExpertShape(num_experts=EXPERTS, hidden=512, intermediate=384, gates=2, has_bias=False)


@pytest.fixture
def weights(gpu: torch.device) -> list[LayerWeights]:
    generator = torch.Generator().manual_seed(0)
    return [
        LayerWeights(tuple(
            torch.randn(s, generator=generator).mul_(0.05).bfloat16().pin_memory() for s in SHAPE.stacked().values()
        ))
        for _ in range(LAYERS)
    ]  # fmt: skip


def test_a_replayed_graph_gives_the_values_of_the_hosts_path(
    gpu: torch.device, weights: list[LayerWeights], forbid_waits: Any
) -> None:
    """One graph of all layers; between replays experts come into slots, and their values stay."""
    pool = SlotPool.allocate(SHAPE, SLOTS, torch.bfloat16, gpu)
    residency = DeviceResidency(runtime_of(gpu), pool, weights, "silu", TOP_K)
    whole = [[t.to(gpu) for t in layer.tensors] for layer in weights]
    hidden = torch.randn(LAYERS, 1, SHAPE.hidden, device=gpu).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, device=gpu)[:TOP_K] for _ in range(LAYERS)])[:, None]
    shares = torch.rand(LAYERS, 1, TOP_K, device=gpu)
    outs = [torch.empty(TOP_K, SHAPE.hidden, device=gpu, dtype=torch.bfloat16) for _ in range(LAYERS)]

    def step() -> None:
        residency.kernels.begin()
        for layer in range(LAYERS):
            outs[layer].copy_(residency.kernels.run(layer, hidden[layer], ids[layer], shares[layer]))

    def check() -> None:
        torch.cuda.synchronize(gpu)
        for layer, (gate_up, down) in enumerate(whole):
            kernel = TritonKernel(Operands(gate_up, down, None, None), "silu", Forbidden())
            neurons = SHAPE.intermediate
            groups = [(k, k + 1, e * neurons, neurons, False) for k, e in enumerate(ids[layer].flatten().tolist())]
            expected = torch.empty_like(outs[layer])
            kernel.run(hidden[layer], torch.arange(TOP_K, device=gpu), groups, TOP_K, expected)
            assert torch.equal(outs[layer], expected)
            outs[layer].fill_(float("nan"))

    step()  # compiled; every expert is read from host memory
    check()
    stream = torch.cuda.Stream(gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    for slot in range(SLOTS):
        layer, k = slot % LAYERS, slot // LAYERS % TOP_K
        residency.load(layer * EXPERTS + int(ids[layer, 0, k]), slot)
        graph.replay()
        check()
        hidden.normal_()
    found = list(residency.routed(1 + SLOTS))
    assert len(found) == (1 + SLOTS) * LAYERS
    assert [one.misses for one in found[:LAYERS]] == [TOP_K] * LAYERS
    assert sum(one.misses for one in found[-LAYERS:]) < LAYERS * TOP_K
    with forbid_waits():
        graph.replay()
    check()
