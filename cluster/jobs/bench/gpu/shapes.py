"""The published shapes that are measured, and toy ones with the same architectures.

Hyper-parameters are those of the models' own configuration files: mistralai/Mixtral-8x7B-v0.1, Qwen/Qwen1.5-MoE-A2.7B,
deepseek-ai/DeepSeek-V2-Lite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .....actors.store.format import ExpertShape


@dataclass(frozen=True)
class RealShape:
    """One model.

    Attributes:
        model_type: transformers' name of the architecture.
        layers: decoder layers, `dense_layers` of which have no experts.
        shrinks: whether fewer layers may be run where memory does not hold all.
    """

    name: str
    model_type: str
    layers: int
    dense_layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    options: dict[str, Any]
    shrinks: bool = False

    @property
    def expert(self) -> ExpertShape:
        """Of one routed expert."""
        return ExpertShape(
            num_experts=self.experts, hidden=self.hidden, intermediate=self.intermediate, gates=2, has_bias=False
        )

    def config(self, moe_layers: int) -> Any:
        """transformers' configuration with so many layers that have experts."""
        from transformers import AutoConfig

        options = self.options | {
            "hidden_size": self.hidden, "num_hidden_layers": moe_layers + self.dense_layers,
            "num_experts_per_tok": self.top_k,
        }  # fmt: skip
        return AutoConfig.for_model(self.model_type, **options)


MIXTRAL = RealShape(
    "Mixtral-8x7B", "mixtral", layers=32, dense_layers=0, experts=8, top_k=2, hidden=4096, intermediate=14336,
    shrinks=True,
    options={
        "intermediate_size": 14336, "num_local_experts": 8, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 32000, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "sliding_window": None,
    },
)  # fmt: skip
QWEN = RealShape(
    "Qwen1.5-MoE-A2.7B", "qwen2_moe", layers=24, dense_layers=0, experts=60, top_k=4, hidden=2048, intermediate=1408,
    options={
        "intermediate_size": 5632, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        "num_experts": 60, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 151936,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "norm_topk_prob": False, "decoder_sparse_step": 1,
        "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
)  # fmt: skip
DEEPSEEK = RealShape(
    "DeepSeek-V2-Lite", "deepseek_v2", layers=27, dense_layers=1, experts=64, top_k=6, hidden=2048, intermediate=1408,
    options={
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_group": 1,
        "topk_group": 1, "topk_method": "greedy", "routed_scaling_factor": 1.0, "norm_topk_prob": False,
        "vocab_size": 102400, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40, "beta_fast": 32, "beta_slow": 1,
            "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
        },
    },
)  # fmt: skip

REAL = {"mixtral": MIXTRAL, "qwen": QWEN, "deepseek": DEEPSEEK}

_SMALL: dict[str, Any] = {
    "vocab_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    "intermediate_size": 96,
}  # fmt: skip


def _toy(shape: RealShape, layers: int, experts: int, **sizes: int) -> RealShape:
    """The same architecture in a size that a CPU runs in milliseconds."""
    return RealShape(
        f"toy {shape.name}", shape.model_type, layers, shape.dense_layers, experts, 2, 64, 96,
        shape.options | _SMALL | sizes, shape.shrinks,
    )  # fmt: skip


TOY = {
    "mixtral": _toy(MIXTRAL, 3, 8, num_local_experts=8),
    "qwen": _toy(QWEN, 3, 12, num_experts=12, moe_intermediate_size=96, shared_expert_intermediate_size=64),
    "deepseek": _toy(
        DEEPSEEK, 4, 12, n_routed_experts=12, moe_intermediate_size=96, kv_lora_rank=32, qk_rope_head_dim=16,
        qk_nope_head_dim=16, v_head_dim=16,
    ),
}  # fmt: skip
TOY["mixtral"].options["intermediate_size"] = 96
