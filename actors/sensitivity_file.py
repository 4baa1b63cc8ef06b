"""How sensitive the loss is to each layer's output, in a file beside the store: measured by `tiermoe prepare`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..errors import StoreError
from .store_format import Manifest, model_fingerprint
from .tagged_file import encode_tagged, read_tagged

SENSITIVITY_NAME = "sensitivity.safetensors"
_REMEDY = "measure it with `tiermoe prepare MODEL --sensitivity TEXT`"


def encode_sensitivity(sensitivity: tuple[float, ...], manifest: Manifest, tokens: int) -> bytes:
    """What the file holds: float64 [L]; tokens: of the calibration text."""
    tag = {"fingerprint": model_fingerprint(manifest), "tokens": tokens}
    return encode_tagged({"sensitivity": np.array(sensitivity, np.float64)}, tag)


def sensitivity_of(store: Path, manifest: Manifest) -> tuple[float, ...]:
    """That which lies in a store's folder, in nats per squared dropped weight, see `policies.routing.AdaptiveGating`.

    Raises:
        StoreError: the file is missing, malformed, not finite, negative, or of another model.
    """
    path = store / SENSITIVITY_NAME
    tag, arrays = read_tagged(path, "sensitivities", StoreError, _REMEDY)
    if tag.get("fingerprint") != model_fingerprint(manifest):
        raise StoreError(f"'{path}' is of another model", _REMEDY)
    found = arrays.get("sensitivity")
    if found is None or found.dtype != np.float64 or found.shape != (len(manifest.layers),):
        raise StoreError(f"'{path}' has not one number for each of {len(manifest.layers)} layers", _REMEDY)
    if not (np.isfinite(found).all() and (found >= 0).all()):
        raise StoreError(f"'{path}': a sensitivity is negative or not finite", _REMEDY)
    return tuple(found.tolist())
