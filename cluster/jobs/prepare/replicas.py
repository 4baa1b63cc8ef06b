"""Adds quantized replicas and the loss table to a store, atomically.

    check everything -> quantize layer by layer -> put the files into the store

Replicas are data-free, seconds for a gigabyte, unless a calibration text is given; then GPTQ fits them to the text.
Unfinished files are in `OUT.replicas` with a journal, so an interrupted run resumes after the last finished layer.
`replicas.json` is written last.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from rich.console import Console

from ....actors.store.format import Manifest, read_manifest
from ....actors.store.replicas import (
    REPLICAS_NAME,
    Calibration,
    ReplicaManifest,
    Width,
    describe_replicas,
    read_replicas,
)
from ....errors import ConfigError, StoreError, UnsupportedModelError
from ...host import shown
from .make_store import REPLICA_WORK, is_store
from .replica_options import CALIBRATION_TOKENS, ReplicaOptions
from .writer import beside, discard, disk_errors, finished_names, locked

if TYPE_CHECKING:
    from .replica_job import ReplicaJob

_POPULARITY_BITS = 4  # of replicas that are made for the popularity of experts alone


def ensure_replicas(
    store: Path,
    model_dir: Path,
    bits: Sequence[int],
    group: int = 64,
    *,
    calibrated: bool = False,
    progress: bool = True,
) -> Path:
    """The store, with replicas of at least these widths in this group size; missing ones are made now.

    They are made as those that are there; without any, data-free. Experts in a published form need none at and above
    that form's width.

    Args:
        model_dir: the checkpoint, whose shipped calibration text is used.
        calibrated: they must be, for the popularity of experts. Where only that is wanted (no bits), replicas of
            4 bits come with it; a model without a calibration text, or whose experts are in a published
            form, gets none: its popularity is counted as requests run.

    Raises:
        ConfigError: replicas of another group size exist; unknown width or group; calibrated ones of these widths are
            wanted or there, and the model ships no calibration text.
        StoreError, UnsupportedModelError: as `add_replicas`.
    """
    from .calibration import shipped_calibration

    manifest = read_manifest(store)
    if manifest.published is not None:
        bits, calibrated = manifest.published.narrower(bits), False
    if not bits and calibrated and shipped_calibration(model_dir) is not None:
        bits = (_POPULARITY_BITS,)
    if not bits:
        return store
    options = ReplicaOptions(tuple(bits), group)
    try:
        present = read_replicas(store, manifest)
        enough = present is not None and (present.method == "gptq" or not calibrated)
        if enough and present is not None and present.group == group and set(options.bits) <= set(present.widths):
            describe_replicas(store, verify="stamp")
            return store
    except StoreError:
        present = None  # damaged: made again
    if present is not None and present.group != group:  # the user made them: never replaced implicitly
        raise ConfigError(
            f"the replicas of {store} are in groups of {present.group}, the run asks for {group}",
            f"set ndp.group_size: {present.group}, or make others with `tiermoe prepare --group-size {group}`",
        )
    text = None
    if calibrated or (present is not None and present.method == "gptq"):
        text = shipped_calibration(model_dir)
        if text is None:
            widths = ",".join(map(str, options.bits))
            model = shown(model_dir)
            paths = f"{store}" if is_store(model_dir) else f"{model} {store}"
            raise ConfigError(
                f"{store} has no calibrated replicas of {widths} bits in groups of {group}, and {model} ships no "
                "calibration text",
                f"run `tiermoe prepare {paths} --bits {widths} --group-size {group} --calibration FILE`",
            )
    if present is not None:
        tokens = present.calibration.tokens if present.calibration is not None else CALIBRATION_TOKENS
        options = ReplicaOptions(tuple({*options.bits, *present.widths}), group, tokens)
    return add_replicas(store, model_dir, options, text, progress=progress)


def add_replicas(
    store: Path, model_dir: Path, options: ReplicaOptions, calibration: Path | None = None, *, progress: bool = True
) -> Path:
    """Make the replicas that a store lacks.

    Present widths stay if method, calibration, group size and activation order are equal; otherwise the new set
    replaces them.

    Args:
        model_dir: folder with the tokenizer and config.json: the checkpoint or the store itself.
        calibration: text file or folder, see `read_texts`, for GPTQ; None: data-free.

    Raises:
        ConfigError: the calibration text is unusable; or the store's experts are in a published form, and the replicas
            are to be calibrated or as wide. UnsupportedModelError: no kernel runs replicas of such experts.
        StoreError: the store is damaged, or the disk is full.
    """
    console = Console(stderr=True, quiet=not progress)
    manifest = read_manifest(store)
    _check_published(manifest, options, calibration)
    shape = manifest.experts
    if shape.gates != 2 or shape.has_bias:
        what = "have no gate" if shape.gates != 2 else "have biases"
        raise UnsupportedModelError(f"the experts of {manifest.architecture} {what}", "use it without replicas")
    if any(record.file == REPLICAS_NAME for record in manifest.files()):
        what = f"{store} holds a file {REPLICAS_NAME} of the checkpoint's own"
        raise StoreError(what, "rename it in the checkpoint and prepare the store again")
    windows = None
    if calibration is not None:
        from .calibration import read_windows

        windows = read_windows(calibration, model_dir, console, options.tokens)
    with locked(store, console):
        present = _present(store, None if windows is None else windows.record(), options, console)
        missing = tuple(b for b in options.bits if present is None or b not in present.widths)
        if present is not None and not missing:
            _discard_published(store, present)
            return store
        activations = _activations(store, manifest)
        job: ReplicaJob
        if windows is None:
            from .replica_job import DataFree

            job = DataFree(store, options, activations, missing, present)
        else:
            from .quantize import Calibrated  # imports torch, which takes seconds: only when needed

            job = Calibrated(store, options, activations, missing, present, windows)
        try:
            job.make(console)
        except KeyboardInterrupt:
            console.print("interrupted: the same command resumes after the last finished layer")
            raise
    return store


def _check_published(manifest: Manifest, options: ReplicaOptions, calibration: Path | None) -> None:
    """Refuse replicas of experts in a published form that would be calibrated, or no smaller than that form."""
    if (published := manifest.published) is None:
        return
    what = f"{manifest.model} publishes its experts as {published.label()}"
    below = published.narrower(options.bits)
    if below != options.bits:
        wide = ", ".join(str(b) for b in options.bits if b not in below)
        narrower = ",".join(map(str, published.narrower(get_args(Width))))
        raise ConfigError(
            f"{what}, {published.width} bits a weight: replicas of {wide} bits are no smaller",
            f"give --bits some of {narrower}: from {published.width} bits on, NDP workers compute the published form",
        )
    if calibration is not None:
        raise ConfigError(
            f"{what}, of which replicas are made without a text", "leave --calibrated and --calibration out"
        )


def _activations(store: Path, manifest: Manifest) -> list[str]:
    """Each MoE layer's, from a model without weights. Raises UnsupportedModelError: experts are not act(gate) * up."""
    import torch
    from transformers import AutoConfig

    from ....actors.engine.model.architecture import from_config
    from .capture import checked_blocks

    config = AutoConfig.from_pretrained(store, trust_remote_code=False)
    with torch.device("meta"):
        blocks = checked_blocks(from_config(config), manifest)
    return [str(block.activation) for block in blocks]  # not None: checked


def _discard_published(store: Path, present: ReplicaManifest) -> None:
    """Remove the work folder of a run that ended after it wrote `replicas.json`.

    Its journal names files of the store, or is removed already. Unfinished work on other widths stays and resumes.
    """
    folder = beside(store, REPLICA_WORK)
    names = finished_names(folder)
    if names is None or not names.isdisjoint(file.file for file in present.files):
        with disk_errors(folder):
            discard(folder)


def _present(
    store: Path, calibration: Calibration | None, options: ReplicaOptions, console: Console
) -> ReplicaManifest | None:
    """The store's replicas, if new ones can be added to them."""
    try:
        view = describe_replicas(store)
    except StoreError as error:
        console.print(f"the store's replicas are unusable ({error.what}) and are made again")
        return None
    if view is None:
        return None
    old = view.manifest
    if (old.calibration, old.group, old.act_order) == (calibration, options.group, False):
        return old
    what = "method, calibration, group size or activation order"
    console.print(f"the store's replicas are of another {what}: replacing them")
    return None
