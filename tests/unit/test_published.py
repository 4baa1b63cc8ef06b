"""Published quantized checkpoints: prepared, served, and the tokens of the model of their dequantized values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from published import (
    FP8_CONFIG,
    PROMPTS,
    RELEASES,
    SIZES,
    TOKENS,
    Release,
    all_forms,
    q4_k_m,
    reference,
    write,
    write_gguf,
)
from serving import greedy, serving, settings
from tiny_models import save_tiny_checkpoint

from tiermoe.actors.combinations import check_combination
from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.checkpoints.hub import locate
from tiermoe.cluster.checkpoints.quantization import published_as
from tiermoe.cluster.config import default_model_dir, load_policy
from tiermoe.cluster.jobs.prepare import prepare
from tiermoe.cluster.prompt import load_tokenizer
from tiermoe.cluster.topology.inputs import facts_of_checkpoint
from tiermoe.errors import ConfigError

torch.set_num_threads(1)
_FAST = ("DeepSeek-V3", "gpt-oss-20b", "w4a16")


def cases() -> list[object]:
    fast = [release.name.endswith(_FAST) for release in RELEASES]
    return [
        pytest.param(release, id=release.name, marks=() if is_fast else pytest.mark.slow)
        for release, is_fast in zip(RELEASES, fast, strict=True)
    ]


@pytest.mark.parametrize("release", cases())
def test_a_release_gives_the_tokens_of_its_dequantized_self(release: Release, tmp_path: Path) -> None:
    published, oracle = write(release, tmp_path)
    store = ExpertStore(prepare(published, tmp_path / "store", progress=False))
    with serving(store, settings(0.25)) as worker:
        assert greedy(worker, PROMPTS, TOKENS) == reference(oracle)
        loaded = sum(layer.bytes_loaded for layer in worker.stats().layers)
        assert loaded > 0
        assert loaded % store.manifest.expert_nbytes() == 0


def q8_and_q6(name: str) -> str:
    return "F32" if "ffn_gate_inp" in name else "Q6_K" if "ffn_up_exps" in name else "Q8_0"


def gpt_oss(name: str) -> str:
    return "MXFP4" if "_exps" in name else "F16" if "attn" in name else "F32"


GGUFS = [  # model type, architecture, types, parts, kv_b in two, sizes
    pytest.param("qwen3_moe", "qwen3moe", q4_k_m, 1, False, {}, id="Qwen3 Q4_K_M"),
    pytest.param("qwen3_moe", "qwen3moe", q8_and_q6, 2, False, {}, id="Qwen3 Q8_0/Q6_K", marks=pytest.mark.slow),
    pytest.param("deepseek_v2", "deepseek2", q4_k_m, 1, False,
                 {"num_hidden_layers": 3, "kv_lora_rank": 256, "q_lora_rank": 256, "v_head_dim": 64},
                 id="DeepSeek-V2-Lite Q4_K_M"),
    pytest.param("mixtral", "llama", q8_and_q6, 1, False, {}, id="Mixtral Q8_0", marks=pytest.mark.slow),
    pytest.param("olmoe", "olmoe", all_forms, 1, False, {"num_hidden_layers": 8}, id="OLMoE, all forms"),
    # tensors that llama.cpp's converter makes of others: DeepSeek's kv_b_proj, gpt-oss's gate and up
    pytest.param("deepseek_v2", "deepseek2", lambda name: "F32", 1, True, {}, id="DeepSeek, kv_b in two"),
    pytest.param("gpt_oss", "gpt-oss", gpt_oss, 1, False, {}, id="gpt-oss"),
]  # fmt: skip


@pytest.mark.parametrize(("model_type", "architecture", "kinds", "parts", "split_kv", "sizes"), GGUFS)
def test_a_gguf_gives_the_tokens_of_its_dequantized_self(
    model_type: str, architecture: str, kinds: Callable[[str], str], parts: int, split_kv: bool, sizes: dict[str, Any],
    tmp_path: Path,
) -> None:  # fmt: skip
    head = {} if model_type.startswith("deepseek") else {"head_dim": 64}
    plain = save_tiny_checkpoint(model_type, tmp_path / "plain", **{**SIZES, **head, **sizes})
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    file, oracle = write_gguf(plain, tmp_path / "gguf", architecture, kinds, parts, split_kv=split_kv)
    shutil.copy(plain / "config.json", file.parent)
    check(prepare(locate(str(file.parent)), tmp_path / "store", progress=False), oracle)


def check(path: Path, oracle: Path) -> None:
    """The store gives the oracle's tokens."""
    with serving(ExpertStore(path), settings(0.25)) as worker:
        assert greedy(worker, PROMPTS, TOKENS) == reference(oracle)


