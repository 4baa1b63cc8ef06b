"""`bench overhead` and `serve`: the GGUF of a checkpoint, llama.cpp's tokens, and peers that are not installed."""

from __future__ import annotations

import json
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from serving import reference_greedy
from tiny_models import save_tiny_checkpoint
from transformers import AutoModelForCausalLM

from tiermoe.benchmarks import overhead
from tiermoe.benchmarks.cases import Against, Overhead
from tiermoe.benchmarks.llama import LlamaCpp, missing, write_gguf
from tiermoe.cluster.jobs.bench import serve
from tiermoe.cluster.jobs.bench.cases import Serve
from tiermoe.cluster.jobs.bench.metrics import Case
from tiermoe.errors import UnsupportedModelError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("overhead") / "model")


def test_a_gguf_has_every_weight_of_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    read = gguf.GGUFReader(write_gguf(checkpoint, tmp_path / "model.gguf"))
    found = {tensor.name: tensor.data for tensor in read.tensors}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    layers, experts = model.config.num_hidden_layers, model.config.num_experts
    for layer in range(layers):
        gate, up = np.split(state[f"model.layers.{layer}.mlp.experts.gate_up_proj"], 2, axis=1)
        assert gate.shape[0] == experts > 2
        for name, expected in (("gate", gate), ("up", up), ("down", None)):
            if expected is None:
                expected = state[f"model.layers.{layer}.mlp.experts.down_proj"]
            assert np.array_equal(found[f"blk.{layer}.ffn_{name}_exps.weight"], expected), name
        assert np.array_equal(
            found[f"blk.{layer}.attn_q.weight"], state[f"model.layers.{layer}.self_attn.q_proj.weight"]
        )
    assert np.array_equal(found["token_embd.weight"], state["model.embed_tokens.weight"])
    assert sum(data.size for data in found.values()) == sum(p.numel() for p in model.parameters())
    assert read.fields["qwen3moe.expert_used_count"].contents() == model.config.num_experts_per_tok


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    with pytest.raises(UnsupportedModelError, match="mixtral"):
        write_gguf(tmp_path, tmp_path / "model.gguf")


@pytest.mark.skipif(bool(missing()), reason="llama-cpp-python is not installed")
def test_llama_cpp_gives_the_model_s_tokens(checkpoint: Path, tmp_path: Path) -> None:
    prompts = [(5, 6, 7, 8), (9, 3)]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    expected = dict(zip(prompts, reference_greedy(model, prompts, 6, ignore_eos=True), strict=True))
    with closing(LlamaCpp(write_gguf(checkpoint, tmp_path / "model.gguf"))) as runner:
        for prompt in [*prompts, prompts[0]]:  # nothing of an earlier request is left
            measures, tokens = runner.generate(prompt, 6)
            assert tokens == expected[prompt]
            assert measures["tpot_s"] > 0


def test_llama_cpp_that_is_not_installed_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a missed bar: `tokens of 96 that are llama.cpp's: 0`."""
    worker = SimpleNamespace(submit=None, stats=lambda: SimpleNamespace(executor="emulated"), close=lambda: None)
    monkeypatch.setattr(overhead, "missing", lambda: ["llama_cpp"])
    monkeypatch.setattr(overhead, "start_worker", lambda config: worker)
    monkeypatch.setattr(overhead, "heldout_prompts", lambda *a: [(1, 2)])
    monkeypatch.setattr(overhead, "serve", lambda *a: ({"ttft_s": 0.1, "tpot_s": 0.01}, [[1, 2, 3]]))
    monkeypatch.setattr(overhead, "_layers", lambda *a: pytest.fail("it is measured alone"))
    against = (Against.LLAMA_CPP, Against.LAYERS)
    report = overhead.overhead(Overhead(against=against, pairs=2), None)
    assert [bar.name.partition(",")[0] for bar in report.bars] == ["tpot over all-resident"]
    assert report.ok
    (said,) = report.as_dict()["not_measured"]
    assert said.startswith("llama.cpp, without llama_cpp: pip install")


def test_a_server_that_lacks_packages_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_has_peer", lambda: False)
    monkeypatch.setattr(serve, "_transformers", lambda *a: pytest.fail("started"))
    monkeypatch.setattr(serve, "_tiermoe", lambda *a: nullcontext("http://here"))
    monkeypatch.setattr(serve, "heldout_prompts", lambda *a, **k: [(1, 2)])

    def case(name: str, url: str, model: str, streams: int, options: Any, texts: Any, answers: Any) -> Case:
        answers[name, streams] = [serve.Answered([0.1, 0.2], 2)] * 8
        return Case(name, lambda: {"tokens_per_s": float(streams)})

    monkeypatch.setattr(serve, "_case", case)
    report = serve.serve(Serve(streams=(1, 8), repeats=1, requests=1), None)
    assert [bar.name for bar in report.bars] == ["tiermoe 0.25: tokens/s of 8 streams over one"]
    assert report.ok
    assert {row["server"] for row in report.rows} == {"tiermoe 0.25", "tiermoe 0.5"}
    assert "not_measured" in report.as_dict()
