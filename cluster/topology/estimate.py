"""What a plan says of times, and the closed form of a decode step that `bench validation` compares with measurements.

A plan says what copies take at least (`copy_times`): bytes over the bandwidth of their link, which no run beats. It
says no tokens per second: no interval around a prediction has held in nine of ten measurements, so none is printed.

The closed form (`predict`), line by line. With L layers, K experts a token, G GPUs, resident share r and the machine's
costs (`machine_costs.py`), per layer:

    dense_s = dense_layer + (dense bytes / L + KV bytes / L) / dense_gbps
                                                              the lead reads attention, norms, router, head once
    host_s  = layer(policy) + m (miss(policy) + wait) + loads load(policy)      m = 1 - r^K: some expert is missing
    hit_s   = K r / G' (expert + slot bytes / expert_gbps)    the busiest GPU's share of the experts that are there
    miss_s  = K (1 - r) / G' (the same)                       the others, once they have arrived
    load_s  = K (1 - r) / G' (latency + stored expert bytes / link)     each GPU over its own link, and no faster than
                                                              copy + bytes / copy_gbps
    shard_s = 2 network latency + 2 row bytes / network       activations out, sums back, if a shard is on another node

    G' = K / ceil(K / G): balanced shards, but an expert is not divided. link: the host link, or the network where that
    is slower, in proportion to the layers that a worker cannot map.

Without NDP worker, with u = share of the missing experts that prefetch brings in time (0 without prefetch):

    layer_s = max(dense_s + host_s, u load_s) + max(hit_s + shard_s, (1 - u) load_s) + miss_s

since prefetches overlap the next layer's dense part, and demand loads overlap the resident experts, as the engine's
dispatch does. With NDP workers nothing is loaded during decode, and both sides work at the same time:

    layer_s = dense_s + host_s + max(hit_s + shard_s, ndp_s)
    ndp_s   = cost.batch_cost of ceil(K (1 - r) / N) experts on the modelled device, and two hops as in shard_s where
              a worker is on another node than the lead

    token_s = step(policy) + L layer_s

Where the machine is measured, r = o + (1 - o) (slots / experts), o the share of experts that the next token uses
again: a cache that holds a token's experts hits those. Without a recorded routing o is `OVERLAP`; the range goes from
o = 0 to twice that. `jobs/prediction.py` replays a recorded routing instead, with these costs.

Where it is not measured, `assumed_costs` gives bandwidths of the kind of device, no host time and o = 0: the result may
be too high or too low, by a factor, and is called rough. Left out: batching (weights that several tokens share).

`make_plan`: configuration + sizes of the model + nodes -> topology and times of copies; `tiermoe plan` prints it, and a
deployment carries it out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...actors.policies.cost import Work, batch_cost
from ...actors.settings import EngineSettings
from ...errors import ConfigError
from ..config import HardwareConfig, RunConfig
from .machine_costs import MachineCosts, PolicyCosts, known_costs
from .planner import plan_topology
from .spec import ClusterSpec, ModelFacts, NdpSpec, NodeInfo, NodeLoad, Topology, cluster_spec

NOT_PREDICTED = "not predicted: no interval has held in 9 of 10 measurements; `tiermoe run` measures it"
PREFETCH_USEFUL = 0.5  # share of the missing experts that prefetch brings in time, u
OVERLAP = 0.3  # of a token's experts with the token's before, where no routing is recorded
CONTEXT_TOKENS = 512  # whose keys and values a step reads
WITHIN = 0.15  # half the width of a range from measured costs and a recorded routing

_H100 = ("H100-class", 3350.0, 55.0, 10.0)  # SXM5 data sheet; assumption: 87% of PCIe 5.0 x16; a copy
_STAND_IN = ("CPU stand-in", 10.0, 10.0, 0.0)  # one thread's reads of host memory; an unthrottled copy is such a read


@dataclass(frozen=True)
class Hardware:
    """The figures that a prediction rests on; gigabytes are 1e9 bytes."""

    name: str
    memory_gbps: float
    link_gbps: float
    link_latency_us: float
    network_gbps: float
    network_latency_us: float
    prefetch_useful: float


@dataclass(frozen=True)
class CopyTimes:
    """What copies of experts take at least: bounds by the bandwidth of their link, never measured.

    Attributes:
        nbytes: of one expert's copy. one_s: seconds of it.
        token_s: of one token's decode if all its experts are copied, each GPU over its own link.
        hardware: the links that were counted on.
        ndp_hardware: name of the modelled NDP device; None if there is none.
    """

    nbytes: int
    one_s: float
    token_s: float
    hardware: Hardware
    ndp_hardware: str | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the speed that is not predicted, and why."""
        hardware = asdict(self.hardware)
        links = {name: hardware[name] for name in hardware if name not in ("memory_gbps", "prefetch_useful")}
        return {
            "label": "predicted", "tokens_per_s": None, "not_predicted": NOT_PREDICTED, "copy_bytes": self.nbytes,
            "copy_s_least": self.one_s, "token_copies_s_least": self.token_s, "hardware": links,
            "ndp_hardware": self.ndp_hardware,
        }  # fmt: skip


