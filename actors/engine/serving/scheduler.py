"""Which requests a step carries: transformers' first-come scheduler, with a bound on prompt rows and a prefix cache.

A block is a page of every layer. transformers' cache hashes each full block with the tokens before it, and keeps the
blocks of ended requests. A new request shares the longest run of blocks that its prompt begins with, and runs the rest:
one row at least, whose logits give the first token. Blocks of sliding windows are overwritten and are not shared.
Where keys depend on a sequence's length, only rows of the same regime are shared (`model.lengths`). Requests of
different salts share nothing: the first block is hashed with the salt, and so are all that follow it.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, Protocol

from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

from ..model.lengths import SequenceLengths
from .shared_memory import SharedMemory, drop_cached

NAME = "tiermoe"  # of `StepScheduler`, in transformers' registry
_SALTED = 16  # tokens at the beginning of the first block that carry the salt
_SECRET = secrets.token_bytes(32)  # of this process: no client can compute a hash


class Requests(Protocol):
    """What the scheduler asks about requests, by name or by transformers' `RequestState`.

    Attributes:
        lengths: of the model.
    """

    lengths: SequenceLengths

    def reads_prefix(self, name: str) -> bool:
        """Whether the request may share the blocks of earlier ones."""
        ...

    def prompt_of(self, state: Any) -> int | None:
        """Tokens of a request's prompt, as `SequenceLengths` counts them; None: the request was cancelled."""
        ...

    def salt_of(self, name: str) -> str | None:
        """None: the request was cancelled."""
        ...


