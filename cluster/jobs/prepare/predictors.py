"""Predictors for the stride policy, trained on a trace and kept in the store's folder."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from rich.console import Console

from ....actors.predictor_file import predictors_file
from ....actors.store_format import model_fingerprint, read_manifest
from ....errors import TraceError
from ...report.tables import progress_on
from ...simulate.predictors import save_predictors, train_predictors
from ...simulate.trace import Trace


def add_predictors(store: Path, trace: Path, stride: int, requests: int | None = None) -> Path:
    """Train and write `predictors-STRIDE.safetensors`, in place of one that is there.

    Args:
        requests: to learn from, the trace's first ones; None: all.

    Raises:
        TraceError: the trace is corrupt, of another model, or no layer is that far ahead.
        StoreError: the store is not one. ConfigError: the file cannot be written.
    """
    found = Trace(trace)
    header = found.header
    if header.fingerprint != model_fingerprint(read_manifest(store)):
        raise TraceError(f"'{trace}' was recorded on another model than '{store}'", "record one on this model")
    with progress_on(Console(stderr=True)) as progress:
        task = progress.add_task("training predictors", total=max(0, header.layers - stride))
        learned = islice(found.requests(), requests)
        trained = train_predictors(header, learned, stride, advanced=lambda: progress.advance(task))
    path = store / predictors_file(stride)
    save_predictors(path, header, stride, trained)
    return path