def copy_times(topology: Topology, spec: ClusterSpec, facts: ModelFacts, hardware: Hardware) -> CopyTimes:
    """The bounds of a plan.

    The stand-in copies what slots hold, a GPU what is stored; a policy that may load a low-bit replica in place of an
    expert copies that at least. A layer waits for the GPU with the most experts, of K at least K / G rounded up.
    """
    stored = facts.all_bytes // (facts.layers * facts.experts)
    nbytes = stored if spec.gpu or facts.form is not None else spec.slot_bytes
    if spec.low_bit is not None:
        nbytes = min(nbytes, spec.low_bit.replica_bytes)
    one_s = _load_s(hardware, nbytes, _mapped_share(topology, facts))
    ndp = _counted_on(spec)
    return CopyTimes(
        nbytes, one_s, one_s * math.ceil(facts.top_k / spec.shards) * facts.layers, hardware,
        None if ndp is None else ndp.hardware.name,
    )  # fmt: skip


def _mapped_share(topology: Topology, facts: ModelFacts) -> float:
    """The share of layers that lie on the workers' own nodes."""
    workers = topology.having("lead", "shard")
    return sum(len(worker.layers) for worker in workers) / (len(workers) * facts.layers)


@dataclass(frozen=True)
class Prediction:
    """Predicted, never measured.

    Attributes:
        tokens_per_s: of one request's decode.
        low, high: its range, within which most measurements are; None if the machine's costs are not known.
        rough: it does not rest on measured costs of this machine at this number of threads.
        basis: where the machine's costs and the routing come from.
        hit_share: r, assumed.
        bytes_loaded_per_token: over all links.
        layer_s: seconds of one layer.
        parts_s: the terms of `layer_s` by their names in this module, before they overlap.
        bound_by: the largest of the terms.
        hardware: what was assumed.
        ndp_hardware: name of the modelled NDP device; None if there is none.
    """

    tokens_per_s: float
    hit_share: float
    bytes_loaded_per_token: float
    layer_s: float
    parts_s: dict[str, float]
    bound_by: str
    hardware: Hardware
    ndp_hardware: str | None
    low: float | None = None
    high: float | None = None
    rough: bool = False
    basis: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {"label": "predicted", **asdict(self)}


def resolve_hardware(given: HardwareConfig, gpu: bool, link_gbps: float | None, link_latency_us: float) -> Hardware:
    """Fill in what the file leaves out.

    Args:
        gpu: whether the workers run on GPUs.
        link_gbps: to which the CPU stand-in throttles its copies; None: unthrottled.
        link_latency_us: before each of its copies.
    """
    name, memory, link, latency = _H100 if gpu else _STAND_IN
    if not gpu:
        link, latency = link_gbps or link, link_latency_us
    throttled = not gpu and link_gbps is not None
    assumed = not throttled and None in (given.link_gbps, given.link_latency_us)
    return Hardware(
        name=f"{name}, assumed" if assumed else f"{name}, as configured",
        memory_gbps=memory,
        link_gbps=given.link_gbps or link,
        link_latency_us=latency if given.link_latency_us is None else given.link_latency_us,
        network_gbps=given.network_gbps,
        network_latency_us=given.network_latency_us,
        prefetch_useful=PREFETCH_USEFUL,
    )


def measured_hardware(hardware: Hardware, costs: MachineCosts, link_gbps: float | None) -> Hardware:
    """The machine's measured bandwidths in place of assumed ones; link_gbps: to which the stand-in is throttled."""
    link = costs.copy_gbps if link_gbps is None else link_gbps
    return replace(hardware, name=costs.machine, memory_gbps=costs.expert_gbps, link_gbps=link)


