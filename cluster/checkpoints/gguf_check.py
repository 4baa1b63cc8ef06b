"""A model's configuration, of whatever source, against the metadata of its GGUF file, with which llama.cpp computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ...errors import CheckpointError
from .gguf_architectures import SHORT_AND_LONG, Architecture
from .gguf_config import is_whole
from .gguf_header import Header
from .gguf_keys import absent_of, architecture_of, is_equal, is_neutral, layer_values, names_of, values_of
from .gguf_rope import Rope, floats, rope_of

_STILL = 1e-20  # a frequency of Gemma-4's that does not turn: 1e-30 in the file
_HEADS_OF = {"head_dim": lambda config: head_size(config)}  # where a configuration has no such name


def head_size(config: Any) -> int:
    """The size of a head of attention."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def check_config(config: Any, header: Header) -> None:
    """Refuse a configuration that contradicts its file: llama.cpp computes with the file's.

    Args:
        config: transformers' own object.

    Raises:
        UnsupportedModelError: a key is not supported. CheckpointError: a value differs.
    """
    known = architecture_of(header)
    values = values_of(header, known)
    _check_layers(config, header, known)
    for name, value in known.fixed.items():
        if hasattr(config, name) and not is_equal(value, getattr(config, name)):
            said = f"means {name} = {value}, as every file of {header.architecture}"
            raise contradiction(header, f"{said}, where the configuration has {getattr(config, name)}")
    for key, value in {**absent_of(header, known), **values}.items():
        of = names_of(known).get(key)
        if of is None:
            if key not in known.layers and header.get(key) is None and not is_neutral(known, key, value):
                raise contradiction(header, f"has no {key}, which means {value}")
            continue
        expected = of(config) if callable(of) else getattr(config, of, None)
        if expected is None and isinstance(of, str) and of in _HEADS_OF:
            expected = _HEADS_OF[of](config)
        if key == "block_count":
            value -= header.drafts
        if key == "expert_weights_scale" and value == 0:
            value = 1.0
        if is_equal(value, expected) or (expected is None and is_neutral(known, key, value)):
            continue
        name = of if isinstance(of, str) else "that of its own"
        said = f"says {header.architecture}.{key} = {value}" if key in values else f"has no {key}, which means {value}"
        raise contradiction(header, f"{said}, where the configuration has {name} = {expected}")


def _check_layers(config: Any, header: Header, known: Architecture) -> None:
    """The keys with a value for each layer. Raises CheckpointError: a layer's differs, or one has none."""
    layers = config.num_hidden_layers
    for key, of in known.layers.items():
        values, own = layer_values(key, header, known, layers), list(of(config))
        if values is not None and not (len(values) == len(own) and all(map(is_equal, values, own))):
            said = f"says {header.architecture}.{key} = {values}" if header.get(key) is not None else f"has no {key}"
            raise contradiction(header, f"{said}, where the configuration has {own}")


def contradiction(header: Header, what: str) -> CheckpointError:
    """The refusal of a config.json that is not its file's."""
    whole, own = "remove config.json: the metadata is a whole configuration", "put the model's own beside it"
    remedy = whole if is_whole(header) else own
    return CheckpointError(f"config.json does not belong to {header.name}: the file {what}", remedy)


def check_rope(model: PreTrainedModel, header: Header) -> None:
    """Refuse a model that turns queries and keys by other frequencies than llama.cpp.

    Raises:
        CheckpointError: config.json has another rotary embedding. UnsupportedModelError: it is not known.
    """
    config = model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    for tensor, name in SHORT_AND_LONG.items():
        if tensor in header.tensors:
            values, own = floats(header.tensors[tensor]), np.array(parameters.get(name) or [])
            if values.shape != own.shape or not np.allclose(values, own, rtol=1e-4):
                raise contradiction(header, f"has {tensor}, which are not the configuration's {name}")
    for kind in {type(m) for m in model.modules() if _frequencies(m)}:
        turned = kind(config)
        for layers, own in _frequencies(turned).items():
            rope = rope_of(header, header.get("attention.key_length") or head_size(config), layers)
            scaling = getattr(turned, f"{layers}_attention_scaling".removeprefix("_"))
            _compare(rope, own, scaling, parameters.get(layers, parameters), header)


def _frequencies(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The frequencies of a rotary embedding by the kind of layers that they are of; "": of all. Else empty."""
    found = {name: buffer for name, buffer in module.named_buffers(recurse=False) if name.endswith("inv_freq")}
    return {
        name.removesuffix("inv_freq").removesuffix("_"): buffer
        for name, buffer in found.items()
        if "original" not in name
    }


def _compare(
    rope: Rope, turned: torch.Tensor, scaling: float, parameters: Mapping[str, Any], header: Header
) -> None:
    """Compare the rotary embedding of a file with a module's. turned: its frequencies. Raises as `check_rope`."""
    frequencies, scale = rope.frequencies(truncate=parameters.get("truncate", True))
    if rope.kind == "longrope":  # short or long ones by the length
        return
    own = turned.double().numpy()
    same = own.shape == frequencies.shape and np.allclose(own, frequencies, rtol=1e-4, atol=_STILL)
    in_attention = architecture_of(header).yarn_in_attention
    if not same or (not in_attention and abs(scaling - scale) > 1e-4):
        raise contradiction(header, f"says {_shown(rope)}, where the configuration has {dict(parameters)}")


def _shown(rope: Rope) -> str:
    parts = {"dimension_count": rope.dimensions, "freq_base": rope.base, "scaling.type": rope.kind,
             "scaling.factor": rope.factor, "scaling.original_context_length": rope.original,
             "scaling.attn_factor": rope.attention}  # fmt: skip
    own = ", rope_freqs.weight" if rope.factors else ""
    return ", ".join(f"rope.{name} = {value}" for name, value in parts.items()) + own
