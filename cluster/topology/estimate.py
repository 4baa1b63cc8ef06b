"""What a plan says of times: what copies take at least, bytes over the bandwidth of their link, which no run beats.

It says no tokens per second: no interval around a prediction has held in nine of ten measurements. `tiermoe run`
measures speed, `tiermoe replay` simulates it on a recorded routing.

`make_plan`: configuration + sizes of the model + nodes -> topology and times of copies; `tiermoe plan` prints it, and a
deployment carries it out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ...actors.settings import EngineSettings, KvSettings
from ...actors.store.disk import read_gbps, weights_in
from ...errors import ConfigError
from ..config import RunConfig
from .machine_costs import known_costs
from .planner import plan_topology
from .spec import ClusterSpec, ModelFacts, NodeInfo, NodeLoad, Topology, cluster_spec

NOT_PREDICTED = "not predicted: no interval has held in 9 of 10 measurements; `tiermoe run` measures it"

_LONG_PROMPT = 8192  # tokens


@dataclass(frozen=True)
class Hardware:
    """The links by which copies go; gigabytes are 1e9 bytes. Between nodes 25 Gbit/s Ethernet is assumed."""

    name: str
    link_gbps: float
    link_latency_us: float
    network_gbps: float = 3.0
    network_latency_us: float = 50.0


_GPU = Hardware("H100-class, assumed", 55.0, 10.0)  # 87% of PCIe 5.0 x16; a copy
_DISK = Hardware("NVMe disk, assumed", 3.0, 0.0)
_STAND_IN = Hardware("CPU stand-in, assumed", 10.0, 0.0)  # an unthrottled copy is one thread's read of host memory


@dataclass(frozen=True)
class CopyTimes:
    """What copies of experts take at least: bounds by the bandwidth of their link, never measured.

    Attributes:
        nbytes: of one expert's copy. one_s: seconds of it.
        token_s: of one token's decode if all its experts are copied, each GPU over its own link; GPUs of a node share
            its disk. All are 0 where experts run as the store maps them.
        prompt_tokens: of a long prompt, as far as the KV cache holds it. prompt_rows: of its forwards.
        prompt_bytes: that its forwards copy to the GPU with the most, or read from the disk of the node with the most,
            if each uses every expert that is not resident.
        prompt_s: seconds of that, before its first token.
        hardware: the links that were counted on.
        ndp_hardware: name of the modelled NDP device; None if there is none.
    """

    nbytes: int
    one_s: float
    token_s: float
    prompt_tokens: int
    prompt_rows: int
    prompt_bytes: int
    prompt_s: float
    hardware: Hardware
    ndp_hardware: str | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the speed that is not predicted, and why."""
        return {
            "label": "predicted", "tokens_per_s": None, "not_predicted": NOT_PREDICTED, "copy_bytes": self.nbytes,
            "copy_s_least": self.one_s, "token_copies_s_least": self.token_s,
            "prompt_tokens": self.prompt_tokens, "prompt_rows": self.prompt_rows,
            "prompt_copy_bytes": self.prompt_bytes, "prompt_copies_s_least": self.prompt_s,
            "hardware": asdict(self.hardware), "ndp_hardware": self.ndp_hardware,
        }  # fmt: skip


def copy_times(
    topology: Topology, spec: ClusterSpec, facts: ModelFacts, hardware: Hardware, kv: KvSettings
) -> CopyTimes:
    """The bounds of a plan.

    The stand-in copies what slots hold, a GPU what is stored; a policy that may load a low-bit replica in place of an
    expert copies that at least. A layer waits for the GPU with the most experts, of K at least K / G rounded up.
    """
    stored = facts.all_bytes // (facts.layers * facts.experts)
    prompt, rows = min(kv.request_tokens, _LONG_PROMPT), kv.max_batch_tokens
    if spec.mapped and spec.host_bytes is None:
        return CopyTimes(0, 0.0, 0.0, prompt, rows, 0, 0.0, hardware, None)
    as_stored = spec.gpu or spec.host_bytes is not None or facts.form is not None
    nbytes = stored if as_stored else spec.slot_bytes
    if spec.low_bit is not None:
        nbytes = min(nbytes, spec.low_bit.replica_bytes)
    one_s = _load_s(hardware, nbytes, _mapped_share(topology, facts))
    ndp = None if spec.ndp is None or spec.ndp.optional else spec.ndp
    held, sharing = spec.budget_bytes // spec.slot_bytes, 1
    if spec.host_bytes is not None:
        held += 0 if spec.mapped else spec.host_bytes // facts.expert_bytes
        sharing = max(Counter(worker.node for worker in topology.having("lead", "shard")).values())
    absent = max(0, math.ceil(facts.layers * facts.experts / spec.shards) - held)
    copies, routed = absent * math.ceil(prompt / rows) * sharing, math.ceil(facts.top_k / spec.shards) * sharing
    return CopyTimes(
        nbytes, one_s, one_s * routed * facts.layers, prompt, rows, copies * nbytes, copies * one_s, hardware,
        None if ndp is None else ndp.hardware.name,
    )  # fmt: skip


def _mapped_share(topology: Topology, facts: ModelFacts) -> float:
    """The share of layers that lie on the workers' own nodes."""
    workers = topology.having("lead", "shard")
    return sum(len(worker.layers) for worker in workers) / (len(workers) * facts.layers)