def assumed_costs(hardware: Hardware, spec: ClusterSpec) -> MachineCosts:
    """The costs of a machine that is not measured: bandwidths alone."""
    none = PolicyCosts(step_us=0, layer_us=0, miss_us=0, load_us=0)
    return MachineCosts(
        machine=hardware.name, tiermoe="assumed", threads=spec.threads, copy_us=0, copy_gbps=hardware.link_gbps,
        wait_us=0, dense_layer_us=0, dense_gbps=hardware.memory_gbps, expert_us=0, expert_gbps=hardware.memory_gbps,
        policies={spec.policy: none},
    )  # fmt: skip


def predict(
    topology: Topology, spec: ClusterSpec, facts: ModelFacts, hardware: Hardware, costs: MachineCosts | None = None,
    source: str = "host time is not measured",
) -> Prediction:  # fmt: skip
    """Evaluate the equations of this module's docstring.

    Args:
        costs: of the machine, measured; None: `assumed_costs`, and the result is rough.
        source: where the costs come from.
    """
    workers = topology.having("lead", "shard")
    slots = sum(worker.nbytes.slots for worker in workers) // spec.slot_bytes
    share = min(1.0, slots / (facts.layers * facts.experts))
    ndp = _counted_on(spec)
    if ndp is not None and ndp.hot_per_layer is not None:
        share = min(share, ndp.hot_per_layer / facts.experts)
    measured = costs is not None
    costs = costs or assumed_costs(hardware, spec)
    policy, note = costs.of_policy(spec.policy)
    held = slots >= facts.layers * facts.top_k  # a token's experts, all layers
    overlaps = (OVERLAP, 0.0, 2 * OVERLAP) if measured and held and ndp is None else (0.0,)
    hits = [overlap + (1 - overlap) * share for overlap in overlaps]
    found = [_layer(topology, spec, facts, hardware, hit, costs) for hit in hits]
    times_s = [policy.step_us * 1e-6 + layer[1] * facts.layers for layer in found]
    (parts, layer_s, loaded), share, token_s = found[0], hits[0], times_s[0]
    low, high, basis = None, None, (source,)
    if measured:
        low, high = 1 / (max(times_s) * (1 + WITHIN)), 1 / (min(times_s) * (1 - WITHIN))
        routing = f"routing assumed: {OVERLAP:.0%} of a token's experts are those of the token before"
        basis = (f"host time {source}", routing, *(() if note is None else (note,)), *threads_note(costs, spec))
    return Prediction(
        tokens_per_s=1 / token_s,
        hit_share=share,
        bytes_loaded_per_token=loaded,
        layer_s=layer_s,
        parts_s=parts,
        bound_by=max(parts, key=lambda name: parts[name]).removesuffix("_s"),
        hardware=hardware,
        ndp_hardware=ndp.hardware.name if ndp is not None else None,
        low=low,
        high=high,
        rough=not measured or bool(threads_note(costs, spec)),
        basis=basis,
    )


def _counted_on(spec: ClusterSpec) -> NdpSpec | None:
    """The NDP workers that the prediction counts on."""
    return None if spec.ndp is None or spec.ndp.optional else spec.ndp


def threads_note(costs: MachineCosts, spec: ClusterSpec) -> tuple[str, ...]:
    """On the CPU stand-in costs are of the threads that they were measured with."""
    if spec.gpu or spec.threads == costs.threads:
        return ()
    return (f"costs were measured with --threads {costs.threads}, and the worker has {spec.threads}",)


def layer_bytes(spec: ClusterSpec, facts: ModelFacts) -> float:
    """A layer's share of what a step reads besides experts: dense weights, and the keys and values of a context."""
    kv_bytes = facts.kv_elements * CONTEXT_TOKENS * spec.compute_item_bytes
    return (spec.dense_bytes + kv_bytes) / facts.layers


