"""The plan of one layer: which experts run in which order, and the loads that make this possible.

Where experts are split, keys are those of their segments, which load and run separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple, TypeAlias


class PlanError(ValueError):
    """No slot can be freed for the layer."""


class Load(NamedTuple):
    """Bring `key` into the cache once the first `after` experts of the plan have run.

    evict: the expert that loses its slot; None: a free slot.
    """

    key: int
    evict: int | None
    after: int


class Remote(NamedTuple):
    """Run `key` on process `peer`, an NDP worker or shard, on its replica of `bits` bits; 0: full precision."""

    key: int
    bits: int
    peer: str


# what one peer runs: its name, the keys, and the bits of each
Part: TypeAlias = "tuple[str, list[int], list[int]]"


def by_peer(remote: Sequence[Remote]) -> list[Part]:
    """One part for each peer, in the order in which they come first."""
    parts: dict[str, Part] = {}
    for key, bits, peer in remote:
        _, keys, widths = parts.setdefault(peer, (peer, [], []))
        keys.append(key)
        widths.append(bits)
    return list(parts.values())


class Where(NamedTuple):
    """Who runs a layer's experts: `here` and `remote` together hold each once. keep: residents that leave last."""

    here: Sequence[int]
    keep: AbstractSet[int] = frozenset()
    remote: Sequence[Remote] = ()


class LayerPlan(NamedTuple):
    """What one layer does here, in order.

    `run`: `resident` resident ones, then `arriving` ones in flight, then those to load, in load order. `loads` is
    ordered by `after`; a `Load` at `after = i` is issued when `run[:i]` is done, so a working set larger than the pool
    runs in waves.
    """

    run: tuple[int, ...]
    resident: int
    arriving: int
    loads: tuple[Load, ...]
