"""What the metadata of a GGUF file says about the computation, and the configuration of the model that it must equal.

    config_of      a `config.json` of metadata alone, for architectures whose metadata is a whole configuration
    check_config   a model's configuration, of whatever source, against the metadata
    rope_of        the rotary embedding as llama.cpp computes it

A table for each architecture has the keys that llama.cpp reads of it (`load_hparams`, `load_arch_hparams`): those that
a configuration has a name for, and those that are accepted with the values that change nothing. Any other key of the
architecture, or any other value, refuses the file by the key's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, dequantize
from numpy.typing import NDArray

from ...errors import CheckpointError, UnsupportedModelError
from .gguf_header import REWRITE, Header, Tensor, shortest, tensor_bytes

_OTHER_FILE = "use another GGUF file of the model, or its safetensors form"
_Of = str | Callable[[Any], Any]  # a name of transformers' configurations, or what makes the value of one


@dataclass(frozen=True)
class _Architecture:
    """The keys of one architecture.

    Attributes:
        names: key -> the configuration's name for it.
        neutral: key -> values that llama.cpp computes with as if the key were absent.
        shapes: keys that only give sizes, which the tensors have, too.
        absent: key -> the value that llama.cpp uses if the key is absent.
        model_type: of transformers; "": the metadata is not a whole configuration.
        constants: what llama.cpp computes with in every file, by the configuration's names.
        partial: a part of a head's width may be rotated.
        tied: a file without an output matrix takes the embedding.
        rope: tensors of the rotary embedding that the file may have.
    """

    names: Mapping[str, _Of] = field(default_factory=dict)
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    shapes: frozenset[str] = frozenset()
    absent: Mapping[str, Any] = field(default_factory=dict)
    model_type: str = ""
    constants: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = True
    partial: bool = False
    rope: tuple[str, ...] = ()


FREQUENCIES = "rope_freqs.weight"
SHORT_AND_LONG = {"rope_factors_short.weight": "short_factor", "rope_factors_long.weight": "long_factor"}
_COMMON: Mapping[str, _Of] = {
    "embedding_length": "hidden_size", "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "expert_used_count": "num_experts_per_tok",
}  # fmt: skip
_HEAD: Mapping[str, _Of] = {"attention.key_length": "head_dim", "attention.value_length": "head_dim"}
_ROUTING: Mapping[str, _Of] = {"expert_weights_norm": "norm_topk_prob", "expert_weights_scale": "routed_scaling_factor",
                               "expert_group_count": "n_group", "expert_group_used_count": "topk_group"}  # fmt: skip
_PLAIN_ROUTING = {"expert_weights_norm": False, "expert_weights_scale": 1.0}
_INFORMATIVE = ("context_length", "rope.scaling.finetuned", "vocab_size")
_ROPE = (
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear",
    "rope.scaling.original_context_length", "rope.scaling.attn_factor",
)  # fmt: skip
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention.causal": (True,), "pooling_type": (0,), "nextn_predict_layers": (0,), "leading_dense_block_count": (0,),
    "expert_group_count": (0, 1), "expert_group_used_count": (0, 1), "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,), "expert_weights_scale": (0, 1), "expert_gating_func": (1,),
    "attention.clamp_kqv": (0,), "attention.sliding_window": (0,), "attention.max_alibi_bias": (0,),
    "attention.scale": (0,), "logit_scale": (0, 1), "embedding_scale": (0, 1), "residual_scale": (0, 1),
    "rope.scaling.alpha": (0,), "rope.scaling.yarn_ext_factor": (1,), "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_beta_fast": (32,), "rope.scaling.yarn_beta_slow": (1,),
    "tensor_data_layout": ("Meta AI original pth",),
}  # fmt: skip
_LATER = (
    "expert_feed_forward_length", "feed_forward_length", "leading_dense_block_count", "expert_shared_count",
    "nextn_predict_layers",
)  # fmt: skip



def _common(of_layers: int | list[int]) -> int:
    """A number, or the one that all layers have; 0: they have several."""
    if isinstance(of_layers, int):
        return of_layers
    return of_layers[0] if len(set(of_layers)) == 1 else 0


def _interval(config: Any) -> int:
    """Layers of linear attention are followed by one of full attention: how many all are; 0: they are not."""
    kinds = list(config.layer_types)
    every = kinds.index("full_attention") + 1 if "full_attention" in kinds else len(kinds) + 1
    return every if kinds == _alternating(len(kinds), every) else 0


def _alternating(layers: int, every: int) -> list[str]:
    return ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]


_DELTA_NET: Mapping[str, _Of] = {
    "expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size", "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim", "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": lambda config: config.linear_num_value_heads * config.linear_value_head_dim,
    "full_attention_interval": _interval,
}  # fmt: skip
_DELTA_NETS = ("qwen3_next", "qwen3_5_moe_text")

_ARCHITECTURES: Mapping[str, _Architecture] = {
    "qwen2moe": _Architecture(
        names={**_HEAD, "expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size",
               "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        neutral={"expert_weights_norm": (False,)},
        model_type="qwen2_moe", constants={"norm_topk_prob": False}, tied=False,
    ),
    "qwen3moe": _Architecture(
        names={**_HEAD, "expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"},
        neutral={"expert_weights_norm": (True,)},
        model_type="qwen3_moe", constants={"norm_topk_prob": True},
    ),
    "qwen3vlmoe": _Architecture(  # of text alone, which is Qwen3's
        names={**_HEAD, "expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"},
        neutral={"expert_weights_norm": (True,)}, shapes=frozenset({"n_deepstack_layers", "rope.dimension_sections"}),
        model_type="qwen3_moe", constants={"norm_topk_prob": True},
    ),
    "qwen3next": _Architecture(
        names={**_HEAD, **_DELTA_NET},
        neutral={"expert_weights_norm": (True,)},
        shapes=frozenset({"nextn_predict_layers"}), absent={"full_attention_interval": 4},
        model_type="qwen3_next", constants={"norm_topk_prob": True}, partial=True,
    ),
    "qwen35moe": _Architecture(
        names={**_HEAD, **_DELTA_NET},
        neutral={"expert_weights_norm": (True,)},
        shapes=frozenset({"nextn_predict_layers", "rope.dimension_sections"}), absent={"full_attention_interval": 4},
        model_type="qwen3_5_moe_text", partial=True,
    ),
    "olmoe": _Architecture(
        names={**_HEAD, "expert_count": "num_experts"},
        neutral={"expert_weights_norm": (False,)}, shapes=frozenset({"expert_feed_forward_length"}),
        model_type="olmoe", constants={"norm_topk_prob": False, "clip_qkv": None}, tied=False,
    ),
    "llama": _Architecture(
        names={**_HEAD, "expert_count": "num_local_experts"},
        neutral={"expert_weights_norm": (True,)}, shapes=frozenset({"expert_feed_forward_length"}),
        model_type="mixtral", constants={"sliding_window": None}, rope=(FREQUENCIES, *SHORT_AND_LONG),
    ),
    "granitemoe": _Architecture(
        names={**_HEAD, "expert_count": "num_local_experts", "logit_scale": "logits_scaling",
               "residual_scale": "residual_multiplier", "embedding_scale": "embedding_multiplier",
               "attention.scale": "attention_multiplier"},
        neutral={"expert_weights_norm": (True,)},
        shapes=frozenset({"expert_shared_feed_forward_length"}), rope=(FREQUENCIES, *SHORT_AND_LONG),
    ),
    "deepseek2": _Architecture(
        names={**_ROUTING, "expert_count": "n_routed_experts", "attention.key_length_mla": "qk_head_dim",
               "attention.value_length_mla": "v_head_dim",
               "expert_gating_func": lambda config: 1 if config.model_type == "deepseek_v2" else 2,
               "rope.scaling.yarn_log_multiplier":
                   lambda config: 0.1 * ((config.rope_parameters or {}).get("mscale_all_dim") or 0)},
        neutral={"expert_gating_func": ()},
        shapes=frozenset({*_LATER, "attention.q_lora_rank", "attention.kv_lora_rank", "attention.key_length",
                          "attention.value_length", "attention.head_count_kv"}),
        absent=_PLAIN_ROUTING,
    ),
    "gpt-oss": _Architecture(
        names={**_HEAD, "expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size",
               "attention.sliding_window": "sliding_window",
               "rope.freq_base_swa": lambda config: config.rope_parameters["rope_theta"]},
        neutral={"attention.sliding_window_pattern": (2,), "expert_gating_func": (1, 3)},
    ),
    "minimax-m2": _Architecture(
        names={**_HEAD, "expert_count": "num_local_experts"},
        neutral={"expert_gating_func": (2,), "expert_weights_norm": (True,)},
        shapes=frozenset({"expert_feed_forward_length"}),
    ),
    "glm4moe": _Architecture(
        names={**_HEAD, **_ROUTING, "expert_count": "n_routed_experts"},
        neutral={"expert_gating_func": (0, 2), "rope.dimension_sections": (0,)},
        shapes=frozenset(_LATER), absent=_PLAIN_ROUTING,
    ),
    "dots1": _Architecture(
        names={**_HEAD, **_ROUTING, "expert_count": "n_routed_experts"},
        neutral={"expert_gating_func": (2,)},
        shapes=frozenset(_LATER), absent=_PLAIN_ROUTING,
    ),
    "hunyuan-moe": _Architecture(
        names={**_HEAD, "expert_count": "num_experts", "expert_used_count": lambda config: _common(config.moe_topk)},
        neutral={"expert_weights_norm": (True,)},
        shapes=frozenset({"expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_shared_count"}),
    ),
    "ernie4_5-moe": _Architecture(
        names={**_HEAD, "expert_count": "moe_num_experts", "expert_used_count": "moe_k",
               "interleave_moe_layer_step": "moe_layer_interval"},
        neutral={"expert_weights_norm": (True,)},
        shapes=frozenset({*_LATER, "expert_shared_feed_forward_length"}),
    ),
    "lfm2moe": _Architecture(
        names={**_HEAD, "expert_count": "num_experts", "expert_weights_scale": "routed_scaling_factor",
               "expert_weights_norm": "norm_topk_prob", "attention.layer_norm_rms_epsilon": "norm_eps",
               "shortconv.l_cache": "conv_L_cache"},
        neutral={"expert_gating_func": (2,)},
        shapes=frozenset({*_LATER, "attention.head_count_kv"}),
        absent={"expert_weights_norm": True, "expert_weights_scale": 1.0},
    ),
    "phimoe": _Architecture(
        names={**_HEAD, "expert_count": "num_local_experts", "attention.sliding_window": "sliding_window"},
        rope=tuple(SHORT_AND_LONG),
    ),
}  # fmt: skip
KNOWN = tuple(_ARCHITECTURES)
_HEADS_OF = {"head_dim": lambda config: config.hidden_size // config.num_attention_heads}  # where one has no such name


def config_of(header: Header) -> dict[str, Any]:
    """A `config.json` of a file's metadata.

    Raises:
        UnsupportedModelError: the architecture's the metadata is not a whole configuration, or a key is not supported.
        CheckpointError: a key is missing or malformed.
    """
    known = _ARCHITECTURES.get(header.architecture)
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
            raise _unsupported(header, key, value)
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_experts_per_tok", "rms_norm_eps"):
        if name not in config:
            key = next(key for key, of in _COMMON.items() if of == name)
            raise CheckpointError(f"{header.name} lacks the key '{header.architecture}.{key}'", REWRITE)
    config["num_hidden_layers"] -= header.drafts
    config["num_key_value_heads"] = config.get("num_key_value_heads") or config["num_attention_heads"]
    config["head_dim"] = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    _add_widths(config, header)
    _add_tensors(config, header, known)
    rope = rope_of(header, config["head_dim"])
    config["rope_parameters"] = rope.parameters(header)
    if known.partial:
        config["rope_parameters"]["partial_rotary_factor"] = rope.dimensions / config["head_dim"]
    elif rope.dimensions != config["head_dim"]:
        raise _unsupported(header, "rope.dimension_count", rope.dimensions)
    config["max_position_embeddings"] = _count(header, "context_length")
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
    known = _ARCHITECTURES[header.architecture]
    values = _values(header, known)
    for key, value in {**known.absent, **values}.items():
        of = _names(known).get(key)
        if of is None:
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


def contradiction(header: Header, what: str) -> CheckpointError:
    """The refusal of a config.json that is not its file's."""
    whole = _ARCHITECTURES[header.architecture].model_type
    remedy = "remove config.json: the metadata is a whole configuration" if whole else "put the model's own beside it"
    return CheckpointError(f"config.json does not belong to {header.name}: the file {what}", remedy)


