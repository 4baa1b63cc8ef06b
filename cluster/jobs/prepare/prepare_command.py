"""The `tiermoe prepare` command: a store, and what is added to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from ....actors.store.files import published_refused
from ....actors.store.format import read_manifest
from ....errors import ConfigError
from ...checkpoints.hub import locate
from ...checkpoints.quantization import published_as
from ...host import shown
from ...report.files import check_folder
from ...report.output import stdout
from ...simulate.trace import HEADER_NAME
from ..options import with_options
from ..profile import OUTPUT_TOKENS
from ..profile.profile_options import ProfileRequest, profile_request
from .calibration import read_texts, shipped_calibration
from .make_store import default_store_dir, is_store, prepare, refuse_foreign
from .replica_options import CALIBRATION_TOKENS, ReplicaOptions, parse_bits
from .replicas import add_replicas

_STRIDE = 3  # default layers ahead of predictors


Opt = typer.Option


@dataclass(frozen=True)
class Additions:
    """What is added to a store; each field is an option of the command."""

    bits: Annotated[
        str | None, Opt(help="Add quantized replicas of these widths in bits, such as 1,2,3,4: seconds a gigabyte.")
    ] = None
    calibrated: Annotated[
        bool, Opt("--calibrated", help="Fit the replicas to a text by GPTQ: less error, minutes a gigabyte.")
    ] = False
    calibration: Annotated[
        Path | None,
        Opt(help="Text for --calibrated, which it implies: .txt, .jsonl or a folder; default: the model's own."),
    ] = None
    calibration_tokens: Annotated[
        int | None, Opt(help=f"Most tokens of that text; default: {CALIBRATION_TOKENS}.")
    ] = None
    group_size: Annotated[int | None, Opt(help="Inputs that share one scale: 32, 64 or 128; default: 64.")] = None
    predictors: Annotated[
        Path | None,
        Opt(help="Add predictors of later layers' experts, trained on this text or trace.", metavar="TEXT|TRACE"),
    ] = None
    stride: Annotated[int | None, Opt(help=f"Layers ahead that they predict; default: {_STRIDE}.")] = None
    profile: Annotated[
        Path | None,
        Opt(help="Add a profile of the experts, for buddies, from .txt, .jsonl or a folder.", metavar="TEXT"),
    ] = None
    profile_trace: Annotated[
        Path | None, Opt(help="Add a profile from a recorded trace: co-activation only.", metavar="TRACE")
    ] = None
    profile_outputs: Annotated[
        int | None, Opt(help=f"Tokens on which all experts run, to compare outputs; default: {OUTPUT_TOKENS}.")
    ] = None
    profile_warmup: Annotated[
        int | None, Opt(help="First tokens of each window or request, which count less; default: 0.")
    ] = None
    profile_warmup_weight: Annotated[float | None, Opt(help="Weight of these tokens, 0 to 1; default: 0.")] = None
    gates: Annotated[
        Path | None, Opt(help="Add gates for pre-gated prefetch, trained on this text.", metavar="TEXT")
    ] = None

    def steps(self, model: Path) -> list[Callable[[Path], object]]:
        """One call with the store for each addition, in order; what needs no weight is checked now.

        Raises:
            ConfigError: options that exclude each other, or an unusable text.
        """
        if self.stride is not None and self.predictors is None:
            raise ConfigError("--stride is given without --predictors", "add --predictors TEXT, or leave it out")
        profiling = profile_request(
            self.profile, self.profile_trace, self.profile_outputs, self.profile_warmup, self.profile_warmup_weight
        )  # fmt: skip
        options = self._replicas()
        text = calibration_text(model, self.calibration) if self._is_calibrated else None
        for given in self._texts():
            read_texts(given)
        if published_as(model) is not None and (self._texts() or text is not None):
            raise published_refused(f"checkpoint {shown(model)}")
        return list(self._calls(model, options, text, profiling))

    def refuse_for(self, store: Path) -> None:
        """Raise ConfigError if a text cannot be measured on this store."""
        if self._texts() and read_manifest(store).published is not None:
            raise published_refused(f"store {store}")

    @property
    def _is_calibrated(self) -> bool:
        return self.calibrated or self.calibration is not None

    def _texts(self) -> list[Path]:
        """Texts on which experts in full precision are measured."""
        found = [] if self.gates is None else [self.gates]
        if self.predictors is not None and not (self.predictors / HEADER_NAME).is_file():
            found.append(self.predictors)
        return found

    def _replicas(self) -> ReplicaOptions | None:
        """Raises ConfigError: unknown width or group, or options without the one that they belong to."""
        given = {
            "--group-size": self.group_size is not None, "--calibrated (or --calibration)": self._is_calibrated,
            "--calibration-tokens": self.calibration_tokens is not None,
        }  # fmt: skip
        for name, is_given in given.items():
            if is_given and self.bits is None:
                raise ConfigError(f"{name} is given without --bits", "add --bits 1,2,3,4, or leave it out")
        if self.calibration_tokens is not None and not self._is_calibrated:
            what = "--calibration-tokens is given without --calibrated"
            raise ConfigError(what, "add --calibrated, or leave it out")
        if self.bits is None:
            return None
        return ReplicaOptions(
            parse_bits(self.bits), 64 if self.group_size is None else self.group_size,
            CALIBRATION_TOKENS if self.calibration_tokens is None else self.calibration_tokens,
        )  # fmt: skip

    def _calls(
        self, model: Path, options: ReplicaOptions | None, text: Path | None, profiling: ProfileRequest | None
    ) -> Iterator[Callable[[Path], object]]:
        if options is not None:
            yield lambda store: add_replicas(store, model, options, text)
        predictors, gates = self.predictors, self.gates
        stride = _STRIDE if self.stride is None else self.stride
        if predictors is not None or gates is not None:
            from .measures import add_gates, add_predictors  # torch: imported after the options are checked

            if predictors is not None:
                yield lambda store: add_predictors(store, model, predictors, stride)
            if gates is not None:
                yield lambda store: add_gates(store, model, gates)
        if profiling is not None:
            yield lambda store: profiling.run(store, model)


def calibration_text(model: Path, given: Path | None) -> Path:
    """The text for GPTQ. Raises ConfigError: none is given and the model ships none, or it is unreadable."""
    text = given if given is not None else shipped_calibration(model)
    if text is None:
        raise ConfigError(f"{shown(model)} ships no calibration text", "give some with --calibration FILE")
    read_texts(text)  # refused before anything is computed
    return text


@with_options()
def prepare_command(
    checkpoint: Annotated[
        str,
        typer.Argument(
            help=escape("Folder of a safetensors checkpoint, GGUF file, or org/name[@revision][:FILE.gguf]."),
            metavar="MODEL",
        ),
    ],
    *,
    out: Annotated[
        Path | None, typer.Argument(help="Store folder; default: one in the cache.", metavar="[OUT]")
    ] = None,
    cache_dir: Annotated[Path | None, Opt(help="Folder of stores, where OUT is not given.")] = None,
    force: Annotated[bool, Opt("--force", help="Make the store again, even if a current one is there.")] = False,
    additions: Additions,
) -> None:
    """Turn a checkpoint into an expert store, which `tiermoe run` maps. Interrupted, it resumes."""
    if out is not None and cache_dir is not None:
        raise ConfigError("OUT and --cache-dir are both given", "leave one out: OUT names the store folder itself")
    for folder, what in ((out, "OUT"), (cache_dir, "--cache-dir")):
        if folder is not None:
            check_folder(folder, what)
    if out is not None:
        refuse_foreign(out)
    model = locate(checkpoint)
    steps = additions.steps(model)
    if not is_store(model):
        store = prepare(model, default_store_dir(model, cache_dir) if out is None else out, force=force)
    elif steps and out is None and cache_dir is None and not force:
        store = model
    else:
        adding = "--bits, --predictors, --gates, --profile"
        remedy = f"give its checkpoint, or only what is for a store: {adding}"
        raise ConfigError(f"{model} is a store already", remedy)
    additions.refuse_for(store)
    for add in steps:
        add(store)
    print(store, file=stdout(), flush=True)
