"""What a deployment is started with, as its replica groups and their actors need it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..actors.settings import EngineSettings
from .config import RunConfig
from .topology.spec import ModelFacts


def say(line: str) -> None:
    """A line for people, on standard error. The caller continues if the line cannot be written: the disk of the file
    is full, or the reader has ended.
    """
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class StandIns:
    """Classes and sizes in place of the real ones, where no model is wanted.

    Attributes:
        worker, store: with the interfaces of `GpuWorker` and `StoreWorker`; None: those.
        facts: sizes of the model; None: those of the store.
    """

    worker: type | None = None
    store: type | None = None
    facts: ModelFacts | None = None


@dataclass(frozen=True)
class Launch:
    """What to start, and whom to tell.

    Attributes:
        config: which Ray, what to place where, which deadlines.
        settings: what the workers need.
        store_path: folder of the prepared expert store, visible to this process and to every node that maps it.
        scratch: temporary folder of the deployment on this machine; None: none.
        notify: called with a line about what the start waits for, and about what happens to actors and nodes.
        step: called with each step of the start.
    """

    config: RunConfig
    settings: EngineSettings
    store_path: str
    stand_ins: StandIns = StandIns()
    scratch: Path | None = None
    notify: Callable[[str], None] = say
    step: Callable[[str], None] = lambda step: None

    @property
    def local(self) -> bool:
        """Whether Ray is started for the deployment, on this machine."""
        return self.config.ray.address is None
