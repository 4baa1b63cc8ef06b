"""A cache, shards and routers for tests of `engine.prefetching`, which note what is asked of them."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import torch

from tiermoe.actors.engine.host_view import HostViews, LayerView
from tiermoe.actors.engine.prefetching import RouterPrefetching
from tiermoe.actors.policies.prefetch import PrefetchGovernor, PrefetchPolicy

LAYERS, EXPERTS, HIDDEN = 4, 6, 5


@dataclass
class FakeCache:
    """Notes what is asked of it: (keys, keep, source)."""

    governor: PrefetchGovernor = field(default_factory=lambda: PrefetchGovernor(0.0))
    asked: list[tuple[list[int], set[int], str]] = field(default_factory=list)
    finished: list[tuple[list[int], int]] = field(default_factory=list)

    def prefetch(self, keys: Sequence[int], keep: AbstractSet[int], source: str) -> int:
        self.asked.append((list(keys), set(keep), source))
        return len(keys)

    def finish_prefetch(self, keys: Sequence[int], layer: int) -> None:
        self.finished.append((list(keys), layer))


class Resting(PrefetchGovernor):
    @property
    def resting(self) -> bool:
        return True

    def allows(self) -> bool:
        return False


class FakeShards:
    """Odd keys are theirs."""

    def __init__(self) -> None:
        self.told: list[tuple[int, list[int]]] = []

    def peer_of(self, key: int) -> Any:
        return ("shard/1", None) if key % 2 else None

    def prefetch(self, layer: int, keys: list[int]) -> None:
        self.told.append((layer, keys))


@dataclass(frozen=True)
class Block:
    router: Any


def make_routers() -> list[torch.Tensor]:
    """Weights [E, H] of each layer's router."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(EXPERTS, HIDDEN, generator=generator) for _ in range(LAYERS)]


def blocks_of(routers: Sequence[torch.Tensor | None]) -> Any:
    return [Block(None if w is None else lambda h, w=w: h @ w.T) for w in routers]


def prefetching(
    policy: PrefetchPolicy, cache: FakeCache, routers: Sequence[Any], shards: Any = None
) -> RouterPrefetching:
    cached: Any = cache
    return RouterPrefetching(policy, cached, blocks_of(routers), EXPERTS, shards)


def view_of(hidden: torch.Tensor, ids: torch.Tensor) -> LayerView:
    """What a layer of this input [T, H] and routing [T, K] shows."""
    return HostViews().look(0, hidden, ids, torch.ones(ids.shape))


def hidden_rows(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens))
