"""The `tiermoe prepare` command: a store, and what is added to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ....actors.store.files import published_refused
from ....actors.store.format import read_manifest
from ....errors import ConfigError
from ...checkpoints.hub import locate
from ...checkpoints.quantization import published_as
from ...host import shown
from ...simulate.trace import HEADER_NAME
from ..profile.command import ProfileRequest, profile_request
from .calibration import read_texts, shipped_calibration
from .job import default_store_dir, is_store, prepare
from .replicas import CALIBRATION_TOKENS, ReplicaOptions, add_replicas, parse_bits

_STRIDE = 3  # default layers ahead of predictors


def prepare_command(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help="Folder of a safetensors checkpoint, GGUF file, or org/name[@revision][:FILE.gguf].", metavar="MODEL"
        ),
    ],
    out: Annotated[
        Path | None, typer.Argument(help="Store folder to make; by default one in the cache.", metavar="[OUT]")
    ] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Where stores go when OUT is not given.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Make the store anew even if it is there.")] = False,
    bits: Annotated[
        str | None, typer.Option(help="Add quantized replicas of these widths, such as 1,2,3,4: seconds a gigabyte.")
    ] = None,
    calibrated: Annotated[
        bool, typer.Option("--calibrated", help="Fit replicas to a text by GPTQ: less error, minutes a gigabyte.")
    ] = False,
    calibration: Annotated[
        Path | None,
        typer.Option(help="The text, and --calibrated: .txt, .jsonl or a folder; without it the model's own."),
    ] = None,
    calibration_tokens: Annotated[
        int | None, typer.Option(help=f"Tokens of the text, at most. ({CALIBRATION_TOKENS})")
    ] = None,
    group_size: Annotated[int | None, typer.Option(help="Inputs that share a scale: 32, 64 or 128. (64)")] = None,
    act_order: Annotated[bool, typer.Option("--act-order", help="GPTQ takes the strongest inputs first.")] = False,
    neuron_order: Annotated[
        Path | None,
        typer.Option(
            help="Put the neurons of each expert that contribute most on this text first, for split experts.",
            metavar="TEXT",
        ),
    ] = None,
    predictors: Annotated[
        Path | None,
        typer.Option(help="Add predictors of later layers, trained on this text or trace.", metavar="TEXT|TRACE"),
    ] = None,
    stride: Annotated[int | None, typer.Option(help="Layers ahead that they predict. (3)")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Add a profile of the experts, for buddies, from .txt, .jsonl or a folder.", metavar="TEXT"),
    ] = None,
    profile_trace: Annotated[
        Path | None, typer.Option(help="Add a profile from a recorded trace: co-activation only.", metavar="TRACE")
    ] = None,
    profile_outputs: Annotated[
        int | None, typer.Option(help="Tokens on which all experts are run, to compare outputs. (8192)")
    ] = None,
    profile_warmup: Annotated[
        int | None, typer.Option(help="First tokens of each window or request to count less. (0)")
    ] = None,
    profile_warmup_weight: Annotated[float | None, typer.Option(help="How much they count, 0 to 1. (0)")] = None,
    profile_figures: Annotated[
        Path | None, typer.Option(help="Folder for heat maps of the profile, and its figures as JSON.")
    ] = None,
    gates: Annotated[
        Path | None, typer.Option(help="Add gates for pre-gated prefetch, trained on this text.", metavar="TEXT")
    ] = None,
    sensitivity: Annotated[
        Path | None,
        typer.Option(help="Add each layer's sensitivity, for adaptive gating, measured on this text.", metavar="TEXT"),
    ] = None,
    losses: Annotated[
        Path | None,
        typer.Option(help="Add what lossy actions cost, for --quality kl=NATS, measured on this text.", metavar="TEXT"),
    ] = None,
) -> None:
    """Turn a checkpoint into an expert store, which `tiermoe run` maps. Interrupted, it resumes."""
    if out is not None and cache_dir is not None:
        raise ConfigError("OUT and --cache-dir are both given", "leave one out: OUT names the store folder itself")
    if stride is not None and predictors is None:
        raise ConfigError("--stride is given without --predictors", "add --predictors TEXT, or leave it out")
    profiling = profile_request(
        profile, profile_trace, profile_figures, profile_outputs, profile_warmup, profile_warmup_weight
    )
    calibrated = calibrated or calibration is not None
    options = replica_options(bits, group_size, act_order, calibrated, calibration_tokens)
    model = locate(checkpoint)
    text = calibration_text(model, calibration) if calibrated else None
    added = _Additions(model, neuron_order, options, text, predictors, stride, gates, sensitivity, losses, profiling)
    store = added.base(out, cache_dir, force)
    for add in added.steps():
        add(store)
    typer.echo(store)


@dataclass(frozen=True)
class _Additions:
    """What the command line adds to a store of `model`. text: for GPTQ; stride: of the predictors."""

    model: Path
    neuron_order: Path | None
    replicas: ReplicaOptions | None
    text: Path | None
    predictors: Path | None
    stride: int | None
    gates: Path | None
    sensitivity: Path | None
    losses: Path | None
    profiling: ProfileRequest | None

    def base(self, out: Path | None, cache_dir: Path | None, force: bool) -> Path:
        """The store that they are added to, made where the model is a checkpoint.

        Raises:
            ConfigError: they are not for this store, or it is there already; before minutes are spent where possible.
        """
        texts = [text for text in (self.neuron_order, self.gates, self.sensitivity, self.losses) if text is not None]
        if self.predictors is not None and not (self.predictors / HEADER_NAME).is_file():
            texts.append(self.predictors)
        for text in texts:
            read_texts(text)
        if published_as(self.model) is not None and (texts or self.text is not None):
            raise published_refused(f"checkpoint {shown(self.model)}")
        if not is_store(self.model):
            store = prepare(self.model, default_store_dir(self.model, cache_dir) if out is None else out, force=force)
        elif any(self.steps()) and out is None and cache_dir is None and not force:
            store = self.model
        else:
            adding = "--bits, --neuron-order, --predictors, --gates, --sensitivity, --losses, --profile"
            remedy = f"give its checkpoint, or only what is for a store: {adding}"
            raise ConfigError(f"{self.model} is a store already", remedy)
        if texts and read_manifest(store).published is not None:
            raise published_refused(f"store {store}")
        return store

    def steps(self) -> Iterator[Callable[[Path], object]]:
        """One call with the store for each addition."""
        model, order, options, text = self.model, self.neuron_order, self.replicas, self.text
        if order is not None:  # before replicas, which are fitted to the order
            from .neuron_order import order_neurons  # torch takes seconds: imported after the options are checked

            yield lambda store: order_neurons(store, model, order)
        if options is not None:
            yield lambda store: add_replicas(store, model, options, text)
        predictors, gates, sensitivity = self.predictors, self.gates, self.sensitivity
        stride = _STRIDE if self.stride is None else self.stride
        if predictors is not None or gates is not None or sensitivity is not None:
            from .measures import add_gates, add_predictors, add_sensitivity

            if predictors is not None:
                yield lambda store: add_predictors(store, model, predictors, stride)
            if gates is not None:
                yield lambda store: add_gates(store, model, gates)
            if sensitivity is not None:
                yield lambda store: add_sensitivity(store, model, sensitivity)
        if (losses := self.losses) is not None:
            from .losses import add_losses

            yield lambda store: add_losses(store, model, losses)
        if (profiling := self.profiling) is not None:
            yield lambda store: profiling.run(store, model)


def replica_options(
    bits: str | None, group_size: int | None, act_order: bool, calibrated: bool, tokens: int | None
) -> ReplicaOptions | None:
    """The replicas of the command line. Raises ConfigError: unknown width or group, or options without their base."""
    of_gptq = {"--act-order": act_order, "--calibration-tokens": tokens is not None}
    given = {"--group-size": group_size is not None, "--calibrated (or --calibration)": calibrated, **of_gptq}
    for name, is_given in given.items():
        if is_given and bits is None:
            raise ConfigError(f"{name} is given without --bits", "add --bits 1,2,3,4, or leave it out")
        if is_given and name in of_gptq and not calibrated:
            raise ConfigError(f"{name} is given without --calibrated", "add --calibrated, or leave it out")
    if bits is None:
        return None
    group = 64 if group_size is None else group_size
    return ReplicaOptions(parse_bits(bits), group, act_order, CALIBRATION_TOKENS if tokens is None else tokens)


def calibration_text(model: Path, given: Path | None) -> Path:
    """The text for GPTQ. Raises ConfigError: none is given and the model ships none, or it is unreadable."""
    text = given if given is not None else shipped_calibration(model)
    if text is None:
        raise ConfigError(f"{shown(model)} ships no calibration text", "give some with --calibration FILE")
    read_texts(text)  # refused before anything is computed
    return text
