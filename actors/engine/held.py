"""What a shard's cache holds, as it tells the lead with each answer.

    shard: occupied slots -> `told` -> ExpertResult.held -> `RemoteExperts.held` -> `understood` : lead

A bit for each expert of the model, so that one answer tells of all layers: slots serve all of them, and the load of one
layer evicts experts of others. At 6144 experts that is 770 bytes beside rows of several kilobytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..policies.residency import Residency

_FLAGS = 2


@dataclass(frozen=True, eq=False)
class Held:
    """One shard's cache at one moment.

    Attributes:
        here: [keys], which experts are resident or on their way.
        vacant: some slot holds nothing.
        resting: what it is asked to prefetch is not loaded now.
    """

    here: NDArray[np.bool_]
    vacant: bool
    resting: bool


def told(residency: Residency, resting: bool) -> NDArray[np.uint8]:
    """A cache of whole experts, packed: its experts' bits, then vacant, then resting."""
    bits = np.empty(residency.keys + _FLAGS, np.bool_)
    bits[:-_FLAGS] = residency.occupied()
    bits[-_FLAGS:] = residency.free_slots > 0, resting
    return np.packbits(bits)


def understood(packed: NDArray[np.uint8], keys: int) -> Held | None:
    """What `told` packed; None where these are not the bits of so many experts."""
    if packed.size != (keys + _FLAGS + 7) // 8:
        return None
    bits = np.unpackbits(packed, count=keys + _FLAGS).view(np.bool_)
    return Held(bits[:keys], bool(bits[keys]), bool(bits[keys + 1]))
