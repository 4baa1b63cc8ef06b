"""What the planner is given, in numbers: the cluster that is wanted, the model's sizes, the nodes there are.

And its answer: actors with their nodes, bundles and bytes, which `cluster.deploy` carries out as it stands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from ...actors.combinations import check_combination
from ...actors.policies.cost import FULL_BITS, NdpDevice, packed_bytes
from ...actors.policies.sharding import Ownership
from ...actors.settings import CopySettings, EngineSettings, KvSettings
from ...actors.slot_budget import SlotSizes, divide
from ...kernels.pack import PackedShape
from ..config import RunConfig

ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class NodeInfo:
    """A node as Ray reports it.

    Attributes:
        id: Ray's node id, or any unique name.
        resources: totals by name: CPU, GPU, custom ones such as ndp and store; memory and object_store_memory are
            bytes. A node that reports no memory is not checked for it.
        labels: as the node was started with; Ray adds `ray.io/node-id`.
    """

    id: str
    address: str
    alive: bool = True
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def amount(self, resource: str) -> float:
        """Total of a resource; 0 if the node has none."""
        return float(self.resources.get(resource, 0.0))


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a model.

    Attributes:
        layers: MoE layers, L.
        experts: in each, E.
        top_k: experts that a token uses in each layer.
        gates: 2 if the expert has a gate projection, else 1.
        expert_elements: numbers in one expert.
        dense_elements: numbers in everything that is not a routed expert.
        kv_elements: numbers in the KV cache for each token, all layers together.
        state_bytes: of a request's running states, all layers together; an upper estimate. paged: whether the KV cache
            may be: there are no such states, and keys are no latents and not chosen by an index.
        scanned: numbers of a layer's running state that a prompt has for each of its tokens while it runs, and such
            prompts run whole; 0: prompts run in chunks.
        item_bytes: of one number as stored.
        source: where the figures come from, for people.
        published_elements, published_bytes: of those, and of the matrices that hold them, what stays in its published
            form.
        table_bytes: of those, embeddings whose rows are read from a mapped file when they are asked for.
        dense_estimated: whether `dense_elements` is computed from the configuration and not read from files.
        form: published form in which experts stay, such as "fp8_block"; None: they are numbers of `item_bytes`.
        form_bytes: of one expert in that form as a slot holds it; of the largest, where layers differ.
        form_width: whole bits of a weight in that form, of the narrowest layer; NDP workers use replicas below it.
        layer_form_bytes: of one expert of each layer as stored, where experts stay in a published form.
        mapped_bytes: of experts that a store leaves in the checkpoint.
        depth: layers with attention. heads, head_size: of attention. vocabulary: tokens that there are.
        mlp: width of the widest dense layer.
    """

    name: str
    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    gates: int
    expert_elements: int
    dense_elements: int
    kv_elements: int
    item_bytes: int
    source: str
    dense_estimated: bool = False
    published_elements: int = 0
    published_bytes: int = 0
    table_bytes: int = 0
    form: str | None = None
    form_bytes: int = 0
    form_width: int = FULL_BITS
    layer_form_bytes: tuple[int, ...] = ()
    mapped_bytes: int = 0
    depth: int = 1
    heads: int = 0
    head_size: int = 0
    vocabulary: int = 0
    mlp: int = 0
    state_bytes: int = 0
    paged: bool = True
    scanned: int = 0

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert as a slot holds it in the type of the store; of the largest, where layers differ."""
        return self.form_bytes if self.form is not None else self.expert_elements * self.item_bytes

    def slot_bytes(self, item: int) -> int:
        """Bytes of one expert on a device that computes in numbers of `item` bytes; of the largest."""
        return self.form_bytes if self.form is not None else self.expert_elements * item

    def stored_bytes(self, layer: int) -> int:
        """Bytes of one expert of a layer as stored."""
        return self.layer_form_bytes[layer] if self.layer_form_bytes else self.expert_bytes

    def dense_bytes(self, item: int, gpu: bool) -> int:
        """Bytes of the dense part on a device that computes in numbers of `item` bytes.

        Published matrices stay as they are, but on a CPU in other types than float32 (`engine.model.published_linear`).
        On a CPU of tables no more is in memory than the rows of recent tokens.
        """
        if not gpu and item != 4:
            return self.dense_elements * item
        resident = self.published_bytes - (0 if gpu else self.table_bytes)
        return (self.dense_elements - self.published_elements) * item + resident

    def kv_bytes(self, item: int, kv: KvSettings) -> int:
        """Bytes of the KV cache, where the computation is in numbers of `item` bytes."""
        tokens = kv.num_blocks * kv.page_size
        if not self.head_size or not self.paged:
            return self.kv_elements * item * tokens
        return self.kv_elements // self.head_size * kv.row_bytes(self.head_size, item) * tokens

    @property
    def all_bytes(self) -> int:
        """Bytes of all experts as stored."""
        return self.experts * sum(map(self.stored_bytes, range(self.layers)))

    @property
    def store_bytes(self) -> int:
        """Bytes that the store takes on disk."""
        plain = (self.dense_elements - self.published_elements) * self.item_bytes
        return self.all_bytes - self.mapped_bytes + plain + self.published_bytes


@dataclass(frozen=True)
class NdpSpec:
    """The NDP workers.

    Attributes:
        workers: how many; None: one on each node with the resource `ndp`.
        threads: CPUs of each.
        widths: bits of the replicas.
        replica_bytes: of one expert, all widths together.
        capacity_bytes: of the modelled device.
        hardware: the modelled device.
        stored: whether experts are computed as the store has them, too: in full precision, or in a published form.
        optional: whether misses are loaded where that is cheaper: bounds of copies count on loads alone.
    """

    workers: int | None
    threads: int
    widths: tuple[int, ...]
    replica_bytes: int
    capacity_bytes: int
    hardware: NdpDevice
    stored: bool = False
    optional: bool = False


@dataclass(frozen=True)
class LowBitSpec:
    """What `on_miss: low-bit` loads on a miss.

    Attributes:
        replica_bytes: of one expert's replica as the lead maps it and as its slots hold it, tile padding included.
        share: of the budget, for slots of replicas.
    """

    replica_bytes: int
    share: float


@dataclass(frozen=True)
class ClusterSpec:
    """The cluster that is wanted. Bytes are those of one GPU (or of the CPU that stands in for one).

    Attributes:
        gpu: whether workers take the resource GPU.
        threads: CPUs of each worker.
        mapped: experts run in host memory as they are stored: where the store maps them, without budget and slots, or
            in slots that are read from the disk.
        budget_bytes: for experts, on each GPU; of mapped ones, for slots in host memory.
        slot_bytes: of one expert on the device; of mapped ones, as stored.
        compute_item_bytes: of one number on the device.
        dense_bytes: on the lead's device.
        kv_bytes: on the lead's device.
        gpu_memory_bytes: of one GPU; None: unknown, not checked.
        ndp: None if the policy uses no NDP worker.
        matcher: whether the policy follows expert maps.
        low_bit: None where misses are not loaded as replicas.
        copied_most: bytes of experts that each worker copies to pinned memory at most (`copies.pin: copy`).
        auto: the terms of `budget: auto` as assumed; None: the budget was given.
        host_bytes: of each lead and shard, for experts in host memory that are read from the disk; None: the store is
            mapped.
    """

    shards: int
    ownership: Ownership
    strategy: Literal["pack", "spread"]
    lead: str | None
    gpu: bool
    threads: int
    policy: str
    budget_bytes: int
    slot_bytes: int
    compute_item_bytes: int
    dense_bytes: int
    kv_bytes: int
    gpu_memory_bytes: int | None
    store_layout: Literal["replicated", "sliced"]
    store_nodes: Literal["workers", "marked"]
    store_copies: int
    ndp: NdpSpec | None
    matcher: bool = False
    low_bit: LowBitSpec | None = None
    copied_most: int = 0
    auto: Mapping[str, int] | None = None
    mapped: bool = False
    host_bytes: int | None = None


def wants_gpu(settings: EngineSettings, nodes: Sequence[NodeInfo]) -> bool:
    """Whether workers run on GPUs: as configured, and with `auto` where some living node has one."""
    if settings.device != "auto":
        return settings.device == "cuda"
    return any(node.alive and node.amount("GPU") >= 1 for node in nodes)


def cluster_spec(
    config: RunConfig, settings: EngineSettings, facts: ModelFacts, nodes: Sequence[NodeInfo]
) -> ClusterSpec:
    """Resolve a configuration to numbers.

    A dtype that only the device decides is float32 on the CPU stand-in and bfloat16 on a GPU, as in `tiermoe run`.

    Raises:
        BudgetError: the budget holds no expert. ConfigError: the policy cannot use experts in their published form.
    """
    cluster, policy, gpu = config.cluster, settings.policy, wants_gpu(settings, nodes)
    item = compute_item_bytes(settings, gpu)
    check_combination(settings, facts.form)
    mapped = settings.budget.mapped
    slot_bytes, low_bit = facts.expert_bytes if mapped else facts.slot_bytes(item), None
    if (low := policy.low_bit) is not None:
        low_bit = LowBitSpec(low_bit_bytes(settings, facts), low.share)
    return ClusterSpec(
        shards=cluster.shards,
        ownership=cluster.ownership,
        strategy=cluster.strategy,
        lead=cluster.lead,
        gpu=gpu,
        threads=settings.threads,
        policy=policy.name,
        budget_bytes=(settings.host_bytes or 0)
        if mapped
        else divide(policy, settings.budget, slot_sizes(settings, facts, item)).budget,
        slot_bytes=slot_bytes,
        compute_item_bytes=item,
        dense_bytes=facts.dense_bytes(item, gpu),
        kv_bytes=facts.kv_bytes(item, settings.kv) + facts.state_bytes * settings.kv.max_num_seqs,
        gpu_memory_bytes=cluster.gpu_memory,
        store_layout=cluster.store.layout,
        store_nodes=cluster.store.nodes,
        store_copies=cluster.store.copies,
        ndp=_ndp_spec(config, settings, facts) if has_ndp(config, settings, facts, nodes) else None,
        matcher=policy.maps is not None,
        low_bit=low_bit,
        copied_most=_copied_most(settings.copies, facts) if gpu else 0,
        auto=None if (auto := settings.budget.auto) is None else auto.in_terms,
        mapped=mapped,
        host_bytes=settings.host_bytes,
    )


def low_bit_bytes(settings: EngineSettings, facts: ModelFacts) -> int:
    """Bytes of one replica of a policy with `on_miss: low-bit`."""
    low = settings.policy.low_bit
    assert low is not None  # the caller's condition
    return PackedShape(facts.hidden, facts.intermediate, low.bits, settings.ndp.group_size).nbytes()


def slot_sizes(settings: EngineSettings, facts: ModelFacts, item: int) -> SlotSizes:
    """What a budget is divided by, on devices that compute in numbers of `item` bytes."""
    low_bit = None if settings.policy.low_bit is None else low_bit_bytes(settings, facts)
    return SlotSizes(
        facts.layers, facts.experts, facts.slot_bytes(item), facts.intermediate, facts.top_k, low_bit,
        settings.shards.count, settings.shards.ownership,
    )  # fmt: skip


def compute_item_bytes(settings: EngineSettings, gpu: bool) -> int:
    """Bytes of a number on the device; a type that only the device decides is bfloat16 on a GPU, else float32."""
    return ITEM_BYTES[settings.dtype if settings.dtype != "auto" else ("bfloat16" if gpu else "float32")]


def _copied_most(copies: CopySettings, facts: ModelFacts) -> int:
    if copies.pin != "copy":
        return 0
    return facts.all_bytes if copies.pinned_gib is None else min(facts.all_bytes, int(copies.pinned_gib * (1 << 30)))


def has_ndp(config: RunConfig, settings: EngineSettings, facts: ModelFacts, nodes: Sequence[NodeInfo]) -> bool:
    """Whether there are NDP workers. A policy that can do without has none on GPUs, where no node is marked for them,
    or where the modelled devices or the host memory of a single node do not hold the experts.
    """
    workers = config.ndp_workers(settings.policy)
    if not config.may_drop_workers(settings.policy):
        return workers > 0
    alone = sum(node.alive for node in nodes) == 1
    if wants_gpu(settings, nodes) or (settings.host_bytes is not None and alone):
        return False
    marked = any(node.alive and node.amount("ndp") >= 1 for node in nodes)
    return workers > 0 and marked and facts.all_bytes <= workers * settings.ndp.device.capacity_bytes


def _ndp_spec(config: RunConfig, settings: EngineSettings, facts: ModelFacts) -> NdpSpec:
    wanted = config.cluster.ndp_workers
    return NdpSpec(
        workers=None if wanted == "per-node" else wanted,
        threads=settings.ndp.worker_threads,
        widths=_near_data_widths(settings, facts),
        replica_bytes=replicas_bytes(settings, facts),
        capacity_bytes=settings.ndp.device.capacity_bytes,
        hardware=settings.ndp.device,
        stored=computes_stored(settings, facts),
        optional=settings.policy.placement.optional_workers,
    )


def _near_data_widths(settings: EngineSettings, facts: ModelFacts) -> tuple[int, ...]:
    """Bits of the replicas that NDP workers compute from; experts that are stored in fewer stay as they are."""
    return tuple(b for b in settings.policy.precision.widths if facts.form is None or b < facts.form_width)


def computes_stored(settings: EngineSettings, facts: ModelFacts) -> bool:
    """Whether NDP workers compute experts as the store has them, too."""
    widths = _near_data_widths(settings, facts)
    return not widths or widths != settings.policy.precision.widths


def replicas_bytes(settings: EngineSettings, facts: ModelFacts) -> int:
    """Bytes of all replicas of one expert that processes map."""
    if settings.policy.low_bit is not None:
        return low_bit_bytes(settings, facts)
    return sum(replica_bytes(facts, bits, settings.ndp.group_size) for bits in _near_data_widths(settings, facts))


def replica_bytes(facts: ModelFacts, bits: int, group: int) -> int:
    """Bytes of one expert's replica, as `cost.packed_bytes` counts them for an expert with a gate projection."""
    return math.ceil(packed_bytes(facts.hidden, facts.intermediate, bits, group) * (facts.gates + 1) / 3)


