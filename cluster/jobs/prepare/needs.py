"""What a policy needs of a store beyond the weights, and the command that makes it."""

from __future__ import annotations

import shlex
from pathlib import Path

from ....actors.policy_settings import PolicySettings
from ....actors.store.artifacts import predictors_of, read_policy_artifacts
from ....actors.store.format import read_manifest
from ....errors import CheckpointError, StoreError, TierMoeError
from ....proto.private import user_cache
from ...config import RunConfig, default_model_dir
from ...host import shown
from .calibration import shipped_calibration
from .checkpoint import open_checkpoint
from .job import is_current, is_store, store_dir

_NEEDS = {
    "gates": "trained gates", "predictors": "predictors of later layers", "profile": "a profile of the experts",
    "sensitivity": "the layers' sensitivity",
}  # fmt: skip
_RECORDED = ("--limit", "200", "--prompt-tokens", "64", "--max-tokens", "64", "--allow-loops")


def check_artifacts(policy: PolicySettings, config: RunConfig) -> None:
    """Refuse a policy whose artifacts are missing, damaged or of another model, before anything is made or started.

    Args:
        config: with the model as a folder.

    Raises:
        TierMoeError: StoreError or TraceError; the remedy is the command, with the paths of this machine.
    """
    if (missing := lacking(policy, config)) is not None:
        raise missing


def lacking(policy: PolicySettings, config: RunConfig) -> TierMoeError | None:
    """What `check_artifacts` raises; None: nothing is missing."""
    if not policy.needs:
        return None
    store, remedy = _store(config), f"run `{command(policy, config)}`"
    what = f"policy '{policy.name}' needs {' and '.join(_NEEDS[need] for need in sorted(policy.needs))}"
    if store is None:
        return StoreError(f"{what}, and '{shown(config.model_dir)}' has no store yet", remedy)
    try:
        manifest = read_manifest(store)
        read_policy_artifacts(policy, store, manifest)
        if "predictors" in policy.needs:
            predictors_of(store, manifest, policy.prefetch.distance)
    except TierMoeError as error:
        return type(error)(f"{what}: {error.what}", remedy)
    return None


def command(policy: PolicySettings, config: RunConfig) -> str:
    """The command line that adds to the store what the policy needs; it works as it stands."""
    model, named = config.model_dir.absolute(), list[str]()
    if config.store is not None:
        named = [str(Path(config.store).expanduser().absolute())]
    elif config.cache_dir is not None:
        named = ["--cache-dir", str(Path(config.cache_dir).expanduser().absolute())]
    text = shipped_calibration(model) or default_model_dir() / "calibration"
    first, added = list[str](), list[str]()
    for need in sorted(policy.needs):
        if need != "predictors":
            added += [f"--{need}", str(text)]
            continue
        trace, files = user_cache() / "traces" / model.name, sorted(text.glob("*.jsonl"))
        prompts = max(files, key=lambda file: file.stem == "prose")  # code repeats itself
        first = ["tiermoe", "record", str(prompts), str(trace), "--model", str(shown(model)), *_RECORDED]
        added += ["--predictors", str(trace), "--stride", str(policy.prefetch.distance)]
    made = shlex.join(["tiermoe", "prepare", str(shown(model)), *named, *added])
    return f"{shlex.join(first)} && {made}" if first else made


def _store(config: RunConfig) -> Path | None:
    """The store of the configured model, where it is there and current."""
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
