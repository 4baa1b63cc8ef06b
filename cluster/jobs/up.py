"""`tiermoe up`: a runtime that stays, in the foreground, until Ctrl-C, SIGTERM or `tiermoe down`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

from ..report.plan import plan_table
from ..report.topology import placed_tables
from .keep import Check, keep_runtime
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

if TYPE_CHECKING:
    from ..deploy import Deployment


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
