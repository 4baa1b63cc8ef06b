"""The transformers class of a configuration, and the part of it that reads and writes text.

A composite checkpoint (`text_config` beside those of images, sound, ...) is run by its own class: what the class does
around the text model (positions, a scale of the logits, a soft cap) stays. The towers of other inputs are left out.
"""

from __future__ import annotations

from typing import Any

from ....errors import UnsupportedModelError


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


def from_config(config: Any, **options: Any) -> Any:
    """A model that generates text, without weights of other inputs.

    Args:
        options: as of `PreTrainedModel._from_config`: dtype, attn_implementation.

    Raises:
        ValueError: as `class_of`. UnsupportedModelError: the text part cannot be told apart. What transformers raises.
    """
    from transformers import AutoModelForCausalLM

    if type(config) in AutoModelForCausalLM._model_mapping:
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
    model = class_of(config)._from_config(config, **options)
    _leave_out_towers(model)
    return model


def _leave_out_towers(model: Any) -> None:
    """Remove the modules with weights that text does not go through: neither the text model, nor the head, nor around
    them. The classes' own code asks none of them where there are no images and no sound.

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
