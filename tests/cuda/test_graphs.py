"""The dense part as CUDA graphs: the same tokens, and fewer launches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from serving import greedy, policy, prepared, serving
from tiny_models import save_tiny_checkpoint

from tiermoe.actors.engine.model.profile import Calls, device_calls
from tiermoe.actors.settings import EngineSettings, KvSettings

PROMPTS = [[5, 9, 17, 4, 33, 2, 7], [8, 8, 3]]
TOKENS = 24


def _settings(mode: Any, batching: Any) -> EngineSettings:
    return EngineSettings(
        policy=policy("next-gate"), budget=0.5, device="cuda", dtype="float32", compile=mode, integrity_checks=True,
        kv=KvSettings(page_size=16, num_blocks=64, max_num_seqs=4, batching=batching),
    )  # fmt: skip


@pytest.mark.parametrize("batching", ["continuous", "serial"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_the_same_tokens_with_fewer_launches(kind: str, batching: str, tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    store = prepared(save_tiny_checkpoint(kind, tmp_path / "model", **layers), tmp_path / "store")
    tokens: dict[str, list[list[int]]] = {}
    dense: dict[str, Calls] = {}
    for mode in ("off", "default", "graphs"):
        torch.compiler.reset()
        with serving(store, _settings(mode, batching)) as worker:
            assert worker.plan()["compile"] == mode
            greedy(worker, PROMPTS, TOKENS)  # compiles and records
            tokens[mode] = greedy(worker, PROMPTS, TOKENS)
            calls = device_calls(worker.engine, lambda w=worker: greedy(w, PROMPTS[:1], TOKENS), tokens=1)
            dense[mode] = calls.dense
            print(f"{kind} {batching} {mode}: dense {calls.dense}, experts {calls.experts}")
    assert tokens["default"] == tokens["off"]
    assert tokens["graphs"] == tokens["off"]
    assert dense["off"].graphs == dense["default"].graphs == 0
    assert dense["graphs"].graphs >= 1
    assert dense["graphs"].launches < dense["off"].launches
