"""Residency on the device, interpreted: values of the host's path to the bit, the ring, stamps, changes of slots."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("tests/cuda runs these cases on the GPU", allow_module_level=True)

from fake_gpu import FakeGpu
from kernel_cases import Forbidden

from tiermoe.actors.engine.cache.slots import LayerWeights, SlotPool
from tiermoe.actors.engine.cuda.resident import DeviceResidency
from tiermoe.actors.store.format import ExpertShape
from tiermoe.kernels.expert_ffn import Operands
from tiermoe.kernels.triton.expert_ffn import TritonKernel

LAYERS, EXPERTS, SLOTS, TOP_K = 2, 6, 3, 2
SHAPE = ExpertShape(num_experts=EXPERTS, hidden=32, intermediate=40, gates=2, has_bias=False)


class Case:
    """A cache of three slots on a fake GPU, and every expert in slots of a pool for the host's path."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0, steps: int = 64) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.gpu = FakeGpu(seed)
        draw = lambda size: torch.randn(size, generator=self.random).mul_(0.2).to(dtype)  # noqa: E731
        self.weights = [LayerWeights(tuple(draw(s) for s in SHAPE.stacked().values())) for _ in range(LAYERS)]
        pool = SlotPool.allocate(SHAPE, SLOTS, dtype, torch.device("cpu"))
        for tensor in pool.tensors:
            tensor.fill_(float("nan"))
        self.pool, self.dtype = pool, dtype
        self.ran = 0
        self.device = DeviceResidency(self.gpu, pool, self.weights, "silu", TOP_K, rows=4, steps=steps)

    def layer_input(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = torch.randn(tokens, SHAPE.hidden, generator=self.random).to(self.dtype)
        weights, ids = torch.rand(tokens, EXPERTS, generator=self.random).topk(TOP_K)
        return hidden, ids, weights.to(self.dtype)

    def reference(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The host's path with all experts in slots."""
        gate_up, down = self.weights[layer].tensors
        kernel = TritonKernel(Operands(gate_up.clone(), down.clone(), None, None), "silu", Forbidden())
        flat = ids.flatten()
        pairs = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=EXPERTS).tolist()
        groups, first = [], 0
        for expert, count in enumerate(counts):
            if count:
                groups.append((first, first + count, expert * SHAPE.intermediate, SHAPE.intermediate, False))
                first += count
        y = torch.full((len(flat), SHAPE.hidden), float("nan"), dtype=self.dtype)
        kernel.run(hidden, pairs, groups, TOP_K, y)
        return y

    def step(self, tokens: int) -> list[list[int]]:
        """Enqueue a forward whose layers must give the values of the host's path; returns their experts."""
        self.gpu.launch(self.device.kernels.begin)
        chosen = []
        for layer in range(LAYERS):
            given = self.layer_input(tokens)
            self.gpu.launch(lambda layer=layer, given=given: self._run(layer, *given))
            chosen.append(given[1].flatten().tolist())
        return chosen

    def _run(self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        found = self.device.kernels.run(layer, hidden, ids, weights)
        assert torch.equal(found, self.reference(layer, hidden, ids))
        self.ran += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 4])
def test_hits_and_misses_give_the_values_of_the_hosts_path(dtype: torch.dtype, tokens: int) -> None:
    """All experts read from host memory, then some from slots; the empty slots hold NaN."""
    case = Case(dtype)
    case.step(tokens)
    for slot, key in enumerate((1, EXPERTS + 4)):
        case.device.load(key, slot)
    case.gpu.finish()
    case.step(tokens)
    case.gpu.finish()
    assert case.ran == 2 * LAYERS


def test_the_ring_lists_what_ran_and_stamps_what_was_used() -> None:
    case = Case()
    case.device.load(2, 0)
    case.device.load(EXPERTS + 3, 2)
    case.gpu.finish()
    resident = {0: [2], 1: [3]}
    wanted = [case.step(tokens) for tokens in (1, 2)]
    case.gpu.finish()
    found = list(case.device.routed(2))
    assert [(one.step, one.layer) for one in found] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    for one in found:
        ids = wanted[one.step - 1][one.layer]
        assert one.ids.tolist() == ids
        assert one.misses == sum(e not in resident[one.layer] for e in ids)
        assert len(one.weights) == len(ids)
        assert (one.weights > 0).all()
    assert list(case.device.routed(2)) == []  # each once
    stamps = case.device.tables.stamps.tolist()
    for slot, layer, expert in ((0, 0, 2), (2, 1, 3)):
        used = [step for step in (1, 2) if expert in wanted[step - 1][layer]]
        assert stamps[slot] == max(used, default=0)
    assert stamps[1] == 0


def test_a_host_that_falls_behind_the_ring_gets_an_error() -> None:
    case = Case(steps=2)
    for _ in range(3):
        case.step(1)
    case.gpu.finish()
    with pytest.raises(ValueError, match="the ring holds 4 layers, the host is 6 behind"):
        list(case.device.routed(3))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_experts_come_and_go_while_steps_run(seed: int) -> None:
    """Copies end late and in any order; each step gives the host's values, whatever is resident."""
    case = Case(seed=seed)
    chance = torch.Generator().manual_seed(seed)
    for turn in range(12):
        slot, key = turn % SLOTS, int(torch.randint(LAYERS * EXPERTS, (1,), generator=chance))
        if key not in case.device._held:
            event = case.device._under_way.get(slot)
            if event is None or case.gpu.query(event):
                case.device.load(key, slot)
        case.gpu.run_some()
        case.step(1 + turn % 2)
    case.step(1)
    case.gpu.finish()
    assert case.ran == 13 * LAYERS
    routed = list(case.device.routed(13))
    assert 0 < sum(one.misses for one in routed) < sum(len(one.ids) for one in routed)
    assert case.gpu.synchronized == 0


def test_a_slot_whose_copy_is_under_way_is_not_given_away() -> None:
    case = Case()
    case.gpu.idle = True
    case.device.load(1, 0)
    with pytest.raises(ValueError, match="cannot be loaded into slot 0 now"):
        case.device.load(2, 0)
    with pytest.raises(ValueError, match="expert 1 cannot be loaded"):
        case.device.load(1, 1)
    assert case.device.free_slots() == [1, 2]
    case.gpu.finish()
    case.device.load(2, 0)
    case.gpu.finish()


def test_what_it_cannot_run_is_refused() -> None:
    case = Case()
    hidden, ids, weights = case.layer_input(4)
    with pytest.raises(ValueError, match="pairs of"):
        case.device.kernels.run(0, hidden.double(), ids, weights)
    with pytest.raises(ValueError, match="without biases"):
        DeviceResidency(case.gpu, case.pool, [LayerWeights((*case.weights[0].tensors, hidden))], "silu", TOP_K)
    with pytest.raises(ValueError, match="pinned memory"):
        DeviceResidency(FakeGpu(pin_all=False), case.pool, case.weights, "silu", TOP_K)