Role = Literal["lead", "shard", "store", "ndp", "directory", "matcher"]
NODE_ID_LABEL = "ray.io/node-id"  # Ray's own label on every node


@dataclass(frozen=True)
class PlannedBytes:
    """Bytes of one actor, by kind.

    `dense`, `kv`, `slots` and `low_bit` (slots for replicas) are on its device, which is host memory where the CPU
    stands in for a GPU. `mapped` are pages of the store's files, shared with every process of the node that maps the
    same; `replicas` are pages of the quantized ones, which one process of a node maps; `copied` is a process's own
    copy of its node's experts: pinned, or read from the disk.
    """

    dense: int = 0
    kv: int = 0
    slots: int = 0
    mapped: int = 0
    replicas: int = 0
    low_bit: int = 0
    copied: int = 0

    @property
    def device(self) -> int:
        return self.dense + self.kv + self.slots + self.low_bit

    def plus(self, other: PlannedBytes) -> PlannedBytes:
        """Both, kind by kind."""
        return PlannedBytes(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


@dataclass(frozen=True)
class PlannedActor:
    """One actor.

    Attributes:
        index: among those of its role; the lead is shard 0, so the shards' begin at 1.
        node: id of its node.
        resources: what Ray shall reserve.
        group: name of its placement group; None: it is scheduled on its own, softly bound to `node`, so that it may
            restart on another node that has the same custom resource.
        bundle: in that group.
        experts: that it owns; of a store, that it holds.
        layers: of a store: those it holds. Of lead and shards: those that they map from their own node's store; the
            others they read over a channel. Of NDP workers on full precision: those they map.
    """

    name: str
    role: Role
    index: int
    node: str
    resources: Mapping[str, float]
    group: str | None = None
    bundle: int | None = None
    nbytes: PlannedBytes = field(default_factory=PlannedBytes)
    experts: int = 0
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class PlannedGroup:
    """A placement group.

    Attributes:
        bundles: resources of each, in the order of the actors' `bundle`.
        selectors: for each bundle the labels that bind it to its node; empty where any node will do, or where the
            node did not report the label.
    """

    name: str
    strategy: Literal["STRICT_PACK", "PACK"]
    bundles: tuple[Mapping[str, float], ...]
    selectors: tuple[Mapping[str, str], ...]


@dataclass(frozen=True)
class NodeLoad:
    """What the plan takes of a node.

    Attributes:
        resources: used and total, by name, for what is used.
        host_bytes: of memory, shared pages once.
        host_total: that the node reports; None: unknown.
        device_bytes: of all its GPUs together, or of the CPU stand-ins (then part of `host_bytes`).
        kinds: the bytes by kind; mapped pages that processes share are counted once.
    """

    node: str
    address: str
    resources: Mapping[str, tuple[float, float]]
    host_bytes: int
    host_total: int | None
    device_bytes: int
    kinds: PlannedBytes


@dataclass(frozen=True)
class Topology:
    """What runs where.

    Attributes:
        loads: of the nodes that have an actor, by node id.
        notes: what a user would not expect.
    """

    actors: tuple[PlannedActor, ...]
    groups: tuple[PlannedGroup, ...]
    loads: tuple[NodeLoad, ...]
    notes: tuple[str, ...] = ()

    def having(self, *roles: Role) -> tuple[PlannedActor, ...]:
        """The actors of some roles, in planned order."""
        return tuple(actor for actor in self.actors if actor.role in roles)

    @property
    def lead(self) -> PlannedActor:
        return self.having("lead")[0]

    def as_dict(self) -> dict[str, Any]:
        """Plain names and values for JSON."""
        return asdict(self)
