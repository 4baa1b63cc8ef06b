"""Checkpoints of random weights in the shapes of real models, for benchmarks whose figures weights do not change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder
