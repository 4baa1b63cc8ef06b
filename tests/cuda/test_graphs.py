"""Decode steps as CUDA graphs: the tokens of the same kernels launched one by one, and a few launches a layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import greedy, policy, prepared, serving
from tiny_models import save_tiny_checkpoint

from tiermoe.actors.budget import Budget
from tiermoe.actors.engine.host_times import Calls, device_calls
from tiermoe.actors.engine.serving import recorded as recorded_module
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.settings import EngineSettings, KvSettings
from tiermoe.cluster.config import load_policy

pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")  # 5.20: steps at fixed addresses
pytest.importorskip("triton")

PROMPTS = [[5, 9, 17, 4, 33, 2, 7], [8, 8, 3]]
TOKENS = 24


def _settings(mode: Any, of: PolicySettings, dtype: str = "float32") -> EngineSettings:
    return EngineSettings(
        policy=of, budget=Budget(share=0.5), device="cuda", dtype=dtype, compile=mode, attention="triton",
        integrity_checks=True,
        kv=KvSettings(page_size=16, num_blocks=64, max_num_seqs=4, prefix_cache=False),
    )  # fmt: skip


@pytest.mark.parametrize("preset", ["next-gate", "on-demand", "moepic", "auto"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_the_same_tokens_with_fewer_launches(kind: str, preset: str, tmp_path: Path) -> None:
    layers = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    store = prepared(save_tiny_checkpoint(kind, tmp_path / "model", **layers), tmp_path / "store")
    tokens: dict[str, list[list[int]]] = {}
    dense: dict[str, Calls] = {}
    for mode in ("off", "graphs"):
        with serving(store, _settings(mode, load_policy(preset))) as worker:
            assert worker.plan()["compile"] == mode
            tokens[mode] = [found for prompt in PROMPTS for found in greedy(worker, [prompt], TOKENS)]
            tokens[mode] += greedy(worker, PROMPTS, TOKENS)  # together
            if mode == "graphs":
                recorded = worker.batcher._manager.steps.recorded
                assert recorded.problem is None
                assert {key[0] for key in recorded._recordings} == {1, 2}
                assert recorded.replays > TOKENS
            calls = device_calls(worker.engine, lambda w=worker: greedy(w, PROMPTS[:1], TOKENS), tokens=1)
            dense[mode] = calls.dense
            print(f"{kind} {preset} {mode}: dense {calls.dense}, experts {calls.experts}")
    assert tokens["graphs"] == tokens["off"]
    assert dense["off"].graphs == 0
    assert dense["graphs"].graphs == 1
    assert dense["graphs"].launches <= 1  # the experts' output to where the next graph reads it


def test_long_contexts_and_other_rows_have_recordings_of_their_own(tmp_path: Path) -> None:
    """Contexts that pass a split of the attention's keys, in bfloat16."""
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "max_position_embeddings": 2048}
    store = prepared(save_tiny_checkpoint("qwen3_moe", tmp_path / "model", **layers), tmp_path / "store")
    prompts = [[i * 7 % 90 + 3 for i in range(n)] for n in (505, 20, 9)]
    found = []
    for mode in ("off", "graphs"):
        with serving(store, _settings(mode, policy("next-gate"), "bfloat16")) as worker:
            found.append([t for prompt in prompts for t in greedy(worker, [prompt], 20)])
            found[-1] += greedy(worker, prompts, 20)
            if mode == "graphs":
                keys = {(rows, most) for rows, ((_, most),) in worker.batcher._manager.steps.recorded._recordings}
                assert {(1, 1), (1, 2), (3, 2)} <= keys
    assert found[0] == found[1]
    torch.cuda.synchronize()


def _lacks_memory(hidden: torch.Tensor) -> None:
    torch.empty(1 << 45, dtype=torch.uint8, device=hidden.device)  # which no device has


def _is_not_permitted(hidden: torch.Tensor) -> None:
    float(hidden.sum())  # waits


@pytest.mark.parametrize(
    ("what", "refused", "problem"), [(_lacks_memory, 1, False), (_is_not_permitted, 0, True)], ids=["memory", "a wait"]
)
def test_serving_goes_on_after_a_failed_capture(
    what: Callable[[torch.Tensor], None], refused: int, problem: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step runs again. Later ones are recorded where memory was short; a model that waits runs without graphs."""
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
    store = prepared(save_tiny_checkpoint("qwen3_moe", tmp_path / "model", **layers), tmp_path / "store")
    monkeypatch.setattr(recorded_module, "_REST", 4)
    with serving(store, _settings("graphs", policy("next-gate"))) as worker:
        recorded, norm = worker.batcher._manager.steps.recorded, worker.model.model.norm
        expected = greedy(worker, PROMPTS[:1], TOKENS)
        recorded._recordings.clear()
        forward, tried = norm.forward, []

        def failing(hidden: torch.Tensor) -> torch.Tensor:
            if torch.cuda.is_current_stream_capturing() and not tried:
                tried.append(torch.cuda.mem_get_info()[0])
                what(hidden)
            return forward(hidden)

        monkeypatch.setattr(norm, "forward", failing)
        assert greedy(worker, PROMPTS[:1], TOKENS) == expected
        assert (recorded.problem is not None, recorded.refused, len(tried)) == (problem, refused, 1)
        torch.cuda.empty_cache()  # asserts where the allocator still takes from the failed capture's pool
        replays = recorded.replays
        assert greedy(worker, PROMPTS[:1], TOKENS) == expected
        assert (recorded.replays > replays) == (not problem)
