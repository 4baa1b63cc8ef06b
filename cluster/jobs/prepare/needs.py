"""The store of a run, with all that its policy needs: made before a start, or refused with the command that makes it.

    prepared_store    the store, its replicas and the artifacts of the policy
    check_artifacts   before anything starts: what is missing can be made by a start, else the error with the command
    make_missing      with the store: gates, predictors, profile, each as `tiermoe prepare` does

A start makes them for the project's own model and for a small one, of which it takes about a minute. One of several
starts makes it, under its own lock; a file appears whole, under the store's.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Collection
from pathlib import Path

from rich.console import Console

from ....actors.policy_settings import PolicySettings
from ....actors.settings import EngineSettings
from ....actors.store.artifacts import READERS, predictors_of
from ....actors.store.files import published_refused
from ....actors.store.format import read_manifest
from ....errors import CheckpointError, StoreError, TierMoeError
from ....proto.private import user_cache
from ...checkpoints.checkpoint import open_checkpoint
from ...checkpoints.quantization import published_as
from ...config import RunConfig, default_model_dir
from ...host import shown
from .calibration import shipped_calibration
from .make_store import ensure_prepared, is_current, is_store, store_dir
from .replicas import ensure_replicas

_NEEDS = {
    "gates": "trained gates", "predictors": "predictors of later layers", "profile": "a profile of the experts",
}  # fmt: skip
_RECORDED = ("--limit", "200", "--prompt-tokens", "64", "--max-tokens", "64", "--allow-loops")
_OF_FULL_PRECISION = frozenset({"gates"})
_LOCK = ".artifacts.lock"  # beside a store
_SMALL_BYTES = 256 << 20  # of a store
_GATE_TOKENS = 20_000


def prepared_store(
    config: RunConfig,
    settings: EngineSettings,
    *,
    progress: bool = False,
    check: Callable[[EngineSettings, Path], None] = lambda settings, store: None,
) -> Path:
    """The expert store of the configured model, with replicas and artifacts of the policy; what is missing is made.

    Args:
        check: called with the store before minutes are spent on replicas.

    Raises:
        TierMoeError: the checkpoint or the store was refused, or as `check`.
    """
    out_dir = Path(config.store).expanduser() if config.store is not None else None
    cache_dir = Path(config.cache_dir).expanduser() if config.cache_dir is not None else None
    store = ensure_prepared(config.model_dir, out_dir, cache_dir=cache_dir, progress=progress)
    check(settings, store)
    widths, known = settings.policy.replica_widths, settings.policy.needs_popularity
    if widths or known:
        ensure_replicas(store, config.model_dir, widths, config.ndp.group_size, calibrated=known, progress=progress)
    make_missing(store, settings.policy, config, progress=progress)
    return store


def check_artifacts(policy: PolicySettings, config: RunConfig) -> None:
    """Refuse a policy whose artifacts are missing, damaged or of another model, if no start can make them.

    Args:
        config: with the model as a folder.

    Raises:
        TierMoeError: StoreError or TraceError; the remedy is the command, with the paths of this machine.
    """
    if (missing := lacking(policy, config)) is not None and not start_makes(config):
        raise missing


def lacking(policy: PolicySettings, config: RunConfig) -> TierMoeError | None:
    """What is missing, as an error with the command that makes it; None: nothing."""
    if not policy.needs:
        return None
    store, what = current_store(config), _what(policy)
    if store is None:
        missing: TierMoeError = StoreError(f"{what}, and '{shown(config.model_dir)}' has no store yet", "")
    else:
        found = _missing(policy, store)
        if not found:
            return None
        error = next(iter(found.values()))
        missing = type(error)(f"{what}: {error.what}", "")
    if published_as(config.model_dir) is not None and (impossible := policy.needs & _OF_FULL_PRECISION):
        whole = " and ".join(_NEEDS[need] for need in sorted(impossible))
        remedy = f"{whole}: of experts in full precision only; {published_refused('').remedy}"
        return type(missing)(missing.what, remedy)
    return type(missing)(missing.what, f"run `{command(policy, config)}`")


def note(policy: PolicySettings, config: RunConfig) -> str | None:
    """What `tiermoe plan` says about missing artifacts; None: none are missing."""
    missing = lacking(policy, config)
    if missing is None:
        return None
    return f"{_what(policy)}: the start makes it, once" if start_makes(config) else str(missing)


def make_missing(store: Path, policy: PolicySettings, config: RunConfig, *, progress: bool = True) -> None:
    """Make what a store lacks for a policy, as `tiermoe prepare` does, and report the time in a line.

    Args:
        config: with the model as a folder, whose text is used, else the project's.

    Raises:
        TierMoeError: as `check_artifacts`; or the text or the model is refused, or the disk is full.
    """
    if not policy.needs or not _missing(policy, store):
        return
    check_artifacts(policy, config)
    add_missing(store, policy, config.model_dir, _text(config.model_dir), policy.needs, progress=progress)


def add_missing(
    store: Path, policy: PolicySettings, model_dir: Path, text: Path, needs: Collection[str], *, progress: bool = True
) -> None:
    """Make those of some artifacts of a policy that a store lacks, however long it takes; one caller at a time.

    Raises:
        TierMoeError: the text or the model is refused, or the disk is full.
    """
    from .writer import locked

    console = Console(stderr=True, quiet=not progress)
    if not needs & _missing(policy, store).keys():
        return
    with locked(store, console, _LOCK):
        for need in _missing(policy, store):  # again: the last holder of the lock may have made them
            if need not in needs:
                continue
            begin_s = time.monotonic()
            what = _NEEDS[need]
            with console.status(f"making {what} of {shown(model_dir).name} for {policy.name}, once"):
                _make(need, store, policy, model_dir, text)
            console.print(
                f"made {what} for {policy.name} in {time.monotonic() - begin_s:.0f} s from {text}: kept in {store}",
                markup=False, highlight=False, soft_wrap=True,
            )  # fmt: skip


def _make(need: str, store: Path, policy: PolicySettings, model_dir: Path, text: Path) -> None:
    """One artifact, without output. Torch takes seconds to import: only here."""
    from ..profile.collect_profile import profile_text
    from .measures import add_gates, add_predictors

    quiet = Console(quiet=True)
    if need == "gates":
        add_gates(store, model_dir, text, quiet, _GATE_TOKENS)
    elif need == "profile":
        profile_text(store, model_dir, text, progress=False)
    else:
        add_predictors(store, model_dir, text, policy.prefetch.distance, quiet)


def start_makes(config: RunConfig) -> bool:
    """Whether a start makes what a policy needs, and not the user: for the project's own model, and for a small one.

    Not for experts in a published form, nor without a text.
    """
    from ...topology.inputs import facts_of_checkpoint, facts_of_store

    model, own = config.model_dir, default_model_dir()
    if published_as(model) is not None or not _text(model).is_dir():
        return False
    if own.is_dir() and model.is_dir() and model.samefile(own):
        return True
    try:
        facts = facts_of_store(model, model) if is_store(model) else facts_of_checkpoint(model)
    except TierMoeError:  # said by who needs the sizes
        return False
    return facts.form is None and facts.store_bytes <= _SMALL_BYTES


def command(policy: PolicySettings, config: RunConfig) -> str:
    """The command line that adds to the store what the policy needs; it can be run as printed.

    A text needs experts in full precision. Of published ones the routing is recorded first.
    """
    model, named = config.model_dir.absolute(), list[str]()
    if config.store is not None:
        named = [str(Path(config.store).expanduser().absolute())]
    elif config.cache_dir is not None:
        named = ["--cache-dir", str(Path(config.cache_dir).expanduser().absolute())]
    text = source = _text(model)
    first, added, published = list[str](), list[str](), published_as(model) is not None
    if published:
        source, files = user_cache() / "traces" / model.name, sorted([*text.glob("*.jsonl"), *text.glob("*.txt")])
        prompts = max(files, key=lambda file: file.stem == "prose")  # code repeats itself
        first = ["tiermoe", "record", str(prompts), str(source), "--model", str(shown(model)), *_RECORDED]
    for need in sorted(policy.needs):
        added += ["--profile-trace" if published and need == "profile" else f"--{need}", str(source)]
        if need == "predictors":
            added += ["--stride", str(policy.prefetch.distance)]
    made = shlex.join(["tiermoe", "prepare", str(shown(model)), *named, *added])
    return f"{shlex.join(first)} && {made}" if first else made


def _what(policy: PolicySettings) -> str:
    return f"policy '{policy.name}' needs {' and '.join(_NEEDS[need] for need in sorted(policy.needs))}"


def _text(model_dir: Path) -> Path:
    """The calibration text that ships with the model, else the project's."""
    return shipped_calibration(model_dir) or default_model_dir() / "calibration"


def _missing(policy: PolicySettings, store: Path) -> dict[str, TierMoeError]:
    """By need of the policy, why the store's file is unusable; empty: nothing is missing."""
    found: dict[str, TierMoeError] = {}
    for need in sorted(policy.needs):
        try:
            manifest = read_manifest(store)
            if need in READERS:
                READERS[need](store, manifest)
            else:
                predictors_of(store, manifest, policy.prefetch.distance)
        except TierMoeError as error:
            found[need] = error
    return found


def current_store(config: RunConfig) -> Path | None:
    """The store of the configured model, if it exists and is current."""
    model = config.model_dir
    if is_store(model):
        return model
    try:
        checkpoint = open_checkpoint(model)
    except CheckpointError:  # weights of a hub's that are not here yet; what else is wrong is said later
        return None
    cache_dir = None if config.cache_dir is None else Path(config.cache_dir).expanduser()
    store = store_dir(checkpoint, cache_dir) if config.store is None else Path(config.store).expanduser()
    return store if is_current(store, checkpoint.source) else None
