"""The other shards' caches as the lead knows them, for rules that go by where experts are.

A shard's last answer says what it held after that batch (`held.py`); what it was asked to prefetch since then counts
as on its way there. Between its answers only such prefetches change its cache, so the view is exact but for what those
evicted, what the shard refused, and copies that failed; where every forward has a batch for each shard, no view is
older than a forward. An expert that the view has and the shard lacks is loaded by the shard; one that the shard has and
the view lacks is replaced without need. Neither makes a result wrong.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..policies.routing import RerouteView
from .held import Held, understood
from .remote import RemoteExperts
from .shards import Shards

Mask = NDArray[np.bool_]


class PeerCache:
    """One shard's."""

    def __init__(self, peer: RemoteExperts, keys: int) -> None:
        self.peer, self._keys = peer, keys
        self._connection = -1
        self._packed: NDArray[np.uint8] | None = None
        self._held: Held | None = None
        self.filling = True  # since it was connected there has always been a vacant slot

    def look(self) -> Held | None:
        """As it is known now; None: it has told nothing since it was connected."""
        peer = self.peer
        if self._connection != peer.connections:
            self._connection, self.filling = peer.connections, True
        packed = peer.held
        if packed is not self._packed:
            self._packed = packed
            self._held = None if packed is None else understood(packed, self._keys)
        if self._held is not None and not self._held.vacant:
            self.filling = False
        return self._held


class PeerCaches:
    """Those of all shards but the lead.

    Args:
        shards: the peers. layers, experts: L and E.
    """

    def __init__(self, shards: Shards, layers: int, experts: int) -> None:
        owner = np.array([shards.owner_of(key) for key in range(layers * experts)], np.int64)
        self._owner, self._experts = owner, experts
        self._caches = [PeerCache(peer, len(owner)) for peer in shards.peers.values()]

    def join(self, layer: int, own: RerouteView) -> RerouteView:
        """The lead's own view of a layer, with what the others hold of it."""
        base = layer * self._experts
        keys = slice(base, base + self._experts)
        shard_of = self._owner[keys].copy()
        available = own.available.copy()
        filling = np.zeros(len(self._caches) + 1, np.bool_)
        for shard, cache in enumerate(self._caches, start=1):
            theirs = shard_of == shard
            if not cache.peer.available:
                shard_of[theirs] = 0  # the lead computes them, from its own slots
                continue
            held = cache.look()
            available[theirs] = False if held is None else held.here[keys][theirs]
            filling[shard] = cache.filling
            if held is None or not held.resting:
                coming = [key - base for key in cache.peer.asked if base <= key < base + self._experts]
                available[coming] = True
        return RerouteView(available, own.free_slots, own.top_k, own.vacant, shard_of, filling)
