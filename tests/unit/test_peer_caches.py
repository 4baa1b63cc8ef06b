"""What the lead knows of other shards' caches: packed bits, prefetches since, shards that are lost or new."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tiermoe.actors.engine.peers.shards import PeerCaches, told, understood
from tiermoe.actors.policies.adapmoe import RerouteView
from tiermoe.actors.policies.residency import Residency

L, E, G = 2, 6, 3


def residency(*keys: int, slots: int = 4) -> Residency:
    out = Residency(L * E, slots, 1)
    for key in keys:
        out.publish(out.reserve(key))
    return out


@pytest.mark.parametrize("resting", [False, True])
def test_what_is_told_is_understood(resting: bool) -> None:
    cache = residency(1, 7, 11)
    packed = told(cache, resting)
    assert packed.nbytes == 2
    held = understood(packed, L * E)
    assert held is not None
    assert np.flatnonzero(held.here).tolist() == [1, 7, 11]
    assert (held.vacant, held.resting) == (True, resting)
    cache.reserve(2)  # on its way
    cache.evict(7)
    cache.reserve(3)
    held = understood(told(cache, resting), L * E)
    assert held is not None
    assert np.flatnonzero(held.here).tolist() == [1, 2, 3, 11]
    assert not held.vacant
    cache.check_integrity()
    assert understood(packed, 4 * L * E) is None
    assert understood(np.zeros(0, np.uint8), L * E) is None


class _Peer:
    def __init__(self) -> None:
        self.available, self.connections, self.held, self.asked = True, 1, None, set()


class _Shards:
    def __init__(self) -> None:
        self.peers = {"shard/1": _Peer(), "shard/2": _Peer()}

    def owner_of(self, key: int) -> int:
        return key % G


@pytest.fixture
def shards() -> Any:
    return _Shards()


def _seen(caches: PeerCaches, layer: int, *own: int) -> tuple[list[int], list[int], list[bool]]:
    view = caches.join(layer, RerouteView(np.isin(np.arange(E), own), 1, 2, 0))
    assert view.shard_of is not None
    assert view.filling is not None
    return np.flatnonzero(view.available).tolist(), view.shard_of.tolist(), view.filling.tolist()


def test_the_view_joins_what_each_shard_holds_of_its_own(shards: Any) -> None:
    caches, (one, two) = PeerCaches(shards, L, E), shards.peers.values()
    assert _seen(caches, 0, 0) == ([0], [0, 1, 2] * 2, [False, True, True])  # nothing told yet
    one.held = told(residency(1, 7, 10), False)  # 7 and 10 are experts 1 and 4 of layer 1
    two.held = told(residency(2, 8, 11, 5), False)
    assert _seen(caches, 0, 0, 4) == ([0, 1, 2, 5], [0, 1, 2] * 2, [False, True, False])  # 4 is not run on the lead
    assert _seen(caches, 1) == ([1, 2, 4, 5], [0, 1, 2] * 2, [False, True, False])
    two.held = told(residency(2), False)
    assert _seen(caches, 1) == ([1, 4], [0, 1, 2] * 2, [False, True, False])  # it was full once


def test_prefetches_since_the_last_answer_are_on_their_way(shards: Any) -> None:
    caches, (one, two) = PeerCaches(shards, L, E), shards.peers.values()
    one.held, two.held = told(residency(1), False), told(residency(2), True)
    one.asked, two.asked = {4, 10}, {5, 11}  # experts 4 and 5 of both layers; shard 2 rests
    assert _seen(caches, 0)[0] == [1, 2, 4]
    assert _seen(caches, 1)[0] == [4]


def test_experts_of_a_lost_shard_are_where_the_lead_has_them(shards: Any) -> None:
    caches, (one, two) = PeerCaches(shards, L, E), shards.peers.values()
    one.held = told(residency(1, 4, 7, 10), False)
    two.held = told(residency(2, 5, 8, 11), False)
    assert _seen(caches, 0, 0)[2] == [False, False, False]
    one.available = False
    assert _seen(caches, 0, 0, 4) == ([0, 2, 4, 5], [0, 0, 2] * 2, [False, False, False])
    one.available, one.connections, one.held, one.asked = True, 2, None, set()  # restarted: empty, as far as is known
    assert _seen(caches, 0, 0, 4) == ([0, 2, 5], [0, 1, 2] * 2, [False, True, False])
    one.held = told(residency(1), False)
    assert _seen(caches, 0, 0)[2] == [False, True, False]


def test_bits_of_another_model_tell_nothing(shards: Any) -> None:
    caches, (one, _) = PeerCaches(shards, L, E), shards.peers.values()
    one.held = np.full(9, 255, np.uint8)
    assert _seen(caches, 0) == ([], [0, 1, 2] * 2, [False, True, True])
