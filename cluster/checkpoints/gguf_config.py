"""What the metadata of a GGUF file says about the computation, and the configuration of the model that it must equal.

    config_of      a `config.json` of metadata alone, for architectures whose metadata is a whole configuration
    check_config   a model's configuration, of whatever source, against the metadata
"""

from __future__ import annotations

import math
from typing import Any

from ...errors import CheckpointError, UnsupportedModelError
from .gguf_architectures import (
    ARCHITECTURES,
    COMMON,
    DELTA_NET,
    INFORMATIVE,
    INTERVAL,
    NEUTRAL,
    RECURRENT,
    ROPE,
    WINDOWS,
    Architecture,
    Of,
)
from .gguf_header import REWRITE, Header, count, no_number, shortest, unsupported
from .gguf_rope import rope_of

_DELTA_NETS = ("qwen3_next", "qwen3_5_moe_text")
_HEADS_OF = {"head_dim": lambda config: config.hidden_size // config.num_attention_heads}  # where one has no such name


def config_of(header: Header) -> dict[str, Any]:
    """A `config.json` of a file's metadata.

    Raises:
        UnsupportedModelError: the architecture's the metadata is not a whole configuration, or a key is not supported.
        CheckpointError: a key is missing or malformed.
    """
    known = ARCHITECTURES.get(header.architecture)
    if known is None or not known.model_type:
        raise UnsupportedModelError(
            f"{header.name} is of the architecture {header.architecture}, for which "
            "the metadata is not a whole configuration",
            "put the model's config.json and tokenizer.json beside it",
        )
    config: dict[str, Any] = {"model_type": known.model_type, "dtype": _dtype(header), **known.constants}
    for key, value in _values(header, known).items():
        name = _names(known).get(key)
        if isinstance(name, str) and config.setdefault(name, value) != value:
            raise unsupported(header, key, value)
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_experts_per_tok", "rms_norm_eps"):
        if name not in config:
            key = next(key for key, of in COMMON.items() if of == name)
            raise CheckpointError(f"{header.name} lacks the key '{header.architecture}.{key}'", REWRITE)
    config["num_hidden_layers"] -= header.drafts
    config["num_key_value_heads"] = config.get("num_key_value_heads") or config["num_attention_heads"]
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    _add_widths(config, header, known)
    _add_tensors(config, header, known)
    rope = rope_of(header, config["head_dim"])
    config["rope_parameters"] = rope.parameters(header)
    if known.partial:
        config["rope_parameters"]["partial_rotary_factor"] = rope.dimensions / config["head_dim"]
    elif rope.dimensions != config["head_dim"]:
        raise unsupported(header, "rope.dimension_count", rope.dimensions)
    config["max_position_embeddings"] = count(header, "context_length")
    for name, key in {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}.items():
        config[name] = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
    return config


def check_config(config: Any, header: Header) -> None:
    """Refuse a configuration that contradicts its file: llama.cpp computes with the file's.

    Args:
        config: transformers' own object.

    Raises:
        UnsupportedModelError: a key is not supported. CheckpointError: a value differs.
    """
    known = ARCHITECTURES[header.architecture]
    values = _values(header, known)
    _check_layers(config, header, known)
    for key, value in {**known.absent, **values}.items():
        of = _names(known).get(key)
        if of is None:
            if key not in known.layers and header.get(key) is None and not _is_neutral(known, key, value):
                raise contradiction(header, f"has no {key}, which means {value}")
            continue
        expected = of(config) if callable(of) else getattr(config, of, None)
        if expected is None and isinstance(of, str) and of in _HEADS_OF:
            expected = _HEADS_OF[of](config)
        if key == "block_count":
            value -= header.drafts
        if key == "expert_weights_scale" and value == 0:
            value = 1.0
        if _equal(value, expected) or (expected is None and _is_neutral(known, key, value)):
            continue
        name = of if isinstance(of, str) else "that of its own"
        said = f"says {header.architecture}.{key} = {value}" if key in values else f"has no {key}, which means {value}"
        raise contradiction(header, f"{said}, where the configuration has {name} = {expected}")


def _check_layers(config: Any, header: Header, known: Architecture) -> None:
    """The keys with a value for each layer. Raises CheckpointError: a layer's differs, or one has none."""
    layers = config.num_hidden_layers
    for key, of in known.layers.items():
        values, own = _of_layers(key, header, known, layers), list(of(config))
        if values is not None and not (len(values) == len(own) and all(map(_equal, values, own))):
            said = f"says {header.architecture}.{key} = {values}" if header.get(key) is not None else f"has no {key}"
            raise contradiction(header, f"{said}, where the configuration has {own}")


def _of_layers(key: str, header: Header, known: Architecture, layers: int) -> list[Any] | None:
    """The values of a key with one for each layer, but those of layers for drafts; None: llama.cpp has none."""
    value = header.get(key)
    if key == RECURRENT and value is None:
        every = count(header, INTERVAL) if header.get(INTERVAL) is not None else 4
        value = [bool((layer + 1) % every) for layer in range(layers)]
    if key == WINDOWS and not isinstance(value, list):
        if header.get("attention.sliding_window") is None:
            return None
        (every, first), every_layer = known.windows, range(layers)
        every = every if value is None else value
        value = [bool(every == 0 or (layer if first else layer + 1) % every) for layer in every_layer]
    if value is None and key not in known.absent:
        return None
    value = known.absent.get(key) if value is None else value
    return [shortest(one) for one in value[:layers]] if isinstance(value, list) else [shortest(value)] * layers


def contradiction(header: Header, what: str) -> CheckpointError:
    """The refusal of a config.json that is not its file's."""
    whole = ARCHITECTURES[header.architecture].model_type
    remedy = "remove config.json: the metadata is a whole configuration" if whole else "put the model's own beside it"
    return CheckpointError(f"config.json does not belong to {header.name}: the file {what}", remedy)


def _names(known: Architecture) -> dict[str, Of]:
    return {key: of for key, of in {**COMMON, **known.names}.items() if key not in known.layers}


def _values(header: Header, known: Architecture) -> dict[str, Any]:
    """The values of the architecture's keys that have a name; every other key is looked at.

    Raises:
        UnsupportedModelError: a key is not supported, or has a value for each layer. CheckpointError: it is malformed.
    """
    prefix, found = f"{header.architecture}.", {}
    for full, raw in header.metadata.items():
        key = full.removeprefix(prefix)
        named = key in _names(known)
        if key == full or key in known.layers or key in known.shapes:
            continue
        if not named and (key in INFORMATIVE or key in ROPE):
            continue
        value = _scalar(header, key, raw)
        if named:
            if type(value) is str:
                raise no_number(header, key, value)
            found[key] = value
        elif not _is_neutral(known, key, value):
            raise unsupported(header, key, raw)
    return found


def _is_neutral(known: Architecture, key: str, value: Any) -> bool:
    return value in {**NEUTRAL, **known.neutral}.get(key, ())


def _scalar(header: Header, key: str, value: Any) -> Any:
    """A value; of an array with one for each layer, the common one."""
    if not isinstance(value, list):
        return shortest(value)
    if not value or any(one != value[0] for one in value):
        raise unsupported(header, key, value)
    return shortest(value[0])


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) or isinstance(other, float):
        return other is not None and math.isclose(one, other, rel_tol=1e-5)
    return bool(one == other)


