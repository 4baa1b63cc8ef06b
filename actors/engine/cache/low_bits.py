"""Mixed precision on a miss: low-bit replicas and their slots.

    open_replica_weights -> make_part (slots within the budget) -> LowBits.layer: which of a layer's experts run on one

Replicas are reserved, copied, pinned, run and evicted by the cache like experts (`LowBitPart`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch

from ....errors import ConfigError
from ....kernels.pack import PackedShape
from ....kernels.packed_slots import packed_shapes
from ...policy_settings import PolicySettings
from ...settings import CopySettings
from ...store.replicas import ReplicaView, open_replicas
from .device import Device, PinReport
from .slots import LayerWeights, LowBitPart
from .sources import host_tensor


@dataclass(frozen=True)
class ReplicaWeights:
    """The replicas of one width in host memory, mapped read-only.

    shape: of one. layers: the tensors of `PackedShape.tensors()` of each MoE layer, [E, ...].
    """

    shape: PackedShape
    layers: list[LayerWeights]

    def pinned_by(
        self, device: Device, settings: CopySettings, experts: PinReport | None
    ) -> tuple[ReplicaWeights, PinReport | None]:
        """The replicas in pinned memory, as far as the settings and the driver allow.

        Args:
            experts: the report on full experts, which count first against the limit.

        Returns:
            The replicas, and one report for both.
        """
        if experts is not None and settings.pinned_gib is not None:
            left = settings.pinned_gib - (experts.registered + experts.copied) / (1 << 30)
            settings = settings.model_copy(update={"pinned_gib": max(0.0, left)})
        layers, mine = device.pin(self.layers, settings)
        found = cast(list[LayerWeights], list(layers))
        return replace(self, layers=found), mine if experts is None or mine is None else experts.beside(mine)


@dataclass(frozen=True)
class ReplicaPool:
    """Slots of replicas on a device: `tensors` [S, ...] in the order of `PackedShape.tensors()`."""

    shape: PackedShape
    tensors: tuple[torch.Tensor, ...]

    @staticmethod
    def allocate(shape: PackedShape, slots: int, device: torch.device) -> ReplicaPool:
        kinds = packed_shapes(shape)
        return ReplicaPool(
            shape, tuple(torch.empty((slots, *dims), dtype=dtype, device=device) for dtype, dims in kinds)
        )

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def slot(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)


def open_replica_weights(policy: PolicySettings, replicas: ReplicaView | None, *, fetched: bool) -> ReplicaWeights:
    """Map the replicas that a policy with `on_miss: low-bit` loads.

    Args:
        replicas: of the store; None where it has none. fetched: this node has no files of experts.

    Raises:
        ConfigError: there are no replicas of that width here. StoreError: a file changed since it was verified.
    """
    bits = policy.replica_widths[0]
    if fetched:
        raise ConfigError(
            f"policy '{policy.name}' loads replicas, which are read from this node's files; its store is elsewhere",
            "copy the store to this node, or choose a policy without on_miss low-bit, such as next-gate",
        )
    if replicas is None or bits not in replicas.widths:
        have = "has none" if replicas is None else f"has those of {', '.join(map(str, replicas.widths))} bits"
        raise ConfigError(
            f"policy '{policy.name}' needs replicas of {bits} bits, the store {have}",
            f"run `tiermoe prepare MODEL OUT --bits {bits}`",
        )
    shape = replicas.shapes[bits]
    dtypes = [dtype for dtype, _ in packed_shapes(shape)]
    layers = [
        LayerWeights(tuple(host_tensor(arrays[name], t) for name, t in zip(shape.tensors(), dtypes, strict=True)))
        for arrays in open_replicas(replicas)[bits]
    ]
    return ReplicaWeights(shape, layers)


def make_part(weights: ReplicaWeights, slots: int, device: torch.device) -> LowBitPart:
    pool = ReplicaPool.allocate(weights.shape, slots, device)
    return LowBitPart(pool, weights.layers, slots, pool.bytes // slots)
