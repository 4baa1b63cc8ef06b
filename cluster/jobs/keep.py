"""A runtime that this process keeps until Ctrl-C, SIGTERM or `tiermoe down`: what `up` and `serve` do alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ...actors.settings import EngineSettings
from ..config import RunConfig
from ..ray_auth import adopt_mode
from ..registry import Entry, Registry

if TYPE_CHECKING:
    from ..deploy import Deployment

_WATCH_S = 2.0
Check = Callable[[], None]  # raises where what stands beside the runtime has failed


def keep_runtime(
    chosen: RunConfig,
    settings: EngineSettings,
    folder: Path,
    notices: Console,
    beside: Callable[[Deployment], AbstractContextManager[Check]],
) -> str:
    """Start a runtime, enter what belongs beside it, and watch both until somebody ends the runtime in order.

    `status` and `down` find the runtime as soon as it has a Ray.

    Args:
        folder: its expert store.
        beside: entered once the runtime is ready, left before it ends.

    Returns:
        The id of the deployment that `down` has ended.

    Raises:
        TierMoeError: it did not start, or its lead or what is beside it has failed. SystemExit: SIGTERM.
    """
    if chosen.ray.address is not None:
        adopt_mode(chosen.ray.address)
    from ..deploy import Deployment  # Ray: half a second that a refused command need not pay
    from ..placement import DeploymentEnded

    local = chosen.ray.address is None
    entries: list[Entry] = []
    with ExitStack() as listed:
        deployment = Deployment(
            chosen, settings, str(folder), tell=partial(notices.print, markup=False, soft_wrap=True),
            on_ray=lambda it: entries.append(listed.enter_context(Registry().entered(it.id, it.address, local))),
        )  # fmt: skip
        try:
            with ExitStack() as stack:
                with notices.status("starting Ray and loading the model ..."):
                    stack.enter_context(deployment)
                check = stack.enter_context(beside(deployment))
                while deployment.watch():
                    check()
                    time.sleep(_WATCH_S)
        except DeploymentEnded:
            pass
        except SystemExit:  # of SIGTERM: `down` withdraws the entry before it sends one
            if not entries or Registry().lists(deployment.id):
                raise
    return deployment.id