def links_of(config: RunConfig, gpu: bool, here: bool) -> Hardware:
    """The emulated link of a configuration; else this machine's, as it was measured; else an assumed one.

    Args:
        gpu: whether the workers run on GPUs.
        here: whether that is on this machine.
    """
    link = config.link
    if not gpu and link.gbps is not None:
        return Hardware("CPU stand-in, as configured", link.gbps, link.latency_us)
    found = _GPU if gpu else replace(_STAND_IN, link_latency_us=link.latency_us)
    costs = known_costs() if here else None
    if costs is not None and costs.executor == ("real" if gpu else "emulated"):
        return replace(found, name=costs.machine, link_gbps=costs.copy_gbps)
    return found


def disk_of(config: RunConfig, here: bool) -> Hardware:
    """The disk of a configuration's store or model, as it is measured now; else an assumed one.

    Args:
        here: whether that is on this machine.
    """
    folders = [Path(folder).expanduser() for folder in (config.store, config.model_dir) if here and folder is not None]
    if (file := weights_in(folders)) is None:
        return _DISK
    gbps, direct = read_gbps(file)
    past = "past" if direct else "through"
    return Hardware(f"disk, measured {past} the page cache on {file.name}", round(gbps, 2), 0.0)


def _load_s(hardware: Hardware, nbytes: float, mapped: float) -> float:
    """Seconds of one expert's load, with `mapped` the share of layers that lie on the worker's own node."""
    here_s = hardware.link_latency_us * 1e-6 + nbytes / (hardware.link_gbps * 1e9)
    slower = min(hardware.link_gbps, hardware.network_gbps)
    far_s = (hardware.link_latency_us + hardware.network_latency_us) * 1e-6 + nbytes / (slower * 1e9)
    return mapped * here_s + (1 - mapped) * far_s


@dataclass(frozen=True)
class PlanResult:
    """A plan and its inputs.

    Attributes:
        times: what is said of times.
        nodes_from: where the nodes come from, for people.
        notes: the topology's and our own.
    """

    facts: ModelFacts
    spec: ClusterSpec
    topology: Topology
    times: CopyTimes
    nodes_from: str
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The plan as one JSON object."""
        return {
            "model": asdict(self.facts)
            | {name: getattr(self.facts, name) for name in ("expert_bytes", "all_bytes", "store_bytes")},
            "spec": asdict(self.spec),
            "nodes_from": self.nodes_from,
            "topology": self.topology.as_dict(),
            "prediction": self.times.as_dict(),
            "notes": list(self.notes),
        }


def make_plan(
    config: RunConfig,
    settings: EngineSettings,
    facts: ModelFacts,
    nodes: Sequence[NodeInfo],
    nodes_from: str,
    notes: Sequence[str] = (),
    here: bool = True,
) -> PlanResult:
    """Place every actor, and say what its copies take at least.

    Args:
        notes: in addition to the topology's.
        here: the nodes are this machine, so that its measured costs hold.

    Raises:
        ConfigError: which resource is short where. BudgetError: the budget does not fit.
    """
    spec = cluster_spec(config, settings, facts, nodes)
    topology = plan_topology(spec, facts, nodes)
    found = [*topology.notes, *notes]
    if facts.dense_estimated:
        found.append("dense bytes are computed from config.json: the weights are not here")
    link = links_of(config, spec.gpu, here) if spec.host_bytes is None else disk_of(config, here)
    times = copy_times(topology, spec, facts, link, settings.kv)
    return PlanResult(facts, spec, topology, times, nodes_from, tuple(found))


def make_plans(
    config: RunConfig, settings: EngineSettings, facts: ModelFacts, nodes: Sequence[NodeInfo], nodes_from: str,
    notes: Sequence[str] = (), here: bool = True,
) -> list[PlanResult]:  # fmt: skip
    """The plan of each replica group, on what those before it leave of the nodes. Arguments as of `make_plan`.

    Mapped pages are shared, so a group leaves them to the next. Each plan is that of one group alone.

    Raises:
        ConfigError, BudgetError: as `make_plan`; the message says which replica group finds no room.
    """
    replicas, plans = config.cluster.replicas, list[PlanResult]()
    more = [f"{replicas} replica groups: each has these actors and this budget, on the same mapped store"]
    notes = [*notes, *(more if replicas > 1 else [])]
    for index in range(replicas):
        try:
            plans.append(make_plan(config, settings, facts, nodes, nodes_from, notes, here))
        except ConfigError as error:
            if index == 0:
                raise
            what = f"replica group {index + 1} of {replicas} does not fit beside those before it: {error.what}"
            raise type(error)(what, f"{error.remedy}; or lower cluster.replicas") from error
        nodes = [_without_loads(node, plans[-1].topology.loads) for node in nodes]
    return plans


def _without_loads(node: NodeInfo, loads: Sequence[NodeLoad]) -> NodeInfo:
    """The node without what was planned on it."""
    resources = dict(node.resources)
    for load in (load for load in loads if load.node == node.id):
        for name, (used, _) in load.resources.items():
            resources[name] = resources[name] - used
        if "memory" in resources:
            resources["memory"] -= load.host_bytes - load.kinds.mapped
    return replace(node, resources=resources)