def _add_widths(config: dict[str, Any], header: Header, known: Architecture) -> None:
    """Widths that llama.cpp derives if a key is absent."""
    width, used = config.get("intermediate_size"), config["num_experts_per_tok"]
    if config["model_type"] in ("qwen2_moe", "qwen3_moe", *_DELTA_NETS):
        if not config.get("moe_intermediate_size"):
            config["moe_intermediate_size"] = count(header, "feed_forward_length") // used
        config["mlp_only_layers"], config["decoder_sparse_step"] = [], 1
    if config["model_type"] == "qwen2_moe":
        config["shared_expert_intermediate_size"] = config.get("shared_expert_intermediate_size") or width
    if config["model_type"] in _DELTA_NETS:
        sizes = {name: count(header, key) for key, name in DELTA_NET.items() if key.startswith("ssm")}
        config["linear_value_head_dim"] = count(header, "ssm.inner_size") // sizes["linear_num_value_heads"]
        linear = _of_layers(RECURRENT, header, known, config["num_hidden_layers"]) or []
        config["layer_types"] = [f"{'linear' if one else 'full'}_attention" for one in linear]
    if not width:
        config["intermediate_size"] = config.get("moe_intermediate_size")


def _add_tensors(config: dict[str, Any], header: Header, known: Architecture) -> None:
    """What the tensors say: sizes of the vocabulary, an untied head, biases."""
    embedding = header.tensors.get("token_embd.weight")
    config["vocab_size"] = embedding.shape[0] if embedding is not None and embedding.shape else 0
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    if config["tie_word_embeddings"] and not known.tied:
        raise CheckpointError(f"{header.name} lacks the tensor 'output.weight'", REWRITE)
    if config["model_type"] == "qwen2_moe":
        config["qkv_bias"] = any(f"blk.0.attn_{part}.bias" in header.tensors for part in ("q", "qkv"))
    elif config["model_type"] != "mixtral":
        config["attention_bias"] = all(f"blk.0.attn_{part}.bias" in header.tensors for part in ("q", "output"))


def _dtype(header: Header) -> str:
    """Of the dequantized model: the files' type if they are unquantized, else bfloat16."""
    kinds = {
        found.kind for name, found in header.tensors.items() if len(found.shape) > 1 and "gate_inp" not in name
    }
    return {frozenset({0}): "float32", frozenset({1}): "float16"}.get(frozenset(kinds), "bfloat16")
