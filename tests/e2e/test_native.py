"""The dense part as one native program: the tokens of the eager model, and a note where it cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from quick import quick
from serving import greedy, prepared, serving, settings
from tiny_models import VOCAB, save_tiny_checkpoint

from tiermoe.actors.engine.dense.native import MAX_ROWS, _Head, _lowered
from tiermoe.actors.engine.layer import MoeLayer
from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.requests import GenerationRequest, SamplingParams
from tiermoe.actors.settings import EngineSettings, KvSettings
from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.config import load_policy
from tiermoe.errors import ConfigError

TOKENS = 24
KV = KvSettings(page_size=16, num_blocks=64)


def made(kind: str, path: Path, **overrides: Any) -> ExpertStore:
    return prepared(save_tiny_checkpoint(kind, path / "model", **overrides), path / "store")


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


# a sliding window that prompts exceed, sinks, shared experts, norms of keys, partial rotary embedding, tied embeddings
@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("qwen3_moe", {}),
        pytest.param("mixtral", {"sliding_window": 8}, marks=pytest.mark.slow),
        ("gpt_oss", {"sliding_window": 8}),
        pytest.param("qwen2_moe", {}, marks=pytest.mark.slow),
        pytest.param("glm4_moe", {}, marks=pytest.mark.slow),
        ("cohere2_moe", {}),
        pytest.param("phimoe", {}, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_the_eager_model(kind: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    store, asked = made(kind, tmp_path, **overrides), prompts(5, 11, 17, MAX_ROWS + 6)
    with serving(store, settings(0.5, kv=KV, compile="off")) as worker:
        expected = greedy(worker, asked, TOKENS)
    with serving(store, settings(0.5, kv=KV, compile="native")) as worker:
        assert greedy(worker, asked, TOKENS) == expected
        assert greedy(worker, asked[:1], TOKENS) == expected[:1]
        assert "natively" in str(worker.engine.notes)
        sampling = SamplingParams(max_tokens=4, logprobs=3, prompt_logprobs=2, temperature=0.5, seed=3)
        events = list(worker.submit(GenerationRequest("sampled", tuple(asked[1]), sampling)))
        assert sum(len(event.logprobs) for event in events) == 4
        base = worker.model.base_model
    assert "forward" not in vars(base)


def unchecked(budget: float, preset: str = "on-demand") -> EngineSettings:
    """As in service: integrity checks after each layer keep layers apart."""
    made = settings(budget, kv=KV, compile="native", policy=load_policy(preset))
    return made.model_copy(update={"integrity_checks": False})


def counted(worker: GpuWorker) -> dict[str, Any]:
    """What does not depend on time."""
    engine = worker.engine
    engine.cache.check_integrity()
    names = ("forwards", "hits", "misses", "bytes_loaded_demand", "waves", "bytes_demanded_decode")
    return {
        "layers": [[getattr(layer, name) for name in names] for layer in engine.cache.live_stats().layers],
        "uses": engine.cache.uses.tolist(),
        "order": engine.cache.eviction.victims(engine.cache.residency.slots, lambda key: True),
        "governor": engine.cache.governor.state,
    }


# on demand, with prefetch, with experts that are split, and with pre-eviction and prefetch in Python
@pytest.mark.parametrize(
    "preset",
    quick(
        ["on-demand", "next-gate", "moepic", "moe-infinity-sync", "activeevict-lossless"],
        fast=["next-gate", "moepic", "activeevict-lossless"],
    ),
)
def test_layers_in_one_call_are_layers_one_by_one(preset: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Tokens and, without prefetch, loads, order of eviction and counters; a layer that is observed runs by itself."""
    store, asked = made("qwen3_moe", tmp_path), prompts(5, 11, 17)
    found: dict[str, Any] = {}
    alone: list[int] = []
    seen: list[int] = []
    forward = MoeLayer.forward

    def watched(layer: MoeLayer, *inputs: Any) -> Any:
        alone.append(len(inputs[0]))
        return forward(layer, *inputs)

    monkeypatch.setattr(MoeLayer, "forward", watched)
    for how in ("apart", "joined", "observed"):
        with serving(store, unchecked(0.3, preset)) as worker:
            layers, dense = worker.engine.layers, worker.model.base_model.forward.__self__
            if how == "apart":
                dense.joined = None
            if how == "observed":
                layers[1].observers.append(lambda layer, ids, weights: seen.append(len(ids)))
            alone.clear()
            one = greedy(worker, asked[:1], TOKENS)
            counters = counted(worker) if preset == "on-demand" else None  # of one: several come when they come
            found[how] = one, greedy(worker, asked, TOKENS), counters
            decodes = alone.count(1)
            assert all(layer.forwards > TOKENS for layer in worker.engine.cache.live_stats().layers)
            assert seen.count(1) >= TOKENS - 2 if how == "observed" else not seen
            # where a configurator has moved experts the next step may run one by one
            assert decodes < 6 if how == "joined" else decodes >= TOKENS - 2
    assert found["joined"] == found["apart"] == found["observed"]


