"""`tiermoe plan`: what would run where, with how many bytes, without starting anything.

configuration + sizes of the model + nodes -> topology and times of copies -> tables or JSON
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ...actors.combinations import Refusal, refuse_first
from ...errors import CheckpointError, ConfigError
from ...limits import cores, cores_words, memory, memory_words
from ..checkpoints.checkpoint import refuse_unsupported
from ..checkpoints.hub import located
from ..config import (
    DEFAULT_BUDGET,
    RunConfig,
    check_model_is_there,
    engine_settings,
    load_run_config,
    on_this_machine,
)
from ..host import shown
from ..report.output import print_json
from ..report.runtime import topology_tables
from ..report.tables import results, show
from ..topology.decided import decided
from ..topology.estimate import PlanResult, make_plans
from ..topology.inputs import (
    facts_of_checkpoint,
    facts_of_store,
    local_notes,
    local_ray,
    nodes_from_file,
    nodes_of_cluster,
    this_machine,
)
from ..topology.spec import ModelFacts, NodeInfo
from .options import AsJson, Config, with_options
from .prepare.needs import note


def model_facts(config: RunConfig) -> ModelFacts:
    """Sizes of the configured model: from the configured store if there is one, else from the checkpoint.

    Raises:
        CheckpointError: there is no such model. StoreError: the store is damaged.
    """
    model_dir = config.model_dir
    check_model_is_there(model_dir)
    if not (model_dir / "config.json").is_file():
        remedy = "pass --model a checkpoint's directory; its config.json is enough to plan"
        raise CheckpointError(f"no config.json in '{shown(model_dir)}'", remedy)
    refuse_unsupported(model_dir)
    store = Path(config.store).expanduser() if config.store is not None else None
    if store is not None and store.is_dir():
        return facts_of_store(store, model_dir)
    return facts_of_checkpoint(model_dir)


def _nodes(config: RunConfig, file: Path | None) -> tuple[list[NodeInfo], str]:
    """The nodes and their source."""
    if file is not None:
        return nodes_from_file(file), f"file {file}"
    if (address := config.ray.address) is not None:
        return nodes_of_cluster(address), f"the Ray at {address}"
    offered = f"this machine, {cores_words(*cores())}, {memory_words(memory())}"
    return this_machine(local_ray(config, engine_settings(config))), offered


def planned(config: RunConfig, nodes: Path | None = None, live: bool = False) -> PlanResult:
    """The plan of a configuration; starts nothing.

    Args:
        nodes: YAML file of nodes; None: this machine, or with `live` those of the Ray that the configuration joins.

    Raises:
        TierMoeError: the configuration or the model is refused, or a node is short of a resource.
    """
    here, notes, address = nodes is None and not live, list[str](), config.ray.address
    refuse_first((
        Refusal(nodes is not None and live, "--nodes and --live both name the nodes", "leave one of them out"),
        Refusal(
            live and address is None,
            "--live asks a running Ray, but ray.address names none",
            "set ray.address to HOST:PORT",
        ),
        Refusal(
            here and address is not None,
            f"the configuration joins the Ray at {address}, whose nodes are not known here",
            "pass --live to ask it, or --nodes FILE",
        ),
    ))  # fmt: skip
    if here:
        try:
            config = on_this_machine(config)
        except ConfigError as refused:  # of a start; the plan of what would fit is still useful
            notes.append(str(refused))
    if not here and config.budget is None and not config.maps_experts:  # the default is by this machine's GPU
        config = config.model_copy(update={"budget": DEFAULT_BUDGET})
    settings = engine_settings(config)  # refused before a hub is asked
    config = located(config, "sizes")
    there, nodes_from = _nodes(config, nodes)
    if here and (missing := note(settings.policy, config)) is not None:
        notes.append(missing)
    facts = model_facts(config)
    settings, why = decided(config, settings, facts, there, here)
    if config.ray.address is None and nodes is None:
        notes += local_notes(config, settings)
    notes += why
    return make_plans(config, settings, facts, there, nodes_from, notes, here)[0]


def plan(
    model: str | None = None, *, policy: str | None = None, budget: str | float | None = None,
    config: str | None = None, nodes: str | Path | None = None, **options: Any,
) -> dict[str, Any]:
    """What would run where, with how many bytes. What `tiermoe.plan` is; starts nothing.

    Args:
        model, policy, budget, config, options: as of `tiermoe.LLM`; of a hub's model only sizes are fetched.
        nodes: YAML file of nodes; None: this machine.

    Returns:
        what `tiermoe plan --json` prints: `model`, `spec`, `topology`, `prediction`, `notes`.

    Raises:
        TierMoeError: as `planned`.
    """
    chosen = load_run_config(config, {"model": model, "policy": policy, "budget": budget} | options)
    return planned(chosen, None if nodes is None else Path(nodes)).as_dict()


@with_options(
    "model", "policy", "budget", "emulate", "device", "store", "kv.tokens", "kv.max_model_len", "kv.max_num_seqs",
    "cluster.host_memory", "cluster.shards", "cluster.ndp_workers", "cluster.replicas",
)
def plan_command(
    options: dict[str, Any],
    config: Config = None,
    nodes: Annotated[Path | None, typer.Option(help="YAML file of nodes, with the keys of ray.nodes().")] = None,
    live: Annotated[bool, typer.Option("--live", help="Ask the Ray at ray.address for its nodes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what would run where, with how many bytes, and start nothing."""
    record = planned(load_run_config(config, options), nodes, live).as_dict()
    if as_json:
        print_json(record)
        return
    show(results(), *topology_tables(record))
