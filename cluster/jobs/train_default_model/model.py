"""The default model's architecture and its initial weights."""

from __future__ import annotations

import math
from typing import Any

MAX_CONTEXT_TOKENS = 2048


def default_config(**changes: Any) -> Any:
    """The ``Qwen3MoeConfig`` of the default model; ``changes`` replace single fields (for tests)."""
    from transformers import Qwen3MoeConfig

    fields: dict[str, Any] = {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": True,
        "max_position_embeddings": MAX_CONTEXT_TOKENS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rms_norm_eps": 1e-6,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    return Qwen3MoeConfig(**{**fields, **changes})


def new_model(config: Any, seed: int) -> Any:
    """A float32 model with initial weights: variance by fan-in, residual outputs scaled by depth."""
    import torch
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM(config).float()
    generator = torch.Generator().manual_seed(seed)
    residual = 1 / math.sqrt(2 * config.num_hidden_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(1.0)
                continue
            std = 0.02 if name.endswith("embed_tokens.weight") else 0.6 / math.sqrt(parameter.shape[-1])
            if name.endswith(("o_proj.weight", "down_proj")):
                std = residual / math.sqrt(parameter.shape[-1])
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return model
