"""The planner: places each actor on a node, or says which resource is short, on which node, by how much.

The most constrained actors go first, so that the others cannot take their room:

    NDP workers            on nodes with the resource `ndp`, round-robin
    marked stores          on nodes with the resource `store`
    lead, then shards      with their node's store where each worker's node has one
    matcher                beside the lead, where the policy follows expert maps
    endpoint directory     beside the lead, where an actor is not on the lead's node or is not reached by mapping

Pure and deterministic: ties go to the lower node id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...actors.policies.sharding import owned_experts, spread_by_bytes
from ...actors.slot_budget import mixed_slots
from ...errors import BudgetError, ConfigError
from ..host import STORE_CPUS
from ..report.tables import size
from .spec import (
    NODE_ID_LABEL,
    ClusterSpec,
    ModelFacts,
    NdpSpec,
    NodeInfo,
    NodeLoad,
    PlannedActor,
    PlannedBytes,
    PlannedGroup,
    Topology,
)

_EPSILON = 1e-9  # sums of fractional CPUs
_GROUP = "workers"
_NAMED_NODES = 4  # in one message


@dataclass(frozen=True)
class Need:
    """What one actor takes.

    Attributes:
        nbytes: `mapped` is ignored: that is what `layers` and `partly` say.
        layers: of the store, mapped as a whole.
        partly: experts that are mapped, by layer.
    """

    resources: Mapping[str, float]
    nbytes: PlannedBytes = field(default_factory=PlannedBytes)
    layers: frozenset[int] = frozenset()
    partly: Mapping[int, int] = field(default_factory=dict)


class NodeUsage:
    """Resources and host memory of a node, and what was taken of them.

    Mapped pages are shared by the processes of the node, so a layer counts once however many actors map it.

    Args:
        gpu: whether slots, dense weights and KV cache are in a GPU's memory rather than in the node's.
        reads_disk: whether lead and shards read experts from the store past the page cache: layers that are mapped take
            no memory, but for what NDP workers compute.
    """

    def __init__(self, node: NodeInfo, facts: ModelFacts, gpu: bool, reads_disk: bool = False) -> None:
        self.node, self._facts, self._gpu, self._reads_disk = node, facts, gpu, reads_disk
        self.used: dict[str, float] = {}
        self.layers: frozenset[int] = frozenset()
        self._partly: dict[int, int] = {}
        self._taken = PlannedBytes()  # `mapped` is left 0: that follows from the layers

    @property
    def host_total(self) -> int | None:
        """Bytes for our processes; None if the node does not say."""
        return int(self.node.resources["memory"]) if "memory" in self.node.resources else None

    def free(self, resource: str) -> float:
        """What is free of a resource."""
        return self.node.amount(resource) - self.used.get(resource, 0.0)

    def shortages(self, need: Need) -> tuple[str, ...]:
        """What is missing and how much of it; empty: `need` fits."""
        found = [
            f"{name}: needs {wanted:g}, has {self.free(name):g} free of {self.node.amount(name):g}, "
            f"short of {wanted - self.free(name):g}"
            for name, wanted in sorted(need.resources.items())
            if wanted > self.free(name) + _EPSILON
        ]
        total, after = self.host_total, self._host_bytes(need)
        if total is not None and after > total:
            replicas = self._taken.replicas + need.nbytes.replicas
            found.append(
                f"host memory: needs {size(after)} with what is there already"
                f"{f' ({size(replicas)} of it replicas)' if replicas else ''}, has {size(total)}, "
                f"short of {size(after - total)}"
            )
        return tuple(found)

    def take(self, need: Need) -> None:
        """Book an actor; the caller has looked at `shortages`."""
        for name, wanted in need.resources.items():
            self.used[name] = self.used.get(name, 0.0) + wanted
        self.layers |= need.layers
        self._partly = _sum(self._partly, need.partly)
        self._taken = self._taken.plus(replace(need.nbytes, mapped=0))

    def load(self) -> NodeLoad:
        """What was taken."""
        kinds = replace(self._taken, mapped=self._mapped(self.layers, self._partly))
        return NodeLoad(
            node=self.node.id,
            address=self.node.address,
            resources={name: (used, self.node.amount(name)) for name, used in sorted(self.used.items()) if used},
            host_bytes=self._host_bytes(Need({})),
            host_total=self.host_total,
            device_bytes=kinds.device,
            kinds=kinds,
        )

    def _host_bytes(self, need: Need) -> int:
        """Host memory with `need` added to what was taken."""
        after = self._taken.plus(need.nbytes)
        mapped = self._mapped(self.layers | need.layers, _sum(self._partly, need.partly))
        return mapped + after.replicas + after.copied + (0 if self._gpu else after.device)

    def _mapped(self, layers: frozenset[int], partly: Mapping[int, int]) -> int:
        counts = dict(partly) | ({} if self._reads_disk else dict.fromkeys(layers, self._facts.experts))
        return sum(count * self._facts.stored_bytes(layer) for layer, count in counts.items())


def _sum(a: Mapping[int, int], b: Mapping[int, int]) -> dict[int, int]:
    return {layer: a.get(layer, 0) + b.get(layer, 0) for layer in {*a, *b}}


def plan_topology(spec: ClusterSpec, facts: ModelFacts, nodes: Sequence[NodeInfo]) -> Topology:
    """Place every actor.

    Raises:
        BudgetError: the experts' budget does not fit the GPU.
        ConfigError: a resource is short; the message says which, on which node, and by how much.
    """
    return _Planner(spec, facts, nodes, *_slots(spec, facts)).plan()


def _slots(spec: ClusterSpec, facts: ModelFacts) -> tuple[tuple[int, ...], int]:
    """Slots of each shard [G], at most the experts that the shard owns; and the lead's slots for low-bit replicas."""
    owned = owned_experts(facts.layers, facts.experts, spec.shards, spec.ownership)
    if min(owned) == 0:
        raise ConfigError(
            f"cluster.shards is {spec.shards}, but the model has {facts.experts} experts in {facts.layers} layers, "
            f"so a shard would hold none by the rule '{spec.ownership}'",
            f"lower cluster.shards to {facts.experts * (facts.layers if spec.ownership == 'layer-expert' else 1)}",
        )
    fitting, low, low_bytes = spec.budget_bytes // spec.slot_bytes, 0, 0
    if spec.low_bit is not None:  # the same division as the engine's
        each, keys = spec.low_bit.replica_bytes, facts.layers * facts.experts
        fitting, low = mixed_slots(spec.budget_bytes, spec.slot_bytes, each, spec.low_bit.share, keys)
        low_bytes = low * each
    slots = tuple(min(fitting, count) for count in owned)
    lead_experts = slots[0] * spec.slot_bytes + low_bytes
    lead = spec.dense_bytes + spec.kv_bytes + lead_experts
    if spec.gpu and spec.gpu_memory_bytes is not None and lead > spec.gpu_memory_bytes:
        raise BudgetError(
            f"the lead needs {size(lead)} of GPU memory ({size(spec.dense_bytes)} dense, {size(spec.kv_bytes)} KV "
            f"cache, {size(lead_experts)} for experts), cluster.gpu_memory is "
            f"{size(spec.gpu_memory_bytes)}: short of {size(lead - spec.gpu_memory_bytes)}",
            "lower --budget or --kv-tokens",
        )
    return slots, low


