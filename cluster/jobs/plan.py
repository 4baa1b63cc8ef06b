"""`tiermoe plan`: what would run where, with how many bytes, without starting anything.

configuration + sizes of the model + nodes -> topology and times of copies -> tables or JSON
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from ...actors.budget import Budget
from ...actors.combinations import Refusal, refuse_first
from ...actors.store.format import DTYPE_CODES, ITEM_BYTES, Manifest, read_manifest
from ...actors.store.learned import Uses, find_learned, read_learned
from ...errors import CheckpointError, ConfigError, StoreError, size
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
from ..report.output import print_json, stdout
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
from .prepare.needs import current_store, note

_BLOCK = re.compile(r"\.(\d+)\.")  # of a module's path, as llama.cpp counts them, too
_OT_EXPERTS = r"ffn_(up|down|gate|gate_up)_exps"


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


class OtExport(NamedTuple):
    """Whole layers of experts on a GPU, as llama.cpp's option `-ot`.

    Attributes:
        option: the option's value: patterns of tensor names with the memory of each, the first that matches counts.
        blocks: of the model, whose experts go to the GPU, the most used first. of: layers with experts.
        nbytes: that they take, in the form that the experts have here.
        forwards: that were counted.
    """

    option: str
    blocks: tuple[int, ...]
    of: int
    nbytes: int
    forwards: float


def ot_of(manifest: Manifest, uses: Uses, nbytes: int) -> OtExport:
    """The layers whose experts were used most, as many as fit. llama.cpp places a layer's experts as one tensor, so no
    single expert can be chosen.

    Args:
        nbytes: for experts on the GPU, `CUDA0` to llama.cpp.
    """
    published, experts = manifest.published, manifest.experts.num_experts
    item = ITEM_BYTES[DTYPE_CODES[manifest.dtype]]
    chosen, left, heat = list[int](), nbytes, uses.counts.sum(1)
    for index in sorted(range(len(heat)), key=lambda index: (-heat[index], index)):
        each = manifest.experts.nbytes(item) if published is None else published.of(index).nbytes()
        if experts * each <= left:
            left -= experts * each
            chosen.append(index)
    blocks = [int(_BLOCK.findall(layer.module)[0]) for layer in manifest.layers]
    there = tuple(blocks[index] for index in chosen)
    named = "|".join(map(str, sorted(there)))
    here = f"blk\\.({named})\\.{_OT_EXPERTS}=CUDA0," if there else ""
    return OtExport(f"{here}{_OT_EXPERTS}=CPU", there, len(heat), nbytes - left, uses.forwards)


def _exported(config: RunConfig, budget: str) -> OtExport:
    """Raises StoreError: there is no store, or nothing was counted on this machine. BudgetError: no number of bytes."""
    config = located(config, "sizes")
    store = current_store(config)
    remedy = "serve the model for a while (`tiermoe serve`), which counts what is used"
    if store is None:
        raise StoreError(f"'{shown(config.model_dir)}' has no store here", remedy)
    manifest = read_manifest(store)
    if (path := find_learned(store, manifest)) is None:
        raise StoreError(f"no use of the experts of '{shown(config.model_dir)}' was counted on this machine", remedy)
    facts = facts_of_store(store, config.model_dir)
    nbytes = Budget.parse(budget).bytes_of(facts.expert_bytes, facts.layers * facts.experts)
    return ot_of(manifest, read_learned(path, manifest), nbytes)


@with_options(
    "model", "policy", "budget", "emulate", "device", "store", "kv.tokens", "kv.max_model_len", "kv.max_num_seqs",
    "kv.dtype",
    "cluster.host_memory", "cluster.shards", "cluster.ndp_workers", "cluster.replicas",
)
def plan_command(
    options: dict[str, Any],
    config: Config = None,
    nodes: Annotated[Path | None, typer.Option(help="YAML file of nodes, with the keys of ray.nodes().")] = None,
    live: Annotated[bool, typer.Option("--live", help="Ask the Ray at ray.address for its nodes.")] = False,
    export_ot: Annotated[
        str | None,
        typer.Option(
            help="Print the value of llama.cpp's option -ot that puts the most used layers' experts on a GPU, within "
            "this size or share of the experts.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what would run where, with how many bytes, and start nothing."""
    if export_ot is not None:
        found = _exported(load_run_config(config, options), export_ot)
        if as_json:
            print_json(found._asdict())
            return
        print(found.option, file=stdout(), flush=True)
        words = (
            f"the experts of {len(found.blocks)} of {found.of} layers, {size(found.nbytes)} in their form here, by "
            f"{found.forwards:.0f} forwards"
        )
        Console(stderr=True).print(words, markup=False, soft_wrap=True)
        return
    record = planned(load_run_config(config, options), nodes, live).as_dict()
    if as_json:
        print_json(record)
        return
    show(results(), *topology_tables(record))
