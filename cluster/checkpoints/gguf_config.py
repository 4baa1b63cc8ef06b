"""A `config.json` of a GGUF file's metadata alone, for architectures whose metadata is a whole configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import CheckpointError, UnsupportedModelError
from .gguf_architectures import DELTA_NET, RECURRENT, WINDOWS
from .gguf_header import REWRITE, Header, count, unsupported
from .gguf_keys import absent_of, architecture_of, layer_values, names_of, values_of
from .gguf_rope import Rope, rope_of

Config = dict[str, Any]
_LATENT = 0.1  # of `rope.scaling.yarn_log_multiplier`, which is so much times `mscale_all_dim`


@dataclass(frozen=True)
class _Whole:
    """What makes a configuration of the metadata of an architecture, beside the keys that it has names for.

    Attributes:
        model_type: of transformers.
        more: what else the file says, of its header and the configuration so far.
        tied: a file without an output matrix takes the embedding.
        partial: a part of a head's width may be rotated.
    """

    model_type: str
    more: Callable[[Header, Config], Config] = lambda header, config: {}
    tied: bool = True
    partial: bool = False


def config_of(header: Header) -> Config:
    """A `config.json` of a file's metadata.

    Raises:
        UnsupportedModelError: the metadata is not a whole configuration, or a key is not supported.
        CheckpointError: a key is missing or malformed.
    """
    known, whole = architecture_of(header), _WHOLE.get(header.architecture)
    if whole is None:
        raise UnsupportedModelError(
            f"{header.name} is of the architecture {header.architecture}, for which "
            "the metadata is not a whole configuration",
            "put the model's config.json and tokenizer.json beside it",
        )
    config: Config = {"model_type": whole.model_type, "dtype": _dtype(header), **known.fixed}
    for key, value in {**absent_of(header, known), **values_of(header, known)}.items():
        name = names_of(known).get(key)
        value = value or 1.0 if key == "expert_weights_scale" else value
        if isinstance(name, str) and config.setdefault(name, value) != value:
            raise unsupported(header, key, value)
    for key in ("embedding_length", "block_count", "attention.head_count", "expert_used_count"):
        name = names_of(known).get(key)
        if isinstance(name, str) and name not in config:
            raise CheckpointError(f"{header.name} lacks the key '{header.architecture}.{key}'", REWRITE)
    config["num_hidden_layers"] -= header.drafts
    _add_tensors(config, header, whole)
    config |= whole.more(header, config)
    config["num_key_value_heads"] = config.get("num_key_value_heads") or config["num_attention_heads"]
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    config.setdefault("intermediate_size", config.get("moe_intermediate_size"))
    if "rope_parameters" not in config:
        config["rope_parameters"] = _turned(header, config["head_dim"], whole.partial)
    config["max_position_embeddings"] = count(header, "context_length")
    for name, key in {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}.items():
        config[name] = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
    return config


def is_whole(header: Header) -> bool:
    """Whether the metadata of the architecture is a whole configuration."""
    return header.architecture in _WHOLE


def _turned(header: Header, head: int, partial: bool, layers: str = "") -> Config:
    """`rope_parameters` of all layers, or of a kind. Raises UnsupportedModelError: a part of a head is not turned."""
    rope = rope_of(header, head, layers)
    found = rope.parameters(header)
    if partial:
        return found | {"partial_rotary_factor": rope.dimensions / head}
    if rope.dimensions != head:
        raise unsupported(header, "rope.dimension_count", rope.dimensions)
    return found


def _add_tensors(config: Config, header: Header, whole: _Whole) -> None:
    """What the tensors say: sizes of the vocabulary, an untied head, biases."""
    embedding = header.tensors.get("token_embd.weight")
    config["vocab_size"] = embedding.shape[0] if embedding is not None and embedding.shape else 0
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    if config["tie_word_embeddings"] and not whole.tied:
        raise CheckpointError(f"{header.name} lacks the tensor 'output.weight'", REWRITE)
    config["attention_bias"] = all(f"blk.0.attn_{part}.bias" in header.tensors for part in ("q", "output"))


def _dtype(header: Header) -> str:
    """Of the dequantized model: the files' type if they are unquantized, else bfloat16."""
    kinds = {
        found.kind for name, found in header.tensors.items() if len(found.shape) > 1 and "gate_inp" not in name
    }
    return {frozenset({0}): "float32", frozenset({1}): "float16"}.get(frozenset(kinds), "bfloat16")


# --- what the metadata of each architecture says otherwise ----------------------------------------------------------


def _qwen(header: Header, config: Config) -> Config:
    """Widths that llama.cpp derives if a key is absent; all layers have experts."""
    found: Config = {"mlp_only_layers": [], "decoder_sparse_step": 1}
    if not config.get("moe_intermediate_size"):
        found["moe_intermediate_size"] = count(header, "feed_forward_length") // config["num_experts_per_tok"]
    if config["model_type"] == "qwen2_moe":
        width = config.get("intermediate_size")
        found["shared_expert_intermediate_size"] = config.get("shared_expert_intermediate_size") or width
        found["qkv_bias"] = any(f"blk.0.attn_{part}.bias" in header.tensors for part in ("q", "qkv"))
    return found


