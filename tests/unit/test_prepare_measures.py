"""What `tiermoe prepare` trains for policies: gates, and the files that hold them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import serving
import torch
from tiny_models import save_tiny_checkpoint

from tiermoe.actors.policies.baselines import PreGate
from tiermoe.actors.store.artifacts import (
    encode_gates,
    gates_of,
)
from tiermoe.actors.store.format import read_manifest
from tiermoe.cluster.jobs.prepare.measures import NextRouter, recall, train_gate
from tiermoe.errors import StoreError


def test_a_gate_learns_what_it_is_shown() -> None:
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(1500, 12)).astype(np.float32)
    true = rng.normal(size=(8, 12)).astype(np.float32)
    ids = np.argsort(-(hidden @ true.T), axis=1)[:, :2]
    turn = np.linalg.qr(rng.normal(size=(12, 12)) * 0.3 + np.eye(12))[0].astype(np.float32)
    routes = torch.from_numpy(true @ turn)  # the next layer's input is this one's, turned

    def router(rows: torch.Tensor) -> torch.Tensor:
        return rows @ routes.T

    following = NextRouter(router, hidden @ turn)
    learned = train_gate(hidden, ids, 8, following)
    held = np.arange(1350, 1500)  # the tenth block of 150 rows
    assert learned.next_gate == pytest.approx(recall(hidden[held] @ routes.numpy().T, ids[held]))
    assert learned.next_gate < learned.recall
    assert learned.recall == pytest.approx(recall(learned.gate(hidden[held]), ids[held]))
    again = train_gate(hidden, ids, 8, following)
    np.testing.assert_array_equal(again.gate.weight, learned.gate.weight)
    alone = train_gate(hidden, ids, 8)
    assert np.isnan(alone.next_gate)
    assert alone.recall > 2 / 8
    with pytest.raises(ValueError, match="cannot train"):
        train_gate(hidden, ids[:5], 8)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measures")
    serving.prepared(save_tiny_checkpoint("qwen3_moe", folder / "model"), folder / "store")
    return folder / "store"


def test_gates_are_read_and_damaged_ones_refused(store: Path) -> None:
    manifest = read_manifest(store)
    other = manifest.model_copy(update={"source": ()})
    path, read = store / "gates.safetensors", gates_of
    weight = np.ones((manifest.experts.num_experts, manifest.experts.hidden), np.float32)
    gate = PreGate(weight, weight[:, 0])
    path.write_bytes(encode_gates([gate], manifest, 100))
    (found,) = gates_of(store, manifest)
    np.testing.assert_array_equal(found.weight, weight)
    refused = {
        b"{}": "holds no gates",
        encode_gates([], manifest, 100): "weight of layer 0",
        encode_gates([PreGate(weight[:, 1:], weight[:, 0])], manifest, 100): "weight of layer 0",
        encode_gates([PreGate(weight * np.float32("inf"), weight[:, 0])], manifest, 100): "weight of layer 0",
        encode_gates([gate], other, 100): "another model",
    }
    for data, why in refused.items():
        path.write_bytes(data)
        with pytest.raises(StoreError, match=why) as raised:
            read(store, manifest)
        assert "tiermoe prepare MODEL --gates TEXT" in str(raised.value)
    path.unlink()
    with pytest.raises(StoreError, match="cannot be read"):
        read(store, manifest)
