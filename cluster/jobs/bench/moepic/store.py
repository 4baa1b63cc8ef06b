"""What policies go by, in the prepared store: trained gates, the layers' sensitivity, a profile of the experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from .....actors.policy_settings import PolicySettings
from .....actors.store.artifacts import GATES_NAME, PROFILE_NAME, SENSITIVITY_NAME
from ....config import RunConfig, engine_settings
from ...prepare.measures import add_gates, add_sensitivity
from ...profile.job import profile_text
from ..serving import prepared_store

CALIBRATION = "calibration"  # folder of a checkpoint with text that is neither trained nor measured on
_Add = Callable[[Path, Path, Path, Console], Path]


def ensure_predictors(base: RunConfig, presets: Iterable[PolicySettings], progress: Progress | None) -> None:
    """Add to the prepared store what these presets need; what it has already is not made again.

    Raises:
        ConfigError: something is needed, and the checkpoint ships no calibration text.
    """
    store, wanted = prepared_store(base, engine_settings(base)), list(presets)
    needed: list[tuple[str, _Add, bool]] = [
        (GATES_NAME, add_gates, any("gates" in preset.needs for preset in wanted)),
        (SENSITIVITY_NAME, add_sensitivity, any("sensitivity" in preset.needs for preset in wanted)),
        (PROFILE_NAME, _add_profile, any("profile" in preset.needs for preset in wanted)),
    ]
    missing = [add for name, add, is_needed in needed if is_needed and not (store / name).exists()]
    task = None
    if progress is not None and missing:
        task = progress.add_task("what the policies go by", total=len(missing))
    for add in missing:
        add(store, base.model_dir, base.model_dir / CALIBRATION, Console(quiet=True))
        if progress is not None and task is not None:
            progress.advance(task)


def _add_profile(store: Path, model_dir: Path, text: Path, console: Console) -> Path:
    profile_text(store, model_dir, text, progress=not console.quiet)
    return store / PROFILE_NAME
