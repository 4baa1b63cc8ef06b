"""Who runs the experts of one layer.

Where experts are split, keys are those of their segments, which load and run separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple, TypeAlias


class PlanError(ValueError):
    """No slot can be freed for the layer."""


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
