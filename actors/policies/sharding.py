"""Which GPU an expert belongs to, and which NDP worker: pure functions that every process computes for itself.

Expert parallelism with round-robin assignment, as in fMoE section 5: no table is sent, and no process can disagree
with another.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Literal

Ownership = Literal["layer-expert", "expert"]


def shard_of(layer: int, expert: int, experts: int, shards: int, ownership: Ownership = "layer-expert") -> int:
    """The shard, 0..G-1, that owns an expert; the lead is shard 0.

    layer-expert: `(layer * E + e) mod G`, balanced to one expert over the whole model. expert: `e mod G`, the same
    shard in every layer; where G does not divide E, the first shards own one more in each layer.

    Args:
        layer, expert: from 0. experts: E. shards: G.

    Raises:
        ValueError: a number is out of range.
    """
    if shards < 1 or layer < 0 or not 0 <= expert < experts:
        raise ValueError(f"no shard of {shards} owns expert {expert} of {experts} in layer {layer}")
    return (layer * experts + expert if ownership == "layer-expert" else expert) % shards


def owners(layers: int, experts: int, shards: int, ownership: Ownership = "layer-expert") -> list[int]:
    """The shard of each expert of all layers [L * E]."""
    return [shard_of(layer, e, experts, shards, ownership) for layer in range(layers) for e in range(experts)]


def owned_experts(layers: int, experts: int, shards: int, ownership: Ownership = "layer-expert") -> tuple[int, ...]:
    """Experts of all layers that each of G shards owns [G]."""
    counts = Counter(owners(layers, experts, shards, ownership))
    return tuple(counts[shard] for shard in range(shards))


def spread_by_bytes(nbytes: Sequence[int], workers: int) -> tuple[int, ...]:
    """The worker of each item: each goes, in order, to the worker with the fewest bytes so far, ties to the lower
    number.

    No two workers differ by more than the largest item. O(n log workers).

    Args:
        nbytes: of each item, such as an expert's replicas. workers: how many there are.

    Raises:
        ValueError: no worker, or an item of negative size.
    """
    if workers < 1 or any(n < 0 for n in nbytes):
        raise ValueError(f"cannot spread over {workers} workers, or an item has a negative size")
    held = [(0, worker) for worker in range(workers)]  # a heap as it stands
    owners = []
    for item in nbytes:
        total, worker = held[0]
        heapq.heapreplace(held, (total + item, worker))
        owners.append(worker)
    return tuple(owners)


def reassigned(owners: Sequence[int], nbytes: Sequence[int], living: Collection[int]) -> tuple[int, ...]:
    """`owners` with the items of lost workers spread over the living ones, as in `spread_by_bytes`; others stay.

    Args:
        owners: worker of each item. nbytes: of each item. living: the workers that remain.

    Raises:
        ValueError: no worker remains, or items and sizes differ in number.
    """
    workers = sorted(set(living))
    lost = [i for i, owner in enumerate(owners) if owner not in workers]
    sizes = dict(enumerate(nbytes))
    if len(owners) != len(sizes):
        raise ValueError(f"{len(owners)} items, but sizes of {len(sizes)}")
    heirs = spread_by_bytes([sizes[i] for i in lost], len(workers))
    out = list(owners)
    for item, heir in zip(lost, heirs, strict=True):
        out[item] = workers[heir]
    return tuple(out)
