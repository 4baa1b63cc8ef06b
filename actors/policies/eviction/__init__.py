"""Who leaves the cache first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .base import EvictionPolicy
from .expert_map import ExpertMapEviction
from .importance import ImportanceEviction
from .lcp import Lcp
from .lfu import Lfu
from .lru import Lru
from .per_layer import PerLayer
from .random_order import RandomOrder
from .split import SplitEviction
from .two_widths import TwoWidths

__all__ = [
    "EVICTION", "HALF_LIFE", "LAYER_EVICTION", "EvictionPolicy", "ExpertMapEviction", "ImportanceEviction", "Lcp",
    "Lfu", "Lru", "PerLayer", "RandomOrder", "SplitEviction", "TwoWidths",
]  # fmt: skip

HALF_LIFE = 4096.0  # of the policies that forget, in layers run: 128 tokens of a model of 32 layers

EVICTION: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": Lru,
    "lfu": Lfu,
    "lfu-decay": partial(Lfu, half_life=HALF_LIFE),
    "expert-map": ExpertMapEviction,
    "expert-map-decay": partial(ExpertMapEviction, half_life=HALF_LIFE),
    "lcp": Lcp,
    "random": RandomOrder,
}

# Those of which each layer can have one of its own (`PerLayer`).
LAYER_EVICTION: dict[str, Callable[[], EvictionPolicy]] = {
    "lru": Lru,
    "lfu": Lfu,
    "lfu-decay": partial(Lfu, half_life=HALF_LIFE / 32),
    "lcp": partial(Lcp, one_layer=True),
    "random": RandomOrder,
}