def _delta_net(header: Header, config: Config) -> Config:
    sizes = {name: count(header, key) for key, name in DELTA_NET.items() if key.startswith("ssm")}
    linear = _layers(RECURRENT, header, config) or []
    return _qwen(header, config) | {
        "linear_value_head_dim": count(header, "ssm.inner_size") // sizes["linear_num_value_heads"],
        "layer_types": [f"{'linear' if one else 'full'}_attention" for one in linear],
    }


def _layers(key: str, header: Header, config: Config) -> list[Any] | None:
    return layer_values(key, header, architecture_of(header), config["num_hidden_layers"])


def _windows(header: Header, config: Config) -> list[str]:
    """Kinds of layers by the pattern of sliding windows; all have full attention if there is none."""
    pattern = _layers(WINDOWS, header, config) or [False] * config["num_hidden_layers"]
    return [f"{'sliding' if one else 'full'}_attention" for one in pattern]


def _first_dense(header: Header, config: Config) -> Config:
    """Dense layers, then some with experts and shared ones, as DeepSeek has them."""
    return {
        "first_k_dense_replace": header.get("leading_dense_block_count", 0),
        "n_shared_experts": header.get("expert_shared_count", 0),
        **_widths(header),
    }


def _widths(header: Header) -> Config:
    """Of dense layers and of experts."""
    found = {"moe_intermediate_size": count(header, "expert_feed_forward_length")}
    dense = header.get("feed_forward_length")
    return found if dense is None else found | {"intermediate_size": count(header, "feed_forward_length")}


def _latent(header: Header, config: Config) -> Config:
    """DeepSeek-V2 and V3 by the function of the router's scores; files with and without latent keys and values."""
    rotated, whole = count(header, "rope.dimension_count"), _length(header, "key")
    softmax = config.pop("expert_gating_func", header.get("expert_gating_func", 1)) == 1
    found = _first_dense(header, config) | {
        "model_type": "deepseek_v2" if softmax else "deepseek_v3",
        "q_lora_rank": header.get("attention.q_lora_rank"), "kv_lora_rank": count(header, "attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated, "qk_nope_head_dim": whole - rotated, "v_head_dim": _length(header, "value"),
        "head_dim": rotated, "num_key_value_heads": config["num_attention_heads"],
        "n_group": config.get("n_group") or 1, "topk_group": config.get("topk_group") or 1,
    }  # fmt: skip
    if softmax:
        found["topk_method"] = "group_limited_greedy" if found["n_group"] > 1 else "greedy"
    rope = rope_of(header, rotated)
    parameters = _yarn_of_latent(rope, header) if rope.kind == "yarn" else rope.parameters(header)
    return found | {"rope_parameters": parameters}


def _length(header: Header, part: str) -> int:
    """Of a head's keys or values; files with latent ones have other numbers under the plain key."""
    latent = header.get(f"attention.{part}_length_mla") is not None
    return count(header, f"attention.{part}_length{'_mla' if latent else ''}")


def _yarn_of_latent(rope: Rope, header: Header) -> Config:
    scale = (header.get("rope.scaling.yarn_log_multiplier") or 0.0) / _LATENT
    scales = {"mscale": scale, "mscale_all_dim": scale} if scale else {}
    return {"rope_type": "yarn", "rope_theta": rope.base, "factor": rope.factor, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": rope.original, **scales}  # fmt: skip


def _glm(header: Header, config: Config) -> Config:
    return _first_dense(header, config) | {
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "n_group": config.get("n_group") or 1, "topk_group": config.get("topk_group") or 1,
    }  # fmt: skip


def _gpt_oss(header: Header, config: Config) -> Config:
    found = {"layer_types": _windows(header, config), "attention_bias": True}
    parameters = rope_of(header, config["head_dim"]).parameters(header)
    # its own range of corrected dimensions is not one of whole numbers, which no key says
    return found | {"rope_parameters": parameters | ({"truncate": False} if "factor" in parameters else {})}


def _minimax(header: Header, config: Config) -> Config:
    return {
        "intermediate_size": count(header, "expert_feed_forward_length"), "rotary_dim": _rotated(header, config),
    }  # fmt: skip


def _rotated(header: Header, config: Config) -> int:
    return rope_of(header, config["head_dim"]).dimensions


def _lfm2(header: Header, config: Config) -> Config:
    heads = header.get("attention.head_count_kv")
    heads = heads if isinstance(heads, list) else [heads] * config["num_hidden_layers"]
    return {
        "layer_types": ["full_attention" if one else "conv" for one in heads],
        "num_key_value_heads": max(heads), "num_dense_layers": header.get("leading_dense_block_count", 0),
        **_widths(header),
    }  # fmt: skip


def _hunyuan(header: Header, config: Config) -> Config:
    return {"intermediate_size": count(header, "expert_feed_forward_length"),
            "moe_topk": count(header, "expert_used_count")}  # fmt: skip


def _gemma(header: Header, config: Config) -> Config:
    kinds, heads = _windows(header, config), _layers("attention.head_count_kv", header, config) or []
    size, window = count(header, "attention.key_length"), count(header, "attention.key_length_swa")
    of_windows = next((n for kind, n in zip(kinds, heads, strict=True) if kind == "sliding_attention"), heads[0])
    of_full = next((n for kind, n in zip(kinds, heads, strict=True) if kind == "full_attention"), heads[0])
    divided = header.tensors.get("rope_freqs.weight")
    turned = rope_of(header, size)
    kept = sum(one == 1 for one in turned.factors) if divided is not None and turned.factors else size // 2
    return {
        "layer_types": kinds, "head_dim": window, "global_head_dim": size, "num_key_value_heads": of_windows,
        "num_global_key_value_heads": of_full, "enable_moe_block": True,
        "attention_k_eq_v": "blk.0.attn_v.weight" in header.tensors and not all(
            f"blk.{i}.attn_v.weight" in header.tensors for i in range(config["num_hidden_layers"])),
        "use_double_wide_mlp": isinstance(header.get("feed_forward_length"), list),
        "vocab_size_per_layer_input": config["vocab_size"],
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": turned.base,
                               "partial_rotary_factor": 2 * kept / size},
            "sliding_attention": _turned(header, window, True, "sliding_attention"),
        },
    }  # fmt: skip


