"""`tiermoe plan`: what would run where, with how many bytes and how fast, without starting anything.

configuration + sizes of the model + nodes -> topology -> prediction -> tables or JSON
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ...actors.settings import EngineSettings
from ...errors import CheckpointError, ConfigError
from ..config import RunConfig, default_model_dir, engine_settings, load_run_config
from ..report.topology import topology_tables
from ..topology.estimate import Prediction, predict, resolve_hardware
from ..topology.facts import facts_of_checkpoint, facts_of_store
from ..topology.nodes import nodes_from_file, nodes_of_cluster, this_machine, usable_cores
from ..topology.plan import Topology
from ..topology.planner import STORE_CPUS, plan_topology
from ..topology.spec import ClusterSpec, ModelFacts, NodeInfo, cluster_spec


@dataclass(frozen=True)
class PlanResult:
    """A plan with all that it came from.

    Attributes:
        nodes_from: where the nodes come from, for people.
        notes: the topology's and our own.
    """

    facts: ModelFacts
    spec: ClusterSpec
    topology: Topology
    prediction: Prediction
    nodes_from: str
    notes: tuple[str, ...]


def make_plan(config: RunConfig, nodes: Sequence[NodeInfo], nodes_from: str) -> PlanResult:
    """Everything that `tiermoe plan` prints.

    Raises:
        TierMoeError: what is malformed, or which resource is short where.
    """
    settings = engine_settings(config)
    facts = model_facts(config)
    spec = cluster_spec(config, settings, facts, nodes)
    topology = plan_topology(spec, facts, nodes)
    hardware = resolve_hardware(config.hardware, spec.gpu, config.link.gbps, config.link.latency_us)
    notes = list(topology.notes)
    if facts.dense_estimated:
        notes.append("dense bytes are computed from config.json: the weights are not here")
    return PlanResult(
        facts, spec, topology, predict(topology, spec, facts, hardware), nodes_from, tuple(notes)
    )


def model_facts(config: RunConfig) -> ModelFacts:
    """Sizes of the configured model: from the configured store where there is one, else from the checkpoint.

    Raises:
        CheckpointError: there is no such model. StoreError: the store is damaged.
    """
    model_dir = config.model_dir
    if not (model_dir / "config.json").is_file():
        remedy = (
            "make it with `tiermoe jobs train-default-model`, or pass --model DIRECTORY"
            if model_dir == default_model_dir()
            else "pass --model a checkpoint's directory; its config.json is enough to plan"
        )
        raise CheckpointError(f"no config.json in '{model_dir}'", remedy)
    store = Path(config.store).expanduser() if config.store is not None else None
    if store is not None and store.is_dir():
        return facts_of_store(store, model_dir)
    return facts_of_checkpoint(model_dir)


def local_nodes(config: RunConfig, settings: EngineSettings) -> list[NodeInfo]:
    """This machine as a local Ray would have it: with as many CPUs as the actors need, unless the file says."""
    policy, cluster = settings.policy, config.cluster
    ndp = settings.ndp.threads if policy.uses_ndp else 0
    needed = settings.threads * cluster.shards + int(STORE_CPUS) + ndp
    return this_machine(config.ray.num_cpus or needed, policy.uses_ndp)


def as_record(result: PlanResult) -> dict[str, Any]:
    """The plan as one JSON object."""
    facts = result.facts
    return {
        "model": asdict(facts) | {"expert_bytes": facts.expert_bytes},
        "spec": asdict(result.spec),
        "nodes_from": result.nodes_from,
        "topology": result.topology.as_dict(),
        "prediction": result.prediction.as_dict(),
        "notes": list(result.notes),
    }


def _nodes(config: RunConfig, file: Path | None, live: bool) -> tuple[list[NodeInfo], str]:
    """The nodes and where they come from.

    Raises:
        ConfigError: the two sources exclude each other, or there is no address to ask.
        RuntimeFailure: the cluster did not answer.
    """
    if file is not None and live:
        raise ConfigError("--nodes and --live both name the nodes", "leave one of them out")
    if file is not None:
        return nodes_from_file(file), f"file {file}"
    address = config.ray.address
    if live:
        if address is None:
            raise ConfigError("--live asks a running Ray, but ray.address names none", "set ray.address to HOST:PORT")
        return nodes_of_cluster(address), f"the Ray at {address}"
    if address is not None:
        raise ConfigError(
            f"the configuration joins the Ray at {address}, whose nodes are not known here",
            "pass --live to ask it, or --nodes FILE",
        )
    return local_nodes(config, engine_settings(config)), f"this machine, {usable_cores()} usable cores"


def plan_command(
    config: Annotated[str | None, typer.Option(help="YAML file, or a name in configs/clusters.")] = None,
    model: Annotated[str | None, typer.Option(help="Checkpoint folder; its config.json is enough.")] = None,
    policy: Annotated[str | None, typer.Option(help="Name in configs/policies, or a YAML file. (next-gate)")] = None,
    budget: Annotated[str | None, typer.Option(help="Memory of each GPU for experts: 0.25, 25%, 8GB. (0.25)")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda. (auto)")] = None,
    store: Annotated[str | None, typer.Option(help="Folder of an expert store, for exact sizes.")] = None,
    nodes: Annotated[Path | None, typer.Option(help="YAML file of nodes, as ray.nodes() names them.")] = None,
    live: Annotated[bool, typer.Option("--live", help="Ask the Ray at ray.address for its nodes.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what would run where, with how many bytes and how fast, and start nothing."""
    options = {"model": model, "policy": policy, "budget": budget, "device": device, "store": store}
    settings = load_run_config(config, options)
    there, nodes_from = _nodes(settings, nodes, live)
    record = as_record(make_plan(settings, there, nodes_from))
    if as_json:
        print(json.dumps(record))
        return
    console = Console()
    for table in topology_tables(record):
        console.print(table)
