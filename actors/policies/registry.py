"""Who leaves the cache first.

Eviction policies by name, for a model of known shape.

Prefetch policies by name: what presets and the command line choose from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from .activeevict import ImportanceEviction
from .baselines import ActivationMatrixPrefetch, Predictor, PreGatedPrefetch, StridePrefetch
from .eviction import EvictionPolicy, Lfu, Lru, RandomOrder, SplitEviction, TwoWidths
from .fmoe import Expect, ExpertMapEviction, ExpertMapPolicy, ExpertMapPrefetch
from .fmoe.maps import ExpertMapStore
from .hobbit import MixedGatePrefetch
from .moepic import Lcp, SpeculativePrefetch
from .prefetch import LayerwisePrefetch, NextGatePrefetch, PopularityPrefetch, PrefetchPolicy, RandomPrefetch

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


def make_eviction(
    kind: str,
    layers: int,
    experts: int,
    split: bool = False,
    low_bit: bool = False,
    *,
    alpha: float = 0.5,
    gamma: float = 0.97,
    window: int = 128,
) -> EvictionPolicy:
    """A policy in its first state.

    Args:
        kind: a name in `EVICTION`, or importance. layers, experts: MoE layers and experts of each.
        split: the cache is cut, so that the tops of each layer have an order of their own.
        low_bit: replicas have slots of their own.
        alpha, gamma, window: of importance, see `ImportanceEviction`.

    Raises:
        KeyError: there is no such policy, or none for a cut.
    """
    if split:
        return SplitEviction(LAYER_EVICTION[kind], layers, experts)
    if kind == "importance":
        return ImportanceEviction(layers, experts, alpha, gamma, window)
    return TwoWidths(EVICTION[kind](), layers * experts) if low_bit else EVICTION[kind]()


PREFETCH = (
    "none", "next-gate", "speculative", "pre-gated", "random", "expert-map", "popularity", "activation-matrix",
    "stride", "layerwise",
)  # fmt: skip
_WIDTH = 512  # of a stored embedding, as `MatcherOptions.width` has it


@dataclass(frozen=True)
class PrefetchOptions:
    """What the policies are made from.

    layers, experts: L and E. top: experts per token, or per layer, to ask for. distance: layers ahead. predictors: of
    layers 0..L-distance-1, for stride. hidden, capacity, semantic, dynamic, expect: for expert maps, see
    `ExpertMapPolicy`, `ExpertMapStore` and `ExpertMapPrefetch`. precisions: T1 and T2, by which next-gate's guesses are
    asked for in full or in low precision; None: all in full.
    """

    layers: int
    experts: int
    top: int
    distance: int = 1
    synchronous: bool = False
    predictors: Sequence[Predictor] | None = None
    hidden: int = 0
    capacity: int = 1000
    semantic: bool = True
    dynamic: bool = True
    expect: Expect | None = None
    precisions: tuple[float, float] | None = None


def make_prefetch(kind: str, options: PrefetchOptions) -> PrefetchPolicy | None:
    """A policy in its first state; None for `none`.

    Raises:
        ValueError: unknown kind, a distance that it does not have, or stride without predictors.
    """
    o = options
    match kind:
        case "none":
            return None
        case "next-gate":
            if o.precisions is not None:
                return MixedGatePrefetch(o.layers, o.experts, o.top, o.distance, o.synchronous, *o.precisions)
            return NextGatePrefetch(o.layers, o.experts, o.top, o.distance, o.synchronous)
        case "speculative":
            return SpeculativePrefetch(o.layers, o.experts, o.top, o.synchronous)
        case "pre-gated":
            return PreGatedPrefetch(o.layers, o.experts, o.top, o.synchronous)
        case "random":
            return RandomPrefetch(o.layers, o.experts, o.top, o.synchronous)
        case "expert-map":
            store = ExpertMapStore(o.layers, o.experts, min(o.hidden, _WIDTH), o.distance, o.capacity)
            return ExpertMapPolicy(ExpertMapPrefetch(store, o.hidden, o.top, o.semantic, o.dynamic), o.hidden, o.expect)
        case "popularity":
            return PopularityPrefetch(o.layers, o.experts, o.top, o.distance, o.synchronous)
        case "activation-matrix":
            return ActivationMatrixPrefetch(o.layers, o.experts, o.top, o.distance, synchronous=o.synchronous)
        case "layerwise":
            return LayerwisePrefetch(o.layers, o.experts, o.distance, o.synchronous)
        case "stride":
            if o.predictors is None:
                raise ValueError("stride prefetch needs predictors")
            return StridePrefetch(o.predictors, o.experts, o.top, o.distance, o.synchronous)
    raise ValueError(f"no prefetch policy '{kind}'; there are {', '.join(PREFETCH)}")
