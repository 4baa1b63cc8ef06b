"""The transformers class of a configuration, and the part of it that reads and writes text.

A composite checkpoint (`text_config` beside those of images, sound, ...) is run by its own class: what the class does
around the text model (positions, a scale of the logits, a soft cap) stays. The towers of other inputs are left out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ....errors import UnsupportedModelError

_OF_IMAGES = "vision_moe"  # ERNIE's experts for tokens of images, of another size, beside those of text


def class_of(config: Any) -> Any:
    """The class that generates text.

    Raises:
        ValueError: transformers has none for this configuration.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM

    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise ValueError(f"no class of transformers generates text by a {type(config).__name__}")


def usual_attention(config: Any) -> str:
    """transformers' name of the attention for an ordinary cache that needs no further package."""
    return "sdpa" if getattr(class_of(config), "_supports_sdpa", False) else "eager"


def from_config(config: Any, **options: Any) -> Any:
    """A model that generates text, without weights of other inputs.

    Args:
        options: as of `PreTrainedModel._from_config`: dtype, attn_implementation. By default the usual attention,
            whatever the configuration has: one may name a package that is not here.

    Raises:
        ValueError: as `class_of`. UnsupportedModelError: the text part cannot be told apart. What transformers raises.
    """
    from transformers import AutoModelForCausalLM

    attention = options.setdefault("attn_implementation", usual_attention(config))
    if "text_config" in config.sub_configs:
        options["attn_implementation"] = {"": attention, "text_config": attention}  # towers may have another only
    if type(config) in AutoModelForCausalLM._model_mapping:
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
    else:
        model = class_of(config)._from_config(config, **options)
    if model.config.get_text_config() is not model.config:
        _leave_out_towers(model)
    return model


def left_out(folder: Path) -> list[str]:
    """What a checkpoint has and is not served, for the user; of its config.json."""
    config = json.loads((folder / "config.json").read_bytes())
    parts = [name.removesuffix("_config") for name in config if name.endswith("_config") and name != "text_config"]
    others = [name for name in parts if name in ("vision", "audio")]
    return [f"the text part is served, without {' and '.join(others)}"] if "text_config" in config and others else []


def _leave_out_towers(model: Any) -> None:
    """Remove the modules with weights that text does not go through: neither the text model, nor the head, nor around
    them; and experts of images within. The classes' own code asks none of them where there are no images and no sound.

    Raises:
        UnsupportedModelError: the class does not say which its text model is.
    """
    text, head = model.get_decoder(), model.get_output_embeddings()
    if text is None or head is None or not any(module is text for module in model.modules()):
        what = f"{type(model).__name__} does not say which of its modules reads text"
        raise UnsupportedModelError(what, "pass a checkpoint of the text model alone")
    kept = {*text.modules(), *head.modules()}
    around = [module for module in model.modules() if kept & set(module.modules())]
    for owner in around:
        if owner in kept:
            continue
        for name, child in list(owner.named_children()):
            if child not in around and child not in kept and any(True for _ in child.parameters()):
                setattr(owner, name, None)
    for block in [module for module in text.modules() if hasattr(module, _OF_IMAGES)]:
        setattr(block, _OF_IMAGES, None)
    for part in model.config.sub_configs:
        if part != "text_config":
            setattr(model.config, part, None)  # else transformers warns of each that has no module
