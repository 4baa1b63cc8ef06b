"""One memory for expert slots and the KV cache, on transformers' paged cache.

    before a step is scheduled    what its requests, and those that wait, need        SharingRule
    more for the KV cache         experts leave, their slots' memory goes, blocks come, requests get them
    more for the experts          blocks that no request holds go, slots come

Both lie at fixed addresses, of which the first part is there (`cache.device.Arena`): slots and blocks are numbered as
ever, and only their last ones come and go. transformers' cache is made in full, with its own tensor, which is given
back before the slots get the memory; so the start needs what a run without sharing needs.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers.generation.continuous_batching.cache_allocators import CachePool

from ....errors import BudgetError, size
from ...budget import Shares, SharingRule
from ..cache.cache import ExpertCache
from ..cache.device import Arena
from ..stats import SharedMemoryStats

_TRASH = 2  # sectors in front of all others, which the cache needs always
_LEAST = 8  # the KV cache has an eighth of its blocks at least


class SectorPool(CachePool):
    """transformers' pool of sectors, of which it hands out the first `there`, those of lower numbers first."""

    free_sectors: list[int]

    def __init__(self, sectors: int, allocators: int, there: int) -> None:
        self.there = there
        super().__init__(sectors, allocators, _TRASH)

    def reset(self) -> None:
        super().reset()
        self.free_sectors = self.free_sectors[: self.there][::-1]

    def try_to_free_sectors(self) -> None:
        before = len(self.free_sectors)
        super().try_to_free_sectors()
        if len(self.free_sectors) > before:
            self.free_sectors.sort(reverse=True)

    @property
    def in_use(self) -> int:
        """How many sectors there must be for those that are in use."""
        free = set(self.free_sectors)
        return next((n for n in range(self.there, 0, -1) if n - 1 + _TRASH not in free), 0)

    def bound(self, sectors: int) -> None:
        """Hand out the first so many from now on. Raises ValueError: one behind them is in use."""
        if sectors < self.in_use:
            raise ValueError(f"{self.in_use} sectors are in use, {sectors} are to be there")
        come = range(_TRASH + sectors - 1, _TRASH + self.there - 1, -1)
        self.free_sectors = [*come, *(sector for sector in self.free_sectors if sector < _TRASH + sectors)]
        self.there = sectors


