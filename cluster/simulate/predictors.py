"""Predictors of the stride policy: trained on a trace, kept in a safetensors file beside the store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ...actors.policies.prefetch.stride import Predictor, TrainingOptions, train_predictor
from ...errors import TraceError
from .trace import Request
from .trace_format import TraceHeader
from .trace_writer import replace_file

_NAMES = tuple(field.name for field in fields(Predictor))
_REMEDY = "train them again with `tiermoe prepare MODEL --predictors TRACE`"


def predictors_file(stride: int) -> str:
    """Name within a store's folder."""
    return f"predictors-{stride}.safetensors"


def train_predictors(
    header: TraceHeader,
    requests: Iterable[Request],
    stride: int,
    options: TrainingOptions | None = None,
    limit: int = 20_000,
    advanced: Callable[[], None] | None = None,
) -> list[Predictor]:
    """Predictors of layers 0..L-stride-1 from a trace's routing.

    Args:
        limit: rows to train on at most, the first ones; they are held in memory.
        advanced: called after each layer.

    Raises:
        TraceError: no layer is that far ahead, or there are no rows.
    """
    if not 0 < stride < header.layers:
        raise TraceError(f"no layer of {header.layers} is {stride} ahead", "give a smaller stride")
    probabilities, ids, held = [], [], 0
    for request in requests:
        for step in request.iterations:
            probabilities.append(step.probabilities)
            ids.append(step.ids)
            held += len(step.tokens)
        if held >= limit:
            break
    if not held:
        raise TraceError("the trace has no rows to train on", "record some")
    seen, picked = np.concatenate(probabilities)[:limit], np.concatenate(ids)[:limit]
    found = []
    for layer in range(header.layers - stride):
        found.append(train_predictor(seen[:, layer], picked[:, layer + stride], options))
        if advanced is not None:
            advanced()
    return found


def save_predictors(path: Path, header: TraceHeader, stride: int, predictors: list[Predictor]) -> None:
    """Write them; `header` says of which model they are.

    Raises:
        ConfigError: the file cannot be written.
    """
    arrays = {
        f"{layer}.{name}": np.ascontiguousarray(getattr(predictor, name))
        for layer, predictor in enumerate(predictors)
        for name in _NAMES
    }
    kept = {"fingerprint": header.fingerprint, "layers": header.layers, "experts": header.experts, "stride": stride}
    replace_file(path, save(arrays, {"tiermoe": json.dumps(kept)}))


def load_predictors(path: Path, header: TraceHeader, stride: int) -> list[Predictor]:
    """Read them, refusing those of another model or stride.

    Raises:
        TraceError: the file is missing, malformed, not finite, or of another model or stride.
    """
    try:
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        kept = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["tiermoe"])
        arrays = load(data)
    except OSError as error:
        raise TraceError(f"predictors '{path}' cannot be read: {error.strerror}", _REMEDY) from error
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise TraceError(f"'{path}' holds no predictors", _REMEDY) from error
    expected = {
        "fingerprint": header.fingerprint, "layers": header.layers, "experts": header.experts, "stride": stride,
    }  # fmt: skip
    if kept != expected:
        raise TraceError(f"'{path}' is of another model or stride", _REMEDY)
    e, found = header.experts, []
    for layer in range(header.layers - stride):
        part = {name: arrays.get(f"{layer}.{name}") for name in _NAMES}
        b1 = part["b1"]
        d = 0 if b1 is None else len(b1)
        shapes = {"mean": (e,), "scale": (e,), "w1": (e, d), "b1": (d,), "w2": (d, e), "b2": (e,)}
        for name, shape in shapes.items():
            array = part[name]
            if array is None or array.dtype != np.float32 or array.shape != shape or not np.isfinite(array).all():
                raise TraceError(f"'{path}': {name} of layer {layer} is not what it should be", _REMEDY)
        if not (part["scale"] > 0).all():
            raise TraceError(f"'{path}': a scale of layer {layer} is not positive", _REMEDY)
        found.append(Predictor(**part))
    return found
