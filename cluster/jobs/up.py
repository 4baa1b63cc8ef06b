"""`tiermoe up`: a runtime that stays, in the foreground, until Ctrl-C, SIGTERM or `tiermoe down`."""

from __future__ import annotations

import time
from contextlib import ExitStack

from rich.console import Console

from ..ray_auth import adopt_mode
from ..registry import Registry
from ..report.plan import plan_table
from .runtime_options import (
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

_WATCH_S = 2.0


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
    if chosen.ray.address is not None:
        adopt_mode(chosen.ray.address)
    from ..deploy import Deployment  # Ray: half a second that a refused command need not pay

    with ExitStack() as stack:
        with notices.status("starting Ray and loading the model ..."):
            deployment = stack.enter_context(Deployment(chosen, settings, str(folder)))
        stack.enter_context(Registry().entered(deployment.id, deployment.address, chosen.ray.address is None))
        out.print(plan_table(deployment.plan))
        where = f"--address {deployment.address}"
        out.print(f"deployment {deployment.id} is ready at {deployment.address} ({deployment.startup_s:.1f} s)")
        out.print(f"use it:    tiermoe run PROMPT --attach {deployment.address}", soft_wrap=True)
        out.print(f"watch it:  tiermoe status {where}", soft_wrap=True)
        out.print("end it:    Ctrl-C here, or tiermoe down", soft_wrap=True)
        out.file.flush()
        while deployment.watch():
            time.sleep(_WATCH_S)
    out.print(f"deployment {deployment.id} was ended by `tiermoe down`")
