"""A routing trace of held-out prompts in memory, and the store that a benchmark may add files to."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from ....actors.requests import SamplingParams
from ....actors.settings import LinkSettings
from ...config import RunConfig, engine_settings
from ...simulate.trace import Request, Trace, TraceHeader
from ..record.job import record
from .prompt_split import Split
from .serving import prepared_store


@dataclass(frozen=True, eq=False)
class Recorded:
    """A trace in memory: what is learnt from and what is measured."""

    header: TraceHeader
    learn: Sequence[Request]
    measure: Sequence[Request]


def record_split(
    base: RunConfig, split: Split, tokens: int, distances: int, out: Path, progress: Progress | None
) -> Path:
    """A trace of all prompts, those to learn from first, with `tokens` generated after each.

    Raises:
        ConfigError, RuntimeFailure: as `record`.
    """
    config = base.model_copy(update={"policy": "on-demand", "budget": "1.0", "link": LinkSettings()})
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    record(config, (*split.learn, *split.measure), out, sampling, distances, progress)
    return out


def read_split(trace: Path, learned: int) -> Recorded:
    """A trace of which the first `learned` requests are those to learn from. Raises TraceError where it is corrupt."""
    opened = Trace(trace)
    found = list(opened.requests())
    return Recorded(opened.header, found[:learned], found[learned:])


def own_store(base: RunConfig, folder: Path) -> Path:
    """The prepared store as a folder of its own, which files may be added to; it takes hardly any space."""
    source, store = prepared_store(base, engine_settings(base)), folder / "store"
    shutil.copytree(source, store, copy_function=_link_or_copy)
    return store


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)