def _names(known: _Architecture) -> dict[str, _Of]:
    return {**_COMMON, **known.names}


def _values(header: Header, known: _Architecture) -> dict[str, Any]:
    """The values of the architecture's keys that have a name; every other key is looked at.

    Raises:
        UnsupportedModelError: a key is not supported, or has a value for each layer. CheckpointError: it is malformed.
    """
    prefix, found = f"{header.architecture}.", {}
    for full, raw in header.metadata.items():
        key = full.removeprefix(prefix)
        if key == full or key in _INFORMATIVE or key in _ROPE:
            continue
        if key in known.shapes:
            continue
        value = _scalar(header, key, raw)
        if key in _names(known):
            if type(value) is str:
                raise _no_number(header, key, value)
            found[key] = value
        elif not _is_neutral(known, key, value):
            raise _unsupported(header, key, raw)
    return found


def _is_neutral(known: _Architecture, key: str, value: Any) -> bool:
    return value in {**_NEUTRAL, **known.neutral}.get(key, ())


def _scalar(header: Header, key: str, value: Any) -> Any:
    """A value; of an array with one for each layer, the common one."""
    if not isinstance(value, list):
        return shortest(value)
    if not value or any(one != value[0] for one in value):
        raise _unsupported(header, key, value)
    return shortest(value[0])


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) or isinstance(other, float):
        return other is not None and math.isclose(one, other, rel_tol=1e-5)
    return bool(one == other)