class StepScheduler(FIFOScheduler):
    """Running requests first, then prompts in the order in which they came. transformers makes it; `serve` follows.

    A state's (transformers' `RequestState`) `tiermoe_prompt` and `tiermoe_salt` are those of its last forward.
    """

    starved_requests: list[Any]

    def serve(self, requests: Requests, memory: SharedMemory | None, prefill_chunk: int | None) -> None:
        """Whose requests it schedules.

        Args:
            memory: that the KV cache shares with experts; None: it has its own.
            prefill_chunk: prompt rows of a step that also carries running requests, at most; None: no bound of its own.
        """
        self.requests, self.memory, self.prefill_chunk = requests, memory, prefill_chunk

    def schedule_batch(self, token_budget: int, cache_budget: int) -> Any:
        """See transformers; token_budget: rows of the step."""
        decoding = sum(
            len(state.tokens_to_process)
            for state in self.active_requests.values()
            if state.status == RequestStatus.DECODING
        )
        if decoding and self.prefill_chunk is not None:
            token_budget = min(token_budget, decoding + self.prefill_chunk)
        self._rows = token_budget
        if self.memory is None:
            return super().schedule_batch(token_budget, cache_budget)
        self.memory.fit(self)
        found = super().schedule_batch(token_budget, cache_budget)
        # sectors that several kinds of attention leave half empty are more than requests alone need
        if (found[0] is None or self.starved_requests) and self.memory.grow_whole():
            if found[0] is None:
                return super().schedule_batch(token_budget, cache_budget)
            self.starved_requests = []
        return found

    @property
    def only_decodes(self) -> bool:
        """Whether there are requests, and all of them decode."""
        if self.waiting_requests or not self.active_requests:
            return False
        return all(state.status == RequestStatus.DECODING for state in self.active_requests.values())

    def register(self, state: Any) -> None:
        """Let later requests share the blocks that a forward filled.

        state: transformers' `RequestState`, after the forward; its next token, if known, has no row yet.
        """
        if not self.cache.use_prefix_sharing:
            return
        prompt, salt = state.tiermoe_prompt, state.tiermoe_salt
        if prompt is None or salt is None:  # a cancellation may come between the two
            return
        tokens = (state.initial_tokens + state.generated_tokens)[: state.position_offset]
        tokens = salted(self.requests.lengths.keys(tokens, prompt), salt)
        for allocator in self.cache.cache_allocators.values():
            allocator.mark_complete_blocks(state.request_id, tokens, len(tokens) // allocator.tokens_per_page)

    def feed_again(self) -> None:
        """Drop the keys of requests whose next forward feeds all of their tokens (`SequenceLengths.anew_in`)."""
        for state in list(self.active_requests.values()):
            if state.status == RequestStatus.DECODING and self.is_anew(state):
                self.finish_request(state.request_id)
                self.add_waiting_request(state.create_equivalent_initial_request())
        if not self.active_requests:
            self.block_new_requests = False  # set while others ran that gave way; nobody is left to end and lift it

    def is_anew(self, state: Any) -> bool:
        """Whether the next forward of a request that decodes feeds all of its tokens."""
        prompt = self.requests.prompt_of(state)
        return prompt is not None and prompt != state.tiermoe_prompt

    def _infer_request_tokens(self, state: Any, request_ids_to_remove_from_waiting: set[str]) -> list[int]:
        if state.status == RequestStatus.PENDING and not self.requests.reads_prefix(state.request_id):
            tokens: list[int] = state.remaining_prefill_tokens
        else:
            tokens = self._after_prefix(state, request_ids_to_remove_from_waiting)
        if self.cache.use_prefix_sharing:  # the request holds the blocks that it shares: they are not evicted
            needed = (state.request_id, state.current_len(), min(len(tokens), self._rows))
            for allocator in self.cache.cache_allocators.values():
                self._evict(allocator, allocator.needs_new_blocks(*needed))
        return tokens

    def _after_prefix(self, state: Any, request_ids_to_remove_from_waiting: set[str]) -> list[int]:
        """The tokens to run of a request, which takes the blocks that it shares."""
        if not self.cache.use_prefix_sharing or state.status != RequestStatus.PENDING:
            return list(super()._infer_request_tokens(state, request_ids_to_remove_from_waiting))
        prompt, salt = self.requests.prompt_of(state), self.requests.salt_of(state.request_id)
        begin = state.position_offset
        whole: list[int] = state.remaining_prefill_tokens
        if prompt is None or salt is None:
            return whole
        state.remaining_prefill_tokens = salted(self.requests.lengths.keys(whole, prompt), salt)
        super()._infer_request_tokens(state, request_ids_to_remove_from_waiting)
        state.remaining_prefill_tokens = whole[state.position_offset - begin :]
        tokens: list[int] = state.remaining_prefill_tokens
        return tokens

    def _try_to_meet_safety_margin(self) -> bool:
        if self.cache.use_prefix_sharing:
            for allocator in self.cache.cache_allocators.values():
                blocks = self.cache.num_sectors * allocator.blocks_per_sector
                self._evict(allocator, math.ceil(self.safety_margin * blocks))
        return bool(super()._try_to_meet_safety_margin())

    def _evict(self, allocator: Any, wanted: int) -> None:
        """Free the least recently used blocks that no request holds, until `wanted` are free or none is left.

        transformers would evict all of them at once.
        """
        pool, ledger = self.cache.pool, allocator.ledger
        free = pool.count_free_blocks(allocator.index) + pool.num_free_sectors * allocator.blocks_per_sector
        drop_cached(pool, allocator, list(islice(ledger.cached_blocks, max(0, wanted - free))))


def salted(tokens: Sequence[int], salt: str) -> list[int]:
    """Token ids as they are hashed: the same where the salt is, and of another salt at no prompt.

    Ids have fewer than 20 bits and a mask 31 for each, so two salts agree on a block of four or more tokens with a
    chance of 2**-44 at most, whatever the tokens are.
    """
    return [token ^ mask for token, mask in zip(tokens, _masks(salt), strict=False)] + list(tokens[_SALTED:])


@lru_cache(maxsize=4096)
def _masks(salt: str) -> tuple[int, ...]:
    digest = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), key=_SECRET, digest_size=4 * _SALTED).digest()
    return tuple(word & 0x7FFFFFFF for word in struct.unpack(f"<{_SALTED}I", digest))


def used_share(cache: Any) -> float:
    """Share of transformers' paged cache, at its largest, that open requests hold; what only the prefix cache holds
    counts as free.
    """
    free = cache.compute_free_capacity(relative=False)
    free += sum(len(part.ledger.cached_blocks) * part.bytes_per_block for part in cache.cache_allocators.values())
    used = cache.num_sectors * cache.bytes_per_sector - free
    return min(1.0, max(0.0, used / (cache.pool.num_sectors * cache.bytes_per_sector)))  # sizes may change meanwhile


SCHEDULER_MAPPING[NAME] = StepScheduler
