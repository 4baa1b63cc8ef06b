"""Who leaves the cache first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .base import EvictionPolicy
from .expert_map import ExpertMapEviction
from .importance import ImportanceEviction
from .lfu import Lfu
from .lru import Lru

__all__ = ["EVICTION", "HALF_LIFE", "EvictionPolicy", "ExpertMapEviction", "ImportanceEviction", "Lfu", "Lru"]

HALF_LIFE = 4096.0  # of the policies that forget, in layers run: 128 tokens of a model of 32 layers

EVICTION: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": Lru,
    "lfu": Lfu,
    "lfu-decay": partial(Lfu, half_life=HALF_LIFE),
    "expert-map": ExpertMapEviction,
    "expert-map-decay": partial(ExpertMapEviction, half_life=HALF_LIFE),
}
