"""The planner's answer: actors with their nodes, bundles and bytes. `cluster.deploy` carries it out as it stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

Role = Literal["lead", "shard", "store", "ndp", "directory", "matcher"]
NODE_ID_LABEL = "ray.io/node-id"  # Ray's own label on every node


@dataclass(frozen=True)
class PlannedBytes:
    """Bytes of one actor, by kind.

    `dense`, `kv`, `slots` and `low_bit` (slots for replicas) are on its device, which is host memory where the CPU
    stands in for a GPU. `mapped` are pages of the store's files, shared with every process of the node that maps the
    same; `replicas` are pages of the quantized ones, which one process of a node maps.
    """

    dense: int = 0
    kv: int = 0
    slots: int = 0
    mapped: int = 0
    replicas: int = 0
    low_bit: int = 0

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
        ndp_of: NDP worker of expert e of layer l, at [l * E + e]; empty where there is none.
        notes: what a user would not expect.
    """

    actors: tuple[PlannedActor, ...]
    groups: tuple[PlannedGroup, ...]
    loads: tuple[NodeLoad, ...]
    ndp_of: tuple[int, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()

    def having(self, *roles: Role) -> tuple[PlannedActor, ...]:
        """The actors of some roles, in planned order."""
        return tuple(actor for actor in self.actors if actor.role in roles)

    @property
    def lead(self) -> PlannedActor:
        return self.having("lead")[0]

    def has_remote(self, role: Role) -> bool:
        """Whether an actor of this role is on another node than the lead."""
        return any(actor.node != self.lead.node for actor in self.having(role))

    def stores_of(self, layer: int) -> tuple[PlannedActor, ...]:
        """The stores that hold a layer; never empty."""
        return tuple(store for store in self.having("store") if layer in store.layers)

    def as_dict(self) -> dict[str, Any]:
        """Plain names and values for JSON, without the owner of each single expert."""
        record = asdict(self)
        del record["ndp_of"]
        return record
