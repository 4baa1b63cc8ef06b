"""What stands for an expert whose bytes are not here yet; apart from the pool, so that the loader needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


@runtime_checkable
class Promise(Protocol):
    """An expert that is not in this node's memory yet; used by the loader's thread only."""

    def ask(self, behind: Sequence[Any]) -> None:
        """Ask for its bytes, and for those of the promises behind it in the queue; returns at once."""
        ...

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the expert, in the order of `SlotPool.tensors`; waits for them.

        Raises:
            TierMoeError: they cannot be had.
        """
        ...
