"""Tiny random checkpoints of many architectures that use transformers' experts interface.

Everything is a few hundred kilobytes and made in well under a second, so that a test can afford
one per architecture. The initial scale is large, so that a wrong expert or a wrong layout changes
the logits visibly.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PretrainedConfig,
)

from tiermoe.actors.store.replicas import REPLICAS_NAME

HIDDEN = 32
VOCAB = 128

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

_TOP_2 = {"num_experts_per_tok": 2}
_4_EXPERTS = {"num_experts": 4, **_TOP_2}
_4_LOCAL = {"num_local_experts": 4, **_TOP_2}
_ROUTED = {"n_routed_experts": 8, "n_shared_experts": 1, **_TOP_2, "n_group": 1, "topk_group": 1}
_DENSE_FIRST = {"num_hidden_layers": 3, "first_k_dense_replace": 1}
_SIZES = {"intermediate_size": 64, "moe_intermediate_size": 24}
_SMALL = {"intermediate_size": 24}
_HEAD = {"head_dim": 8}
_MLA = {  # multi-head latent attention of the DeepSeek family
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip

_INDEXED = {"index_topk": 16, "index_head_dim": 8, "index_n_heads": 32}  # attention to chosen keys; few heads make ties

_OVERRIDES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 48, **_4_LOCAL},
    "qwen2_moe": {**_SIZES, "shared_expert_intermediate_size": 40, "num_experts": 6, **_TOP_2},
    "qwen3_moe": {**_SIZES, **_HEAD, "num_experts": 8, **_TOP_2, "norm_topk_prob": True},
    "olmoe": {**_SMALL, "num_experts": 8, **_TOP_2},
    "flex_olmo": {**_SMALL, **_4_EXPERTS},
    "deepseek_v2": {**_MLA, **_SIZES, **_ROUTED, **_DENSE_FIRST},
    "deepseek_v3": {**_MLA, **_SIZES, **_ROUTED, **_DENSE_FIRST, "n_group": 2},
    "phimoe": {"intermediate_size": 48, **_4_LOCAL},
    "granitemoe": {**_SMALL, **_4_LOCAL},
    "gpt_oss": {**_SMALL, **_HEAD, **_4_LOCAL, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "glm4_moe": {**_SIZES, **_HEAD, **_ROUTED, **_DENSE_FIRST},
    "ernie4_5_moe": {
        **_SIZES, "moe_num_experts": 4, "moe_num_shared_experts": 1, "moe_k": 2, "num_hidden_layers": 3,
        "moe_layer_start_index": 1,
    },
    "dots1": {**_SIZES, **_HEAD, **_ROUTED, **_DENSE_FIRST},
    "minimax": {**_SMALL, **_HEAD, **_4_LOCAL, "block_size": 16},
    "minimax_m2": {**_SMALL, **_HEAD, **_4_LOCAL, "rotary_dim": 8},
    "hunyuan_v1_moe": {**_SMALL, **_HEAD, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {
        **_SIZES, **_4_EXPERTS, "num_hidden_layers": 3, "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "jamba": {
        **_SMALL, **_4_EXPERTS, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "qwen3_next": {
        **_SIZES, **_HEAD, "shared_expert_intermediate_size": 40, "num_experts": 8, **_TOP_2,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "afmoe": {**_SIZES, **_HEAD, **_4_EXPERTS, "num_shared_experts": 1, "num_hidden_layers": 3, "num_dense_layers": 1},
    "mimo_v2_flash": {
        **_SIZES, **_HEAD, "v_head_dim": 8, "n_routed_experts": 4, **_TOP_2, "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "exaone_moe": {**_SIZES, **_HEAD, **_4_EXPERTS, "num_shared_experts": 1, **_DENSE_FIRST},
    "solar_open": {"moe_intermediate_size": 24, **_HEAD, "n_routed_experts": 4, "n_shared_experts": 1, **_TOP_2},
    "nemotron_h": {  # experts without a gate; Mamba layers
        **_SIZES, **_HEAD, "moe_shared_expert_intermediate_size": 40, "n_routed_experts": 4, **_TOP_2,
        "layers_block_type": ["mamba", "moe", "attention", "moe"], "num_hidden_layers": 4, "use_mamba_kernels": False,
        "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2,
    },
    "cohere2_moe": {  # tied embeddings
        **_SMALL, **_HEAD, **_4_EXPERTS, "prefix_dense_intermediate_size": 64, "logit_scale": 1.0,
        "tie_word_embeddings": True,
    },
    "deepseek_v4": {  # compressed and indexed attention, hyper-connections
        **_SIZES, "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 16, "o_groups": 2,
        "o_lora_rank": 8, "qk_rope_head_dim": 8, "sliding_window": 16, "hc_mult": 2, "n_routed_experts": 4,
        "n_shared_experts": 1, **_TOP_2, **_INDEXED,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "hy_v4": {**_MLA, **_SIZES, **_ROUTED, **_INDEXED, "num_hidden_layers": 3, "hc_mult": 2},
    "laguna": {**_SIZES, **_HEAD, **_4_EXPERTS, "shared_expert_intermediate_size": 24, "num_hidden_layers": 3},
}  # fmt: skip

MODEL_TYPES: tuple[str, ...] = tuple(_OVERRIDES)

_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
_INDEXED_MLA = {**_MLA, **_SIZES, **_ROUTED, **_INDEXED}
# further types, which only the matrix runs (`matrix.py`)
_FURTHER: dict[str, dict[str, Any]] = {
    "axk1": {**_MLA, **_SIZES, **_ROUTED, "num_hidden_layers": 2},
    "axk2": {**_INDEXED_MLA, "num_hidden_layers": 3, "gated_norm_rank": 4},
    "bailing_hybrid": {
        **_MLA, **_SIZES, **_ROUTED, **_HEAD, "num_hidden_layers": 3, "num_local_experts": 8, "layer_group_size": 2,
        "first_k_dense_replace": 1,
    },
    "beam": {
        **_SIZES, **_HEAD, "num_experts": 8, **_TOP_2, "num_hidden_layers": 3, "sliding_window": 16, "n_group": 2,
        "topk_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "deepseek_v32": {**_INDEXED_MLA, "num_hidden_layers": 3, "first_k_dense_replace": 1},
    "dots3_note_text": {
        **_INDEXED_MLA, "num_hidden_layers": 3, "sliding_window": 16, "shared_experts_intermediate_size": 24,
    },
    "flint": {
        **_SIZES, **_HEAD, **_4_EXPERTS, "shared_expert_intermediate_size": 24, "num_hidden_layers": 3,
        "sliding_window": 17, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "glm4_moe_lite": {**_MLA, **_SIZES, **_ROUTED, "num_hidden_layers": 3},
    "glm_moe_dsa": {**_INDEXED_MLA, "num_hidden_layers": 3, "first_k_dense_replace": 1},
    "granitemoe_swa": {**_SMALL, **_4_LOCAL, "num_hidden_layers": 3, "sliding_window": 16},
    "granitemoehybrid": {
        **_SMALL, **_4_LOCAL, "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 24, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8,
    },
    "granitemoeshared": {**_SMALL, **_4_LOCAL, "shared_intermediate_size": 24},
    "hy_v3": {**_SIZES, **_HEAD, **_4_EXPERTS, "num_hidden_layers": 3},
    "inkling_text": {
        **_SIZES, **_HEAD, **_ROUTED, "num_hidden_layers": 3, "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window_size": 16, "d_rel": 4, "rel_extent": 32,
    },
    "kimi_linear": {
        **_MLA, **_SIZES, **_ROUTED, "num_local_experts": 8, "num_hidden_layers": 4, "linear_head_dim": 8,
        "linear_num_heads": 4, "q_lora_rank": None,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "kolibri1": {
        **_SIZES, **_HEAD, **_4_EXPERTS, "shared_expert_intermediate_size": 24, "num_hidden_layers": 3,
        "sliding_window": 17, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "mellum": {**_SIZES, **_HEAD, **_4_EXPERTS, "num_hidden_layers": 3, "sliding_window": 16},
    "zaya": {**_SIZES, **_HEAD, "num_experts": 4, "num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip
# text models of composite checkpoints, by the type of the whole
_COMPOSITES: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe": {
        **_SIZES, **_HEAD, **_4_EXPERTS, "rope_parameters": {**_ROTARY, "mrope_section": [2, 1, 1]},
    },
    "glm4v_moe": {
        **_SIZES, **_HEAD, **_ROUTED, **_DENSE_FIRST,
        "rope_parameters": {**_ROTARY, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5},
    },
    "qwen3_5_moe": {
        **_OVERRIDES["qwen3_next"],
        "rope_parameters": {**_ROTARY, "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1]},
    },
    "qwen4_exp": {
        **_OVERRIDES["qwen3_next"], "rope_parameters": {**_ROTARY, "mrope_section": [2, 1, 1]}, "indexer_budget": 16,
        "indexer_compress_ratio": 4, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
    },
    "gemma4": {
        **_SIZES, **_HEAD, "num_experts": 4, "top_k_experts": 2, "enable_moe_block": True,
        "expert_intermediate_size": 24, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCAB,
        "global_head_dim": 8, "num_kv_shared_layers": 0,
    },
    "glm5_next": {
        **_INDEXED_MLA, "qk_rope_head_dim": 0, "hc_mult": 2, "num_hidden_layers": 4, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "ernie4_5_vl_moe": {
        "intermediate_size": 64, "moe_intermediate_size": [24, 16], "moe_num_experts": 4, "moe_k": 2,
        "rope_parameters": {**_ROTARY, "mrope_section": [1, 1, 2]},
    },
    "minimax_m3_vl": {
        **_SMALL, **_HEAD, **_4_LOCAL, "layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 2,
        "index_head_dim": 8, "index_block_size": 8, "index_topk_blocks": 2,
    },
    "kimi_k25": {"model_type": "deepseek_v3", **_OVERRIDES["deepseek_v3"]},
    "mistral3": {"model_type": "mistral4", **_MLA, **_SIZES, **_ROUTED},
    "mistral_large4": _INDEXED_MLA,
    "lfm2_vl": {"model_type": "lfm2_moe", **_OVERRIDES["lfm2_moe"]},
    "internvl": {"model_type": "qwen3_moe", **_OVERRIDES["qwen3_moe"]},
    "inkling2": {**_SIZES, **_HEAD, **_ROUTED},
    "aria": {**_SMALL, "moe_num_experts": 4, "moe_topk": 2},
    "muse_spark": {
        **_SIZES, **_HEAD, **_4_LOCAL, "num_hidden_layers": 3, "sliding_window": 16, "moe_hidden_size": 16,
    },
}  # fmt: skip
COMPOSITE_TYPES: tuple[str, ...] = tuple(_COMPOSITES)
ALL_TYPES: tuple[str, ...] = (*MODEL_TYPES, *_FURTHER, *COMPOSITE_TYPES)
_TOWER = {  # of images or sound, by the names that their configurations have
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "depth": 1, "num_attention_heads": 2,
    "num_heads": 2, "num_key_value_heads": 2, "out_hidden_size": HIDDEN, "text_hidden_size": HIDDEN, "head_dim": 8,
    "deepstack_visual_indexes": [0], "num_position_embeddings": 16, "decoder_hidden_size": HIDDEN,
    "pos_emb_height": 4, "pos_emb_width": 4, "image_size": 28, "patch_size": 14, "d_model": 16, "encoder_layers": 1,
}  # fmt: skip


def tiny_config(model_type: str, **sizes: Any) -> PretrainedConfig:
    """The configuration of a tiny random model.

    Args:
        model_type: one of `ALL_TYPES` that is no composite.
        sizes: fields on top of the usual ones.

    Raises:
        KeyError: there is no tiny model of that type.
    """
    like = {"qwen3_5_moe_text": "qwen3_next"}.get(model_type, model_type)  # the text of a composite type
    return AutoConfig.for_model(model_type, **{**_BASE, **(_OVERRIDES | _FURTHER)[like], **sizes})


def composite_config(model_type: str, **sizes: Any) -> PretrainedConfig:
    """The configuration of a tiny text model with towers of images or sound. model_type: of `COMPOSITE_TYPES`."""
    whole, small = CONFIG_MAPPING[model_type], dict[str, dict[str, Any]]()
    for part, kind in whole.sub_configs.items():
        if part == "text_config":
            continue
        usual = getattr(whole(), part) if kind is AutoConfig else kind()
        small[part] = {name: size for name, size in _TOWER.items() if getattr(usual, name, None) is not None}
        if kind is AutoConfig:
            small[part]["model_type"] = usual.model_type
        if hasattr(usual, "depths"):  # as many layers as those have entries
            del small[part]["num_hidden_layers"]
    return whole(text_config={**_BASE, **_COMPOSITES[model_type], **sizes}, **small)


def whole_class(config: PretrainedConfig) -> Any:
    """transformers' class of a composite configuration, with all of its towers."""
    mappings = (AutoModelForImageTextToText._model_mapping, AutoModelForMultimodalLM._model_mapping)
    return next(mapping[type(config)] for mapping in mappings if type(config) in mapping)