class SharedMemory:
    """The KV cache of one batcher and the expert slots beside it; on the loop's thread, between forwards.

    Args:
        experts: a cache with `memory`. resize: gives it another number of slots.
        alone: held while another thread uses the cache, which it does only where no request is in flight.
    """

    def __init__(
        self, experts: ExpertCache, resize: Callable[[int], None], alone: threading.Lock | None = None
    ) -> None:
        assert experts.memory is not None
        self._experts, self._slots, self._resize = experts, experts.memory, resize
        self._alone = threading.Lock() if alone is None else alone
        self._apart_bytes = experts.stats.expert_budget_bytes  # of experts, without sharing
        self._paged: Any = None
        self._arena: Arena
        self.rule: SharingRule
        self._forward = 0

    def adopt(self, paged: Any) -> None:
        """Put transformers' new cache into this memory; a cache that was reset stays as it is.

        Raises:
            BudgetError: there is no room.
        """
        if paged is self._paged:
            return
        sectors, nbytes, experts = paged.num_sectors, paged.bytes_per_sector, self._experts
        shares = Shares(
            experts.residency.slot_bytes, self._slots.least, self._slots.most,
            nbytes, min(sectors, max(2, -(-sectors // _LEAST))), sectors,
        )  # fmt: skip
        try:
            arena = self._slots.device.arena((_TRASH + sectors) * nbytes)
            pool = SectorPool(sectors, len(paged.cache_allocators), shares.least_blocks)
            paged.pool, paged.cache_tensor = pool, arena.tensor
            for allocator in paged.cache_allocators.values():
                allocator.register_cache_tensor(nbytes, sectors * nbytes, arena.tensor, pool)
            if arena.tensor.is_cuda:
                torch.cuda.empty_cache()  # the tensor that transformers had made
            arena.resize((_TRASH + sectors) * nbytes)  # all of it is this process's from now on
            arena.resize((_TRASH + shares.least_blocks) * nbytes)
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"the GPU has no room for a KV cache of {size((_TRASH + sectors) * nbytes)} beside what is on it",
                "lower --kv-tokens, or end what else uses the GPU",
            ) from error
        self._paged, self._arena, self.rule = paged, arena, SharingRule(shares)
        arena.tensor[: (_TRASH + shares.least_blocks) * nbytes].zero_()
        paged.num_sectors = shares.least_blocks
        tokens = paged.num_blocks * next(iter(paged.cache_allocators.values())).tokens_per_page
        experts.stats.shared = SharedMemoryStats(
            tokens * shares.least_blocks // sectors, tokens, self._slots.least, shares.slots(shares.least_blocks)
        )
        experts.stats.expert_budget_bytes = shares.slots(shares.least_blocks) * shares.slot_bytes
        self._take_slots(shares.slots(shares.least_blocks))

    def close(self) -> None:
        """There is no paged cache, or none any more: the slots have what they have without it."""
        if self._paged is None:
            return
        self._paged = None
        self._resize(self._slots.least)
        self._arena.close()
        self._experts.stats.shared, self._experts.stats.expert_budget_bytes = None, self._apart_bytes

    def stepped(self) -> None:
        """A forward has run, or there was none to run."""
        self._forward += 1

    @property
    def is_due(self) -> bool:
        """Whether `fit` may give blocks back."""
        return self.rule.is_due(self._forward)

    def fit(self, scheduler: Any) -> None:
        """Divide the memory by what the scheduler's requests need. Raises RuntimeError: a copy failed."""
        rule, pool = self.rule, self._paged.pool
        pool.try_to_free_sectors()
        wanted = rule.wanted(self._demand(scheduler), self._forward, pool.in_use)
        if wanted > rule.blocks:
            self._grow(wanted)
        elif wanted < rule.blocks:
            self._shrink(wanted)

    def fit_idle(self, scheduler: Any) -> None:
        """`fit` of a loop without work, unless another thread uses the cache now."""
        if self._alone.acquire(blocking=False):
            try:
                self.fit(scheduler)
            finally:
                self._alone.release()

    def grow_whole(self) -> bool:
        """The KV cache gets all its blocks; False: it has them."""
        most = self.rule.shares.most_blocks
        if self.rule.blocks == most:
            return False
        self._grow(most)
        return True

    def _demand(self, scheduler: Any) -> int:
        """Blocks that requests need for all of their tokens so far and a page more, with the scheduler's margin.

        What several hold counts once. Those that wait count as far as a step has room for them.
        """
        allocators = self._paged.cache_allocators.values()
        states = [*scheduler.active_requests.values(), *scheduler.waiting_requests.values()]
        states = states[: scheduler.max_requests_per_batch]  # in their order, but for requests that gave way
        sectors = 0
        for allocator in allocators:
            page, further, held = allocator.tokens_per_page, 0, set[int]()
            window = getattr(allocator, "sliding_window", None)
            for state in states:
                tokens = len(state.initial_tokens) + len(state.generated_tokens) + page
                own = allocator.block_table.get(state.request_id, ())
                held.update(own)
                further += max(0, -(-(tokens if window is None else min(tokens, window)) // page) - len(own))
            sectors += -(-(len(held) + further) // allocator.blocks_per_sector)
        return math.ceil(sectors / (1.0 - scheduler.safety_margin))

    def _grow(self, blocks: int) -> None:
        rule, nbytes = self.rule, self.rule.shares.block_bytes
        slots = rule.shares.slots(blocks)
        if slots < self._experts.residency.slots:
            self._resize(slots)
        self._arena.resize((_TRASH + blocks) * nbytes)
        self._arena.tensor[(_TRASH + rule.blocks) * nbytes : (_TRASH + blocks) * nbytes].zero_()
        self._hand_out(blocks)
        self._count(to_kv=1)

    def _shrink(self, blocks: int) -> None:
        """As far as no request holds a block in between; what only the prefix cache holds there goes."""
        rule, pool = self.rule, self._paged.pool
        allocators = self._paged.cache_allocators.values()
        held = [b // a.blocks_per_sector for a in allocators for table in a.block_table.values() for b in table]
        blocks = max(blocks, max(held, default=0) - _TRASH + 1)  # what is below them stays: its memory cannot go
        for allocator in allocators:
            first = (_TRASH + blocks) * allocator.blocks_per_sector
            drop_cached(pool, allocator, [b for b in allocator.ledger.cached_blocks if b >= first])
        pool.try_to_free_sectors()
        blocks = max(blocks, pool.in_use)
        if blocks >= rule.blocks:
            rule.settled(rule.blocks)
            return
        self._hand_out(blocks)
        self._slots.device.settle()
        self._arena.resize((_TRASH + blocks) * rule.shares.block_bytes)
        self._take_slots(rule.shares.slots(blocks))
        self._count(to_experts=1)

    def _take_slots(self, slots: int) -> None:
        """More slots; fewer where another process has taken the memory meanwhile, for which the KV cache has room."""
        there = self._experts.residency.slots
        while slots > there:
            with contextlib.suppress(torch.OutOfMemoryError):
                self._resize(slots)
                return
            slots = there + (slots - there) // 2

    def _hand_out(self, blocks: int) -> None:
        self._paged.pool.bound(blocks)
        self._paged.num_sectors = blocks  # of which transformers keeps a share free
        self.rule.settled(blocks)

    def _count(self, to_kv: int = 0, to_experts: int = 0) -> None:
        stats = self._experts.stats
        assert stats.shared is not None
        tokens = stats.shared.kv_tokens_most * self.rule.blocks // self.rule.shares.most_blocks
        stats.shared = replace(
            stats.shared, kv_tokens=tokens, to_kv=stats.shared.to_kv + to_kv,
            to_experts=stats.shared.to_experts + to_experts,
        )  # fmt: skip


def drop_cached(pool: Any, allocator: Any, blocks: list[int]) -> None:
    """Free these blocks of transformers' prefix cache, which no request holds."""
    ledger = allocator.ledger
    for block in blocks:
        del ledger.cached_blocks[block], ledger.hash_to_block[ledger.block_to_hash.pop(block)]
    pool.free_blocks(allocator.index, blocks)
