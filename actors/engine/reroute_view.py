"""What a rerouting rule is told of one layer, on every executor."""

from __future__ import annotations

import numpy as np

from ..policies.residency import State
from ..policies.routing import RerouteView
from .cache import ExpertCache


def reroute_view(cache: ExpertCache, layer: int, top_k: int) -> RerouteView:
    """Of a layer, as things stand."""
    states, slots = cache.standing(layer)
    available = np.array([state != State.ABSENT for state in states])
    free = slots - int(np.count_nonzero(available))
    return RerouteView(available, free, top_k, cache.vacant(layer))