def tiny_model(model_type: str, **sizes: Any) -> Any:
    """A random float32 model, whole; the same each time. model_type: of `ALL_TYPES`. sizes: of its configuration.

    The embedding of its padding token is none of zeros: random models generate that token, and for zeros an index that
    chooses keys has a score of exactly 0 for each, of which it then takes any.
    """
    torch.manual_seed(0)
    if model_type in _COMPOSITES:
        config = composite_config(model_type, **sizes)
        model = whole_class(config)._from_config(config, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(tiny_config(model_type, **sizes), dtype=torch.float32)
    _unsettle(model)
    embedding = model.get_input_embeddings()
    if getattr(embedding, "padding_idx", None) is not None:
        with torch.no_grad():
            embedding.weight[embedding.padding_idx].normal_(std=float(embedding.weight.std()))
    return model.eval()


def save_tiny_checkpoint(model_type: str, directory: Path | str, seed: int = 0, **overrides: Any) -> Path:
    """Write a random float32 checkpoint, in the layout in which the architecture is published.

    Args:
        model_type: one of `MODEL_TYPES` or `COMPOSITE_TYPES`.
        directory: where to write; made if absent.
        seed: of the weights.
        overrides: configuration fields to set on top of the tiny configuration.

    Returns:
        The directory.
    """
    config = composite_config(model_type) if model_type in _COMPOSITES else tiny_config(model_type)
    for name, value in overrides.items():
        setattr(config, name, value)
    make = whole_class(config)._from_config if model_type in _COMPOSITES else AutoModelForCausalLM.from_config
    generator_state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = make(config, dtype=torch.float32)
        _unsettle(model)
        model.save_pretrained(directory)
    finally:
        torch.random.set_rng_state(generator_state)
    return Path(directory)


def add_head(checkpoint: Path, behind: bool, dense: bool = False, scale: float = 1.0) -> Path:
    """Give a checkpoint a head for drafts (multi-token prediction), in one of the published layouts.

    Args:
        behind: as one layer more (DeepSeek, GLM); else below `mtp.` (Qwen).
        dense: without experts.
        scale: of its norms.
    """
    tensors = load_file(checkpoint / "model.safetensors")
    last = max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    layer = {name.split(".", 3)[3]: tensor for name, tensor in tensors.items() if f".layers.{last}." in name}
    if dense:
        layer = {name: tensor for name, tensor in layer.items() if not name.startswith("mlp.")}
        layer |= {f"mlp.{name}_proj.weight": torch.randn(64, HIDDEN) * 0.3 for name in ("gate", "up")}
        layer["mlp.down_proj.weight"] = torch.randn(HIDDEN, 64) * 0.3
    norm, project = torch.full((HIDDEN,), scale), torch.randn(HIDDEN, 2 * HIDDEN) * 0.3
    if behind:
        layer |= {f"{name}.weight": norm for name in ("enorm", "hnorm", "shared_head.norm")}
        layer |= {"eh_proj.weight": project}
        layer |= {"embed_tokens.weight": tensors["model.embed_tokens.weight"]}
        head = {f"model.layers.{last + 1}.{name}": tensor for name, tensor in layer.items()}
    else:
        head = {f"mtp.layers.0.{name}": tensor for name, tensor in layer.items()}
        head |= {"mtp.fc.weight": project, "mtp.norm.weight": norm}
        head |= {f"mtp.pre_fc_norm_{name}.weight": norm for name in ("embedding", "hidden")}
    made = {name: tensor.to(tensors["model.embed_tokens.weight"].dtype).clone() for name, tensor in head.items()}
    save_file(tensors | made, checkpoint / "model.safetensors", {"format": "pt"})
    return checkpoint


def edit_config(checkpoint: Path, **changes: Any) -> Path:
    """Other fields of its configuration."""
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return checkpoint


def _unsettle(model: torch.nn.Module) -> None:
    """Add noise to tensors that initialisation leaves constant (biases, norms): a lost one then shows."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if not tensor.is_floating_point() or tensor.numel() < 2:
                continue
            if bool((tensor == tensor.flatten()[0]).all()):
                tensor.add_(0.1 * torch.randn_like(tensor))


VOCAB_SIZE = 260  # three special tokens, 256 bytes, one more


def save_byte_tokenizer(directory: Path) -> Tokenizer:
    """Write tokenizer.json; ids 0-2 are padding, begin and end, then come the bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {name: i for i, name in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


torch.set_num_threads(1)

TEXT = "".join(f"def f{i}(x):\n    return x * {i} + {i * i}\n\n" for i in range(60))


def contents(folder: Path) -> dict[str, bytes]:
    names = [p for p in folder.iterdir() if p.name.startswith(("replicas-b", "losses", REPLICAS_NAME))]
    return {path.name: path.read_bytes() for path in names}


def beside(store: Path) -> list[str]:
    return [path.name for path in store.parent.iterdir()]
