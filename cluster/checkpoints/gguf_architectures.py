"""The architectures of GGUF files: the keys that llama.cpp reads of each, and the tensors that each names its own way.

Keys are those of `load_hparams` and `load_arch_hparams`: those that a configuration of transformers has a name for, and
those that are accepted with the values that change nothing. Any other key, or any other value, refuses the file by the
key's name. The names that all share are in `gguf_names`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Of = str | Callable[[Any], Any]  # a name of transformers' configurations, or what makes the value of one


@dataclass(frozen=True)
class RopeKeys:
    """Where the rotary embedding of some layers is.

    base, width: the keys. scaled: `rope.scaling.*` counts. divided: `rope_freqs.weight` counts.
    """

    base: str = "rope.freq_base"
    width: str = "rope.dimension_count"
    scaled: bool = True
    divided: bool = True


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Attributes:
        names: key -> the configuration's name for it.
        layers: key with a value for each layer -> what makes them of a configuration.
        neutral: key -> values that llama.cpp computes with as if the key were absent.
        shapes: keys that only give sizes, which the tensors have, too.
        absent: key -> the value that llama.cpp uses if the key is absent, or what makes it of the header; of `layers`,
            that of each layer.
        tensors: parameter -> tensor, where it is not as in most architectures (`_LAYER`).
        numbers: parameter -> key with its numbers, where a file has no tensor for it.
        plus_one: whether the file has norms with one added, by the parameter's name in its layer.
        permuted: the rows of queries and keys have the halves of a head's rotation side by side.
        windows: without a pattern, every so manieth layer has full attention, the others a sliding window; and whether
            the first layer has; 0: llama.cpp needs the pattern.
        ropes: kind of layers, by transformers' name -> their rotary embedding, where it is not that of all.
        yarn_in_attention: yarn's factor of sine and cosine is part of the scale of attention.
        fixed: what llama.cpp computes with in every file, by the configuration's names.
        rope: tensors of the rotary embedding that the file may have.
    """

    names: Mapping[str, Of] = field(default_factory=dict)
    layers: Mapping[str, Callable[[Any], list[Any]]] = field(default_factory=dict)
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    shapes: frozenset[str] = frozenset()
    absent: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    plus_one: Callable[[str], bool] = lambda name: False
    permuted: bool = False
    windows: tuple[int, bool] = (0, False)
    ropes: Mapping[str, RopeKeys] = field(default_factory=dict)
    yarn_in_attention: bool = False
    fixed: Mapping[str, Any] = field(default_factory=dict)
    rope: tuple[str, ...] = ()


FREQUENCIES = "rope_freqs.weight"
SHORT_AND_LONG = {"rope_factors_short.weight": "short_factor", "rope_factors_long.weight": "long_factor"}
_LONG_ROPE = (FREQUENCIES, *SHORT_AND_LONG)
COMMON: Mapping[str, Of] = {
    "embedding_length": "hidden_size", "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "expert_used_count": "num_experts_per_tok",
}  # fmt: skip
INFORMATIVE = ("context_length", "rope.scaling.finetuned", "vocab_size")
ROPE = (
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor",
)  # fmt: skip
WINDOWS, RECURRENT = "attention.sliding_window_pattern", "attention.recurrent_layers"
INTERVAL = "full_attention_interval"  # of linear attention, if there is no `RECURRENT`
_OF_WINDOWS = ("rope.freq_base_swa", "rope.dimension_count_swa")
_PLAIN_WINDOWS = {"sliding_attention": RopeKeys(*_OF_WINDOWS, scaled=False, divided=False)}
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,), "pooling_type": (0,), "nextn_predict_layers": (0,), "leading_dense_block_count": (0,),
    "expert_group_count": (0, 1), "expert_group_used_count": (0, 1), "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,), "expert_weights_scale": (0, 1), "expert_gating_func": (1,),
    "attention.clamp_kqv": (0,), "attention.sliding_window": (0,), "attention.max_alibi_bias": (0,),
    "attention.scale": (0,), "logit_scale": (0, 1), "embedding_scale": (0, 1), "residual_scale": (0, 1),
    "rope.scaling.alpha": (0,), "rope.scaling.yarn_ext_factor": (1,), "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_beta_fast": (32,), "rope.scaling.yarn_beta_slow": (1,),
    "tensor_data_layout": ("Meta AI original pth",),
}  # fmt: skip

