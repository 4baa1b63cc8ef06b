"""`bench overhead` and `serve`: the GGUF of a checkpoint, llama.cpp's tokens, and peers that are not installed."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from serving import reference_greedy
from tiny_models import save_tiny_checkpoint
from transformers import AutoModelForCausalLM

from tiermoe.benchmarks.llama import LlamaCpp, missing, write_gguf
from tiermoe.cluster.config import default_model_dir
from tiermoe.errors import UnsupportedModelError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("overhead") / "model")


@pytest.mark.parametrize("default", [False, True])  # the default model has a head for drafts, which is left out
def test_a_gguf_has_every_weight_of_the_model(default: bool, checkpoint: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    checkpoint = default_model_dir() if default else checkpoint
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
