"""The default model with experts in published forms: the same tokens with misses and without, as graphs or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from serving import greedy, policy, prepared, serving

from tiermoe.actors.budget import Budget
from tiermoe.actors.settings import EngineSettings, KvSettings
from tiermoe.benchmarks.requantized import Published, requantized

pytest.importorskip("triton")

PROMPTS = [[5, 9, 17, 4, 33, 2, 7], [8, 8, 3, 90, 41], [700, 12, 4000]]
TOKENS = 16


def _settings(share: float, mode: Any, device: str) -> EngineSettings:
    return EngineSettings(
        policy=policy("next-gate"), budget=Budget(share=share), device=device, compile=mode, integrity_checks=True,
        attention="triton" if device == "cuda" else "auto",
        kv=KvSettings(page_size=16, num_blocks=64, max_num_seqs=4, prefix_cache=False),
    )  # fmt: skip


@pytest.mark.parametrize("form", [Published.FP8, Published.MXFP4])
def test_the_same_tokens(form: Published, target: torch.device, tmp_path: Path) -> None:
    store = prepared(requantized(form, tmp_path / "model"), tmp_path / "store")
    found = []
    modes = ("off", "graphs") if target.type == "cuda" else ("off",)
    for share, mode in [(share, mode) for share in (1.0, 0.25) for mode in modes]:
        with serving(store, _settings(share, mode, target.type)) as worker:
            kernel = worker.engine.kernels.plan
            assert set(kernel.chosen.values()) == {"triton" if target.type == "cuda" else "cpu"}, kernel.notes
            tokens = [found for prompt in PROMPTS for found in greedy(worker, [prompt], TOKENS)]
            tokens += greedy(worker, PROMPTS, TOKENS)  # together
            found.append(tokens)
            assert share == 1.0 or worker.stats().total().bytes_loaded > 0
            if mode == "graphs":
                assert worker.batcher._manager.steps.recorded.replays > TOKENS
    assert all(tokens == found[0] for tokens in found)
