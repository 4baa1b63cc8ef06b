"""Experts that run in host memory as they are stored: where a store maps them, and in slots read from a disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from form_cases import expert_form, random_expert
from moe_stack import Case, engine_for, make_case, on_disk

from tiermoe.actors.engine.cache.form_slots import FormWeights
from tiermoe.actors.engine.cache.slots import LayerWeights
from tiermoe.actors.engine.executors import CpuExecutor
from tiermoe.actors.engine.layer import PythonExecutor
from tiermoe.actors.policies.residency import ResidencyError
from tiermoe.actors.store.format import Published
from tiermoe.errors import ConfigError
from tiermoe.kernels.expert_ffn import CPU_MAX_ROWS

RESIDENT: dict[str, Any] = {"preload": "all"}


def in_store(dtype: torch.dtype, native: bool = True) -> Case:
    """Neurons in a store's type. native: plain experts; else with biases and an activation of their own."""
    case = make_case(3, 2, 4, 2, native, torch.float32)
    weights = [LayerWeights(tuple(t.to(dtype) for t in layer.tensors)) for layer in case.weights]
    return replace(case, weights=weights)


def in_forms(*names: str) -> Case:
    """Each layer in a published form."""
    case, rng = make_case(3, len(names), 4, 2, True, torch.float32), np.random.default_rng(0)
    kinds = list(dict.fromkeys(names))
    forms, of = tuple(expert_form(name, 64, 32) for name in kinds), tuple(map(kinds.index, names))
    published = Published(forms=forms, layers=of, checkpoint=None)
    weights = []
    for layer in range(len(names)):
        experts = [random_expert(published.of(layer), rng) for _ in range(4)]
        parts = [tuple(torch.from_numpy(a.reshape(-1).view(np.uint8).copy()) for a in e.values()) for e in experts]
        weights.append(FormWeights(tuple(parts)))
    shape = case.shape.model_copy(update={"hidden": 64, "intermediate": 32})
    routers = [torch.zeros(4, 64) for _ in names]
    return replace(case, shape=shape, weights=weights, routers=routers, published=published)


def outputs(case: Case, budget: Any, rows: int, host_bytes: int | None = None) -> tuple[list[torch.Tensor], list[type]]:
    """Of each layer on random rows, most of which go to expert 1; and what ran them.

    host_bytes: of slots in host memory, with budget "mapped".
    """
    generator = torch.Generator().manual_seed(rows)
    with engine_for(case, budget, host_bytes=host_bytes, **({} if host_bytes else RESIDENT)) as engine:
        found = []
        for layer in engine.layers:
            hidden = torch.randn(rows, case.shape.hidden, generator=generator)
            ids = torch.tensor([[1, (0, 2, 3)[t % 3]] for t in range(rows)])
            found.append(layer.forward(hidden, ids, torch.rand(rows, 2, generator=generator)))
        stats = engine.stats()
        if host_bytes is not None:
            assert (stats.executor, stats.expert_budget_bytes) == ("real", host_bytes)
            assert stats.expert_bytes_peak <= host_bytes
            assert stats.host_memory is not None
            assert stats.host_memory.bytes_demand == engine.cache.bytes_loaded > 0
        elif budget == "mapped":
            assert (stats.executor, stats.expert_bytes_peak, stats.expert_budget_bytes) == ("real", 0, 0)
            assert all(layer.hits == 2 or rows > 1 for layer in stats.layers)
            assert engine.cache.bytes_loaded == stats.bytes_preloaded == 0
        return found, [type(layer.executor) for layer in engine.layers]


CASES = pytest.mark.parametrize(
    ("case", "executor", "mapped_executor"),
    [
        (in_store(torch.float32), CpuExecutor, CpuExecutor), (in_store(torch.bfloat16), CpuExecutor, CpuExecutor),
        (in_store(torch.float16), CpuExecutor, CpuExecutor),
        (in_store(torch.bfloat16, native=False), PythonExecutor, PythonExecutor),
        (in_forms("q4_0", "q4_0"), CpuExecutor, CpuExecutor),
        (in_forms("mxfp4", "fp8_block"), CpuExecutor, CpuExecutor),
        (replace(in_forms("q8_0", "bfloat16"), native=False), PythonExecutor, PythonExecutor),
    ],
    ids=["float32", "bfloat16", "float16", "biases", "q4_0", "two forms", "forms by torch"],
)  # fmt: skip


@CASES
@pytest.mark.parametrize("rows", [1, 3, CPU_MAX_ROWS + 12])
def test_mapped_experts_give_what_slots_give(case: Case, executor: type, mapped_executor: type, rows: int) -> None:
    """Few rows and many, in each layout. Of forms the kernels are the same, and so are the bits."""
    slots, by = outputs(case, 1.0, rows)
    mapped, mapped_by = outputs(case, "mapped", rows)
    assert (set(by), set(mapped_by)) == ({executor}, {mapped_executor})
    for one, other in zip(slots, mapped, strict=True):
        if case.published is not None:
            torch.testing.assert_close(other, one, rtol=0, atol=0)
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4 * float(one.abs().max()))


@CASES
@pytest.mark.parametrize("slots", [1, 3, 8])
@pytest.mark.parametrize("rows", [1, CPU_MAX_ROWS + 12])
def test_experts_read_from_a_disk_give_what_mapped_ones_give(
    case: Case, executor: type, mapped_executor: type, rows: int, slots: int, tmp_path: Path
) -> None:
    """To the last bit, by the same executors: in fewer slots than a layer needs, and in slots for all."""
    case = on_disk(case, tmp_path / "layers")
    nbytes = case.published.slot_bytes if case.published else case.shape.nbytes(case.weights[0].tensors[0].itemsize)
    mapped, mapped_by = outputs(case, "mapped", rows)
    read, read_by = outputs(case, "mapped", rows, slots * nbytes)
    assert mapped_by == read_by
    for one, other in zip(mapped, read, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=0)


def test_experts_of_another_node_are_not_mapped() -> None:
    case = in_store(torch.float32)
    far: Any = type("Remote", (), {"expert": lambda self, index: None})()
    with (
        pytest.raises(ConfigError, match="1 layers of experts are on other nodes"),
        engine_for(replace(case, weights=[case.weights[0], far]), "mapped", **RESIDENT),
    ):
        pass


def test_each_expert_is_in_its_own_slot() -> None:
    """A kernel finds a mapped expert by its slot."""
    with engine_for(in_store(torch.float32), "mapped", **RESIDENT) as engine:
        cache = engine.cache
        assert [cache.residency.slot(key) for key in range(8)] == list(range(8))
        cache.flush()
        cache.core.preload([1, 0, *range(2, 8)])
        with pytest.raises(ResidencyError, match="in another's slot"):
            cache.check_mapped()