def _layer(
    topology: Topology, spec: ClusterSpec, facts: ModelFacts, hardware: Hardware, share: float,
    costs: MachineCosts,
) -> tuple[dict[str, float], float, float]:  # fmt: skip
    """The parts of a layer before overlap, its seconds, and the bytes that a token loads. share: r."""
    parallel = facts.top_k / math.ceil(facts.top_k / spec.shards)
    experts_s = facts.top_k / parallel * costs.expert_s(spec.slot_bytes)
    missing = facts.top_k * (1 - share)
    row_bytes = facts.hidden * spec.compute_item_bytes
    hops_s = 2 * (hardware.network_latency_us * 1e-6 + row_bytes / (hardware.network_gbps * 1e9))
    policy, _ = costs.of_policy(spec.policy)
    ndp = _counted_on(spec)
    loads, missed = (missing, 1 - share**facts.top_k) if ndp is None else (0.0, 0.0)
    parts = {
        "dense_s": costs.dense_s(layer_bytes(spec, facts)),
        "host_s": (policy.layer_us + missed * (policy.miss_us + costs.wait_us) + loads * policy.load_us) * 1e-6,
        "hit_s": share * experts_s,
        "shard_s": hops_s if topology.has_remote("shard") else 0.0,
    }
    ahead_s = parts["dense_s"] + parts["host_s"]
    here_s = parts["hit_s"] + parts["shard_s"]
    if ndp is not None:
        parts["ndp_s"] = _ndp_s(ndp, facts, missing, len(topology.having("ndp")))
        parts["ndp_s"] += hops_s if topology.has_remote("ndp") else 0.0
        return parts, ahead_s + max(here_s, parts["ndp_s"]), 0.0
    mapped = _mapped_share(topology, facts)
    parts["miss_s"] = (1 - share) * experts_s
    stored = facts.all_bytes / (facts.layers * facts.experts)
    exact = spec.gpu or facts.form is not None
    nbytes = stored if exact else spec.slot_bytes  # the stand-in copies what slots hold
    parts["load_s"] = missing / parallel * max(_load_s(hardware, nbytes, mapped), costs.copy_s(nbytes))
    early_s = parts["load_s"] * (hardware.prefetch_useful if spec.prefetch else 0.0)
    layer_s = max(ahead_s, early_s) + max(here_s, parts["load_s"] - early_s) + parts["miss_s"]
    return parts, layer_s, missing * stored * facts.layers


def _load_s(hardware: Hardware, nbytes: float, mapped: float) -> float:
    """Seconds of one expert's load, with `mapped` the share of layers that lie on the worker's own node."""
    here_s = hardware.link_latency_us * 1e-6 + nbytes / (hardware.link_gbps * 1e9)
    slower = min(hardware.link_gbps, hardware.network_gbps)
    far_s = (hardware.link_latency_us + hardware.network_latency_us) * 1e-6 + nbytes / (slower * 1e9)
    return mapped * here_s + (1 - mapped) * far_s


def _ndp_s(ndp: NdpSpec, facts: ModelFacts, missing: float, workers: int) -> float:
    """Seconds of one worker's part of a layer; a fractional average width is rounded up."""
    count = math.ceil(missing / workers - 1e-9)
    work = Work(facts.hidden, facts.intermediate, rows=1, bits=math.ceil(ndp.bits), group=ndp.group)
    row_bytes = 4 * facts.hidden  # float32 over the channel, one token row each way
    return batch_cost(ndp.hardware, [work] * count, row_bytes, row_bytes).total_s


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
    hardware = resolve_hardware(config.hardware, spec.gpu, config.link.gbps, config.link.latency_us)
    throttled = config.hardware.link_gbps is not None or (config.link.gbps is not None and not spec.gpu)
    costs, _ = known_costs() if here and not throttled else (None, "")
    if costs is not None and costs.executor == ("real" if spec.gpu else "emulated"):
        hardware = measured_hardware(hardware, costs, None)
    found = [*topology.notes, *notes]
    if facts.dense_estimated:
        found.append("dense bytes are computed from config.json: the weights are not here")
    return PlanResult(facts, spec, topology, copy_times(topology, spec, facts, hardware), nodes_from, tuple(found))


def make_plans(
    config: RunConfig, settings: EngineSettings, facts: ModelFacts, nodes: Sequence[NodeInfo], nodes_from: str,
    notes: Sequence[str] = (), here: bool = True,
) -> list[PlanResult]:  # fmt: skip
    """The plan of each replica, on what those before it leave of the nodes. Arguments as of `make_plan`.

    Mapped pages are shared, so a replica leaves them to the next. Each plan is that of one replica alone.

    Raises:
        ConfigError, BudgetError: as `make_plan`; the message says which replica finds no room.
    """
    replicas, plans = config.cluster.replicas, list[PlanResult]()
    more = [f"{replicas} replicas: each has these actors and this budget, on the same mapped store"]
    notes = [*notes, *(more if replicas > 1 else [])]
    for index in range(replicas):
        try:
            plans.append(make_plan(config, settings, facts, nodes, nodes_from, notes, here))
        except ConfigError as error:
            if index == 0:
                raise
            what = f"replica {index + 1} of {replicas} does not fit beside the replicas before it: {error.what}"
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
