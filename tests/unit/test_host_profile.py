"""Where a decode step's host time goes, and what the device is given for it."""

from __future__ import annotations

import pytest
import torch
from moe_stack import HIDDEN, engine_for, make_case

from tiermoe.actors.engine.engine import ExpertEngine
from tiermoe.actors.engine.model.profile import PARTS, Calls, count_calls, device_calls, host_passes

LAYERS, EXPERTS, TOP_K = 3, 8, 2


def _decode(engine: ExpertEngine, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for layer in engine.layers:
            weights, ids = torch.rand(1, EXPERTS, generator=generator).topk(TOP_K)
            layer.forward(torch.randn(1, HIDDEN, generator=generator), ids, weights)


def test_parts_of_a_pass_are_exclusive_and_nothing_stays_behind() -> None:
    case = make_case(3, LAYERS, EXPERTS, TOP_K, False, torch.float32)
    with engine_for(case, 0.5, prefetch="next-gate") as engine:
        before = [set(vars(owner)) for owner in (*engine.layers, engine.cache, engine.layers[0].kernel)]
        with host_passes(engine) as passes:
            _decode(engine, 4)
        assert [set(vars(owner)) for owner in (*engine.layers, engine.cache, engine.layers[0].kernel)] == before
    assert [(p.layer, p.tokens) for p in passes] == [(layer, 1) for _ in range(4) for layer in range(LAYERS)]
    for found in passes:
        assert set(found.parts) == set(PARTS)
        for part in ("read", "plan", "begin", "run", "kernels", "combine", "prefetch", "other"):
            assert found.parts[part] > 0, part
        assert found.parts["send"] == found.parts["reroute"] == 0
        whole = sum(found.parts.values())
        assert 0 < found.outside_s == pytest.approx(whole - found.parts["kernels"] - found.parts["combine"])


def test_calls_belong_to_the_layer_that_they_are_in_or_come_before() -> None:
    def at(start: float, name: str) -> tuple[str, float, float]:
        return name, start, start + 1

    events = [
        at(0, "cudaLaunchKernel"), at(2, "cudaGraphLaunch"), at(4, "aten::mm"),
        ("tiermoe.layer", 10, 20), at(11, "cudaMemcpyAsync"), at(13, "cudaEventSynchronize"),
        at(15, "cuLaunchKernelEx"),
        at(30, "cudaLaunchKernel"), at(33, "cudaLaunchKernel"),
        ("tiermoe.layer", 40, 50), at(41, "cudaLaunchKernel"),
        at(60, "cudaLaunchKernel"),
    ]  # fmt: skip
    found = count_calls(reversed(events))
    assert found.layers == 2
    assert found.experts == Calls(launches=1, graphs=0, copies=0.5, waits=0.5)
    assert found.dense == Calls(launches=1.5, graphs=0.5)
    with pytest.raises(ValueError, match="no layer"):
        count_calls(events[:3])


def test_one_step_is_profiled_without_its_first_layer() -> None:
    case = make_case(3, LAYERS, EXPERTS, TOP_K, False, torch.float32)
    with engine_for(case, 1.0) as engine:
        found = device_calls(engine, lambda: _decode(engine, 4), tokens=1, skip=2)
        assert found.layers == LAYERS - 1
        if not torch.cuda.is_available():
            assert found.experts == found.dense == Calls()
        with pytest.raises(ValueError, match="fewer than 8"):
            device_calls(engine, lambda: _decode(engine, 4), tokens=1)