@pytest.mark.parametrize("preset", ["on-demand", "moepic"])
def test_a_lost_link_fails_a_pass_of_joined_layers(preset: str, tmp_path: Path) -> None:
    with serving(made("qwen3_moe", tmp_path), unchecked(0.3, preset)) as worker:
        assert worker.model.base_model.forward.__self__.joined is not None
        worker.engine.cache.flush()
        worker.engine.cache.close()
        events = list(worker.submit(GenerationRequest("late", tuple(prompts(5)[0]), SamplingParams(max_tokens=4))))
        assert events[-1].error is not None
        assert "closed" in str(events[-1].error)
        assert worker.engine.cache.residency.pins == 0


def test_bfloat16(tmp_path: Path) -> None:
    store = made("qwen3_moe", tmp_path)
    half = settings(1.0, kv=KV, compile="native").model_copy(update={"dtype": "bfloat16"})
    with serving(store, half) as worker:
        assert "natively" in str(worker.engine.notes)
        assert len(greedy(worker, prompts(9), 8)[0]) == 8


def test_what_has_no_paged_cache_runs_eagerly_and_says_so(tmp_path: Path) -> None:
    store = made("deepseek_v3", tmp_path)
    with serving(store, settings(0.5, kv=KV)) as worker:
        notes = [note for note in worker.engine.notes if "eagerly" in note]
        assert len(notes) == 1
        assert "forward" not in vars(worker.model.base_model)
        assert len(greedy(worker, prompts(5), 3)[0]) == 3
    with pytest.raises(ConfigError, match="compile: native cannot run this model"):
        GpuWorker(settings(0.5, kv=KV, compile="native"), store.describe()).start()


def test_a_program_that_differs_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tiermoe.actors.engine.dense.lowering import Lowering

    right = Lowering._reduce

    def wrong(self: Lowering, node: Any, name: str) -> Any:
        return right(self, node, "sum" if name == "mean" else name)

    monkeypatch.setitem(right.__globals__["_RULES"], "mean", wrong)
    with serving(made("mixtral", tmp_path), settings(0.5, kv=KV)) as worker:
        assert any("eagerly (the native program's hidden states differ" in note for note in worker.engine.notes)


def test_a_model_that_mixes_rows_is_refused_with_its_reason(tmp_path: Path) -> None:
    with serving(made("lfm2_moe", tmp_path), settings(0.5, kv=KV)) as worker:
        assert any("aten.convolution" in note for note in worker.engine.notes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_the_output_embeddings_are_those_of_the_module(dtype: torch.dtype) -> None:
    module = torch.nn.Linear(24, 50, bias=True, dtype=dtype)
    head = _Head(module, _lowered(lambda states: module(states), 13, torch.ones(1, 13, 24, dtype=dtype)), 1)
    for rows in (1, 13, MAX_ROWS, MAX_ROWS + 1):  # the last as the module runs it
        states = torch.randn(1, rows, 24, dtype=dtype)
        found = head.forward(states)
        assert found.dtype == dtype
        torch.testing.assert_close(found, module(states), atol=1e-5 if dtype == torch.float32 else 2e-2, rtol=1e-2)