def _unsupported(header: Header, key: str, value: Any) -> UnsupportedModelError:
    shown = str(value) if len(str(value)) <= 60 else f"{str(value)[:57]}..."
    what = f"{header.name}: the key '{header.architecture}.{key}' = {shown} is not supported"
    return UnsupportedModelError(what, _OTHER_FILE)


def _count(header: Header, key: str) -> int:
    value = header.get(key)
    if type(value) is not int or not 1 <= value < 1 << 40:
        raise _no_number(header, key, value)
    return value


def _no_number(header: Header, key: str, value: Any) -> CheckpointError:
    what = f"{header.name}: the key '{header.architecture}.{key}' is {value!r}, not a number"
    return CheckpointError(what, REWRITE)


def _add_widths(config: dict[str, Any], header: Header) -> None:
    """Widths that llama.cpp derives if a key is absent."""
    width, used = config.get("intermediate_size"), config["num_experts_per_tok"]
    if config["model_type"] in ("qwen2_moe", "qwen3_moe", *_DELTA_NETS):
        if not config.get("moe_intermediate_size"):
            config["moe_intermediate_size"] = _count(header, "feed_forward_length") // used
        config["mlp_only_layers"], config["decoder_sparse_step"] = [], 1
    if config["model_type"] == "qwen2_moe":
        config["shared_expert_intermediate_size"] = config.get("shared_expert_intermediate_size") or width
    if config["model_type"] in _DELTA_NETS:
        sizes = {name: _count(header, key) for key, name in _DELTA_NET.items() if key.startswith("ssm")}
        config["linear_value_head_dim"] = _count(header, "ssm.inner_size") // sizes["linear_num_value_heads"]
        every = _count(header, "full_attention_interval") if header.get("full_attention_interval") is not None else 4
        config["layer_types"] = _alternating(config["num_hidden_layers"], every)
    if not width:
        config["intermediate_size"] = config.get("moe_intermediate_size")


