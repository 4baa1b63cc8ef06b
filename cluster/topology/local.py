"""The Ray that is started for one runtime on this machine: it has what the runtime's actors take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...actors.settings import EngineSettings
from ..config import RunConfig
from ..cores import usable_cores


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
    ndp = config.ndp_workers(settings.policy)
    resources = {"ndp": float(ndp)} if ndp else {}
    if config.cluster.store.nodes == "marked":
        resources["store"] = 1.0
    return LocalRay(config.ray.num_cpus or config.cpus_of_actors(settings.policy), resources)


def local_notes(config: RunConfig, settings: EngineSettings) -> tuple[str, ...]:
    """What a user of this machine would not expect."""
    cpus, cores = local_ray(config, settings).cpus, usable_cores()
    if cpus <= cores:
        return ()
    return (f"the actors take {cpus} CPUs, {cores} can be used here: they share them, so times are not those of a GPU "
            "each",)  # fmt: skip
