"""Gates of the pre-gated policy in a file beside the store: written by `tiermoe prepare`, read by the lead."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import StoreError
from .policies.prefetch.pre_gated import PreGate
from .store_format import Manifest, model_fingerprint
from .tagged_file import encode_tagged, read_tagged

GATES_NAME = "gates.safetensors"
_REMEDY = "train them with `tiermoe prepare MODEL --gates TEXT`"


def encode_gates(gates: Sequence[PreGate], manifest: Manifest, tokens: int) -> bytes:
    """What the file holds, of layers 0..L-2; tokens: of the text that they were trained on."""
    arrays = {f"{i}.{name}": getattr(gate, name) for i, gate in enumerate(gates) for name in ("weight", "bias")}
    return encode_tagged(arrays, {"fingerprint": model_fingerprint(manifest), "tokens": tokens})


def gates_of(store: Path, manifest: Manifest) -> tuple[PreGate, ...]:
    """Those that lie in a store's folder.

    Raises:
        StoreError: the file is missing, malformed, not finite, or of another model.
    """
    path, shape = store / GATES_NAME, manifest.experts
    tag, arrays = read_tagged(path, "gates", StoreError, _REMEDY)
    if tag.get("fingerprint") != model_fingerprint(manifest):
        raise StoreError(f"'{path}' is of another model", _REMEDY)
    found = []
    for layer in range(len(manifest.layers) - 1):
        parts = {}
        for name, dims in (("weight", (shape.num_experts, shape.hidden)), ("bias", (shape.num_experts,))):
            array = arrays.get(f"{layer}.{name}")
            if array is None or array.dtype != np.float32 or array.shape != dims or not np.isfinite(array).all():
                raise StoreError(f"'{path}': {name} of layer {layer} is not what it should be", _REMEDY)
            parts[name] = array
        found.append(PreGate(**parts))
    return tuple(found)