def _add_tensors(config: dict[str, Any], header: Header, known: _Architecture) -> None:
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


# --- rotary embedding ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rope:
    """A rotary embedding with the numbers of `llama_context` and `ggml_rope_yarn`.

    Attributes:
        kind: "none", "linear", "yarn" or "longrope".
        factor: that positions are divided by.
        original: positions before scaling.
        attention: factor of sine and cosine, beside yarn's own.
        factors: `rope_freqs.weight`: what each frequency is divided by.
    """

    kind: str
    base: float
    dimensions: int
    factor: float = 1.0
    original: int = 0
    attention: float = 1.0
    factors: tuple[float, ...] = ()

    def frequencies(self, truncate: bool = True) -> tuple[NDArray[np.float64], float]:
        """The frequency of each pair of dimensions, and the factor of sine and cosine.

        Args:
            truncate: yarn's range of corrected dimensions is one of whole numbers, as llama.cpp has it.
        """
        plain = self.base ** (-np.arange(0, self.dimensions, 2) / self.dimensions)
        if self.factors:
            plain = plain / np.array(self.factors)
        if self.kind != "yarn":
            return plain / self.factor, self.attention
        low, high = (self._dimension(turns) for turns in (32.0, 1.0))  # yarn_beta_fast, yarn_beta_slow
        if truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(0.0, low), min(self.dimensions - 1.0, high)
        ramp = np.clip((np.arange(self.dimensions // 2) - low) / max(0.001, high - low), 0, 1)
        own = 1 + 0.1 * math.log(self.factor) if self.factor > 1 else 1.0
        return plain * (1 - ramp) + plain / self.factor * ramp, self.attention * own

    def _dimension(self, turns: float) -> float:
        return self.dimensions * math.log(self.original / (turns * 2 * math.pi)) / (2 * math.log(self.base))

    def parameters(self, header: Header) -> dict[str, Any]:
        """As transformers' configurations have it: `rope_parameters`.

        Raises:
            UnsupportedModelError: it has no such form.
        """
        found: dict[str, Any] = {"rope_type": "default", "rope_theta": self.base}
        if self.kind == "longrope" or (self.kind == "yarn" and self.factors):
            raise _unsupported(header, "rope.scaling.type", self.kind)
        if self.kind == "yarn":
            own = self.frequencies()[1]
            return found | {"rope_type": "yarn", "factor": self.factor, "attention_factor": own,
                            "original_max_position_embeddings": self.original}  # fmt: skip
        if self.factors or self.attention != 1:  # transformers' only form with a divisor for each frequency
            each = [self.factor * one for one in self.factors or (1.0,) * (self.dimensions // 2)]
            return found | {"rope_type": "longrope", "factor": 1.0, "attention_factor": self.attention,
                            "short_factor": each, "long_factor": each,
                            "original_max_position_embeddings": self.original}  # fmt: skip
        return found if self.factor == 1 else found | {"rope_type": "linear", "factor": self.factor}


def rope_of(header: Header, head_dim: int) -> Rope:
    """The rotary embedding of the metadata. head_dim: of queries and keys, if no key gives the rotated width.

    Raises:
        UnsupportedModelError: of an unknown type. CheckpointError: a value is malformed.
    """
    kind = header.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise _unsupported(header, "rope.scaling.type", kind)
    key = "rope.scaling.factor" if header.get("rope.scaling.factor") is not None else "rope.scale_linear"
    factor, attention = _number(header, key, 0.0), _number(header, "rope.scaling.attn_factor", 1.0)
    base, dimensions = _number(header, "rope.freq_base", 10000.0), _number(header, "rope.dimension_count", head_dim)
    original = _number(header, "rope.scaling.original_context_length", 0) or _count(header, "context_length")
    sections = header.get("rope.dimension_sections") or []
    if isinstance(sections, list) and any(sections[3:]):  # the fourth position of text is 0, where the others are equal
        raise _unsupported(header, "rope.dimension_sections", sections)
    if base <= 1 or factor < 0 or dimensions < 2 or original < 1:
        raise CheckpointError(f"{header.name}: its keys {header.architecture}.rope.* are out of range", REWRITE)
    factor = 1.0 if kind == "none" or factor == 0 else factor
    divisors = header.tensors.get(FREQUENCIES) if FREQUENCIES in rope_tensors(header) else None
    factors = () if divisors is None else tuple(float(value) for value in floats(divisors))
    factors = () if all(value == 1 for value in factors) else factors
    return Rope(kind, base, int(dimensions), factor, int(original), attention, factors)


def _number(header: Header, key: str, default: float) -> float:
    value = header.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _no_number(header, key, value)
    return shortest(value)


def rope_tensors(header: Header) -> tuple[str, ...]:
    """Names of the tensors of a rotary embedding that a file of the architecture may have."""
    known = _ARCHITECTURES.get(header.architecture)
    return () if known is None else known.rope


def floats(tensor: Tensor) -> NDArray[np.float32]:
    """The numbers of a small tensor. Raises CheckpointError: unreadable."""
    count = tensor_bytes(tensor.path.name, tensor.shape, tensor.kind)
    try:
        raw = np.fromfile(tensor.path, np.uint8, count, offset=tensor.offset)
        return dequantize(raw, GGMLQuantizationType(tensor.kind)).reshape(-1)
    except (OSError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{tensor.path} has a tensor that cannot be read ({error})", REWRITE) from error