def _nemotron(header: Header, config: Config) -> Config:
    heads, widths = (_layers(key, header, config) or [] for key in ("attention.head_count_kv", "feed_forward_length"))
    routed = {name.split(".")[1] for name in header.tensors if "_exps." in name}
    kinds = ["attention" if head else "mamba" if not width else "moe" if str(layer) in routed else "mlp"
             for layer, (head, width) in enumerate(zip(heads, widths, strict=True))]  # fmt: skip
    inner = count(header, "ssm.inner_size")
    return {
        "layers_block_type": kinds, "num_key_value_heads": max(heads), "use_mamba_kernels": False,
        "mamba_head_dim": inner // count(header, "ssm.time_step_rank"),
        "intermediate_size": max((w for w, kind in zip(widths, kinds, strict=True) if kind == "mlp"), default=1),
        "n_group": config.get("n_group") or 1, "topk_group": config.get("topk_group") or 1,
        "rope_parameters": None,
    }  # fmt: skip


def _kimi(header: Header, config: Config) -> Config:
    heads = _layers("attention.head_count_kv", header, config) or []
    rotated = count(header, "rope.dimension_count")
    dense = header.get("leading_dense_block_count", 0)
    return {
        "layer_types": ["full_attention" if one else "linear_attention" for one in heads],
        "mlp_layer_types": ["dense" if i < dense else "sparse" for i in range(config["num_hidden_layers"])],
        "num_key_value_heads": config["num_attention_heads"], "linear_num_heads": config["num_attention_heads"],
        "q_lora_rank": header.get("attention.q_lora_rank"), "kv_lora_rank": count(header, "attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated, "qk_nope_head_dim": _length(header, "key") - rotated,
        "v_head_dim": _length(header, "value"), **_widths(header),
        "num_shared_experts": header.get("expert_shared_count", 0), "n_routed_experts": config["num_experts"],
        "rope_parameters": None,
    }  # fmt: skip


_WHOLE: Mapping[str, _Whole] = {
    "qwen2moe": _Whole("qwen2_moe", _qwen, tied=False),
    "qwen3moe": _Whole("qwen3_moe", _qwen),
    "qwen3vlmoe": _Whole("qwen3_moe", _qwen),
    "qwen3next": _Whole("qwen3_next", _delta_net, partial=True),
    "qwen35moe": _Whole("qwen3_5_moe_text", _delta_net, partial=True),
    "olmoe": _Whole("olmoe", tied=False),
    "llama": _Whole("mixtral"),
    "deepseek2": _Whole("deepseek_v3", _latent),
    "glm4moe": _Whole("glm4_moe", _glm, partial=True),
    "gpt-oss": _Whole("gpt_oss", _gpt_oss),
    "minimax-m2": _Whole("minimax_m2", _minimax, partial=True),
    "gemma4": _Whole("gemma4_text", _gemma),
    "kimi-linear": _Whole("kimi_linear", _kimi),
    "nemotron_h_moe": _Whole("nemotron_h", _nemotron),
    "lfm2moe": _Whole("lfm2_moe", _lfm2),
    "dots1": _Whole("dots1", _first_dense),
    "hunyuan-moe": _Whole("hunyuan_v1_moe", _hunyuan),
}
