"""Sizes of a model from its store's manifest, or from its checkpoint before there is a store. Loads no weight.

A checkpoint's config.json alone will do, for a model that is to be sized and not downloaded; what is not a routed
expert is then computed from its fields and says so.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ...actors.store_format import DTYPE_CODES, read_manifest
from ...actors.tensor_file import ITEM_BYTES
from ...errors import CheckpointError, UnsupportedModelError
from ..prompt import load_model_config
from ..safetensors_header import read_header
from .spec import ModelFacts

_ROUTED = re.compile(r"\.experts\.")  # not `.shared_experts.`: those run for every token
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k")
_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
_DTYPES: Mapping[str, Literal[2, 4]] = {"bfloat16": 2, "float16": 2, "float32": 4}


def facts_of_store(store: Path, model_dir: Path) -> ModelFacts:
    """From a store's manifest; routing and attention from the checkpoint's config.json.

    The dense part is the length of its file, with some kilobytes of header.

    Raises:
        StoreError: it is not a store. CheckpointError: config.json is of no use.
    """
    manifest, config = read_manifest(store), load_model_config(model_dir)
    item, shape = ITEM_BYTES[DTYPE_CODES[manifest.dtype]], manifest.experts
    return ModelFacts(
        name=manifest.model,
        layers=len(manifest.layers),
        experts=shape.num_experts,
        top_k=_number(config, _TOP_K, model_dir),
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        gates=shape.gates,
        expert_elements=shape.elements(),
        dense_elements=manifest.dense.nbytes // item,
        kv_elements=_kv_elements(config, model_dir),
        item_bytes=item,
        source=f"store {store}",
    )


def facts_of_checkpoint(model_dir: Path) -> ModelFacts:
    """From config.json, and where the weights are there from their headers.

    Experts are taken to have a gate projection and no bias, as nearly all have.

    Raises:
        CheckpointError: config.json is of no use. UnsupportedModelError: the model has no routed experts.
    """
    config = load_model_config(model_dir)
    if not any(key in config for key in _EXPERTS):
        raise UnsupportedModelError(
            f"'{model_dir}' has no routed experts in its config.json",
            "serve it with transformers or vLLM: tiermoe offloads routed experts",
        )
    experts, hidden = _number(config, _EXPERTS, model_dir), _number(config, ("hidden_size",), model_dir)
    width = _number(config, _WIDTH, model_dir)
    item = _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"), 2)
    layers = _moe_layers(config, model_dir)
    dense, source = _dense_in_files(model_dir), "config.json and the headers of the weights"
    if dense is None:
        dense, source = _dense_elements(config, model_dir, layers), "config.json"
    return ModelFacts(
        name=model_dir.resolve().name,
        layers=layers,
        experts=experts,
        top_k=_number(config, _TOP_K, model_dir),
        hidden=hidden,
        intermediate=width,
        gates=2,
        expert_elements=3 * hidden * width,
        dense_elements=dense,
        kv_elements=_kv_elements(config, model_dir),
        item_bytes=item,
        source=source,
        dense_estimated=source == "config.json",
    )


def _number(config: Mapping[str, Any], names: tuple[str, ...], model_dir: Path) -> int:
    """The first of some fields that is there.

    Raises:
        CheckpointError: none is, or it is no count.
    """
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if type(value) is not int or not 1 <= value <= 1 << 40:
            raise _malformed(name, value, model_dir)
        return value
    raise CheckpointError(
        f"'{model_dir / 'config.json'}' has none of {', '.join(names)}",
        "make a store with `tiermoe prepare` and plan with that",
    )


def _count(config: Mapping[str, Any], name: str, model_dir: Path) -> int:
    """A field that may be absent, which is 0.

    Raises:
        CheckpointError: it is there and no count.
    """
    value = config.get(name)
    if value is not None and (type(value) is not int or not 0 <= value <= 1 << 40):
        raise _malformed(name, value, model_dir)
    return value or 0


def _malformed(name: str, value: Any, model_dir: Path) -> CheckpointError:
    return CheckpointError(f"'{model_dir / 'config.json'}': {name} is {value!r}", "download config.json again")


def _moe_layers(config: Mapping[str, Any], model_dir: Path) -> int:
    """Layers with routed experts, by the fields with which configurations name the dense ones."""
    total = _number(config, ("num_hidden_layers",), model_dir)
    first = _count(config, "first_k_dense_replace", model_dir)
    # Qwen's and Llama's steps count from layer 1, DeepSeek's from layer 0
    counted = _count(config, "decoder_sparse_step", model_dir) or _count(config, "interleave_moe_layer_step", model_dir)
    frequency = _count(config, "moe_layer_freq", model_dir)
    step, offset = (frequency, 0) if frequency else (counted or 1, 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise _malformed("mlp_only_layers", dense, model_dir)
    found = sum(i >= first and i not in dense and (i + offset) % step == 0 for i in range(total))
    if not found:
        raise UnsupportedModelError(f"'{model_dir}' has no layer with routed experts", "check its config.json")
    return found


def _heads(config: Mapping[str, Any], model_dir: Path) -> tuple[int, int, int]:
    """Attention heads, KV heads, head size."""
    heads = _number(config, ("num_attention_heads",), model_dir)
    size = _count(config, "head_dim", model_dir) or _number(config, ("hidden_size",), model_dir) // heads
    return heads, _count(config, "num_key_value_heads", model_dir) or heads, size


def _kv_elements(config: Mapping[str, Any], model_dir: Path) -> int:
    """Numbers for each token in all layers; latent attention (DeepSeek) is cached expanded, as transformers does."""
    layers = _number(config, ("num_hidden_layers",), model_dir)
    heads, kv_heads, size = _heads(config, model_dir)
    if _count(config, "kv_lora_rank", model_dir):
        parts = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return layers * heads * sum(_count(config, part, model_dir) for part in parts)
    return layers * 2 * kv_heads * size


def _dense_elements(config: Mapping[str, Any], model_dir: Path, moe_layers: int) -> int:
    """Embeddings, attention, routers, dense layers and shared experts; norms and biases are left out."""
    hidden, vocab = _number(config, ("hidden_size",), model_dir), _number(config, ("vocab_size",), model_dir)
    total = _number(config, ("num_hidden_layers",), model_dir)
    heads, kv_heads, size = _heads(config, model_dir)
    width = _count(config, "moe_intermediate_size", model_dir)
    shared = _count(config, "shared_expert_intermediate_size", model_dir)
    shared += _count(config, "n_shared_experts", model_dir) * width
    per_layer = 2 * hidden * size * (heads + kv_heads)
    per_moe_layer = hidden * _number(config, _EXPERTS, model_dir) + 3 * hidden * shared
    per_dense_layer = 3 * hidden * _count(config, "intermediate_size", model_dir)
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    dense_layers = total - moe_layers
    return embeddings + total * per_layer + moe_layers * per_moe_layer + dense_layers * per_dense_layer


def _dense_in_files(model_dir: Path) -> int | None:
    """Numbers in the weights that are not routed experts; None where not all safetensors files are there."""
    there = sorted(model_dir.glob("*.safetensors"))
    if not there or not _named_in_index(model_dir) <= {path.name for path in there}:
        return None
    tensors = [tensor for path in there for tensor in read_header(path).items()]
    return sum(math.prod(spec["shape"]) for name, spec in tensors if not _ROUTED.search(name))


def _named_in_index(model_dir: Path) -> set[str]:
    """Files of a checkpoint that is split; none where there is no index."""
    path = model_dir / "model.safetensors.index.json"
    if not path.is_file():
        return set()
    try:
        return set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"'{path}' is not an index of weights: {error}", "download it again") from error
