"""Predictors of the stride policy: trained on a trace, kept in a safetensors file beside the store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from ...actors.policies.baselines import Predictor, TrainingOptions, train_predictor
from ...actors.store.artifacts import PredictorsOf, encode_predictors, read_predictors
from ...errors import TraceError
from .trace import Request
from .trace_format import TraceHeader
from .trace_writer import replace_file


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
    replace_file(path, encode_predictors(predictors, _of(header, stride)))


def load_predictors(path: Path, header: TraceHeader, stride: int) -> list[Predictor]:
    """Read them, refusing those of another model or stride.

    Raises:
        TraceError: the file is missing, malformed, not finite, or of another model or stride.
    """
    return read_predictors(path, _of(header, stride))


def _of(header: TraceHeader, stride: int) -> PredictorsOf:
    return PredictorsOf(header.fingerprint, header.layers, header.experts, stride)
