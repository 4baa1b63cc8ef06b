"""The Ray that is started for one runtime on this machine: it has what the runtime's actors take."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...actors.policy_settings import PolicySettings
from ...actors.settings import EngineSettings
from .planner import STORE_CPUS

if TYPE_CHECKING:
    from ..config import RunConfig


@dataclass(frozen=True)
class LocalRay:
    """What a local Ray is told to have, whatever the machine has.

    Attributes:
        resources: custom ones, such as {"ndp": 2}.
    """

    cpus: int
    resources: Mapping[str, float]


def local_ray(config: RunConfig, settings: EngineSettings) -> LocalRay:
    """Room for all actors of a configuration, or what it says in `ray.num_cpus`."""
    ndp = ndp_workers(config, settings.policy)
    resources = {"ndp": float(ndp)} if ndp else {}
    if config.cluster.store.nodes == "marked":
        resources["store"] = 1.0
    return LocalRay(config.ray.num_cpus or cpus_of_actors(config, settings.policy), resources)


def cpus_of_actors(config: RunConfig, policy: PolicySettings) -> int:
    """CPUs that lead, shards, one store and the NDP workers take."""
    workers = config.worker_threads * config.cluster.shards
    return workers + int(STORE_CPUS) + config.ndp_threads * ndp_workers(config, policy)


def ndp_workers(config: RunConfig, policy: PolicySettings) -> int:
    """NDP workers on one machine."""
    if not policy.uses_ndp:
        return 0
    wanted = config.cluster.ndp_workers
    return 1 if wanted == "per-node" else wanted


def local_notes(config: RunConfig, settings: EngineSettings) -> tuple[str, ...]:
    """What a user of this machine would not expect."""
    cpus, cores = local_ray(config, settings).cpus, usable_cores()
    if cpus <= cores:
        return ()
    return (f"the actors take {cpus} CPUs, this machine has {cores}: they share them, so times are not those of a GPU "
            "each",)  # fmt: skip


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
