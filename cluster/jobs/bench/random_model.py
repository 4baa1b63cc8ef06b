"""Checkpoints of random weights in the shapes of real models, for benchmarks whose figures weights do not change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class MoeShape:
    """A Mixtral-like model of `layers` layers; `experts` gated experts of hidden x intermediate each."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    vocabulary: int = 512


def save_random_model(shape: MoeShape, folder: Path, seed: int = 0) -> Path:
    """Write a bfloat16 checkpoint; the folder."""
    import torch
    from transformers import AutoModelForCausalLM, MixtralConfig

    heads = max(1, shape.hidden // 64)
    config = MixtralConfig(
        hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=shape.layers,
        num_local_experts=shape.experts, num_experts_per_tok=shape.top_k, num_attention_heads=heads,
        num_key_value_heads=heads, vocab_size=shape.vocabulary, max_position_embeddings=1024,
    )  # fmt: skip
    torch.manual_seed(seed)
    return _save(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), folder)


def save_qwen3_layers(layers: int, folder: Path, seed: int = 0) -> Path:
    """Write some layers of Qwen3-30B-A3B's shape, with a vocabulary of 4,096, in bfloat16; the folder."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=layers, num_experts=128,
        num_experts_per_tok=8, num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=4096,
        max_position_embeddings=4096, tie_word_embeddings=True, norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(seed)
    return _save(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), folder)


def _save(model: Any, folder: Path) -> Path:
    import torch

    with torch.no_grad():  # else the mean over the context dominates, and all tokens take the same experts
        model.get_input_embeddings().weight.normal_()
    model.save_pretrained(folder)
    return folder
