"""Predictors of the stride policy in a file beside the store: written by `tiermoe prepare`, read by the lead."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np

from ..errors import TraceError
from .policies.prefetch.stride import Predictor
from .store_format import Manifest, model_fingerprint
from .tagged_file import encode_tagged, read_tagged

_NAMES = tuple(field.name for field in fields(Predictor))
_REMEDY = "train them with `tiermoe prepare MODEL --predictors TRACE --stride {stride}`"


@dataclass(frozen=True)
class PredictorsOf:
    """The model and the stride that predictors are for.

    fingerprint: of the checkpoint's files. layers, experts: L and E. stride: layers ahead.
    """

    fingerprint: str
    layers: int
    experts: int
    stride: int


def predictors_file(stride: int) -> str:
    """Name within a store's folder."""
    return f"predictors-{stride}.safetensors"


def encode_predictors(predictors: list[Predictor], of: PredictorsOf) -> bytes:
    """What the file holds."""
    arrays = {
        f"{layer}.{name}": getattr(predictor, name)
        for layer, predictor in enumerate(predictors)
        for name in _NAMES
    }
    return encode_tagged(arrays, asdict(of))


def predictors_of(store: Path, manifest: Manifest, stride: int) -> list[Predictor]:
    """Those that lie in a store's folder. Raises as `read_predictors`."""
    of = PredictorsOf(model_fingerprint(manifest), len(manifest.layers), manifest.experts.num_experts, stride)
    return read_predictors(store / predictors_file(stride), of)


def read_predictors(path: Path, of: PredictorsOf) -> list[Predictor]:
    """Read them, refusing those of another model or stride.

    Raises:
        TraceError: the file is missing, malformed, not finite, or of another model or stride.
    """
    remedy = _REMEDY.format(stride=of.stride)
    kept, arrays = read_tagged(path, "predictors", TraceError, remedy)
    if kept != asdict(of):
        raise TraceError(f"'{path}' is of another model or stride", remedy)
    e, found = of.experts, []
    for layer in range(of.layers - of.stride):
        part = {name: arrays.get(f"{layer}.{name}") for name in _NAMES}
        b1 = part["b1"]
        d = 0 if b1 is None else len(b1)
        shapes = {"mean": (e,), "scale": (e,), "w1": (e, d), "b1": (d,), "w2": (d, e), "b2": (e,)}
        for name, shape in shapes.items():
            array = part[name]
            if array is None or array.dtype != np.float32 or array.shape != shape or not np.isfinite(array).all():
                raise TraceError(f"'{path}': {name} of layer {layer} is not what it should be", remedy)
        if not (part["scale"] > 0).all():
            raise TraceError(f"'{path}': a scale of layer {layer} is not positive", remedy)
        found.append(Predictor(**part))
    return found
