"""Tensors of a checkpoint that its model does not have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import CheckpointError
from .matrices import OF_ACTIVATIONS, Found
from .tensors import read_blocks
from .weight_files import OTHER_CONFIG, TensorEntry

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def left_out(model: PreTrainedModel, unexpected: Mapping[str, Found | None]) -> list[str]:
    """Those of the tensors that a model does not have of which transformers says so, when it leaves them out.

    Not among them: what belongs to a tower that is left out, scales of activations, and biases of zeros, which older
    releases of AutoGPTQ write beside every matrix.
    """
    ignored = pattern_of([*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"])
    return [
        name
        for name, found in unexpected.items()
        if not (ignored and ignored.search(name))
        and not OF_ACTIVATIONS.search(name)
        and not _is_of_tower(model, name)
        and not (name.endswith(".bias") and isinstance(found, TensorEntry) and _is_zero(found))
    ]


def _is_of_tower(model: PreTrainedModel, name: str) -> bool:
    """Whether a name leads through a module that was left out, which is None."""
    at: Any = model
    for part in name.split(".")[:-1]:  # the last is of a parameter, such as a bias that there is none of
        if not hasattr(at, part):
            return False
        if (at := getattr(at, part)) is None:
            return True
    return False


def _is_zero(entry: TensorEntry) -> bool:
    return not any(block.any() for block in read_blocks(entry))


def refuse_surplus_experts(model: PreTrainedModel, left_out: Sequence[str]) -> None:
    """Raise CheckpointError if tensors of experts are left out: there are other experts than config.json says."""
    paths = tuple(path + "." for path, module in model.named_modules() if hasattr(module, "is_concatenated"))
    if surplus := [name for name in left_out if name.startswith(paths)]:
        what = f"the checkpoint has experts' tensors that the model lacks: {first_few(surplus)}"
        raise CheckpointError(what, OTHER_CONFIG)


def pattern_of(patterns: Any) -> re.Pattern[str] | None:
    """One of all, or None for none."""
    return re.compile("|".join(f"({pattern})" for pattern in patterns)) if patterns else None


def first_few(names: Sequence[str]) -> str:
    """Some of many names, for people."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
