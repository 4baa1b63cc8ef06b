"""Profiles the experts of a store and puts the profile into its folder, whole or not at all.

    text   run it through the model, forward by forward, sums kept in OUT.profile: an interrupted run goes on
    trace  count its routing; a trace holds no inputs of experts, so there is no output similarity

`profile.json` comes last; until then the store has the profile that it had, or none.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
from rich.console import Console

from ....actors.expert_store import ExpertStore
from ....actors.policies.buddies import renormalised, warmup_weights
from ....actors.policies.expert_profile import ExpertProfile, RoutingCounts
from ....actors.profile_file import (
    PROFILE_NAME,
    PROFILE_VERSION,
    ProfileManifest,
    ProfileSource,
    encode_arrays,
    encode_profile,
    read_profile_manifest,
    stale_arrays,
)
from ....actors.store_format import Manifest, model_fingerprint, read_manifest
from ....errors import StoreError, TraceError
from ...report.tables import progress_on
from ...simulate.trace import Trace
from ...simulate.trace_format import HEADER_NAME
from ..prepare.calibration import read_windows
from ..prepare.job import beside, discard, locked
from ..prepare.write import disk_errors, write_file
from .options import ProfileOptions

_WORK = ".profile"
_ALGORITHM = 1  # another number where the same text gives other sums


def profile_text(
    store: Path, model_dir: Path, text: Path, options: ProfileOptions | None = None, *, progress: bool = True
) -> ProfileManifest:
    """Profile a store's experts on text, in place of a profile that is there; one of the same text and options stays.

    Args:
        model_dir: folder with the tokenizer and config.json: the checkpoint or the store itself.
        text: file or folder, see `read_texts`.

    Raises:
        ConfigError: no text, or too little. StoreError: the store is damaged, or the disk is full.
    """
    options = ProfileOptions() if options is None else options
    console = Console(stderr=True, quiet=not progress)
    manifest = read_manifest(store)
    windows = read_windows(text, model_dir, console)
    source = ProfileSource(
        kind="text",
        sha256=windows.record().sha256,
        tokens=windows.tokens,
        output_tokens=min(options.output_tokens, windows.tokens),
        warmup_steps=options.warmup_steps,
        warmup_weight=options.warmup_weight,
    )
    with locked(store, console):
        present = _present(store, manifest, source)
        if present is not None:
            return present
        import torch

        from ....actors.engine.model import build_model, experts_per_token, find_blocks  # torch: seconds
        from ....actors.engine.sources import host_weights
        from .collect import Collector
        from .partial import Partial

        opened = ExpertStore(store, verify="stamp")
        model = build_model(store, manifest, torch.float32, torch.device("cpu"), "auto")
        weights = host_weights(opened.layers)
        collector = Collector(model, find_blocks(model, manifest), weights, windows, options)
        partial = Partial(beside(store, _WORK), _key(manifest, source))
        kept, first = partial.load(collector.state()), 0
        if kept is not None:
            state, first = kept
            collector.resume(state)
        with progress_on(console) as bar:
            task = bar.add_task("profiling experts", total=windows.tokens, completed=first * windows.ids.shape[1])
            for done in collector.run(first, lambda tokens: bar.advance(task, tokens)):
                partial.save(collector.state(), done)
        return _publish(store, manifest, collector.profile(), experts_per_token(model.config), source)


def profile_trace(
    store: Path, trace: Path, options: ProfileOptions | None = None, *, progress: bool = True
) -> ProfileManifest:
    """Profile a store's experts from a recorded trace, in place of a profile that is there.

    Raises:
        TraceError: the trace is corrupt, empty or of another model. StoreError: the store is not one, or the disk is
            full.
    """
    options = ProfileOptions() if options is None else options
    console = Console(stderr=True, quiet=not progress)
    manifest, found = read_manifest(store), Trace(trace)
    header = found.header
    if header.fingerprint != model_fingerprint(manifest):
        raise TraceError(f"'{trace}' was recorded on another model than '{store}'", "record one on this model")
    if not header.rows:
        raise TraceError(f"'{trace}' has no rows to profile", "record some")
    source = ProfileSource(
        kind="trace",
        sha256=hashlib.sha256((trace / HEADER_NAME).read_bytes()).hexdigest(),
        tokens=header.rows,
        output_tokens=0,
        warmup_steps=options.warmup_steps,
        warmup_weight=options.warmup_weight,
    )
    with locked(store, console):
        present = _present(store, manifest, source)
        if present is not None:
            return present
        layers = [RoutingCounts(header.experts) for _ in range(header.layers)]
        with progress_on(console) as bar:
            task = bar.add_task("profiling experts", total=header.requests)
            for request in found.requests():
                row = 0
                for step in request.iterations:
                    steps = np.arange(row, row + len(step.tokens))
                    row += len(step.tokens)
                    counts = warmup_weights(steps, options.warmup_steps, options.warmup_weight)
                    for layer, routing in enumerate(layers):
                        routing.add(step.ids[:, layer], renormalised(step.weights[:, layer]), counts)
                bar.advance(task)
        profile = ExpertProfile(
            np.stack([layer.pairs.activations for layer in layers]),
            np.stack([layer.pairs.binary for layer in layers]),
            np.stack([layer.pairs.weighted for layer in layers]),
            np.stack([layer.entropies for layer in layers]),
            None,
        )
        return _publish(store, manifest, profile, header.top_k, source)


def _present(store: Path, manifest: Manifest, source: ProfileSource) -> ProfileManifest | None:
    """The store's profile if it is of this very source, and whole; a damaged one is made anew."""
    try:
        found = read_profile_manifest(store, manifest)
    except StoreError:
        return None
    if found is None or found.source != source:
        return None
    path = store / found.arrays.file
    return found if path.is_file() and path.stat().st_size == found.arrays.nbytes else None


def _key(manifest: Manifest, source: ProfileSource) -> str:
    return json.dumps([_ALGORITHM, model_fingerprint(manifest), source.model_dump()], sort_keys=True)


def _publish(
    store: Path, manifest: Manifest, profile: ExpertProfile, top_k: int, source: ProfileSource
) -> ProfileManifest:
    """Put the files into the store, `profile.json` last, and drop what it does not name."""
    data, record = encode_arrays(profile)
    made = ProfileManifest(
        profile_version=PROFILE_VERSION,
        fingerprint=model_fingerprint(manifest),
        layers=profile.layers,
        experts=profile.experts,
        top_k=top_k,
        source=source,
        arrays=record,
    )
    write_file(store / record.file, data)
    write_file(store / PROFILE_NAME, encode_profile(made))
    with disk_errors(store):
        for path in stale_arrays(store, made):
            path.unlink()
        discard(beside(store, _WORK))
    return made
