"""The parts of `tiermoe bench transfer` that need no Ray: its stores, and what it says of wrong bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tiermoe.actors.engine.cache.sources import host_weights
from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.jobs.bench.transfer import Model, _write_store, check_bytes
from tiermoe.errors import RuntimeFailure


def test_a_store_of_finite_experts_and_a_bit_that_differs(tmp_path: Path) -> None:
    store = ExpertStore(_write_store(Model("m", 8, 5, 4, 2), tmp_path / "store"))
    weights = host_weights(store.layers)[0]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.tensors)
    layer = [tensor.view(torch.int16) for tensor in weights.tensors]
    found = [tuple(tensor.clone() for tensor in weights.expert(e)) for e in (1, 3)]
    check_bytes(found, [1, 3], layer)
    found[1][1].view(torch.int16)[2, 3] ^= 1
    with pytest.raises(RuntimeFailure, match="expert 3 arrived with other bytes"):
        check_bytes(found, [1, 3], layer)
