"""A runtime that this process keeps until Ctrl-C, SIGTERM or `tiermoe down`: what `up` and `serve` do alike.

`tiermoe up`: a runtime that stays, in the foreground, until Ctrl-C, SIGTERM or `tiermoe down`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ...actors.settings import EngineSettings
from ..config import RunConfig
from ..ray_auth import adopt_mode
from ..registry import Entry, Registry
from ..report.runtime import placed_tables, plan_table
from .options import (
    Budget,
    Config,
    Device,
    Dtype,
    LinkGbps,
    LinkLatency,
    Model,
    NdpHardware,
    NdpPace,
    NdpThreads,
    NdpWorkers,
    Policy,
    Shards,
    Store,
    Threads,
    checked_config,
    checked_settings,
    prepared_for,
    runtime_options,
)

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


def up_command(
    model: Model = None,
    config: Config = None,
    policy: Policy = None,
    budget: Budget = None,
    device: Device = None,
    dtype: Dtype = None,
    threads: Threads = None,
    link_gbps: LinkGbps = None,
    link_latency_us: LinkLatency = None,
    ndp_threads: NdpThreads = None,
    ndp_hardware: NdpHardware = None,
    ndp_pace: NdpPace = None,
    shards: Shards = None,
    ndp_workers: NdpWorkers = None,
    store: Store = None,
) -> None:
    """Start a runtime and keep it until Ctrl-C or `tiermoe down`."""
    options = runtime_options(
        model=model, policy=policy, budget=budget, device=device, dtype=dtype, threads=threads, store=store,
        link_gbps=link_gbps, link_latency_us=link_latency_us, ndp_threads=ndp_threads, ndp_hardware=ndp_hardware,
        ndp_pace=ndp_pace, shards=shards, ndp_workers=ndp_workers,
    )  # fmt: skip
    chosen = checked_config(config, options)
    settings = checked_settings(chosen)
    out, notices = Console(), Console(stderr=True)
    folder = prepared_for(chosen, settings, progress=notices.is_terminal)

    @contextmanager
    def announced(deployment: Deployment) -> Iterator[Check]:
        _announce(deployment, out)
        yield lambda: None

    ended = keep_runtime(chosen, settings, folder, notices, announced)
    out.print(f"deployment {ended} was ended by `tiermoe down`")


def _announce(deployment: Deployment, out: Console) -> None:
    """The plan, and what can be done with the runtime."""
    out.print(plan_table(deployment.plan), *placed_tables(deployment.planned.as_dict()))
    address = deployment.address
    out.print(f"deployment {deployment.id} is ready at {address} ({deployment.startup_s:.1f} s)")
    out.print(f"use it:    tiermoe run PROMPT --attach {address}", soft_wrap=True)
    out.print(f"watch it:  tiermoe status --address {address}", soft_wrap=True)
    out.print("end it:    Ctrl-C here, or tiermoe down", soft_wrap=True)
    out.file.flush()