# --- keys that several architectures have --------------------------------------------------------------------------

_HEAD: Mapping[str, Of] = {"attention.key_length": "head_dim", "attention.value_length": "head_dim"}
_ROUTING: Mapping[str, Of] = {"expert_weights_norm": "norm_topk_prob", "expert_weights_scale": "routed_scaling_factor",
                               "expert_group_count": "n_group", "expert_group_used_count": "topk_group"}  # fmt: skip
_PLAIN_ROUTING = {"expert_weights_norm": False, "expert_weights_scale": 1.0}
_SIGMOID = {"expert_gating_func": (2,)}
_LATER = (
    "expert_feed_forward_length", "feed_forward_length", "leading_dense_block_count", "expert_shared_count",
    "nextn_predict_layers",
)  # fmt: skip
_SHARED_WIDTH = "expert_shared_feed_forward_length"
_MLA: Mapping[str, Of] = {"attention.key_length_mla": "qk_head_dim", "attention.value_length_mla": "v_head_dim"}
_MLA_SHAPES = ("attention.q_lora_rank", "attention.kv_lora_rank", "attention.key_length", "attention.value_length",
               "attention.head_count_kv")  # fmt: skip
_INDEXER: Mapping[str, Of] = {
    "attention.indexer.head_count": "index_n_heads", "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}  # fmt: skip
_COMPRESSED_BASE = "attention.compress_rope_freq_base"
_YARN_LOGARITHM = "rope.scaling.yarn_log_multiplier"
_GRANITE: Mapping[str, Of] = {
    "expert_count": "num_local_experts", "logit_scale": "logits_scaling", "residual_scale": "residual_multiplier",
    "embedding_scale": "embedding_multiplier", "attention.scale": "attention_multiplier",
}  # fmt: skip
_HYPER: Mapping[str, Of] = {
    "hyper_connection.count": "hc_mult", "hyper_connection.sinkhorn_iterations": "hc_sinkhorn_iters",
    "hyper_connection.epsilon": "hc_eps",
}  # fmt: skip
_HYPER_TENSORS = {
    f"{of}_hc.{part}": f"hc_{of}_{part}.weight" for of in ("attn", "ffn") for part in ("fn", "base", "scale")
}


def _yarn_logarithm(config: Any) -> float:
    return 0.1 * ((config.rope_parameters or {}).get("mscale_all_dim") or 0)


def _base_of_windows(config: Any) -> Any:
    return config.rope_parameters["rope_theta"]


def common(of_layers: int | list[int]) -> int:
    """A number, or the one that all layers have; 0: they have several."""
    if isinstance(of_layers, int):
        return of_layers
    return of_layers[0] if len(set(of_layers)) == 1 else 0


def _kinds(config: Any) -> list[str]:
    """Of the attention of each layer; transformers has other words for full attention that reads chosen keys."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    return ["full_attention" if kind in ("indexed_attention", "attention") else kind for kind in kinds]


def _windows(config: Any) -> list[bool]:
    return [kind == "sliding_attention" for kind in _kinds(config)]


def _linear(config: Any) -> list[bool]:
    return [kind == "linear_attention" for kind in _kinds(config)]


def _heads_of_attention(config: Any) -> list[int]:
    """Key heads of each layer; those without attention have none."""
    return [config.num_key_value_heads if kind == "full_attention" else 0 for kind in _kinds(config)]


def _latent_of_attention(config: Any) -> list[int]:
    return [int(kind == "full_attention") for kind in _kinds(config)]


def _indexers(config: Any) -> list[bool]:
    return [kind == "full" for kind in config.indexer_types]


def _head_of(kind: str) -> Callable[[Any], int | None]:
    """The head's size in layers of a kind."""

    def found(config: Any) -> int | None:
        kinds = zip(config.layer_types, config.per_layer_config, strict=True)
        return next((one.head_dim for own, one in kinds if own == kind), None)

    return found


def _scores_of_deepseek(header: Any) -> int:
    """Softmax, as of V2; but of GLM-4.7-Flash, whose first files do not say so."""
    embedding = header.tensors.get("token_embd.weight")
    flash = header.get("block_count") in (47, 48) and embedding is not None and embedding.shape[0] == 154880
    return 2 if flash else 1


def _last_end(config: Any) -> int:
    """The end of a text as the converter takes it for n-grams: the last of several."""
    ends = config.eos_token_id
    return int(ends[-1] if isinstance(ends, list) else ends)


def _dense_first(config: Any) -> int:
    """Layers with a dense feed-forward before those with experts; -1: they are elsewhere, too."""
    kinds = [kind == "dense" for kind in config.mlp_layer_types]
    return sum(kinds) if kinds == sorted(kinds, reverse=True) else -1


def _each(name: str) -> Callable[[Any], list[Any]]:
    """One value of a configuration in each layer."""
    return lambda config: [getattr(config, name)] * config.num_hidden_layers


DELTA_NET: Mapping[str, Of] = {
    "expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size",
    _SHARED_WIDTH: "shared_expert_intermediate_size", "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim", "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": lambda config: config.linear_num_value_heads * config.linear_value_head_dim,
}  # fmt: skip

_NGRAM_NUMBERS = {
    "ple.ple_embedding.layer_multipliers": "ple.layer_multipliers",
    "ple.ple_embedding.ngram_heads_offsets": "ple.head_offsets",
    "ple.ple_embedding.ngram_heads_vocab_sizes": "ple.head_vocab_sizes",
}


def _plus_one(name: str) -> bool:
    return (name.endswith("norm.weight") and name != "linear_attn.norm.weight") or name.startswith("ple.norm_")


_AFTER_ATTENTION = {"post_attention_layernorm": "post_attention_norm"}
_DELTA_NET_LAYERS = {RECURRENT: _linear}


ARCHITECTURES: Mapping[str, Architecture] = {
    "qwen2moe": Architecture(
        names={**_HEAD, "expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size",
               _SHARED_WIDTH: "shared_expert_intermediate_size"},
        neutral={"expert_weights_norm": (False,)},
        fixed={"norm_topk_prob": False},
    ),
    "qwen3moe": Architecture(
        names={**_HEAD, "expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"},
        neutral={"expert_weights_norm": (True,)},
        fixed={"norm_topk_prob": True},
    ),
    "qwen3vlmoe": Architecture(  # of text alone, which is Qwen3's
        names={**_HEAD, "expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"},
        neutral={"expert_weights_norm": (True,)}, shapes=frozenset({"n_deepstack_layers", "rope.dimension_sections"}),
        fixed={"norm_topk_prob": True},
    ),
    "qwen3next": Architecture(
        names={**_HEAD, **DELTA_NET}, layers=_DELTA_NET_LAYERS,
        neutral={"expert_weights_norm": (True,)},
        shapes=frozenset({INTERVAL, "nextn_predict_layers"}),
        tensors=_AFTER_ATTENTION, plus_one=_plus_one,
        fixed={"norm_topk_prob": True},
    ),
    "qwen35moe": Architecture(
        names={**_HEAD, **DELTA_NET}, layers=_DELTA_NET_LAYERS,
        neutral={"expert_weights_norm": (True,)},
        shapes=frozenset({INTERVAL, "nextn_predict_layers", "rope.dimension_sections"}),
        tensors=_AFTER_ATTENTION, plus_one=_plus_one,
    ),
    "olmoe": Architecture(
        names={**_HEAD, "expert_count": "num_experts"},
        neutral={"expert_weights_norm": (False,)}, shapes=frozenset({"expert_feed_forward_length"}),
        fixed={"norm_topk_prob": False, "clip_qkv": None},
    ),
    "llama": Architecture(
        names={**_HEAD, "expert_count": "num_local_experts"},
        neutral={"expert_weights_norm": (True,)}, shapes=frozenset({"expert_feed_forward_length"}), permuted=True,
        rope=_LONG_ROPE,
        fixed={"sliding_window": None},
    ),
    "granitemoe": Architecture(
        names={**_HEAD, **_GRANITE}, neutral={"expert_weights_norm": (True,)},
        shapes=frozenset({_SHARED_WIDTH}), permuted=True, rope=_LONG_ROPE,
    ),
    "granite_swa": Architecture(
        names={**_HEAD, **_GRANITE, "attention.sliding_window": "sliding_window"},
        layers={WINDOWS: _windows,
                "attention.rope_pattern": lambda config: [one is not None for one in config.layer_rope_theta]},
        neutral={"expert_weights_norm": (True,)}, absent={"attention.rope_pattern": True},
        shapes=frozenset({_SHARED_WIDTH}), permuted=True, rope=_LONG_ROPE,
    ),
    "granitehybrid": Architecture(
        names={**_HEAD, **_GRANITE, "ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state",
               "ssm.group_count": "mamba_n_groups", "ssm.time_step_rank": "mamba_n_heads",
               "ssm.inner_size": lambda config: config.mamba_n_heads * config.mamba_d_head,
               "rope.scaling.finetuned": lambda config: config.position_embedding_type == "rope"},
        layers={"attention.head_count_kv": _heads_of_attention},
        neutral={"expert_weights_norm": (True,)}, absent={"rope.scaling.finetuned": True},
        shapes=frozenset({_SHARED_WIDTH}), permuted=True, rope=_LONG_ROPE,
    ),
    "deepseek2": Architecture(
        names={**_ROUTING, **_MLA, "expert_count": "n_routed_experts", _YARN_LOGARITHM: _yarn_logarithm,
               "expert_gating_func": lambda config: 1 if config.model_type == "deepseek_v2" else 2},
        neutral={"expert_gating_func": ()},
        yarn_in_attention=True, shapes=frozenset({*_LATER, *_MLA_SHAPES}),
        absent={**_PLAIN_ROUTING, "expert_gating_func": _scores_of_deepseek},
    ),
    "deepseek32": Architecture(
        names={**_ROUTING, **_MLA, **_INDEXER, "expert_count": "n_routed_experts", _YARN_LOGARITHM: _yarn_logarithm},
        neutral=_SIGMOID, yarn_in_attention=True, shapes=frozenset({*_LATER, *_MLA_SHAPES}), absent=_PLAIN_ROUTING,
    ),
    "glm-dsa": Architecture(
        names={**_ROUTING, **_MLA, **_INDEXER, "expert_count": "n_routed_experts", _YARN_LOGARITHM: _yarn_logarithm},
        layers={"attention.indexer.types": _indexers}, neutral={"expert_gating_func": (0, 2)},
        yarn_in_attention=True, shapes=frozenset({*_LATER, *_MLA_SHAPES}),
        absent={**_PLAIN_ROUTING, "attention.indexer.types": True},
    ),
    "mistral4": Architecture(
        names={**_ROUTING, **_MLA, "expert_count": "n_routed_experts", _YARN_LOGARITHM: _yarn_logarithm},
        yarn_in_attention=True, shapes=frozenset({*_LATER, *_MLA_SHAPES}), absent=_PLAIN_ROUTING,
    ),
    "glm4moe": Architecture(
        names={**_HEAD, **_ROUTING, "expert_count": "n_routed_experts"},
        neutral={"expert_gating_func": (0, 2)}, tensors=_AFTER_ATTENTION,
        shapes=frozenset({*_LATER, "rope.dimension_sections"}), absent=_PLAIN_ROUTING,
    ),
    "gpt-oss": Architecture(
        names={**_HEAD, "expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size",
               "attention.sliding_window": "sliding_window", "rope.freq_base_swa": _base_of_windows},
        layers={WINDOWS: _windows}, neutral={"expert_gating_func": (1, 3)}, tensors=_AFTER_ATTENTION,
        windows=(2, False),
    ),
    "minimax-m2": Architecture(
        names={**_HEAD, "expert_count": "num_local_experts"},
        neutral={**_SIGMOID, "expert_weights_norm": (True,)}, shapes=frozenset({"expert_feed_forward_length"}),
    ),
    "minimax-m3": Architecture(
        names={**_HEAD, "expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size",
               "feed_forward_length": "dense_intermediate_size", "expert_weights_scale": "routed_scaling_factor",
               "leading_dense_block_count": _dense_first, "attention.indexer.head_count": "index_n_heads",
               "attention.indexer.key_length": "index_head_dim", "attention.indexer.top_k": "index_topk_blocks",
               "attention.indexer.block_size": "index_block_size",
               "attention.indexer.local_blocks": "index_local_blocks"},
        neutral={**_SIGMOID, "expert_weights_norm": (True,)}, shapes=frozenset({"expert_shared_count"}),
        absent={"expert_weights_scale": 1.0, "expert_weights_norm": False}, plus_one=_plus_one,
    ),
    "gemma4": Architecture(
        names={"expert_count": "num_experts", "expert_used_count": "top_k_experts",
               "expert_feed_forward_length": "moe_intermediate_size", "attention.sliding_window": "sliding_window",
               "attention.key_length": _head_of("full_attention"), "attention.value_length": _head_of("full_attention"),
               "attention.key_length_swa": _head_of("sliding_attention"),
               "attention.value_length_swa": _head_of("sliding_attention"),
               "attention.shared_kv_layers": "num_kv_shared_layers",
               "final_logit_softcapping": "final_logit_softcapping",
               "embedding_length_per_layer_input": "hidden_size_per_layer_input"},
        layers={WINDOWS: _windows,
                "attention.head_count_kv": lambda config: [one.num_key_value_heads for one in config.per_layer_config],
                },
        shapes=frozenset(_OF_WINDOWS), absent={"final_logit_softcapping": None}, ropes=_PLAIN_WINDOWS,
        rope=(FREQUENCIES,),
        tensors={
            **_AFTER_ATTENTION, "layer_scalar": "layer_output_scale.weight", "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm", "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
            "post_feedforward_layernorm_1": "post_ffw_norm_1", "post_feedforward_layernorm_2": "post_ffw_norm_2",
            "router.proj": "ffn_gate_inp", "router.scale": "ffn_gate_inp.scale",
            "router.per_expert_scale": "ffn_down_exps.scale", "per_layer_input_gate": "inp_gate",
            "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm",
        },
    ),
    "dots1": Architecture(
        names={**_HEAD, **_ROUTING, "expert_count": "n_routed_experts"},
        neutral=_SIGMOID, shapes=frozenset(_LATER), absent=_PLAIN_ROUTING,
    ),
    "hunyuan-moe": Architecture(
        names={**_HEAD, "expert_count": "num_experts", "expert_used_count": lambda config: common(config.moe_topk)},
        neutral={"expert_weights_norm": (True,)},
        shapes=frozenset({"expert_feed_forward_length", _SHARED_WIDTH, "expert_shared_count"}),
    ),
    "hy_v3": Architecture(
        names={**_HEAD, "expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size",
               "expert_weights_scale": "router_scaling_factor"},
        neutral={"expert_gating_func": (0, 2), "expert_weights_norm": (True,)},
        shapes=frozenset({*_LATER, _SHARED_WIDTH}),
        absent={"expert_weights_scale": 1.0, "expert_weights_norm": False},
    ),
    "ernie4_5-moe": Architecture(
        names={**_HEAD, "expert_count": "moe_num_experts", "expert_used_count": "moe_k",
               "interleave_moe_layer_step": "moe_layer_interval"},
        neutral={"expert_weights_norm": (True,)}, shapes=frozenset({*_LATER, _SHARED_WIDTH}),
    ),
    "lfm2moe": Architecture(
        names={**_HEAD, "expert_count": "num_experts", "expert_weights_scale": "routed_scaling_factor",
               "expert_weights_norm": "norm_topk_prob", "attention.layer_norm_rms_epsilon": "norm_eps",
               "shortconv.l_cache": "conv_L_cache"},
        layers={"attention.head_count_kv": _heads_of_attention},
        neutral=_SIGMOID, shapes=frozenset(_LATER),
        absent={"expert_weights_norm": True, "expert_weights_scale": 1.0},
    ),
    "phimoe": Architecture(
        names={**_HEAD, "expert_count": "num_local_experts", "attention.sliding_window": "sliding_window"},
        rope=tuple(SHORT_AND_LONG),
    ),
    "afmoe": Architecture(
        names={**_HEAD, "expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size",
               "expert_shared_count": "num_shared_experts", "expert_weights_scale": "route_scale",
               "leading_dense_block_count": "num_dense_layers", "attention.sliding_window": "sliding_window",
               "rope.freq_base_swa": _base_of_windows,
               "embedding_scale": lambda config: config.hidden_size**0.5 if config.mup_enabled else 1.0},
        layers={WINDOWS: _windows},
        neutral={"expert_gating_func": (0, 2), "expert_weights_norm": (True,)},
        windows=(4, False), absent={"expert_weights_scale": 1.0, "expert_weights_norm": False},
        tensors={**_AFTER_ATTENTION, "self_attn.gate_proj": "attn_gate", "pre_mlp_layernorm": "ffn_norm",
                 "post_mlp_layernorm": "post_ffw_norm"},
    ),
    "exaone-moe": Architecture(
        names={**_HEAD, **_ROUTING, "expert_count": "num_experts", "attention.sliding_window": "sliding_window",
               "expert_feed_forward_length": "moe_intermediate_size", "rope.freq_base_swa": _base_of_windows},
        layers={WINDOWS: _windows},
        windows=(4, False), neutral=_SIGMOID, shapes=frozenset({*_LATER, _SHARED_WIDTH}), absent=_PLAIN_ROUTING,
    ),
    "laguna": Architecture(
        names={**_HEAD, "expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size",
               "expert_weights_scale": "moe_routed_scaling_factor", "attention.sliding_window": "sliding_window",
               _SHARED_WIDTH: "shared_expert_intermediate_size", "leading_dense_block_count": _dense_first},
        layers={WINDOWS: _windows,
                "attention.head_count": lambda config: config.num_attention_heads_per_layer},
        neutral={"expert_gating_func": (0, 2), "expert_weights_norm": (True,)},
        shapes=frozenset({"expert_shared_count", *_OF_WINDOWS}),
        absent={"expert_weights_scale": 1.0, "expert_weights_norm": False},
        windows=(4, True), tensors={"self_attn.g_proj": "attn_gate"}, ropes=_PLAIN_WINDOWS,
    ),
    "mellum": Architecture(
        names={**_HEAD, "expert_count": "num_local_experts", "expert_feed_forward_length": "moe_intermediate_size",
               "attention.sliding_window": "sliding_window", "expert_weights_norm": "norm_topk_prob"},
        layers={WINDOWS: _windows}, windows=(4, False), absent={"expert_weights_norm": True},
        shapes=frozenset(_OF_WINDOWS), ropes=_PLAIN_WINDOWS,
    ),
    "mimo2": Architecture(
        names={**_ROUTING, "expert_count": "n_routed_experts", "expert_feed_forward_length": "moe_intermediate_size",
               "attention.key_length": "head_dim", "attention.value_length": "v_head_dim",
               "attention.sliding_window": "sliding_window", "attention.value_scale": "attention_value_scale"},
        layers={WINDOWS: _windows,
                "attention.head_count_kv": lambda config: [
                    getattr(config, "swa_num_key_value_heads", None) or config.num_key_value_heads
                    if sliding else config.num_key_value_heads for sliding in _windows(config)]},
        neutral=_SIGMOID, shapes=frozenset({*_LATER, *_OF_WINDOWS}), ropes=_PLAIN_WINDOWS,
        absent={"expert_weights_norm": True, "expert_weights_scale": 1.0, "attention.value_scale": 1.0},
        tensors={"self_attn.attention_sink_bias": "attn_sinks.weight", "self_attn.sinks": "attn_sinks.weight"},
    ),
    "cohere2moe": Architecture(
        names={**_HEAD, "expert_count": "num_experts", "expert_feed_forward_length": "intermediate_size",
               "feed_forward_length": "prefix_dense_intermediate_size", "expert_weights_norm": "norm_topk_prob",
               "attention.layer_norm_epsilon": "layer_norm_eps", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
               "logit_scale": "logit_scale", "leading_dense_block_count": _dense_first,
               "expert_gating_func": lambda config: 1 if config.expert_selection_fn == "softmax" else 2,
               "attention.sliding_window": "sliding_window", "expert_shared_count": "num_shared_experts",
               "rope.freq_base_swa": _base_of_windows},
        layers={WINDOWS: _windows}, windows=(4, True), neutral={"expert_gating_func": ()},
        shapes=frozenset({_SHARED_WIDTH, "nextn_predict_layers"}),
        absent={"expert_gating_func": 2, "expert_weights_norm": False},
    ),
    "qwen4exp": Architecture(
        names={**_HEAD, **DELTA_NET, "hyper_connection.count": "hc_count",
               "hyper_connection.low_rank": "hc_lowrank", "attention.indexer.head_count": "indexer_n_heads",
               "attention.indexer.key_length": "indexer_head_dim", "attention.indexer.top_k": "indexer_budget",
               "ple.ngram_size": "ngram_size", "ple.heads_per_ngram": "heads_per_ngram",
               "ple.conv_kernel": "ple_conv_kernel_size", "ple.eos_token_id": _last_end},
        layers={**_DELTA_NET_LAYERS, "ple.layers": lambda config: [number - 1 for number in config.ple_layer_ids],
                "attention.compress_ratios": lambda config: [
                    0 if linear else config.indexer_compress_ratio for linear in _linear(config)]},
        neutral={"expert_weights_norm": (True,)},
        shapes=frozenset({INTERVAL, "nextn_predict_layers", "rope.dimension_sections", "ple.image_token_id",
                          "embedding_length_per_layer_input", *_NGRAM_NUMBERS.values()}),
        absent={"ple.layers": []}, plus_one=_plus_one, numbers=_NGRAM_NUMBERS,
        tensors={
            f"{of}_hyper_connection.{part}": f"hc_{to}_{name}"
            for of, to in {"attn": "attn", "mlp": "ffn"}.items()
            for part, name in {"hc_norm": "norm", "input_mix_weight_down": "down", "input_mix_weight_up": "up",
                               "block_inject_weight": "inject"}.items()
        } | {"self_attn.indexer.q_layernorm": "indexer.q_norm", "self_attn.indexer.k_layernorm": "indexer.k_norm",
             "ple.key_proj": "ple_key", "ple.value_proj": "ple_value",
             **{f"ple.norm_{part}": f"ple_norm_{part}" for part in ("key", "query", "conv")},
             "ple.ple_embedding.ngram_embedding": "per_layer_token_embd"},
        fixed={"norm_topk_prob": True, "output_gate_type": "sigmoid"},
    ),
    "kimi-linear": Architecture(
        names={**_MLA, "expert_count": "num_experts", "expert_used_count": "num_experts_per_token",
               "expert_weights_scale": "routed_scaling_factor", "expert_weights_norm": "norm_topk_prob",
               "expert_group_used_count": "topk_group", "expert_group_count": "num_expert_group",
               "ssm.conv_kernel": "linear_conv_kernel_dim", "kda.head_dim": "linear_head_dim"},
        layers={"attention.head_count_kv": _latent_of_attention},
        neutral=_SIGMOID, shapes=frozenset({*_LATER, *_MLA_SHAPES}),
        absent={"expert_weights_scale": 1.0, "expert_weights_norm": True},
    ),
    "glm5-next": Architecture(
        names={**_ROUTING, **_MLA, **_INDEXER, **_HYPER, "expert_count": "n_routed_experts",
               "ssm.conv_kernel": "linear_conv_kernel_dim", "kda.head_dim": "linear_head_dim",
               "kda.gate_lower_bound": "linear_lower_bound", "attention.indexer.kpool": "index_kpool",
               "attention.indexer.kpool_select_tail": "index_kpool_always_select_tail"},
        layers={"attention.head_count_kv": _latent_of_attention, "attention.indexer.types": _indexers,
                "swiglu_clamp_exp": _each("swiglu_limit"), "swiglu_clamp_shexp": _each("swiglu_limit")},
        neutral={"expert_gating_func": (0, 2), "attention.layer_norm_epsilon": (1e-6,)},
        shapes=frozenset({*_LATER, *_MLA_SHAPES}),
        absent={**_PLAIN_ROUTING, "attention.indexer.types": True, "swiglu_clamp_exp": None},
        tensors=_HYPER_TENSORS,
    ),
    "deepseek4": Architecture(
        names={**_HEAD, **_ROUTING, **_INDEXER, **_HYPER, "expert_count": "n_routed_experts",
               "expert_feed_forward_length": "moe_intermediate_size",
               "expert_shared_count": "n_shared_experts", "attention.sliding_window": "sliding_window",
               "attention.q_lora_rank": "q_lora_rank", "attention.output_group_count": "o_groups",
               "attention.output_lora_rank": "o_lora_rank",
               "hash_layer_count": lambda config: config.mlp_layer_types.count("hash_moe"),
               "expert_gating_func": lambda config: {"sqrtsoftplus": 4}.get(config.scoring_func)},
        layers={"swiglu_clamp_exp": _each("swiglu_limit"), "swiglu_clamp_shexp": _each("swiglu_limit"),
                "attention.compress_ratios": lambda config: [
                    config.compress_rates.get(kind, 0) for kind in config.layer_types]},
        neutral={"expert_gating_func": ()}, yarn_in_attention=True,
        shapes=frozenset({"embedding_length_out", _COMPRESSED_BASE}),
        ropes={"main": RopeKeys(scaled=False), "compress": RopeKeys(_COMPRESSED_BASE)},
        tensors={
            **_HYPER_TENSORS, "mlp.gate.tid2eid": "ffn_gate_tid2eid.weight",
            "self_attn.q_a_norm": "attn_q_a_norm", "self_attn.kv_proj": "attn_kv",
            "self_attn.kv_norm": "attn_kv_a_norm",
            "self_attn.o_a_proj": "attn_output_a", "self_attn.o_b_proj": "attn_output_b",
            **{f"self_attn.compressor.{path}{part}": f"{to}{name}"
               for path, to in {"": "attn_compressor_", "indexer.": "indexer_compressor_"}.items()
               for part, name in {"position_bias": "ape.weight", "kv_proj": "kv", "gate_proj": "gate",
                                  "kv_norm": "norm"}.items()},
            "self_attn.compressor.indexer.q_b_proj": "indexer.attn_q_b",
            "self_attn.compressor.indexer.scorer.weights_proj": "indexer.proj",
        },
    ),
    "nemotron_h_moe": Architecture(
        names={**_HEAD, **_ROUTING, "expert_count": "n_routed_experts",
               "attention.layer_norm_epsilon": "layer_norm_epsilon",
               "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
               "expert_feed_forward_length": "moe_intermediate_size",
               _SHARED_WIDTH: "moe_shared_expert_intermediate_size", "expert_shared_count": "n_shared_experts",
               "moe_latent_size": "moe_latent_size", "ssm.conv_kernel": "conv_kernel",
               "ssm.state_size": "ssm_state_size", "ssm.group_count": "n_groups",
               "ssm.time_step_rank": "mamba_num_heads",
               "ssm.inner_size": lambda config: config.mamba_num_heads * config.mamba_head_dim},
        layers={"attention.head_count_kv": _heads_of_attention,
                "feed_forward_length": lambda config: [
                    {"moe": config.moe_intermediate_size, "mlp": config.intermediate_size}.get(kind, 0)
                    for kind in config.layers_block_type]},
        neutral=_SIGMOID, shapes=frozenset({"nextn_predict_layers"}), absent=_PLAIN_ROUTING,
        tensors={"norm": "attn_norm", "mixer.dt_bias": "ssm_dt.bias", "mixer.in_proj": "ssm_in",
                 "mixer.conv1d": "ssm_conv1d", "mixer.out_proj": "ssm_out", "mixer.up_proj": "ffn_up",
                 "mixer.down_proj": "ffn_down", "mixer.gate": "ffn_gate_inp",
                 "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
                 "mixer.shared_experts.up_proj": "ffn_up_shexp", "mixer.shared_experts.down_proj": "ffn_down_shexp",
                 "mixer.fc1_latent_proj": "ffn_latent_down", "mixer.fc2_latent_proj": "ffn_latent_up",
                 **{f"mixer.{part}_proj": f"attn_{part}" for part in "qkv"}, "mixer.o_proj": "attn_output"},
    ),
    "jamba": Architecture(
        names={"expert_count": "num_experts", "ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state",
               "ssm.time_step_rank": "mamba_dt_rank",
               "ssm.inner_size": lambda config: config.mamba_expand * config.hidden_size},
        layers={"attention.head_count_kv": _heads_of_attention}, neutral={"expert_weights_norm": (False,)},
        tensors={"pre_ff_layernorm": "ffn_norm", "feed_forward.router": "ffn_gate_inp",
                 "mamba.x_proj": "ssm_x", "mamba.dt_proj": "ssm_dt", "mamba.dt_layernorm": "ssm_dt_norm",
                 "mamba.b_layernorm": "ssm_b_norm", "mamba.c_layernorm": "ssm_c_norm"},
    ),
}  # fmt: skip
KNOWN = tuple(ARCHITECTURES)