@pytest.mark.parametrize("kind", ["BF16", *(pytest.param(k, marks=pytest.mark.slow) for k in ("F16", "F32", "Q8_0"))])
def test_a_gguf_of_the_default_model(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default_tokens: list[list[int]]
) -> None:
    """Configuration and tokenizer come from the file. Plain numbers give the default model's tokens."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    kinds = (lambda name: "F32") if kind == "F32" else (lambda name: "F32" if "ffn_gate_inp" in name else kind)
    file, oracle = write_gguf(default_model_dir(), tmp_path / "tiny-moe", "qwen3moe", kinds, tokenizer=True)
    checkpoint = locate(str(file))
    ours, theirs = load_tokenizer(checkpoint), load_tokenizer(default_model_dir())
    text = "The dragon said: hello, world! 123"
    assert ours.encode(text).ids == theirs.encode(text).ids
    store = ExpertStore(prepare(checkpoint, tmp_path / "store", progress=False))
    with serving(store, settings(0.25)) as worker:
        found = greedy(worker, PROMPTS, TOKENS)
    assert found == (reference(oracle) if kind == "Q8_0" else default_tokens)


@pytest.fixture(scope="module")
def default_tokens() -> list[list[int]]:
    return reference(default_model_dir())


@pytest.mark.parametrize("preset", ["moepic", "hobbit", "mixtral-offloading-swap"])
def test_policies_that_need_full_precision_are_refused(preset: str) -> None:
    chosen = settings(0.5, policy=load_policy(preset))
    with pytest.raises(ConfigError, match="fp8_block"):
        check_combination(chosen, "fp8_block")
    check_combination(chosen)
    for usable in ("next-gate", "static-ndp", "context-ndp-full", "context-ndp-2bit", "context-ndp-uniform"):
        check_combination(settings(0.5, policy=load_policy(usable)), "fp8_block")


def test_the_plan_from_a_configuration_alone(tmp_path: Path) -> None:
    """Form, bytes and disk of published models before any weight is there."""
    head = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_experts": 128,
            "num_experts_per_tok": 8, "vocab_size": 151936, "num_attention_heads": 32, "num_key_value_heads": 4,
            "head_dim": 128, "dtype": "bfloat16"}  # fmt: skip
    each = 3 * 2048 * 768
    expected = {  # bytes of an expert: codes and scales
        "fp8": (each + 3 * 6 * 16 * 4, True), "gptq": (each // 2 + each // 128 * 2, False),
        "nvfp4": (each // 2 + each // 16 + 3 * 4, True),
    }  # fmt: skip
    configs = {"fp8": FP8_CONFIG, "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
               "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}}  # fmt: skip
    for name, (nbytes, mapped) in expected.items():
        (tmp_path / "config.json").write_text(json.dumps({**head, "quantization_config": configs[name]}))
        facts = facts_of_checkpoint(tmp_path)
        assert (facts.expert_bytes, facts.mapped_bytes) == (nbytes, 48 * 128 * nbytes if mapped else 0)
        assert (facts.store_bytes < 10e9) == mapped
        assert published_as(tmp_path) is not None
