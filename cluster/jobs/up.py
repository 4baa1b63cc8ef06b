"""`tiermoe up`: a runtime that stays, in the foreground, until Ctrl-C, SIGTERM or `tiermoe down`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ..config import RunConfig
from ..registry import Entry, Registry
from ..report.output import stdout
from ..report.runtime import placed_tables, plan_table
from ..report.steps import LastStart, Steps
from ..report.tables import results, show
from .ending import BoundedEnd
from .options import RUNTIME, Config, checked_config, checked_settings, deployed, with_options
from .watched import FileWatch, expiry_checks, ray_room_checks

if TYPE_CHECKING:
    from ..deploy import Deployment

_WATCH_S = 1.0
Check = Callable[[], None]  # raises where what stands beside the runtime has failed


@with_options(*RUNTIME, "cluster.replicas")
def up_command(options: dict[str, Any], config: Config = None) -> None:
    """Start a runtime that runs until Ctrl-C or `tiermoe down`."""

    @contextmanager
    def announced(deployment: Deployment, steps: Steps) -> Iterator[Check]:
        out, address = results(), deployment.address
        out.print(f"deployment {deployment.id} is ready at {address} ({deployment.startup_s:.1f} s)")
        out.print(f"use it:    tiermoe run PROMPT --attach {address}", soft_wrap=True)
        out.print(f"watch it:  tiermoe status --address {address}", soft_wrap=True)
        out.print("end it:    Ctrl-C here, or tiermoe down", soft_wrap=True)
        out.file.flush()
        yield lambda: None

    serve_until_ended("up", checked_config(config, options), announced)


def serve_until_ended(
    command: str,
    config: RunConfig,
    beside: Callable[[Deployment, Steps], AbstractContextManager[Check]],
    begins: Callable[[Steps], None] = lambda steps: None,
    checks: Callable[[RunConfig], None] = lambda config: None,
) -> None:
    """Start a runtime, enter what belongs beside it, and watch both until the runtime is ended in order.

    `status` and `down` find the runtime as soon as it has a Ray.

    Args:
        command: whose start it is.
        beside: entered once the runtime is ready, left before it ends; the steps are for what it starts.
        begins: called before anything is started, with the steps of the start.
        checks: called before `begins`, with the model as a folder; refuses what belongs beside the runtime.

    SIGTERM ends it in order, with exit code 0. Ray's own end, or a hang of it, ends the process with exit code 1.

    Raises:
        TierMoeError: an input was refused, the runtime did not start, or its lead or what is beside it has failed.
    """
    config, settings = checked_settings(config)
    settings = settings.model_copy(update={"keep_hot_set": config.keep_hot_set})
    checks(config)
    notices, local = Console(stderr=True), config.ray.address is None
    entries: list[Entry] = []
    deployment: Deployment | None = None

    def ended() -> str:
        # `down` withdraws the entry before it sends SIGTERM
        if entries and not Registry().lists(entries[0].deployment):
            return f"deployment {entries[0].deployment} was ended by `tiermoe down`"
        return "ended by SIGTERM"

    def force() -> bool:
        how = ended()
        for entry in entries:
            Registry().withdraw(entry.deployment)
        abandoned = deployment is not None and deployment.abandon()
        if abandoned and ending.terminated:
            print(how, file=stdout(), flush=True)
        return abandoned

    with ExitStack() as listed, BoundedEnd(force) as ending:

        def enter(it: Deployment) -> None:
            entries.append(listed.enter_context(Registry().entered(it.id, it.address, local)))

        last = LastStart(command, config)
        steps = Steps(notices, last.seconds)
        begins(steps)
        deployment = deployed(config, settings, notices, steps, enter, ending.lost)
        from ..deployed_actors import DeploymentEnded
        from ..launch import say  # Ray
        from ..ray_internals import session_folder

        try:
            with ExitStack() as stack:
                with steps:
                    stack.enter_context(deployment)
                show(results(), plan_table(deployment.plan), *placed_tables(deployment.planned.as_dict()))
                look = stack.enter_context(beside(deployment, steps))
                rooms = ray_room_checks(session_folder(), local)
                files = FileWatch(expiry_checks(config.cluster.tls) | rooms, say)
                last.remember(steps.seconds)
                ending.serving()
                while deployment.watch():
                    look()
                    files.look()
                    time.sleep(_WATCH_S)
        except DeploymentEnded:
            pass
        except SystemExit:  # of SIGTERM
            results().print(ended())
            return
    results().print(f"deployment {deployment.id} was ended by `tiermoe down`")
