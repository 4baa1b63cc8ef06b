"""What is left of one node while actors are being placed on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ..report.tables import size
from .plan import NodeLoad, PlannedBytes
from .spec import ModelFacts, NodeInfo

_EPSILON = 1e-9  # sums of fractional CPUs


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


class Ledger:
    """Resources and host memory of a node, and what was taken of them.

    Mapped pages are shared by the processes of the node, so a layer counts once however many actors map it.

    Args:
        gpu: whether slots, dense weights and KV cache are in a GPU's memory rather than in the node's.
    """

    def __init__(self, node: NodeInfo, facts: ModelFacts, gpu: bool) -> None:
        self.node, self._facts, self._gpu = node, facts, gpu
        self.used: dict[str, float] = {}
        self.layers: frozenset[int] = frozenset()
        self._partly: dict[int, int] = {}
        self._taken = PlannedBytes()  # `mapped` is left 0: that follows from the layers

    @property
    def host_total(self) -> int | None:
        """Bytes for our processes; None where the node does not say."""
        return int(self.node.resources["memory"]) if "memory" in self.node.resources else None

    def left(self, resource: str) -> float:
        """What is free of a resource."""
        return self.node.amount(resource) - self.used.get(resource, 0.0)

    def shortages(self, need: Need) -> tuple[str, ...]:
        """What is missing and how much of it; empty: `need` fits."""
        found = [
            f"{name}: needs {wanted:g}, has {self.left(name):g} free of {self.node.amount(name):g}, "
            f"short of {wanted - self.left(name):g}"
            for name, wanted in sorted(need.resources.items())
            if wanted > self.left(name) + _EPSILON
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
        return mapped + after.replicas + (0 if self._gpu else after.device)

    def _mapped(self, layers: frozenset[int], partly: Mapping[int, int]) -> int:
        experts = len(layers) * self._facts.experts + sum(n for layer, n in partly.items() if layer not in layers)
        return experts * self._facts.expert_bytes


def _sum(a: Mapping[int, int], b: Mapping[int, int]) -> dict[int, int]:
    return {layer: a.get(layer, 0) + b.get(layer, 0) for layer in {*a, *b}}
