"""What stands for an expert whose bytes are not here yet; apart from the pool, so that the loader needs no torch.

A promise is of a whole expert. Where a segment is to be loaded, it is cut from what the promise gives.
"""

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


class Shared:
    """One promised expert for the copies of both its segments: it is fetched once, and kept until both have it."""

    __slots__ = ("__weakref__", "_tensors", "whole")

    def __init__(self, whole: Promise) -> None:
        self.whole = whole
        self._tensors: tuple[torch.Tensor, ...] | None = None

    @property
    def fetched(self) -> bool:
        return self._tensors is not None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        if self._tensors is None:
            self._tensors = self.whole.tensors()
        return self._tensors


class PromisedSegment:
    """A `Promise` of the neurons [begin, end) of an expert; those of one expert ask for it once."""

    __slots__ = ("_begin", "_end", "_shared")

    def __init__(self, shared: Shared, begin: int, end: int) -> None:
        self._shared, self._begin, self._end = shared, begin, end

    def ask(self, behind: Sequence[Any]) -> None:
        """As `Promise.ask`; those behind are segments, too."""
        wanted = dict.fromkeys(segment._shared for segment in (self, *behind) if not segment._shared.fetched)
        if wanted:
            first, *others = [shared.whole for shared in wanted]
            first.ask(others)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return neuron_slice(self._shared.tensors(), self._begin, self._end)


def neuron_slice(tensors: tuple[torch.Tensor, ...], begin: int, end: int) -> tuple[torch.Tensor, ...]:
    """The neurons [begin, end) of an expert without biases: gate_up [I, G, H], down [I, H]."""
    return tuple(t[begin:end] for t in tensors)
