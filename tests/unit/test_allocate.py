"""The memory of an expert cache: what the device refuses is said as what it is."""

from __future__ import annotations

import pytest
import torch

from tiermoe.actors.engine.cache.allocate import make_cache
from tiermoe.actors.engine.cache.device import CpuDevice
from tiermoe.actors.engine.cache.slots import LayerWeights, SlotPool
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.settings import EngineSettings, LinkSettings
from tiermoe.actors.store.format import ExpertShape
from tiermoe.errors import BudgetError


def test_a_gpu_without_room_for_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an error of torch's that names none of our settings."""
    shape = ExpertShape(num_experts=2, hidden=4, intermediate=4, gates=2, has_bias=False)
    weights = [LayerWeights(tuple(torch.zeros(one) for one in shape.stacked().values()))]
    settings = EngineSettings(policy=PolicySettings(name="x", lossless=True), budget=shape.nbytes(4))

    def full(*_: object) -> SlotPool:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has 1 GiB free. And more. So.")

    monkeypatch.setattr(SlotPool, "allocate", full)
    with pytest.raises(BudgetError, match=f"cache of {shape.nbytes(4)} bytes .*GPU 0 has 1 GiB free") as found:
        make_cache(settings, shape, weights, CpuDevice(LinkSettings()), torch.float32, 2)
    assert "smaller budget" in str(found.value)
