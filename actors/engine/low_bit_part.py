"""The part of a cache's memory that holds low-bit replicas, beside the slots for experts in full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # torch: the simulator uses this module without it
    import torch

    from .pool import ExpertSource


class ReplicaSlots(Protocol):
    """Slots of equal size in one allocation."""

    @property
    def bytes(self) -> int: ...
    def slot(self, index: int) -> tuple[torch.Tensor, ...]: ...


@dataclass(frozen=True)
class LowBitPart:
    """Slots of replicas and where their bytes come from.

    In a cache with such a part the replica of expert `key` goes by `key + keys`, keys being the number of experts of
    all layers, and is reserved, copied, pinned, run and evicted as experts in full are, in slots of class 1.

    pool: the slot tensors. weights: where the replicas of each MoE layer come from. slots: their number.
    slot_bytes: of one replica, scales and filling included.
    """

    pool: ReplicaSlots
    weights: Sequence[ExpertSource]
    slots: int
    slot_bytes: int
