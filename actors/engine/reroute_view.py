"""What a rerouting rule is told of one layer, on every executor."""

from __future__ import annotations

import numpy as np

from ..policies.rerouting import RerouteView
from ..policies.residency import Residency, State


def reroute_view(residency: Residency, layer: int, experts: int, top_k: int) -> RerouteView:
    """Of a layer with so many experts, as things stand."""
    first, state = layer * experts, residency.state
    available = np.array([state(key) != State.ABSENT for key in range(first, first + experts)])
    free = residency.slots - int(np.count_nonzero(available))
    return RerouteView(available, free, top_k, residency.free_slots)
