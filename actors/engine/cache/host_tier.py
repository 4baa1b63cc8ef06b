"""Experts of a store that is larger than host memory: read from the disk into a bounded cache there, and used from it.

    slots of a device <- loader's thread: `TierExpert` <- HostTier <- DiskLink

The tier is an `ExpertCache` in host memory, whose core decides and accounts as that of a device does: reads of one
expert join, what is in use is pinned, demand comes before prefetch. Without a GPU a lead needs no tier: the cache of
its layers is one. All methods run on one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from .cache import ExpertCache

if TYPE_CHECKING:
    from ..stats import HostMemoryStats
    from .device import Tensors

_AHEAD = 4  # reads for the loader's next copies: a demand load may have to wait behind so many


class HostTier:
    """A cache in host memory that others are loaded from.

    Args:
        cache: of experts as they are stored, whose link reads the disk.
    """

    def __init__(self, cache: ExpertCache) -> None:
        self.cache, self._experts = cache, cache.where.experts
        self._taken = False  # the pass of the last `take` is open: its expert is pinned

    def layer(self, index: int) -> TierLayer:
        """The source of a layer's experts."""
        return TierLayer(self, index)

    def ask(self, layer: int, expert: int) -> None:
        """Read an expert ahead, unless there are reads enough."""
        core = self.cache.core
        core.arrive()
        if len(core.under_way) < min(_AHEAD, self.cache.residency.slots - 1):
            self.cache.prefetch([layer * self._experts + expert], source="loads")

    def take(self, layer: int, expert: int) -> Tensors:
        """The tensors of an expert, unchanged until the next call. Waits.

        Raises:
            StoreError: a file cannot be read, or has changed. RuntimeFailure: the tier was closed.
        """
        core, key = self.cache.core, layer * self._experts + expert
        if self._taken:
            core.next()
            core.close()
        self._taken = False
        try:
            core.arrive(layer)
            core.plan(core.open(layer, [key], [1], 1, []), [])
            core.begin()
            core.load()
            core.next()  # the expert is there; a second call says that it has been used, and it may leave
        except BaseException:
            core.abandon()
            raise
        self._taken = True
        return self.cache.pool.slot(self.cache.residency.slot(key), layer)

    @property
    def stats(self) -> HostMemoryStats:
        """Counters since the start; from any thread."""
        found = self.cache.live_stats().host_memory
        assert found is not None  # its link reads a disk
        return found

    def close(self) -> None:
        """Stop reading. Safe to call twice."""
        self.cache.close()


class TierExpert:
    """A `PendingExpert` in the tier; used by the loader's thread only."""

    lasts: ClassVar[bool] = False
    __slots__ = ("_expert", "_layer", "_tier")

    def __init__(self, tier: HostTier, layer: int, expert: int) -> None:
        self._tier, self._layer, self._expert = tier, layer, expert

    def ask(self, behind: Sequence[TierExpert]) -> None:
        for one in (self, *behind):
            self._tier.ask(one._layer, one._expert)

    def tensors(self) -> Tensors:
        """Raises StoreError: a file cannot be read, or has changed."""
        return self._tier.take(self._layer, self._expert)


class TierLayer:
    """The source of one MoE layer in the tier."""

    def __init__(self, tier: HostTier, layer: int) -> None:
        self._tier, self._layer = tier, layer

    def expert(self, index: int) -> TierExpert:
        return TierExpert(self._tier, self._layer, index)
