"""A checkpoint's own head for drafts (multi-token prediction), as transformers' `MtpModel` runs it.

The head has a decoder layer of the model's own class, on the projected pair of a token's embedding and the hidden state
before it; embedding, output head and rotary embedding are the model's. A store has its weights in a file of their own.
All of them stay in memory, its experts too: the experts of a store are those of a forward.

Two layouts are known: `mtp.layers.N` (Qwen3-Next, Qwen3.5, Mellum, NemotronH, ..), and `model.layers.N` behind the
model's own layers (DeepSeek-V3, GLM-4.5, ..). What the configuration does not say of the head, its tensors do.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ....errors import UnsupportedModelError

FILE = "mtp.safetensors"  # of a store; a checkpoint with one file of weights may have it, too

_OWN = re.compile(r"(?:^|\.)mtp\.")
_BEHIND = re.compile(r"^(?:model\.|language_model\.)*layers\.(\d+)\.")  # not those of a tower
_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def names_of_head(names: Iterable[str], config: Any) -> list[str]:
    """The tensors of a checkpoint that are its head's."""
    layers = config.get_text_config().num_hidden_layers
    found = []
    for name in names:
        behind = _BEHIND.search(name)
        if _OWN.search(name) or (behind is not None and int(behind[1]) >= layers):
            found.append(name)
    return found


def head_on_meta(model: Any, names: Iterable[str]) -> Any:
    """The head of a model, without weights of its own.

    Args:
        names: tensors of the head, of a checkpoint or of a store's file.

    Raises:
        UnsupportedModelError: transformers cannot make it.
    """
    from transformers.modeling_layers import MtpModel

    names = list(names)
    whole, model.config = model.config, copy.deepcopy(model.config)
    try:
        count = _complete(model.config.get_text_config(), names)
        with torch.device("meta"):
            return MtpModel(model, count)
    except Exception as error:  # transformers raises many kinds
        what = f"the head for drafts of {type(model).__name__} is not understood ({type(error).__name__}: {error})"
        raise UnsupportedModelError(what, "serve it without: drafts.kind ngram") from error
    finally:
        model.config = whole


def _complete(config: Any, names: list[str]) -> int:
    """Say in a configuration what the tensors of the head say; how many layers it has."""
    numbers = [int(found[1]) for found in map(_NUMBER.search, names) if found is not None]
    count = config.num_mtp_layers = len(set(numbers)) or 1
    if getattr(config, "layer_types", None) is not None and getattr(config, "mtp_layer_types", None) is None:
        config.mtp_layer_types = ["full_attention"] * count
    routed = any(".experts." in name for name in names)
    if getattr(config, "mlp_layer_types", None) is not None and getattr(config, "mtp_mlp_layer_types", None) is None:
        config.mtp_mlp_layer_types = ["sparse" if routed else "dense"] * count
    if hasattr(config, "mlp_only_layers"):
        config.mlp_only_layers = [] if routed else list(range(count))
    if hasattr(config, "decoder_sparse_step"):
        config.decoder_sparse_step = 1
    return count


def own_names(head: Any) -> list[str]:
    """The tensors of a head that the model does not have."""
    return [name for name in head.state_dict() if name.startswith(("layers.", "shared_post_norm."))]


def build_head(folder: Path, model: Any, device: torch.device) -> Any:
    """The head of a store's model; None: the store has none.

    Args:
        model: with its weights.

    Raises:
        UnsupportedModelError: as `head_on_meta`, or the file does not fit.
    """
    from safetensors.torch import load_file

    from .model import assign_dense

    if not (folder / FILE).is_file():
        return None
    tensors = load_file(folder / FILE)
    head = head_on_meta(model, tensors)
    own = set(own_names(head))
    if left := own.symmetric_difference(tensors):
        what = f"the store's head for drafts does not fit the model: {', '.join(sorted(left)[:3])}"
        raise UnsupportedModelError(what, "prepare the store again with --force")
    head.embed_tokens = head.shared_head = head.rotary_emb = None  # the model's, which stay as they are
    assign_dense(head, tensors, set(), device)
    head.set_experts_implementation("eager")  # of few rows
    head.tie_with_main_model(model)
    return head.eval()