class _Planner:
    """One plan in the making."""

    def __init__(
        self, spec: ClusterSpec, facts: ModelFacts, nodes: Sequence[NodeInfo], slots: tuple[int, ...], low_slots: int
    ) -> None:
        ids = [node.id for node in nodes]
        if doubles := sorted({i for i in ids if ids.count(i) > 1}):
            raise ConfigError(f"two nodes have the id '{doubles[0]}'", "give each node an id of its own")
        self._spec, self._facts, self._slots, self._low_slots = spec, facts, slots, low_slots
        self._alive = sorted((node for node in nodes if node.alive), key=lambda node: node.id)
        if not self._alive:
            raise ConfigError(f"none of {len(nodes)} nodes is alive", "start one with `ray start`")
        self._usage = {node.id: NodeUsage(node, facts, spec.gpu, spec.host_bytes is not None) for node in self._alive}
        self._owned = owned_experts(facts.layers, facts.experts, spec.shards, spec.ownership)
        self._every_layer = frozenset(range(facts.layers))
        self._with_workers: list[str] = []  # nodes, in the order of their first workers
        self._notes = [f"node {node.id} is dead and left out" for node in nodes if not node.alive]

    def plan(self) -> Topology:
        ndp = self._place_ndp(self._spec.ndp) if self._spec.ndp is not None else []
        stores = self._place_marked_stores() if self._spec.store_nodes == "marked" else []
        homes = self._place_workers()
        if self._spec.store_nodes == "workers":
            stores = self._worker_stores()
        for index, home in enumerate(homes):
            need = Need({}, PlannedBytes(copied=self._copied(home)))
            self._first_fit(f"the pinned copy of {_worker_name(index)}", [self._usage[home].node], need)
        workers = self._workers(homes)
        # it sleeps but for some tens of microseconds a layer, so it takes no CPU from the others
        matcher = [PlannedActor("matcher", "matcher", 0, homes[0], {})] if self._spec.matcher else []
        directory = self._directory(workers, stores, [*ndp, *matcher])
        if self._spec.low_bit is not None and not workers[0].layers:
            raise ConfigError(
                f"policy '{self._spec.policy}' loads replicas, which the lead maps from its own node's store; node "
                f"{workers[0].node} has none",
                "set cluster.store.nodes to workers, or choose a policy without on_miss low-bit, such as next-gate",
            )
        self._add_notes(workers)
        group, grouped = self._group([*workers, *(s for s in stores if s.group is not None)])
        alone = [actor for actor in (*stores, *ndp, *matcher, *directory) if actor.group is None]
        return Topology(
            actors=(*grouped, *alone),
            groups=(group,),
            loads=tuple(u.load() for u in self._usage.values() if u.used or u.node.id in {a.node for a in directory}),
            notes=tuple(self._notes),
        )

    # NDP workers

    def _place_ndp(self, ndp: NdpSpec) -> list[PlannedActor]:
        marked = [node for node in self._alive if node.amount("ndp") >= 1]
        there = sum(int(node.amount("ndp")) for node in marked)
        wanted = ndp.workers if ndp.workers is not None else len(marked)
        if not marked or wanted > there:
            have = f"{there} ({_list(node.id for node in marked)})" if marked else "none"
            raise ConfigError(
                f"policy '{self._spec.policy}' needs {max(1, wanted)} of the resource ndp, the nodes have {have}: "
                f"short of {max(1, wanted) - there}",
                "start a node with `ray start ... --resources '{\"ndp\": 1}'`, lower cluster.ndp_workers, or choose "
                "another policy",
            )
        facts = self._facts
        stored = [facts.stored_bytes(layer) if ndp.stored else 0 for layer in range(facts.layers)]
        sizes = [nbytes + ndp.replica_bytes for nbytes in stored for _ in range(facts.experts)]
        owners = spread_by_bytes(sizes, wanted)
        actors, placed = [], dict.fromkeys((node.id for node in marked), 0)

        def by_place(node: NodeInfo) -> tuple[int, bool, str]:
            """Fewest workers first; of those the lead's node, if it is named: a message within a node costs least."""
            return placed[node.id], self._spec.lead not in (node.id, node.address), node.id

        for index in range(wanted):
            counts = _per_layer(owners, index, facts)
            experts = sum(counts.values())
            mapped = sum(count * stored[layer] for layer, count in counts.items())
            replicas = experts * ndp.replica_bytes
            if mapped + replicas > ndp.capacity_bytes:
                raise ConfigError(
                    f"NDP worker {index} holds {size(mapped + replicas)} of experts, ndp.hardware has "
                    f"{size(ndp.capacity_bytes)}: short of {size(mapped + replicas - ndp.capacity_bytes)}",
                    "raise cluster.ndp_workers, choose narrower replicas, or another ndp.hardware",
                )
            need = Need(
                {"CPU": float(ndp.threads), "ndp": 1.0},
                PlannedBytes(replicas=replicas),
                partly=counts if ndp.stored else {},
            )
            order = [marked[index]] if ndp.workers is None else sorted(marked, key=by_place)
            node = self._first_fit(f"NDP worker {index}", order, need)
            placed[node] += 1
            actors.append(
                PlannedActor(
                    f"ndp-{index}", "ndp", index, node, need.resources,
                    nbytes=PlannedBytes(mapped=mapped, replicas=replicas), experts=experts,
                    layers=tuple(sorted(counts)) if ndp.stored else (),
                )
            )  # fmt: skip
        return actors

    # stores

    def _place_marked_stores(self) -> list[PlannedActor]:
        marked = [node for node in self._alive if node.amount("store") >= 1]
        if not marked:
            raise ConfigError(
                "cluster.store.nodes is 'marked', but no node has the resource store: short of 1",
                "start a node with `ray start ... --resources '{\"store\": 1}'`, or set cluster.store.nodes to workers",
            )
        actors = []
        for index, layers in enumerate(self._layers_of_stores(len(marked))):
            need = Need({"CPU": STORE_CPUS, "store": 1.0}, layers=frozenset(layers))
            node = self._first_fit(f"store {index}", [marked[index]], need)
            actors.append(self._store(index, node, need.resources, layers, None))
        return actors

    def _worker_stores(self) -> list[PlannedActor]:
        """The stores beside the workers; CPUs (and all layers, if replicated) were booked with the first worker.

        The size of a slice depends on the number of nodes with workers, so slices are checked here.
        """
        actors = []
        for index, layers in enumerate(self._layers_of_stores(len(self._with_workers))):
            node = self._with_workers[index]
            self._first_fit(f"store {index}", [self._usage[node].node], Need({}, layers=frozenset(layers)))
            actors.append(self._store(index, node, {"CPU": STORE_CPUS}, layers, _GROUP))
        return actors

    def _layers_of_stores(self, stores: int) -> list[tuple[int, ...]]:
        """Layers of each store [S]; sliced: copy c of layer l is in store (l + c) mod S."""
        if self._spec.store_layout == "replicated":
            return [tuple(sorted(self._every_layer))] * stores
        copies = self._spec.store_copies
        if copies > stores:
            raise ConfigError(
                f"cluster.store.copies is {copies}, but only {stores} node{'s hold' if stores > 1 else ' holds'} a "
                f"store: short of {copies - stores}",
                "lower it, or add nodes",
            )
        if stores > self._facts.layers + copies - 1:
            idle = stores - self._facts.layers - copies + 1
            self._notes.append(f"{idle} of {stores} stores hold no layer: there are {self._facts.layers}")
        return [
            tuple(layer for layer in sorted(self._every_layer) if (index - layer) % stores < copies)
            for index in range(stores)
        ]

    def _store(
        self, index: int, node: str, resources: Mapping[str, float], layers: tuple[int, ...], group: str | None
    ) -> PlannedActor:
        experts = len(layers) * self._facts.experts
        mapped = PlannedBytes(mapped=self._facts.experts * sum(map(self._facts.stored_bytes, layers)))
        return PlannedActor(f"store-{index}", "store", index, node, resources, group, None, mapped, experts, layers)

    # lead and shards

    def _place_workers(self) -> list[str]:
        """Node of each shard [G], the lead's first."""
        order = sorted(self._alive, key=lambda node: (-self._room(node), node.id))
        if self._spec.lead is not None:
            order = self._named_first(self._spec.lead, order)
        first = self._first_worker(order[:1] if self._spec.lead is not None else order, 0)
        homes = [first]
        counts = dict.fromkeys((node.id for node in self._alive), 0) | {first: 1}
        rest = [self._usage[first].node, *(node for node in order if node.id != first)]
        for index in range(1, self._spec.shards):
            by_count = sorted(rest, key=lambda node: counts[node.id])  # stable: the lead's node first, then by room
            homes.append(self._first_worker(rest if self._spec.strategy == "pack" else by_count, index))
            counts[homes[-1]] += 1
        return homes

    def _named_first(self, lead: str, order: list[NodeInfo]) -> list[NodeInfo]:
        """`order` with the node that `cluster.lead` names first."""
        named = [node for node in order if lead in (node.id, node.address)]
        if not named:
            known = _list(f"{node.id} at {node.address}" for node in self._alive)
            raise ConfigError(f"cluster.lead is '{lead}', which is not a living node", f"give one of {known}")
        named.sort(key=lambda node: (node.id != lead, node.id))  # an id is more telling than an address
        return [named[0], *(node for node in order if node.id != named[0].id)]

    def _room(self, node: NodeInfo) -> int:
        """How many shards would fit on a node by CPU and GPU."""
        usage, store = self._usage[node.id], STORE_CPUS if self._spec.store_nodes == "workers" else 0.0
        room = (usage.free("CPU") - store) // self._spec.threads
        return int(max(0, min(room, usage.free("GPU")) if self._spec.gpu else room))

    def _first_worker(self, order: Sequence[NodeInfo], index: int) -> str:
        spec, name = self._spec, _worker_name(index)
        alone = Need(self._worker_resources(), self._worker_bytes(index))
        beside = alone  # with the node's store
        if spec.store_nodes == "workers":
            layers = self._every_layer if spec.store_layout == "replicated" else frozenset[int]()
            beside = Need(self._worker_resources(STORE_CPUS), self._worker_bytes(index), layers)
        needs = {node.id: alone if node.id in self._with_workers else beside for node in order}
        node = self._first_fit(name, order, needs)
        if node not in self._with_workers:
            self._with_workers.append(node)
        return node

    def _worker_resources(self, store_cpus: float = 0.0) -> dict[str, float]:
        return {"CPU": self._spec.threads + store_cpus} | ({"GPU": 1.0} if self._spec.gpu else {})

    def _worker_bytes(self, index: int) -> PlannedBytes:
        spec, slots = self._spec, self._slots[index] * self._spec.slot_bytes
        if index:
            return PlannedBytes(slots=slots)
        each = spec.low_bit.replica_bytes if spec.low_bit is not None else 0
        replicas = self._facts.layers * self._facts.experts * each
        return PlannedBytes(
            spec.dense_bytes, spec.kv_bytes, slots, replicas=replicas, low_bit=self._low_slots * each
        )

    def _copied(self, node: str) -> int:
        """Bytes of a worker's copy of experts of its node's store: pinned, or read from the disk."""
        if self._spec.host_bytes is not None:
            return 0 if self._spec.mapped else self._spec.host_bytes
        every = self._facts.experts * sum(map(self._facts.stored_bytes, self._usage[node].layers))
        return min(self._spec.copied_most, every)

    def _workers(self, homes: Sequence[str]) -> list[PlannedActor]:
        resources = self._worker_resources()
        return [
            PlannedActor(
                f"shard-{index}" if index else "lead", "shard" if index else "lead", index, node, resources, _GROUP,
                None, replace(self._worker_bytes(index), copied=self._copied(node)), self._owned[index],
                tuple(sorted(self._usage[node].layers)),
            )
            for index, node in enumerate(homes)
        ]  # fmt: skip

    # the rest

    def _directory(
        self, workers: Sequence[PlannedActor], stores: Sequence[PlannedActor], others: Sequence[PlannedActor]
    ) -> list[PlannedActor]:
        """The endpoint directory, where there is a channel at all; `others` are NDP workers and the matcher."""
        remote = any(len(worker.layers) < self._facts.layers for worker in workers) and bool(stores)
        if len(workers) == 1 and not others and not remote:
            return []
        return [PlannedActor("directory", "directory", 0, workers[0].node, {})]

    def _add_notes(self, workers: Sequence[PlannedActor]) -> None:
        missing = {w.name: self._facts.layers - len(w.layers) for w in workers}
        self._notes += [
            f"{name} reads {count} of {self._facts.layers} layers from other nodes"
            for name, count in missing.items()
            if count
        ]
        if self._spec.gpu and self._spec.gpu_memory_bytes is None:
            self._notes.append("GPU memory was not checked: cluster.gpu_memory does not say how much there is")
        used = self._usage.values()
        unknown = [usage.node.id for usage in used if usage.host_total is None and usage.load().host_bytes]
        if unknown:
            self._notes.append(f"host memory was not checked on {_list(unknown)}: not reported")

    def _group(self, members: Sequence[PlannedActor]) -> tuple[PlannedGroup, list[PlannedActor]]:
        """One group for lead, shards and the stores beside them, so that all start or none."""
        bundled = [replace(actor, bundle=i) for i, actor in enumerate(members)]
        homes = {actor.node for actor in bundled}
        selectors = []
        for actor in bundled:
            node_id = self._usage[actor.node].node.labels.get(NODE_ID_LABEL)
            selectors.append({NODE_ID_LABEL: node_id} if node_id is not None and len(self._alive) > 1 else {})
        group = PlannedGroup(
            _GROUP,
            "STRICT_PACK" if len(homes) == 1 else "PACK",
            tuple(dict(actor.resources) for actor in bundled),
            tuple(selectors),
        )
        return group, bundled

    def _first_fit(self, name: str, order: Sequence[NodeInfo], need: Need | Mapping[str, Need]) -> str:
        """Book an actor on the first node that has room."""
        short = []
        for node in order:
            wanted, usage = need if isinstance(need, Need) else need[node.id], self._usage[node.id]
            missing = usage.shortages(wanted)
            if not missing:
                usage.take(wanted)
                return node.id
            short.append(f"node {node.id} ({'; '.join(missing)})")
        replicas = " choose a policy without on_miss low-bit," if self._spec.low_bit is not None else ""
        replicas += " set copies.pin to mapped," if self._spec.copied_most else ""
        raise ConfigError(
            f"{name} fits on no node: {_list(short)}",
            f"lower cluster.shards, threads, --budget or --kv-tokens,{replicas} or add a node that has room",
        )


def _worker_name(index: int) -> str:
    return f"shard {index}" if index else "the lead"


def _per_layer(owners: Sequence[int], worker: int, facts: ModelFacts) -> dict[int, int]:
    """Experts of one NDP worker, by layer; layers without any are left out."""
    spans = {e: owners[e * facts.experts : (e + 1) * facts.experts] for e in range(facts.layers)}
    return {layer: count for layer, span in spans.items() if (count := sum(owner == worker for owner in span))}


def _list(items: Iterable[str]) -> str:
    """The first few, and how many more."""
    every = list(items)
    more = f", and {len(every) - _NAMED_NODES} more" if len(every) > _NAMED_NODES else ""
    return ", ".join(every[:_NAMED_NODES]) + more
