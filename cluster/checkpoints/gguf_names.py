"""The names of tensors in GGUF files, those of llama.cpp's `gguf-py`, by transformers' names of parameters."""

from __future__ import annotations

import re

from .gguf_architectures import ARCHITECTURES

_LAYER_NUMBER = re.compile(r"\.layers\.(\d+)\.(.*)")
_WHOLE = {  # outside the layers
    "embed_tokens": "token_embd", "embeddings": "token_embd", "norm": "output_norm", "norm_f": "output_norm",
    "final_layernorm": "output_norm", "embedding_norm": "token_embd_norm", "lm_head": "output",
    "hc_head.hc_fn": "output_hc_fn.weight", "hc_head.hc_base": "output_hc_base.weight",
    "hc_head.hc_scale": "output_hc_scale.weight", "hyper_connection_mixer.hc_norm": "output_hc_norm",
    "hyper_connection_mixer.input_mix_weight_down": "output_hc_down",
    "hyper_connection_mixer.input_mix_weight_up": "output_hc_up",
    "embed_tokens_per_layer": "per_layer_token_embd", "per_layer_model_projection": "per_layer_model_proj",
    "per_layer_projection_norm": "per_layer_proj_norm",
}  # fmt: skip
_FEED_FORWARD = ("gate", "up", "down")
_LAYER = {
    "input_layernorm": "attn_norm", "operator_norm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "ffn_norm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in ("q", "k", "v", "q_a", "q_b", "kv_b")},
    "self_attn.o_proj": "attn_output", "self_attn.out_proj": "attn_output", "self_attn.sinks": "attn_sinks.weight",
    **{f"self_attn.{part}_{norm}": f"attn_{part}_norm" for part in "qk" for norm in ("norm", "layernorm")},
    "self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    **{f"self_attn.{part}_a_layernorm": f"attn_{part}_a_norm" for part in ("q", "kv")},
    "self_attn.indexer.wq_b": "indexer.attn_q_b", "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.weights_proj": "indexer.proj",
    **{f"self_attn.indexer.{part}": f"indexer.{part}" for part in ("q_proj", "k_proj", "q_norm", "k_norm")},
    "self_attn.indexer.index_kpool_compress_ape": "indexer_compressor_ape.weight",
    "self_attn.indexer.index_kpool_compress_gate": "indexer_compressor_gate.weight",
    "self_attn.forget_gate.dt_bias": "ssm_dt.bias", "self_attn.forget_gate.f_a_proj": "ssm_f_a",
    "self_attn.forget_gate.f_b_proj": "ssm_f_b", "self_attn.b_proj": "ssm_beta", "self_attn.g_a_proj": "ssm_g_a",
    "self_attn.g_b_proj": "ssm_g_b", "self_attn.o_norm": "ssm_norm",
    **{f"conv.{part}": f"shortconv.{part}" for part in ("conv", "in_proj", "out_proj")},
    "mamba.dt_bias": "ssm_dt.bias", "mamba.in_proj": "ssm_in", "mamba.out_proj": "ssm_out",
    "mamba.conv1d": "ssm_conv1d",
    **{f"{path}.{part}_proj": f"ffn_{part}" for path in ("mlp", "feed_forward") for part in _FEED_FORWARD},
    "feed_forward.w1": "ffn_gate", "feed_forward.w2": "ffn_down", "feed_forward.w3": "ffn_up",
    **{f"mlp.{path}.{part}_proj": f"ffn_{part}_shexp"
       for path in ("shared_experts", "shared_expert", "shared_mlp") for part in _FEED_FORWARD},
    "shared_mlp.output_linear": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **dict.fromkeys(("mlp.gate", "mlp.router", "mlp.router.gate", "mlp.gate.wg", "feed_forward.gate",
                     "block_sparse_moe.router"), "ffn_gate_inp"),
    **dict.fromkeys(("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias", "mlp.expert_bias",
                     "mlp.gate.moe_statics.e_score_correction_bias", "feed_forward.expert_bias"), "exp_probs_b.bias"),
}  # fmt: skip
# files have one of these, by the age of the converter or by the architecture
_SAME = {"exp_probs_b.bias": "exp_probs_b", "token_embd_norm.weight": "output_norm.weight"}


def layer_of(parameter: str) -> tuple[str, str] | None:
    """A parameter's layer and its name there, such as ("3", "self_attn.q_proj.weight"); None: it is outside."""
    match = _LAYER_NUMBER.search(f".{parameter}")
    return None if match is None else (match[1], match[2])


def tensor_names(architecture: str, parameter: str) -> list[str]:
    """The names that a parameter's tensor may have in a file; empty: it has none."""
    layer = layer_of(parameter)
    if layer is None:
        table, prefix, own = _WHOLE, "", re.sub(r"^model\.|^language_model\.", "", parameter)
        own = own.removeprefix("language_model.")
    else:
        table, prefix, own = {**_LAYER, **ARCHITECTURES[architecture].tensors}, f"blk.{layer[0]}.", layer[1]
    found = table.get(own)
    if found is None:
        base, _, suffix = own.rpartition(".")
        if base not in table:
            return []
        found = f"{table[base]}.{suffix}"
    if found.startswith("per_layer_"):  # of the whole model, whichever layer looks it up
        prefix = ""
    return [prefix + name for name in (found, _SAME.get(found)) if name is not None]
